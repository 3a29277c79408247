"""The executor of the MLX backend: owns weights and cache and runs plans.

A step is built first and started when the one before it has ended. While it runs, the host builds the next step in case
every sequence simply continues, for which the sampled tokens need not be known, and then waits for them. Apart from
such a prebuilt step no array stays pending: MLX computes pending arrays only in the thread that created them.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.core as mx
import numpy as np
import psutil

from sala.backends.memory import share_memory
from sala.backends.mlx.batch import Batch, pack, take
from sala.backends.mlx.cache import HybridCache
from sala.backends.mlx.dispatch import select_ops
from sala.backends.mlx.gather import Gather
from sala.backends.mlx.loader import load_model, pick_device, pick_dtype
from sala.backends.mlx.model import SalaModel
from sala.backends.mlx.ops import REFERENCE, Ops
from sala.backends.mlx.ops.lightning import lightning_fold
from sala.backends.mlx.ops.sparse import TILE_BYTES
from sala.backends.mlx.sampler import Samples, sample_all
from sala.backends.rows import CachedTensor, cached_tensors, check_blobs, guess_tokens, keep_agreed, places_of
from sala.backends.sources import HeadWeights
from sala.checkpoint.dtypes import dtypes_by_file_name
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError
from sala.protocol import Blob, Capacity, Options, Plan, Result, Row, SampledToken

_PREFILL_CHUNK = {mx.cpu: 256, mx.gpu: 2048}
_NAMES = {dtype: name for name, dtype in dtypes_by_file_name(mx).items()}
_KEPT_BYTES = 1 << 30  # freed memory that MLX may keep: as much as a prefill chunk takes
_WORDS = {2: mx.uint16, 4: mx.uint32}  # as numpy reads any dtype of that size

P = ParamSpec("P")
T = TypeVar("T")


def on_device(method: Callable[Concatenate["MlxExecutor", P], T]) -> Callable[Concatenate["MlxExecutor", P], T]:
    """Run a method on the executor's device, whatever the default of the thread is."""

    @functools.wraps(method)
    def call(self: "MlxExecutor", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with mx.stream(self.device):
            return method(self, *args, **kwargs)

    return call


class MlxExecutor:
    """Runs plans on one device. Not thread-safe: one engine owns it."""

    def __init__(
        self, model: SalaModel, capacity: Capacity, device: mx.Device, dtype: mx.Dtype, ops: Ops = REFERENCE
    ) -> None:
        self.model = model
        self.capacity = replace(capacity, can_gather=True)
        self.device = device
        self.dtype = dtype
        self.ops = ops
        self._head_weights: HeadWeights = HeadWeights.of(model.config)
        self._limits = set_limits(device)
        self._prebuilt: BuiltStep | None = None
        self._is_closed = False
        with mx.stream(device):
            self.cache = HybridCache(model.config, capacity.num_pages, capacity.num_slots, dtype)
            self._pulse = mx.zeros(1)
            mx.eval(self.cache.empty, list(self.cache.arrays(())), self._pulse)

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Do nothing: graphs are built while steps run."""

    def launch(self, plan: Plan) -> Callable[[], Result]:
        result = self.run(plan)
        return lambda: result

    @on_device
    def run(self, plan: Plan) -> Result:
        step = self.adopt(plan) or self.build(plan, self.prepare(plan), self.cache)
        slots = step.batch.slots
        if step.samples is None:
            self.start(slots)
            return Result(((),) * len(plan.rows))
        gather = step.batch.gather
        self.start(slots, [step.samples.arrays, [] if gather is None else list(gather.arrays)])
        prebuilt = self.build_next(plan, step.samples.tokens)  # while the device is busy
        sampled = keep_agreed(plan, step.samples.read())
        if step.batch.pending:
            step.batch.fold([len(tokens) for tokens in sampled], lightning_fold)
            self.start(slots)
        if prebuilt is not None:
            rows = (replace(row, tokens=(one.token,)) for row, (one,) in zip(prebuilt.rows, sampled, strict=True))
            self._prebuilt = replace(prebuilt, rows=tuple(rows))
        return Result(sampled, () if gather is None else gather.results(plan, self._head_weights))

    def weigh_heads(self, weights: Sequence[Sequence[float]] | None, keeps_heads: bool = False) -> None:
        self._head_weights = HeadWeights.of(self.model.config, weights, keeps_heads)

    def build(self, plan: Plan, batch: Batch, cache: HybridCache) -> "BuiltStep":
        """Build the step of a plan without computing it; the cache becomes what it will be afterwards."""
        hidden = self.model(batch, cache)
        wanted = batch.sampled_rows(plan)
        if not wanted:
            return BuiltStep(plan.rows, batch, cache, None)
        samples = sample_all(self.model.logits(take(hidden, wanted)), places_of(plan))
        return BuiltStep(plan.rows, batch, cache, samples)

    def build_next(self, plan: Plan, tokens: mx.array) -> "BuiltStep | None":
        """Build the next step of sequences that simply continue, from tokens [S] that are not computed yet."""
        if any(row.sampling is None or row.num_drafts or row.mask or row.sampling.has_penalty for row in plan.rows):
            return None
        rows = tuple(replace(row, tokens=(0,), start=row.start + len(row.tokens)) for row in plan.rows)
        if any(row.start >= len(row.pages) * self.capacity.page_size for row in rows):
            return None  # another page is needed first
        batch = pack(Plan(rows), self.ops, tokens, Gather.of(Plan(rows), self.model.config))
        return self.build(Plan(rows), batch, self.cache.fork())

    def adopt(self, plan: Plan) -> "BuiltStep | None":
        """Return the prebuilt step if it belongs to this plan; otherwise drop it, because it refers to the pools."""
        prebuilt, self._prebuilt = self._prebuilt, None
        if prebuilt is None or prebuilt.rows != plan.rows or prebuilt.thread != threading.get_ident():
            return None
        self.cache = prebuilt.cache
        return prebuilt

    def prepare(self, plan: Plan) -> Batch:
        """Return the batch of a plan, for which the cache is grown if necessary."""
        self._prebuilt = None
        batch = pack(plan, self.ops, gather=Gather.of(plan, self.model.config))
        self.cache.reach(page for row in plan.rows for page in row.pages)
        self.cache.join(batch.slots)
        return batch

    def start(self, slots: Sequence[int], wanted: Any = ()) -> None:
        """Let the device compute `wanted` and the new cache.

        Wait until it is idle first: a pool that is still being read would be copied instead of written in place.
        """
        mx.synchronize()
        mx.async_eval(wanted, list(self.cache.arrays(slots)))

    @on_device
    def draft(self, plan: Plan, count: int, num_layers: int | None = None) -> tuple[tuple[int, ...], ...]:
        assert num_layers is not None, "there is no draft head"
        self._prebuilt = None
        self.cache.reach(page for row in plan.rows for page in row.pages)
        cache = self.cache.for_drafts([row.slot for row in plan.rows], num_layers)

        def sample(plan: Plan) -> list[SampledToken]:
            batch = pack(plan, self.ops)
            hidden = take(self.model(batch, cache, num_layers), batch.sampled_rows(plan))
            samples = sample_all(self.model.logits(hidden), [(row, 0) for row in plan.rows])
            self.start((), [samples.arrays, list(cache.arrays(batch.slots))])
            return samples.read()

        return guess_tokens(plan, count, sample)

    @on_device
    def logits(self, row: Row) -> Any:
        batch = self.prepare(Plan((row,)))
        logits = self.model.logits(self.model(batch, self.cache))
        self.start(batch.slots, logits)
        return np.array(logits)

    @on_device
    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._prebuilt = None
        self.cache.copy_states(pairs)

    @on_device
    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        self._prebuilt = None
        self.cache.reach((source, target))
        self.cache.copy_page(source, target, num_rows)
        self.start(())

    @on_device
    def clear_state(self, slot: int) -> None:
        self._prebuilt = None
        self.cache.clear_state(slot)

    def host_memory(self, num_bytes: int) -> memoryview:
        raise InputError("cache_ram", "is set, but on a Mac all memory is the GPU's too", "raise cache_memory instead")

    @on_device
    def dump(
        self, pages: Sequence[int], num_tokens: int, slot: int, memory: memoryview | None = None
    ) -> dict[str, Blob]:
        assert memory is None, "there is no host memory besides the device's"
        table = mx.array(np.asarray(pages, np.int32))
        blobs = {}
        for name, entry in cached_tensors(self.model.config, num_tokens).items():
            if entry.pool == "state":
                array = self.cache.states[entry.layer][slot]
            else:
                pool = self._pool_of(entry)
                array = mx.take(pool, table, axis=1).reshape(pool.shape[0], -1, pool.shape[3])[:, : entry.shape[1]]
            words = np.array(mx.contiguous(array).view(_WORDS[array.itemsize]))
            blobs[name] = Blob(_NAMES[array.dtype], array.shape, words.reshape(-1).view(np.uint8).data)
        return blobs

    @on_device
    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        self._prebuilt = None
        tensors = cached_tensors(self.model.config, num_tokens)
        check_blobs(blobs, tensors, lambda entry: "F32" if entry.pool == "state" else _NAMES[self.dtype])
        self.cache.reach(pages)
        table = mx.array(np.asarray(pages, np.int32))
        for name, entry in tensors.items():
            if entry.pool == "state":
                self.cache.states[entry.layer][slot] = _array(blobs[name], mx.float32)
                continue
            pool = self._pool_of(entry)
            groups, _, per_page, dim = pool.shape
            rest = table.shape[0] * per_page - entry.shape[1]
            whole = mx.pad(_array(blobs[name], pool.dtype), [(0, 0), (0, rest), (0, 0)])
            pool[:, table] = whole.reshape(groups, -1, per_page, dim)
        self.cache.joined.discard(slot)
        self.start((slot,))

    def _pool_of(self, entry: CachedTensor) -> mx.array:
        return getattr(self.cache.pages[entry.layer], entry.pool)

    @on_device
    def probe(self) -> None:
        mx.eval(self._pulse + 1)

    def close(self) -> None:
        """Free weights and cache and restore MLX's limits; the executor cannot run afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        for name, limit in self._limits.items():
            getattr(mx, name)(limit)
        del self.model, self.cache, self._prebuilt, self._pulse
        mx.clear_cache()


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """The step of these rows: its batch, the cache after it, and the tokens to be sampled, if any."""

    rows: tuple[Row, ...]
    batch: Batch
    cache: HybridCache
    samples: Samples | None
    thread: int = field(default_factory=threading.get_ident)  # the only one in which MLX can compute the step


def _array(blob: Blob, dtype: mx.Dtype) -> mx.array:
    words = np.frombuffer(blob.data, np.uint16 if dtype.size == 2 else np.uint32)
    return mx.array(words).view(dtype).reshape(blob.shape)


def open_executor(checkpoint: Checkpoint, config: SalaConfig, options: Options) -> MlxExecutor:
    if options.kv != "auto":
        raise InputError("kv", "is fp8, which MLX does not have", "leave it out, or use --backend torch")
    if options.state != "auto":
        raise InputError("state", "is bf16, which MLX does not have", "leave it out, or use --backend torch")
    if options.kv_home not in ("auto", "device"):
        problem = f"is {options.kv_home}, and on a Mac all memory is the GPU's too"
        raise InputError("kv_home", problem, "leave it out and raise cache_memory, or use --backend torch --device cpu")
    _check_drafting(checkpoint, options)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, config)
    with mx.stream(device):
        model = load_model(checkpoint, config, dtype)
    chunk, tile = _PREFILL_CHUNK[device.type], TILE_BYTES["gpu" if device.type == mx.gpu else "cpu"]
    capacity = share_memory(config, options, _NAMES[dtype], dtype.size, chunk, free_bytes(device), tile_bytes=tile)
    return MlxExecutor(model, capacity, device, dtype, select_ops(options.kernels, options.metal))


def _check_drafting(checkpoint: Checkpoint, options: Options) -> None:
    """Raise InputError for a draft head or an exit that the user chose: it would never be read."""
    if options.speculate == "head":
        remedy = "use --speculate lookup or layers, or --backend torch"
        raise InputError("speculate", "is head, and MLX has no draft heads", remedy)
    chosen = options.draft_head
    if options.speculate in ("layers", "auto") and chosen is not None and chosen.parent != checkpoint.path:
        kind = "exits" if options.speculate == "layers" else "draft heads"
        raise InputError("draft_head", f"is {chosen}, and MLX has no {kind}", "leave it out, or use --backend torch")


def set_limits(device: mx.Device) -> dict[str, int]:
    """Limit the freed memory that MLX keeps and, on a Mac, wire its memory. Return the previous limits.

    Wiring needs macOS 15 and has no effect before it.
    """
    before = {"set_cache_limit": mx.set_cache_limit(_KEPT_BYTES)}
    if device.type == mx.gpu and mx.metal.is_available():
        before["set_wired_limit"] = mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    return before


def free_bytes(device: mx.Device) -> int:
    """Return the bytes left for the cache: of free system memory, and of what a GPU may use of it."""
    free = int(psutil.virtual_memory().available)
    if device.type != mx.gpu:
        return free
    limit = mx.device_info().get("max_recommended_working_set_size", free)
    return min(free, int(limit) - mx.get_active_memory())
