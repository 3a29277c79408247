"""Batch inference in OpenAI's batch format: one JSON object per line in, one per line out.

A line is validated and answered as the server would answer it. Requests are sorted by their prompts, so that those with
a common beginning follow each other: the first of them computes it, the others find it in the prefix cache.

`sala batch` writes answers to `OUT.part` as they complete; the file gets its name when all of them are there. After a
kill, the same command resumes: lines that are answered already are not computed again.
"""

import asyncio
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from sala.checkpoint.writer import publish
from sala.engine.requests import Client, Submission
from sala.engine.stream import Event, PromptScores
from sala.errors import DiskFull, EngineClosed, EngineDead, InputError, writing
from sala.llm import LLM
from sala.server.api.answers import GenerationRequest, Reply, naming
from sala.server.api.chat import ChatReply, ChatRequest
from sala.server.api.completions import CompletionReply, CompletionRequest
from sala.server.api.responses import ResponseReply, ResponseRequest
from sala.server.http.body import dump, pieces, read_json
from sala.server.http.errors import ApiError, from_exception, from_validation
from sala.server.settings import Settings

MAX_WAITING = 64  # requests that are queued at a time
MIN_SHARED = 256  # tokens: a common beginning at least this long is computed once before others need it
KEY_BYTES = 1 << 14  # of a prompt, by which requests are sorted
DEFAULTS: dict[str, Any] = {"max_tokens": 1024, "loop_guard": 0}
PROMPTS = ("model", "tools", "instructions", "messages", "prompt", "input")  # fields that a prompt begins with


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


Route = tuple[type[Any], type[Reply[Any]]]
ROUTES: dict[str, Route] = {
    "/v1/chat/completions": (BatchChat, ChatReply),
    "/v1/completions": (BatchCompletion, CompletionReply),
    "/v1/responses": (ResponseRequest, ResponseReply),
}


# --------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request in a batch file, and where it lies there."""

    custom_id: str
    offset: int
    num_bytes: int


@dataclass(slots=True)
class Index:
    """The requests of a file, sorted, and what is wrong with the other lines, by the id under which that is said."""

    lines: list[BatchLine] = field(default_factory=list)
    errors: dict[str, ApiError] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return len(self.lines) + len(self.errors)


def read_index(source: Path, routes: Collection[str], max_lines: int | None = None) -> Index:
    """Read a batch file. A line without an id of its own gets one by its number. Raises InputError."""
    index, keys, offset = Index(), {}, 0
    seen: set[str] = set()
    with source.open("rb") as file:
        for number, text in enumerate(file, 1):
            start, offset = offset, offset + len(text)
            if not text.strip():
                continue
            if index.total == max_lines:
                raise InputError("input_file_id", f"has more than {max_lines:,} requests", "split it")
            custom_id = f"sala:line-{number}"
            try:
                request = _parse(text)
                if request["custom_id"] in seen:
                    problem = f"{request['custom_id']!r} was used before"
                    raise InputError("custom_id", problem, "give every line its own")
                custom_id = request["custom_id"]
                seen.add(custom_id)
                _check(request, routes)
            except InputError as error:
                index.errors[custom_id] = from_exception(error)
                continue
            index.lines.append(BatchLine(custom_id, start, len(text)))
            keys[custom_id] = dump([request["body"].get(name) for name in PROMPTS])[:KEY_BYTES]
    index.lines.sort(key=lambda line: keys[line.custom_id])
    return index


def _parse(text: bytes) -> dict[str, Any]:
    try:
        request = read_json(text)
    except ValueError as error:
        raise InputError("this line", str(error).removeprefix("the body ")) from None
    if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
        raise InputError("custom_id", "is missing", "every line needs a string of its own")
    return request


def _check(request: dict[str, Any], routes: Collection[str]) -> None:
    url = request.get("url")
    if request.get("method", "POST") != "POST" or url not in routes:
        problem = "is missing" if url is None else f"is {str(url)[:100]!r}"
        raise InputError("url", problem, "known here: POST " + ", ".join(routes))
    if not isinstance(request.get("body"), dict):
        raise InputError("body", "is missing", "it holds the request")


def read_request(source: Path, line: BatchLine) -> tuple[Any, type[Reply[Any]]]:
    """Return the validated body of a line and what answers it. Raises ApiError."""
    with source.open("rb") as file:
        file.seek(line.offset)
        request = read_json(file.read(line.num_bytes))
    schema, reply = ROUTES[request["url"]]
    try:
        return schema.model_validate(request["body"]), reply
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None


def write_result(custom_id: str, result: Any) -> str:
    """Return the line of an answer or an ApiError."""
    is_error = isinstance(result, ApiError)
    response = {
        "status_code": result.status_code if is_error else 200,
        "request_id": None if is_error else f"req_{secrets.token_hex(8)}",
        "body": result.envelope() if is_error else result,
    }
    error = {"code": result.code, "message": result.message} if is_error else None
    number = f"batch_req_{secrets.token_hex(8)}"
    line = {"id": number, "custom_id": custom_id, "response": response, "error": error}
    return b"".join(pieces(line)).decode() + "\n"


def read_answered(part: Path) -> set[str]:
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


# ---------------------------------------------------------------------------------------------------------------- feed


class Room:
    """How many answers are generated at a time; a request that wants more than that runs alone."""

    def __init__(self) -> None:
        self._num_used = 0
        self._change = asyncio.Condition()

    async def take(self, count: int, limit: int) -> None:
        async with self._change:
            await self._change.wait_for(lambda: not self._num_used or self._num_used + count <= limit)
            self._num_used += count

    async def give_back(self, count: int) -> None:
        async with self._change:
            self._num_used -= count
            self._change.notify_all()


@dataclass(eq=False)
class Task:
    """A request that is ready for the engine."""

    line: BatchLine
    llm: LLM
    reply: Reply[Any]
    submission: Submission
    adapter: str | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)  # its prompt is computed, or it is over

    @property
    def num_answers(self) -> int:
        return max(1, self.submission.num_answers)

    @property
    def prompt(self) -> list[int]:
        """The tokens of the only prompt."""
        groups = self.submission.groups
        return list(groups[0][0].request.prompt) if len(groups) == 1 else []

    def keep_prefix(self, length: int) -> None:
        """Let the engine take a snapshot after so many tokens: the next request continues from there."""
        for state in self.submission.groups[0]:
            state.request.boundaries = (*state.request.boundaries, length)


class Feed(ABC):
    """Sends requests to the engine, a limited number of answers at a time, and writes what becomes of them."""

    is_background = False
    client = Client()

    def __init__(self, source: Path, settings: Settings, room: Room) -> None:
        self._source = source
        self._settings = settings
        self._room = room

    @abstractmethod
    async def find_model(self, name: str | None) -> tuple[str, LLM, str | None]:
        """Return the id under which a model answers, the model, and the name of its adapter if one is asked for.

        Raises ApiError if there is none.
        """

    @abstractmethod
    def limit(self, llm: LLM) -> int:
        """Return how many answers may be generated at a time."""

    async def reserve(self, task: Task) -> None:  # noqa: B027 - without limits there is nothing to wait for
        """Return when the tokens of a request fit into the limits of its client. Raises ApiError if they never do."""

    @abstractmethod
    async def write(self, line: BatchLine, result: Any) -> None:
        """Write an answer or an ApiError."""

    @abstractmethod
    async def wait_for_engine(self, error: Exception) -> None:
        """Return when a request whose engine was stopped may be tried again, or raise the error."""

    async def run(self, lines: Iterable[BatchLine]) -> None:
        """Answer requests. An error of one of them is its answer; only errors of the output end the feed."""
        held: Task | None = None  # until the next one is known: what they share is worth a snapshot
        num_covered = 0  # tokens of its beginning that the cache holds
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    task = await self._read(line)
                    if task is None:
                        continue
                    if held is not None:
                        num_covered = await self._start(group, held, task, num_covered)
                    held = task
                if held is not None:
                    await self._start(group, held, None, 0)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _start(self, group: asyncio.TaskGroup, task: Task, after: Task | None, num_covered: int) -> int:
        """Start a request. Return how much of the next one's beginning is computed already or will be by others."""
        num_shared = 0
        if after is not None and (after.llm, after.adapter) == (task.llm, task.adapter):
            num_shared = await asyncio.to_thread(count_shared, task.prompt, after.prompt)
        if num_shared >= max(MIN_SHARED, num_covered + 1):
            task.keep_prefix(num_shared)
        try:
            await self.reserve(task)
        except ApiError as error:
            await self.write(task.line, error)
            return min(num_covered, num_shared)
        await self._room.take(task.num_answers, self.limit(task.llm))
        group.create_task(self._answer(task))
        if num_shared < num_covered + MIN_SHARED:
            return min(num_covered, num_shared)
        await task.has_begun.wait()
        return num_shared

    async def _read(self, line: BatchLine) -> Task | None:
        """Prepare a request; write what is wrong with it, if anything."""
        try:
            return await self._prepare(line)
        except Exception as error:
            await self.write(line, self.describe(error))
            return None

    async def _prepare(self, line: BatchLine) -> Task:
        while True:
            body, kind = await asyncio.to_thread(read_request, self._source, line)
            name, llm, adapter = await self.find_model(body.model)
            reply = kind(name, llm, body, self._settings)
            try:
                with naming(kind.fields):
                    prepared = await llm.service.call(reply.checked, llm.inputs, owner=self.client.owner)
                    submission = llm.adapt(prepared, adapter)
                submission.belong_to(self.client)
                return Task(line, llm, reply, submission, adapter)
            except (EngineClosed, EngineDead) as error:
                await self.wait_for_engine(error)

    async def _answer(self, task: Task) -> None:
        result: Any
        try:
            result = await self._generate(task)
        except Exception as error:
            result = self.describe(error)
        finally:
            task.has_begun.set()
            await self._room.give_back(task.num_answers)
        await self.write(task.line, result)

    async def _generate(self, task: Task) -> Any:
        current = task
        while True:
            try:
                async with current.llm.service.submit(current.submission, self.is_background) as stream:
                    async for item in stream:
                        if isinstance(item, PromptScores):  # of a whole prompt
                            await asyncio.to_thread(current.reply.take, item)
                        else:
                            current.reply.take(item)
                        if isinstance(item, Event):
                            task.has_begun.set()
                return await asyncio.to_thread(current.reply.whole)
            except (EngineClosed, EngineDead) as error:
                await self.wait_for_engine(error)
                current = await self._prepare(task.line)
                await self.reserve(current)

    def describe(self, error: Exception) -> ApiError:
        return from_exception(error)


def count_shared(one: list[int], other: list[int]) -> int:
    """Return how many tokens two prompts have in common at their beginnings."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])


# ------------------------------------------------------------------------------------------------------------- command


@dataclass(slots=True)
class Tally:
    """Counts of a batch."""

    done: int = 0
    failed: int = 0
    skipped: int = 0


def run_batch(llm: LLM, source: Path, target: Path, on_progress: Callable[[int, int], None] | None = None) -> Tally:
    """Answer every line of `source` and write the answers to `target`. Return the counts."""
    if target.exists() or target.is_symlink():
        raise InputError("output", f"{target} exists already", "choose another file")
    if not source.is_file():
        raise InputError("input", f"{source} is not a file", "give a JSONL file")
    part = target.with_name(f"{target.name}.part")
    answered = read_answered(part)
    try:
        index = read_index(source, ROUTES)
    except OSError as error:
        raise InputError("input", f"{source} cannot be read: {error}", "give a JSONL file in UTF-8") from None
    try:
        with writing(part), part.open("a", encoding="utf-8") as out:
            feed = _FileFeed(llm, source, out, answered, lambda count: on_progress and on_progress(count, index.total))
            asyncio.run(feed.run_all(index))
            out.flush()
            os.fsync(out.fileno())
    except DiskFull as error:
        raise DiskFull(error.message, "free some space, then repeat the command: it goes on from there") from None
    publish(part, target)
    return feed.tally


class _FileFeed(Feed):
    """A file on its way to a file, on one model."""

    def __init__(
        self, llm: LLM, source: Path, out: TextIO, answered: set[str], on_progress: Callable[[int], object]
    ) -> None:
        super().__init__(source, Settings(**DEFAULTS), Room())
        self.tally = Tally(skipped=len(answered))
        self._llm = llm
        self._out = out
        self._answered = answered
        self._on_progress = on_progress

    async def run_all(self, index: Index) -> None:
        for custom_id, error in index.errors.items():
            if custom_id not in self._answered:
                self._write(custom_id, error)
        await self.run(line for line in index.lines if line.custom_id not in self._answered)

    async def find_model(self, name: str | None) -> tuple[str, LLM, str | None]:
        return self._llm.path.name, self._llm, None

    def limit(self, llm: LLM) -> int:
        return MAX_WAITING

    async def write(self, line: BatchLine, result: Any) -> None:
        self._write(line.custom_id, result)

    async def wait_for_engine(self, error: Exception) -> None:
        raise error

    def describe(self, error: Exception) -> ApiError:
        found = from_exception(error)
        if found.code == "server_error":  # unlike a client of the server, the user may know what it was
            found = ApiError(500, str(error) or type(error).__name__, code="server_error")
        return found

    def _write(self, custom_id: str, result: Any) -> None:
        self._out.write(write_result(custom_id, result))
        self._out.flush()
        self.tally.failed += isinstance(result, ApiError)
        self.tally.done += not isinstance(result, ApiError)
        self._on_progress(self.tally.done + self.tally.failed + self.tally.skipped)
