"""The executor of the MLX backend: owns weights and cache and runs plans.

A step is built first and started when the one before it has ended. While it runs, the host builds the next step in case
every sequence simply continues, for which the sampled tokens need not be known, and then waits for them. Apart from
such a prebuilt step no array stays pending: MLX computes pending arrays only in the thread that created them.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.core as mx
import numpy as np
import psutil

from sala.backends.capacity import share_memory
from sala.backends.mlx.batch import Batch, pack, take
from sala.backends.mlx.cache import HybridCache
from sala.backends.mlx.dispatch import select_ops
from sala.backends.mlx.loader import load_model, pick_device, pick_dtype
from sala.backends.mlx.model import SalaModel
from sala.backends.mlx.ops.table import REFERENCE, Ops
from sala.backends.mlx.sampler import Samples, sample_all
from sala.backends.rows import keep_agreed
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
        self,
        model: SalaModel,
        capacity: Capacity,
        device: mx.Device,
        dtype: mx.Dtype,
        ops: Ops = REFERENCE,
    ) -> None:
        self.model = model
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        self.ops = ops
        self._limits = set_limits(device)
        self._prebuilt: Prebuilt | None = None
        self._is_closed = False
        with mx.stream(device):
            self.cache = HybridCache(model.config, capacity.num_pages, capacity.num_slots, dtype)
            self._pulse = mx.zeros(1)
            mx.eval(self.cache.empty, list(self.cache.arrays(())), self._pulse)

    @on_device
    def run(self, plan: Plan) -> Result:
        step = self.adopt(plan) or self.build(plan, self.prepare(plan), self.cache)
        slots = step.batch.slots
        if step.samples is None:
            self.start(slots)
            return Result(((),) * len(plan.rows))
        self.start(slots, step.samples.arrays)
        prebuilt = self.build_next(plan, step.samples.tokens)  # while the device is busy
        found = keep_agreed(step.samples.read(), [row for row in plan.rows if row.sampling is not None])
        sampled = _by_row(plan, found)
        if step.batch.pending:
            self.cache.fold(step.batch, [len(tokens) for tokens in sampled])
            self.start(slots)
        if prebuilt is not None:
            rows = (replace(row, tokens=(one.token,)) for row, (one,) in zip(prebuilt.rows, sampled, strict=True))
            self._prebuilt = replace(prebuilt, rows=tuple(rows))
        return Result(sampled)

    def build(self, plan: Plan, batch: Batch, cache: HybridCache) -> "BuiltStep":
        """Build the step of a plan without computing it; the cache becomes what it will be afterwards."""
        hidden = self.model(batch, cache)
        sampling = [index for index, row in enumerate(plan.rows) if row.sampling is not None]
        if not sampling:
            return BuiltStep(batch, None)
        places = [(plan.rows[index], number) for index in sampling for number in range(plan.rows[index].num_drafts + 1)]
        return BuiltStep(batch, sample_all(self.model.logits(take(hidden, batch.sampled_rows(sampling))), places))

    def build_next(self, plan: Plan, tokens: mx.array) -> "Prebuilt | None":
        """Build the next step of sequences that simply continue, from tokens [S] that are not computed yet."""
        if any(row.sampling is None or row.num_drafts or row.mask or row.sampling.has_penalty for row in plan.rows):
            return None
        rows = tuple(replace(row, tokens=(0,), start=row.start + len(row.tokens)) for row in plan.rows)
        if any(row.start >= len(row.pages) * self.capacity.page_size for row in rows):
            return None  # another page is needed first
        batch, cache = pack(Plan(rows), self.ops, tokens), self.cache.fork()
        return Prebuilt(rows, cache, self.build(Plan(rows), batch, cache), threading.get_ident())

    def adopt(self, plan: Plan) -> "BuiltStep | None":
        """Return the prebuilt step if it belongs to this plan; otherwise drop it, because it refers to the pools."""
        prebuilt, self._prebuilt = self._prebuilt, None
        if prebuilt is None or prebuilt.rows != plan.rows or prebuilt.thread != threading.get_ident():
            return None
        self.cache = prebuilt.cache
        return prebuilt.step

    def prepare(self, plan: Plan) -> Batch:
        """Return the batch of a plan, for which the cache is grown if necessary."""
        self._prebuilt = None
        batch = pack(plan, self.ops)
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
    def draft(self, plan: Plan, num_layers: int, count: int) -> tuple[tuple[int, ...], ...]:
        self._prebuilt = None
        rows = [replace(row, slot=index) for index, row in enumerate(plan.rows)]
        self.cache.reach(page for row in plan.rows for page in row.pages)
        cache = self.cache.for_drafts([row.slot for row in plan.rows], num_layers)
        guesses: list[list[int]] = [[] for _ in rows]
        for _ in range(count):
            batch = pack(Plan(tuple(rows)), self.ops)
            hidden = self.model(batch, cache, num_layers)
            logits = self.model.logits(take(hidden, batch.sampled_rows(list(range(len(rows))))))
            samples = sample_all(logits, [(row, 0) for row in rows])
            self.start((), [samples.arrays, list(cache.arrays(range(len(rows))))])
            for index, (row, sampled) in enumerate(zip(rows, samples.read(), strict=True)):
                token = sampled.token
                guesses[index].append(token)
                history = (*row.history, token) if row.history else ()
                rows[index] = replace(row, tokens=(token,), start=row.start + len(row.tokens), history=history)
        return tuple(tuple(tokens) for tokens in guesses)

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

    @on_device
    def dump(self, pages: Sequence[int], num_tokens: int, slot: int) -> dict[str, Blob]:
        table = mx.array(np.asarray(pages, np.int32))
        blobs = {}
        for name, (layer, kind, rows) in self.cache.tensors(num_tokens).items():
            if kind == "state":
                array = self.cache.states[layer][slot]
            else:
                pool: mx.array = getattr(self.cache.pages[layer], kind)
                array = mx.take(pool, table, axis=1).reshape(pool.shape[0], -1, pool.shape[3])[:, :rows]
            words = np.array(mx.contiguous(array).view(_WORDS[array.itemsize]))
            blobs[name] = Blob(_NAMES[array.dtype], array.shape, words.reshape(-1).view(np.uint8).data)
        return blobs

    @on_device
    def restore(self, blobs: Mapping[str, Blob], pages: Sequence[int], num_tokens: int, slot: int) -> None:
        self._prebuilt = None
        targets = self.cache.tensors(num_tokens)
        if set(targets) != set(blobs):
            raise ValueError("other layers")
        for name, (layer, kind, rows) in targets.items():
            if (blobs[name].dtype, blobs[name].shape) != self._form(layer, kind, rows):
                raise ValueError(f"{name} is {blobs[name].dtype} {blobs[name].shape}")
        self.cache.reach(pages)
        table = mx.array(np.asarray(pages, np.int32))
        for name, (layer, kind, _) in targets.items():
            if kind == "state":
                self.cache.states[layer][slot] = _array(blobs[name], mx.float32)
            else:
                self._restore_pages(layer, kind, blobs[name], table)
        self.cache.joined.discard(slot)
        self.start((slot,))

    def _form(self, layer: int, kind: str, rows: int) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and shape that a blob must have."""
        if kind == "state":
            return "F32", self.cache.empty.shape
        pool: mx.array = getattr(self.cache.pages[layer], kind)
        return _NAMES[pool.dtype], (pool.shape[0], rows, pool.shape[3])

    def _restore_pages(self, layer: int, kind: str, blob: Blob, table: mx.array) -> None:
        pool: mx.array = getattr(self.cache.pages[layer], kind)
        groups, _, per_page, dim = pool.shape
        rest = table.shape[0] * per_page - blob.shape[1]
        whole = mx.pad(_array(blob, pool.dtype), [(0, 0), (0, rest), (0, 0)])
        pool[:, table] = whole.reshape(groups, -1, per_page, dim)

    @on_device
    def probe(self) -> None:
        mx.eval(self._pulse + 1)

    def close(self) -> None:
        """Free weights and cache and restore MLX's limits; the executor cannot run afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        restore_limits(self._limits)
        del self.model, self.cache, self._prebuilt, self._pulse
        mx.clear_cache()


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """The step of a plan: its batch, and the tokens to be sampled, if any."""

    batch: Batch
    samples: Samples | None


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """A step that is built before it is requested: the rows that it is for, and the cache after it."""

    rows: tuple[Row, ...]
    cache: HybridCache
    step: BuiltStep
    thread: int  # the only thread in which MLX can compute it


def _by_row(plan: Plan, found: Sequence[tuple[SampledToken, ...]]) -> tuple[tuple[SampledToken, ...], ...]:
    """Return the tokens that each row of the plan sampled; none where none were requested."""
    sampled = iter(found)
    return tuple(() if row.sampling is None else next(sampled) for row in plan.rows)


def _array(blob: Blob, dtype: mx.Dtype) -> mx.array:
    words = np.frombuffer(blob.data, np.uint16 if dtype.size == 2 else np.uint32)
    return mx.array(words).view(dtype).reshape(blob.shape)


def open_executor(checkpoint: Checkpoint, config: SalaConfig, options: Options) -> MlxExecutor:
    if options.kv != "auto":
        raise InputError("kv", "is fp8, which MLX does not have", "leave it out, or use --backend torch")
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, config)
    with mx.stream(device):
        model = load_model(checkpoint, config, dtype)
    chunk = _PREFILL_CHUNK[device.type]
    capacity = share_memory(config, options, _NAMES[dtype], dtype.size, chunk, free_bytes(device))
    return MlxExecutor(model, capacity, device, dtype, select_ops(options.kernels, options.metal))


def set_limits(device: mx.Device) -> dict[str, int]:
    """Limit the freed memory that MLX keeps and, on a Mac, wire its memory. Return the previous limits.

    Wiring needs macOS 15 and has no effect before it.
    """
    before = {"set_cache_limit": mx.set_cache_limit(_KEPT_BYTES)}
    if device.type == mx.gpu and mx.metal.is_available():
        before["set_wired_limit"] = mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    return before


def restore_limits(before: Mapping[str, int]) -> None:
    for name, limit in before.items():
        getattr(mx, name)(limit)


def free_bytes(device: mx.Device) -> int:
    """Return the bytes left for the cache: of free system memory, and of what a GPU may use of it."""
    free = int(psutil.virtual_memory().available)
    if device.type != mx.gpu:
        return free
    limit = mx.device_info().get("max_recommended_working_set_size", free)
    return min(free, int(limit) - mx.get_active_memory())
