"""Every Metal kernel against its op, on the GPU where it will run: is it correct, and is it faster?

Verdicts are kept in the user's cache, by GPU, version of MLX and source of the kernel. A check never raises: a kernel
that cannot be compiled or started is not used, with the reason.
"""

import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import platformdirs

from sala.backends.mlx.kernels import KERNELS, metal
from sala.backends.mlx.kernels.metal import Run
from sala.backends.mlx.ops import lightning, sparse
from sala.checkpoint.writer import write_atomically
from sala.config import SparseConfig
from sala.errors import SalaError, describe_error

# Relative to the largest number of the op, computed in fp32 from the same inputs: they allow for another order of sums
# and for one rounding where the result has the precision of the model.
TOLERANCES = {mx.float32: 2e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
OPS: dict[str, Callable[..., Any]] = {
    "lightning_step": lightning.lightning_step,
    "lightning_ragged": lightning.lightning_ragged,
    "score_blocks": sparse.score_blocks,
    "sparse_attention": sparse.sparse_attention,
}
SMALL = SparseConfig(window_size=128, topk=4, dense_len=0)  # the released geometry, with fewer blocks
FAR = 32768  # tokens
FILE = "metal_verdicts.json"
_TIMES = 7


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """The result of a check; times in milliseconds of one call, None where the kernel was not correct."""

    name: str
    error: float
    tolerance: float
    kernel_ms: dict[str, float] | None = None  # by the number of queries: decode, prefill
    op_ms: dict[str, float] | None = None
    message: str = ""

    @property
    def is_equal(self) -> bool:
        return self.error <= self.tolerance  # false for NaN

    def is_faster(self, size: str) -> bool:
        """Return whether the kernel was faster for this number of queries, or for the one that was timed."""
        times, other = self.kernel_ms or {}, self.op_ms or {}
        timed = size if size in times else next(iter(times), None)
        return timed is not None and times[timed] < other[timed]

    def describe(self) -> str:
        """Return the verdict in one line of words."""
        if self.message:
            return f"not used: {self.message}"
        if not self.is_equal:
            return f"not used: differs from the op by {self.error:.1e}, more than {self.tolerance:.0e}"
        parts = [f"equal ({self.error:.1e})"]
        for size, took in (self.kernel_ms or {}).items():
            use = "used" if self.is_faster(size) else "not used"
            parts.append(f"{size} queries: {use}, {took:.2f} ms against {(self.op_ms or {})[size]:.2f}")
        return "; ".join(parts)


# Template instances of a kernel: precision, width of heads, heads per kv head.
KINDS = ((mx.float32, 64, 3), (mx.float32, 128, 5), (mx.float16, 64, 1), (mx.bfloat16, 128, 16))
Arguments = tuple[Any, ...]  # of an op, in the precision of the kernel; the queries come first


def why_not() -> str | None:
    """Return why no Metal kernel can run here, in words, or None if they can."""
    if not mx.metal.is_available() or mx.default_device() != mx.gpu:
        return "there is no Metal GPU"
    return None


def verdict(name: str) -> KernelVerdict:
    """Return the verdict on this kernel on this GPU: from the cache, or by a check now."""
    known = _read()
    key = _key(name)
    if key not in known:
        known[key] = asdict(check(name))
        _write(known)
    return KernelVerdict(**known[key])


def verdicts() -> Iterator[KernelVerdict]:
    """Yield the verdict on every kernel; none where there is no GPU for them."""
    if why_not() is None:
        for name in KERNELS:
            yield verdict(name)


def check(name: str, run: Run = metal.run) -> KernelVerdict:
    """Compare on small, odd shapes, then time on usual ones."""
    error, tolerance = 0.0, TOLERANCES[mx.float32]
    try:
        for arguments in small_cases(name):
            bound = tolerance_of(name, arguments[0].dtype)
            found = difference(name, arguments, run)
            if not found / bound <= error / tolerance:  # remember the case nearest to its bound, or NaN
                error, tolerance = found, bound
            if not found <= bound:
                return KernelVerdict(name, error if math.isfinite(error) else math.inf, tolerance)
        kernel = functools.partial(KERNELS[name].kernel, run=run)
        usual = _USUAL[name](np.random.default_rng(0))
        kernel_ms = {size: _time(kernel, arguments) for size, arguments in usual.items()}
        op_ms = {size: _time(OPS[name], arguments) for size, arguments in usual.items()}
    except Exception as problem:
        return KernelVerdict(name, math.inf, tolerance, message=describe_error(problem))
    return KernelVerdict(name, error, tolerance, kernel_ms, op_ms)


def tolerance_of(name: str, dtype: mx.Dtype) -> float:
    """Return the tolerance: only attention returns the precision of the model, the others return fp32."""
    return TOLERANCES[dtype if name == "sparse_attention" else mx.float32]


def difference(name: str, arguments: Arguments, run: Run = metal.run) -> float:
    """Return the error of the kernel relative to the op's largest number.

    The op is computed on the CPU: a GPU may multiply fp32 matrices in lower precision.
    """
    found = _list(KERNELS[name].kernel(*arguments, run=run))
    is_half = [isinstance(x, mx.array) and x.dtype in (mx.float16, mx.bfloat16) for x in arguments]
    with mx.stream(mx.cpu):
        wide = [x.astype(mx.float32) if half else x for x, half in zip(arguments, is_half, strict=True)]
        wanted = _list(OPS[name](*wide))
        worst = [
            mx.abs(one.astype(mx.float32) - other).max() / mx.maximum(mx.abs(other).max(), 1e-30)
            for one, other in zip(found, wanted, strict=True)
        ]
    return float(np.array(worst).max())


def _time(call: Callable[..., Any], arguments: Arguments) -> float:
    """Return the median milliseconds of a call, after a warm-up."""
    took = []
    for _ in range(1 + _TIMES):
        begin = time.perf_counter()
        mx.eval(call(*arguments))
        took.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(took[1:])


def _list(arrays: Any) -> list[mx.array]:
    return list(arrays) if isinstance(arrays, tuple) else [arrays]


def small_cases(name: str) -> Iterator[Arguments]:
    """Yield cases with odd numbers of heads, lengths around a chunk, both usual widths of heads, every precision."""
    for dtype, dim, per_group in KINDS:
        yield from _SMALL[name](np.random.default_rng(dim), dtype, dim, per_group)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)


def ragged_arguments(rng: np.random.Generator, dtype: mx.Dtype, lengths: list[int], heads: int, dim: int) -> Arguments:
    q, k, v = (_normal(rng, (sum(lengths), heads, dim), dtype) for _ in range(3))
    state = _normal(rng, (len(lengths), heads, dim, dim), mx.float32)
    return q, k, v, state, lengths, lightning.decay_slopes(heads), dim**-0.5


def step_arguments(rng: np.random.Generator, dtype: mx.Dtype, num: int, heads: int, dim: int) -> Arguments:
    q, k, v, state, _, *rest = ragged_arguments(rng, dtype, [1] * num, heads, dim)
    return q, k, v, state, *rest


@dataclass(frozen=True, slots=True)
class Scene:
    """One sequence of `start + num` tokens, its last `num` are queries, in scattered pages."""

    num: int
    start: int
    groups: int
    per_group: int
    dim: int
    dtype: mx.Dtype
    sparse: SparseConfig = SMALL

    @property
    def end(self) -> int:
        return self.start + self.num

    @property
    def num_blocks(self) -> int:
        return -(-self.end // self.sparse.block_size)

    def scores(self, rng: np.random.Generator) -> Arguments:
        keys = _normal(rng, (self.groups, self.end, self.dim), self.dtype)
        kernel, stride = self.sparse.kernel_size, self.sparse.kernel_stride
        k1, k2 = (sparse.pool_keys(keys, kernel * by, stride * by) for by in (1, 4))
        q = 3 * _normal(rng, (self.num, self.groups * self.per_group, self.dim), self.dtype)
        return q, k1, k2, mx.arange(self.start, self.end), self.num_blocks, self.sparse, self.dim**-0.5

    def attention(self, rng: np.random.Generator) -> Arguments:
        """Random blocks instead of the best: the kernel takes any."""
        num_pages = self.num_blocks + 3
        table = mx.array(rng.permutation(num_pages)[: self.num_blocks].astype(np.int32))
        shape = (self.groups, num_pages, self.sparse.block_size, self.dim)
        pages = (_normal(rng, shape, self.dtype) for _ in range(2))
        positions = mx.arange(self.start, self.end)
        scores = mx.array(rng.random((self.num, self.groups, self.num_blocks), np.float32))
        selected = sparse.top_blocks(scores, positions, self.sparse)
        q = _normal(rng, (self.num, self.groups * self.per_group, self.dim), self.dtype)
        return q, *pages, table, selected, positions, self.dim**-0.5


def scenes(dtype: mx.Dtype, dim: int, per_group: int) -> list[Scene]:
    """Return scenes from the first token, with a single block, to more blocks than are selected."""
    sizes = ((1, 0, 1), (63, 0, 2), (1, 1087, 2), (5, 700, 3), (1, 5000, 1))
    return [Scene(*size, per_group, dim, dtype) for size in sizes]


def released(num: int) -> Scene:
    """Return queries of the released model at a long context."""
    return Scene(num, FAR, groups=2, per_group=16, dim=128, dtype=mx.bfloat16, sparse=SparseConfig())


_SMALL: Mapping[str, Callable[[np.random.Generator, mx.Dtype, int, int], list[Arguments]]] = {
    "lightning_step": lambda rng, dtype, dim, _: [
        step_arguments(rng, dtype, num, heads, dim) for num, heads in ((1, 1), (3, 5), (9, 2))
    ],
    "lightning_ragged": lambda rng, dtype, dim, _: [
        ragged_arguments(rng, dtype, lengths, heads, dim)
        for lengths, heads in (([1], 3), ([63, 1, 65], 2), ([64], 5), ([129, 7], 1))
    ],
    "score_blocks": lambda rng, *kind: [scene.scores(rng) for scene in scenes(*kind)],
    "sparse_attention": lambda rng, *kind: [scene.attention(rng) for scene in scenes(*kind)],
}
# Cases by the number of queries, in bf16 at the shapes of the released model.
_USUAL: Mapping[str, Callable[[np.random.Generator], dict[str, Arguments]]] = {
    "lightning_step": lambda rng: {"decode": step_arguments(rng, mx.bfloat16, 1, 32, 128)},
    "lightning_ragged": lambda rng: {"prefill": ragged_arguments(rng, mx.bfloat16, [1024], 32, 128)},
    "score_blocks": lambda rng: {"decode": released(1).scores(rng), "prefill": released(128).scores(rng)},
    "sparse_attention": lambda rng: {"decode": released(1).attention(rng), "prefill": released(128).attention(rng)},
}


def device_name() -> str:
    return str(mx.device_info().get("device_name", "unknown"))


def _key(name: str) -> str:
    return f"{name} {metal.fingerprint(KERNELS[name].sources)} mlx {version('mlx')} {device_name()}"


def _file() -> Path:
    return Path(platformdirs.user_cache_dir("sala")) / "kernels" / FILE


def _read() -> dict[str, Any]:
    """Return the known verdicts; an unreadable file counts as empty."""
    try:
        known = json.loads(_file().read_text(encoding="utf-8"))
        return {str(key): asdict(KernelVerdict(**value)) for key, value in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(known: dict[str, Any]) -> None:
    """Write atomically; a machine that cannot write checks again next time."""
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(known, indent=1))
    except (OSError, SalaError):
        pass
