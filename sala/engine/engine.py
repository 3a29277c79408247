"""The engine: requests in, tokens out, one step at a time. It holds no tensors and imports no framework."""

import secrets
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sala.config import SparseConfig
from sala.engine.cache import Hybrid
from sala.engine.draft import Draft, Speculation, open_speculation
from sala.engine.prefixes import Snapshot
from sala.engine.scheduler import Request, Scheduler, SequenceState, Work, as_bytes
from sala.engine.tiers import TieredHybrid
from sala.errors import ContextTooLong, InputError
from sala.options import Attention
from sala.protocol import PENDING, Capacity, Executor, Options, Plan, Result, Row, SampledToken, Sampling

SPACED_FROM = 2048  # prompts at least this long leave snapshots on the way, closer together towards their end
NUM_SPACED = 4
MAX_SNAPSHOTS = 8  # per row
READ_S = 0.02  # longest wait for a file in a step that has nothing else to do
WARM_LENGTHS = (1, 2, 40, 100, 200, 500, 1000, 1500, 2048, 4096, 8448, 17000)  # lengths of warm-up prompts


@dataclass(frozen=True, slots=True)
class Update:
    """What a step did for a sequence: the tokens it sampled; the sequence may be finished."""

    sequence: SequenceState
    sampled: tuple[SampledToken, ...]


@dataclass(slots=True)
class Flight:
    """A step in flight: its work, the snapshots that it stores, and what waits for its result."""

    work: list[Work]
    snapshots: list[Snapshot] = field(default_factory=list)
    wait: Callable[[], Result] = lambda: Result(())
    dropped: set[int] = field(default_factory=set)  # sequences whose results are not valid any more
    began: float = field(default_factory=time.perf_counter)


class Engine:
    """Owns the executor. `submit` a request, then `step` until its sequence is finished.

    If the executor can run ahead, the engine launches a step before it has the tokens of the last one: the device never
    waits for the host. A sequence that turns out to be finished has then computed one token too many, which is dropped;
    one whose next step depends on the token (a grammar) waits for it, and takes part in every other step.

    Not thread-safe: `engine.service` calls it from one thread.
    """

    def __init__(
        self,
        executor: Executor,
        sparse: SparseConfig,
        options: Options,
        is_measured: bool = True,
        tiers: TieredHybrid | None = None,
    ) -> None:
        self._executor = executor
        self._own_sparse = sparse
        self._attention = options.attention_choice
        self._sparse = sparse.attending(self._attention)  # for requests that choose nothing
        self.tiers = tiers
        self.hybrid = Hybrid(executor, sparse, options.snapshots) if tiers is None else tiers
        capacity = executor.capacity
        max_batch = options.max_batch or capacity.max_batch
        self.scheduler = Scheduler(self.hybrid, capacity, max_batch, options.prefill_ms / 1000)
        drafting = (options.speculate, options.num_draft, options.draft_layers)
        self.speculation = open_speculation(*drafting, is_measured, capacity.can_draft)
        self._can_draft = options.speculate != "off"
        self._is_ahead = capacity.can_run_ahead and not self._can_draft
        self._flight: Flight | None = None  # launched, not yet recorded
        self._recorded_at = 0.0
        self._was_idle = False  # the last step had nothing to do
        self._late: list[Update] = []  # updates of a step that was interrupted

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait, none runs, and the next step will find nothing to do either."""
        is_reading = self.tiers is not None and self.tiers.is_reading
        return bool(self.scheduler.waiting) and not self.scheduler.running and self._was_idle and not is_reading

    def submit(self, request: Request, sibling: SequenceState | None = None, index: int = 0) -> SequenceState:
        """Queue a request. Siblings are other answers to the same prompt: they wait until its prefill is done."""
        self.check(request.prompt)
        sparse = self._attending(request.attention)
        if request.sampling.return_sources and not self.capacity.can_gather:
            raise InputError("return_sources", "is not supported by this backend", "use --backend torch")
        limit = self._executor.capacity.max_tokens
        seed = request.sampling.seed
        if seed is None:
            seed = (sibling.sampling.seed or 0) if sibling is not None else secrets.randbits(62)
        sequence = SequenceState(
            request=request,
            sampling=replace(request.sampling, seed=(seed + index + (1 << 63)) % (1 << 64) - (1 << 63)),
            regime=sparse.regime(len(request.prompt)),
            max_len=min(limit + 1, len(request.prompt) + request.sampling.max_tokens),
            boundaries=self._boundaries(request, sparse),
            after=sibling,
        )
        if self.tiers is not None and sibling is None:
            self.tiers.request(sequence)
        self.scheduler.add(sequence)
        return sequence

    def num_cached(self, prompt: Sequence[int], salt: str = "") -> int:
        """Return how many tokens of a prompt the cache holds, in any tier."""
        tokens, regime = as_bytes(prompt), self._sparse.regime(len(prompt))
        cached = self.hybrid.prefix.find(tokens, regime, salt)
        length = cached.length if cached else 0
        return length if self.tiers is None else self.tiers.num_below(tokens, regime, salt, length)

    def check(self, prompt: Sequence[int], attention: Attention | None = None) -> None:
        """Raise InputError or ContextTooLong for a prompt that can never run, or not with this attention."""
        self._attending(attention)
        limit = self._executor.capacity.max_tokens
        if not len(prompt):
            raise InputError("prompt", "is empty", "give at least one token")
        if len(prompt) > limit:
            raise ContextTooLong(len(prompt), limit)

    def _attending(self, choice: Attention | None) -> SparseConfig:
        """Return the geometry for a request. Raises InputError for a choice that the model does not allow."""
        return self._sparse if choice is None else self._own_sparse.attending(choice.over(self._attention))

    def _boundaries(self, request: Request, sparse: SparseConfig) -> tuple[int, ...]:
        """Return the lengths worth a snapshot: the caller's, where the regimes diverge, and some on the way."""
        length = len(request.prompt)
        spaced = [length - (length >> (k + 1)) for k in range(NUM_SPACED)] if length >= SPACED_FROM else []
        page = self._executor.capacity.page_size
        diverging = {one.agreement_len for one in (self._sparse, sparse)}
        wanted = {*request.boundaries, *diverging, *(at // page * page for at in spaced)}
        return tuple(sorted(at for at in wanted if 0 < at < length))

    def cancel(self, sequence: SequenceState, reason: str = "cancelled") -> None:
        """Stop a sequence at any point; what it has computed may become a snapshot."""
        if not sequence.is_finished:
            sequence.finish_reason = reason
            self._leave(sequence)
            if self.tiers is not None:
                self.tiers.finished(sequence)

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Prepare for requests of usual kinds, so that none of them waits for a compiler. For an idle engine only."""
        assert self.is_idle
        limit = self.capacity.max_tokens
        has_lengths = self.capacity.has_warm_up and limit > 2
        lengths = sorted({min(length, limit - 2) for length in WARM_LENGTHS}) if has_lengths else []
        total = len(lengths)

        def report(done: int, count: int) -> None:
            nonlocal total
            total = count + len(lengths)
            on_progress(done, total)

        if self.tiers is not None:
            self.tiers.is_paused = True
        self._executor.warm_up(report)
        speculation, self.speculation = self.speculation, Speculation("off", 0, 0)  # steps that compile must not count
        for left, length in zip(range(len(lengths) - 1, -1, -1), lengths, strict=True):
            for _ in range(2):  # the second time from a snapshot
                self.submit(Request([0] * length, Sampling(max_tokens=2, ignore_eos=True), salt="warm-up"))
                while not self.is_idle:
                    self.step()
            on_progress(total - left, total)
        self.speculation = speculation
        self.forget()
        if self.tiers is not None:
            self.tiers.is_paused = False

    def probe(self) -> None:
        """Raise if the device is lost, so that no request can succeed any more."""
        self._executor.probe()

    def forget(self) -> None:
        """Drop all snapshots, on the device and in host memory, and the counts of what they saved."""
        self.hybrid.clear()

    def step(self) -> list[Update]:
        """Launch the next plan. Return what became of the sequences of this step or, if it runs ahead, of the last."""
        if self.tiers is not None:
            self.tiers.collect(0.0 if self.scheduler.running or self._flight is not None else READ_S)
        work, refused = self._masked(self.scheduler.plan())
        self._was_idle = not work and not refused and self._flight is None
        last, flight = self._flight, Flight(work)
        failures: list[Update] = []
        if work:
            with self._isolating(failures, flight):
                flight.work = self._with_drafts(work)
                self._launch(flight)
                if self._can_draft:
                    self.speculation.read(flight.work)
        self._flight = flight if work and not failures else None
        updates = self._finish(last) if last is not None else []
        if self._flight is not None and not self._is_ahead:
            last, self._flight = self._flight, None
            updates += self._finish(last)
        late, self._late = self._late, []
        return late + refused + failures + updates

    def _launch(self, flight: Flight) -> None:
        """Launch a step; from now on its tokens count as computed."""
        rows = [self._row(item, flight) for item in flight.work]
        flight.wait = self._executor.launch(Plan(tuple(rows)))
        self.hybrid.unstored.clear()  # a step that runs before all calls that follow
        for item, row in zip(flight.work, rows, strict=True):
            item.sequence.num_computed += item.num_tokens
            item.sequence.num_pending += row.sampling is not None

    def _finish(self, flight: Flight) -> list[Update]:
        """Wait for a step and record its result."""
        failures: list[Update] = []
        with self._isolating(failures, flight, *([self._flight] if self._flight is not None else [])):
            result = flight.wait()
        if failures:
            self._flight = None
            return failures
        updates = self._record(flight, result)
        now = time.perf_counter()
        seconds = now - max(flight.began, self._recorded_at)
        self._recorded_at = now
        self.scheduler.measure(sum(item.num_tokens for item in flight.work if item.num_tokens > 1), seconds)
        if self._can_draft and all(item.num_tokens == 1 for item in flight.work):  # not the last chunk of a prompt
            num_tokens = sum(len(update.sampled) for update in updates)
            self.speculation.measure(num_tokens, seconds, flight.work)
        return [update for update in updates if update.sampled or update.sequence.is_finished]

    def _record(self, flight: Flight, result: Result) -> list[Update]:
        """Record what every row has done; an error in one row ends that row alone."""
        updates: list[Update] = []
        for index, (item, sampled) in enumerate(zip(flight.work, result.sampled, strict=True)):
            if item.sequence.is_finished or item.sequence.id in flight.dropped:
                continue  # since the step was launched
            try:
                updates.append(self._advance(item, sampled))
                if result.gathered and (found := result.gathered[index]) is not None:
                    item.sequence.gathered = found.joined(item.sequence.gathered, len(updates[-1].sampled))
            except Exception as error:
                item.sequence.error, item.sequence.finish_reason = error, "error"
                self.hybrid.release(item.sequence)  # its state is no longer valid
                self.scheduler.remove(item.sequence)
                updates.append(Update(item.sequence, ()))
            except BaseException:
                self._late += updates
                for left in flight.work[
                    index:
                ]:  # their states have advanced, their bookkeeping has not: compute them again
                    if not left.sequence.is_finished:
                        self._drop(left.sequence)
                raise
        if self.tiers is not None:
            for update in updates:
                if update.sequence.is_finished:
                    self.tiers.finished(update.sequence)
        return updates

    def _masked(self, work: list[Work]) -> tuple[list[Work], list[Update]]:
        """Add the masks of the controls; a control that raises ends its own sequence and no other."""
        out, refused = [], []
        for item in work:
            sequence = item.sequence
            if not sequence.request.controls or item.num_tokens < sequence.num_remaining:
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
        """Add drafts to the sequences that decode and may have some."""
        if not self._can_draft or not self.speculation.is_on:
            return work
        able = [index for index, item in enumerate(work) if self._may_draft(item)]
        sequences = [work[index].sequence for index in able]
        limits = [max(0, one.max_len - len(one.tokens) - 1) for one in sequences]
        drafts = self.speculation.plan(sequences, limits)
        fitting = {
            index: draft
            for index, draft in zip(able, drafts, strict=True)
            if draft.count and self.scheduler.can_draft(work[index].sequence, draft.count)
        }
        tokens = {index: draft.tokens for index, draft in fitting.items()} | self._ask(work, fitting)
        out = list(work)
        for index, draft in fitting.items():
            out[index] = replace(work[index], drafts=tokens[index][: draft.count], source=draft.source)
        return out

    def _ask(self, work: list[Work], drafts: Mapping[int, Draft]) -> dict[int, tuple[int, ...]]:
        """Return the drafts that are made by the first layers of the model or by the draft head."""
        asked = [index for index, draft in drafts.items() if not draft.tokens]
        if not asked:
            return {}
        began, counts = time.perf_counter(), [drafts[index].count for index in asked]
        plan = Plan(tuple(self._row(work[index]) for index in asked))
        if drafts[asked[0]].source == "layers":  # which write to pages: to those that every sequence has
            depth = min(counts)
            made = self._executor.draft(plan, depth, self.speculation.draft_layers)
        else:
            depth = max(counts)
            made = self._executor.draft(plan, depth)
        self.speculation.drafting_took(time.perf_counter() - began, depth)
        return dict(zip(asked, made, strict=True))

    def _may_draft(self, item: Work) -> bool:
        sequence = item.sequence
        is_free = len(sequence.tokens) - sequence.prompt_len >= sequence.sampling.min_tokens  # no token is banned
        return sequence.is_decoding and is_free and all(one.allows_drafts for one in sequence.request.controls)

    def _row(self, item: Work, flight: Flight | None = None) -> Row:
        sequence = item.sequence
        assert sequence.slot is not None
        start, end = sequence.num_computed, sequence.num_computed + item.num_tokens
        is_sampling = end == sequence.length
        sampling = sequence.sampling
        tokens = (*sequence.tokens[start:end], *item.drafts) if start < len(sequence.tokens) else (PENDING,)
        needs_bans = sequence.length - sequence.prompt_len < sampling.min_tokens
        history = (*sequence.tokens, *item.drafts) if item.drafts else sequence.tokens
        return Row(
            tokens=tokens,
            start=start,
            pages=tuple(sequence.pages),
            slot=sequence.slot,
            sparse_from=sequence.regime.sparse_from,
            topk=sequence.regime.topk,
            sampling=sampling if is_sampling else None,
            num_drafts=len(item.drafts),
            history=history if sampling.has_penalty and is_sampling else (),
            prompt_len=sequence.prompt_len,
            banned=tuple(sequence.request.stop_ids) if needs_bans else (),
            mask=item.mask,
            snapshots=() if flight is None else self._snapshots(sequence, start, end, flight),
            adapter=sequence.request.adapter,
            wants_sources=is_sampling and sampling.return_sources,
            is_followed=not self._can_draft or self.speculation.follows(item),
        )

    def _snapshots(self, sequence: SequenceState, start: int, end: int, flight: Flight) -> tuple[tuple[int, int], ...]:
        """Reserve the snapshots that a prefill row stores on its way, as (length, slot)."""
        last = len(sequence.tokens) - 1
        if not self.capacity.can_split or start >= last:
            return ()
        wanted = sorted({at for at in (*sequence.boundaries, last) if start < at <= min(end, last)})
        wanted.sort(key=lambda at: (at == last or at in sequence.request.kept, at))  # the least wanted first
        found = [self.hybrid.reserve(sequence, at) for at in sorted(wanted[-MAX_SNAPSHOTS:])]
        flight.snapshots += (snapshot for snapshot in found if snapshot is not None)
        return tuple((snapshot.length, snapshot.slot) for snapshot in found if snapshot is not None)

    def _advance(self, item: Work, sampled: tuple[SampledToken, ...]) -> Update:
        """Record what a row has done: its tokens, its snapshots, maybe its end."""
        sequence = item.sequence
        if not sampled:
            is_due = sequence.num_remaining == 1 or sequence.num_computed in sequence.boundaries
            if is_due and sequence.slot is not None and not self.capacity.can_split:
                self.hybrid.snapshot(sequence)
            return Update(sequence, ())
        sequence.num_pending -= 1
        sequence.num_computed += len(sampled) - 1
        if item.drafts:
            self.speculation.count(item, len(sampled) - 1)
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
    def _isolating(self, failures: list[Update], *flights: Flight) -> Iterator[None]:
        """If a step fails, discard what its rows have computed and run each of them alone.

        A sequence that fails alone ends with the error; the others go on.
        """
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what the step has allocated
            sequences = self._discard(flights)
            if len(sequences) == 1:
                sequences[0].error, sequences[0].finish_reason = error, "error"
                self.scheduler.remove(sequences[0])
            for sequence in sequences[1:] and sequences:
                sequence.is_suspect = True
            failures.extend(Update(sequence, ()) for sequence in sequences)
        except BaseException:
            self._discard(flights)
            raise

    def _discard(self, flights: Sequence[Flight]) -> list[SequenceState]:
        """Forget what steps that failed have computed; return their unfinished sequences, which wait again."""
        for flight in flights:
            for snapshot in flight.snapshots:
                if snapshot in self.hybrid.prefix:
                    self.hybrid.forget(snapshot)
        sequences = {item.sequence.id: item.sequence for flight in flights for item in flight.work}
        unfinished = [sequence for sequence in sequences.values() if not sequence.is_finished]
        for sequence in unfinished:
            self._drop(sequence)
        return unfinished

    def _drop(self, sequence: SequenceState) -> None:
        """Let a sequence wait to be computed again: its state, and a token in flight, are not valid."""
        if sequence.is_running:
            self.hybrid.release(sequence)
            self.scheduler.remove(sequence)
            self.scheduler.requeue(sequence)
        sequence.num_pending = 0
        if self._flight is not None:
            self._flight.dropped.add(sequence.id)

    def score(self, tokens: list[int], prompt_len: int, chunk: int, adapter: str = "") -> Generator[Any]:
        """Yield the logits of all tokens: the prompt in chunks, what follows token by token as in decoding."""
        self.check(tokens)
        sampling = Sampling()
        sequence = SequenceState(
            request=Request(tokens, sampling, salt=f"score {secrets.token_hex(8)}"),
            sampling=sampling,
            regime=self._sparse.regime(prompt_len),
            max_len=len(tokens),
            boundaries=(),
        )
        if not self.hybrid.admit(sequence):
            raise InputError("prompt", "does not fit alongside the requests that run", "wait for them, or cancel them")
        assert sequence.slot is not None
        try:
            at = 0
            while at < len(tokens):
                size = min(chunk, prompt_len - at) if at < prompt_len else 1
                piece = tuple(tokens[at : at + size])
                pages, (sparse_from, topk) = tuple(sequence.pages), sequence.regime
                row = Row(piece, at, pages, sequence.slot, sparse_from, adapter=adapter, topk=topk)
                yield self._executor.logits(row)
                at += size
        finally:
            self.hybrid.release(sequence)
