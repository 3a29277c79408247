"""Requests through an engine, and by how much the first one of a kind and length waits longer than the second one."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from sala.engine.engine import WARM_LENGTHS, Engine
from sala.engine.scheduler import Request
from sala.lab.bench.meters import Timeline
from sala.protocol import Sampling, Verdict

GREEDY = Sampling(temperature=0, ignore_eos=True, seed=0)
SAMPLED = replace(GREEDY, temperature=0.7, top_p=0.95, top_k=50)
PENALISED = replace(SAMPLED, repetition_penalty=1.1, frequency_penalty=0.2)
LONG_LENGTHS = (20003, 40009, 70001, 140009)  # of lone prompts: more blocks, other kernels
NUM_NEIGHBOURS = 3


class Subject(Protocol):
    """What is measured."""

    is_smoke: bool
    config: Any
    began: float

    @property
    def engine(self) -> Engine: ...

    def prompts(self, number: int, length: int) -> list[list[int]]:
        """Return random prompts that no earlier request had."""
        ...

    def is_late(self) -> bool: ...


def drive(
    engine: Engine, prompts: Sequence[list[int]], sampling: Sampling, at_a_time: int
) -> tuple[float, list[Timeline]]:
    """Answer all prompts, so many at a time. Return the seconds and what came when; only updates count as tokens."""
    return drive_requests(engine, [Request(prompt, sampling) for prompt in prompts], at_a_time)


def drive_requests(
    engine: Engine, requests: Sequence[Request], at_a_time: int, is_tidy: bool = True
) -> tuple[float, list[Timeline]]:
    """`drive` requests of all kinds; if `is_tidy`, until nothing else runs either. Timelines are in order of ends."""
    queue, alive, done = deque(requests), {}, []
    began = time.perf_counter()
    while queue or alive:
        while queue and len(alive) < at_a_time:
            request = queue.popleft()
            timeline = Timeline(time.perf_counter(), num_input=len(request.prompt))
            alive[engine.submit(request).id] = timeline
        updates = engine.step()
        now = time.perf_counter()
        for update in updates:
            timeline = alive.get(update.sequence.id)
            if timeline is None:  # the late update of a sequence that has finished, or of a neighbour
                continue
            if update.sampled:
                timeline.events.append(now)
                timeline.num_output += len(update.sampled)
            if update.sequence.is_finished:
                if update.sequence.error is not None:
                    raise update.sequence.error
                done.append(alive.pop(update.sequence.id))
    seconds = time.perf_counter() - began
    while is_tidy and not engine.is_idle:
        engine.step()
    return seconds, done


class HalfOfAll:
    """A constraint in place of a grammar's: every other token is allowed."""

    allows_drafts = False

    def __init__(self, vocab_size: int) -> None:
        self._mask = bytes([0x55] * -(-vocab_size // 8))

    def mask(self) -> bytes:
        return self._mask

    def observe(self, token: int) -> Verdict | None:
        return None


def longest_wait_s(timeline: Timeline) -> float:
    return max(timeline.first_token_s, *timeline.gaps, 0.0)


def stall_alone(bench: Subject, length: int, sampling: Sampling = GREEDY, is_masked: bool = False) -> float:
    """Return by how much the first request of a length and kind, which runs alone, waited longer than the second."""
    waits = []
    for [prompt] in (bench.prompts(1, length) for _ in range(2)):
        controls = (HalfOfAll(bench.config.vocab_size),) if is_masked else ()
        request = Request(prompt, replace(sampling, max_tokens=4), controls=controls)
        waits.append(longest_wait_s(drive_requests(bench.engine, [request], 1)[1][0]))
    return waits[0] - waits[1]


def stall_in_conversation(bench: Subject, length: int) -> float:
    """`stall_alone` of the second turn of a conversation whose first one is cached."""
    waits = []
    for [prompt] in (bench.prompts(1, length) for _ in range(2)):
        first = bench.engine.submit(Request(prompt, replace(GREEDY, max_tokens=8)))
        while not bench.engine.is_idle:
            bench.engine.step()
        [question] = bench.prompts(1, 1 + length % 50)
        request = Request([*first.tokens, *question], replace(GREEDY, max_tokens=4))
        waits.append(longest_wait_s(drive_requests(bench.engine, [request], 1)[1][0]))
    return waits[0] - waits[1]


def stall_beside(bench: Subject, length: int) -> float:
    """`stall_alone` while neighbours decode; they wait as long as the prompt takes, both times."""
    waits = []
    for _ in range(2):
        *others, prompt = (bench.prompts(1, size)[0] for size in (*[64] * NUM_NEIGHBOURS, length))
        endless = replace(SAMPLED, max_tokens=512)
        neighbours = [bench.engine.submit(Request(other, endless)) for other in others]
        while any(len(one.sampled) < 2 and not one.is_finished for one in neighbours):
            bench.engine.step()
        request = Request(prompt, replace(GREEDY, max_tokens=4))
        waits.append(longest_wait_s(drive_requests(bench.engine, [request], 1, is_tidy=False)[1][0]))
        for one in neighbours:
            bench.engine.cancel(one)
        while not bench.engine.is_idle:
            bench.engine.step()
    return waits[0] - waits[1]


def stall_cases(bench: Subject) -> list[tuple[str, int, Callable[[], float]]]:
    """Return kinds of requests with lengths that the warm-up has not computed, in an order that mixes them."""
    generator = random.Random(0)
    new = [length for length in range(1, 4097) if length not in WARM_LENGTHS]
    lone = [*new[:130:3], *generator.sample(new[130:], 40), *LONG_LENGTHS]
    some = {kind: generator.sample(new, 8) for kind in ("sampled", "penalised", "masked", "follow-up", "beside others")}
    if bench.is_smoke:
        lone, some = [7, 8, 9], {kind: [11] for kind in some}
    kinds: dict[str, Callable[[int], float]] = {
        "sampled": partial(stall_alone, bench, sampling=SAMPLED),
        "penalised": partial(stall_alone, bench, sampling=PENALISED),
        "masked": partial(stall_alone, bench, is_masked=True),
        "follow-up": partial(stall_in_conversation, bench),
        "beside others": partial(stall_beside, bench),
    }
    cases: list[tuple[str, int, Callable[[], float]]] = [
        ("alone", one, partial(stall_alone, bench, one)) for one in lone
    ]
    cases += [(kind, one, partial(work, one)) for kind, work in kinds.items() for one in some[kind]]
    return generator.sample(cases, len(cases))


def measure_stalls(bench: Subject) -> dict[str, Any]:
    """Return by how much the first request of a kind and length waited longer than the second one, at worst."""
    bench.began, found = time.perf_counter(), {}
    for kind, length, work in stall_cases(bench):
        if bench.is_late():
            break
        found.setdefault(kind, {})[str(length)] = work()
    by_kind = {}
    for kind, stalls in sorted(found.items()):
        worst = sorted(stalls, key=lambda length: -stalls[length])[:5]
        longest = {length: stalls[length] for length in worst}
        by_kind[kind] = {"stall_s": stalls[worst[0]], "num_lengths": len(stalls), "worst": longest}
    stall_s = max(one["stall_s"] for one in by_kind.values())
    return {"stall_s": stall_s, "num_lengths": len(found.get("alone", ())), "kinds": by_kind}
