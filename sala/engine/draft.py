"""Speculative decoding: where drafts come from, and whether they pay.

`lookup` finds the last place where the text continued from the same few tokens, and drafts that continuation. `layers`
drafts with the first layers of the model. Either way the whole model verifies every draft, so the output is the same as
without them.
"""

from dataclasses import dataclass

from sala.engine.cache import TOKEN_BYTES, SequenceState

LONGEST, SHORTEST = 4, 2  # tokens that must match before a draft is made
PROBE_STEPS = 4  # plain steps at first, to measure what they cost
TRIAL_ROUNDS = 12  # rounds before drafts may be switched off


def lookup(sequence: SequenceState, count: int) -> tuple[int, ...]:
    """Return the tokens that followed the last earlier occurrence of the sequence's end; the longest match wins."""
    tokens, text = sequence.tokens, sequence.token_bytes
    for size in range(LONGEST, SHORTEST - 1, -1):
        if len(tokens) <= size:
            continue
        at = _last_before_end(text, size)
        if at is not None:
            return tuple(tokens[at + size : at + size + count])
    return ()


def _last_before_end(text: bytearray, size: int) -> int | None:
    """Return the index of the last earlier occurrence of the final `size` tokens; None if there is none."""
    pattern = bytes(text[-size * TOKEN_BYTES :])
    end = len(text) - TOKEN_BYTES
    while (at := text.rfind(pattern, 0, end)) >= 0:
        if at % TOKEN_BYTES == 0:
            return at // TOKEN_BYTES
        end = at + len(pattern) - 1
    return None


@dataclass(slots=True)
class Pace:
    """Tokens and seconds of decoding, with or without drafts."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Speculation:
    """Counts rounds and acceptance; measures decoding with and without drafts and switches off what is slower."""

    def __init__(self, mode: str, num_draft: int, draft_layers: int, is_measured: bool = True) -> None:
        self.mode = mode
        self.num_draft = num_draft
        self.draft_layers = draft_layers
        self.rounds = self.drafted = self.accepted = 0
        self.off_because: str | None = None
        self._is_measured = is_measured
        self._plain, self._drafting = Pace(), Pace()

    @property
    def is_on(self) -> bool:
        if self.mode == "off" or self.off_because is not None:
            return False
        return not self._is_measured or self._plain.steps >= PROBE_STEPS

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def count(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted

    def measure(self, tokens: int, seconds: float, has_drafts: bool) -> None:
        """Record a step in which every sequence decoded."""
        if self.mode == "off" or self.off_because is not None or not self._is_measured:
            return
        (self._drafting if has_drafts else self._plain).add(tokens, seconds)
        if self._drafting.steps >= TRIAL_ROUNDS and self._drafting.rate < self._plain.rate:
            loss = 1 - self._drafting.rate / self._plain.rate
            self.off_because = (
                f"drafts cost {loss:.0%} of the speed ({self.acceptance:.0%} accepted, "
                f"{self.tokens_per_round:.2f} tokens per round)"
            )

    def summary(self) -> str:
        """Return one line for display."""
        if self.mode == "off":
            return "speculation is off"
        line = (
            f"speculation ({self.mode}): {self.rounds} rounds, {self.acceptance:.0%} of drafts accepted, "
            f"{self.tokens_per_round:.2f} tokens per round"
        )
        return f"{line}; switched off: {self.off_because}" if self.off_because else line
