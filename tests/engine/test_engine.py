"""The engine on a fake executor: whatever happens, every answer is the plain one, and nothing leaks."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sala.config import SparseConfig
from sala.engine.engine import Engine
from sala.engine.scheduler import Request, SequenceState
from sala.errors import ContextTooLong, InputError
from sala.options import Attention
from sala.protocol import Options, Sampling, Verdict
from tests.engine.fake import VOCAB, FakeExecutor, Faults, plain
from tests.integrity import integrity

SPARSE = SparseConfig(8, 4, 1, 16, 32, 4, False, 128)
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"], autouse=True)
def is_ahead(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Run every test with an executor that waits for its tokens, and with one that runs ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeExecutor, "is_ahead", request.param)
        yield request.param


def engine(executor: FakeExecutor | None = None, is_measured: bool = False, **options: Any) -> Engine:
    return Engine(executor or FakeExecutor(), SPARSE, Options(**options), is_measured)


def finish(eng: Engine, *sequences: SequenceState, limit: int = 10_000) -> None:
    for _ in range(limit):
        if all(sequence.is_finished for sequence in sequences):
            return
        eng.step()
        assert integrity(eng) == []
    raise AssertionError("starved")


def want(request: Request, index: int = 0) -> list[int]:
    sampling = request.sampling
    seed = None if sampling.temperature == 0 else (sampling.seed or 0) + index
    return plain(
        request.prompt,
        sampling.max_tokens,
        seed,
        SPARSE.attending(request.attention or Attention()).regime(len(request.prompt)),
    )


def answer(sequence: SequenceState) -> list[int]:
    return [sampled.token for sampled in sequence.sampled]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 95, 96, 97, 127, 128, 200])
def test_one_request(length: int) -> None:
    eng = engine()
    request = Request(prompt(random.Random(length), length), GREEDY)
    sequence = eng.submit(request)
    finish(eng, sequence)
    assert answer(sequence) == want(request)
    assert sequence.finish_reason == "length"
    again = eng.submit(request)
    finish(eng, again)
    assert answer(again) == want(request)
    assert again.num_cached == length - 1


def test_neighbours_change_nothing() -> None:
    rng = random.Random(0)
    eng = engine(FakeExecutor(num_pages=200, num_slots=20))
    requests = [
        Request(prompt(rng, rng.randint(1, 150)), Sampling(temperature=1.0, seed=i, max_tokens=20)) for i in range(12)
    ]
    sequences = [eng.submit(request) for request in requests]
    finish(eng, *sequences)
    for request, sequence in zip(requests, sequences, strict=True):
        assert answer(sequence) == want(request)


def test_a_short_request_is_not_stuck_behind_a_long_one() -> None:
    eng = engine(FakeExecutor(num_pages=100, ctx=1600, chunk=32))
    long = eng.submit(Request([1] * 1500, GREEDY))
    for _ in range(3):
        eng.step()
    short = eng.submit(Request([2] * 20, GREEDY))
    for _ in range(6):
        eng.step()
    assert short.sampled
    assert not long.sampled
    finish(eng, short, long)
    assert answer(long) == want(long.request)


def test_preemption_loses_nothing() -> None:
    rng = random.Random(1)
    eng = engine(FakeExecutor(num_pages=20, num_slots=8, ctx=300), snapshots=2)
    sampling = Sampling(temperature=0.5, seed=3, max_tokens=100)
    requests = [Request(prompt(rng, 60), sampling) for _ in range(4)]
    sequences = [eng.submit(request) for request in requests]
    finish(eng, *sequences)
    assert eng.scheduler.num_preemptions > 0
    for request, sequence in zip(requests, sequences, strict=True):
        assert answer(sequence) == want(request)


def test_answers_share_the_reading() -> None:
    executor = FakeExecutor(num_pages=100, num_slots=12)
    eng = engine(executor)
    request = Request(prompt(random.Random(2), 150), Sampling(temperature=1.0, seed=5, max_tokens=10))
    first = eng.submit(request)
    siblings = [first, *(eng.submit(request, first, index) for index in range(1, 5))]
    finish(eng, *siblings)
    for index, sequence in enumerate(siblings):
        assert answer(sequence) == want(request, index)
    assert executor.num_tokens < 150 + 5 * 12
    assert len({tuple(answer(sequence)) for sequence in siblings}) == 5


def test_prefixes_are_reused_wherever_they_end() -> None:
    """Continue, edit, diverge in the middle, repeat: 60 random prompts, always the plain answer."""
    rng = random.Random(4)
    eng = engine(FakeExecutor(num_pages=120, num_slots=14))
    known = [prompt(rng, 100)]
    total = reused = 0
    for _ in range(60):
        base = rng.choice(known)
        cut = rng.randint(1, len(base))
        tokens = (base[:cut] + prompt(rng, rng.randint(0, 30)))[:400]
        boundary = rng.randint(1, len(tokens))
        request = Request(tokens, GREEDY, boundaries=(boundary,))
        sequence = eng.submit(request)
        finish(eng, sequence)
        assert answer(sequence) == want(request)
        known.append(tokens + answer(sequence))
        total += len(tokens)
        reused += sequence.num_cached or 0
    assert reused > total / 8  # cuts are random: most fall between two snapshots


def test_what_is_to_be_kept_is_stored_before_other_boundaries() -> None:
    eng = engine(FakeExecutor(num_pages=100, num_slots=30, chunk=600))
    tokens = prompt(random.Random(8), 300)
    kept = (140, 180)
    finish(eng, eng.submit(Request(tokens, GREEDY, boundaries=(*range(190, 300, 9), *kept), kept=kept)))
    for length in kept:
        assert eng.num_cached([*tokens[:length], *[7] * 100]) == length
    assert eng.num_cached(tokens) == 299


def test_regimes_do_not_mix() -> None:
    eng = engine(FakeExecutor(num_pages=100))
    base = prompt(random.Random(5), 120)  # dense: below 128 tokens
    first = eng.submit(Request(base, GREEDY))
    finish(eng, first)
    longer = Request(base + [7] * 40, GREEDY)  # sparse: only the first 96 rows agree
    second = eng.submit(longer)
    finish(eng, second)
    assert answer(second) == want(longer)
    assert (second.num_cached or 0) <= SPARSE.agreement_len
    assert second.num_cached == SPARSE.agreement_len  # a snapshot was left there on purpose


def test_salts_do_not_share() -> None:
    eng = engine()
    request = Request([3] * 50, GREEDY, salt="a")
    finish(eng, eng.submit(request))
    other = eng.submit(replace_salt(request, "b"))
    finish(eng, other)
    assert other.num_cached == 0
    same = eng.submit(request)
    finish(eng, same)
    assert same.num_cached == 49


def replace_salt(request: Request, salt: str) -> Request:
    return Request(request.prompt, request.sampling, salt=salt)


def test_snapshots_go_oldest_first() -> None:
    eng = engine(FakeExecutor(num_pages=100), snapshots=4)
    prompts = [[i] * 40 for i in range(6)]
    for tokens in prompts:
        finish(eng, eng.submit(Request(tokens, GREEDY)))
        assert len(eng.hybrid.prefix) <= 4
    newest, oldest = eng.submit(Request(prompts[-1], GREEDY)), None
    finish(eng, newest)
    assert newest.num_cached == 39
    oldest = eng.submit(Request(prompts[0], GREEDY))
    finish(eng, oldest)
    assert oldest.num_cached == 0


@pytest.mark.parametrize("when", [0, 1, 2, 4, 8, 15])
def test_cancelling_frees_everything(when: int) -> None:
    eng = engine(snapshots=0)
    stays = eng.submit(Request([1] * 70, GREEDY))
    goes = eng.submit(Request([2] * 200, GREEDY))
    for _ in range(when):
        eng.step()
    eng.cancel(goes)
    assert goes.pages == []
    assert goes.slot is None
    assert integrity(eng) == []
    finish(eng, stays)
    assert answer(stays) == want(stays.request)
    assert eng.hybrid.pages.num_free == 64
    assert eng.hybrid.slots.num_free == 8


def test_a_cancelled_reading_serves_the_next() -> None:
    eng = engine(FakeExecutor(num_pages=100))
    request = Request(prompt(random.Random(6), 300), GREEDY)
    sequence = eng.submit(request)
    for _ in range(5):
        eng.step()
    done = sequence.num_computed
    eng.cancel(sequence)
    again = eng.submit(request)
    finish(eng, again)
    assert again.num_cached == done > 0
    assert answer(again) == want(request)


def test_one_bad_request_harms_no_other() -> None:
    executor = FakeExecutor(num_pages=100)
    executor.faults = Faults(fail_on=49)
    eng = engine(executor)
    good = [eng.submit(Request([i] * 40, Sampling(temperature=0, max_tokens=5))) for i in range(3)]
    bad = eng.submit(Request([1, 2, 49, 3] * 10, GREEDY))
    finish(eng, bad, *good)
    assert isinstance(bad.error, MemoryError)
    assert bad.finish_reason == "error"
    for sequence in good:
        if sequence.error is None:  # unless it happened to draw the token itself
            assert answer(sequence) == want(sequence.request)
    executor.faults = Faults()
    after = eng.submit(Request([1, 2, 49, 3] * 10, GREEDY))
    finish(eng, after)
    assert answer(after) == want(after.request)


def test_an_interrupt_loses_no_request() -> None:
    executor = FakeExecutor()
    eng = engine(executor)
    sequence = eng.submit(Request([5] * 100, GREEDY))
    eng.step()
    run = executor.run

    def interrupt(plan: object) -> None:
        raise KeyboardInterrupt

    executor.run = interrupt  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        eng.step()
    executor.run = run  # type: ignore[method-assign]
    assert integrity(eng) == []
    finish(eng, sequence)
    assert answer(sequence) == want(sequence.request)


@pytest.mark.parametrize("where", ["clear_state", "copy_states", "copy_page"])
def test_an_interrupt_in_a_copy_leaves_no_half_past(where: str, is_ahead: bool) -> None:
    executor = FakeExecutor()
    eng = engine(executor)
    request = Request(prompt(random.Random(3), 70), GREEDY)
    if where == "copy_page" or (where == "copy_states" and is_ahead):
        finish(eng, eng.submit(request))
    sequence = eng.submit(request)
    original = getattr(executor, where)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    setattr(executor, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(20):
            eng.step()
    setattr(executor, where, original)
    assert integrity(eng) == []
    finish(eng, sequence)
    assert answer(sequence) == want(request)


@pytest.mark.parametrize("mode", ["lookup", "layers"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_nothing(mode: str, temperature: float) -> None:
    rng = random.Random(7)
    eng = engine(FakeExecutor(num_pages=200, num_slots=20), speculate=mode, num_draft=4)
    sampling = Sampling(temperature=temperature, seed=9, max_tokens=60)
    requests = [Request((prompt(rng, 40) * 3)[: rng.randint(5, 120)], sampling) for _ in range(6)]
    sequences = [eng.submit(request) for request in requests]
    finish(eng, *sequences)
    for request, sequence in zip(requests, sequences, strict=True):
        assert answer(sequence) == want(request)
    if mode == "layers":
        assert eng.speculation.accepted > 0
        assert 0 < eng.speculation.acceptance < 1
        assert eng.speculation.tokens_per_round > 1
    follow = Request(list(requests[0].prompt) + answer(sequences[0]) + [1, 2], GREEDY)
    last = eng.submit(follow)
    finish(eng, last)
    assert answer(last) == want(follow)
    assert (last.num_cached or 0) > len(requests[0].prompt)


@pytest.mark.parametrize("fault", ["advance_rejected", "snapshot_off_by_one"])
def test_planted_faults_are_caught(fault: str) -> None:
    executor = FakeExecutor(num_pages=100)
    executor.faults = replace(Faults(), **{fault: True})
    eng = engine(executor, speculate="layers")
    with pytest.raises(AssertionError):
        for _ in range(3):
            sequence = eng.submit(Request([4] * 60, replace(GREEDY, max_tokens=30)))
            finish(eng, sequence)
            if sequence.error is not None:
                raise sequence.error
            assert answer(sequence) == want(sequence.request)


def test_drafts_that_do_not_pay_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    now = [0.0]
    executor = FakeExecutor(num_pages=100)
    original, draft = executor.run, executor.draft

    def run(plan: Any) -> Any:
        now[0] += 1.0
        return original(plan)

    def slow(plan: Any, layers: int, count: int) -> Any:
        now[0] += 5.0
        next(clock)
        return draft(plan, layers, count)

    executor.run, executor.draft = run, slow  # type: ignore[method-assign]
    monkeypatch.setattr("sala.engine.engine.time.perf_counter", lambda: now[0])
    eng = engine(executor, is_measured=True, speculate="layers")
    sequence = eng.submit(Request([4] * 60, replace(GREEDY, max_tokens=150)))
    finish(eng, sequence)
    assert answer(sequence) == want(sequence.request)
    assert eng.speculation.off_because is not None
    assert "switched off" in eng.speculation.summary()
    assert eng.speculation.rounds < 30


class Force:
    """A control that makes the third token be followed by two given ones, and ends after eight."""

    allows_drafts = False

    def __init__(self) -> None:
        self.seen: list[int] = []

    def mask(self) -> bytes | None:
        return None

    def observe(self, token: int) -> Verdict | None:
        self.seen.append(token)
        if len(self.seen) == 3:
            return Verdict(force=(41, 42))
        return Verdict(finish="enough") if len(self.seen) == 8 else None


def test_controls() -> None:
    eng = engine(speculate="layers")
    control = Force()
    sequence = eng.submit(Request([1] * 30, GREEDY, controls=(control,)))
    finish(eng, sequence)
    assert sequence.finish_reason == "enough"
    assert answer(sequence) == control.seen
    assert control.seen[3:5] == [41, 42]
    assert len(control.seen) == 8


def test_stop_tokens_and_min_tokens() -> None:
    eng = engine()
    first = eng.submit(Request([1] * 30, GREEDY))
    finish(eng, first)
    stop = answer(first)[4]
    at = answer(first).index(stop)
    sampling = replace(GREEDY, ignore_eos=False)
    sequence = eng.submit(Request([1] * 30, sampling, stop_ids={stop}))
    finish(eng, sequence)
    assert answer(sequence) == answer(first)[: at + 1]
    assert sequence.finish_reason == "stop"
    executor = eng._executor
    eng.submit(Request([1] * 30, replace(sampling, min_tokens=8), stop_ids={stop}))
    eng.step()
    assert executor.plans[-1].rows[0].banned == (stop,)  # type: ignore[attr-defined]


def test_what_can_never_run_is_refused() -> None:
    eng = engine(FakeExecutor(ctx=100))
    with pytest.raises(InputError):
        eng.submit(Request([], GREEDY))
    with pytest.raises(ContextTooLong, match=r"101 .* 100"):
        eng.submit(Request([1] * 101, GREEDY))
    for length, count in ((100, 1), (99, 2)):
        sequence = eng.submit(Request([1] * length, GREEDY))
        finish(eng, sequence)
        assert len(sequence.sampled) == count


@given(st.integers(0, 2**32), st.integers(12, 40), st.integers(2, 9), st.sampled_from(["off", "lookup", "layers"]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_random_life(seed: int, num_pages: int, num_slots: int, mode: str) -> None:
    """Requests come, go, repeat, and are cancelled in a cache that is always too small."""
    rng = random.Random(seed)
    eng = engine(
        FakeExecutor(num_pages=num_pages, num_slots=num_slots, chunk=rng.choice([5, 16, 40])),
        max_batch=rng.randint(1, 5), snapshots=rng.randint(0, 6), speculate=mode,
    )  # fmt: skip
    known, live, done = [prompt(rng, 30)], [], []
    for _ in range(120):
        if rng.random() < 0.25:
            base = rng.choice(known)
            tokens = (base[: rng.randint(1, len(base))] + prompt(rng, rng.randint(0, 40)))[:180]
            sampling = Sampling(
                temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(99), max_tokens=rng.randint(1, 25)
            )
            live.append(eng.submit(Request(tokens, sampling, boundaries=(rng.randint(1, 180),))))
            known.append(tokens)
        if live and rng.random() < 0.05:
            eng.cancel(live.pop(rng.randrange(len(live))))
        if eng.scheduler.running and rng.random() < 0.05:
            eng.scheduler.preempt(rng.choice(eng.scheduler.running))
        if rng.random() < 0.03:
            eng.forget()
        eng.step()
        assert integrity(eng) == []
        done += [sequence for sequence in live if sequence.is_finished]
        live = [sequence for sequence in live if not sequence.is_finished]
    finish(eng, *live)
    for sequence in [*done, *live]:
        assert sequence.error is None, sequence.error
        assert answer(sequence) == want(sequence.request)


def test_ten_thousand_operations_leak_nothing() -> None:
    rng = random.Random(99)
    eng = engine(FakeExecutor(num_pages=30, num_slots=6, chunk=40), max_batch=4, snapshots=3)
    live: list[SequenceState] = []
    for number in range(10_000):
        operation = rng.random()
        if operation < 0.2:
            sampling = Sampling(temperature=0, max_tokens=rng.randint(1, 30))
            live.append(eng.submit(Request([rng.randrange(4)] * rng.randint(1, 150), sampling)))
        elif operation < 0.3 and live:
            eng.cancel(live.pop(rng.randrange(len(live))))
        elif operation < 0.35 and eng.scheduler.running:
            eng.scheduler.preempt(rng.choice(eng.scheduler.running))
        elif operation < 0.37 and (oldest := eng.hybrid.prefix.first()):
            eng.hybrid.forget(oldest)
        else:
            eng.step()
        if number % 50 == 0:
            assert integrity(eng) == []
            live = [sequence for sequence in live if not sequence.is_finished]
    for sequence in live:
        eng.cancel(sequence)
    eng.forget()
    assert integrity(eng) == []
    assert eng.hybrid.pages.num_free == 30
    assert eng.hybrid.slots.num_free == 6


def test_a_past_that_leaves_no_room_is_given_up() -> None:
    """A prompt that just fits is admitted even if the past it could continue from would need a page more."""
    eng = engine(FakeExecutor(num_pages=4, ctx=64))
    base = prompt(random.Random(8), 20)
    finish(eng, eng.submit(Request(base, replace(GREEDY, max_tokens=2))))
    request = Request(base + prompt(random.Random(9), 40), replace(GREEDY, max_tokens=3))
    sequence = eng.submit(request)
    finish(eng, sequence, limit=50)
    assert answer(sequence) == want(request)


def test_snapshots_are_not_given_up_in_vain() -> None:
    eng = engine(FakeExecutor(num_pages=30, num_slots=12, ctx=480), max_batch=2)
    for number in range(4):
        finish(eng, eng.submit(Request([number] * 20, replace(GREEDY, max_tokens=2))))
    busy = eng.submit(Request([9] * 150, replace(GREEDY, max_tokens=60)))
    for _ in range(8):
        eng.step()
    kept = len(eng.hybrid.prefix)
    large = eng.submit(Request([8] * 460, GREEDY))
    eng.step()
    assert large in eng.scheduler.waiting
    assert len(eng.hybrid.prefix) >= kept
    finish(eng, busy, large)
    assert answer(large) == want(large.request)


def test_rows_that_fail_only_together_still_finish() -> None:
    executor = FakeExecutor(num_pages=100)
    original = executor.run

    def run(plan: Any) -> Any:
        if len(plan.rows) > 1:
            raise MemoryError
        return original(plan)

    executor.run = run  # type: ignore[method-assign]
    eng = engine(executor)
    sequences = [eng.submit(Request([number] * 100, GREEDY)) for number in range(2)]
    finish(eng, *sequences, limit=200)
    for sequence in sequences:
        assert answer(sequence) == want(sequence.request)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_trouble_while_booking_is_one_rows_trouble(error: type[BaseException]) -> None:
    executor = FakeExecutor(num_pages=100)
    eng = engine(executor)
    sequences = [eng.submit(Request([number] * 40, GREEDY)) for number in range(3)]
    for _ in range(6):
        eng.step()
    truncate, calls = eng.hybrid.truncate, []

    def explode(sequence: SequenceState) -> None:
        calls.append(sequence)
        if len(calls) == 2:
            raise error
        truncate(sequence)

    eng.hybrid.truncate = explode  # type: ignore[method-assign]
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            eng.step()
    else:
        eng.step()
    assert integrity(eng) == []
    finish(eng, *sequences)
    for sequence in sequences:
        if sequence.error is None:
            assert answer(sequence) == want(sequence.request)
    assert sum(sequence.error is not None for sequence in sequences) == (error is MemoryError)


def cuts(executor: FakeExecutor, slot: int) -> list[tuple[int, int]]:
    """Where the prompt of the sequence in this slot was cut."""
    rows = (row for plan in executor.plans for row in plan.rows)
    return [(row.start, len(row.tokens)) for row in rows if row.slot == slot and row.sampling is None]


def test_a_prompt_is_cut_at_the_same_places_whoever_else_is_there() -> None:
    rng = random.Random(5)
    request = Request(prompt(rng, 150), GREEDY)
    found = []
    for num_others in (0, 1, 3):
        executor = FakeExecutor(num_pages=128)
        eng = engine(executor)
        others = [eng.submit(Request(prompt(rng, 20 + 37 * index), GREEDY)) for index in range(num_others)]
        sequence = eng.submit(request)
        eng.step()
        slot = sequence.slot
        assert slot is not None
        finish(eng, sequence, *others)
        found.append([cut for cut in cuts(executor, slot) if cut[0] + cut[1] <= 150])
    assert found[0] == found[1] == found[2]
    assert all(length == 32 for _, length in found[0][:4])


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one_at_most() -> None:
    rng = random.Random(6)
    eng = engine(FakeExecutor(num_pages=128))
    long = eng.submit(Request(prompt(rng, 500), GREEDY))
    for _ in range(3):
        eng.step()
    short = eng.submit(Request(prompt(rng, 20), GREEDY))
    for _ in range(3):
        eng.step()
    assert short.sampled
    assert not long.sampled
    finish(eng, long, short)
    assert answer(long) == want(long.request)
    assert answer(short) == want(short.request)


def test_a_long_prompt_is_read_while_short_ones_keep_coming() -> None:
    rng = random.Random(7)
    eng = engine(FakeExecutor(num_pages=128))
    long = eng.submit(Request(prompt(rng, 500), replace(GREEDY, max_tokens=1)))
    for _ in range(16 * 8):  # 16 chunks, in turns with at most 7 others
        eng.submit(Request(prompt(rng, 20), replace(GREEDY, max_tokens=1)))
        eng.step()
    assert long.is_finished


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_known(is_ahead: bool) -> None:
    executor = FakeExecutor(num_pages=100, num_slots=12)
    eng = engine(executor)
    sequence = eng.submit(Request(prompt(random.Random(1), 20), GREEDY))
    updates = [eng.step() for _ in range(4)]
    assert len(executor.plans) == 4
    sampled = [sum(len(update.sampled) for update in some) for some in updates]
    assert sampled == [0, 1, 1, 1]  # the prompt takes two steps, or its token comes one step late
    finish(eng, sequence)
    assert answer(sequence) == want(sequence.request)
    steps = len(executor.plans)
    assert steps == (12 if is_ahead else 13)  # the first token comes from the last row of the prompt


def test_a_stop_drops_what_ran_ahead_and_keeps_its_state(is_ahead: bool) -> None:
    """A stop token is noticed when the next step is in flight: that step's token never appears anywhere."""
    request = Request(prompt(random.Random(6), 40), replace(GREEDY, ignore_eos=False, max_tokens=30))
    words = want(request)
    request.stop_ids = (words[7],)
    count = words.index(words[7]) + 1
    executor = FakeExecutor()
    eng = engine(executor)
    sequence = eng.submit(request)
    finish(eng, sequence)
    assert answer(sequence) == words[:count]
    assert sequence.finish_reason == "stop"
    further = Request([*request.prompt, *words[:count], 3, 4], GREEDY)
    again = eng.submit(further)
    finish(eng, again)
    assert answer(again) == want(further)
    assert again.num_cached == 40 + count - (0 if is_ahead else 1)


def test_a_steered_sequence_takes_every_other_step_and_harms_no_neighbour(is_ahead: bool) -> None:
    class Steers:
        allows_drafts = False

        def mask(self) -> None:
            return None

        def observe(self, token: int) -> None:
            return None

    executor = FakeExecutor(num_pages=100, num_slots=12)
    eng = engine(executor)
    rng = random.Random(2)
    free = eng.submit(Request(prompt(rng, 20), replace(GREEDY, max_tokens=20)))
    steered = eng.submit(Request(prompt(rng, 20), replace(GREEDY, max_tokens=20), controls=(Steers(),)))
    while not free.is_finished:
        eng.step()
    rows = [[row.slot for row in plan.rows] for plan in executor.plans]
    assert sum(len(plan) == 2 for plan in rows) <= len(rows) // 2 + 2 if is_ahead else len(rows)
    assert len(steered.sampled) >= 8
    finish(eng, steered)
    assert answer(free) == want(free.request)
    assert answer(steered) == want(steered.request)


def test_prompts_are_read_in_the_order_of_arrival() -> None:
    eng = engine(FakeExecutor(num_pages=200, num_slots=12, chunk=64, ctx=400), snapshots=0)
    rng = random.Random(4)
    sequences = [eng.submit(Request(prompt(rng, 300), GREEDY)) for _ in range(4)]
    firsts: dict[int, int] = {}
    for step in range(60):
        eng.step()
        firsts |= {s.id: step for s in sequences if s.sampled and s.id not in firsts}
    order = [firsts[sequence.id] for sequence in sequences]
    assert order == sorted(order)
    assert order[0] < order[1] < order[2] < order[3]
    assert order[0] <= 7


def test_background_requests_give_way() -> None:
    """Later requests overtake and preempt them; every answer is the plain one."""
    eng = engine(FakeExecutor(num_pages=60, num_slots=8), max_batch=2, snapshots=2)
    rng = random.Random(8)
    low = [Request(prompt(rng, 40), replace(GREEDY, max_tokens=60), is_background=True) for _ in range(3)]
    behind = [eng.submit(request) for request in low]
    while not all(sequence.sampled for sequence in behind[:2]):
        eng.step()
    high = [Request(prompt(rng, 40), GREEDY) for _ in range(2)]
    ahead = [eng.submit(request) for request in high]
    finish(eng, *ahead)
    assert not any(sequence.is_finished for sequence in behind)
    finish(eng, *behind)
    for request, sequence in zip([*low, *high], [*behind, *ahead], strict=True):
        assert answer(sequence) == want(request)


def starts(eng: Engine, *sequences: SequenceState, steps: int = 400) -> list[int]:
    """The steps in which sequences get their first tokens."""
    firsts: dict[int, int] = {}
    for step in range(steps):
        eng.step()
        firsts |= {one.id: step for one in sequences if one.sampled and one.id not in firsts}
        if len(firsts) == len(sequences):
            break
    return [firsts[one.id] for one in sequences]


@pytest.mark.parametrize("is_one_owner", [True, False], ids=["requests", "owners"])
def test_a_large_request_waits_behind_its_own(is_one_owner: bool) -> None:
    """Whoever asks for much fills the batch; one that comes later gets its place at once, and no answer changes."""
    eng = engine(FakeExecutor(num_pages=200, num_slots=10, ctx=200), max_batch=4, snapshots=2)
    rng = random.Random(9)
    long = replace(GREEDY, max_tokens=100)
    many = [Request(prompt(rng, 20), long, owner="a", group=1) for _ in range(30)]
    crowd = [eng.submit(request) for request in many]
    starts(eng, *crowd[:4])
    few = [Request(prompt(rng, 20), GREEDY, owner="a" if is_one_owner else "b", group=2) for _ in range(3)]
    others = [eng.submit(request) for request in few]
    assert starts(eng, *others[:2])[1] <= 3
    assert sum(one.is_running for one in crowd) == 2  # its share, and no more is taken from it
    finish(eng, *others, *crowd)
    assert [answer(one) for one in [*others, *crowd]] == [want(request) for request in [*few, *many]]


def test_beside_a_thousand_sequences_a_first_token_takes_as_many_steps(is_ahead: bool) -> None:
    """And no larger ones: another client has a place at once, and those that wait are not looked at one by one."""
    max_batch, chunk = 8, 32

    def quiet_or_not(crowd: int) -> tuple[list[int], list[int], int]:
        executor = FakeExecutor(num_pages=400, num_slots=20, ctx=200, chunk=chunk)
        eng = engine(executor, max_batch=max_batch, snapshots=2)
        scheduler, rng, num_looks = eng.scheduler, random.Random(12), 0
        long = replace(GREEDY, max_tokens=150)
        for _ in range(crowd // 8):
            request = Request(prompt(rng, 20), long, owner="a", group=1)
            first = eng.submit(request)
            for index in range(1, 8):
                eng.submit(replace(request), first, index)
        for _ in range(30):
            eng.step()
        assert len(scheduler.running) == min(max_batch, crowd)
        waits = scheduler._waits_for_sibling

        def look(sequence: SequenceState) -> bool:
            nonlocal num_looks
            num_looks += 1
            return waits(sequence)

        scheduler._waits_for_sibling = look  # type: ignore[method-assign]
        steps, sizes = [], []
        rng = random.Random(13)
        for number, length in enumerate((1, 10, 40, 90, 3, 40)):
            began = len(executor.plans)
            one = eng.submit(Request(prompt(rng, length), replace(GREEDY, max_tokens=4), owner="b", group=2 + number))
            steps += starts(eng, one)
            sizes += [sum(len(row.tokens) for row in plan.rows) for plan in executor.plans[began:]]
            finish(eng, one)
            assert answer(one) == want(one.request)
        return steps, sizes, num_looks

    steps, _, _ = quiet_or_not(0)
    beside, sizes, num_looks = quiet_or_not(1024)
    waited = [late - early for late, early in zip(beside, steps, strict=True)]
    assert set(waited) <= {0, int(is_ahead)}  # one that runs ahead waits for the token of whom it takes the place
    assert max(sizes) <= chunk + max_batch
    assert num_looks < 30 * max_batch


def test_equal_requests_take_nothing_from_each_other() -> None:
    eng = engine(FakeExecutor(num_pages=200, num_slots=10, ctx=200), max_batch=2, snapshots=2)
    rng = random.Random(10)
    sequences = [eng.submit(Request(prompt(rng, 20), GREEDY, owner=owner)) for owner in "abcab"]
    finish(eng, *sequences)
    assert eng.scheduler.num_preemptions == 0


@pytest.mark.parametrize("seed", range(6))
def test_no_client_waits_longer_than_its_share(seed: int) -> None:
    """Under random loads clients share the batch, and so do their requests; whoever has no place gets one at once."""
    rng, max_batch = random.Random(seed), 6
    eng = engine(FakeExecutor(num_pages=400, num_slots=20, ctx=200), max_batch=max_batch, snapshots=0)
    plan = eng.scheduler.plan
    num_unfair = num_shared = 0  # steps in a row; steps in which several clients have sequences and some wait

    def check() -> Any:
        nonlocal num_unfair, num_shared
        work, waiting, running = plan(), eng.scheduler.waiting, eng.scheduler.running
        owners, groups = Counter(one.owner for one in running), Counter(one.group for one in running)
        num_shared += len(owners) > 1 and bool(waiting)
        assert len(running) == min(max_batch, len(running) + len(waiting)) or any(one.num_pending for one in waiting)
        is_fair = all(
            owners[other.owner] <= owners[one.owner] + 1
            and (other.owner != one.owner or groups[other.group] <= groups[one.group] + 1)
            for one in waiting
            for other in running
        )
        num_unfair = 0 if is_fair else num_unfair + 1
        assert num_unfair <= eng._is_ahead, (owners, groups)  # one that runs ahead waits for a token of its victim
        return work

    eng.scheduler.plan = check  # type: ignore[method-assign]
    for _ in range(250):
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            owner, group, count = rng.choice("aaaabc"), rng.randrange(1, 1 << 30), rng.choice((1, 1, 2, 12))
            sampling = replace(GREEDY, max_tokens=rng.randint(2, 25))
            for _ in range(count):
                eng.submit(Request(prompt(rng, rng.randint(1, 30)), sampling, owner=owner, group=group))
        eng.step()
    assert eng.scheduler.num_preemptions > 3
    assert num_shared > 50
