"""The executor of the torch backend: owns weights and cache and runs plans."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from sala.backends.memory import share_memory
from sala.backends.rows import cached_tensors, check_blobs, guess_tokens, keep_agreed, places_of
from sala.backends.torch.batch import Batch, pack, take
from sala.backends.torch.cache import FP8, HybridCache, raw
from sala.backends.torch.fast.dispatch import keep_packed, put_kernel_linears, select_forward, select_ops
from sala.backends.torch.loader import load_model, pick_device, pick_dtype
from sala.backends.torch.model import SalaModel
from sala.backends.torch.sampler import sample_all
from sala.checkpoint.dtypes import dtypes_by_file_name
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError
from sala.protocol import Blob, Capacity, Options, Plan, Result, Row, SampledToken

_PREFILL_CHUNK = {"cpu": 256, "cuda": 8192, "mps": 2048}  # tokens; of a GPU rounded, see `prefill_chunk`
_TILE = 64  # rows of a tile of a large matrix product (or half of one)
_NAMES = {dtype: name for name, dtype in dtypes_by_file_name(torch).items()}


class TorchExecutor:
    """Runs plans on one device. Not thread-safe: one engine owns it."""

    def __init__(
        self, model: SalaModel, capacity: Capacity, device: torch.device, dtype: torch.dtype, options: Options
    ) -> None:
        self.model = model
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        kv_dtype = pick_kv(options.kv, device)
        self.cache = HybridCache(model.config, capacity.num_pages, capacity.num_slots, dtype, device, kv_dtype)
        self.ops = select_ops(options.kernels)
        self.fused = select_forward(model, device, capacity.max_tokens, options)
        self._pulse = torch.zeros(1, device=device)  # for `probe`, which must not allocate
        self._is_closed = False

    def forward(
        self, batch: Batch, cache: HybridCache, num_layers: int | None = None, wanted: Sequence[int] | None = None
    ) -> Tensor:
        """Run the fused forward if it takes this batch, else the model → hidden states of `wanted` rows, or of all."""
        if self.fused is not None and self.fused.can_run(batch):
            return self.fused(batch, cache, num_layers, wanted)
        hidden: Tensor = self.model(batch, cache, num_layers)
        return hidden if wanted is None else take(hidden, wanted)

    def scores(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] → logits [n, vocab] in fp32."""
        return self.model.logits(hidden) if self.fused is None else self.fused.logits(hidden)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        batch = pack(plan, self.device, self.ops)
        wanted = batch.sampled_rows(plan)
        hidden = self.forward(batch, self.cache, wanted=wanted)
        if not wanted:
            return Result(((),) * len(plan.rows))
        sampled = keep_agreed(plan, sample_all(self.scores(hidden), places_of(plan)))
        self.cache.fold(batch, [len(tokens) for tokens in sampled])
        return Result(sampled)

    @torch.inference_mode()
    def draft(self, plan: Plan, num_layers: int, count: int) -> tuple[tuple[int, ...], ...]:
        cache = self.cache.for_drafts([row.slot for row in plan.rows], num_layers)

        def sample(plan: Plan) -> list[SampledToken]:
            batch = pack(plan, self.device, self.ops)
            hidden = self.forward(batch, cache, num_layers, batch.sampled_rows(plan))
            return sample_all(self.scores(hidden), [(row, 0) for row in plan.rows])

        return guess_tokens(plan, count, sample)

    @torch.inference_mode()
    def logits(self, row: Row) -> Any:
        batch = pack(Plan((row,)), self.device, self.ops)
        return self.scores(self.forward(batch, self.cache)).cpu().numpy()

    @torch.inference_mode()
    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.cache.copy_states(pairs)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        self.cache.copy_page(source, target, num_rows)

    @torch.inference_mode()
    def clear_state(self, slot: int) -> None:
        self.cache.clear_state(slot)

    @torch.inference_mode()
    def dump(self, pages: Sequence[int], num_tokens: int, slot: int) -> dict[str, Blob]:
        table = torch.tensor(list(pages), device=self.device)
        blobs = {}
        for name, entry in cached_tensors(self.model.config, num_tokens).items():
            pool = self.cache.pool_of(entry)
            numbers = raw(pool)
            tensor = numbers[slot] if entry.pool == "state" else numbers[:, table].flatten(1, 2)[:, : entry.shape[1]]
            data = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data
            blobs[name] = Blob(_NAMES[pool.dtype], entry.shape, data)
        return blobs

    @torch.inference_mode()
    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        table = torch.tensor(list(pages), device=self.device)
        tensors = cached_tensors(self.model.config, num_tokens)
        check_blobs(blobs, tensors, lambda entry: _NAMES[self.cache.pool_of(entry).dtype])
        for name, entry in tensors.items():
            pool = raw(self.cache.pool_of(entry))
            tensor = _tensor(blobs[name], pool)
            if entry.pool == "state":
                pool[slot] = tensor
                continue
            per_page = pool.shape[2]
            index = torch.arange(entry.shape[1], device=self.device)
            pool[:, table] = 0
            pool.flatten(1, 2)[:, table[index // per_page] * per_page + index % per_page] = tensor

    @torch.inference_mode()
    def probe(self) -> None:
        self._pulse.zero_().item()

    def close(self) -> None:
        """Free weights and cache; the executor cannot run afterwards."""
        if not self._is_closed:
            self._is_closed = True
            del self.model, self.cache, self.fused, self._pulse


def _tensor(blob: Blob, like: Tensor) -> Tensor:
    if 0 in blob.shape:  # fewer tokens than one row of pooled keys stands for; an empty tensor has no view
        return torch.empty(blob.shape, dtype=like.dtype, device=like.device)
    raw = np.frombuffer(blob.data, np.uint8).copy()
    return torch.from_numpy(raw).view(like.dtype).view(blob.shape).to(like.device)


def open_executor(checkpoint: Checkpoint, config: SalaConfig, options: Options) -> TorchExecutor:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, config)
    model = load_model(checkpoint, config, dtype, device, is_expanded=not keep_packed(options, device, dtype))
    put_kernel_linears(model, options.kernels)
    is_mapped = device.type == "cpu" and not {_NAMES[dtype], "U32"}.isdisjoint(
        info.dtype for info in checkpoint.tensors.values()
    )
    free = free_bytes(device)
    if is_mapped:  # the mapped weights are not resident yet but will be
        free = max(free - checkpoint.nbytes, free // 10)
    capacity = plan_capacity(config, options, dtype, device, free)
    return TorchExecutor(model, capacity, device, dtype, options)


def pick_kv(kind: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype to which keys and values are rounded, or None to keep them as computed."""
    if kind == "auto":
        return None
    is_able = device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))
    if not is_able:
        raise InputError("kv", "is fp8, which needs a GPU of compute capability 8.9 or newer, or a CPU", "leave it out")
    return FP8


def plan_capacity(
    config: SalaConfig, options: Options, dtype: torch.dtype, device: torch.device, free: int
) -> Capacity:
    """Return how many pages and slots fit into `free` bytes."""
    kv_dtype = pick_kv(options.kv, device) or dtype
    name = _NAMES[dtype] if kv_dtype == dtype else f"{_NAMES[dtype]}, keys and values {_NAMES[kv_dtype]}"
    return share_memory(config, options, name, dtype.itemsize, prefill_chunk(device), free, kv_dtype.itemsize)


def prefill_chunk(device: torch.device) -> int:
    """Return the tokens of a prefill step. On a GPU they fill whole waves of tiles of each product."""
    chunk = _PREFILL_CHUNK.get(device.type, 256)
    if device.type != "cuda":
        return chunk
    wave = _TILE * int(torch.cuda.get_device_properties(device).multi_processor_count)
    return wave * max(1, round(chunk / wave))


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
