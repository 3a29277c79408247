"""The interface between the engine and the backends: small frozen values and one protocol, free of any framework.

A prefill chunk, a decode step and the verification of drafts have one form: *n tokens from `start`*.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sala.options import Options as Options
from sala.options import Sampling as Sampling


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the executor can hold: pages of KV, tokens per page, slots of recurrent state, tokens per sequence."""

    num_pages: int
    page_size: int
    num_slots: int
    prefill_chunk: int
    max_tokens: int
    dtype: str = ""  # of keys and values


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
    prompt_len: int = 0  # how many of `history` are the prompt
    banned: tuple[int, ...] = ()  # tokens that may not be sampled now
    mask: bytes | None = None  # one bit per token of the vocabulary, little-endian: which may be sampled


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


@dataclass(frozen=True, slots=True)
class Result:
    """The tokens sampled for each row: none for a prefill chunk, else the accepted drafts and one token more."""

    sampled: tuple[tuple[SampledToken, ...], ...]


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

    def logits(self, row: Row) -> Any:
        """Advance one row and return a NumPy array [len(row.tokens), vocab] in float32: for scoring only."""

    def draft(self, plan: Plan, num_layers: int, count: int) -> tuple[tuple[int, ...], ...]:
        """Draft `count` tokens per row with the first layers alone; no state is advanced."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent state from slot to slot, for every (source, target)."""

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first rows of a page (and its pooled keys) to another, whose other rows become zero."""

    def clear_state(self, slot: int) -> None:
        """Make a slot the state of an empty sequence."""

    def dump(self, pages: Sequence[int], num_tokens: int, slot: int) -> dict[str, Blob]:
        """Return everything that a sequence of `num_tokens` tokens has in the cache."""

    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        """Reverse `dump`. Raises ValueError for blobs of other names, sizes or precisions, and changes nothing then."""

    def probe(self) -> None:
        """Raise if the device can no longer compute; what it holds is lost then."""

    def close(self) -> None:
        """Free memory and files; further calls are errors."""
