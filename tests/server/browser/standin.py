"""A server that speaks the API without a model: what it says depends on a word in the last message.

Documents are read as the server reads them; a token is four characters.

Run it by hand to look at the page: python -m tests.server.browser.standin
"""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sala.server.documents import DocumentReader, describe
from sala.server.http import page as web
from sala.server.http.errors import ApiError

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

NOTES = """\
The rent is due in advance[^1], and the deposit is three rents[^law].

[^1]: On the **third** working day.
[^law]: At most; see $n \\times 900$.
"""

QUOTING = """\
The contract says “The rent is **900 euros** a month”, and it ends with “Signed in *Bonn*”. \
It also says “Dogs are welcome”.
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


class FakeTokenizer:
    """Four characters are a token."""

    def check_length(self, text: str, max_tokens: int) -> None:
        if len(text) > 4 * max_tokens:
            raise ApiError(400, "it is too long", code="document_too_long")

    def encode_with_ends(self, texts: list[str]) -> list[tuple[list[int], list[int]]]:
        return [([0] * -(-len(text) // 4), [*range(4, len(text), 4), len(text)]) for text in texts]


class FakeLLM:
    ctx = CONTEXT
    tokenizer = FakeTokenizer()


def create_standin(key: str | None = None) -> FastAPI:
    """An app with the real page and an invented API."""
    app = FastAPI()
    app.state.reader = DocumentReader()
    app.state.kept = {}
    app.router.on_shutdown.append(app.state.reader.close)
    add_documents(app)
    app.include_router(web.router)
    app.state.key = key
    app.state.requests = []
    app.state.calls = []
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

    @app.get("/v1/mcp/tools")
    async def tools() -> Response:
        function = {"name": "river_length", "description": "Looks it up.", "parameters": {"type": "object"}}
        return JSONResponse({"data": [{"type": "function", "function": function, "server": "atlas"}]})

    @app.post("/v1/mcp/call")
    async def call(request: Request) -> Response:
        body = await request.json()
        app.state.calls.append(body)
        await asyncio.sleep(60 if "Slow" in str(body) else 0)
        return JSONResponse({"content": "<b>6,650</b> km", "is_error": False})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        if not _is_known(request):
            return _error(401, "the API key is missing; send it as Authorization: Bearer KEY", "invalid_api_key")
        body = await request.json()
        for message in body["messages"]:
            if isinstance(message["content"], list):
                message["content"] = "\n".join(part["text"] for part in message["content"])
        app.state.requests.append(body)
        last = body["messages"][-1]["content"]
        if body.get("return_sources") and "unsupported" in last:
            return _error(
                400, "return_sources: this field is not supported", "unknown_parameter", param="return_sources"
            )
        if "too long" in last:
            message = "the prompt has 1,200,000 tokens and the context holds 1,048,576"
            return _error(400, message, "context_length_exceeded")
        if "busy" in last:
            return _error(429, "64 requests are waiting", "queue_full", {"Retry-After": "7"})
        return StreamingResponse(_stream(app, body), media_type="text/event-stream")

    return app


def add_documents(app: FastAPI) -> None:
    """Routes that read documents as the server does, and keep them in memory."""
    kept: dict[str, Any] = app.state.kept

    @app.post("/v1/documents")
    async def read(request: Request) -> Response:
        form = await request.form()
        file = form["file"]
        name, size = file.filename or "", file.size or 0
        try:
            found = await app.state.reader.read("", name, file.file)
            described = describe(name, size, found, FakeLLM())  # type: ignore[arg-type]
        except ApiError as error:
            return JSONResponse(error.envelope(), error.status_code)
        if form.get("keep") == "true":
            described["id"] = f"file-{len(kept)}"
            kept[described["id"]] = described
        return JSONResponse(described)

    @app.get("/v1/documents")
    async def show() -> Response:
        later = int(time.time()) + 30 * 86_400
        names = ("id", "filename", "bytes", "tokens")
        rows = [{**{name: one[name] for name in names}, "sections": 1, "expires_at": later} for one in kept.values()]
        return JSONResponse({"object": "list", "data": rows})

    @app.get("/v1/documents/{document_id}")
    async def get(document_id: str) -> Response:
        return JSONResponse(kept[document_id])

    @app.post("/v1/documents/state")
    async def states(request: Request) -> Response:
        asked = any("<document" in str(one["messages"]) for one in app.state.requests)
        ids = (await request.json())["documents"]
        rows = [{"id": one, "tokens": kept[one]["tokens"]} for one in ids]
        return JSONResponse({"data": [{**row, "cached_tokens": row["tokens"] if asked else 0} for row in rows]})

    @app.delete("/v1/documents/{document_id}")
    async def delete(document_id: str) -> Response:
        del kept[document_id]
        return JSONResponse({"id": document_id, "deleted": True})


def find_sources(messages: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    """Return lines of the documents with a number in them, the longest first, and the quotes of an answer, checked."""
    passages, quotes = [], []
    for at, message in enumerate(messages):
        for found in re.finditer(r"^(?!</?document|\[).*\d.*$", message["content"], re.MULTILINE):
            place = {"message": at, "start": found.start(), "end": found.end(), "file": "a file", "place": "line 1"}
            passages.append({"text": found[0], "weight": len(found[0]) / 100, "tokens": [0, 1], **place})
    for found in re.finditer("“(.*?)”", answer):
        text = found[1].replace("*", "")
        hits = [(at, one["content"].find(text)) for at, one in enumerate(messages) if text in one["content"]]
        place = {"message": hits[0][0], "start": hits[0][1], "end": hits[0][1] + len(text)} if hits else {}
        quotes.append({"text": text, "answer": [*found.span(1)], "found": bool(hits), **place})
    return {"passages": sorted(passages, key=lambda one: -one["weight"])[:6], "quotes": quotes}


def _is_known(request: Request) -> bool:
    key = request.app.state.key
    return key is None or request.headers.get("authorization") == f"Bearer {key}"


def _error(
    status: int, message: str, code: str, headers: dict[str, str] | None = None, param: str | None = None
) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
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
    if "tool" in last and body.get("tools"):
        river = "Slow" if "slow" in last else "Nile"
        call = {"name": "river_length", "arguments": json.dumps({"river": river})}
        calls = [
            {"index": at, "id": f"c{len(body['messages'])}{at}", "type": "function", "function": call} for at in (0, 1)
        ]
        yield _event({"choices": [_choice({"tool_calls": calls})]})
        yield _event({"choices": [_choice({}, "tool_calls")]})
        yield "data: [DONE]\n\n"
        return
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
    more = {"sources": find_sources(body["messages"], text)} if body.get("return_sources") else {}
    yield _event({"choices": [{**_choice({}, "length" if "limit" in question else "stop"), **more}]})
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
    if "quote" in question:
        return QUOTING
    if "notes" in question:
        return NOTES
    if "short" in question:
        return "Yes: all of it is kept."
    return MARKDOWN


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), 9):
        yield text[at : at + 9]


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
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
