"""How many drafts a sequence gets, on a machine whose steps take known times."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sala.config import Regime
from sala.engine import draft
from sala.engine.draft import AdaptiveSpeculation, StepCost
from sala.engine.engine import Engine
from sala.engine.scheduler import Request, SequenceState, Work
from sala.protocol import Options, Sampling
from tests.engine.fake import FakeExecutor
from tests.engine.test_engine import SPARSE, finish

STEP_S, ROW_S = 0.010, 0.001  # of a step, and of each of its rows


def sequence(prompt: list[int]) -> SequenceState:
    return SequenceState(Request(prompt, Sampling()), Sampling(), Regime(0, None), 1 << 20, ())


class Machine:
    """Runs steps of sequences whose drafts are accepted with known chances."""

    def __init__(
        self, chances: list[float], row_s: float = ROW_S, depth_s: float = 0.001, following_s: float = 0.0
    ) -> None:
        self.speculation = AdaptiveSpeculation("head", 4, 0, is_measured=True, has_head=True)
        self.sequences = [sequence([number]) for number in range(len(chances))]
        self.chances, self.row_s, self.depth_s, self.following_s = chances, row_s, depth_s, following_s
        self.rng = random.Random(1)
        self.seconds, self.tokens = 0.0, 0
        self.counts: list[list[int]] = []

    def step(self) -> None:
        drafts = [0] * len(self.sequences)
        drafting_s = 0.0
        if self.speculation.is_on:
            drafts = [one.count for one in self.speculation.plan(self.sequences, [100] * len(drafts))]
            if any(drafts):
                drafting_s = max(drafts) * self.depth_s
                self.speculation.drafting_took(drafting_s, max(drafts))
        self.counts.append(drafts)
        pairs = zip(self.sequences, drafts, strict=True)
        work = [Work(one, 1, (0,) * count, source="head" if count else "") for one, count in pairs]
        for item, chance in zip(work, self.chances, strict=True):
            accepted = next((at for at in range(len(item.drafts)) if self.rng.random() >= chance), len(item.drafts))
            if item.drafts:
                self.speculation.count(item, accepted)
            self.tokens += 1 + accepted
        seconds = STEP_S + self.row_s * sum(1 + count for count in drafts) + drafting_s
        seconds += self.following_s if any(self.speculation.follows(item) for item in work) else 0.0
        self.seconds += seconds
        self.speculation.measure(0, seconds, work)

    def run(self, steps: int) -> "Machine":
        for _ in range(steps):
            self.step()
        return self

    @property
    def gain(self) -> float:
        """How many times as fast as without drafts."""
        plain = STEP_S + self.row_s * len(self.sequences)
        return self.tokens * plain / (self.seconds * len(self.sequences))


def best_gain(chance: float, row_s: float = ROW_S, depth_s: float = 0.001) -> float:
    plain = STEP_S + row_s
    gains = []
    for count in range(5):
        tokens = sum(chance**depth for depth in range(count + 1))
        gains.append(tokens * plain / (plain + count * (row_s + depth_s)))
    return max(gains)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([3, 50, 1 << 14]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_index_finds_what_a_scan_of_the_text_finds(seed: int, num_tokens: int, most: int) -> None:
    """Token by token, after prompts of all lengths; also while the index has not caught up with the text."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "MOST_RUNS", most)
        one = sequence([rng.randrange(num_tokens) for _ in range(rng.choice([1, 2, 4, 30, 300]))])
        for _ in range(60):
            at = draft.scan(one)
            assert draft.lookup(one, 4) == (() if at is None else tuple(one.tokens[at : at + 4]))
            one.append(rng.choice(one.tokens) if rng.random() < 0.2 else rng.randrange(num_tokens))


def test_a_text_is_looked_up_without_scanning_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, rng = sequence([*range(1000)]), random.Random(3)
    monkeypatch.setattr(draft, "scan", None)
    for _ in range(50):
        one.append(rng.choice(one.tokens))
        draft.lookup(one, 4)


def test_only_decode_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk of a prompt samples a token too, where it need not end with the prompt's last token but one."""
    monkeypatch.setattr(FakeExecutor, "is_ahead", True)
    engine = Engine(FakeExecutor(num_pages=100, chunk=600), SPARSE, Options(speculate="lookup", snapshots=0))
    measured: list[int] = []
    monkeypatch.setattr(
        engine.speculation, "measure", lambda tokens, seconds, work: measured.append(work[0].num_tokens)
    )
    finish(engine, engine.submit(Request([3] * 500, Sampling(temperature=0, max_tokens=6, ignore_eos=True))))
    assert measured
    assert set(measured) == {1}


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_drafts_bring_nearly_what_the_best_number_of_them_would(chance: float) -> None:
    machine = Machine([chance]).run(800)
    assert machine.gain > 0.9 * best_gain(chance)


def test_a_head_that_brings_little_is_not_used() -> None:
    """What it takes to follow the model counts as a part of its cost: drafts alone would bring 5% here."""
    chance, depth_s = 0.2, 0.0001
    machine = Machine([chance], depth_s=depth_s, following_s=0.3 * STEP_S).run(800)
    assert best_gain(chance, depth_s=depth_s) > 1.05
    assert machine.gain > 0.93
    assert sum(map(sum, machine.counts[200:])) < 30


def test_a_good_head_is_used_though_it_has_to_follow() -> None:
    machine = Machine([0.9], following_s=0.1 * STEP_S).run(800)
    assert machine.gain > 0.85 * best_gain(0.9)


@pytest.mark.parametrize("following_s", [0.0, 0.05 * STEP_S, 0.1 * STEP_S])
def test_useless_drafts_cost_less_than_three_percent(following_s: float) -> None:
    machine = Machine([0.0], following_s=following_s).run(1000)
    assert machine.gain > 0.97
    assert any(sum(step) for step in machine.counts[200:])  # it is tried again now and then


def test_a_sequence_whose_drafts_fail_gets_none_beside_one_whose_drafts_succeed() -> None:
    machine = Machine([0.95, 0.02]).run(400)
    late = machine.counts[200:]
    assert sum(step[0] for step in late) > 3 * len(late)
    assert sum(step[1] for step in late) < 0.2 * len(late)


def test_fewer_drafts_in_larger_batches() -> None:
    """Where rows cost, drafts of many sequences cost more than they bring."""

    def mean(num_sequences: int) -> float:
        machine = Machine([0.7] * num_sequences, row_s=0.004).run(300)
        return sum(sum(step) / num_sequences for step in machine.counts[100:]) / 200

    assert mean(1) > 1.5
    assert mean(16) < 0.5


def test_the_sources_are_compared() -> None:
    """Text that repeats is looked up; the head drafts where nothing is found, or where look-ups fail."""
    speculation = AdaptiveSpeculation("auto", 4, 0, is_measured=False, has_head=True)
    repeated, other = sequence([1, 2, 3, 4, 5, 6, 1, 2, 3]), sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    found = speculation.plan([repeated, other], [4, 4])
    assert [(one.source, one.count, one.tokens) for one in found] == [("lookup", 4, (4, 5, 6, 1)), ("head", 4, ())]
    for _ in range(10):
        speculation.count(Work(repeated, 1, (4, 5, 6, 1), source="lookup"), 0)
    assert [one.source for one in speculation.plan([repeated], [4])] == ["head"]
    without = AdaptiveSpeculation("auto", 4, 0, is_measured=False, has_head=False)
    assert [one.source for one in without.plan([repeated, other], [4, 4])] == ["lookup", ""]
    assert without.plan([repeated], [0])[0].count == 0


def test_the_cost_of_a_step_is_a_line_through_what_was_measured() -> None:
    cost, rng = StepCost(), random.Random(2)
    for _ in range(200):
        rows = rng.randint(1, 9)
        cost.add(rows, STEP_S + ROW_S * rows)
        if rng.random() < 0.02:
            cost.add(rows, 5.0)  # something else held it up
    assert cost.seconds(5) == pytest.approx(STEP_S + 5 * ROW_S, rel=0.5)
    assert cost.seconds(9) > cost.seconds(1)
