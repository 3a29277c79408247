"""The modules of sala that one streaming chat passes through, from the socket to the last chunk."""

import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import httpx2

import sala
from sala.server.app import create_app
from sala.server.settings import Settings

from .conftest import read_events
from .live import serving

ROOT = Path(sala.__file__).parent
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True, "temperature": 0.5}


class Tracer:
    """Collects the code that runs in any thread that was started while it is installed."""

    def __init__(self):
        self.codes: set[CodeType] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            self.codes.add(frame.f_code)


def test_a_streaming_chat(tiny, tmp_path) -> None:
    settings = Settings(model=str(tiny), models_dir=tmp_path, device="cpu", ctx=2048, drain_s=1.0, port=0)
    from tests.server.conftest import wait_for

    tracer = Tracer()
    threading.setprofile(tracer)
    try:
        with serving(settings, create_app(settings)) as live:
            wait_for(lambda: live.app.state.runtime.loaded, 20)
            with httpx2.Client(base_url=f"http://127.0.0.1:{live.port}", timeout=30, trust_env=False) as client:
                client.post("/v1/chat/completions", json=BODY)
                wait_for(lambda: next(iter(live.app.state.runtime.loaded.values())).service.num_requests == 0)
                tracer.is_on = True
                text = client.post(
                    "/v1/chat/completions", json={**BODY, "messages": [{"role": "user", "content": "Hello again"}]}
                ).text
                tracer.is_on = False
    finally:
        threading.setprofile(None)
    assert read_events(text)[-1] == "[DONE]"
    files = {Path(code.co_filename) for code in tracer.codes}
    modules = {str(file.relative_to(ROOT)) for file in files if file.is_relative_to(ROOT)}
    print(len(modules))
    print("\n".join(sorted(modules)))
    by = {}
    for code in tracer.codes:
        f = Path(code.co_filename)
        if f.is_relative_to(ROOT):
            by.setdefault(str(f.relative_to(ROOT)), set()).add(code.co_qualname)
    for k in sorted(by):
        print(k, sum(1 for _ in open(ROOT / k)), sorted(by[k]))
