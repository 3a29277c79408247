"""Speed and memory of the engine: random prompts, greedy answers of a fixed length.

Times are those of the engine, from the request to the token, without tokenizer and detokenizer.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sala.engine.cache import Request
from sala.engine.requests import Submission
from sala.engine.service import EngineService
from sala.engine.stream import AnswerState, Event
from sala.lab.bench.target import BenchTarget
from sala.protocol import Sampling

if TYPE_CHECKING:
    import torch

WARM_TOKENS = 4  # of the warm-up answer


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
class RunTimes:
    """When all requests had their first token, and the tokens sampled after that."""

    first_s: float
    num_decoded: int
    decode_s: float
    peak_bytes: int

    @property
    def decode_per_second(self) -> float:
        return self.num_decoded / self.decode_s


def measure_latency(target: BenchTarget, num_tokens: int, new_tokens: int) -> Latency:
    times = _measure(target, 1, num_tokens, new_tokens)
    return Latency(num_tokens, times.first_s, num_tokens / times.first_s, times.decode_per_second, times.peak_bytes)


def measure_throughput(target: BenchTarget, batch: int, num_tokens: int, new_tokens: int) -> Throughput:
    times = _measure(target, batch, num_tokens, new_tokens)
    speed = batch * num_tokens / times.first_s
    return Throughput(batch, num_tokens, times.first_s, speed, times.decode_per_second, times.peak_bytes)


def _measure(target: BenchTarget, batch: int, num_tokens: int, new_tokens: int) -> RunTimes:
    vocab_size = target.config.vocab_size
    with target.service(num_tokens + new_tokens, batch) as (service, capacity):
        # GPU kernels are compiled for sizes that grow with the context, so warm up with the same length
        warm_tokens = num_tokens if target.device.type == "cuda" else min(num_tokens, capacity.prefill_chunk)
        warm = _prompts(batch, warm_tokens, vocab_size, seed=1)
        run(service, warm, min(WARM_TOKENS, new_tokens), target.device)
        return run(service, _prompts(batch, num_tokens, vocab_size, seed=2), new_tokens, target.device)


def _prompts(count: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)  # noqa: S311 - numbers to compute with, not secrets
    return [generator.choices(range(vocab_size), k=num_tokens) for _ in range(count)]


def run(service: EngineService, prompts: Sequence[Sequence[int]], new_tokens: int, device: "torch.device") -> RunTimes:
    """Answer all prompts at once, to the end."""
    sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=new_tokens, seed=0)
    answers = [AnswerState(Request(prompt, sampling)) for prompt in prompts]
    memory = PeakMemory(device)
    first_at, num_early = None, 0

    def on_step() -> None:
        """Note when all prompts are done, and the memory in use; on the engine thread, after each step."""
        nonlocal first_at, num_early
        memory.update()
        if first_at is None and all(answer.sequence.sampled for answer in answers):
            first_at, num_early = time.perf_counter(), sum(len(answer.sequence.sampled) for answer in answers)

    service.observe(on_step=on_step)
    with service.submit(Submission([[answer] for answer in answers], is_streamed=False)) as stream:
        num_tokens = sum(
            len(item.completion.token_ids) for item in stream if isinstance(item, Event) and item.completion
        )
    began, end = min(answer.began_at for answer in answers), max(answer.last_token_at for answer in answers)
    assert first_at is not None
    return RunTimes(first_at - began, num_tokens - num_early, end - first_at, memory.peak)


class PeakMemory:
    """The peak memory of the GPU, or of this process after any step."""

    def __init__(self, device: "torch.device") -> None:
        import psutil
        import torch

        self._device, self._process, self._most = device, psutil.Process(), 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def update(self) -> None:
        if self._device.type != "cuda":
            self._most = max(self._most, int(self._process.memory_info().rss))

    @property
    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else self._most
