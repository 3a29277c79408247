"""The executor of the torch backend: owns weights and cache and runs plans."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from sala.backends.memory import (
    IN_HOST_MEMORY,
    ON_DISK,
    Offload,
    page_directory,
    pooled_bytes,
    share_memory,
    token_bytes,
)
from sala.backends.rows import DRAFT_PREFIX, cached_tensors, check_blobs, guess_tokens, keep_agreed, places_of
from sala.backends.sources import HeadWeights
from sala.backends.torch.adapters import AdapterSet, Rows
from sala.backends.torch.batch import Batch, pack, take
from sala.backends.torch.cache import FP8, HybridCache, raw
from sala.backends.torch.draft_exit import DraftExit, load_draft_exit
from sala.backends.torch.draft_head import Drafter, DraftHead, HeadCache, load_draft_head
from sala.backends.torch.fast.dispatch import (
    AheadForward,
    cpu_kernel,
    open_model,
    put_half_linears,
    select_forward,
    select_ops,
)
from sala.backends.torch.gather import Gather
from sala.backends.torch.host_memory import HostMemory
from sala.backends.torch.kernels import native
from sala.backends.torch.loader import pick_device, pick_dtype
from sala.backends.torch.model import SalaModel
from sala.backends.torch.page_file import PageFile
from sala.backends.torch.sampler import sample_all
from sala.checkpoint.draft_head import DraftHeadConfig
from sala.checkpoint.dtypes import dtypes_by_file_name
from sala.checkpoint.lora import Adapter
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError, ModelBroken, free_disk_bytes
from sala.protocol import Blob, Capacity, Options, Plan, Result, Row, SampledToken

_PREFILL_CHUNK = {"cpu": 256, "cuda": 8192, "mps": 2048}  # tokens; rounded on a GPU, see `prefill_chunk`
_MAX_BATCH = {"cuda": 128}  # up to here products of decode rows are batch-invariant; 8 elsewhere
_SAMPLING_BYTES = 9  # bytes of a slot per token of the vocabulary: kernels.sampling.SamplingBuffers
_ALIGNMENT = 64  # bytes, of the tensors in a dump
_TILE = 64  # rows of a tile of a large matrix product (or half of one)
_STATES = {"auto": torch.float32, "bf16": torch.bfloat16}  # by the option `state`
_log = logging.getLogger("sala.backends")
_DTYPES = dtypes_by_file_name(torch)
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TorchExecutor:
    """Runs plans on one device. Not thread-safe: one engine owns it."""

    def __init__(
        self,
        model: SalaModel,
        capacity: Capacity,
        device: torch.device,
        dtype: torch.dtype,
        options: Options,
        adapters: Sequence[Adapter] = (),
        head: DraftHead | None = None,
        draft_exit: DraftExit | None = None,
    ) -> None:
        self.model = model
        self.draft_exit = draft_exit
        self.capacity = replace(capacity, can_gather=True)
        self.device = device
        self.dtype = dtype
        kv_dtype = pick_kv(options.kv, device)
        config, state_dtype = model.config, _STATES[options.state]
        self.home = open_home(config, capacity, device, dtype, options)
        empty = None if self.home is None else self.home.empty
        self.cache = HybridCache(
            config, capacity.num_pages, capacity.num_slots, dtype, device, kv_dtype, state_dtype, empty
        )
        self.drafter = None if head is None else self._open_drafter(head)
        self.ops = select_ops(options.kernels)
        self.fused = select_forward(model, device, capacity.max_tokens, options)
        self.ahead: AheadForward | None = None
        if isinstance(self.fused, AheadForward):
            self._serve_from_host(self.fused)
        self.adapters = AdapterSet(model, adapters, device) if adapters else None
        self.capacity = replace(self.capacity, has_warm_up=isinstance(self.fused, AheadForward))
        if head is not None and isinstance(self.fused, AheadForward):
            self.fused.feature_layers = head.config.feature_layers
        # Rows with an adapter are sampled on the host, and so are those that a draft head follows.
        if isinstance(self.fused, AheadForward) and not adapters and head is None:
            self.run_ahead(self.fused)
        self._head_weights: HeadWeights = HeadWeights.of(config)
        self._max_count = 1 if options.speculate == "off" else 1 + options.num_draft  # tokens of a decode row
        self._pulse = torch.zeros(1, device=device)  # for `probe`, which must not allocate
        self._is_closed = False

    def _open_drafter(self, head: DraftHead) -> Drafter:
        self.capacity = replace(self.capacity, can_draft=True)
        capacity = self.capacity
        sizes = capacity.num_pages, capacity.num_slots, capacity.page_size
        return Drafter(head, self.model, HeadCache(head.config, *sizes, head.dtype, self.device))

    def _serve_from_host(self, fused: AheadForward) -> None:
        """Let the forward keep on the device what it reads of keys and values that lie in host memory."""
        if isinstance(self.home, HostMemory):
            kv_dtype = FP8 if self.cache.is_fp8 else self.dtype
            num_frames = self.capacity.hot_bytes // page_bytes_away(self.model.config, self.dtype, kv_dtype)
            if num_frames:
                self.cache.add_hot_pool(num_frames)
            fused.stream_from(self.cache, self.home)

    def run_ahead(self, fused: AheadForward) -> None:
        """Run plans by a forward that samples on the device."""
        if self.fused is not fused:
            self._serve_from_host(fused)
        self.fused = self.ahead = fused
        fused.use(self.cache, self.capacity.num_slots)
        self.capacity = replace(self.capacity, can_run_ahead=True, can_split=True, has_warm_up=True)

    def forward(
        self, batch: Batch, cache: HybridCache, num_layers: int | None = None, wanted: Sequence[int] | None = None
    ) -> Tensor:
        """Run the fused forward if it takes this batch, else the model → hidden states of `wanted` rows, or of all."""
        rows = [(span.adapter, span.length) for span in batch.spans]
        if self.fused is not None and not _is_adapted(rows) and self.fused.can_run(batch):
            return self.fused(batch, cache, num_layers, wanted)
        with self._applying(rows):
            hidden: Tensor = self.model(batch, cache, num_layers)
        return hidden if wanted is None else take(hidden, wanted)

    def scores(self, hidden: Tensor, adapters: Sequence[str]) -> Tensor:
        """hidden [n, hidden] → logits [n, vocab] in fp32; each row has an adapter, or an empty string."""
        rows = [(adapter, 1) for adapter in adapters]
        if self.fused is not None and not _is_adapted(rows):
            return self.fused.logits(hidden)
        with self._applying(rows):
            return self.model.logits(hidden)

    def _applying(self, rows: Rows) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.applied(rows)

    @torch.inference_mode()
    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        if isinstance(self.fused, AheadForward):
            self.fused.warm_up(self.cache, self.capacity.max_batch, self._max_count, on_progress)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Callable[[], Result]:
        if self.ahead is not None and not any(row.num_drafts for row in plan.rows):
            return self.ahead.launch(plan)
        result = self.run(plan)
        return lambda: result

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        """Run all rows with adapters together, and the others separately, so that adapters do not change their bits."""
        adapted = [bool(row.adapter) for row in plan.rows]
        if len(set(adapted)) < 2:
            return self._run(plan)
        parts = {kind: Plan(tuple(row for row in plan.rows if bool(row.adapter) is kind)) for kind in (False, True)}
        results = {kind: self._run(part) for kind, part in parts.items()}
        sampled = {kind: iter(result.sampled) for kind, result in results.items()}
        gathered = {kind: iter(result.gathered) for kind, result in results.items()}
        found = tuple(next(gathered[kind], None) for kind in adapted)
        return Result(tuple(next(sampled[kind]) for kind in adapted), found if any(found) else ())

    def _run(self, plan: Plan) -> Result:
        wants_sources = any(row.wants_sources for row in plan.rows)
        gather = Gather.of(plan, self.model.config) if wants_sources else None
        is_followed = self.drafter is not None and any(row.is_followed for row in plan.rows)
        features = self.drafter.features() if self.drafter is not None and is_followed else None
        batch = pack(plan, self.device, self.ops, gather, features)
        wanted = batch.sampled_rows(plan)
        hidden = self.forward(batch, self.cache, wanted=wanted)
        if not wanted:
            self._follow(batch, batch.lengths)
            return Result(((),) * len(plan.rows))
        places = places_of(plan)
        logits = self.scores(hidden, [row.adapter for row, _ in places])
        sampled = keep_agreed(plan, sample_all(logits, places))
        batch.fold_accepted([len(tokens) for tokens in sampled])
        drafts = (row.num_drafts for row in plan.rows)
        kept = zip(batch.lengths, drafts, sampled, strict=True)
        self._follow(batch, [length - count + max(0, len(tokens) - 1) for length, count, tokens in kept])
        return Result(sampled, () if gather is None else gather.results(plan, self._head_weights))

    def _follow(self, batch: Batch, num_kept: Sequence[int]) -> None:
        if self.drafter is not None and batch.features is not None:
            self.drafter.follow(batch, batch.features, num_kept)

    def weigh_heads(self, weights: Sequence[Sequence[float]] | None, keeps_heads: bool = False) -> None:
        self._head_weights = HeadWeights.of(self.model.config, weights, keeps_heads)
        if self.ahead is not None:
            self.ahead.weigh_heads(self._head_weights)

    @torch.inference_mode()
    def draft(self, plan: Plan, count: int, num_layers: int | None = None) -> tuple[tuple[int, ...], ...]:
        if num_layers is None:
            assert self.drafter is not None
            return self.drafter.draft(plan, count, lambda plan: pack(plan, self.device, self.ops))
        if self.draft_exit is not None:
            num_layers = self.draft_exit.config.num_layers
        cache = self.cache.for_drafts([row.slot for row in plan.rows], num_layers)

        def sample(plan: Plan) -> list[SampledToken]:
            batch = pack(plan, self.device, self.ops)
            hidden = self.forward(batch, cache, num_layers, batch.sampled_rows(plan))
            if self.draft_exit is not None:
                hidden = self.draft_exit(hidden)
            return sample_all(self.scores(hidden, [row.adapter for row in plan.rows]), [(row, 0) for row in plan.rows])

        return guess_tokens(plan, count, sample)

    @torch.inference_mode()
    def logits(self, row: Row) -> Any:
        batch = pack(Plan((row,)), self.device, self.ops)
        scores = self.scores(self.forward(batch, self.cache), [row.adapter] * len(row.tokens))
        is_broken = scores.amax().isnan()
        found = scores.cpu().numpy()
        if is_broken:  # computed by now: the copy has waited for it
            raise ModelBroken
        return found

    @torch.inference_mode()
    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.cache.copy_states(pairs)
        if self.drafter is not None:
            self.drafter.cache.copy_states(pairs)
        self._reassign(*(target for _, target in pairs))

    @torch.inference_mode()
    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        self.cache.copy_page(source, target, num_rows)
        if self.drafter is not None:
            self.drafter.cache.copy_page(source, target, num_rows)

    @torch.inference_mode()
    def clear_state(self, slot: int) -> None:
        self.cache.clear_state(slot)
        if self.drafter is not None:
            self.drafter.cache.last[slot] = 0
        self._reassign(slot)

    def _reassign(self, *slots: int) -> None:
        if self.ahead is not None:
            for slot in slots:
                self.ahead.forget(slot)

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return memory of the host: pinned for a GPU, otherwise taken from the system as it is filled."""
        try:
            tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            raise InputError("cache_ram", f"cannot be allocated: {error}", "lower it") from None
        return tensor.numpy().data

    @torch.inference_mode()
    def dump(
        self, pages: Sequence[int], num_tokens: int, slot: int, memory: memoryview | None = None
    ) -> dict[str, Blob]:
        table = torch.tensor(list(pages), device=self.device)
        blobs: dict[str, Blob] = {}
        at = 0
        for name, dtype, shape, tensor in self._held(table, num_tokens, slot):
            source = tensor.contiguous().flatten().view(torch.uint8)
            if memory is None:
                target = torch.empty(source.numel(), dtype=torch.uint8)
            else:
                target = torch.from_numpy(np.asarray(memory[at : at + source.numel()]))
                at += -(-source.numel() // _ALIGNMENT) * _ALIGNMENT
            target.copy_(source, non_blocking=True)
            blobs[name] = Blob(_NAMES[dtype], shape, target.numpy().data)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return blobs

    def _held(
        self, table: Tensor, num_tokens: int, slot: int
    ) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Tensor]]:
        """Yield what a sequence has in the cache: name, dtype, shape, and the numbers, which may be raw bytes."""
        for name, entry in cached_tensors(self.model.config, num_tokens, self.cache.is_fp8).items():
            pool = self.cache.pool_of(entry)
            numbers = raw(pool)
            tensor = numbers[slot] if entry.pool == "state" else numbers[:, table].flatten(1, 2)[:, : entry.shape[1]]
            yield name, pool.dtype, entry.shape, tensor
        if self.drafter is not None:
            for name, tensor in self.drafter.cache.tensors(table, num_tokens, slot).items():
                yield name, tensor.dtype, tuple(tensor.shape), tensor

    @torch.inference_mode()
    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        table = torch.tensor(list(pages), device=self.device)
        tensors = cached_tensors(self.model.config, num_tokens, self.cache.is_fp8)
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
        self.cache.forget_hot(pages)
        if self.drafter is not None:
            own = {name: blob for name, blob in blobs.items() if name.startswith(DRAFT_PREFIX)}
            found = {
                name: _tensor(blob, torch.empty(0, dtype=_DTYPES[blob.dtype], device=self.device))
                for name, blob in own.items()
            }
            self.drafter.cache.restore(found, table, num_tokens, slot)

    @torch.inference_mode()
    def probe(self) -> None:
        self._pulse.zero_().item()

    def close(self) -> None:
        """Free weights and cache; the executor cannot run afterwards."""
        if not self._is_closed:
            self._is_closed = True
            del self.model, self.cache, self.fused, self.ahead, self.adapters, self._pulse, self.home


def _is_adapted(rows: Rows) -> bool:
    return any(adapter for adapter, _ in rows)


def _tensor(blob: Blob, like: Tensor) -> Tensor:
    if 0 in blob.shape:  # fewer tokens than one row of pooled keys stands for; an empty tensor has no view
        return torch.empty(blob.shape, dtype=like.dtype, device=like.device)
    raw = np.frombuffer(blob.data, np.uint8)
    return (
        torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(like.dtype).view(blob.shape).to(like.device)
    )


def open_executor(
    checkpoint: Checkpoint, config: SalaConfig, options: Options, adapters: Sequence[Adapter] = ()
) -> TorchExecutor:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, config)
    model = open_model(checkpoint, config, dtype, device, options)
    kernel = cpu_kernel(device, options.kernels)
    if device.type == "cpu" and options.kernels != "off" and kernel is None:
        _log.warning(
            "%s: decoding on this CPU is several times slower without C++ kernels; see: sala doctor", native.describe()
        )
    is_mapped = device.type == "cpu" and not {_NAMES[dtype], "U32"}.isdisjoint(
        info.dtype for info in checkpoint.tensors.values()
    )
    free = free_bytes(device)
    if is_mapped:  # the mapped weights are not resident yet but will be
        free = max(free - checkpoint.nbytes, free // 10)
    head = draft_exit = None
    if options.draft_head is not None and options.speculate == "layers":
        draft_exit = load_draft_exit(options.draft_head, model, dtype, device)
        put_half_linears(draft_exit, options.kernels)
    elif options.draft_head is not None:
        head = load_draft_head(options.draft_head, model, dtype, device, has_half_linears=kernel is not None)
        put_half_linears(head, options.kernels)
    capacity = plan_capacity(config, options, dtype, device, free, None if head is None else head.config)
    if capacity.offload and options.kv_home == "auto":
        _log.warning(
            "the keys and values of %s tokens do not fit into memory: they are kept in a file in %s and read "
            "at the speed of the disk",
            f"{capacity.max_tokens:,}",
            page_directory(options),
        )
    return TorchExecutor(model, capacity, device, dtype, options, adapters, head, draft_exit)


def pick_kv(kind: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype to which keys and values are rounded, or None to keep them as computed."""
    if kind == "auto":
        return None
    is_able = device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))
    if not is_able:
        raise InputError("kv", "is fp8, which needs a GPU of compute capability 8.9 or newer, or a CPU", "leave it out")
    return FP8


def plan_capacity(
    config: SalaConfig,
    options: Options,
    dtype: torch.dtype,
    device: torch.device,
    free: int,
    head: DraftHeadConfig | None = None,
) -> Capacity:
    """Return how many pages and slots fit into `free` bytes, and where keys and values lie."""
    kv_dtype = pick_kv(options.kv, device) or dtype
    name = _NAMES[dtype] if kv_dtype == dtype else f"{_NAMES[dtype]}, keys and values {_NAMES[kv_dtype]}"
    name += "" if options.state == "auto" else f", states {_NAMES[_STATES[options.state]]}"
    chunk, batch = prefill_chunk(device), _MAX_BATCH.get(device.type, 8)
    overhead = _SAMPLING_BYTES * config.vocab_size if device.type == "cuda" else 0
    overheads = (overhead, 0)
    if head is not None:
        overheads = (overhead + head.hidden_size * dtype.itemsize, head.kv_width * dtype.itemsize)
    sizes = (name, dtype.itemsize, chunk, free, kv_dtype.itemsize, batch, overheads)
    if options.kv_home in ("disk", "host"):
        return share_memory(config, options, *sizes, find_offload(options, device))
    if options.kv_hot is not None and options.kv_home == "device":
        raise InputError("kv_hot", "is for keys and values in host memory", "add kv_home host, or leave it out")
    try:
        return share_memory(config, options, *sizes)
    except InputError as error:
        # A budget for the memory says that it is not to be exceeded, not that a disk may be used.
        is_short = error.field == "ctx" and options.kv_home == "auto" and options.cache_memory is None
        if is_short and device.type == "cuda" and config.sparse_layers:  # slower, and only on request
            remedy = "ask for fewer, or keep keys and values in host memory (kv_home host)"
            raise InputError("ctx", error.problem, remedy) from None
        if not is_short or device.type != "cpu" or not config.sparse_layers:
            raise
        return share_memory(config, options, *sizes, find_offload(options, device))


def find_offload(options: Options, device: torch.device) -> Offload:
    """Return where keys and values lie outside the device's memory. Raises InputError where the device cannot read."""
    home = "disk" if options.kv_home == "auto" else options.kv_home
    if home == "disk" and device.type != "cpu":
        raise InputError("kv_home", f"is disk, which {device.type} cannot read", "use host, or --device cpu")
    if home == "host" and device.type != "cuda":
        problem = f"is host, which is for NVIDIA GPUs; the memory of {device.type} is the host's already"
        raise InputError("kv_home", problem, "leave it out; a CPU also has disk")
    if home == "disk" and options.kv_hot is not None:
        raise InputError("kv_hot", "is for keys and values in host memory", "leave it out")
    if home == "host":
        return Offload(IN_HOST_MEMORY, int(psutil.virtual_memory().available), is_streamed=True)
    return Offload(ON_DISK, free_disk_bytes(page_directory(options)) or 0)


def open_home(
    config: SalaConfig, capacity: Capacity, device: torch.device, dtype: torch.dtype, options: Options
) -> PageFile | HostMemory | None:
    """Return what holds the keys and values of all pages, if not the device's memory."""
    if not capacity.offload:
        return None
    kv_dtype = pick_kv(options.kv, device) or dtype
    num_bytes = capacity.num_pages * page_bytes_away(config, dtype, kv_dtype)
    num_tensors = 3 * len(config.sparse_layers)
    if capacity.offload == ON_DISK:
        return PageFile(page_directory(options), num_bytes, num_tensors)
    return HostMemory(device, num_bytes, num_tensors)


def page_bytes_away(config: SalaConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of a page in all layers."""
    keys_values = token_bytes(config, dtype.itemsize, kv_dtype.itemsize) - pooled_bytes(config, dtype.itemsize)
    return config.sparse_config.block_size * keys_values


def prefill_chunk(device: torch.device) -> int:
    """Return the tokens of a prefill step. On a GPU they fill whole waves of tiles of each product."""
    chunk = _PREFILL_CHUNK.get(device.type, 256)
    if device.type != "cuda":
        return chunk
    wave = _TILE * int(torch.cuda.get_device_properties(device).multi_processor_count)
    return wave * max(1, round(chunk / wave))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may still take; of a GPU no more than the process is held to."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, total = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)  # newer than torch 2.6
    return free if share >= 1 else max(0, min(free, int(total * share) - torch.cuda.memory_reserved(device)))
