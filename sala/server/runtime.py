"""The loaded models: load them on request, unload them when idle."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from sala.checkpoint.names import check_tensors
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.engine.loop import RequestStatistics
from sala.engine.requests import InputProcessor, Submission
from sala.engine.service import EngineService
from sala.errors import EngineDead, SalaError
from sala.llm import LLM
from sala.models.catalog import Library
from sala.models.embedded import EMBEDDED, find_base, find_model
from sala.server.http.errors import ApiError
from sala.server.http.security import trim_memory
from sala.server.settings import Settings

CHECK_S = 1.0  # between two checks for idle models
RETRY_S = 5
UNUSED_S = 60.0  # a model that requests have used within this time is not unloaded for a background request
REPORT_S = 3.0  # between two messages about a warm-up
T = TypeVar("T")
_log = logging.getLogger("sala.server")


@dataclass(eq=False)
class LoadedModel:
    id: str
    path: Path
    llm: LLM
    loaded_at: float  # seconds since 1970
    last_used: float  # monotonic
    adapter: str | None = None  # name of the adapter that is asked for

    def prepare(self, work: Callable[[InputProcessor], Submission]) -> Submission:
        """Return what `work` prepares, for the adapter that is asked for."""
        submission = work(self.llm.inputs)
        return submission if self.adapter is None else self.llm.adapt(submission, self.adapter)

    @property
    def service(self) -> EngineService:
        return self.llm.service


def open_model(path: Path, settings: Settings) -> LLM:
    """Load a model and warm it up. The adapters in the settings belong to the default model."""
    base, merged = find_base(find_model(settings.model), settings.merged_adapter)
    options = settings.loading
    if path.resolve() != base.resolve():
        options = replace(options, adapter=())
    elif merged is not None:
        named = (f"{name}={place}" for name, place in settings.named_adapters.items())
        options = replace(options, adapter=(str(merged), *named))
    llm = LLM(path, options=options)
    if llm.attention_changes:
        _log.info(llm.attention_changes)
    if settings.warm_up:
        warm_up(llm)
    return llm


def warm_up(llm: LLM) -> None:
    """Warm a model up and log how far that is, every few seconds."""
    began = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_S:
            last = time.monotonic()
            _log.info("warming up: %d of %d parts", done, total)

    try:
        llm.warm_up(report)
    except BaseException:
        llm.close()
        raise
    if llm.capacity.has_warm_up:
        _log.info("warmed up in %.1f s", time.monotonic() - began)


def check_model(path: Path) -> None:
    """Check the files of a model without loading it. Raises what is wrong with them."""
    with Checkpoint(path) as checkpoint:
        check_tensors(checkpoint, SalaConfig.load(path))


Loads = Literal["any", "default", "none"]  # which models a request may load


class Runtime:
    """The loaded models. A request loads the model it names; idle models are unloaded for it."""

    def __init__(self, settings: Settings, library: Library, observer: RequestStatistics | None = None) -> None:
        self.loaded: dict[str, LoadedModel] = {}
        self._settings = settings
        self.library = library
        self._observer = observer
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[LoadedModel]] = set()
        self._is_closing = False
        self.has_failed = False  # to load a model that is there
        self.default_id = library.default_id = self._find_default()
        library.aliases = dict.fromkeys(settings.alias, self.default_id)
        library.adapters = tuple(settings.named_adapters)

    @property
    def is_loading(self) -> bool:
        return bool(self._tasks)

    def jobs_waiting(self) -> dict[str, int]:
        """Return how many jobs wait for the models that are loaded, by what they wait for."""
        total = Counter(dict.fromkeys(("prepare", "templates", "grammars", "scores"), 0))
        for model in list(self.loaded.values()):
            total.update(model.service.jobs_waiting() | model.llm.inputs.jobs_waiting())
        return dict(total)

    def _find_default(self) -> str:
        """Return the id of the model that answers when none is named; a directory is registered in the library."""
        name, adapter = self._settings.model, self._settings.merged_adapter
        if name is None or name == EMBEDDED:
            return EMBEDDED
        entry = self.library.find_exactly(name)
        return self.library.register(find_base(find_model(name), adapter)[0]) if entry is None else entry.id

    async def get(
        self, name: str | None, is_background: bool = False, find_loads: Callable[[], Loads] = lambda: "any"
    ) -> LoadedModel:
        """Return a model by any of its names, by default the default one; load it first if necessary and allowed.

        MODEL:NAME and NAME ask for an adapter of the default model.
        """
        adapter = await asyncio.to_thread(self.library.find_adapter, name) if name and self.library.adapters else None
        if adapter is not None:
            model = await self.get(self.default_id, is_background, find_loads)
            return replace(model, id=f"{model.id}:{adapter}", adapter=adapter)
        model_id = self.library.resolve(name) if name else self.default_id
        unused_s = UNUSED_S if is_background else 0.0
        found = self.loaded.get(model_id) or await self._find_loaded(model_id)
        if found is None and (loads := find_loads()) != "any":
            model_id, _ = await asyncio.to_thread(self._find, model_id, self._settings.any_model)
            if model_id not in self.loaded and (loads == "none" or model_id != self.default_id):
                raise _not_loaded(loads)
        model = found or await self._load_shielded(model_id, unused_s)
        if not is_background:
            model.last_used = time.monotonic()
        return model

    def is_loaded(self, model: LoadedModel) -> bool:
        """Return whether a model that was found is still in memory, under any adapter."""
        return any(one.llm is model.llm for one in self.loaded.values())

    async def load(self, model_id: str) -> LoadedModel:
        """Load a model in addition to those that are loaded."""
        return self.loaded.get(model_id) or await self._load_shielded(model_id, None)

    async def unload(self, model_id: str) -> None:
        model = self.loaded[model_id]
        async with self._lock:
            if model.service.num_requests:
                busy = "that model is answering requests; try again when it has finished"
                raise ApiError(409, busy, code="model_busy")
            await self._unload(model, 0.0)

    async def close(self, drain_s: float) -> None:
        """Accept no more requests, and let running ones finish for up to `drain_s` seconds."""
        self._is_closing = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._unload(model, drain_s) for model in list(self.loaded.values())))

    async def watch(self) -> None:
        """Unload idle models, forever."""
        while True:
            await asyncio.sleep(min(CHECK_S, self._settings.idle_unload_s or CHECK_S))
            if self._settings.idle_unload_s:
                await self.unload_idle(self._settings.idle_unload_s)

    async def unload_idle(self, idle_s: float) -> None:
        for model in list(self.loaded.values()):
            async with self._lock:
                if model.service.num_requests:
                    model.last_used = time.monotonic()
                elif time.monotonic() - model.last_used >= idle_s:
                    _log.info("unloaded %s, which was idle", model.id)
                    await self._unload(model, 0.0)

    async def _find_loaded(self, name: str) -> LoadedModel | None:
        """Return a loaded model by another of its names, without waiting for one that is being loaded."""
        if not self.loaded:
            return None
        entry = await asyncio.to_thread(self.library.find_served, name)
        if entry is None:
            return self.loaded.get(self.default_id) if self._settings.any_model else None
        return self.loaded.get(entry.id)

    def _find(self, model_id: str, has_stand_in: bool) -> tuple[str, Path]:
        entry = self.library.find_served(model_id)
        if entry is not None:
            return entry.id, entry.path
        if model_id == self.default_id == EMBEDDED:
            with contextlib.suppress(SalaError):
                return EMBEDDED, find_model(None)
            raise _cannot_load(model_id)
        if has_stand_in and model_id != self.default_id:
            return self._find(self.default_id, False)
        raise no_such_model()

    async def _load_shielded(self, model_id: str, unused_s: float | None) -> LoadedModel:
        """Load a model, even if the client that asked for it disconnects: the next request will need it.

        Those that have not been used for `unused_s` seconds are unloaded before; none of them if it is None.
        """
        task = asyncio.create_task(self._load(model_id, unused_s))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[LoadedModel]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it: the clients have been told

    async def _load(self, model_id: str, unused_s: float | None) -> LoadedModel:
        has_stand_in = self._settings.any_model and unused_s is not None  # where a request is to be answered
        entry_id, path = await asyncio.to_thread(self._find, model_id, has_stand_in)
        async with self._lock:
            if entry_id in self.loaded:
                return self.loaded[entry_id]
            if self._is_closing:
                raise ApiError(503, "the server is shutting down", code="shutting_down", retry_s=30)
            if any(not model.service.is_alive for model in self.loaded.values()):
                raise EngineDead  # a new engine would fail in the same way: the process has to be replaced
            if unused_s is not None:
                await self._try(entry_id, check_model, path)  # don't unload a model for one that cannot be loaded
                await self._make_room(unused_s)
            began = time.monotonic()
            llm = await self._try(entry_id, open_model, path, self._settings)
            llm.service.max_queue = self._settings.max_queue
            llm.service.limit_time(self._settings.answer_seconds)
            llm.service.observe(self._observer, _log)
            llm.service.start()
            model = LoadedModel(entry_id, path, llm, time.time(), time.monotonic())
            self.loaded[entry_id] = model
            _log.info("%s is ready: loaded in %.1f s, context %s", entry_id, time.monotonic() - began, f"{llm.ctx:,}")
            return model

    async def _try(self, model_id: str, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.to_thread(work, *arguments)
        except Exception as error:
            self.has_failed = True
            _log.error("%s cannot be loaded: %s", model_id, str(error) or type(error).__name__)
            raise _cannot_load(model_id) from None

    async def _make_room(self, unused_s: float) -> None:
        """Unload the idle models. Raises if one is answering requests other than those in the background."""
        for model in list(self.loaded.values()):
            is_recent = time.monotonic() - model.last_used < unused_s
            if is_recent or model.service.num_requests > model.service.num_background:
                busy = f"the model {model.id} is answering requests; use it, or try again later"
                raise ApiError(503, busy, param="model", code="model_busy", retry_s=RETRY_S)
            await self._unload(model, 0.0)

    async def _unload(self, model: LoadedModel, drain_s: float) -> None:
        if self.loaded.get(model.id) is not model:
            return
        model.llm.service.refuse()  # before anything is awaited: what is accepted now would be cut off
        if not self._is_closing:
            del self.loaded[model.id]
        await asyncio.to_thread(model.llm.close, drain_s)
        self.loaded.pop(model.id, None)
        await asyncio.to_thread(trim_memory)


def no_such_model() -> ApiError:
    return ApiError(404, "there is no such model; GET /v1/models lists them", param="model", code="model_not_found")


def _not_loaded(loads: Loads) -> ApiError:
    if loads == "none":
        return ApiError(
            409, "that model is not loaded; send it a request first", param="model", code="model_not_loaded"
        )
    message = "that model is not loaded, and loading it needs the admin key"
    return ApiError(403, message, param="model", code="admin_key_needed")


def _cannot_load(model_id: str) -> ApiError:
    message = f"the model {model_id} cannot be loaded; the server's log says why"
    return ApiError(503, message, param="model", code="model_not_loaded", retry_s=RETRY_S)
