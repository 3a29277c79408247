"""LLM: answers prompts and conversations from synchronous code."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from sala.engine.requests import Call, Prompt, PromptScoring, Submission
from sala.engine.sessions import SessionStore
from sala.engine.stream import Completion, Event, StreamItem
from sala.llm import base
from sala.protocol import SampledToken

if TYPE_CHECKING:
    import numpy


class LLM(base.BaseLLM[Iterator[Event], Completion]):
    """Loads a checkpoint directory, or without one the embedded model, and answers prompts, one or many at a time.

    >>> llm = LLM("path/to/MiniCPM-SALA")
    >>> llm.chat([{"role": "user", "content": "Hello"}]).text

    See BaseLLM for the options. Methods may be called from several threads; their requests run together.
    """

    def many(
        self, calls: Iterable[Call], max_waiting: int = base.MAX_WAITING
    ) -> Iterator[tuple[Any, Completion | Exception]]:
        """Answer a stream of calls, as many at a time as fit; yields (key, completion or error) as they complete.

        Calls are taken from the iterable only as there is room for them, so it may be endless. A call with `n` > 1
        yields its key `n` times.
        """
        source = ((call.key, self._submission(call)) for call in calls)
        for key, _, result in self.service.run_all(source, max_waiting):
            yield key, result

    def logits(
        self, token_ids: Sequence[int], chunk: int | None = None, prompt_len: int | None = None
    ) -> "numpy.ndarray[Any, Any]":
        """Return the logits after every token: float32 array [len(token_ids), vocab_size].

        `chunk` tokens are computed at a time. Tokens from `prompt_len` on are treated as decoded ones (they matter only
        around the switch from dense to sparse attention); by default all belong to the prompt.
        """
        import numpy as np

        return np.concatenate(self.score_parts(self.scoring(token_ids, lambda logits, _: logits, chunk, prompt_len)))

    def score(self, prompt: Prompt, top: int = 0, chunk: int | None = None) -> list[SampledToken]:
        """Return the log-probability of every token of the prompt after the first, with `top` alternatives."""
        return [token for part in self.score_parts(self.token_scoring(prompt, top, chunk)) for token in part]

    def score_parts(self, scoring: PromptScoring, on_progress: base.OnProgress | None = None) -> list[Any]:
        """Score a prompt and return what its `reduce` made of every chunk."""
        submission = Submission(scores=[scoring], wants_progress=on_progress is not None)
        return base.parts_of(self._read(submission, on_progress))

    def perplexity(self, text: Prompt, chunk: int | None = None) -> float:
        """Return exp of the mean negative log-likelihood of every token after the first."""
        return base.perplexity(self.score(text, chunk=chunk))

    def save_session(
        self, store: SessionStore, name: str, prompt: Prompt, on_progress: base.OnProgress | None = None
    ) -> int:
        """Compute a prompt and save its KV cache under a name; returns its number of tokens."""
        store.check_new(name)
        ids = self.encode(prompt)
        base.first_completion(self._stream(self._session_call(ids), on_progress))
        return self.service.execute(self._save, store, name, ids).result()

    def load_session(self, store: SessionStore, name: str) -> list[int]:
        """Load a saved KV cache; returns its tokens, to be continued."""
        return self.service.execute(self._load, store, name).result()

    def reset(self) -> None:
        """Drop everything that is cached: the next prompt is computed from its first token."""
        self.service.execute(self.engine.forget).result()

    def close(self, drain_s: float = 0.0) -> None:
        """Let what runs end for `drain_s`, then cancel it and free the memory. The object cannot be used afterwards."""
        self._close(drain_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(
        self, prepare: Callable[[], Submission], finish: Callable[[Iterable[StreamItem]], Any], on_progress: Any
    ) -> Any:
        return finish(self._read(prepare(), on_progress))

    def _stream(self, call: Call, on_progress: base.OnProgress | None) -> Iterator[Event]:
        submission = self._prepare(call, on_progress=on_progress, is_streamed=True)
        return (item for item in self._read(submission, on_progress) if isinstance(item, Event))

    def _read(self, submission: Submission, on_progress: base.OnProgress | None) -> Iterator[StreamItem]:
        """Queue the request when the first item is asked for; leaving early cancels it."""
        with self.service.submit(submission) as stream:
            base.report_start(submission, on_progress)
            for item in stream:
                if not base.report(item, on_progress):
                    yield item
