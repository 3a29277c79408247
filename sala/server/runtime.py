"""Which models are loaded: loads what is asked for, unloads what is idle."""

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
from sala.engine.loop import Observer
from sala.errors import SalaError
from sala.llm import LLM
from sala.models.catalog import Library
from sala.models.embedded import EMBEDDED, find_base, find_model
from sala.server.http.errors import ApiError
from sala.server.settings import Settings
from sala.server.worker import Worker

CHECK_S = 1.0  # between two looks for idle models
RETRY_S = 5
T = TypeVar("T")
_log = logging.getLogger("sala.server")
OpenModel = Callable[[Path, Settings], LLM]


@dataclass(eq=False)
class LoadedModel:
    id: str
    path: Path
    llm: LLM
    worker: Worker
    loaded_at: float  # seconds since 1970
    last_used: float  # monotonic


def open_model(path: Path, settings: Settings) -> LLM:
    """Load a model; the adapter of the settings belongs to the one that answers by default."""
    base, adapter = _find_chosen(settings)
    adapter = adapter if adapter is not None and path.resolve() == base.resolve() else None
    return LLM(path, options=settings.loading, adapter=adapter)


def _find_chosen(settings: Settings) -> tuple[Path, Path | None]:
    """The model that the settings name, and its adapter."""
    return find_base(find_model(settings.model), settings.adapter)


def check_model(path: Path) -> None:
    """What can be wrong with the files of a model, found without taking memory for it."""
    with Checkpoint(path) as checkpoint:
        check_tensors(checkpoint, SalaConfig.load(path))


class Runtime:
    """The loaded models. One that a request names is loaded for it; another that is idle makes room."""

    def __init__(
        self, settings: Settings, library: Library, observer: Observer | None = None, open_model: OpenModel = open_model
    ) -> None:
        self.loaded: dict[str, LoadedModel] = {}
        self._settings = settings
        self.library = library
        self._observer = observer
        self._open = open_model
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[LoadedModel]] = set()
        self._num_loading = 0
        self._is_closing = False
        self.default_id = self._find_default()

    @property
    def is_loading(self) -> bool:
        return self._num_loading > 0

    def _find_default(self) -> str:
        """The id of the model that answers when none is named; a directory is made known to the library."""
        name = self._settings.model
        if name is None or name == EMBEDDED:
            return EMBEDDED
        entry = self.library.find(name)
        if entry is not None:
            return entry.id
        return self.library.register(_find_chosen(self._settings)[0])

    async def get(self, model_id: str | None) -> LoadedModel:
        """A model that is ready; by default the default one. One that is known and not loaded is loaded first."""
        model_id = model_id or self.default_id
        model = self.loaded.get(model_id) or await self._bring(model_id, makes_room=True)
        model.last_used = time.monotonic()
        return model

    async def load(self, model_id: str) -> LoadedModel:
        """Load a model beside those that are there."""
        return self.loaded.get(model_id) or await self._bring(model_id, makes_room=False)

    async def unload(self, model_id: str) -> None:
        model = self.loaded.get(model_id)
        if model is None:
            raise ApiError(404, "that model is not loaded", param="model", code="model_not_loaded")
        async with self._lock:
            if model.worker.num_requests:
                raise ApiError(409, "that model has requests to answer; try again when it is done", code="model_busy")
            await self._unload(model, 0.0)

    async def close(self, drain_s: float) -> None:
        """Take no more requests; let those that run end for a while."""
        self._is_closing = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._unload(model, drain_s) for model in list(self.loaded.values())))

    async def watch(self) -> None:
        """Unload what is idle, for ever."""
        while True:
            await asyncio.sleep(min(CHECK_S, self._settings.idle_unload_s or CHECK_S))
            if self._settings.idle_unload_s:
                await self.unload_idle(self._settings.idle_unload_s)

    async def unload_idle(self, idle_s: float) -> None:
        for model in list(self.loaded.values()):
            async with self._lock:
                if model.worker.num_requests:
                    model.last_used = time.monotonic()
                elif time.monotonic() - model.last_used >= idle_s:
                    _log.info("%s was idle: unloaded", model.id)
                    await self._unload(model, 0.0)

    def _find(self, model_id: str) -> tuple[str, Path]:
        entry = self.library.find(model_id)
        if entry is not None:
            return entry.id, entry.path
        if model_id == self.default_id == EMBEDDED:
            with contextlib.suppress(SalaError):
                return EMBEDDED, find_model(None)
            raise _cannot_load(model_id)
        raise ApiError(404, "there is no such model", param="model", code="model_not_found")

    async def _bring(self, model_id: str, makes_room: bool) -> LoadedModel:
        """Loading goes on if whoever asked for it leaves: the next one will want it too."""
        task = asyncio.create_task(self._load(model_id, makes_room))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        self._num_loading += 1
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[LoadedModel]") -> None:
        self._tasks.discard(task)
        self._num_loading -= 1
        if not task.cancelled():
            task.exception()  # those who asked have been told

    async def _load(self, model_id: str, makes_room: bool) -> LoadedModel:
        entry_id, path = await asyncio.to_thread(self._find, model_id)
        async with self._lock:
            if entry_id in self.loaded:
                return self.loaded[entry_id]
            if self._is_closing:
                raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "30"})
            if makes_room:
                await self._try(entry_id, check_model, path)  # nobody goes for a model that cannot come
                await self._make_room()
            llm = await self._try(entry_id, self._open, path, self._settings)
            worker = Worker(llm, self._settings.max_queue, self._observer)
            model = LoadedModel(entry_id, path, llm, worker, time.time(), time.monotonic())
            self.loaded[entry_id] = model
            return model

    async def _try(self, model_id: str, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.to_thread(work, *arguments)
        except Exception as error:
            _log.error("%s cannot be loaded: %s", model_id, error or type(error).__name__)
            raise _cannot_load(model_id) from None

    async def _make_room(self) -> None:
        """A request brings its model: those that are idle go, those that work are not disturbed."""
        for model in list(self.loaded.values()):
            if model.worker.num_requests:
                raise ApiError(
                    503,
                    f"the model {model.id} is at work; ask for it, or try again later",
                    param="model",
                    code="model_busy",
                    headers={"Retry-After": str(RETRY_S)},
                )
            await self._unload(model, 0.0)

    async def _unload(self, model: LoadedModel, drain_s: float) -> None:
        if self.loaded.get(model.id) is not model:
            return
        if not self._is_closing:
            del self.loaded[model.id]
        await model.worker.close(drain_s)
        self.loaded.pop(model.id, None)


def _cannot_load(model_id: str) -> ApiError:
    return ApiError(
        503,
        f"the model {model_id} cannot be loaded; the server's log says why",
        param="model",
        code="model_not_loaded",
        headers={"Retry-After": str(RETRY_S)},
    )
