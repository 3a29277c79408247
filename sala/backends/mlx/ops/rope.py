"""Rotary position embeddings over all dimensions, in the half-split layout; angles and products in fp32."""

import math

import mlx.core as mx
import numpy as np

from sala.backends.mlx.ops.fused import rotate


def rope_angles(positions: mx.array, dim: int, theta: float) -> tuple[mx.array, mx.array]:
    """positions [T] → cos, sin [T, dim / 2] in fp32.

    Powers are computed on the host and rounded once: an error of one unit in the last place is visible at long context.
    """
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = (theta ** exponent.astype(np.float64)).astype(np.float32)
    angles = positions.astype(mx.float32)[:, None] * mx.array(np.float32(1) / powers)
    return mx.cos(angles), mx.sin(angles)


def grow_queries(q: mx.array, positions: mx.array, base: float) -> mx.array:
    """Return q [T, H, D] times log(t + base) / log(base): keeps attention without positions sharp at long range."""
    return (q.astype(mx.float32) * query_growth(positions, base)[:, None, None]).astype(q.dtype)


def query_growth(positions: mx.array, base: float) -> mx.array:
    """positions [T] → factors [T] in fp32."""
    return mx.log(positions.astype(mx.float32) + base) / math.log(base)


def apply_rope(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """x [T, H, D], cos and sin [T, D / 2] → [T, H, D] in x's dtype.

    MLX's own op uses fast trigonometry, which is inaccurate at the positions of long contexts.
    """
    first, second = mx.split(x, 2, axis=-1)
    return mx.concatenate(rotate(first, second, cos[:, None], sin[:, None]), axis=-1)
