"""LLM: answers prompts and conversations from synchronous code."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from sala.engine.requests import Call, Prompt, PromptScoring, Submission, Tools
from sala.engine.sessions import SessionStore
from sala.engine.stream import Completion, Event, PromptScores, StreamItem
from sala.llm import base
from sala.protocol import SampledToken, Sampling
from sala.text.template import Message

if TYPE_CHECKING:
    import numpy


class LLM(base.BaseLLM):
    """Loads a checkpoint directory, or without one the embedded model, and answers prompts, one or many at a time.

    >>> llm = LLM("path/to/MiniCPM-SALA")
    >>> llm.chat([{"role": "user", "content": "Hello"}]).text

    See BaseLLM for the options. Methods may be called from several threads; their requests run together.
    """

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        on_progress: base.OnProgress | None = None,
        **settings: Any,
    ) -> Any:
        """Continue a text or token ids → Completion; a list for several prompts, and for several answers (`n` > 1).

        `settings` are fields of Sampling, such as `temperature=0`. A string is encoded with BOS as the model wants it;
        special tokens that it spells out stay text (encode with `tokenizer.encode(..., parse_special=True)` otherwise).
        Several prompts run together; several answers share the prefill of their prompt.
        """
        submission = self._generation(prompt, base.merge(sampling, settings), n, on_progress)
        return base.arrange(self._read(submission, on_progress), prompt, n)

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        is_chat: bool = False,
        on_progress: base.OnProgress | None = None,
        **settings: Any,
    ) -> Iterator[Event]:
        """Like `generate` for one prompt, piece by piece; the last event carries the completion.

        With `is_chat` the prompt is a rendered conversation: reasoning is taken out of the answer.
        """
        return self._stream(Call(None, base.merge(sampling, settings), prompt=prompt, is_chat=is_chat), on_progress)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        tools: Tools | None = None,
        on_progress: base.OnProgress | None = None,
        **settings: Any,
    ) -> Completion:
        """Answer a conversation in the form `[{"role": "user", "content": "..."}, …]`.

        A conversation that continues an earlier one computes only what is new. Only with `tools` are tool calls taken
        out of the answer.
        """
        return self.answer(Call(None, base.merge(sampling, settings), messages=messages, tools=tools), on_progress)

    def answer(self, call: Call, on_progress: base.OnProgress | None = None) -> Completion:
        """Answer one call, whatever it asks for; of several answers (`n` > 1) return the first."""
        submission = self.inputs.submit(call, is_streamed=False, wants_progress=on_progress is not None)
        return base.first_completion(self._read(submission, on_progress))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        tools: Tools | None = None,
        on_progress: base.OnProgress | None = None,
        **settings: Any,
    ) -> Iterator[Event]:
        """Like `chat`, piece by piece; the last event carries the completion."""
        return self._stream(Call(None, base.merge(sampling, settings), messages=messages, tools=tools), on_progress)

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
        items = self._read(submission, on_progress)
        return [part for item in items if isinstance(item, PromptScores) for part in item.parts]

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

    def _stream(self, call: Call, on_progress: base.OnProgress | None) -> Iterator[Event]:
        submission = self.inputs.submit(call, wants_progress=on_progress is not None)
        return (item for item in self._read(submission, on_progress) if isinstance(item, Event))

    def _read(self, submission: Submission, on_progress: base.OnProgress | None = None) -> Iterator[StreamItem]:
        """Queue the request when the first item is asked for; leaving early cancels it."""
        with self.service.submit(submission) as stream:
            base.report_start(submission, on_progress)
            for item in stream:
                if not base.report(item, on_progress):
                    yield item
