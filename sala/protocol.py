"""The interface between the engine and the backends: small frozen values and one protocol, free of any framework.

A prefill chunk, a decode step and the verification of drafts have one form: *n tokens from `start`*.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sala.options import Options as Options
from sala.options import Sampling as Sampling

COPY_SLACK = 1 << 14  # extra bytes of a copy of a snapshot, for the alignment of its tensors
PENDING = -1  # instead of a token: the one that the sequence's last row sampled, which the host does not know yet


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the executor can hold: pages of KV, tokens per page, slots of recurrent state, tokens per sequence."""

    num_pages: int
    page_size: int
    num_slots: int
    prefill_chunk: int
    max_tokens: int
    dtype: str = ""  # precision of keys and values
    max_batch: int = 8  # sequences that run at a time
    can_run_ahead: bool = False  # launches a step before the tokens of the last one are known (`PENDING`)
    page_bytes: int = 0  # bytes of a page in all layers
    slot_bytes: int = 0
    can_split: bool = False  # prefill: any chunks give the same bits, and a row stores states on the way (`snapshots`)
    can_draft: bool = False  # has a draft head
    can_gather: bool = False  # gathers what sampled positions attend to (`wants_sources`)
    has_warm_up: bool = False  # compiles kernels for sizes that it meets the first time
    offload: str = ""  # where keys and values lie, if not in the device's memory: "on disk", "in host memory"
    hot_bytes: int = 0  # of the device's memory, for copies of keys and values that lie in host memory

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def copy_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a copy of a snapshot in host memory, or about those of its file."""
        return self.pages_of(num_tokens) * self.page_bytes + self.slot_bytes + COPY_SLACK

    def num_resting(self, num_tokens: int, num_running: int) -> int:
        """Return how many conversations of so many tokens stay on the device besides some that run.

        One that runs has its own state, the snapshot it began from, and that of its prompt.
        """
        fitting = self.num_pages // max(1, self.pages_of(num_tokens))
        return max(0, min(self.num_slots - 3 * num_running, fitting - num_running))


@dataclass(frozen=True, slots=True)
class Row:
    """`tokens` of one sequence, to be run at positions `start`, `start + 1`, …"""

    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]  # KV of the sparse layers, in order
    slot: int  # state of the lightning layers
    sparse_from: int  # first position under the sparse rule (the regime of the request)
    sampling: Sampling | None = None  # None: a prefill chunk, nothing is sampled
    num_drafts: int = 0  # trailing tokens that are drafts to verify
    history: Sequence[int] = ()  # the tokens so far, `tokens` included; only where penalties need them
    prompt_len: int = 0  # how many tokens of the sequence are the prompt; 0 if that is not known
    banned: tuple[int, ...] = ()  # tokens that may not be sampled now
    mask: bytes | None = None  # one bit per token of the vocabulary, little-endian: which may be sampled
    snapshots: tuple[tuple[int, int], ...] = ()  # (length, slot), ascending: copy the state after so many tokens there
    adapter: str = ""  # fingerprint of the adapter by which the row is computed; empty: the model alone
    wants_sources: bool = False  # gather which blocks the sampled positions attend to
    topk: int | None = None  # blocks that a query selects, besides the most recent ones; None: as the model says
    is_followed: bool = True  # by the draft head, if there is one: its drafts may be wanted later

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token; log-probabilities are of the model, before temperature and penalties."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Gathered(Protocol):
    """How much sampled positions attended to each block of their context; kept by the backend."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_first(self) -> int:
        """Return how many blocks at the beginning take attention whatever they hold."""

    def joined(self, earlier: Any, count: int) -> "Gathered":
        """Add the first `count` of these positions to earlier ones of the same sequence, if any, and return these."""

    def by_block(self) -> list[float]:
        """Return the weight of each block, first to last."""


@dataclass(frozen=True, slots=True)
class Result:
    """The tokens sampled for each row: none for a prefill chunk, else the accepted drafts and one token more.

    `gathered` has an entry for each row, if any of them wants sources; it covers all positions that were sampled,
    rejected drafts included.
    """

    sampled: tuple[tuple[SampledToken, ...], ...]
    gathered: tuple[Gathered | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of a tensor on their way to or from a file."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a control demands after a token: tokens that must follow, or a finish reason."""

    force: tuple[int, ...] = ()
    finish: str | None = None


class Control(Protocol):
    """Steers one sequence: which tokens may be sampled, which must follow, and when to finish."""

    allows_drafts: bool  # whether several tokens may be sampled before it is asked again

    def mask(self) -> bytes | None:
        """Return the tokens that may be sampled next, one bit each; None: all."""

    def observe(self, token: int) -> Verdict | None:
        """Take note of a token that has been added to the answer."""


class Executor(Protocol):
    """Owns weights and cache of one backend. Runs plans; decides nothing."""

    capacity: Capacity

    def run(self, plan: Plan) -> Result:
        """Advance every row by its tokens and sample where asked."""

    def launch(self, plan: Plan) -> Callable[[], Result]:
        """Begin to `run` a plan. Return what waits for the result.

        Steps run in the order in which they are launched, and before all other calls that follow.
        """

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile and capture what steps may need; may take long, and reports parts done and parts in all."""

    def logits(self, row: Row) -> Any:
        """Advance one row and return a NumPy array [len(row.tokens), vocab] in float32: for scoring only."""

    def draft(self, plan: Plan, count: int, num_layers: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Draft `count` tokens per row by the first layers alone or, without their number, by the draft head.

        A trained exit has its own number of layers. No state is advanced.
        """

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent state from slot to slot, for every (source, target)."""

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first rows of a page (and its pooled keys) to another, whose other rows become zero."""

    def clear_state(self, slot: int) -> None:
        """Make a slot the state of an empty sequence."""

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return memory of the host for `dump`, to and from which the device copies fast. Raises InputError."""

    def dump(
        self, pages: Sequence[int], num_tokens: int, slot: int, memory: memoryview | None = None
    ) -> dict[str, Blob]:
        """Copy everything that a sequence of `num_tokens` tokens has in the cache, into `memory` if it is given."""

    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        """Reverse `dump`. Raises ValueError for blobs of other names, sizes or precisions, and changes nothing then."""

    def weigh_heads(self, weights: Sequence[Sequence[float]] | None, keeps_heads: bool = False) -> None:
        """Set how much the attention of each head of each sparse layer counts as a source; None: all the same.

        With `keeps_heads` the sums are kept by head, to learn such weights.
        """

    def probe(self) -> None:
        """Raise if the device can no longer compute; what it holds is lost then."""

    def close(self) -> None:
        """Free memory and files; further calls are errors."""
