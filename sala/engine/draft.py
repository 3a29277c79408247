"""Speculative decoding: where drafts come from, how many are made, and whether they pay.

`lookup` finds the last place where the text continued from the same few tokens, and drafts that continuation. `layers`
drafts with the first layers of the model, `head` with a trained draft head. Either way the whole model verifies every
draft, so the output is the same as without them.

With `lookup` and `layers` every sequence gets the same number of drafts, until they turn out to be slower.
`AdaptiveSpeculation` (`head` and `auto`) decides for each sequence and step: by how often its drafts were accepted, and
by what a step costs with so many rows. A draft head has to follow what the model computes, which costs a little in
every step: where its drafts are not worth their cost it stops following, and resumes shortly before a new try.
"""

import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from sala.engine.scheduler import TOKEN_BYTES, SequenceState, Work

LONGEST, SHORTEST = 4, 2  # tokens that must match before a draft is made
SIZES = range(LONGEST, SHORTEST - 1, -1)
SECRET = secrets.randbits(62)  # part of all hashes, so that nobody can write prompts whose runs collide
MOST_RUNS = 1 << 14  # added to an index per step; a long text is scanned until its index has caught up
PROBE_STEPS = 4  # plain steps at first, to measure what they cost
TRIAL_ROUNDS = 12  # rounds before drafts may be switched off
LEAST_GAIN = 1.03  # a round must be expected to be this many times as fast as plain steps
PROBE_AFTER, PROBE_AT_MOST = 16, 256  # tokens without drafts before a sequence tries one again
LEAVE_AFTER, CATCH_UP = 2, 4  # useless steps before the head stops following; steps it follows before a new try


class Ngrams:
    """Where each run of SHORTEST to LONGEST tokens of a text ended last: hash tables that grow with the text.

    A table has the last place by the hash of a run, and by place the one before with the same hash.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # of the text, whose runs are known
        self._mask = 0
        self._last: dict[int, array[int]] = {}  # by the length of a run
        self._before: dict[int, array[int]] = {}

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Add the runs that end within the first `end` tokens, or some of them if there are very many."""
        if len(tokens) > self._mask:
            self._mask, self.num_tokens = (1 << max(8, len(tokens).bit_length())) - 1, 0
            self._last = {size: array("i", [-1]) * (self._mask + 1) for size in SIZES}
            self._before = {size: array("i", [-1]) * (size - 1) for size in SIZES}
        end = min(end, self.num_tokens + MOST_RUNS)
        for size in SIZES:
            last, add, mask = self._last[size], self._before[size].append, self._mask
            start = max(self.num_tokens, size - 1)
            for at, number in enumerate(_hashes(tokens, size, start, end), start):
                slot = number & mask
                add(last[slot])
                last[slot] = at
        self.num_tokens = max(self.num_tokens, end)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return after how many tokens the longest run at the end of an indexed text ended before."""
        for size in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
            run, (number,) = tokens[-size:], _hashes(tokens, size, len(tokens) - 1, len(tokens))
            at = self._last[size][number & self._mask]
            while at >= 0:
                if tokens[at + 1 - size : at + 1] == run:
                    return at + 1
                at = self._before[size][at]
        return None


def _hashes(tokens: Sequence[int], size: int, start: int, end: int) -> Iterator[int]:
    """Return the hashes of the runs of `size` tokens whose last tokens are those from `start` to `end`."""
    return map(hash, zip(repeat(SECRET), *(tokens[start - back : end - back] for back in range(size))))


def lookup(sequence: SequenceState, count: int) -> tuple[int, ...]:
    """Return the tokens that followed the last earlier occurrence of the sequence's end; the longest match wins."""
    tokens, ngrams = sequence.tokens, drafts_of(sequence).ngrams
    ngrams.extend(tokens, len(tokens) - 1)
    at = ngrams.find(tokens) if ngrams.num_tokens == len(tokens) - 1 else scan(sequence)
    return () if at is None else tuple(tokens[at : at + count])


def scan(sequence: SequenceState) -> int | None:
    """Return what `Ngrams.find` would, without an index."""
    for size in range(min(LONGEST, len(sequence.tokens) - 1), SHORTEST - 1, -1):
        at = _last_before_end(sequence.token_bytes, size)
        if at is not None:
            return at + size
    return None


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


@dataclass(frozen=True, slots=True)
class Draft:
    """What a sequence gets in a step: a number of drafts from a source, or given tokens."""

    source: str = ""
    count: int = 0
    tokens: tuple[int, ...] = ()


class Speculation:
    """Counts rounds and acceptance; measures decoding with and without drafts and switches off what is slower."""

    def __init__(self, mode: str, num_draft: int, draft_layers: int, is_measured: bool = True) -> None:
        self.mode = mode
        self.sources: tuple[str, ...] = (mode,)
        self.num_draft = num_draft
        self.draft_layers = draft_layers
        self.rounds = self.drafted = self.accepted = 0
        self.by_position = [[0, 0] for _ in range(num_draft)]  # of the first, second, … draft: verified, accepted
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

    def plan(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """Say what each sequence gets, at most so many drafts."""
        counts = [min(self.num_draft, limit) for limit in limits]
        if self.mode != "lookup":
            return [Draft(self.mode, count) if count else Draft() for count in counts]
        found = [lookup(one, count) if count else () for one, count in zip(sequences, counts, strict=True)]
        return [Draft("lookup", len(tokens), tokens) for tokens in found]

    def read(self, work: Sequence[Work]) -> None:
        """Prepare to look up in prompts while a chunk of them is computed."""
        if "lookup" in self.sources:
            for sequence in (item.sequence for item in work if item.num_tokens > 1):
                drafts_of(sequence).ngrams.extend(sequence.tokens, len(sequence.tokens) - 1)

    def follows(self, item: Work) -> bool:
        """Return whether a draft head is to follow what a step computes for a sequence."""
        return True

    def drafting_took(self, seconds: float, depth: int) -> None:
        """Record that the executor has drafted so many tokens for each sequence."""

    def count(self, item: Work, accepted: int) -> None:
        """Record what became of the drafts of a sequence."""
        drafted = len(item.drafts)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for position, row in enumerate(self.by_position[: min(drafted, accepted + 1)]):
            row[0] += 1
            row[1] += position < accepted

    def measure(self, tokens: int, seconds: float, work: Sequence[Work]) -> None:
        """Record a step in which every sequence decoded."""
        if self.mode == "off" or self.off_because is not None or not self._is_measured:
            return
        has_drafts = any(item.drafts for item in work)
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


class Acceptance:
    """How often a draft is accepted if all before it were: an average in which old rounds count less."""

    def __init__(self, rate: float, weight: float) -> None:
        self._accepted, self._tried = rate * weight, weight

    @property
    def rate(self) -> float:
        return self._accepted / self._tried

    def add(self, drafted: int, accepted: int) -> None:
        self._accepted = 0.9 * self._accepted + accepted
        self._tried = 0.9 * self._tried + min(drafted, accepted + 1)


class StepCost:
    """The seconds of a step by its number of rows: a line through what was measured, in which old steps count less."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, rows, seconds, rows^2, rows * seconds

    @property
    def is_known(self) -> bool:
        return self._sums[0] > 0

    def add(self, rows: int, seconds: float) -> None:
        if self.is_known:
            seconds = min(seconds, 3 * self.seconds(rows))  # the step was held up by something else
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [0.97 * old + one for old, one in zip(self._sums, new, strict=True)]

    def seconds(self, rows: int) -> float:
        count, sum_x, sum_y, sum_xx, sum_xy = self._sums
        mean_x, mean_y = sum_x / count, sum_y / count
        spread = sum_xx / count - mean_x * mean_x
        slope = (sum_xy / count - mean_x * mean_y) / spread if spread > 0.01 else 0.1 * mean_y / mean_x
        return max(0.5 * mean_y, mean_y + max(0.0, slope) * (rows - mean_x))


@dataclass(slots=True)
class SequenceDrafts:
    """What is known of the drafts of one sequence."""

    ngrams: Ngrams = field(default_factory=Ngrams)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)  # by source
    probe_after: int = PROBE_AFTER
    num_plain: int = 0  # steps without drafts since the last one that had some
    num_unprofitable: int = 0  # steps since the head drafted in which its drafts were not worth their cost


def drafts_of(sequence: SequenceState) -> SequenceDrafts:
    """Return what is known of the drafts of a sequence, which carries it."""
    if sequence.drafts is None:
        sequence.drafts = SequenceDrafts()
    assert isinstance(sequence.drafts, SequenceDrafts)
    return sequence.drafts


class AdaptiveSpeculation(Speculation):
    """Decides for each sequence and step which source drafts how many tokens."""

    def __init__(self, mode: str, num_draft: int, draft_layers: int, is_measured: bool, has_head: bool) -> None:
        super().__init__(mode, num_draft, draft_layers, is_measured)
        self.sources = tuple(
            source for source in ("lookup", "head") if mode in ("auto", source) and (source != "head" or has_head)
        )
        self._overall = {source: Acceptance(0.7, 4) for source in self.sources}
        self._cost = StepCost()
        self._depth_s = 0.0  # seconds of drafting one token for each sequence
        self._drafting_s = 0.0  # for the step that is being planned
        self._following_s: float | None = None  # seconds that it takes the head to follow a step
        self._num_plain = self._num_bare = 0  # steps without drafts; those that no head has followed either

    @property
    def is_on(self) -> bool:
        is_known = self._num_plain >= PROBE_STEPS * (
            2 if "head" in self.sources else 1
        )  # without the head, and with it
        return bool(self.sources) and (is_known or not self._is_measured)

    def plan(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """Say what each sequence gets: those drafts that are expected to bring the most tokens per second."""
        options = [
            self._best(sequence, min(limit, self.num_draft)) for sequence, limit in zip(sequences, limits, strict=True)
        ]
        if self._is_measured:
            most, options = options, self._affordable(sequences, options)
            for sequence, wanted, draft in zip(sequences, most, options, strict=True):
                if wanted.source == "head":
                    known = drafts_of(sequence)
                    known.num_unprofitable = 0 if draft.count else known.num_unprofitable + 1
        for sequence, draft in zip(sequences, options, strict=True):
            known = drafts_of(sequence)
            known.num_plain = 0 if draft.count else known.num_plain + 1
        return options

    def follows(self, item: Work) -> bool:
        if not self._is_measured or "head" not in self.sources or item.num_tokens > 1:
            return True
        if self._num_bare < PROBE_STEPS:  # to measure what a step costs without the head
            return False
        known = drafts_of(item.sequence)
        return known.num_unprofitable < LEAVE_AFTER or known.num_plain >= known.probe_after - CATCH_UP

    def _best(self, sequence: SequenceState, limit: int) -> Draft:
        """Return the most drafts that a sequence may get, from the source that is accepted most often."""
        found = lookup(sequence, limit) if limit and "lookup" in self.sources else ()
        rates = {source: self._rate(sequence, source) for source in self.sources}
        is_looked_up = bool(found) and rates["lookup"] >= rates.get("head", 0.0)
        if not limit or (not is_looked_up and "head" not in rates):
            return Draft()
        return Draft("lookup", len(found), found) if is_looked_up else Draft("head", limit)

    def _affordable(self, sequences: Sequence[SequenceState], most: list[Draft]) -> list[Draft]:
        """Cut drafts that cost more than they bring, the least probable ones first."""
        gains = [  # the chance that a draft is accepted, of all drafts
            (self._rate(sequence, draft.source) ** depth, depth, index)
            for index, (sequence, draft) in enumerate(zip(sequences, most, strict=True))
            for depth in range(1, draft.count + 1)
        ]
        counts, best = [0] * len(most), [0] * len(most)
        tokens = float(len(most))
        plain = best_rate = tokens / self._cost.seconds(len(most))
        deepest = 0
        for num_drafts, (gain, depth, index) in enumerate(sorted(gains, key=lambda one: (-one[0], one[1])), 1):
            counts[index] = depth
            tokens += gain
            if most[index].source == "head":
                deepest = max(deepest, depth)
            seconds = self._cost.seconds(len(most) + num_drafts) + deepest * self._depth_s
            seconds += (self._following_s or 0.0) if deepest else 0.0
            if tokens / seconds > best_rate and tokens / seconds > LEAST_GAIN * plain:
                best, best_rate = list(counts), tokens / seconds
        return [
            _cut(draft, count or self._probe(sequence))
            for sequence, draft, count in zip(sequences, most, best, strict=True)
        ]

    def _probe(self, sequence: SequenceState) -> int:
        """Return 1 where drafts have not been tried for a while; ever more rarely as long as they stay useless."""
        known = drafts_of(sequence)
        if known.num_plain < known.probe_after:
            return 0
        known.probe_after = min(PROBE_AT_MOST, 2 * known.probe_after)
        return 1

    def drafting_took(self, seconds: float, depth: int) -> None:
        self._drafting_s = seconds
        one = seconds / depth
        self._depth_s = one if self._depth_s == 0 else 0.9 * self._depth_s + 0.1 * min(one, 3 * self._depth_s)

    def count(self, item: Work, accepted: int) -> None:
        super().count(item, accepted)
        if item.source in self._overall:
            self._rate(item.sequence, item.source)  # so that the sequence has an average of its own
            for known in (self._overall[item.source], drafts_of(item.sequence).acceptance[item.source]):
                known.add(len(item.drafts), accepted)

    def measure(self, tokens: int, seconds: float, work: Sequence[Work]) -> None:
        rows, seconds = sum(1 + len(item.drafts) for item in work), seconds - self._drafting_s
        self._drafting_s = 0.0
        is_plain = not any(item.drafts for item in work)
        is_followed = "head" in self.sources and any(self.follows(item) for item in work)
        if is_followed and is_plain and self._cost.is_known:
            more = min(seconds - self._cost.seconds(rows), self._cost.seconds(rows))
            before = more if self._following_s is None else self._following_s
            self._following_s = max(0.0, 0.8 * before + 0.2 * more)
        self._cost.add(rows, max(1e-9, seconds - ((self._following_s or 0.0) if is_followed else 0.0)))
        self._num_plain += is_plain
        self._num_bare += not is_followed

    def _rate(self, sequence: SequenceState, source: str) -> float:
        """Return how often a sequence's drafts are accepted; a new one begins with the average of all."""
        if not source:
            return 0.0
        acceptance = drafts_of(sequence).acceptance
        if source not in acceptance:
            acceptance[source] = Acceptance(self._overall[source].rate, 4)
        return acceptance[source].rate


def _cut(draft: Draft, count: int) -> Draft:
    count = min(count, draft.count)
    return Draft(draft.source, count, draft.tokens[:count]) if count else Draft()


def open_speculation(mode: str, num_draft: int, draft_layers: int, is_measured: bool, has_head: bool) -> Speculation:
    """Return what decides about drafts in this mode."""
    if mode in ("head", "auto"):
        return AdaptiveSpeculation(mode, num_draft, draft_layers, is_measured, has_head)
    return Speculation(mode, num_draft, draft_layers, is_measured)
