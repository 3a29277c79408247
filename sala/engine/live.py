"""One live sequence on an executor: it prefills in chunks, draws tokens, and keeps what it has computed.

The next prompt continues from the end of the last answer, or from a snapshot taken just before its first token
(the answer was edited, regenerated, or its reasoning dropped); only what is new is computed. What was computed under
another regime (dense or sparse) is reused no further than both regimes agree.
"""

import secrets
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from sala.config import SparseConfig
from sala.errors import ContextTooLong, InputError
from sala.protocol import Drawn, Executor, Plan, Row, Sampling

FinishReason = Literal["stop", "length"]
Progress = Callable[[int, int], None]  # tokens of the prompt done, tokens in all

LIVE, SNAPSHOT = 0, 1  # slots


class LiveSequence:
    def __init__(self, executor: Executor, sparse: SparseConfig) -> None:
        self._executor = executor
        self._sparse = sparse
        self._pages = tuple(range(executor.capacity.num_pages))
        self._tokens: list[int] = []  # what pages and the live slot hold
        self._snapshot_len: int | None = None
        self._sparse_from = 0

    def reset(self) -> None:
        """Forget everything."""
        self._tokens = []
        self._snapshot_len = None

    def num_reusable(self, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt need no computing."""
        sparse_from = self._sparse.sparse_from(len(prompt))
        lengths = [len(self._tokens)] + ([] if self._snapshot_len is None else [self._snapshot_len])
        return max((n for n in lengths if self._can_reuse(n, prompt, sparse_from)), default=0)

    def _can_reuse(self, length: int, prompt: Sequence[int], sparse_from: int) -> bool:
        same_regime = sparse_from == self._sparse_from or length <= self._sparse.agreement_len
        return length < len(prompt) and same_regime and self._tokens[:length] == list(prompt[:length])

    def prefill(self, prompt: Sequence[int], on_progress: Progress | None = None) -> int:
        """Compute all of the prompt but its last token; returns how many tokens were there already."""
        limit = self._executor.capacity.max_tokens
        if not prompt:
            raise InputError("prompt", "is empty", "give at least one token")
        if len(prompt) > limit:
            raise ContextTooLong(len(prompt), limit)
        reused = self.num_reusable(prompt)
        self._rewind(reused)
        self._sparse_from = self._sparse.sparse_from(len(prompt))
        last = len(prompt) - 1
        chunk = self._executor.capacity.prefill_chunk
        for begin in range(reused, last, chunk):
            if on_progress is not None:
                on_progress(begin, len(prompt))
            self._run(prompt[begin : min(begin + chunk, last)])
        self._copy_state(LIVE, SNAPSHOT)
        self._snapshot_len = last
        if on_progress is not None:
            on_progress(last, len(prompt))
        return reused

    def draw(
        self, prompt: Sequence[int], sampling: Sampling, stop_ids: Collection[int]
    ) -> Generator[Drawn, None, FinishReason]:
        """After `prefill`: tokens one by one, the stop token included. Returns the finish reason."""
        sampling = sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(63))
        room = self._executor.capacity.max_tokens - len(prompt) + 1
        token = prompt[-1]
        for _ in range(min(sampling.max_tokens, room)):
            drawn = self._run((token,), sampling, len(prompt))
            yield drawn
            token = drawn.token
            if token in stop_ids and not sampling.ignore_eos:
                return "stop"
        return "length"

    def logits(self, tokens: Sequence[int], prompt_len: int, chunk: int) -> Iterator[Any]:
        """Logits of all tokens, in pieces: the prompt by chunks, what follows token by token as when decoding."""
        limit = self._executor.capacity.max_tokens
        if len(tokens) > limit:
            raise ContextTooLong(len(tokens), limit)
        self._rewind(0)
        self._sparse_from = self._sparse.sparse_from(prompt_len)
        at = 0
        while at < len(tokens):
            size = min(chunk, prompt_len - at) if at < prompt_len else 1
            yield self._guard(lambda row: self._executor.logits(row), tokens[at : at + size])
            at += size

    def _run(self, tokens: Sequence[int], sampling: Sampling | None = None, prompt_len: int = 0) -> Any:
        return self._guard(lambda row: self._executor.run(Plan((row,))).drawn[0], tokens, sampling, prompt_len)

    def _guard(
        self,
        call: Callable[[Row], Any],
        tokens: Sequence[int],
        sampling: Sampling | None = None,
        prompt_len: int = 0,
    ) -> Any:
        """Run one row; if it does not end well, nothing of the past can be trusted."""
        start = len(self._tokens)
        needed = -(-(start + len(tokens)) // self._executor.capacity.page_size)
        self._tokens.extend(tokens)
        needs_history = sampling is not None and sampling.has_penalty
        row = Row(
            tokens=tuple(tokens),
            start=start,
            pages=self._pages[:needed],
            slot=LIVE,
            sparse_from=self._sparse_from,
            sampling=sampling,
            history=self._tokens if needs_history else (),
            prompt_len=prompt_len,
        )
        try:
            return call(row)
        except BaseException:
            self.reset()
            raise

    def _rewind(self, length: int) -> None:
        if length != len(self._tokens) or length == 0:
            if length == 0:
                self._executor.clear_state(LIVE)
            else:
                self._copy_state(SNAPSHOT, LIVE)
            del self._tokens[length:]
        if self._snapshot_len is not None and self._snapshot_len > length:
            self._snapshot_len = None

    def _copy_state(self, source: int, target: int) -> None:
        self._executor.copy_states([(source, target)])
