"""Models over HTTP with the real runtime: loaded, fetched and deleted at once, from strangers, without harm."""

import json
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from sala.models.download import PARTIAL, REGISTRY
from sala.server.runtime import open_model
from tests.server.conftest import Server, wait_for
from tests.server.fake_hub import FakeHub, serve, tree

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def hub(tiny: Path) -> Iterator[FakeHub]:
    """A hub that has the tiny model."""
    with serve(FakeHub({file.name: file.read_bytes() for file in tiny.iterdir()})) as fake:
        yield fake


def chat(server: Server, model: str) -> Any:
    return server.post(CHAT, {"model": model, "messages": HELLO, "max_tokens": 2})


def delete(server: Server, model: str) -> tuple[int, str | None]:
    with server.client() as client:
        answer = client.delete(f"/v1/models/{model}")
    return answer.status_code, answer.json().get("error", {}).get("code")


def listed(server: Server) -> set[str]:
    with server.client() as client:
        return {card["id"] for card in client.get("/v1/models").json()["data"]}


def fetch(server: Server, repo_id: str = "org/model") -> Any:
    job = server.post("/v1/models/download", {"repo_id": repo_id}).json()["job"]
    with server.client() as client:
        wait_for(
            lambda: client.get(f"/v1/models/download/{job['id']}").json()["status"] not in ("queued", "running"), 20
        )
        return client.get(f"/v1/models/download/{job['id']}").json()


def test_a_model_from_the_hub_to_the_bin(make_server: Callable[..., Server], hub: FakeHub, tmp_path: Path) -> None:
    """Fetched, asked by either name, not deleted while it is loaded, then deleted for good."""
    server = make_server(hub_url=hub.url)
    assert fetch(server)["status"] == "done"
    for name in ("org/model", "org--model"):
        assert chat(server, name).json()["model"] == "org--model"
        before = tree(tmp_path / "models")
        assert delete(server, name) == (409, "model_loaded")
        assert tree(tmp_path / "models") == before
    assert server.post("/v1/models/unload", {"model": "org/model"}).status_code == 200
    assert delete(server, "org/model") == (200, None)
    assert delete(server, "org/model") == (404, "model_not_found")
    assert chat(server, "org/model").status_code == 404
    assert not (tmp_path / "models" / "org--model").exists()
    assert chat(server, "tiny").status_code == 200


def test_a_model_is_not_deleted_while_a_request_loads_it(
    make_server: Callable[..., Server], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    shutil.copytree(tiny, tmp_path / "models" / "second")
    runtime, may_go = server.app.state.runtime, threading.Event()

    def slowly(*arguments: Any) -> Any:
        may_go.wait(20)
        return open_model(*arguments)

    monkeypatch.setattr("sala.server.runtime.open_model", slowly)
    before = tree(tmp_path / "models")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(chat, server, "second")
        wait_for(lambda: runtime.is_loading)
        assert delete(server, "second") == (409, "model_busy")
        assert {name: what for name, what in tree(tmp_path / "models").items() if PARTIAL not in name} == before
        may_go.set()
        assert asked.result(20).json()["model"] == "second"


Move = Callable[[Any], Any]


def cancel(client: Any) -> Any:
    running = [job["id"] for job in client.get("/v1/models/download").json()["data"] if job["status"] == "running"]
    return client.delete(f"/v1/models/download/{running[0] if running else 'none'}")


MOVES: dict[str, tuple[Move, set[int]]] = {  # what clients do, and what they may get for it
    "list": (lambda client: client.get("/v1/models"), {200}),
    "fetch": (lambda client: client.post("/v1/models/download", json={"repo_id": "org/model"}), {202, 409}),
    "cancel": (cancel, {200, 404}),
    "load": (lambda client: client.post("/v1/models/load", json={"model": "org/model"}), {200, 404, 503}),
    "unload": (lambda client: client.post("/v1/models/unload", json={"model": "org/model"}), {200, 404, 409}),
    "delete": (lambda client: client.delete("/v1/models/org/model"), {200, 404, 409}),
}


OFTEN = [12 if name == "load" else 1 if name == "cancel" else 6 for name in MOVES]  # so that some fetches end


def test_everything_at_once(make_server: Callable[..., Server], hub: FakeHub, tmp_path: Path) -> None:
    """Clients list, fetch, load and delete as they like: in the end the list is what is on disk, and all of it whole.

    503 is for a model that was deleted after it was found and before it was read.
    """
    server = make_server(hub_url=hub.url)
    seen: set[tuple[str, int]] = set()
    began = time.monotonic()
    wanted = {("fetch", 202), ("load", 200), ("unload", 200), ("delete", 200)}

    def play(seed: int) -> None:
        dice = random.Random(seed)
        with server.client() as client:
            while time.monotonic() < began + (3 if wanted <= seen else 120):
                name = dice.choices(list(MOVES), OFTEN)[0]
                seen.add((name, MOVES[name][0](client).status_code))

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert wanted <= seen
    assert {(name, status) for name, status in seen if status not in MOVES[name][1]} == set()
    server.app.state.downloads.close()
    on_disk = {path.name for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")}
    assert listed(server) == {*on_disk, "tiny"}
    for name in on_disk:
        assert {file.name for file in (tmp_path / "models" / name).iterdir()} == {*hub.files, REGISTRY}
    assert chat(server, "tiny").status_code == 200


CODE = "import pathlib; pathlib.Path({mark!r}).touch()\n"


def test_code_in_a_models_directory_is_never_run(
    make_server: Callable[..., Server], tiny: Path, tmp_path: Path
) -> None:
    """Not even if its configuration asks for it."""
    model, mark = tmp_path / "models" / "own", tmp_path / "was-here"
    server = make_server()
    shutil.copytree(tiny, model)
    for name in (
        "modeling_sala.py",
        "configuration_sala.py",
        "tokenization_sala.py",
        "__init__.py",
        "sitecustomize.py",
    ):
        (model / name).write_text(CODE.format(mark=str(mark)))
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "modeling_sala.X", "AutoConfig": "configuration_sala.X"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    assert chat(server, "own").status_code == 200
    assert server.post("/v1/models/unload", {"model": "own"}).status_code == 200
    (model / "config.json").write_text(json.dumps({**config, "trust_remote_code": True}))
    assert chat(server, "own").status_code == 503
    (model / "model.safetensors").unlink()  # nothing but the pickle is left
    assert chat(server, "own").status_code == 404
    assert not mark.exists()


PANIC = "a" * 60 + "b"  # a text that a spoilt tokenizer cannot encode


def spoil_tokenizer(model: Path, target: Path) -> None:
    """Write the tokenizer with a pattern that takes exponential time, so that the library gives up."""
    definition = json.loads((model / "tokenizer.json").read_text())
    hostile = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    steps = [hostile, definition["pre_tokenizer"]]
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (target / "tokenizer.json").write_text(json.dumps(definition))


def test_a_tokenizer_that_panics(make_server: Callable[..., Server], tiny: Path, tmp_path: Path) -> None:
    """An error as JSON for that request alone, with a stream and without."""
    model = tmp_path / "models" / "own"
    server = make_server()
    shutil.copytree(tiny, model)
    spoil_tokenizer(tiny, model)
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PANIC}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PANIC}], "stream": True}),
        ("/v1/tokenize", {"prompt": PANIC}),
    ):
        answer = server.post(path, {**body, "model": "own"})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "tokenizer_failed"
    assert chat(server, "own").status_code == 200


def lie(path: Path, header: dict[str, Any], size: int = 0, length: int | None = None) -> None:
    text = json.dumps(header).encode()
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", length or len(text)) + text)
        handle.truncate(8 + len(text) + size)


def spoil_shape(file: Path) -> None:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name.endswith("q_proj.weight"))
    header[name]["shape"].reverse()
    header[name]["shape"][0] *= 2
    header[name]["shape"][1] //= 2
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


SPOILED: dict[str, Callable[[Path], Any]] = {
    "a header of a terabyte": lambda file: file.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
    "a header of a gigabyte": lambda file: lie(file, {}, 2 << 30, 1 << 30),
    "a tensor of four terabytes": lambda file: lie(
        file, {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    ),
    "another model": lambda file: lie(file, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 8),
    "half a file": lambda file: file.write_bytes(file.read_bytes()[:5000]),
    "another shape": spoil_shape,
}  # fmt: skip


@pytest.mark.parametrize("problem", SPOILED)
def test_spoiled_weights_are_refused_without_taking_memory(
    make_server: Callable[..., Server], tiny: Path, tmp_path: Path, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()
    shutil.copytree(tiny, tmp_path / "models" / "bad")
    SPOILED[problem](tmp_path / "models" / "bad" / "model.safetensors")
    before, loaded = psutil.Process().memory_info().rss, server.app.state.runtime.loaded["tiny"]
    with caplog.at_level("ERROR", "sala.server"):
        answer = chat(server, "bad")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
    assert str(tmp_path) not in answer.text
    (line,) = [record.getMessage() for record in caplog.records if "cannot be loaded" in record.getMessage()]
    assert "\n" not in line
    assert psutil.Process().memory_info().rss < before + (200 << 20)
    assert server.app.state.runtime.loaded["tiny"] is loaded  # it did not go for a model that cannot come
    assert chat(server, "tiny").status_code == 200


WITHOUT_ASSERTS = """
import sys
from pathlib import Path
from sala.models.download import pull
from sala.checkpoint.reader import Checkpoint
from sala.errors import SalaError
from sala.models.catalog import Library
from sala.llm import LLM
from sala.text.tokenizer import ChatTemplate

model, room = Path(sys.argv[1]), Path(sys.argv[2])
llm = LLM(model, device="cpu", ctx=512)
if not llm.chat([{"role": "user", "content": "hi"}], max_tokens=3).token_ids:
    sys.exit("no answer")
attempts = {
    "id": lambda: pull(room, "../x"),
    "delete": lambda: Library(room).delete("../outside"),
    "weights": lambda: Checkpoint(room / "bad"),
    "template": lambda: ChatTemplate("{{ ''.__class__.__mro__ }}", {}, {}).render([]),
    "sampling": lambda: llm.generate("x", temperature=-1),
    "count": lambda: llm.generate("x", n=10**9),
    "ids": lambda: llm.generate([10**9]),
    "messages": lambda: llm.chat([{"role": 5}]),
    "length": lambda: llm.generate([1] * 513),
    "grammar": lambda: llm.generate("x", regex="("),
    "session": lambda: llm.open_store(room).find("../x"),
    "bias": lambda: llm.generate("x", logit_bias={10**6: 1.0}),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except SalaError:
        continue
    sys.exit(f"{name} is not checked")
print("checked", len(attempts), sys.flags.optimize)
"""


def test_checks_do_not_depend_on_asserts(tiny: Path, tmp_path: Path) -> None:
    """Under `python -O` every assert is gone; what guards against strangers is still there."""
    (tmp_path / "room" / "bad").mkdir(parents=True)
    (tmp_path / "room" / "bad" / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    (tmp_path / "outside").mkdir()
    command = [sys.executable, "-O", "-c", WITHOUT_ASSERTS, str(tiny), str(tmp_path / "room")]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert out.stdout == "checked 12 1\n", out.stderr[-2000:]
    assert (tmp_path / "outside").is_dir()
