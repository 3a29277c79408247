"""What is measured: a model, from a checkpoint or with random weights, and engines around it."""

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


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on its device. An engine is made for every measurement, no larger than that needs."""

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
        """Open an engine service for so many sequences of `ctx` tokens, without snapshots: nothing is reused."""
        from sala.backends.torch.executor import TorchExecutor, free_bytes, pick_kv, plan_capacity

        options = replace(self.options, ctx=ctx, max_batch=batch, snapshots=0)
        kv_dtype = pick_kv(options.kv, self.device)
        capacity = plan_capacity(self.config, options, self.dtype, self.device, free_bytes(self.device), kv_dtype)
        _check_room(capacity, batch)
        executor = TorchExecutor(
            self.model, capacity, self.device, self.dtype, kv_dtype, options.kernels, options.prefill
        )
        service = EngineService(Engine(executor, self.config.sparse_config, options))
        try:
            yield service, capacity
        finally:
            service.close()
            executor.close()
            self.clean()

    def clean(self) -> None:
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _check_room(capacity: Capacity, batch: int) -> None:
    """All sequences must run at once: what waits would be measured as slow."""
    pages = -(-capacity.max_tokens // capacity.page_size)
    room = min(capacity.num_pages // pages, capacity.num_slots)
    if room < batch:
        raise SalaError(
            f"{batch} sequences of {capacity.max_tokens:,} tokens do not fit into memory",
            f"{room} would; shorten them or take fewer",
        )


def open_checkpoint(path: Path, options: Options) -> Subject:
    from sala.backends.torch.loader import load_model, pick_device, pick_dtype
    from sala.checkpoint import lora as adapters
    from sala.models.embedded import find_base

    path, adapter = find_base(path, options.adapter)
    checkpoint, config = adapters.open_checkpoint(path, SalaConfig.load(path), adapter)
    where, precision = pick_device(options.device), pick_dtype(options.dtype, config)
    return Subject(path.name, load_model(checkpoint, config, precision, where), where, precision, options)


def open_random(shape: str, options: Options) -> Subject:
    """Weights made on the device itself; no checkpoint is needed."""
    from sala.backends.torch.executor import free_bytes
    from sala.backends.torch.loader import pick_device, pick_dtype
    from sala.backends.torch.random import random_model

    if shape not in RANDOM:
        raise InputError("random", f"is {shape!r}", "use " + ", ".join(RANDOM))
    config = RANDOM[shape]
    where, precision = pick_device(options.device), pick_dtype(options.dtype, config)
    needed, free = count_parameters(expected_tensors(config)) * precision.itemsize, free_bytes(where)
    if needed > free:
        raise SalaError(
            f"the weights take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free", "take another shape"
        )
    return Subject(f"random {shape}", random_model(config, precision, where), where, precision, options)
