"""A streaming HTTP client for load tests: one connection per request, and times are taken when bytes arrive.

It does no more than a load generator needs, because the client must not be what is measured. With 256 streams and
10,000 events per second, httpx2 took 60 to 90 µs of processor time per event, so that of 256 tokens that arrive
together the last was seen about 20 ms late; this client takes about 15 µs. Events are parsed after the
end of their stream.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sala.errors import InputError, SalaError
from sala.lab.bench.meters import Timeline

TIMEOUT_S = 600.0
MAX_MESSAGE = 300  # characters of a server's error message
LOCAL = ("localhost", "127.0.0.1", "::1")
START = "start one (sala serve, vllm serve, …), or leave --url out to measure a local model"


@dataclass(frozen=True)
class Endpoint:
    """The address of an API, and its key if it requires one."""

    url: str  # with the path of the API, without a slash at its end
    key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise InputError("url", f"is {self.url!r}", "write it as http://localhost:8000/v1")
        object.__setattr__(self, "url", self.url.rstrip("/") + ("" if parts.path.strip("/") else "/v1"))

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in LOCAL

    def head(self, method: str, path: str, num_bytes: int) -> bytes:
        parts = urlsplit(self.url)
        lines = [f"{method} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += ["Accept: */*", "Connection: close", "Content-Type: application/json", f"Content-Length: {num_bytes}"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def send(self, path: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S) -> "Response":
        """Return the whole response; raise OSError, which TimeoutError is too, if there is none."""
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        async with asyncio.timeout(timeout_s):
            transport, response = await asyncio.get_running_loop().create_connection(
                Response, str(parts.hostname), parts.port or (443 if is_tls else 80), ssl=is_tls or None
            )
            try:
                response.began = time.perf_counter()
                transport.write(self.head("GET" if body is None else "POST", path, len(body or b"")) + (body or b""))
                await response.ended
            finally:
                transport.abort()
        return response

    async def get_json(self, path: str) -> Any:
        """Return the response of a route as JSON; raise SalaError with a remedy if the server does not respond."""
        try:
            response = await self.send(path, timeout_s=10)
        except OSError as error:
            reason = "it does not respond" if isinstance(error, TimeoutError) else explain(error)
            raise SalaError(f"no server answers at {self.url}: {reason}", START) from None
        if response.status != 200:
            raise response.problem(self.url)
        try:
            return json.loads(response.body)
        except ValueError:
            raise SalaError(f"{self.url} does not have OpenAI's API", "check the address") from None


@dataclass(slots=True, eq=False)
class Response(asyncio.Protocol):
    """A response while it arrives: the lines of its events with their times, or a body."""

    began: float = 0.0
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""
    ended: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _is_chunked: bool = False
    _has_events: bool = False
    _length: int = 1 << 60  # of a body that is not chunked
    _raw: bytes = b""  # received, not parsed yet
    _left: int = 0  # bytes of the current chunk that have not arrived, the line end after it included
    _line: bytes = b""  # the beginning of a line of events

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._raw += data
        if not self.status and not self._read_head():
            return
        if self._is_chunked:
            self._read_chunks(now)
        else:
            data, self._raw = self._raw, b""
            self._take(data, now)
            if len(self.body) >= self._length:
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.status and not exc and not self._left:
            self._finish()
        elif not self.ended.done():
            self.ended.set_exception(ConnectionError("the server closed the connection"))

    def _finish(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _read_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) < 2 or not words[1].isdigit():
            raise ConnectionError("the server's reply is not HTTP")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
        self._is_chunked = headers.get("transfer-encoding") == "chunked"
        self._has_events = headers.get("content-type", "").startswith("text/event-stream")
        self._length = int(headers.get("content-length", self._length))
        self.status, self._raw = int(words[1]), rest
        return True

    def _read_chunks(self, now: float) -> None:
        while self._raw:
            if not self._left:
                size, end, rest = self._raw.partition(b"\r\n")
                if not end:
                    return
                self._raw, self._left = rest, int(size.partition(b";")[0], 16) + 2
                if self._left == 2:  # the last chunk
                    self._left = 0
                    self._finish()
                    return
            piece, self._raw = self._raw[: self._left], self._raw[self._left :]
            payload = piece[: max(0, self._left - 2)]
            self._left -= len(piece)
            self._take(payload, now)

    def _take(self, data: bytes, now: float) -> None:
        if not self._has_events:
            self.body += data
            return
        *lines, self._line = (self._line + data).split(b"\n")
        self.events += [(now, line) for line in lines if line.startswith(b"data:")]

    def problem(self, url: str) -> SalaError:
        """Return an error that says why the server refused the request."""
        if self.status in (401, 403):
            return SalaError(f"the server at {url} requires a key", "set SALA_API_KEY or --api-key-file")
        return SalaError(
            f"the server at {url} answers {self.status}: {self.message}", "check the address and the model"
        )

    @property
    def message(self) -> str:
        """The message of an error; servers send it in one of several forms."""
        try:
            found = json.loads(self.body)
            error = found.get("error", found)
            text = error.get("message") or found.get("detail") if isinstance(error, dict) else error
        except (ValueError, AttributeError):
            text = self.body.decode("utf-8", "replace")
        return " ".join(str(text).split())[:MAX_MESSAGE]

    def timeline(self, num_input: int) -> Timeline:
        """Return when tokens arrived; where the server reports usage, their number is taken from there."""
        found = Timeline(self.began, num_input=num_input)
        if self.status != 200:
            found.error = f"{self.status}: {self.message}"
            return found
        last, is_done = None, False
        for at, line in self.events:
            data = line[5:].strip()
            if data == b"[DONE]":
                is_done = True
                break
            event = json.loads(data)
            if event.get("error"):
                found.error = " ".join(str(event["error"]).split())[:MAX_MESSAGE]
                return found
            if usage := event.get("usage"):
                found.num_input, found.num_output = usage["prompt_tokens"], usage["completion_tokens"]
                found.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            last = at if event.get("choices") else last
            has_text = any(_has_text(choice) for choice in event.get("choices") or ())
            if has_text and at not in found.events[-1:]:  # events that arrive together are one
                found.events.append(at)
        if not found.events and last is not None:  # tokens without text
            found.events.append(last)
        found.num_output = found.num_output or len(found.events)
        found.error = None if is_done and found.events else "the stream ended early"
        return found


def explain(error: OSError) -> str:
    """Return the system's message for an error; asyncio replaces it by the address."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error) or type(error).__name__


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(key) for key in ("content", "reasoning_content", "reasoning")))
