"""Matrices as the GPU path holds them: projections that read the same rows are one matrix, and products with them.

Quantized matrices stay packed (`kernels/packed.py`). Decode rows are multiplied with the codes themselves, prefill rows
with a copy that is expanded for the product and dropped. With `prefill="fp8"` every layer but the last also holds FP8
copies of its matrices, with which prefill rows are multiplied.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.torch.kernels import fp8, fused, linear, packed
from sala.backends.torch.kernels.linear import Weight, can_take, product
from sala.backends.torch.kernels.packed_weight import PackedWeight, adjoin, are_alike, concatenate
from sala.backends.torch.linears import AffineLinear


class Projection:
    """Linears that read the same rows, joined: x [T, K] → [T, N], all outputs side by side."""

    def __init__(self, parts: Sequence[Weight], bias: Tensor | None) -> None:
        self.parts, self.bias = list(parts), bias

    @classmethod
    def of(cls, linears: Sequence[Any], dtype: torch.dtype, device: torch.device) -> "Projection":
        """Join the matrices of the linears, which then hold views of them.

        Packed matrices of one format are one in memory, even with others between them: see `linear.linears`.
        """
        fuse_packed([one for one in linears if isinstance(one, AffineLinear)], dtype, device)
        parts: list[Weight] = []
        for run in _runs(linears, dtype, device):
            part = adjoin([one.gpu for one in run]) if isinstance(run[0], AffineLinear) else fuse(run)
            assert part is not None
            parts.append(part)
        if all(one.bias is None for one in linears):
            return cls(parts, None)
        pieces = [torch.zeros(one.out_features) if one.bias is None else one.bias.detach() for one in linears]
        return cls(parts, torch.cat([piece.to(device, dtype) for piece in pieces]))

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return product(x, self.parts[0], self.bias)
        packed_parts = [part for part in self.parts if isinstance(part, PackedWeight) and can_take(len(x), part)]
        if len(packed_parts) == len(self.parts):
            out = linear.linears(x, packed_parts)
        else:
            out = torch.cat([product(x, part) for part in self.parts], 1)
        return out if self.bias is None else out + self.bias

    @property
    def sizes(self) -> list[int]:
        """The number of outputs of each part."""
        return [part.num_out if isinstance(part, PackedWeight) else part.shape[0] for part in self.parts]

    def rows(self, begin: int, end: int) -> "Projection":
        """Return the projection to some of the outputs."""
        parts, first = [], 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            low, high = max(begin - first, 0), min(end - first, size)
            if low < high:
                parts.append(part.rows(low, high) if isinstance(part, PackedWeight) else part[low:high])
            first += size
        return Projection(parts, None if self.bias is None else self.bias[begin:end])

    def silu_mul(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up [T, N / 2]; the gate is the first half of the outputs."""
        if len(self.parts) == 1 and self.bias is None and can_take(x.shape[0], self.parts[0]):
            return linear.linear_silu_mul(x, self.parts[0])
        return fused.silu_mul(self(x))


def residual_product(x: Tensor, weight: Weight) -> Tensor:
    """`product` for the residual stream: of decode rows as partial sums [S, T, N], which `norm_rows` adds up."""
    if not can_take(x.shape[0], weight):
        return product(x, weight)
    return linear.split_linear(x, weight)


def weight_of(module: Any, dtype: torch.dtype, device: torch.device) -> Weight:
    """Return the matrix of a linear in the form that the kernels read."""
    if isinstance(module, AffineLinear):
        return module.gpu_weight(dtype, device)
    return module.weight.detach()


def fuse(linears: Sequence[nn.Linear]) -> Tensor:
    """Return one matrix of all rows, of which the linears then hold views."""
    weight = torch.cat([one.weight.detach() for one in linears])
    for one, part in zip(linears, weight.split([one.out_features for one in linears]), strict=True):
        one.weight = nn.Parameter(part, requires_grad=False)
    return weight


def fuse_packed(linears: Sequence[AffineLinear], dtype: torch.dtype, device: torch.device) -> None:
    """`fuse` of packed matrices, to one for each format; the linears hold views of them."""
    formats = [one.gpu_weight(dtype, device).format for one in linears]
    for kind in dict.fromkeys(formats):
        alike = [one for one, own in zip(linears, formats, strict=True) if own == kind]
        weight, first = concatenate([one.gpu_weight(dtype, device) for one in alike]), 0
        for one in alike:
            one.put_gpu(weight.rows(first, first + one.out_features))
            first += one.out_features


def _runs(linears: Sequence[Any], dtype: torch.dtype, device: torch.device) -> list[list[Any]]:
    """Return runs of neighbours that can be one matrix."""
    runs = [[linears[0]]]
    for before, one in pairwise(linears):
        weights = [weight_of(each, dtype, device) for each in (before, one)]
        if all(isinstance(weight, Tensor) for weight in weights) or are_alike(weights):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def to_fp8(parts: Sequence[Weight]) -> fp8.Rows:
    """Return one FP8 matrix of all rows of the parts."""
    found = [fp8.from_weight(packed.expand(part) if isinstance(part, PackedWeight) else part) for part in parts]
    if len(found) == 1:
        return found[0]
    codes = torch.cat([one.codes.view(torch.uint8) for one in found]).view(torch.float8_e4m3fn)
    return fp8.Rows(codes, torch.cat([one.scales for one in found]))
