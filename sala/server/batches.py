"""Batches over HTTP: files of requests that are answered behind everything else, over hours and restarts.

A batch is a record in a JSON file, which is replaced whenever its status changes, and two growing files of answers and
errors, to which a line is appended as soon as it is known. A server that starts goes on with the unfinished batches:
lines that are in these files are not computed again. At the end both become files of the client.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sala.errors import InputError, SalaError, describe_error
from sala.llm import LLM
from sala.server import batch as lines
from sala.server.batch import BatchLine, Feed, Index, Room
from sala.server.files import FileStore, StoredFile, new_id, open_private, read_private, write_private
from sala.server.http.errors import ApiError
from sala.server.http.keys import key_ring
from sala.server.http.rates import Rates
from sala.server.http.security import client_of, find_rates
from sala.server.runtime import RETRY_S, Runtime
from sala.server.settings import Settings
from sala.text.workers import MonitoredPool

WINDOW_S = 24 * 3600
SWEEP_S = 60.0
OVER = frozenset({"completed", "failed", "expired", "cancelled"})
STATUSES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
WAITABLE = frozenset({"model_busy", "shutting_down"})  # errors after which a request is tried again
LEFT = ApiError(408, "the batch expired before this request was answered", code="batch_expired")
T = TypeVar("T")
_log = logging.getLogger("sala.server")


@dataclass
class BatchJob:
    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created: float  # seconds since 1970
    expires_at: int
    metadata: dict[str, str] | None = None
    keep_s: float | None = None  # how long its output is kept
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)  # when it got its statuses
    outcome: str = ""  # the last status, known before it is reached
    errors: list[dict[str, Any]] = field(default_factory=list)
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str = field(default_factory=lambda: new_id("file"))
    error_file_id: str = field(default_factory=lambda: new_id("file"))

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def show(self) -> dict[str, Any]:
        """Return the batch as OpenAI's API describes it."""
        has_files = self.is_over and self.status != "failed"
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if has_files and self.completed else None,
            "error_file_id": self.error_file_id if has_files and self.failed else None,
            "created_at": int(self.created),
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in STATUSES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Batches:
    """The batches of a server. Its methods belong to the event loop; files are touched in threads only."""

    def __init__(self, settings: Settings, runtime: Runtime, rates: dict[str, Rates]) -> None:
        self.rates = rates
        self.files = FileStore(
            settings.files_dir, settings.max_files, settings.files_disk, settings.file_days * 24 * 3600
        )
        self.files.is_used = self._is_used
        self.settings = settings
        self.runtime = runtime
        self.room = Room()
        self._directory = settings.files_dir / "batches"
        self._batches: dict[str, BatchJob] = {}
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.writer = MonitoredPool(1, "sala-batches")  # one thread, so that lines are written one by one
        self._opening = asyncio.Lock()
        self._is_open = False

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run something that touches files of batches."""
        return await asyncio.get_running_loop().run_in_executor(self.writer, work, *arguments)

    async def open(self) -> None:
        """Take possession of the directory and go on with unfinished batches. Raises ApiError."""
        async with self._opening:
            if self._is_open:
                return
            if not self.settings.max_files:
                raise ApiError(404, "this server keeps no files; start it with --max-files", code="files_unavailable")
            found = await self.do(self._load)
            self._is_open = True
            self._batches = {batch.id: batch for batch in found}
            for batch in found:
                if not batch.is_over:
                    self._start(batch)

    async def watch(self) -> None:
        """Resume what an earlier run has left, then delete what has expired, forever."""
        if self.settings.max_files and self.settings.files_dir.is_dir():
            try:
                await self.open()
            except ApiError as error:
                _log.warning("batches are not resumed: %s", error)
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._is_open:
                await self.sweep()

    async def sweep(self) -> None:
        await asyncio.to_thread(self.files.sweep)
        for batch in list(self._batches.values()):
            if batch.is_over and time.time() >= batch.created + self.settings.file_days * 24 * 3600:
                del self._batches[batch.id]
                await self.do(self._remove, batch)

    async def close(self) -> None:
        """Stop; what is unfinished is resumed by the next server."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.writer.shutdown)
        self.files.close()

    async def create(
        self, owner: str, file: StoredFile, endpoint: str, metadata: dict[str, str] | None, keep_s: float | None
    ) -> BatchJob:
        unfinished = sum(batch.owner == owner and not batch.is_over for batch in self._batches.values())
        if unfinished >= self.settings.max_batches:
            message = f"{unfinished} batches are not finished yet; try again when one of them is"
            raise ApiError(429, message, code="too_many_batches", retry_s=60)
        now = time.time()
        batch = BatchJob(new_id("batch"), owner, endpoint, file.id, now, int(now) + WINDOW_S, metadata, keep_s)
        self._batches[batch.id] = batch
        try:
            await self.do(self._save, batch)
        except SalaError:
            del self._batches[batch.id]
            raise
        self._start(batch)
        return batch

    def owned(self, owner: str) -> list[BatchJob]:
        """Return the batches of an owner, newest first."""
        found = [batch for batch in self._batches.values() if batch.owner == owner]
        return sorted(found, key=lambda batch: (-batch.created, batch.id))

    def find(self, owner: str, batch_id: str) -> BatchJob:
        """Return a batch of an owner. Raises ApiError if there is none."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            message = "there is no such batch; GET /v1/batches lists them"
            raise ApiError(404, message, param="batch_id", code="batch_not_found")
        return batch

    async def cancel(self, batch: BatchJob) -> None:
        """Stop a batch; what is answered already becomes its output."""
        if batch.is_over or batch.status == "finalizing":
            raise ApiError(409, f"the batch is {batch.status}; it cannot be cancelled", code="batch_over")
        await self._set(batch, "cancelling")
        feed = self._feeds.get(batch.id)
        if feed is not None:
            feed.cancel()

    def path(self, batch: BatchJob, kind: str) -> Path:
        """Return the file to which its answers (output) or errors (error) are appended."""
        return self._directory / f"{batch.id}.{kind}"

    def _is_used(self, file_id: str) -> bool:
        return any(batch.input_file_id == file_id and not batch.is_over for batch in list(self._batches.values()))

    def _load(self) -> list[BatchJob]:
        self.files.open()
        self._directory.mkdir(mode=0o700, exist_ok=True)
        found = []
        for record in read_private(self._directory, "batch_*.json"):
            with contextlib.suppress(TypeError):
                found.append(BatchJob(**record))
        return found

    def _save(self, batch: BatchJob) -> None:
        write_private(self._directory / f"{batch.id}.json", asdict(batch))

    def _remove(self, batch: BatchJob) -> None:
        for kind in ("json", "output", "error"):
            self.path(batch, kind).unlink(missing_ok=True)

    async def _set(self, batch: BatchJob, status: str) -> None:
        batch.status = status
        batch.times[status] = int(time.time())
        await self.do(self._save, batch)

    def _start(self, batch: BatchJob) -> None:
        task = asyncio.create_task(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: BatchJob) -> None:
        try:
            await self._process(batch)
        except Exception as error:
            _log.error("batch %s has failed: %s", batch.id, describe_error(error))
            problem = {"code": "server_error", "message": "the server could not go on with this batch", "line": None}
            batch.errors = [{**problem, "param": None}]
            with contextlib.suppress(OSError, SalaError):
                await self._set(batch, "failed")

    async def _process(self, batch: BatchJob) -> None:
        """Take a batch from whatever status it is in to its end."""
        if not batch.outcome:
            index = await self._read(batch)
            if index is None:
                await self._set(batch, "failed")
                return
            if batch.status == "validating":
                await self._set(batch, "in_progress")
            batch.outcome = await self._feed(batch, index)
            await self._set(batch, "finalizing")
        for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
            if self.path(batch, kind).exists():
                await self.do(self._hand_over, batch, kind, file_id)
        await self._set(batch, batch.outcome)

    async def _read(self, batch: BatchJob) -> Index | None:
        """Read the input; None if it is not a batch file at all."""
        try:
            file = self.files.find(batch.owner, batch.input_file_id)
            index = await self.do(lines.read_index, self.files.path(file), (batch.endpoint,), self.settings.batch_lines)
            if not index.total:
                raise InputError("input_file_id", "is empty", "upload a file with a request per line")
        except (InputError, ApiError) as error:
            problem = {"code": "invalid_input_file", "message": str(error), "param": "input_file_id", "line": None}
            batch.errors = [problem]
            return None
        batch.total = index.total
        return index

    async def _feed(self, batch: BatchJob, index: Index) -> str:
        """Answer what is left of a batch and return its outcome."""
        feed = BatchFeed(self, batch)
        try:
            rest = await feed.open(index)
            if await self._answer(batch, feed, index, rest):
                return "completed"
            if batch.status == "cancelling":
                return "cancelled"
            await feed.give_up(rest)
            return "expired"
        finally:
            await self.do(feed.close)

    async def _answer(self, batch: BatchJob, feed: "BatchFeed", index: Index, rest: list[BatchLine]) -> bool:
        """Return False if the batch was cancelled or has expired before all of it was answered."""
        if batch.status == "cancelling":
            return False
        task = self._feeds[batch.id] = asyncio.create_task(feed.run_all(index, rest))
        try:
            await asyncio.wait([task], timeout=max(0.0, batch.expires_at - time.time()))
        finally:
            del self._feeds[batch.id]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            return False
        task.result()
        return True

    def _hand_over(self, batch: BatchJob, kind: str, file_id: str) -> None:
        path = self.path(batch, kind)
        if not path.stat().st_size:
            path.unlink()
            return
        self.files.adopt(path, batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output", file_id, batch.keep_s)


class BatchFeed(Feed):
    """The requests of a batch on their way to its files."""

    is_background = True

    def __init__(self, batches: Batches, batch: BatchJob) -> None:
        file = batches.files.find(batch.owner, batch.input_file_id)
        super().__init__(batches.files.path(file), batches.settings, batches.room)
        self.client = client_of(batch.owner, batches.settings)
        self._batches = batches
        self._batch = batch
        self._failed: dict[str | None, ApiError] = {}  # models that cannot be loaded
        self._is_written: set[str] = set()
        self._files: dict[str, Any] = {}

    async def open(self, index: Index) -> list[BatchLine]:
        """Open the files of answers and errors. Return the requests that are not answered in them."""
        await self._batches.do(self._open)
        return [line for line in index.lines if line.custom_id not in self._is_written]

    def _open(self) -> None:
        for kind in ("output", "error"):
            path = self._batches.path(self._batch, kind)
            known = lines.read_answered(path)
            self._is_written |= known
            setattr(self._batch, "completed" if kind == "output" else "failed", len(known))
            self._files[kind] = open_private(path, "a")

    def close(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())
            file.close()

    async def run_all(self, index: Index, rest: list[BatchLine]) -> None:
        for custom_id, error in index.errors.items():
            if custom_id not in self._is_written:
                await self._write(custom_id, error)
        await self.run(rest)

    async def give_up(self, rest: list[BatchLine]) -> None:
        """Write that requests were not answered in time."""
        for line in rest:
            if line.custom_id not in self._is_written:
                await self._write(line.custom_id, LEFT)

    async def find_model(self, name: str | None) -> tuple[str, LLM, str | None]:
        while True:
            if name in self._failed:
                raise self._failed[name]
            try:
                model = await self._batches.runtime.get(name, is_background=True)
            except ApiError as error:
                if error.code not in WAITABLE:
                    self._failed[name] = error
                await asyncio.sleep(RETRY_S if error.code in WAITABLE else 0)
                continue
            self._batch.model = self._batch.model or model.id
            return name or model.id, model.llm, model.adapter

    async def reserve(self, task: lines.Task) -> None:
        settings, owner = self._settings, self.client.owner
        key = None
        if settings.keys_file is not None:
            key = key_ring(settings.api_key, settings.admin_key, settings.keys_file).find_owner(self._batch.owner)
        rates = find_rates(self._batches.rates, owner, key, settings)
        if rates is not None:
            tokens = task.submission.count_tokens(task.llm.ctx)
            task.submission.settle = await rates.reserve_in_turn(*tokens)

    def limit(self, llm: LLM) -> int:
        return self._settings.batch_answers or max(1, llm.engine.scheduler.max_batch // 2)

    async def write(self, line: BatchLine, result: Any) -> None:
        await self._write(line.custom_id, result)

    async def wait_for_engine(self, error: Exception) -> None:
        await asyncio.sleep(RETRY_S)

    async def _write(self, custom_id: str, result: Any) -> None:
        await self._batches.do(self._append, custom_id, result)

    def _append(self, custom_id: str, result: Any) -> None:
        is_error = isinstance(result, ApiError)
        file = self._files["error" if is_error else "output"]
        file.write(lines.write_result(custom_id, result))
        file.flush()
        self._is_written.add(custom_id)
        self._batch.failed += is_error
        self._batch.completed += not is_error
