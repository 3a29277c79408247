"""Lightning attention in Metal: one token of many sequences, and packed sequences of any lengths from any states."""

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from sala.backends.mlx.kernels import metal
from sala.backends.mlx.kernels.metal import Launch, Run

LANES = 32
THREADS = 256
MAX_DIM = 128  # a prefill thread keeps an eighth of the rows of a state in registers


def can_run(q: mx.array, _groups: int) -> bool:
    """Return whether the kernels take heads of this width."""
    return q.shape[-1] <= MAX_DIM


def lightning_step(
    q: mx.array, k: mx.array, v: mx.array, state: mx.array, slopes: mx.array, scale: float, run: Run = metal.run
) -> tuple[mx.array, mx.array]:
    """One token per sequence: q, k, v [S, H, D], state [S, H, D, D] fp32 → output [S, H, D] fp32, next state."""
    (num, heads, dim), wide = q.shape, mx.float32
    inputs = {"q": q, "k": k, "v": v, "state": state, "slopes": slopes, "scale": _real(scale)}
    output, after = run(
        Launch(
            kernel="lightning_step",
            inputs=inputs,
            template={"T": q.dtype, "D": dim},
            outputs={"out": (q.shape, wide), "state_out": ((num, heads, dim, dim), wide)},
            grid=(-(-dim // LANES) * THREADS, heads, num),
            threadgroup=(THREADS, 1, 1),
        )
    )
    return output, after


def lightning_ragged(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    states: mx.array,
    lengths: Sequence[int],
    slopes: mx.array,
    scale: float,
    run: Run = metal.run,
) -> tuple[mx.array, mx.array]:
    """Packed sequences of any lengths: q, k, v [T, H, D], states [S, H, D, D] → output [T, H, D] fp32, next states."""
    (_, heads, dim), num, wide = q.shape, len(lengths), mx.float32
    edges = mx.array([0, *accumulate(lengths)], dtype=mx.int32)
    inputs = {"q": q, "k": k, "v": v, "state": states, "edges": edges}
    output, after = run(
        Launch(
            kernel="lightning_prefill",
            inputs={**inputs, "slopes": slopes, "scale": _real(scale)},
            template={"T": q.dtype, "D": dim},
            outputs={"out": (q.shape, wide), "state_out": ((num, heads, dim, dim), wide)},
            grid=(-(-dim // LANES) * THREADS, heads, num),
            threadgroup=(THREADS, 1, 1),
        )
    )
    return output, after


def _real(value: float) -> mx.array:
    return mx.array(value, dtype=mx.float32)
