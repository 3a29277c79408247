"""What SALA shares with dense transformers: rotary positions, gates and causal attention over grouped heads.

Elementwise operations are fused by MLX into one kernel on a GPU.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx
import numpy as np


def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the function on a GPU only: on the CPU, MLX would need a C++ compiler."""
    compiled = mx.compile(function, shapeless=True)

    @wraps(function)
    def call(*arguments: mx.array | float) -> Any:
        return (compiled if mx.default_device() == mx.gpu else function)(*arguments)

    return call


@fuse
def silu_gate(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x"""
    return gate * mx.sigmoid(gate) * x


@fuse
def sigmoid_gate(gate: mx.array, x: mx.array) -> mx.array:
    """sigmoid(gate) * x"""
    return x * mx.sigmoid(gate)


@fuse
def add_scaled(x: mx.array, change: mx.array, scale: float) -> mx.array:
    """x + scale * change"""
    return x + change * scale


@fuse
def rotate(first: mx.array, second: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
    """Rotate points of the plane by an angle, in fp32; return both coordinates in their own precision."""
    x, y = first.astype(mx.float32), second.astype(mx.float32)
    return (x * cos - y * sin).astype(first.dtype), (y * cos + x * sin).astype(first.dtype)


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
    growth = mx.log(positions.astype(mx.float32) + base) / math.log(base)  # [T]
    return (q.astype(mx.float32) * growth[:, None, None]).astype(q.dtype)


def apply_rope(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """x [T, H, D], cos and sin [T, D / 2] → [T, H, D] in x's dtype.

    MLX's own op uses fast trigonometry, which is inaccurate at the positions of long contexts.
    """
    first, second = mx.split(x, 2, axis=-1)
    return mx.concatenate(rotate(first, second, cos[:, None], sin[:, None]), axis=-1)


def dense_attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Attend with queries at the last n positions: q [n, H, D], k and v [G, start + n, D] → [n, H, D]."""
    mask = "causal" if q.shape[0] > 1 else None  # the last query sees all keys
    output = mx.fast.scaled_dot_product_attention(q.swapaxes(0, 1)[None], k[None], v[None], scale=scale, mask=mask)
    return output[0].swapaxes(0, 1)
