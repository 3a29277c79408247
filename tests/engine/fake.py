"""An executor without a model: it remembers tokens where a real one keeps numbers, and checks what it is told.

A slot holds the very tokens that its state has seen; a page holds the tokens at its rows. If a row's state and pages
do not agree with its past, the engine has made a mistake, and the fake says so. The next token is a hash of all that
came before.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sala.config import Regime
from sala.protocol import PENDING, Blob, Capacity, Plan, Result, Row, SampledToken

VOCAB = 50


def next_token(past: Sequence[int], seed: int | None, regime: Regime) -> int:
    is_whole = len(past) <= max(regime.sparse_from, (regime.topk + 2) * 16)  # as in `test_engine.SPARSE`
    text = ",".join(map(str, (*past, seed or 0, "" if is_whole else regime)))
    return hashlib.sha256(text.encode()).digest()[0] % VOCAB


def plain(prompt: Sequence[int], count: int, seed: int | None, regime: Regime) -> list[int]:
    """What any engine must answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, regime))
    return tokens[len(prompt) :]


def regime_of(row: Row) -> Regime:
    assert row.topk is not None
    return Regime(row.sparse_from, row.topk)


@dataclass
class Faults:
    """Mistakes to plant."""

    advance_rejected: bool = False
    snapshot_off_by_one: bool = False
    fail_on: int | None = None  # a token that makes a step explode


class FakeExecutor:
    is_ahead = False  # like a GPU: tokens of the last step need not be known, and a row stores states on its way

    def __init__(
        self, num_pages: int = 64, num_slots: int = 8, page_size: int = 16, chunk: int = 32, ctx: int = 600
    ) -> None:
        sizes = (num_pages, page_size, num_slots, chunk, min(ctx, num_pages * page_size))
        bytes_of = {"page_bytes": 4 * page_size, "slot_bytes": 16}
        self.capacity = Capacity(*sizes, can_run_ahead=self.is_ahead, can_split=self.is_ahead, **bytes_of)  # type: ignore[arg-type]
        self.last: dict[int, int] = {}  # sampled by the last row of a slot
        self.states: list[tuple[int, ...]] = [(-1,)] * num_slots
        self.pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.faults = Faults()
        self.num_tokens = 0
        self.plans: list[Plan] = []

    def launch(self, plan: Plan) -> Callable[[], Result]:
        rows = (replace(row, tokens=(self.last[row.slot],)) if PENDING in row.tokens else row for row in plan.rows)
        result = self.run(Plan(tuple(rows)))
        for row, sampled in zip(plan.rows, result.sampled, strict=True):
            self.last.pop(row.slot, None)
            if sampled:
                self.last[row.slot] = sampled[-1].token
        return lambda: result

    def run(self, plan: Plan) -> Result:
        self.plans.append(plan)
        slots = [row.slot for row in plan.rows]
        slots += [slot for row in plan.rows for _, slot in row.snapshots]
        assert len(set(slots)) == len(slots), "two rows or snapshots share a slot"
        if any(self.faults.fail_on in row.tokens for row in plan.rows):
            for row in plan.rows:
                self.states[row.slot] = (-2,)  # whatever a failed step leaves behind
            raise MemoryError("out of memory")
        return Result(tuple(self._run(row) for row in plan.rows))

    def _run(self, row: Row) -> tuple[SampledToken, ...]:
        past = self._past(row)
        certain = row.tokens[: len(row.tokens) - row.num_drafts]
        drafts = row.tokens[len(certain) :]
        for offset, token in enumerate(row.tokens):
            page, line = divmod(row.start + offset, self.capacity.page_size)
            self.pages[row.pages[page]][line] = token
        self.num_tokens += len(row.tokens)
        assert self.capacity.can_split or not row.snapshots
        for length, slot in row.snapshots:
            assert row.start < length <= row.end
            stored = (*past, *certain)[:length]
            self.states[slot] = stored[:-1] if self.faults.snapshot_off_by_one else stored
        if row.sampling is None:
            self.states[row.slot] = (*past, *certain)
            return ()
        seen = [*past, *certain]
        out: list[SampledToken] = []
        for index in range(len(drafts) + 1):
            token = next_token(seen, row.sampling.seed if row.sampling.temperature else None, regime_of(row))
            out.append(SampledToken(token))
            if index < len(drafts) and token != drafts[index]:
                break
            if index < len(drafts):
                seen.append(token)
        accepted = len(drafts) if self.faults.advance_rejected else len(out) - 1
        self.states[row.slot] = (*past, *certain, *drafts[:accepted])
        return tuple(out)

    def _past(self, row: Row) -> tuple[int, ...]:
        """The state and the pages must tell the same story."""
        state = self.states[row.slot]
        size = self.capacity.page_size
        pages = tuple(self.pages[row.pages[at // size]][at % size] for at in range(row.start))
        assert len(state) == row.start, f"the state has seen {len(state)} tokens, the row starts at {row.start}"
        assert state == pages, "state and pages disagree"
        assert -(-(row.start + len(row.tokens)) // size) <= len(row.pages), "pages are missing"
        assert row.start + len(row.tokens) <= self.capacity.max_tokens, "beyond the context"
        return state

    def draft(self, plan: Plan, count: int, num_layers: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Right guesses, except every third."""
        out = []
        for row in plan.rows:
            seen = [*self._past(row), *row.tokens]
            guesses = []
            for _ in range(count):
                seed = row.sampling.seed if row.sampling and row.sampling.temperature else None
                token = next_token(seen, seed, regime_of(row))
                guesses.append(token if len(seen) % 3 else (token + 1) % VOCAB)
                seen.append(guesses[-1])
            out.append(tuple(guesses))
        return tuple(out)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            state = self.states[source]
            self.states[target] = state[:-1] if self.faults.snapshot_off_by_one else state

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        size = self.capacity.page_size
        self.pages[target] = [*self.pages[source][:num_rows], *[None] * (size - num_rows)]

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """There is nothing to compile."""

    def probe(self) -> None:
        """There is no device to be lost."""

    def clear_state(self, slot: int) -> None:
        self.states[slot] = ()

    def host_memory(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def dump(
        self, pages: Sequence[int], num_tokens: int, slot: int, memory: memoryview | None = None
    ) -> dict[str, Blob]:
        size = self.capacity.page_size
        tokens = [self.pages[pages[at // size]][at % size] for at in range(num_tokens)]
        assert tuple(tokens) == self.states[slot]
        data = b"".join(int(token or 0).to_bytes(4, "little") for token in tokens)
        if memory is not None:
            memory[: len(data)] = data
        return {"state": Blob("I32", (num_tokens,), memoryview(data) if memory is None else memory[: len(data)])}

    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        if set(blobs) != {"state"} or blobs["state"].shape != (num_tokens,):
            raise ValueError("other layers")
        tokens = memoryview(bytes(blobs["state"].data)).cast("i").tolist()
        self.states[slot] = tuple(tokens)
        for at, token in enumerate(tokens):
            self.pages[pages[at // self.capacity.page_size]][at % self.capacity.page_size] = token

    def logits(self, row: Row) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass
