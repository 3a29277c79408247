"""The model under test: from a checkpoint or with random weights, with an engine for each measurement."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.random import RELEASED, SHAPES
from sala.config import SalaConfig
from sala.engine.engine import Engine
from sala.engine.service import EngineService
from sala.errors import InputError, SalaError
from sala.protocol import Capacity, Options

if TYPE_CHECKING:
    import torch

    from sala.backends.torch.model import SalaModel

RANDOM = {**SHAPES, "released": RELEASED}
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A model on its device. Each measurement gets an engine no larger than it needs."""

    name: str
    model: "SalaModel"
    device: "torch.device"
    dtype: "torch.dtype"
    options: Options

    @property
    def config(self) -> SalaConfig:
        return self.model.config

    @contextmanager
    def service(self, ctx: int, batch: int = 1) -> Iterator[tuple[EngineService, Capacity]]:
        """Open an engine service for `batch` sequences of `ctx` tokens, without snapshots: nothing is reused."""
        from sala.backends.torch.executor import TorchExecutor, free_bytes, pick_kv, plan_capacity

        options = replace(self.options, ctx=ctx, max_batch=batch, snapshots=0)
        kv_dtype = pick_kv(options.kv, self.device)
        capacity = plan_capacity(self.config, options, self.dtype, self.device, free_bytes(self.device), kv_dtype)
        _check_capacity(capacity, batch)
        executor = TorchExecutor(
            self.model, capacity, self.device, self.dtype, kv_dtype, options.kernels, options.prefill
        )
        service = EngineService(Engine(executor, self.config.sparse_config, options))
        try:
            yield service, capacity
        finally:
            service.close()
            executor.close()
            release(self.device)


def release(device: "torch.device") -> None:
    """Free memory that is no longer referenced."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _check_capacity(capacity: Capacity, batch: int) -> None:
    """Raise SalaError unless all sequences can run at once: one that waits would be measured as slow."""
    pages = -(-capacity.max_tokens // capacity.page_size)
    fitting = min(capacity.num_pages // pages, capacity.num_slots)
    if fitting < batch:
        raise SalaError(
            f"{batch} sequences of {capacity.max_tokens:,} tokens do not fit into memory",
            f"{fitting} would fit; use shorter or fewer sequences",
        )


def open_checkpoint(path: Path, options: Options) -> BenchTarget:
    from sala.backends.torch.loader import load_model, pick_device, pick_dtype
    from sala.checkpoint import lora as adapters
    from sala.models.embedded import find_base

    path, adapter = find_base(path, options.adapter)
    checkpoint, config = adapters.open_checkpoint(path, SalaConfig.load(path), adapter)
    where, precision = pick_device(options.device), pick_dtype(options.dtype, config)
    return BenchTarget(path.name, load_model(checkpoint, config, precision, where), where, precision, options)


def open_random(shape: str, options: Options, num_tokens: int = 0, batch: int = 1) -> BenchTarget:
    """Return a model with random weights, made on its device; raise SalaError if memory does not suffice.

    Memory must hold the weights and, with `num_tokens`, the caches and activations of sequences of that length.
    """
    from sala.backends.memory import estimate
    from sala.backends.torch.loader import pick_device, pick_dtype, random_model

    if shape not in RANDOM:
        raise InputError("random", f"is {shape!r}", "use " + ", ".join(RANDOM))
    config = RANDOM[shape]
    where, precision = pick_device(options.device), pick_dtype(options.dtype, config)
    parameters = count_parameters(expected_tensors(config))
    needed = estimate(config, parameters, num_tokens, batch, num_snapshots=0, element_bytes=precision.itemsize)
    check_memory(f"random {shape}", needed.weights, needed.total - needed.weights, where)
    return BenchTarget(f"random {shape}", random_model(config, precision, where), where, precision, options)


def check_memory(name: str, weights: int, rest: int, device: "torch.device") -> None:
    """Raise SalaError if free memory, less a reserve, does not hold a model and what it needs to run."""
    from sala.backends.memory import USABLE

    free = free_memory(device)
    if weights + rest > USABLE * free:
        raise SalaError(
            f"{name}: the weights take {weights / 2**30:.1f} GiB and running {rest / 2**30:.1f} GiB more; "
            f"{free / 2**30:.1f} GiB are free, of which {USABLE:.0%} may be used",
            "free some memory, or take a smaller model",
        )


def free_memory(device: "torch.device") -> int:
    """Return the free bytes of the device; on a CPU no more than the container may still use."""
    from sala.backends.torch.executor import free_bytes

    free = free_bytes(device)
    if device.type != "cpu":
        return free
    try:
        limit, used = ((CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # not in a container, or without a limit
        return free
