"""The modules of sala that one streaming chat passes through, from the socket to the last chunk.

The list is part of the architecture page: a module that is new on the path is either added there or does not belong.
Code that also runs while no request is in flight, such as timers, does not count.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx2
import pytest

import sala
from sala.server.app import create_app
from sala.server.settings import Settings
from tests.server.conftest import read_events, wait_for
from tests.server.live import serving

ROOT = Path(sala.__file__).parent
PAGE = ROOT.parent / "docs" / "concepts" / "life-of-a-token.md"
MAX_MODULES = 30
IDLE_S = 1.5  # longer than the period of every timer
CHAT = "/v1/chat/completions"


class Tracer:
    """Collects the code that runs in all threads that are started after `threading.setprofile`."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            self.codes.add(frame.f_code)

    def trace(self, work: Callable[[], None]) -> set[CodeType]:
        self.codes = set()
        self.is_on = True
        work()
        self.is_on = False
        return self.codes


def modules_of(codes: set[CodeType]) -> set[str]:
    files = {Path(code.co_filename) for code in codes}
    return {file.relative_to(ROOT).as_posix() for file in files if file.is_relative_to(ROOT)}


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    tracer = Tracer()
    threading.setprofile(tracer)
    yield tracer
    threading.setprofile(None)


def body(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 4, "ignore_eos": True, "stream": True}


def listed_modules() -> set[str]:
    section = PAGE.read_text().partition("## Modules that a streaming chat passes through\n")[2]
    fence = re.search(r"```text\n(.*?)```", section, re.DOTALL)
    assert fence is not None
    return {line.split()[0] for line in fence[1].splitlines() if line.strip()}


def test_a_streaming_chat_passes_through_the_modules_of_the_architecture_page(
    tracer: Tracer, tiny: Path, tmp_path: Path
) -> None:
    settings = Settings(model=str(tiny), models_dir=tmp_path, device="cpu", ctx=2048, drain_s=1.0, port=0)
    with serving(settings, create_app(settings)) as live:
        loaded = live.app.state.runtime.loaded
        wait_for(lambda: loaded, 20)
        with httpx2.Client(base_url=f"http://127.0.0.1:{live.port}", timeout=60, trust_env=False) as client:
            assert client.post(CHAT, json=body("Hello")).status_code == 200  # imports what is imported lazily
            wait_for(lambda: all(model.service.num_requests == 0 for model in loaded.values()))
            in_background = tracer.trace(lambda: time.sleep(IDLE_S))
            answers: list[str] = []
            in_request = tracer.trace(lambda: answers.append(client.post(CHAT, json=body("Hello again")).text))
    assert read_events(answers[0])[-1] == "[DONE]"
    modules = modules_of(in_request - in_background)
    assert modules == listed_modules()
    assert len(modules) <= MAX_MODULES
