"""Elementwise operations that MLX fuses into one kernel on a GPU."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx


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
