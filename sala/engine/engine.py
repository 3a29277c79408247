"""The engine: requests in, tokens out, one step at a time. It holds no tensors and imports no framework."""

import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sala.config import SparseConfig
from sala.engine.cache import Hybrid, Request, SequenceState
from sala.engine.draft import Speculation, lookup
from sala.engine.scheduler import Scheduler, Work
from sala.errors import ContextTooLong, InputError
from sala.protocol import Capacity, Executor, Options, Plan, Result, Row, SampledToken, Sampling

SPACED_FROM = 2048  # prompts at least this long leave snapshots on the way, closer together towards their end
NUM_SPACED = 4


@dataclass(frozen=True, slots=True)
class Update:
    """What a step did for a sequence: the tokens it sampled; the sequence may be finished."""

    sequence: SequenceState
    sampled: tuple[SampledToken, ...]


class Engine:
    """Owns the executor. `submit` a request, then `step` until its sequence is finished.

    Not thread-safe: `engine.service` calls it from one thread.
    """

    def __init__(self, executor: Executor, sparse: SparseConfig, options: Options, is_measured: bool = True) -> None:
        self._executor = executor
        self._sparse = sparse
        self.hybrid = Hybrid(executor, sparse, options.snapshots)
        self.scheduler = Scheduler(self.hybrid, options.max_batch, executor.capacity.prefill_chunk)
        self.speculation = Speculation(options.speculate, options.num_draft, options.draft_layers, is_measured)
        self._can_draft = options.speculate != "off"
        self._was_idle = False  # the last step had nothing to do
        self._late: list[Update] = []  # updates of a step that was interrupted
        self.before: Callable[[SequenceState], None] | None = None  # for a new request: may load its prefix
        self.after: Callable[[SequenceState], None] | None = None  # for a finished sequence: may save its prefix

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait, none runs, and the next step will find nothing to do either."""
        return bool(self.scheduler.waiting) and not self.scheduler.running and self._was_idle

    def submit(self, request: Request, sibling: SequenceState | None = None, index: int = 0) -> SequenceState:
        """Queue a request. Siblings are other answers to the same prompt: they wait until its prefill is done."""
        self.check(request.prompt)
        limit = self._executor.capacity.max_tokens
        seed = request.sampling.seed
        if seed is None:
            seed = (sibling.sampling.seed or 0) if sibling is not None else secrets.randbits(62)
        sequence = SequenceState(
            request=request,
            sampling=replace(request.sampling, seed=(seed + index + (1 << 63)) % (1 << 64) - (1 << 63)),
            sparse_from=self._sparse.sparse_from(len(request.prompt)),
            max_len=min(limit + 1, len(request.prompt) + request.sampling.max_tokens),
            boundaries=self._boundaries(request),
            after=sibling,
        )
        if self.before is not None and sibling is None:
            self.before(sequence)
        self.scheduler.add(sequence)
        return sequence

    def check(self, prompt: Sequence[int]) -> None:
        """Raise InputError or ContextTooLong for a prompt that can never run."""
        limit = self._executor.capacity.max_tokens
        if not len(prompt):
            raise InputError("prompt", "is empty", "give at least one token")
        if len(prompt) > limit:
            raise ContextTooLong(len(prompt), limit)

    def _boundaries(self, request: Request) -> tuple[int, ...]:
        """Return the lengths worth a snapshot: the caller's, where the regimes diverge, and some on the way."""
        length = len(request.prompt)
        spaced = [length - (length >> (k + 1)) for k in range(NUM_SPACED)] if length >= SPACED_FROM else []
        page = self._executor.capacity.page_size
        wanted = {*request.boundaries, self._sparse.agreement_len, *(at // page * page for at in spaced)}
        return tuple(sorted(at for at in wanted if 0 < at < length))

    def cancel(self, sequence: SequenceState, reason: str = "cancelled") -> None:
        """Stop a sequence at any point; what it has computed may become a snapshot."""
        if not sequence.is_finished:
            sequence.finish_reason = reason
            self._leave(sequence)
            if self.after is not None and sequence.error is None:
                self.after(sequence)

    def probe(self) -> None:
        """Raise if the device is lost, so that no request can succeed any more."""
        self._executor.probe()

    def forget(self) -> None:
        """Drop all snapshots."""
        for snapshot in list(self.hybrid.prefix):
            self.hybrid.forget(snapshot)

    def step(self) -> list[Update]:
        """Run the next plan. Return what became of its sequences."""
        began = time.perf_counter()
        work, refused = self._masked(self.scheduler.plan())
        self._was_idle = not work and not refused
        if not work:
            return refused
        with self._isolating(work) as failures:
            work = self._with_drafts(work)
            result = self._executor.run(Plan(tuple(self._row(item) for item in work)))
        if failures:
            return refused + failures
        updates = self._record(work, result)
        if self._can_draft and all(update.sampled for update in updates):
            num_tokens = sum(len(update.sampled) for update in updates)
            self.speculation.measure(num_tokens, time.perf_counter() - began, any(item.drafts for item in work))
        late, self._late = self._late, []
        return late + refused + [update for update in updates if update.sampled or update.sequence.is_finished]

    def _record(self, work: list[Work], result: Result) -> list[Update]:
        """Record what every row has done; an error in one row ends that row alone."""
        updates = []
        for index, (item, sampled) in enumerate(zip(work, result.sampled, strict=True)):
            try:
                updates.append(self._advance(item, sampled))
            except Exception as error:
                item.sequence.error, item.sequence.finish_reason = error, "error"
                self.hybrid.release(item.sequence)  # its state is no longer valid
                self.scheduler.remove(item.sequence)
                updates.append(Update(item.sequence, ()))
            except BaseException:
                for left in work[index:]:  # their states have advanced, their bookkeeping has not: compute them again
                    if not left.sequence.is_finished:
                        self.scheduler.preempt(left.sequence)
                self._late += updates
                raise
        if self.after is not None:
            for update in updates:
                if update.sequence.is_finished and update.sequence.error is None:
                    self.after(update.sequence)
        return updates

    def _masked(self, work: list[Work]) -> tuple[list[Work], list[Update]]:
        """Add the masks of the controls; a control that raises ends its own sequence and no other."""
        out, refused = [], []
        for item in work:
            sequence = item.sequence
            if not (sequence.request.controls and sequence.is_decoding):
                out.append(item)
                continue
            try:
                masks = [control.mask() for control in sequence.request.controls]
                out.append(replace(item, mask=next((mask for mask in masks if mask is not None), None)))
            except Exception as error:
                sequence.error = error
                self.cancel(sequence, "error")
                refused.append(Update(sequence, ()))
        return out, refused

    def _with_drafts(self, work: list[Work]) -> list[Work]:
        """Add drafts, if speculation is on and every sequence of the step is decoding."""
        if not self._can_draft or not self.speculation.is_on or not all(self._may_draft(item) for item in work):
            return work
        count = self.speculation.num_draft
        limits = [min(count, item.sequence.max_len - len(item.sequence.tokens) - 1) for item in work]
        limits = [
            limit if limit > 0 and self.scheduler.can_draft(item.sequence, limit) else 0
            for item, limit in zip(work, limits, strict=True)
        ]
        if self.speculation.mode == "lookup":
            drafts = [lookup(item.sequence, limit) for item, limit in zip(work, limits, strict=True)]
        else:
            drafts = self._ask_layers(work, limits)
        return [replace(item, drafts=some[:limit]) for item, some, limit in zip(work, drafts, limits, strict=True)]

    def _ask_layers(self, work: list[Work], limits: list[int]) -> list[tuple[int, ...]]:
        """Return drafts made by the first layers of the model."""
        able = [index for index, limit in enumerate(limits) if limit]
        drafts: list[tuple[int, ...]] = [()] * len(work)
        if able:
            plan = Plan(tuple(self._row(work[index]) for index in able))
            made = self._executor.draft(plan, self.speculation.draft_layers, min(limits[index] for index in able))
            for index, tokens in zip(able, made, strict=True):
                drafts[index] = tokens
        return drafts

    def _may_draft(self, item: Work) -> bool:
        sequence = item.sequence
        is_free = len(sequence.tokens) - sequence.prompt_len >= sequence.sampling.min_tokens  # no token is banned
        return sequence.is_decoding and is_free and all(one.allows_drafts for one in sequence.request.controls)

    def _row(self, item: Work) -> Row:
        sequence = item.sequence
        assert sequence.slot is not None
        start, end = sequence.num_computed, sequence.num_computed + item.num_tokens
        is_sampling = end == len(sequence.tokens)
        sampling = sequence.sampling
        tokens = (*sequence.tokens[start:end], *item.drafts)
        needs_bans = len(sequence.tokens) - sequence.prompt_len < sampling.min_tokens
        return Row(
            tokens=tokens,
            start=start,
            pages=tuple(sequence.pages),
            slot=sequence.slot,
            sparse_from=sequence.sparse_from,
            sampling=sampling if is_sampling else None,
            num_drafts=len(item.drafts),
            history=(*sequence.tokens, *item.drafts) if sampling.has_penalty and is_sampling else (),
            prompt_len=sequence.prompt_len,
            banned=tuple(sequence.request.stop_ids) if needs_bans else (),
            mask=item.mask,
        )

    def _advance(self, item: Work, sampled: tuple[SampledToken, ...]) -> Update:
        """Record what a row has done: its tokens, its snapshots, maybe its end."""
        sequence = item.sequence
        sequence.num_computed += item.num_tokens + max(0, len(sampled) - 1)
        if not sampled:
            if sequence.num_remaining == 1 or sequence.num_computed in sequence.boundaries:
                self.hybrid.snapshot(sequence)
            return Update(sequence, ())
        if item.drafts:
            self.speculation.count(len(item.drafts), len(sampled) - 1)
        kept: list[SampledToken] = []
        for one in sampled:
            kept.append(self._take(sequence, one))
            if sequence.is_finished:
                break
        if sequence.is_finished:
            self._leave(sequence)
        else:
            self.hybrid.truncate(sequence)
        return Update(sequence, tuple(kept))

    def _take(self, sequence: SequenceState, sampled: SampledToken) -> SampledToken:
        """Add a token to the answer; may set the finish reason."""
        if sequence.forced:
            sampled = SampledToken(sequence.forced.popleft())
        sequence.append(sampled.token)
        sequence.sampled.append(sampled)
        num_sampled = len(sequence.tokens) - sequence.prompt_len
        if (
            sampled.token in sequence.request.stop_ids
            and not sequence.sampling.ignore_eos
            and num_sampled > sequence.sampling.min_tokens
        ):
            sequence.finish_reason = "stop"
            return sampled
        try:
            for control in sequence.request.controls:
                verdict = control.observe(sampled.token)
                if verdict is not None:
                    sequence.forced.extend(verdict.force)
                    sequence.finish_reason = sequence.finish_reason or verdict.finish
        except Exception as error:
            sequence.error, sequence.finish_reason = error, "error"
        if sequence.finish_reason is None and len(sequence.tokens) >= sequence.max_len:
            sequence.finish_reason = "length"
        return sampled

    def _leave(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        self.hybrid.donate(sequence)

    @contextmanager
    def _isolating(self, work: list[Work]) -> Iterator[list[Update]]:
        """If a step fails, discard what its rows have computed and run each of them alone.

        A sequence that fails alone ends with the error; the others go on.
        """
        failures: list[Update] = []
        try:
            yield failures
        except Exception as error:
            sequences = [item.sequence for item in work]
            for sequence in sequences:
                self.hybrid.release(sequence)
                self.scheduler.remove(sequence)
            if len(sequences) == 1:
                sequences[0].error = error
                sequences[0].finish_reason = "error"
            else:
                for sequence in sequences:
                    sequence.is_suspect = True
                    self.scheduler.requeue(sequence)
            failures.extend(Update(sequence, ()) for sequence in sequences)
        except BaseException:
            for item in work:
                self.scheduler.preempt(item.sequence)
            raise

    def score(self, tokens: list[int], prompt_len: int, chunk: int) -> Generator[Any]:
        """Yield the logits of all tokens: the prompt in chunks, what follows token by token as in decoding."""
        self.check(tokens)
        sampling = Sampling()
        sequence = SequenceState(
            request=Request(tokens, sampling, salt=f"score {secrets.token_hex(8)}"),
            sampling=sampling,
            sparse_from=self._sparse.sparse_from(prompt_len),
            max_len=len(tokens),
            boundaries=(),
        )
        if not self.hybrid.admit(sequence):
            raise InputError("prompt", "does not fit beside the requests that run", "wait for them, or cancel them")
        assert sequence.slot is not None
        try:
            at = 0
            while at < len(tokens):
                size = min(chunk, prompt_len - at) if at < prompt_len else 1
                piece = tuple(tokens[at : at + size])
                yield self._executor.logits(Row(piece, at, tuple(sequence.pages), sequence.slot, sequence.sparse_from))
                at += size
        finally:
            self.hybrid.release(sequence)
