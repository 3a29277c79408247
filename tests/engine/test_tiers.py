"""Tiers below the device: what is pushed down comes up again, and no fault of theirs reaches a request."""

import random
import shutil
import stat
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sala.engine.sessions as sessions
import sala.engine.tiers as tiers
from sala.config import Regime
from sala.engine.engine import Engine
from sala.engine.scheduler import Request, SequenceState, as_bytes
from sala.engine.sessions import DiskTier, SessionEntry, SessionStore
from sala.engine.tiers import TieredHybrid
from sala.llm import LLM
from sala.protocol import Blob, Options, Sampling
from tests.engine.fake import FakeExecutor
from tests.engine.test_engine import GREEDY, SPARSE, answer, finish, prompt, want
from tests.golden import DATA
from tests.integrity import integrity

SHORT = Sampling(temperature=0, max_tokens=4, ignore_eos=True)


class Chance:
    """Fails now and then."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng, self.rate = rng, rate
        self.failed: Counter[str] = Counter()

    def strike(self, name: str) -> None:
        if self.rng.random() < self.rate:
            self.failed[name] += 1
            raise OSError(f"no luck: {name}")


class FlakyExecutor(FakeExecutor):
    chance: Chance

    def dump(
        self, pages: Sequence[int], num_tokens: int, slot: int, memory: memoryview | None = None
    ) -> dict[str, Blob]:
        self.chance.strike("dump")
        return super().dump(pages, num_tokens, slot, memory)

    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        self.states[slot] = (-3,)  # whatever a restore that fails leaves behind
        self.chance.strike("restore")
        super().restore(blobs, pages, num_tokens, slot)


class FlakyStore(SessionStore):
    chance: Chance

    def write(self, path: Path, tokens: bytes, regime: Regime, blobs: Mapping[str, Blob], salt: str = "") -> None:
        self.chance.strike("write")
        super().write(path, tokens, regime, blobs, salt)

    def read(self, entry: SessionEntry, salt: str = "") -> tuple[bytes, dict[str, Blob]]:
        self.chance.strike("read")
        return super().read(entry, salt)


def ignore(message: str) -> None:
    """Warnings are part of the game."""


def tiered(
    executor: FakeExecutor, host: int = 0, directory: Path | None = None, store: SessionStore | None = None, **more: Any
) -> Engine:
    """An engine with tiers; `host` and `disk` are bytes."""
    disk = None
    if directory is not None:
        store = store or SessionStore(directory, "model", ignore)
        disk = DiskTier(store, SPARSE, more.pop("disk", None))
    options = Options(**more)
    hybrid = TieredHybrid(executor, SPARSE, options.snapshots, host, disk, ignore)
    return Engine(executor, SPARSE, options, False, hybrid)


def host_integrity(engine: Engine) -> list[str]:
    """Return what is wrong with the regions of host memory: together they must fill it without overlap."""
    assert engine.tiers is not None
    host = engine.tiers.host
    if host is None:
        return []
    regions = sorted([*host._free, *((copy.start, copy.start + copy.nbytes) for copy in host.prefix)])
    filled = [
        at for start, block in zip(host._starts, host._blocks, strict=True) for at in (start, start + block.nbytes)
    ]
    edges = [at for region in regions for at in region]
    inner = [at for pair in zip(edges[1::2], edges[2::2], strict=False) if pair[0] == pair[1] for at in pair]
    found = [] if sorted(edges) == edges == sorted([*filled, *inner]) else ["regions of host memory are wrong"]
    held = Counter[str]()
    for copy in host.prefix:
        held[copy.owner] += copy.nbytes
    return found + ([] if +held == +host._held else ["shares"])


def test_random_life_with_tiers() -> None:
    """Conversations that come back, are cancelled and preempted in tiers that are all too small, with faults."""
    totals = Counter[str]()

    @given(st.integers(0, 2**32), st.integers(14, 30), st.integers(2, 6), st.booleans(), st.sampled_from([0.0, 0.2]))
    @settings(max_examples=60, deadline=None, derandomize=True)
    def lead(seed: int, num_pages: int, num_slots: int, is_ahead: bool, rate: float) -> None:
        totals.update(live_with_tiers(seed, num_pages, num_slots, is_ahead, rate))

    lead()
    assert all(totals[name] for name in ("dump", "restore", "write", "read", "device", "host", "disk")), totals


def live_with_tiers(seed: int, num_pages: int, num_slots: int, is_ahead: bool, rate: float) -> Counter[str]:
    """Check one random life; return how often each transfer failed, and the tokens that each tier gave."""
    rng, chance, totals = random.Random(seed), Chance(random.Random(seed), rate), Counter[str]()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(FakeExecutor, "is_ahead", is_ahead)
        patch.setattr(sessions, "MIN_TOKENS", 32)
        patch.setattr(sessions, "RETRY_S", 0.0)
        patch.setattr(sessions.os, "fsync", ignore)
        patch.setattr(tiers, "SMALLEST_BLOCK", 1 << 14)
        executor = FlakyExecutor(num_pages=num_pages, num_slots=num_slots, chunk=rng.choice([5, 40]), ctx=200)
        store = FlakyStore(Path(place) / "cache", "model", ignore)
        executor.chance = store.chance = chance
        host = rng.choice([0, 17_000, 60_000])
        disk = {} if rng.random() < 0.3 else {"directory": store.directory, "store": store, "disk": 6000}
        eng = tiered(executor, host, max_batch=rng.randint(1, 3), **disk)
        assert eng.tiers is not None
        known, live, done = [prompt(rng, 30)], list[SequenceState](), list[SequenceState]()
        for _ in range(80):
            if rng.random() < 0.3:
                base = rng.choice(known[-5:])
                tokens = (base[: rng.choice([len(base), rng.randint(1, len(base))])] + prompt(rng, 9))[:180]
                request = Request(tokens, Sampling(temperature=0, max_tokens=9), salt=rng.choice(["", "s"]))
                live.append(eng.submit(request))
                known.append(tokens + want(request))
            if live and rng.random() < 0.05:
                eng.cancel(live.pop(rng.randrange(len(live))))
            if eng.scheduler.running and rng.random() < 0.05:
                eng.scheduler.preempt(rng.choice(eng.scheduler.running))
            if rng.random() < 0.05:
                if eng.tiers.disk is not None:
                    eng.tiers.disk.flush()
                totals += eng.hybrid.statistics.hit
                eng.forget()  # only what is on disk is left
            eng.step()
            assert integrity(eng) + host_integrity(eng) == []
            done += [sequence for sequence in live if sequence.is_finished]
            live = [sequence for sequence in live if not sequence.is_finished]
        finish(eng, *live)
        totals += eng.hybrid.statistics.hit
        for sequence in [*done, *live]:
            assert sequence.error is None, sequence.error
            assert answer(sequence) == want(sequence.request)
        assert not eng.tiers._ready
        if eng.tiers.disk is not None:
            eng.tiers.disk.flush()
            assert eng.tiers.disk._pending == 0
            assert sum(file.stat().st_size for file in store.paths()) <= 6000
            eng.tiers.disk.close()
        eng.forget()
        assert integrity(eng) + host_integrity(eng) == []
        assert (eng.hybrid.pages.num_free, eng.hybrid.slots.num_free) == (num_pages, num_slots)
        return totals + chance.failed


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_conversations_go_down_and_come_up_again(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots on the device, twelve conversations: every turn finds the one before it in the lower tier."""
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    executor = FakeExecutor(num_pages=100, num_slots=3, ctx=400)
    eng = tiered(executor, host=1 << 20) if tier == "host" else tiered(executor, directory=tmp_path / "cache")
    rng = random.Random(1)
    talks = [prompt(rng, 30) for _ in range(12)]  # with all turns still dense
    for turn in range(4):
        for talk in talks:
            sequence = eng.submit(Request(talk, SHORT))
            finish(eng, sequence)
            assert answer(sequence) == want(sequence.request)
            least = len(talk) - (25 if tier == "host" else 40)  # the tip, which a page more or less is not read for
            assert turn == 0 or (sequence.num_cached or 0) >= least
            talk += [*answer(sequence), *prompt(rng, 20)]
            if eng.tiers is not None and eng.tiers.disk is not None:
                eng.tiers.disk.flush()
    hit = eng.hybrid.statistics.hit
    assert hit[tier] > 0.8 * hit.total()
    assert eng.tiers is not None
    assert eng.tiers.uses[tier].prefixes >= 12


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_where_conversations_branch_off_goes_down_too(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the conversations left before it, one after another, and a longer prefix was written after it."""
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    executor = FakeExecutor(num_pages=100, num_slots=9, ctx=400)
    eng = tiered(executor, host=1 << 20) if tier == "host" else tiered(executor, directory=tmp_path)
    rng = random.Random(1)
    document = prompt(rng, 60)
    finish(eng, eng.submit(Request(document, SHORT)))
    for _ in range(4):
        finish(eng, eng.submit(Request([*document, *prompt(rng, 20)], SHORT)))
    for _ in range(20):
        finish(eng, eng.submit(Request(prompt(rng, 40), SHORT)))
    assert eng.hybrid.prefix.find(as_bytes([*document, 1]), SPARSE.regime(61), "") is None
    assert eng.tiers is not None
    if eng.tiers.disk is not None:
        eng.tiers.disk.flush()
        assert [file.is_inner for file in eng.tiers.disk._known.values() if file.entry.num_tokens == 59] == [False]
    sequence = eng.submit(Request([*document, *prompt(rng, 20)], SHORT))
    finish(eng, sequence)
    assert (sequence.num_cached, eng.hybrid.statistics.hit[tier]) == (59, 59)


@pytest.mark.parametrize("num_questions", [1, 3])
def test_a_restart_finds_what_questions_have_in_common(
    num_questions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system prompt that the requests mark as a boundary, or at whose end they were seen to branch off."""
    monkeypatch.setattr(sessions, "MIN_TOKENS", 32)
    monkeypatch.setattr(tiers, "MIN_TOKENS", 32 if num_questions == 1 else 1000)
    rng = random.Random(1)
    system = prompt(rng, 70)

    def ask(count: int) -> int:
        eng = tiered(FakeExecutor(), directory=tmp_path)
        for _ in range(count):
            sequence = eng.submit(Request([*system, *prompt(rng, 20)], SHORT, boundaries=(70,)))
            finish(eng, sequence)
        assert eng.tiers is not None
        assert eng.tiers.disk is not None
        eng.tiers.disk.close()
        return sequence.num_cached or 0

    assert ask(num_questions) == (70 if num_questions > 1 else 0)
    assert ask(1) == 70


def test_others_go_on_while_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    first = tiered(FakeExecutor(), directory=tmp_path)
    request = Request(prompt(random.Random(2), 150), GREEDY)
    finish(first, first.submit(request))
    assert first.tiers is not None
    assert first.tiers.disk is not None
    first.tiers.disk.close()
    eng, gate, read = tiered(FakeExecutor(), directory=tmp_path), threading.Event(), SessionStore.read

    def slow(self: SessionStore, entry: SessionEntry, salt: str = "") -> Any:
        assert gate.wait(20)
        return read(self, entry, salt)

    monkeypatch.setattr(SessionStore, "read", slow)
    waits = eng.submit(request)
    other = eng.submit(Request([3] * 30, GREEDY))
    finish(eng, other)
    assert not waits.is_running
    assert not eng.is_stuck
    gate.set()
    finish(eng, waits)
    assert answer(waits) == want(request)
    assert (waits.num_cached, dict(eng.hybrid.statistics.hit)) == (149, {"device": 0, "host": 0, "disk": 149})


def test_a_file_that_takes_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    eng, gate = tiered(FakeExecutor(), directory=tmp_path), threading.Event()
    request = Request(prompt(random.Random(2), 150), GREEDY)
    finish(eng, eng.submit(request))
    assert eng.tiers is not None
    assert eng.tiers.disk is not None
    eng.tiers.disk.flush()
    eng.forget()
    monkeypatch.setattr(SessionStore, "read", lambda *_: gate.wait(20))
    monkeypatch.setattr(tiers, "READ_LIMIT_S", 0.0)
    sequence = eng.submit(request)
    finish(eng, sequence)
    gate.set()
    assert (answer(sequence), sequence.num_cached) == (want(request), 0)


def test_blocks_of_host_memory() -> None:
    assert tiers.block_sizes(48 << 30) == [32 << 30, 16 << 30]
    assert tiers.block_sizes((96 << 20) + 5) == [64 << 20]
    assert tiers.block_sizes(1000) == [1000]


def test_a_salt_is_part_of_what_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    tokens = prompt(random.Random(3), 100)

    def ask(salt: str) -> int:
        eng = tiered(FakeExecutor(), directory=tmp_path)
        sequence = eng.submit(Request(tokens, GREEDY, salt=salt))
        finish(eng, sequence)
        assert eng.tiers is not None
        assert eng.tiers.disk is not None
        eng.tiers.disk.close()
        return sequence.num_cached or 0

    assert [ask("secret"), ask("secret"), ask("other")] == [0, 99, 0]
    salted = sorted(tmp_path.iterdir())
    assert len(salted) == 2
    assert not any(b"secret" in file.read_bytes() or "secret" in file.name for file in salted)
    assert [ask(""), ask("")] == [0, 99]
    (plain,) = set(tmp_path.iterdir()) - set(salted)
    salted[0].replace(plain)  # under the name of a file without a salt it is not used either
    assert ask("") == 0


def test_keys_that_collide_give_nobody_the_cache_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one hash stood for all prefixes: what a file holds is compared before it is used."""
    key, keys = sessions.PrefixKeys.key, sessions.PrefixKeys.keys
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    monkeypatch.setattr(sessions.PrefixKeys, "key", lambda *one: "0" * len(key(*one)))
    monkeypatch.setattr(sessions.PrefixKeys, "keys", lambda *all: ["0" * len(one) for one in keys(*all)])
    rng = random.Random(7)
    requests = [Request(prompt(rng, 100), GREEDY) for _ in range(2)]
    found = []
    for request in (requests[0], requests[0], requests[1], requests[1]):
        eng = tiered(FakeExecutor(), directory=tmp_path)
        sequence = eng.submit(request)
        finish(eng, sequence)
        assert answer(sequence) == want(request)
        found.append(sequence.num_cached)
        assert eng.tiers is not None
        assert eng.tiers.disk is not None
        eng.tiers.disk.close()
    assert found == [0, 99, 0, 99]


def test_a_disk_cache_without_a_limit_takes_a_tenth_of_what_is_free(tmp_path: Path) -> None:
    disk = DiskTier(SessionStore(tmp_path, "model", ignore), SPARSE, None)
    assert disk.use.size == pytest.approx(shutil.disk_usage(tmp_path).free / 10, rel=0.2)
    disk.close()


def test_a_disk_cache_without_a_limit_does_not_grow_with_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    total = 30_000  # of a disk that holds nothing else
    monkeypatch.setattr(
        sessions, "free_disk_bytes", lambda place: total - sum(file.stat().st_size for file in place.iterdir())
    )
    rng, limits = random.Random(8), []
    for _ in range(3):
        eng = tiered(FakeExecutor(), directory=tmp_path)
        assert eng.tiers is not None
        assert eng.tiers.disk is not None
        limits.append(eng.tiers.disk.use.size)
        for _ in range(6):
            finish(eng, eng.submit(Request(prompt(rng, 100), GREEDY)))
        eng.tiers.disk.close()
        assert eng.tiers.disk.use.used > total / 20
    assert limits == [total // 10] * 3


def test_servers_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    engines = [tiered(FakeExecutor(), directory=tmp_path) for _ in range(2)]
    rng = random.Random(4)
    requests = [Request(prompt(rng, 100), GREEDY) for _ in range(2)]

    def ask(eng: Engine, request: Request) -> int:
        sequence = eng.submit(request)
        finish(eng, sequence)
        assert answer(sequence) == want(request)
        for one in engines:
            assert one.tiers is not None
            assert one.tiers.disk is not None
            one.tiers.disk.flush()
        return sequence.num_cached or 0

    assert ask(engines[0], requests[0]) == 0
    ask(engines[1], requests[1])  # brings its index up to date
    assert ask(engines[1], requests[0]) == 99
    engines[1].forget()
    for file in tmp_path.glob("*.sala"):
        file.unlink()  # as another server does whose limit is reached
    assert ask(engines[1], requests[0]) == 0


def test_a_full_disk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    monkeypatch.setattr(sessions, "RETRY_S", 0.0)
    write_file = sessions.write_file

    def full(path: Path, *_: Any, **__: Any) -> None:
        with sessions.writing(path, needed=1 << 20):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sessions, "write_file", full)
    eng = tiered(FakeExecutor(), directory=tmp_path, store=SessionStore(tmp_path, "model", said.append))
    assert eng.tiers is not None
    assert eng.tiers.disk is not None
    request = Request(prompt(random.Random(5), 100), GREEDY)
    finish(eng, eng.submit(request))
    eng.tiers.disk.flush()
    assert list(tmp_path.iterdir()) == []
    (message,) = said
    assert all(word in message for word in (str(tmp_path), "needs 1", "are free", "auto-")), message
    monkeypatch.setattr(sessions, "write_file", write_file)
    finish(eng, eng.submit(request))
    eng.tiers.disk.flush()
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_real_states_and_pages_survive_host_memory(kv: str) -> None:
    """On a CPU, where host memory makes no sense but must work: the same tokens as without a cache."""
    greedy = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    rng = random.Random(6)
    talks = [[rng.randrange(256) for _ in range(150)] for _ in range(4)]
    common: dict[str, Any] = {"device": "cpu", "ctx": 512, "kv": kv, "max_batch": 1}
    with (
        LLM(DATA / "block16", snapshots=2, cache_ram="8M", **common) as small,
        LLM(DATA / "block16", snapshots=0, **common) as plain,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for _ in range(3):
            for talk in talks:
                found = small.generate(talk, **greedy).token_ids
                assert found == plain.generate(talk, **greedy).token_ids
                talk += [*found, *(rng.randrange(256) for _ in range(20))]
        assert small.service.status().prefix.hit["host"] > 1000
        assert integrity(small.engine) == []
