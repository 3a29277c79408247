"""The loaded models: load them on request, unload them when idle."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sala.checkpoint.names import check_tensors
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.engine.loop import RequestStatistics
from sala.engine.service import EngineService
from sala.errors import SalaError
from sala.llm import LLM
from sala.models.catalog import Library
from sala.models.embedded import EMBEDDED, find_base, find_model
from sala.server.http.errors import ApiError
from sala.server.settings import Settings

CHECK_S = 1.0  # between two checks for idle models
RETRY_S = 5
T = TypeVar("T")
_log = logging.getLogger("sala.server")


@dataclass(eq=False)
class LoadedModel:
    id: str
    path: Path
    llm: LLM
    loaded_at: float  # seconds since 1970
    last_used: float  # monotonic

    @property
    def service(self) -> EngineService:
        return self.llm.service


def open_model(path: Path, settings: Settings) -> LLM:
    """Load a model. The adapter in the settings belongs to the default model."""
    base, adapter = find_base(find_model(settings.model), settings.adapter)
    return LLM(path, options=settings.loading, adapter=adapter if path.resolve() == base.resolve() else None)


def check_model(path: Path) -> None:
    """Check the files of a model without loading it. Raises what is wrong with them."""
    with Checkpoint(path) as checkpoint:
        check_tensors(checkpoint, SalaConfig.load(path))


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
        self.default_id = self._find_default()

    @property
    def is_loading(self) -> bool:
        return bool(self._tasks)

    def _find_default(self) -> str:
        """Return the id of the model that answers when none is named; a directory is registered in the library."""
        name, adapter = self._settings.model, self._settings.adapter
        if name is None or name == EMBEDDED:
            return EMBEDDED
        entry = self.library.find(name)
        return self.library.register(find_base(find_model(name), adapter)[0]) if entry is None else entry.id

    async def get(self, model_id: str | None) -> LoadedModel:
        """Return a loaded model, by default the default one; load it first if necessary."""
        model_id = model_id or self.default_id
        model = self.loaded.get(model_id) or await self._load_shielded(model_id, makes_room=True)
        model.last_used = time.monotonic()
        return model

    async def load(self, model_id: str) -> LoadedModel:
        """Load a model in addition to those that are loaded."""
        return self.loaded.get(model_id) or await self._load_shielded(model_id, makes_room=False)

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

    def _find(self, model_id: str) -> tuple[str, Path]:
        entry = self.library.find(model_id)
        if entry is not None:
            return entry.id, entry.path
        if model_id == self.default_id == EMBEDDED:
            with contextlib.suppress(SalaError):
                return EMBEDDED, find_model(None)
            raise _cannot_load(model_id)
        raise no_such_model()

    async def _load_shielded(self, model_id: str, makes_room: bool) -> LoadedModel:
        """Load a model, even if the client that asked for it disconnects: the next request will need it."""
        task = asyncio.create_task(self._load(model_id, makes_room))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[LoadedModel]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it: the clients have been told

    async def _load(self, model_id: str, makes_room: bool) -> LoadedModel:
        entry_id, path = await asyncio.to_thread(self._find, model_id)
        async with self._lock:
            if entry_id in self.loaded:
                return self.loaded[entry_id]
            if self._is_closing:
                raise ApiError(503, "the server is shutting down", code="shutting_down", retry_s=30)
            if makes_room:
                await self._try(entry_id, check_model, path)  # don't unload a model for one that cannot be loaded
                await self._make_room()
            llm = await self._try(entry_id, open_model, path, self._settings)
            llm.service.max_queue = self._settings.max_queue
            llm.service.observe(self._observer, _log)
            llm.service.start()
            model = LoadedModel(entry_id, path, llm, time.time(), time.monotonic())
            self.loaded[entry_id] = model
            return model

    async def _try(self, model_id: str, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.to_thread(work, *arguments)
        except Exception as error:
            _log.error("%s cannot be loaded: %s", model_id, error or type(error).__name__)
            raise _cannot_load(model_id) from None

    async def _make_room(self) -> None:
        """Unload the idle models. Raises if one is answering requests."""
        for model in list(self.loaded.values()):
            if model.service.num_requests:
                busy = f"the model {model.id} is answering requests; use it, or try again later"
                raise ApiError(503, busy, param="model", code="model_busy", retry_s=RETRY_S)
            await self._unload(model, 0.0)

    async def _unload(self, model: LoadedModel, drain_s: float) -> None:
        if self.loaded.get(model.id) is not model:
            return
        if not self._is_closing:
            del self.loaded[model.id]
        await asyncio.to_thread(model.llm.close, drain_s)
        self.loaded.pop(model.id, None)


def no_such_model() -> ApiError:
    return ApiError(404, "there is no such model; GET /v1/models lists them", param="model", code="model_not_found")


def _cannot_load(model_id: str) -> ApiError:
    message = f"the model {model_id} cannot be loaded; the server's log says why"
    return ApiError(503, message, param="model", code="model_not_loaded", retry_s=RETRY_S)
