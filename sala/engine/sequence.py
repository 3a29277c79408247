"""One request on its way: its tokens, what of them is computed, and what it holds in the cache."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from sala.engine.cache.prefix import as_bytes
from sala.protocol import Control, SampledToken, Sampling

_ids = count()


@dataclass(eq=False, slots=True)
class Request:
    """What a caller asks for. `boundaries` are lengths at which the prompt may be continued differently later."""

    prompt: Sequence[int]
    sampling: Sampling
    stop_ids: Collection[int] = ()
    salt: str = ""
    boundaries: tuple[int, ...] = ()
    controls: tuple[Control, ...] = ()
    forced: tuple[int, ...] = ()  # tokens that the answer must begin with


@dataclass(eq=False, slots=True)
class SequenceState:
    request: Request
    sampling: Sampling  # with a seed
    sparse_from: int
    max_len: int  # tokens, prompt and answer together
    boundaries: tuple[int, ...]
    after: "SequenceState | None" = None  # a sibling whose prefill it shares
    tokens: list[int] = field(default_factory=list)
    token_bytes: bytearray = field(default_factory=bytearray)
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    num_computed: int = 0
    num_cached: int | None = None  # of the prompt, known at the first admission
    turn: int = 0  # the scheduler's, when it was admitted or last read
    is_suspect: bool = False  # was there when a step failed: runs alone to its end
    sampled: list[SampledToken] = field(default_factory=list)
    forced: deque[int] = field(default_factory=deque)
    finish_reason: str | None = None
    error: Exception | None = None
    id: int = field(default_factory=lambda: next(_ids))

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_remaining(self) -> int:
        """Tokens not yet computed; the last of them is the one to draw from."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.token_bytes += as_bytes((token,))

    def next_stop(self) -> int:
        """How far the prefill may run before the state is wanted: the next boundary, or the last token but one."""
        last = len(self.tokens) - 1
        return min((at for at in self.boundaries if self.num_computed < at < last), default=last)
