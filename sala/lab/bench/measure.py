"""Speed and memory of the engine, by the clock: random prompts, greedy answers that do not end early.

Times are those of the engine, from the request to the token: everything but the text around it.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sala.engine.engine import Engine
from sala.engine.sequence import Request
from sala.errors import SalaError
from sala.lab.bench.subject import Subject
from sala.protocol import Sampling

if TYPE_CHECKING:
    import torch

WARM_TOKENS = 4  # of the answer that warms up


@dataclass(frozen=True, slots=True)
class Latency:
    """One request alone."""

    num_tokens: int  # of the prompt
    first_token_s: float
    prefill_per_second: float
    decode_per_second: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Several requests at a time; speeds are of all together."""

    batch: int
    num_tokens: int  # of each prompt
    first_tokens_s: float  # until every request had its first token
    prefill_per_second: float
    decode_per_second: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Course:
    """How requests went: when all had their first token, and what they drew after that."""

    first_s: float
    num_decoded: int
    decode_s: float
    peak_bytes: int

    @property
    def decode_per_second(self) -> float:
        return self.num_decoded / self.decode_s


def measure_latency(subject: Subject, num_tokens: int, new_tokens: int) -> Latency:
    course = _measure(subject, 1, num_tokens, new_tokens)
    return Latency(num_tokens, course.first_s, num_tokens / course.first_s, course.decode_per_second, course.peak_bytes)


def measure_throughput(subject: Subject, batch: int, num_tokens: int, new_tokens: int) -> Throughput:
    course = _measure(subject, batch, num_tokens, new_tokens)
    speed = batch * num_tokens / course.first_s
    return Throughput(batch, num_tokens, course.first_s, speed, course.decode_per_second, course.peak_bytes)


def _measure(subject: Subject, batch: int, num_tokens: int, new_tokens: int) -> Course:
    vocab_size = subject.config.vocab_size
    with subject.engine(num_tokens + new_tokens, batch) as (engine, capacity):
        # kernels of a GPU are compiled for sizes that grow with the context: the same length, once before
        warm_tokens = num_tokens if subject.device.type == "cuda" else min(num_tokens, capacity.prefill_chunk)
        warm = _prompts(batch, warm_tokens, vocab_size, seed=1)
        run(engine, warm, min(WARM_TOKENS, new_tokens), subject.device)
        return run(engine, _prompts(batch, num_tokens, vocab_size, seed=2), new_tokens, subject.device)


def _prompts(count: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)  # noqa: S311 - numbers to compute with, not secrets
    return [draw.choices(range(vocab_size), k=num_tokens) for _ in range(count)]


def run(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, device: "torch.device") -> Course:
    """All prompts at once, to the end."""
    sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=new_tokens, seed=0)
    memory = Memory(device)
    began = time.perf_counter()
    sequences = [engine.submit(Request(prompt, sampling)) for prompt in prompts]
    first_s, num_early = None, 0
    while not engine.is_idle:
        engine.step()
        memory.look()
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
        if engine.is_stuck:
            raise SalaError("the requests do not fit into the cache", "shorten them or take fewer")
        if first_s is None and all(sequence.sampled for sequence in sequences):
            first_s = time.perf_counter() - began
            num_early = sum(len(sequence.sampled) for sequence in sequences)
    end_s = time.perf_counter() - began
    assert first_s is not None
    num_decoded = sum(len(sequence.sampled) for sequence in sequences) - num_early
    return Course(first_s, num_decoded, end_s - first_s, memory.peak)


class Memory:
    """The most that was in use: of the GPU's memory, or of this process's after any step."""

    def __init__(self, device: "torch.device") -> None:
        import psutil
        import torch

        self._device, self._process, self._most = device, psutil.Process(), 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def look(self) -> None:
        if self._device.type != "cuda":
            self._most = max(self._most, int(self._process.memory_info().rss))

    @property
    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else self._most
