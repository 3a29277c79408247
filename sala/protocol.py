"""The seam between policy and backends: small frozen values and one protocol, nothing of any framework.

A prefill chunk, a decode step and a speculative verify have one shape: *n tokens from `start`*.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sala.errors import InputError

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is sampled. Temperature 0 takes the most probable one."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False
    think_budget: int | None = None  # tokens of reasoning at most
    loop_guard: int = 0  # end an answer that repeats itself for so many tokens; 0: never
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None  # in Lark's syntax

    def __post_init__(self) -> None:
        self._check_stop()
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, 0, 1 << 31)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("max_tokens", self.max_tokens, 1, 1 << 31)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _whole("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.think_budget is not None:
            _whole("think_budget", self.think_budget, 0, 1 << 31)
        if self.loop_guard:
            _whole("loop_guard", self.loop_guard, 32, 1 << 20)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("json_schema", "regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InputError(name, f"is {getattr(self, name)!r}"[:200], "give it as text")
        if not isinstance(self.ignore_eos, bool):
            raise InputError("ignore_eos", f"is {self.ignore_eos!r}", "it must be true or false")
        self._check_bias()

    def _check_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple):
            raise InputError("stop", f"is {stop!r}", "give one or more strings")
        object.__setattr__(self, "stop", tuple(stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InputError("stop", f"holds {text!r}", "give one or more strings that are not empty")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InputError("logit_bias", f"is {self.logit_bias!r}", "it maps token ids to numbers")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias token", token, 0, 1 << 31)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def has_penalty(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        above = f"above {low:g} and at most" if open_low else f"from {low:g} to"
        raise InputError(name, f"is {value!r}", f"it must be a number {above} {high:g}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(name, f"is {value!r}", f"it must be a whole number from {low} to {high}")


KV_KINDS = ("auto", "fp8")


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a checkpoint: chosen once, at load."""

    device: str = "auto"
    dtype: str = "auto"
    kv: str = "auto"  # how keys and values are kept: as computed, or rounded to 8 bits (fp8)
    ctx: int | None = None  # tokens of one sequence
    cache_memory: int | None = None  # bytes for pages and slots together
    max_batch: int = 8  # sequences that run at a time
    num_snapshots: int = 16  # states kept for reuse, at most
    speculate: str = "off"  # where drafts come from: off, lookup (the text so far), layers (the first of the model)
    num_draft: int = 4
    draft_layers: int = 8

    def __post_init__(self) -> None:
        _whole("max_batch", self.max_batch, 1, 1 << 16)
        _whole("num_snapshots", self.num_snapshots, 0, 1 << 16)
        _whole("num_draft", self.num_draft, 1, 64)
        _whole("draft_layers", self.draft_layers, 1, 1 << 10)
        for name in ("ctx", "cache_memory", "prefill_chunk"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, 1 << 50)
        if self.kv not in KV_KINDS:
            raise InputError("kv", f"is {self.kv!r}", "use " + " or ".join(KV_KINDS))
        if self.speculate not in ("off", "lookup", "layers"):
            raise InputError("speculate", f"is {self.speculate!r}", "use off, lookup or layers")

    prefill_chunk: int | None = None  # tokens of a step


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
