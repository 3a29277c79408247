"""SIGKILL at random moments: nothing half written is ever visible, and everything goes on afterwards.

A few kills of each kind in every run; `SALA_TEST_KILLS` sets how many. `benchmarks/kills.py` keeps what the kills met.
"""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sala.checkpoint.random import write_random
from sala.engine.sessions import SUFFIX, SessionStore
from sala.errors import CheckpointError
from sala.lab.quantize.pipeline import draft_of, quantize_model
from sala.models.download import PARTIAL, REGISTRY
from tests.chaos import jobs
from tests.chaos.server import free_port
from tests.quant.prose import prose
from tests.server.fake_hub import FakeHub, serve

NUM_KILLS = int(os.environ.get("SALA_TEST_KILLS", "2"))
pytestmark = pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
Files = dict[str, bytes]


def read_all(directory: Path) -> Files:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def fork() -> ForkServerContext:
    """Processes that have imported everything already, so that a kill costs only what it interrupts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.jobs"])
    return context


@dataclass
class Killer:
    """Runs a job once to its end, then kills it at random moments."""

    fork: ForkServerContext
    room: Path
    job: Callable[..., None]
    rng: random.Random
    record: Callable[[str, object], None]
    seconds: float = 0.0
    met: Counter[str] = field(default_factory=Counter)

    def run(self, *arguments: Any) -> None:
        began = time.monotonic()
        process = self.fork.Process(target=self.job, args=arguments)
        process.start()
        process.join(300)
        assert process.exitcode == 0
        self.seconds = time.monotonic() - began

    def kill(self, *arguments: Any) -> None:
        """Every other time soon after the job has begun to write, since it computes for most of the time."""
        before = set(self.room.rglob("*"))
        process = self.fork.Process(target=self.job, args=arguments)
        process.start()
        if self.rng.random() < 0.5:
            process.join(self.rng.random() * self.seconds)
        else:
            while process.is_alive() and not set(self.room.rglob("*")) - before:
                time.sleep(0.0005)
            process.join(self.rng.random() * 0.02)
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            self.note("the job had ended")
        else:
            self.note("after it began to write" if set(self.room.rglob("*")) - before else "before it wrote")

    def note(self, what: str) -> None:
        self.met[what] += 1
        self.record(what, self.met[what])


@pytest.fixture
def killer(
    fork: ForkServerContext,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> Callable[..., Killer]:
    return lambda job: Killer(fork, tmp_path, job, random.Random(request.node.name), record_property)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model"
    write_random(path, jobs.CONFIG)
    return path


def test_a_session_is_saved_or_not(killer: Callable[..., Killer], tiny: Path, tmp_path: Path) -> None:
    save = killer(jobs.save_session)
    prompt = [index * 7 % 256 for index in range(1500)]
    save.run(tiny, tmp_path / "whole", prompt)
    complaints: list[str] = []
    with jobs.load(tiny) as llm:

        def answer(directory: Path) -> list[int]:
            """Continue the session that is there: everything that it holds is read, checked and used."""
            llm.reset()
            store = SessionStore(directory, jobs.open_store(llm, directory).fingerprint, complaints.append)
            tokens = llm.load_session(store, jobs.SESSION)
            assert tokens == prompt
            return llm.generate([*tokens, 1], temperature=0, max_tokens=8).token_ids

        wanted = answer(tmp_path / "whole")
        for number in range(NUM_KILLS):
            place = tmp_path / str(number)
            save.kill(tiny, place, prompt)
            if not any(place.glob(f"*{SUFFIX}")):
                save.run(tiny, place, prompt)
            assert answer(place) == wanted
    assert not complaints


def test_a_quantized_model_is_there_or_not(killer: Callable[..., Killer], small: Path, tmp_path: Path) -> None:
    quantize = killer(jobs.quantize)
    text = tmp_path / "prose.txt"
    text.write_text(prose(200))
    quantize.run(small, tmp_path / "whole", text)
    for number in range(NUM_KILLS):
        target = tmp_path / str(number)
        quantize.kill(small, target, text)
        if not target.exists():
            quantize.run(small, target, text)
        elif draft_of(target).exists():  # killed when the model was there already
            with pytest.raises(CheckpointError, match="exists already"):
                quantize_model(small, target, jobs.SETTINGS)
        assert read_all(target) == read_all(tmp_path / "whole")
        assert {path.name for path in tmp_path.iterdir()} == {"whole", text.name, *map(str, range(number + 1))}


def test_a_run_goes_on_to_the_same_losses(killer: Callable[..., Killer], small: Path, tmp_path: Path) -> None:
    tune = killer(jobs.tune)
    examples = tmp_path / "train.jsonl"
    jobs.write_examples(examples)

    def result(target: Path) -> tuple[Any, bytes]:
        losses = [entry.get("loss") for entry in json.loads((target / "losses.json").read_text())["losses"]]
        return losses, (target / "adapter_model.safetensors").read_bytes()

    tune.run(small, tmp_path / "whole", examples)
    for number in range(NUM_KILLS):
        target = tmp_path / str(number)
        tune.kill(small, target, examples)
        if not target.exists():
            tune.run(small, target, examples)
        assert result(target) == result(tmp_path / "whole")


def test_a_download_goes_on(killer: Callable[..., Killer], tiny: Path, tmp_path: Path) -> None:
    pull = killer(jobs.download)
    files = {file.name: file.read_bytes() for file in tiny.iterdir()}
    with serve(FakeHub(files, pause=0.005)) as hub:
        pull.run(tmp_path / "whole", hub.url)
        for number in range(NUM_KILLS):
            models = tmp_path / str(number)
            pull.kill(models, hub.url)
            if not (models / "org--model").exists():
                pull.run(models, hub.url)
            found = read_all(models / "org--model")
            found.pop(REGISTRY)
            assert found == files
            assert not [path for path in (models / PARTIAL).glob("*") if path.is_dir()]


CHAT = {"max_tokens": 6, "temperature": 0}


class Client:
    """Asks long questions, whose prefixes the server writes to its disk."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, number: int) -> str:
        body = {"messages": [{"role": "user", "content": f"{number} " * 200}], "max_tokens": 6, "temperature": 0}
        answer = httpx2.post(f"{self.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        return str(answer.json()["choices"][0]["message"]["content"])

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}/health/ready", trust_env=False).status_code == 200:
                    return
            time.sleep(0.02)
        raise TimeoutError

    def keep_asking(self) -> None:
        with suppress(httpx2.TransportError):  # it is killed
            for number in range(1000):
                self.ask(number)


def test_a_server_answers_the_same(
    killer: Callable[..., Killer], fork: ForkServerContext, tiny: Path, tmp_path: Path
) -> None:
    """The next server finds what the last one has cached, whole or not at all."""
    rng, cache, complaints = random.Random(0), tmp_path / "cache", list[str]()
    serving = killer(jobs.serve)
    wanted: list[str] = []
    with jobs.load(tiny) as llm:
        fingerprint = jobs.open_store(llm, cache).fingerprint
    for number in range(NUM_KILLS + 1):  # the last one shows what the one before has left
        port = free_port()
        client = Client(port)
        process = fork.Process(target=jobs.serve, args=(tiny, tmp_path / "models", cache, port))
        process.start()
        if number % 4 != 1:  # otherwise it is killed while it starts
            client.wait()
            answers = [client.ask(number) for number in range(3)]
            wanted = wanted or answers
            assert answers == wanted
        threading.Thread(target=client.keep_asking, daemon=True).start()
        process.join(rng.random())
        process.kill()
        process.join()
        serving.note("while it started" if number % 4 == 1 else "while it answered")
        store = SessionStore(cache, fingerprint, complaints.append)
        for entry in store.entries():
            store.read(entry)  # raises if a byte of it is wrong
        assert not complaints
