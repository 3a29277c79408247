"""The prefix cache: the longest prefix is found, tips of conversations stay, and shares are fair."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sala.config import Regime, SparseConfig
from sala.engine import prefixes
from sala.engine.cache import PrefixCache
from sala.engine.engine import Engine
from sala.engine.prefixes import Prefix
from sala.engine.scheduler import Request, as_bytes
from sala.protocol import Options, Sampling
from tests.engine.fake import FakeExecutor
from tests.engine.test_engine import SPARSE, finish, prompt

CACHED = SparseConfig(1, 1, 1, 4, 4, 2, False, 8)  # rows that see everything by regime:
REGIMES = {Regime(0, 2): 12, Regime(7, 2): 12, Regime(0, 3): 16, Regime(15, 2): 15, Regime(1 << 40, 2): 1 << 40}
SHORT = Sampling(temperature=0, max_tokens=4, ignore_eos=True)


def next_below(cache: PrefixCache[Prefix], tokens: dict[Prefix, bytes], one: Prefix) -> int:
    """How many different prefixes continue this one directly."""
    same = [other for other in cache if other.salt == one.salt and tokens[other].startswith(tokens[one])]
    longer = {tokens[other] for other in same if other.length > one.length}
    return sum(not any(key != other and key.startswith(other) for other in longer) for key in longer)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_tree_finds_what_a_linear_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    cache: PrefixCache[Prefix] = PrefixCache(CACHED)
    tokens: dict[Prefix, bytes] = {}
    branches: set[Prefix] = set()
    for _ in range(60):
        ids = as_bytes([rng.randrange(2) for _ in range(rng.randint(1, 20))])
        salt, regime = rng.choice(["", "s"]), rng.choice([*REGIMES])
        fitting = [
            one
            for one in cache
            if one.salt == salt
            and ids.startswith(tokens[one])
            and (one.regime == regime or one.length <= min(REGIMES[one.regime], REGIMES[regime]))
        ]
        found = cache.find(ids, regime, salt)
        lengths = [one.length for one in fitting if one.length < len(ids) // 4]
        assert (found.length if found else 0) == max(lengths, default=0)
        length = rng.randint(1, len(ids) // 4)
        known = cache.has(ids, length, regime, salt)
        assert (known is not None) == any(one.length == length for one in fitting)
        if known is None and rng.random() < 0.8:
            new = Prefix(length, regime, salt, rng.choice("abc"))
            cache.add(new, ids)
            tokens[new] = ids[: 4 * length]
        elif len(cache):
            cache.remove(rng.choice(list(cache)))
        for one in cache:
            assert one.tokens == tokens[one]
            assert one.node.num_next == next_below(cache, tokens, one)
        branches |= {one for one in cache if one.node.num_next > 1}
        assert {one for one in cache if one.is_branch} == branches.intersection(cache)
        assert sum(one.num_prefixes for one in cache.clients.values()) == len(cache)
    for one in list(cache):
        cache.remove(one)
    assert (cache._roots, cache.nbytes) == ({}, 0)


def converse(engine: Engine, talks: list[list[int]], turns: int, owner: str = "") -> int:
    """One turn of each talk after another; return how many tokens the later turns found in the cache."""
    cached, rng = 0, random.Random(len(talks))
    for turn in range(turns):
        for talk in talks:
            sequence = engine.submit(Request(talk, SHORT, owner=owner))
            finish(engine, sequence)
            cached += (sequence.num_cached or 0) if turn else 0
            talk += [*(one.token for one in sequence.sampled), *prompt(rng, 5)]
    return cached


@pytest.mark.parametrize("count", [1, 4, 12])
def test_the_tips_of_conversations_stay(count: int) -> None:
    """Every turn after the first finds the one before it, in hardly more slots than there are conversations."""
    engine = Engine(FakeExecutor(num_pages=200, num_slots=count + 3), SPARSE, Options(max_batch=1))
    rng = random.Random(1)
    talks = [prompt(rng, 40) for _ in range(count)]
    lengths = [40 + 9 * turn - 6 for turn in range(1, 5)]  # all but the last token of the answer, and the new question
    assert converse(engine, talks, 5) == count * sum(lengths)


def test_a_common_beginning_stays() -> None:
    """It is not the tip of anything, but conversations branch off there."""
    engine = Engine(FakeExecutor(num_pages=200, num_slots=12), SPARSE, Options(max_batch=1))
    rng = random.Random(2)
    system = prompt(rng, 30)
    for _ in range(20):
        sequence = engine.submit(Request([*system, *prompt(rng, 20)], SHORT, boundaries=(30,)))
        finish(engine, sequence)
    assert sequence.num_cached == 30


def test_one_client_does_not_push_out_the_others() -> None:
    engine = Engine(FakeExecutor(num_pages=300, num_slots=16), SPARSE, Options(max_batch=1))
    rng = random.Random(3)
    modest = [prompt(rng, 40) for _ in range(4)]
    converse(engine, modest, 1, owner="modest")
    for _ in range(600):
        converse(engine, [prompt(rng, 40)], 1, owner="greedy")
    assert [engine.num_cached([*talk, 1]) for talk in modest] == [43] * 4
    assert converse(engine, modest, 2, owner="modest") > 0
    found = [engine.submit(Request([*talk, 1], SHORT, owner="modest")) for talk in modest]
    finish(engine, *found)
    assert all(sequence.num_cached for sequence in found)
    hit = engine.hybrid.statistics.hit
    assert (hit["device"], engine.hybrid.statistics.missed["regime"]) == (sum(hit.values()), 0)


def test_a_client_that_was_idle_for_long_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(FakeExecutor(num_pages=300, num_slots=16), SPARSE, Options(max_batch=1))
    rng = random.Random(3)
    talks = [prompt(rng, 40) for _ in range(4)]
    converse(engine, talks, 1, owner="idle")
    monkeypatch.setattr(prefixes, "IDLE_S", -1.0)
    for _ in range(8):
        converse(engine, [prompt(rng, 40)], 1, owner="busy")
    assert [engine.num_cached([*talk, 1]) for talk in talks] == [0] * 4


def test_pages_in_use_count_as_a_part_of_the_share() -> None:
    """Beside a long answer of its own, a client has little room for what is cached, and others keep theirs."""
    engine = Engine(FakeExecutor(num_pages=40, num_slots=20, ctx=600), SPARSE, Options(max_batch=2))
    rng = random.Random(5)
    modest = [prompt(rng, 40) for _ in range(4)]
    converse(engine, modest, 1, owner="modest")
    for _ in range(20):  # the other three become old
        finish(engine, engine.submit(Request(modest[0], SHORT, owner="modest")))
    long = engine.submit(Request(prompt(rng, 30), replace(SHORT, max_tokens=400), owner="greedy"))
    while len(long.tokens) < 330:
        engine.step()
    for _ in range(10):
        converse(engine, [prompt(rng, 40)], 1, owner="greedy")
        assert [engine.num_cached([*talk, 1]) for talk in modest[1:]] == [43] * 3
    assert not long.is_finished


def test_misses_by_cause() -> None:
    engine = Engine(FakeExecutor(num_pages=100, num_slots=4), SPARSE, Options(max_batch=1))
    rng = random.Random(4)
    first, missed = prompt(rng, 40), engine.hybrid.statistics.missed
    finish(engine, engine.submit(Request(first, SHORT)))
    assert missed == {"new": 40, "evicted": 0, "regime": 0}
    for _ in range(6):
        finish(engine, engine.submit(Request(prompt(rng, 40), SHORT)))
    assert missed == {"new": 280, "evicted": 0, "regime": 0}
    finish(engine, engine.submit(Request(first, SHORT)))
    assert missed == {"new": 281, "evicted": 39, "regime": 0}
    finish(engine, engine.submit(Request(first, SHORT, salt="other")))
    assert missed == {"new": 321, "evicted": 39, "regime": 0}
    engine, dense = Engine(FakeExecutor(num_pages=100), SPARSE, Options(max_batch=1)), prompt(rng, 120)
    finish(engine, engine.submit(Request(dense, SHORT)))
    missed = engine.hybrid.statistics.missed
    missed.clear()
    finish(engine, engine.submit(Request([*dense, *prompt(rng, 20)], SHORT)))
    assert missed == {"new": 140 - 119, "regime": 119 - SPARSE.agreement_len}
