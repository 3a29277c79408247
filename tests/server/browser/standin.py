"""A server that speaks the API without a model: what it says depends on a word in the last message.

Run it by hand to look at the page: python -m tests.server.browser.standin
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sala.server.http import page as web

KEY = "open-sesame"
CONTEXT = 1_048_576
STEPS = 24  # of reading a long prompt

MARKDOWN = """\
## Three long rivers

Lengths of rivers are **hard to measure**: it depends on which spring is taken for the *beginning*, and on how closely \
the bends are followed.

| River | Length | Flows into |
|:--|--:|:--|
| Nile | 6,650 km | Mediterranean Sea |
| Amazon | 6,400 km | Atlantic Ocean |
| Yangtze | 6,300 km | East China Sea |

1. Take a map of the finest scale you can get.
2. Decide what counts:
   - the farthest spring,
   - the main arm at the mouth.

```python
def length(points: list[tuple[float, float]]) -> float:
    \"\"\"Along the bends, from point to point.\"\"\"
    return sum(dist(a, b) for a, b in zip(points, points[1:]))  # in km
```

> The finer the ruler, the longer the river.

The length measured with a ruler of size $e$ grows as $L(e) \\sim e^{1-D}$, where \\(D\\) is the fractal dimension:

$$
D = \\lim_{e \\to 0} \\frac{\\log N(e)}{\\log (1/e)}, \\qquad
N(e) = \\sum_{i=1}^{n} \\left\\lceil \\frac{\\ell_i}{e} \\right\\rceil
$$

More in [this overview](https://example.org/rivers); `points` come from a survey that costs $5 to $6 per km.
"""

HOSTILE = """\
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) [data](data:text/html,<script>1</script>) <a href="javascript:1">x</a>

| <b onmouseover=window.hacked=4>cell</b> | x |
|---|---|
| <iframe srcdoc="<script>parent.hacked=5</script>"> | y |

```html
</code></pre><script>window.hacked = 6</script>
```

![picture](https://evil.example/track.png)

$\\href{javascript:window.hacked=7}{x}$ $\\htmlStyle{position:fixed}{y}$ $\\includegraphics{https://evil.example/z.png}$

\\(<img src=x onerror=window.hacked=8>\\) $\\text{<script>window.hacked=9</script>}$

<svg><style><img src=x onerror=window.hacked=10></style></svg>
<math><mtext><script>window.hacked=11</script></mtext></math>

[ref]: javascript:window.hacked=12
[a][ref] <javascript:window.hacked=13>
"""

THOUGHT = (
    "The user wants to know about long rivers. There is more than one answer, because the length depends on where one "
    "begins to measure. I should say that first, then give a table with rounded numbers, and end with a way to "
    "measure it oneself. "
) * 3


def create_standin(key: str | None = None) -> FastAPI:
    """An app with the real page and an invented API."""
    app = FastAPI()
    app.include_router(web.router)
    app.state.key = key
    app.state.requests = []
    app.state.aborted = 0

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if not _is_known(request):
            return _error(401, "the API key is missing; send it as Authorization: Bearer KEY", "invalid_api_key")
        card = {"object": "model", "created": 0, "owned_by": "sala"}
        names = [("demo", True), ("smol-sala", False)]
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {**card, "id": name, "loaded": loaded, "context_length": CONTEXT, "trained_length": 32768}
                    for name, loaded in names
                ],
            }
        )

    @app.post("/v1/chat/completions/input_tokens")
    async def count(request: Request) -> Response:
        body = await request.json()
        return JSONResponse({"input_tokens": sum(_count(message["content"]) for message in body["messages"])})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        if not _is_known(request):
            return _error(401, "the API key is missing; send it as Authorization: Bearer KEY", "invalid_api_key")
        body = await request.json()
        app.state.requests.append(body)
        last = body["messages"][-1]["content"]
        if "too long" in last:
            message = "the prompt has 1,200,000 tokens and the context holds 1,048,576"
            return _error(400, message, "context_length_exceeded")
        if "busy" in last:
            return _error(429, "64 requests are waiting", "queue_full", {"Retry-After": "7"})
        return StreamingResponse(_stream(app, body), media_type="text/event-stream")

    return app


def _is_known(request: Request) -> bool:
    key = request.app.state.key
    return key is None or request.headers.get("authorization") == f"Bearer {key}"


def _error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


def _count(text: str) -> int:
    return max(1, len(text) // 4)


async def _stream(app: FastAPI, body: dict[str, Any]) -> AsyncIterator[str]:
    try:
        async for chunk in _chunks(body):
            yield chunk
    except asyncio.CancelledError:
        app.state.aborted += 1
        raise


async def _chunks(body: dict[str, Any]) -> AsyncIterator[str]:
    last = body["messages"][-1]["content"]
    total = sum(_count(message["content"]) for message in body["messages"])
    cached = sum(_count(message["content"]) for message in body["messages"][:-1])
    async for progress in _reading(total, cached):
        yield _event({"choices": [], "prompt_progress": progress})
    yield ": ping\n\n"
    question = last[-200:]
    if "think" in question:
        for piece in _pieces(THOUGHT):
            yield _event({"choices": [_choice({"reasoning_content": piece})]})
            await asyncio.sleep(0.03)
    text = _answer_to(question)
    for index, piece in enumerate(_pieces(text)):
        if "cut" in question and index == 6:
            return
        if "break" in question and index == 6:
            yield _event({"error": {"message": "the engine stopped", "type": "server_error", "code": None}})
            return
        yield _event({"choices": [_choice({"content": piece})]})
        await asyncio.sleep(0.12 if "slow" in question else 0.012)
    yield _event({"choices": [_choice({}, "length" if "limit" in question else "stop")]})
    written = _count(text)
    usage = {
        "prompt_tokens": total,
        "completion_tokens": written,
        "total_tokens": total + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    timings = {"prompt_per_second": 18_400.0, "predicted_per_second": 41.3, "cache_n": cached}
    yield _event({"choices": [], "usage": usage, "timings": timings})
    yield "data: [DONE]\n\n"


async def _reading(total: int, cached: int) -> AsyncIterator[dict[str, float]]:
    began = time.monotonic()
    steps = STEPS if total - cached > 10_000 else 1
    for step in range(steps + 1):
        done = cached + (total - cached) * step // steps
        yield {"total": total, "cache": cached, "processed": done, "time_ms": (time.monotonic() - began) * 1000}
        await asyncio.sleep(0.12 if steps > 1 else 0.01)


def _answer_to(question: str) -> str:
    if "html" in question:
        return HOSTILE
    if "slow" in question:
        return "One word after another, and another one, until somebody says that it is enough. " * 20
    if "short" in question:
        return "Yes: all of it is kept."
    return MARKDOWN


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), 9):
        yield text[at : at + 9]


def _choice(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish}


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps({'id': 'chatcmpl-1', 'model': 'demo', **chunk})}\n\n"


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """Serve an app on a free port of this machine; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


if __name__ == "__main__":
    uvicorn.run(create_standin(), port=8099)
