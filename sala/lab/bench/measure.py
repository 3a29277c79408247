"""Speed and memory of the engine: random prompts, greedy answers of a fixed length.

Times are those of the engine, from the request to the token, without tokenizer and detokenizer. The model under test
is a checkpoint or has random weights; each measurement has an engine of its own.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from sala.backends.memory import USABLE, estimate
from sala.backends.torch import executor
from sala.backends.torch.fast.dispatch import open_model
from sala.backends.torch.loader import pick_device, pick_dtype, random_model
from sala.backends.torch.model import SalaModel
from sala.checkpoint import lora as adapters
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.random import RELEASED, SHAPES
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.engine.engine import Engine
from sala.engine.requests import submit_tokens
from sala.engine.service import EngineService
from sala.engine.stream import Event
from sala.errors import InputError, SalaError
from sala.models.embedded import find_base
from sala.protocol import Capacity, Options, Sampling

RANDOM = {**SHAPES, "released": RELEASED}
CGROUP = Path("/sys/fs/cgroup")
WARM_TOKENS = 4  # of the warm-up answer


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A model on its device. Each measurement gets an engine no larger than it needs."""

    name: str
    model: SalaModel
    device: torch.device
    dtype: torch.dtype
    options: Options

    @property
    def config(self) -> SalaConfig:
        return self.model.config

    @contextmanager
    def service(self, ctx: int, batch: int = 1) -> Iterator[tuple[EngineService, Capacity]]:
        """Open an engine service for `batch` sequences of `ctx` tokens; unless asked for, without snapshots.

        Raise SalaError unless all of them can run at once.
        """
        home = "device" if self.options.kv_home == "auto" else self.options.kv_home  # no other one unless asked for
        options = replace(self.options, ctx=ctx, max_batch=batch, snapshots=self.options.snapshots or 0, kv_home=home)
        free = executor.free_bytes(self.device)
        capacity = executor.plan_capacity(self.config, options, self.dtype, self.device, free)
        fitting = min(capacity.num_pages // -(-capacity.max_tokens // capacity.page_size), capacity.num_slots)
        if fitting < batch:  # a sequence that waits would count as slow
            message = f"{batch} sequences of {capacity.max_tokens:,} tokens do not fit into memory"
            raise SalaError(message, f"{fitting} would fit; use shorter or fewer sequences")
        opened = executor.TorchExecutor(self.model, capacity, self.device, self.dtype, options)
        service = EngineService(Engine(opened, self.config.sparse_config, options))
        try:
            yield service, capacity
        finally:
            service.close()
            opened.close()
            release()


def release() -> None:
    """Free memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # after a kernel error; the next call reports it
            torch.cuda.empty_cache()


def open_checkpoint(path: Path, options: Options) -> BenchTarget:
    path, adapter = find_base(path, options.only_adapter)
    checkpoint, config = adapters.open_checkpoint(path, SalaConfig.load(path), adapter)
    where, precision = pick_device(options.device), pick_dtype(options.dtype, config)
    return BenchTarget(path.name, open_model(checkpoint, config, precision, where, options), where, precision, options)


def open_random(shape: str, options: Options, num_tokens: int = 0, batch: int = 1) -> BenchTarget:
    """Return a model with random weights, made on its device; raise SalaError if memory does not suffice.

    Memory must hold the weights and, with `num_tokens`, the caches and activations of sequences of that length.
    """
    if shape not in RANDOM:
        raise InputError("random", f"is {shape!r}", "use " + ", ".join(RANDOM))
    config = RANDOM[shape]
    where, precision = pick_device(options.device), pick_dtype(options.dtype, config)
    parameters = count_parameters(expected_tensors(config))
    needed = estimate(config, parameters, num_tokens, batch, num_snapshots=0, element_bytes=precision.itemsize)
    check_memory(f"random {shape}", needed.weights, needed.total - needed.weights, where)
    return BenchTarget(f"random {shape}", random_model(config, precision, where), where, precision, options)


def check_checkpoint(path: Path, options: Options, num_tokens: int) -> None:
    """Raise SalaError, before anything is loaded, if memory does not hold a checkpoint and `num_tokens` of context."""
    config = SalaConfig.load(path)
    where, precision = pick_device(options.device), pick_dtype(options.dtype, config)
    parameters = count_parameters(expected_tensors(config))
    with Checkpoint(path) as checkpoint:
        stored = checkpoint.nbytes if config.quantization is not None else parameters * precision.itemsize
    needed = estimate(
        config, parameters, num_tokens, num_snapshots=0, element_bytes=precision.itemsize, stored_bytes=stored
    )
    check_memory(path.name, needed.weights, needed.total - needed.weights, where)


def check_memory(name: str, weights: int, rest: int, device: torch.device) -> None:
    """Raise SalaError if free memory, less a reserve, does not hold a model and what it needs to run."""
    need_memory(name, weights, rest, free_memory(device))


def need_memory(name: str, weights: int, rest: int, free: int) -> None:
    if weights + rest > USABLE * free:
        raise SalaError(
            f"{name}: the weights take {weights / 2**30:.1f} GiB and running {rest / 2**30:.1f} GiB more; "
            f"{free / 2**30:.1f} GiB are free, of which {USABLE:.0%} may be used",
            "free some memory, or take a smaller model",
        )


def need_room(num_tokens: int, needed: int, free: int) -> None:
    """Raise SalaError if free memory, less a reserve, does not hold what a loaded model needs for so many tokens."""
    if needed > USABLE * free:
        raise SalaError(
            f"{num_tokens:,} tokens take {needed / 2**30:.2f} GiB beside the weights; {free / 2**30:.2f} GiB are free, "
            f"of which {USABLE:.0%} may be used",
            "free some memory, or take shorter prompts",
        )


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the device; on a CPU no more than the container may still use."""
    free = executor.free_bytes(device)
    if device.type != "cpu":
        return free
    with suppress(OSError, ValueError):  # not in a container, or without a limit
        limit, used = ((CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        free = min(free, max(0, int(limit) - int(used)))
    return free


# measuring


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


Run = Callable[[list[list[int]], int], RunTimes]  # from prompts and the length of their answers


def measure_latency(target: BenchTarget, num_tokens: int, new_tokens: int) -> Latency:
    return to_latency(num_tokens, _measure(target, 1, num_tokens, new_tokens))


def to_latency(num_tokens: int, times: RunTimes) -> Latency:
    return Latency(num_tokens, times.first_s, num_tokens / times.first_s, times.decode_per_second, times.peak_bytes)


def measure_throughput(target: BenchTarget, batch: int, num_tokens: int, new_tokens: int) -> Throughput:
    times = _measure(target, batch, num_tokens, new_tokens)
    speed = batch * num_tokens / times.first_s
    return Throughput(batch, num_tokens, times.first_s, speed, times.decode_per_second, times.peak_bytes)


def _measure(target: BenchTarget, batch: int, num_tokens: int, new_tokens: int) -> RunTimes:
    with target.service(num_tokens + new_tokens, batch) as (service, capacity):
        answer = partial(run, service, device=target.device)
        # GPU kernels are compiled for sizes that grow with the context, so warm up with the same length
        warm_tokens = num_tokens if target.device.type == "cuda" else min(num_tokens, capacity.prefill_chunk)
        return run_warm(answer, target.config.vocab_size, batch, num_tokens, new_tokens, warm_tokens)


def run_warm(run: Run, vocab_size: int, batch: int, num_tokens: int, new_tokens: int, warm_tokens: int) -> RunTimes:
    """Answer random prompts, after a warm-up with prompts of `warm_tokens`."""
    run(_prompts(batch, warm_tokens, vocab_size, seed=1), min(WARM_TOKENS, new_tokens))
    return run(_prompts(batch, num_tokens, vocab_size, seed=2), new_tokens)


def _prompts(count: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)  # noqa: S311 - numbers to compute with, not secrets
    return [generator.choices(range(vocab_size), k=num_tokens) for _ in range(count)]


def run(service: EngineService, prompts: Sequence[Sequence[int]], new_tokens: int, device: torch.device) -> RunTimes:
    """Answer all prompts at once, to the end."""
    sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=new_tokens, seed=0)
    submission = submit_tokens(prompts, sampling)
    answers = [answer for group in submission.groups for answer in group]
    memory = PeakMemory(device)
    first_at, num_early = None, 0

    def on_step() -> None:
        """Note when all prompts are done, and the memory in use; on the engine thread, after each step."""
        nonlocal first_at, num_early
        memory.update()
        if first_at is None and all(answer.sequence.sampled for answer in answers):
            first_at, num_early = time.perf_counter(), sum(len(answer.sequence.sampled) for answer in answers)

    service.observe(on_step=on_step)
    with service.submit(submission) as stream:
        num_tokens = sum(
            len(item.completion.token_ids) for item in stream if isinstance(item, Event) and item.completion
        )
    began, end = min(answer.began_at for answer in answers), max(answer.last_token_at for answer in answers)
    assert first_at is not None
    return RunTimes(first_at - began, num_tokens - num_early, end - first_at, memory.peak)


def capture(call: Callable[[], Any], generator: torch.Generator | None = None) -> torch.cuda.CUDAGraph:
    """Return a call as a CUDA graph; it runs once before, so that one-time initialization is not recorded.

    Random numbers come from `generator`. Other threads may use the GPU meanwhile, such as one that pins memory.
    """
    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        call()
    return graph


class PeakMemory:
    """The peak memory of the GPU, or of this process after any step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process, self._most = device, psutil.Process(), 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def update(self) -> None:
        if self._device.type != "cuda":
            self._most = max(self._most, int(self._process.memory_info().rss))

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else self._most
