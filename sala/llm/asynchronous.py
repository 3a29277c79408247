"""AsyncLLM: LLM for asyncio."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sala.engine.requests import Call, Prompt, PromptScoring, Submission
from sala.engine.sessions import SessionStore
from sala.engine.stream import Completion, Event, OnProgress, StreamItem
from sala.llm import base
from sala.llm.scores import perplexity
from sala.protocol import SampledToken, Sampling

if TYPE_CHECKING:
    import numpy

    from sala.llm.documents import AsyncDocuments, DocumentAnswer, Paths


class AsyncLLM(base.BaseLLM[AsyncIterator[Event], Coroutine[Any, Any, Completion]]):
    """LLM for asyncio: the same methods as coroutines and asynchronous iterators, for any number of tasks at a time.

    >>> llm = await AsyncLLM.load("path/to/MiniCPM-SALA")
    >>> async for event in llm.stream_chat([{"role": "user", "content": "Hello"}]):
    ...     print(event.text, end="")

    The constructor takes the options of LLM and blocks while it loads; `load` does that in a thread. Prompts are
    encoded in a thread pool and computed on the engine's own thread: the event loop never waits for the model.
    Callbacks run on the event loop. Cancelling a task, or leaving an iterator early (close it with `aclose()`),
    cancels its request.
    """

    @classmethod
    async def load(cls, model: str | Path | None = None, **options: Any) -> Self:
        """Load a model without blocking the event loop."""
        return await asyncio.to_thread(cls, model, **options)

    async def many(
        self, calls: Iterable[Call] | AsyncIterable[Call], max_waiting: int = base.MAX_WAITING
    ) -> AsyncIterator[tuple[Any, Completion | Exception]]:
        """Answer a stream of calls, as many at a time as fit; yields (key, completion or error) as they complete."""

        async def prepare() -> AsyncIterator[tuple[Any, Submission | Exception]]:
            async for call in _aiter(calls):
                yield call.key, await self.service.call(self._submission, call)

        async for key, _, result in self.service.arun_all(prepare(), max_waiting):
            yield key, result

    async def read(self, paths: "Paths") -> "AsyncDocuments":
        """Read files, directories and globs, ready for questions; `left_out` says what could not be read, and why."""
        from sala.llm.documents import AsyncDocuments

        return await asyncio.to_thread(AsyncDocuments.read, self, paths)

    async def ask(
        self, paths: "Paths", question: str, sampling: Sampling | None = None, **more: Any
    ) -> "DocumentAnswer":
        """Answer a question about files; `more` are arguments of `Documents.ask`. Long ones are summarised by parts."""
        return await (await self.read(paths)).ask(question, sampling, **more)

    async def logits(
        self, token_ids: Sequence[int], chunk: int | None = None, prompt_len: int | None = None
    ) -> "numpy.ndarray[Any, Any]":
        """Return the logits after every token: float32 array [len(token_ids), vocab_size]."""
        import numpy as np

        scoring = self.scoring(token_ids, lambda logits, _: logits, chunk, prompt_len)
        return np.concatenate(await self._score(lambda: scoring))

    async def score(self, prompt: Prompt, top: int = 0, chunk: int | None = None) -> list[SampledToken]:
        """Return the log-probability of every token of the prompt after the first, with `top` alternatives."""
        return [token for part in await self._score(lambda: self.token_scoring(prompt, top, chunk)) for token in part]

    async def perplexity(self, text: Prompt, chunk: int | None = None) -> float:
        """Return exp of the mean negative log-likelihood of every token after the first."""
        return perplexity(await self.score(text, chunk=chunk))

    async def save_session(
        self,
        store: SessionStore,
        name: str,
        prompt: Prompt,
        on_progress: OnProgress | None = None,
        adapter: str | None = None,
    ) -> int:
        """Compute a prompt and save its KV cache under a name; returns its number of tokens."""
        store.check_new(name)
        ids = await self.service.call(self.encode, prompt)
        async for _ in self._stream(self._session_call(ids, adapter), on_progress):
            continue
        return await asyncio.wrap_future(self.service.execute(self._save, store, name, ids, adapter))

    async def load_session(self, store: SessionStore, name: str) -> list[int]:
        """Load a saved KV cache; returns its tokens, to be continued."""
        return await asyncio.wrap_future(self.service.execute(self._load, store, name))

    async def warm_up(self, on_progress: OnProgress | None = None) -> None:
        """Compile kernels and capture graphs for the usual requests now; without a GPU there is nothing to do."""
        await asyncio.wrap_future(self._warm_up(on_progress))

    async def reset(self) -> None:
        """Drop everything that is cached: the next prompt is computed from its first token."""
        await asyncio.wrap_future(self.service.execute(self.engine.forget))

    async def close(self, drain_s: float = 0.0) -> None:
        """Let what runs end for `drain_s`, then cancel it and free the memory."""
        await asyncio.to_thread(self._close, drain_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _collect(self, prepare: base.Prepare, finish: base.Finish, on_progress: Any) -> Any:
        return finish([item async for item in self._read(prepare, on_progress)])

    async def _stream(self, call: Call, on_progress: OnProgress | None) -> AsyncIterator[Event]:
        items = self._read(lambda: self._prepare(call, on_progress=on_progress, is_streamed=True), on_progress)
        async with contextlib.aclosing(items):
            async for item in items:
                if isinstance(item, Event):
                    yield item

    async def _score(self, prepare: Callable[[], PromptScoring]) -> Any:
        return await self._collect(lambda: Submission(scores=[prepare()]), base.parts_of, None)

    async def _read(self, prepare: base.Prepare, on_progress: OnProgress | None) -> AsyncGenerator[StreamItem]:
        async with await self.service.open(prepare) as stream:
            base.report_start(stream.handle.submission, on_progress)
            async for item in stream:
                if not base.report(item, on_progress):
                    yield item


async def _aiter(source: Iterable[Call] | AsyncIterable[Call]) -> AsyncIterator[Call]:
    if isinstance(source, AsyncIterable):
        async for call in source:
            yield call
    else:
        for call in source:
            yield call
