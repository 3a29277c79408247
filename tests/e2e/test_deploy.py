"""The server as it is deployed: under the restrictions of the systemd unit, and in the file system of the image.

Mount namespaces take the place of systemd and Docker. What they restrict is read from `examples/deploy`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
IS_ROOT = os.geteuid() == 0
USER = 65534 if IS_ROOT else 0  # without privileges, the only user of a namespace is its root
UNSHARE = ["unshare", "--mount", "--propagation", "private", *([] if IS_ROOT else ["--map-root-user"])]
PATH = "/compiler:/usr/bin:/bin"  # a compiler that does not optimize, which is quick
PYTHON = sorted({str(ROOT), sys.prefix, sys.base_prefix})
# $1 is where the new root is put; then come the user, the directories that it may write, and what Python needs.
ENTER = r"""
set -e
root=$1 user=$2 own=$3 needed=$4; shift 4
mount -t tmpfs -o mode=755 tmpfs "$root"
for name in bin sbin lib lib32 lib64 usr; do
    if [ -L /$name ]; then cp -a /$name "$root/$name"
    elif [ -d /$name ]; then mkdir "$root/$name"; mount --rbind /$name "$root/$name"; fi
done
mkdir "$root/compiler"; printf '#!/bin/sh\nexec /usr/bin/g++ "$@" -O0\n' > "$root/compiler/g++"
chmod 755 "$root/compiler/g++"
mkdir "$root/etc" "$root/proc" "$root/dev" "$root/tmp"
for name in passwd group hosts ld.so.cache alternatives localtime; do
    cp -a /etc/$name "$root/etc" 2>/dev/null || true
done
mount --rbind /proc "$root/proc"; mount --rbind /dev "$root/dev"
mkdir "$root/etc/sala"; cp "$DEPLOY/sala.toml" "$root/etc/sala"
for path in $own; do mkdir -p "$root$path"; mount -t tmpfs -o mode=700,uid=$user,gid=$user tmpfs "$root$path"; done
for path in $needed; do mkdir -p "$root$path"; mount --bind "$path" "$root$path"; done
cp -r "$MODEL" "$root$MODELS"; chown -R $user:$user "$root$MODELS"
for path in usr $needed; do mount -o remount,bind,ro "$root/$path"; done
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -o remount,ro "$root"
exec chroot "$root" "$@"
"""


def settings(file: str) -> dict[str, list[str]]:
    """Return the values of a unit by name."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / file).read_text().splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@contextmanager
def inside(
    room: Path, model: Path, models: str, own: list[str], command: list[str], environment: dict[str, str]
) -> Iterator["subprocess.Popen[str]"]:
    place = room / "root"
    place.mkdir()
    drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
    drop += ["--bounding-set=-all", "--inh-caps=-all"] if IS_ROOT else []
    variables = [f"{name}={value}" for name, value in environment.items()]
    enter = ["sh", "-c", ENTER, "sh", str(place), str(USER), " ".join(own), " ".join(PYTHON)]
    here = {**os.environ, "DEPLOY": str(DEPLOY), "MODEL": str(model), "MODELS": models}
    whole = [*UNSHARE, *enter, *(drop if IS_ROOT else []), "env", "-i", *variables, *command]
    process = subprocess.Popen(whole, env=here, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def serve(process: "subprocess.Popen[str]", headers: dict[str, str]) -> list[str]:
    """Return the log of the start and of an answer."""
    assert process.stderr is not None
    log: list[str] = []
    for line in process.stderr:
        log.append(line)
        if "listens at" in line:
            break
    threading.Thread(target=log.extend, args=(process.stderr,), daemon=True).start()
    found = re.search(r"listens at http://([\d.]+):(\d+)", "".join(log))
    assert found is not None, "".join(log)
    url = f"http://127.0.0.1:{found[2]}/v1/chat/completions"
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}).encode()
    asked = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(asked, timeout=120) as answer:  # noqa: S310
        assert json.load(answer)["usage"]["completion_tokens"] > 0
    return log


def kernels(process: "subprocess.Popen[str]", directory: str) -> list[Path]:
    return list(Path(f"/proc/{process.pid}/root{directory}").glob("sala/kernels/*.so"))


def is_permitted() -> bool:
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "setpriv", "chroot", "g++"))):
        return False
    test = [*UNSHARE, "sh", "-c", 'mount -t tmpfs tmpfs "$0"', "/mnt"]
    return subprocess.run(test, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not is_permitted(), reason="needs mount namespaces and a C++ compiler")
UNIT = settings("sala.service")
COMMAND = [sys.executable, "-m", "sala", "serve"]
PYTHON_ENV = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def unit_environment() -> dict[str, str]:
    words = (word.partition("=") for line in UNIT["Environment"] for word in line.split())
    return {name: value for name, _, value in words}


def unit_directories() -> list[str]:
    """Return what the unit lets the server write: the system is read-only, and homes are hidden."""
    assert UNIT["ProtectSystem"] == ["strict"]
    assert UNIT["ProtectHome"] == UNIT["PrivateTmp"] == UNIT["DynamicUser"] == ["yes"]
    return [f"/var/lib/{UNIT['StateDirectory'][0]}", f"/var/cache/{UNIT['CacheDirectory'][0]}"]


def unit_command() -> list[str]:
    _, *words = UNIT["ExecStart"][0].split()
    assert words[0] == "serve"
    return [*COMMAND, *words[1:], "--device", "cpu", "-m", "tiny", "--port", "0"]


def test_the_unit(tiny: Path, tmp_path: Path) -> None:
    """It answers, and its compiled kernels are in the cache directory of the unit, as are cached prefixes."""
    environment = {"PATH": PATH, "HOME": "/", **PYTHON_ENV, **unit_environment()}
    assert set(environment) >= {"SALA_MODELS_DIR", "SALA_FILES_DIR", "SALA_CACHE_DIR", "XDG_CACHE_HOME"}
    models = f"{environment['SALA_MODELS_DIR']}/tiny"
    own = [*unit_directories(), str(Path(models).parent)]
    with inside(tmp_path, tiny, models, own, unit_command(), environment) as process:
        log = serve(process, {})
        assert not [line for line in log if "kernels" in line or "cannot" in line], log
        assert kernels(process, environment["XDG_CACHE_HOME"])
        assert Path(f"/proc/{process.pid}/root{environment['SALA_CACHE_DIR']}").is_dir()


def test_the_unit_without_a_compiler(tiny: Path, tmp_path: Path) -> None:
    """It answers, and the log says what is missing."""
    environment = {**PYTHON_ENV, **unit_environment(), "PATH": "/nowhere"}
    models = f"{environment['SALA_MODELS_DIR']}/tiny"
    own = [*unit_directories(), str(Path(models).parent)]
    command = [str(shutil.which("env")), "PATH=/nowhere", *unit_command()]
    with inside(tmp_path, tiny, models, own, command, {**environment, "PATH": "/usr/bin:/bin"}) as process:
        log = serve(process, {})
        assert any("no C++ compiler" in line and "sala doctor" in line for line in log), log


def test_the_image(tiny: Path, tmp_path: Path) -> None:
    """A user of its own with a home directory, volumes for models and files, and a compiler."""
    text = (DEPLOY / "Dockerfile").read_text()
    environment = dict(re.findall(r"(SALA_\w+)=(\S+)", text.partition("\nENV ")[2].partition("\n")[0]))
    volumes = re.search(r"^VOLUME (.+)$", text, re.MULTILINE)
    assert volumes is not None
    assert {environment["SALA_MODELS_DIR"], environment["SALA_FILES_DIR"]} == set(volumes[1].split())
    assert re.search(r"apt-get install .*g\+\+", text)
    assert re.search(r"^USER sala$", text, re.MULTILINE)
    home = "/home/sala"
    key = "a-key-of-more-than-16-letters"
    environment |= {"PATH": PATH, "HOME": home, "SALA_API_KEY": key, **PYTHON_ENV}
    models = f"{environment['SALA_MODELS_DIR']}/tiny"
    command = [*COMMAND, "--device", "cpu", "-m", "tiny", "--port", "0"]
    with inside(tmp_path, tiny, models, [*volumes[1].split(), home], command, environment) as process:
        log = serve(process, {"authorization": f"Bearer {key}"})
        assert not [line for line in log if "kernels" in line], log
        assert kernels(process, f"{home}/.cache")
