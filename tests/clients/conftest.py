"""Clients as people install them, each in an environment of its own, against `sala serve` with the embedded model.

Those that are installed in a few seconds are always tried; where no package index answers, a warning says that they
were not. `SALA_TEST_CLIENTS=1` adds the others, and what cannot be installed fails. A directory instead of 1 keeps the
environments for the next time, and 0 leaves all of them out.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import NoReturn

import pytest
from filelock import FileLock

INSTALL_S = 300
RUN_S = 600
WANTED = os.environ.get("SALA_TEST_CLIENTS", "")
QUICK = {f"test_python[{name}]" for name in ("openai_chat", "openai_responses", "langchain_chat", "litellm_completion")}
ASKED_FOR = {"test_llama_cpp": "SALA_TEST_LLAMA_CPP", "test_vllm": "SALA_TEST_VLLM"}  # by a variable of their own
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "20")
GREETING = re.compile(r"sala listens at (http://[^/]+)/v1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_ours = Path(__file__).parent in item.path.parents and "room" in getattr(item, "fixturenames", ())
        if is_ours and WANTED == "0":
            item.add_marker(pytest.mark.skip(reason="SALA_TEST_CLIENTS is 0"))
        elif is_ours and not WANTED and item.name not in (*QUICK, *ASKED_FOR):
            item.add_marker(pytest.mark.skip(reason="set SALA_TEST_CLIENTS=1 for the clients that take their time"))


@dataclass(frozen=True)
class Environment:
    """A directory with installed packages; `run` starts a program of theirs."""

    folder: Path
    path: str

    def run(self, *command: str, folder: Path | None = None, limit_s: float = RUN_S, **variables: str) -> str:
        """What it writes; a program that fails fails the test."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SALA_", "PYTHON"))}
        environment = {**inherited, "PATH": f"{self.path}{os.pathsep}{os.environ['PATH']}", **variables}
        ended = subprocess.run(
            command, cwd=folder or self.folder, env=environment, capture_output=True, text=True, timeout=limit_s
        )
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
        return ended.stdout

    def versions(self, packages: Iterable[str]) -> dict[str, str]:
        """The installed versions of packages from PyPI or npm."""
        if (modules := self.folder / "node_modules").is_dir():
            return {name: json.loads((modules / name / "package.json").read_text())["version"] for name in packages}
        paths = [str(path) for path in self.folder.glob("lib/python*/site-packages")]
        names = [name.partition("[")[0] for name in packages]
        return {name: next(iter(distributions(name=name, path=paths))).version for name in names}


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The place of the environments; workers that test side by side share it."""
    if WANTED not in ("", "0", "1") and Path(WANTED).expanduser().is_dir():
        return Path(WANTED).expanduser().resolve()
    base = tmp_path_factory.getbasetemp()
    room = (base if worker_id == "master" else base.parent) / "clients"
    room.mkdir(exist_ok=True)
    return room


@pytest.fixture(scope="session")
def index() -> None:
    """Leaves the clients untried where no package index answers, before time is spent."""
    look = ("install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "openai")
    _try([*PIP, *look], "no package index answers")


@pytest.fixture(scope="session")
def install(room: Path, index: None) -> Callable[..., Environment]:
    """An environment with these packages from the index; they are left untried if they cannot be had."""

    def make(*packages: str) -> Environment:
        folder = room / _name(packages)
        with FileLock(f"{folder}.lock"):
            if not (folder / "installed").exists():
                _try([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
                into = ("--python", str(folder / "bin" / "python"))
                _try([*PIP, *into, "install", "--quiet", "--no-compile", *packages])
                (folder / "installed").touch()
        return Environment(folder, str(folder / "bin"))

    return make


@pytest.fixture(scope="session")
def install_node(room: Path) -> Callable[..., Environment]:
    """The same for packages from npm."""

    def make(*packages: str) -> Environment:
        folder = room / _name(packages, "node")
        with FileLock(f"{folder}.lock"):
            if not (folder / "installed").exists():
                folder.mkdir(exist_ok=True)
                _try(["npm", "install", "--silent", "--no-audit", "--prefix", str(folder), *packages])
                (folder / "installed").touch()
        return Environment(folder, str(folder))

    return make


def _name(packages: tuple[str, ...], prefix: str = "python") -> str:
    return "-".join([prefix, *(re.sub(r"\W+", "_", package) for package in packages)])


def _try(command: list[str], otherwise: str = "cannot be installed") -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except FileNotFoundError:
        leave_untried(f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        leave_untried(f"not installed within {INSTALL_S} s: {' '.join(command[-3:])}")
    except subprocess.CalledProcessError as error:
        leave_untried(f"{otherwise}: {' '.join(command[-3:])}: {' '.join(error.stderr.split())[-300:]}")


def leave_untried(why: str) -> NoReturn:
    """Skip, with a warning in the summary of the run; fail where a variable demands the clients."""
    message = f"NOT CHECKED: whether real clients work with the server. {why}"
    if is_demanded():
        pytest.fail(message)
    warnings.warn(message, stacklevel=2)
    pytest.skip(message)


def is_demanded() -> bool:
    wanted = os.environ.get("SALA_TEST_CLIENTS", "")
    return wanted not in ("", "0") or any(name in os.environ for name in ASKED_FOR.values())


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory, index: None) -> Iterator[str]:
    """`sala serve` as it is, with the embedded model, whose base comes from the index too."""
    yield from _serve(tmp_path_factory.mktemp("models"), "--ctx", "4096", "--max-tokens", "128")


@pytest.fixture
def tiny_address(tiny: Path, tmp_path: Path) -> Iterator[str]:
    """`sala serve` with a tiny random model, and no hub that could be reached."""
    yield from _serve(
        tmp_path, "-m", str(tiny), "--ctx", "2048", "--max-tokens", "16", "--hub-url", "http://127.0.0.1:9"
    )


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """The address of a server with the embedded model and these flags."""
    with ExitStack() as stack:
        serving = contextmanager(_serve)
        yield lambda *flags: stack.enter_context(serving(tmp_path_factory.mktemp("models"), *flags))


def _serve(models: Path, *flags: str) -> Iterator[str]:
    start = "import sys; from sala.cli import run; sys.exit(run(['serve', *sys.argv[1:]]))"
    folders = ["--models-dir", str(models), "--files-dir", f"{models}-files"]  # shared with no other server
    command = [sys.executable, "-c", start, "--port", "0", "--device", "cpu", *folders, *flags]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SALA_")}
    with (models / "log").open("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield _wait_until_ready(server, models / "log")
        finally:
            server.terminate()
            server.wait(60)


def _wait_until_ready(server: "subprocess.Popen[bytes]", log: Path) -> str:
    """Its address, once a model is loaded."""
    while server.poll() is None:
        found = GREETING.search(log.read_text())
        if found is not None and _is_ready(found[1]):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health/ready", timeout=10) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except OSError:
        return False
