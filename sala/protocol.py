"""The seam between policy and backends: small frozen values and one protocol, nothing of any framework.

A prefill chunk, a decode step and a speculative verify have one shape: *n tokens from `start`*.
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
    num_drafts: int = 0  # trailing guesses to verify
    history: Sequence[int] = ()  # the tokens so far, `tokens` included; only where penalties need them
    prompt_len: int = 0  # how many of `history` are the prompt
    banned: tuple[int, ...] = ()  # tokens that may not be sampled now
    mask: bytes | None = None  # one bit per token of the vocabulary, little-endian: which may be sampled


@dataclass(frozen=True, slots=True)
class Plan:
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token; log-probabilities are of the model, before temperature and penalties."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What each row of the plan drew: nothing for a prefill chunk, else the accepted drafts and one token more."""

    sampled: tuple[tuple[SampledToken, ...], ...]


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of a tensor on their way to or from a file."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a control says about the token it has just seen: tokens that must follow, or an end."""

    force: tuple[int, ...] = ()
    finish: str | None = None


class Control(Protocol):
    """Steers one sequence: which tokens may come next, what must come, when it is enough."""

    allows_drafts: bool  # whether several tokens may be sampled before it is asked again

    def mask(self) -> bytes | None:
        """The tokens that may be sampled next, one bit each; None: all."""

    def observe(self, token: int) -> Verdict | None:
        """A token has been added to the answer."""


class Executor(Protocol):
    """Owns weights and cache of one backend. Runs plans; decides nothing."""

    capacity: Capacity

    def run(self, plan: Plan) -> Result:
        """Advance every row by its tokens and draw where asked."""

    def logits(self, row: Row) -> Any:
        """Advance one row and return a NumPy array [len(row.tokens), vocab] in float32: for scoring only."""

    def draft(self, plan: Plan, num_layers: int, count: int) -> tuple[tuple[int, ...], ...]:
        """Guess `count` tokens per row with the first layers alone; no state is advanced."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent state from slot to slot, for every (source, target)."""

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first rows of a page (and its pooled keys) to another, whose other rows become zero."""

    def clear_state(self, slot: int) -> None:
        """Make a slot the state of an empty sequence."""

    def dump(self, pages: Sequence[int], num_tokens: int, slot: int) -> dict[str, Blob]:
        """Everything that a sequence of so many tokens has in the cache."""

    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        """The reverse of `dump`; blobs of other names, sizes or precisions are a ValueError, and nothing changes."""

    def probe(self) -> None:
        """Raise if the device cannot compute any more: whatever it holds is lost then."""

    def close(self) -> None:
        """Give memory and files back; further calls are errors."""
