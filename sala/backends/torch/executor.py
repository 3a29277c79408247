"""The torch side of the seam: weights, cache, and `run`."""

from collections.abc import Sequence
from typing import Any

import psutil
import torch

from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.loader import load_model, pick_device, pick_dtype
from sala.backends.torch.model import SalaModel
from sala.backends.torch.sampler import draw
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError
from sala.memory import state_bytes, token_bytes
from sala.protocol import Capacity, Options, Plan, Result, Row

_CACHE_SHARE = 0.5  # of the free memory, when no context length is asked for
_PREFILL_CHUNK = {"cpu": 256, "cuda": 8192, "mps": 2048}


class TorchExecutor:
    """Runs plans on one device. Not thread-safe: one engine owns it."""

    def __init__(self, model: SalaModel, capacity: Capacity, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        self.cache = HybridCache(model.config, capacity.num_pages, capacity.num_slots, dtype, device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        batch = pack(plan, self.device)
        hidden = self.model(batch, self.cache)
        drawing = [index for index, row in enumerate(plan.rows) if row.sampling is not None]
        drawn: list[Any] = [None] * len(plan.rows)
        if drawing:
            logits = self.model.logits(hidden[batch.last_rows()[drawing]])
            for index, scores in zip(drawing, logits, strict=True):
                drawn[index] = draw(scores, plan.rows[index])
        return Result(tuple(drawn))

    @torch.inference_mode()
    def logits(self, row: Row) -> Any:
        batch = pack(Plan((row,)), self.device)
        return self.model.logits(self.model(batch, self.cache)).cpu().numpy()

    @torch.inference_mode()
    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.cache.copy_states(pairs)

    @torch.inference_mode()
    def clear_state(self, slot: int) -> None:
        self.cache.clear_state(slot)

    def close(self) -> None:
        self.__dict__.clear()


def open_executor(checkpoint: Checkpoint, config: SalaConfig, options: Options) -> TorchExecutor:
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, config)
    model = load_model(checkpoint, config, dtype, device)
    return TorchExecutor(model, plan_capacity(config, options, dtype, device), device, dtype)


def plan_capacity(config: SalaConfig, options: Options, dtype: torch.dtype, device: torch.device) -> Capacity:
    """How many pages there will be: what was asked for, or what half of the free memory holds."""
    page_size = config.sparse_config.block_size
    per_token = max(1, token_bytes(config, dtype.itemsize))
    room = free_bytes(device) - options.num_slots * state_bytes(config)
    if options.ctx is None:
        ctx = min(config.max_position_embeddings, int(room * _CACHE_SHARE) // per_token)
        ctx = max(ctx, page_size)
    else:
        ctx = options.ctx
        if ctx < 1 or ctx * per_token > room:
            most = max(0, room // per_token)
            raise InputError(
                "ctx",
                f"is {ctx:,}, which needs {ctx * per_token / 2**30:.1f} GiB of cache",
                f"{most:,} tokens fit in the {room / 2**30:.1f} GiB that are free",
            )
    chunk = options.prefill_chunk or _PREFILL_CHUNK.get(device.type, 512)
    return Capacity(-(-ctx // page_size), page_size, options.num_slots, chunk, ctx)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
