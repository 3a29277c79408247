"""`sala pull`, `list`, `rm` and `ps` as people use them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pexpect
import pytest

from sala.models.download import PARTIAL
from tests.command import sala as run
from tests.server.fake_hub import COMMIT, TOKEN, FakeHub, serve, tree
from tests.server.test_library import make, make_weights

START = "from sala import cli; [cli.COMMANDS.setdefault(name, '') for name in ('pull', 'list', 'rm', 'ps')]; cli.main()"
MIRROR = "http://mirror.example"
SALA = [sys.executable, "-c", START]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    files = {file.name: file.read_bytes() for file in make(tmp_path / "source").iterdir()}
    files["model.safetensors"] = make_weights(tmp_path / "large", 1_000_000)
    with serve(FakeHub(files)) as hub:
        yield hub


def environment(hub: FakeHub, models: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.url, "SALA_MODELS_DIR": str(models), "HF_TOKEN": TOKEN}


def sala(hub: FakeHub, models: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(*arguments, env=environment(hub, models))


def test_pull_list_rm(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["modeling.py"] = b"x"
    models = tmp_path / "models"
    out = sala(hub, models, "pull", "org/model@main")
    assert out.returncode == 0, out.stderr
    assert out.stdout == "org--model\n"
    assert "left out, because it can run code: modeling.py" in out.stderr
    assert "downloading org/model" in out.stderr
    assert "of it there" not in out.stderr
    assert "ready: " in out.stderr
    again = sala(hub, models, "pull", "org/model")
    assert (again.returncode, again.stdout) == (0, "org--model\n")
    assert "there already" in again.stderr
    assert sala(hub, models, "pull", f"org/model@{COMMIT}").stdout == "org--model\n"
    other = sala(hub, models, "pull", f"org/model@{'e' * 40}")
    assert (other.returncode, other.stdout) == (1, "")
    assert "remove it first: sala rm org/model" in other.stderr
    listed = sala(hub, models, "list").stdout
    assert all(word in listed for word in ("org--model", "org/model", "KiB", "quantization"))
    embedded, entry = json.loads(sala(hub, models, "list", "--json").stdout)
    assert (embedded["id"], embedded["path"], embedded["is_assembled"]) == ("smol-sala", None, False)
    assert (entry["id"], entry["repo_id"], entry["revision"]) == ("org--model", "org/model", COMMIT)
    unasked = sala(hub, models, "rm", "org/model")
    assert unasked.returncode == 2
    assert "--yes" in unasked.stderr
    assert (models / "org--model").exists()
    assert sala(hub, models, "rm", "org/model", "--yes").returncode == 0
    assert not (models / "org--model").exists()
    assert sala(hub, models, "rm", "org/model", "--yes").returncode == 1
    assert json.loads(sala(hub, models, "list", "--json").stdout) == [embedded]
    assert re.search("smol-sala .*not assembled yet: sala setup", sala(hub, models, "list").stdout)


def test_whole_lines_in_a_pipe(hub: FakeHub, tmp_path: Path, tiny: Path) -> None:
    name = "model-" + "x" * 120
    shutil.copytree(tiny, tmp_path / "models" / name)
    for verb, lines in (("list", 3), ("show", 15)):
        out = sala(hub, tmp_path / "models", verb, *([name] if verb == "show" else []))
        assert out.stderr == ""
        assert out.stdout.count("\n") == lines
        assert "\x1b" not in out.stdout
        assert name in out.stdout


def test_errors(hub: FakeHub, tmp_path: Path) -> None:
    models = make(tmp_path / "models" / "own").parent
    before = tree(tmp_path)
    for arguments, code, words in (
        (["pull", "../x"], 2, "organisation/name"),
        (["pull", "a/b@"], 2, "revision"),
        (["pull", "org/model", "--hub", "ftp://x"], 2, "--hub-url"),
        (["rm", "..", "--yes"], 1, "there is no model"),
        (["rm", "/etc", "--yes"], 1, "there is no model"),
        (["ps", "--url", "http://127.0.0.1:9"], 1, "no server answers"),
        (["ps", "--url", "file:///etc/passwd"], 2, "--url"),
    ):
        out = sala(hub, models, *arguments)
        assert (out.returncode, words in out.stderr) == (code, True), (arguments, out.stderr)
        assert out.stderr.count("\n") == 1
        assert out.stdout == ""
    assert tree(tmp_path) == before
    unknown = sala(hub, models, "pull", "org/unknown")
    assert unknown.returncode == 1
    assert "does not exist or is private" in unknown.stderr
    assert TOKEN not in unknown.stderr


def test_ctrl_c_then_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause, models = 0.1, tmp_path / "models"
    process = subprocess.Popen(
        [*SALA, "pull", "org/model"], stderr=subprocess.PIPE, text=True, env=environment(hub, models)
    )
    part = models / PARTIAL / f"org--model@{COMMIT}" / "model.safetensors.part"
    for _ in range(300):
        if part.exists() and part.stat().st_size > 100_000:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "the same command resumes the download: sala pull org/model" in errors
    assert "Traceback" not in errors
    listed = sala(hub, models, "list")
    assert "unfinished download; resume: sala pull org/model" in listed.stderr
    hub.pause = 0
    out = sala(hub, models, "pull", "org/model")
    assert out.returncode == 0
    assert "of it there" in out.stderr
    assert "range" in hub.requests_of("model.safetensors")[-1].headers


def behind_a_proxy(hub: FakeHub, models: Path) -> dict[str, str]:
    """Where the hub is http://mirror.example, which keeps its weights on another host."""
    hub.redirect = "https://files.example/{name}"
    found = {**environment(hub, models), "HTTP_PROXY": hub.url, "HTTPS_PROXY": hub.url, "SALA_HUB_URL": MIRROR}
    return {name: value for name, value in found.items() if name.lower() != "no_proxy" and name != "HF_ENDPOINT"}


def test_redirects_to_other_hosts_are_followed_where_an_option_names_them(hub: FakeHub, tmp_path: Path) -> None:
    variables, file = behind_a_proxy(hub, tmp_path / "models"), tmp_path / "sala.toml"
    file.write_text('hub_hosts = ["files.example"]\n')
    refused = subprocess.run([*SALA, "pull", "org/model"], capture_output=True, text=True, env=variables, check=False)
    assert refused.returncode == 1
    assert "redirects to files.example, which is not one of its own hosts" in refused.stderr
    assert "--hub-hosts" in refused.stderr
    assert not hub.requests_of("files.example:443")
    for flags, more in (
        (["--hub-hosts", "files.example"], {}),
        (["--config", str(file)], {}),
        ([], {"SALA_HUB_HOSTS": "other.example, files.example"}),
    ):
        hub.seen.clear()
        process = subprocess.Popen(
            [*SALA, "pull", "org/model", *flags], stderr=subprocess.PIPE, text=True, env={**variables, **more}
        )
        while process.poll() is None and not any(seen.path == "files.example:443" for seen in hub.seen):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)  # it would try again for a while
        _, errors = process.communicate(timeout=30)
        assert [seen.path for seen in hub.seen if seen.path.endswith(":443")], (flags, more, errors)


def test_where_models_are_kept(hub: FakeHub, tmp_path: Path) -> None:
    file, place = tmp_path / "sala.toml", tmp_path / "elsewhere"
    file.write_text(f'models_dir = "{place}"\nhub_url = "{hub.url}"\n')
    variables = {"HF_TOKEN": TOKEN, "SALA_CONFIG": str(file)}
    out = run("pull", "org/model", env=variables)
    assert (out.returncode, out.stdout) == (0, "org--model\n"), out.stderr
    assert (place / "org--model" / "config.json").is_file()
    for arguments, more in ((["--config", str(file)], {}), (["--models-dir", str(place)], {}), ([], variables)):
        assert "org--model" in run("list", *arguments, env=more).stdout
    assert run("rm", "org/model", "--yes", "--models-dir", str(place)).returncode == 0
    assert not (place / "org--model").exists()


def test_models_are_found_where_an_options_file_says(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "sala.toml"
    file.write_text(f'models_dir = "{tmp_path / "kept"}"\nmax_tokens = 1\n')
    shutil.copytree(tiny, tmp_path / "kept" / "named")
    command = ["generate", "-m", "named", "hello", "--device", "cpu", "--ctx", "128"]
    for flags, more in (([], {"SALA_CONFIG": str(file)}), (["--config", str(file)], {"SALA_MODELS_DIR": ""})):
        out = run(*command, *flags, env=more)
        assert out.returncode == 0, out.stderr
    missing = run(*command, env={"SALA_MODELS_DIR": str(tmp_path / "empty")})
    assert (missing.returncode, "there is no model 'named'" in missing.stderr) == (1, True)


def test_on_a_terminal(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause, models = 0.05, tmp_path / "models"
    child = pexpect.spawn(
        SALA[0], [*SALA[1:], "pull", "org/model"], env={**environment(hub, models), "TERM": "xterm"}, timeout=30,
        dimensions=(24, 100),
    )  # fmt: skip
    child.expect(r"model\.safetensors.*MB")
    child.expect("ready")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    child = pexpect.spawn(SALA[0], [*SALA[1:], "rm", "org/model"], env=environment(hub, models), timeout=30)
    child.expect("remove org--model")
    child.sendline("n")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert (models / "org--model").exists()


def test_ps(hub: FakeHub, tmp_path: Path) -> None:
    cards = [
        {
            "id": "a\x1b[31mb" + "c" * 120,
            "loaded": True,
            "context_length": 131072,
            "requests": {"running": 3, "waiting": 5},
            "cache": {
                "hit_rate": 0.925,
                "tiers": {"device": {"prefixes": 7, "used_bytes": 3 << 19, "size_bytes": 5 << 30}},
            },
        },
        {"id": "other", "loaded": False},
    ]
    keys = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"data": cards}).encode())

        def log_message(self, *_: object) -> None:
            """Silence."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        out = sala(hub, tmp_path, "ps", "--url", url, "--api-key", "k")
        assert out.returncode == 0, out.stderr
        assert all(word in out.stdout for word in ("c" * 120, "131,072", " 3", " 5"))
        assert all(word in out.stdout for word in ("92%", "1.5 MiB of 5.00 GiB"))
        assert "\x1b" not in out.stdout
        assert "other" not in out.stdout
        assert json.loads(sala(hub, tmp_path, "ps", "--url", url, "--json").stdout) == cards[:1]
        assert keys == ["Bearer k", None]
        assert sala(hub, tmp_path, "ps", "--url", url + "/x").returncode == 1
        cards.clear()
        assert "no model is loaded" in sala(hub, tmp_path, "ps", "--url", url).stderr
    finally:
        server.shutdown()
        server.server_close()
