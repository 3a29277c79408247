"""Batch inference in OpenAI's batch format: one JSON object per line in, one per line out.

A line is validated and answered as the server would answer it. Answers are written to `OUT.part` as they complete; the
file gets its name when all of them are there. After a kill, the same command resumes: lines that are answered already
are not computed again.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from sala.checkpoint.writer import publish
from sala.errors import InputError
from sala.llm import LLM
from sala.server.api.answers import GenerationRequest, Reply, naming
from sala.server.api.chat import ChatReply, ChatRequest
from sala.server.api.completions import CompletionReply, CompletionRequest
from sala.server.http.errors import ApiError, from_exception, from_validation
from sala.server.settings import Settings

MAX_WAITING = 64  # requests that are queued at a time
DEFAULTS: dict[str, Any] = {"temperature": 1.0, "max_tokens": 1024, "loop_guard": 0}


class BatchFields(GenerationRequest):
    """Sampling parameters that only batches take."""

    sampling_fields = (*GenerationRequest.sampling_fields, "think_budget", "loop_guard", "regex", "grammar")

    think_budget: int | None = None
    loop_guard: int | None = None
    regex: str | None = None
    grammar: str | None = None


class BatchChat(BatchFields, ChatRequest):
    pass


class BatchCompletion(BatchFields, CompletionRequest):
    pass


ROUTES: dict[str, tuple[type[GenerationRequest], type[Reply[Any]]]] = {
    "/v1/chat/completions": (BatchChat, ChatReply),
    "/v1/completions": (BatchCompletion, CompletionReply),
}


@dataclass(slots=True)
class Tally:
    """Counts of a batch."""

    done: int = 0
    failed: int = 0
    skipped: int = 0
    seen: set[str] = field(default_factory=set)


def run_batch(llm: LLM, source: Path, target: Path, on_progress: Callable[[int, int], None] | None = None) -> Tally:
    """Answer every line of `source` and write the answers to `target`. Return the counts."""
    if target.exists() or target.is_symlink():
        raise InputError("output", f"{target} exists already", "choose another file")
    if not source.is_file():
        raise InputError("input", f"{source} is not a file", "give a JSONL file")
    part = target.with_name(f"{target.name}.part")
    answered = _resume(part)
    total = sum(1 for _ in _lines(source))
    with part.open("a", encoding="utf-8") as out:
        batch = _Batch(llm, out, answered, lambda count: on_progress and on_progress(count, total))
        try:
            asyncio.run(batch.run(source))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        out.flush()
        os.fsync(out.fileno())
    publish(part, target)
    return batch.tally


def _resume(part: Path) -> set[str]:
    """Return the ids in an unfinished output; half a line at its end is cut off."""
    if not part.is_file():
        return set()
    answered, good = set(), 0
    with part.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                answered.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                break
            good += len(line)
    with part.open("r+b") as file:
        file.truncate(good)
    return answered


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    try:
        with source.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("input", f"{source} cannot be read: {error}", "give a JSONL file in UTF-8") from None


class _Batch:
    """The requests of a file on their way to their answers."""

    def __init__(self, llm: LLM, out: TextIO, answered: set[str], on_progress: Callable[[int], object]) -> None:
        self.tally = Tally(skipped=len(answered))
        self._llm = llm
        self._out = out
        self._answered = answered
        self._on_progress = on_progress
        self._settings = Settings(**DEFAULTS)

    async def run(self, source: Path) -> None:
        """Answer a file. An error of one line is its answer; only errors of the output end the batch."""
        room = asyncio.Semaphore(MAX_WAITING)
        async with asyncio.TaskGroup() as group:
            for custom_id, reply in self._requests(source):
                await room.acquire()
                group.create_task(self._answer(custom_id, reply)).add_done_callback(lambda _: room.release())

    def _requests(self, source: Path) -> Iterator[tuple[str, Reply[Any]]]:
        for number, line in _lines(source):
            custom_id = f"sala:line-{number}"  # for a line without an id of its own
            try:
                request = _parse(line)
                if request["custom_id"] in self.tally.seen:
                    problem = f"{request['custom_id']!r} was used before"
                    raise InputError("custom_id", problem, "give every line its own")
                custom_id = request["custom_id"]
                self.tally.seen.add(custom_id)
                if custom_id in self._answered:
                    continue
                reply = self._read(request)
            except (InputError, ApiError) as error:
                if custom_id not in self._answered:
                    self._write(custom_id, from_exception(error))
                continue
            yield custom_id, reply

    def _read(self, request: dict[str, Any]) -> Reply[Any]:
        url, body = request.get("url"), request.get("body")
        if request.get("method", "POST") != "POST" or url not in ROUTES:
            raise InputError("url", f"is {url!r}", "known: POST " + ", ".join(ROUTES))
        if not isinstance(body, dict):
            raise InputError("body", "is missing", "it holds the request")
        schema, reply = ROUTES[url]
        try:
            return reply(self._llm.path.name, self._llm, schema.model_validate(body), self._settings)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False, include_input=False)) from None

    async def _answer(self, custom_id: str, reply: Reply[Any]) -> None:
        result: Any
        try:
            with naming(reply.fields):
                stream = await self._llm.service.open(partial(reply.prepare, self._llm.inputs))
            async with stream:
                result = await reply.collect(stream)
        except Exception as error:
            result = from_exception(error)
            if result.code == "server_error":  # unlike a client of the server, the user may know what it was
                result = ApiError(500, str(error) or type(error).__name__, code="server_error")
        self._write(custom_id, result)

    def _write(self, custom_id: str, result: Any) -> None:
        """Write the line of an answer or an ApiError."""
        is_error = isinstance(result, ApiError)
        response = {
            "status_code": result.status_code if is_error else 200,
            "request_id": None if is_error else f"req_{secrets.token_hex(8)}",
            "body": result.envelope() if is_error else result,
        }
        error = {"code": result.code, "message": result.message} if is_error else None
        number = f"batch_req_{secrets.token_hex(8)}"
        line = {"id": number, "custom_id": custom_id, "response": response, "error": error}
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()
        self.tally.failed += is_error
        self.tally.done += not is_error
        self._on_progress(self.tally.done + self.tally.failed + self.tally.skipped)


def _parse(line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("line", f"is not JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
        raise InputError("custom_id", "is missing", "every line needs a string of its own")
    return request
