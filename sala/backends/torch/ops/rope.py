"""Rotary position embeddings over all dimensions, in the half-split layout; angles and products in fp32."""

import math

import torch
from torch import Tensor

from sala.backends.torch.ops.precision import upcast


def rope_angles(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """positions [T] → cos, sin [T, dim] in fp32."""
    return rotations(positions, frequencies(dim, theta, positions.device))


def frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """[dim / 2] in fp32."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def rotations(positions: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """positions [T], rates [dim / 2] → cos, sin [T, dim] in fp32."""
    angles = positions.float()[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def grow_queries(q: Tensor, positions: Tensor, base: float) -> Tensor:
    """Return q [T, H, D] times log(t + base) / log(base): keeps attention without positions sharp at long range."""
    return (upcast(q) * query_growth(positions, base)[:, None, None]).to(q.dtype)


def query_growth(positions: Tensor, base: float) -> Tensor:
    """positions [T] → factors [T] in fp32."""
    return torch.log(positions.float() + base) / math.log(base)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D], cos and sin [T, D] → [T, H, D] in x's dtype."""
    wide = upcast(x)
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * cos[:, None] + rotated * sin[:, None]).to(x.dtype)
