"""Rounding to nearest, and the range of a group: MLX's rule, or a narrower range where clipping reduces the error."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sala.backends.torch.ops import affine
from sala.backends.torch.ops.affine import to_codes
from sala.checkpoint.arrays import encode
from sala.checkpoint.dtypes import FLOAT_DTYPES, dtypes_by_file_name
from sala.checkpoint.packing import PACKED_PARTS, Packed, dequantize, pack, quantize
from sala.quantization_config import Groups

TORCH_DTYPES = {name: dtypes_by_file_name(torch)[name] for name in FLOAT_DTYPES}
SHRINK = tuple(1 - step / 20 for step in range(8))  # shares of the range that are tried
NUM_FITS = 2  # least-squares fits after the search
_PIECE = 1 << 24  # weights at a time; rows are independent


def fit_range(low: Tensor, high: Tensor, bits: int, dtype: str = "F32") -> tuple[Tensor, Tensor]:
    """Return scale and bias of a group by MLX's rule from the ends of its weights, rounded to `dtype`."""
    return _rounded(*affine.fit_range(low, high, bits), dtype)


def search_range(weight: Tensor, importance: Tensor, bits: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Return scale and bias [...] with the least weighted squared error of weight [..., n].

    `importance` is [n] or shaped like the weights. Outliers stretch a group's range and coarsen all other weights, so
    clipping can be better. Shares of the range are tried, each by MLX's rule and from end to end; then the best is
    fitted to its codes by least squares.
    """
    low, high = weight.amin(-1), weight.amax(-1)
    best = fit_range(low, high, bits, dtype)
    least = _error(weight, importance, best, bits)
    for share in SHRINK:
        for found in (
            fit_range(low * share, high * share, bits, dtype),
            _rounded((high - low) * share / ((1 << bits) - 1), low * share, dtype),
        ):
            best, least = _better(weight, importance, bits, best, least, found)
    for _ in range(NUM_FITS):
        found = _refit(weight, importance, best, bits, dtype)
        best, least = _better(weight, importance, bits, best, least, found)
    return best


Range = tuple[Tensor, Tensor]  # scale and bias


def _better(
    weight: Tensor, importance: Tensor, bits: int, best: Range, least: Tensor, found: Range
) -> tuple[Range, Tensor]:
    error = _error(weight, importance, found, bits)
    is_better = error < least
    scale, bias = (torch.where(is_better, new, old) for new, old in zip(found, best, strict=True))
    return (scale, bias), torch.where(is_better, error, least)


def _error(weight: Tensor, importance: Tensor, found: Range, bits: int) -> Tensor:
    scale, bias = (part[..., None] for part in found)
    codes = to_codes(weight, scale, bias, bits)
    return codes.mul_(scale).add_(bias).sub_(weight).square_().mul_(importance).sum(-1)


def _refit(weight: Tensor, importance: Tensor, found: Range, bits: int, dtype: str) -> Range:
    """Return the line that fits the weights best at their current codes."""
    scale, bias = (part[..., None] for part in found)
    codes = to_codes(weight, scale, bias, bits)
    share = (importance / importance.sum(-1, keepdim=True)).expand(weight.shape)
    middle, mean = (codes * share).sum(-1, keepdim=True), (weight * share).sum(-1, keepdim=True)
    spread = ((codes - middle).square() * share).sum(-1)
    slope = ((codes - middle) * (weight - mean) * share).sum(-1) / torch.where(spread == 0, 1, spread)
    slope = torch.where(spread == 0, found[0], slope)
    return _rounded(slope, mean[..., 0] - slope * middle[..., 0], dtype)


def _rounded(scale: Tensor, bias: Tensor, dtype: str) -> Range:
    kind = TORCH_DTYPES[dtype]
    return scale.to(kind).float(), bias.to(kind).float()


def to_packed(codes: Tensor, scales: Tensor, biases: Tensor, groups: Groups, dtype: str) -> Packed:
    """Return codes [out, in] and the groups' scales and biases [out, in / group_size] in the file layout."""
    words = pack(codes.to(torch.uint8).cpu().numpy(), groups.bits)
    stored_scales, stored_biases = (encode(part.cpu().numpy(), dtype) for part in (scales, biases))
    return Packed(words, stored_scales, stored_biases, groups.bits, groups.group_size, dtype)


def expand(packed: Packed) -> Tensor:
    """Return the dequantized weights, [out, in] in fp32."""
    return torch.from_numpy(dequantize(packed))


def row_pieces(weight: Tensor) -> tuple[Tensor, ...]:
    """Split weight [out, in] into rows that are rounded at a time."""
    return weight.split(max(1, _PIECE // weight.shape[1]))


def round_matrix(weight: Tensor, groups: Groups, dtype: str) -> Packed:
    """Return the nearest codes of weight [out, in], bit for bit those of MLX, without data."""
    bits, size = groups.bits, groups.group_size
    return _join(quantize(piece.float().cpu().numpy(), bits, size, dtype) for piece in row_pieces(weight))


def round_within_ranges(weight: Tensor, importance: Tensor, groups: Groups, dtype: str) -> Packed:
    """Round with each group's range clipped for the least error, weighted by `importance` [in] of the inputs."""

    def round_piece(piece: Tensor) -> Packed:
        grouped = piece.float().view(len(piece), -1, groups.group_size)
        scale, bias = search_range(grouped, importance.view(-1, groups.group_size), groups.bits, dtype)
        codes = to_codes(grouped, scale[..., None], bias[..., None], groups.bits)
        return to_packed(codes.view(piece.shape), scale, bias, groups, dtype)

    return _join(round_piece(piece) for piece in row_pieces(weight))


def _join(pieces: Iterable[Packed]) -> Packed:
    """Return the matrix that has the rows of all pieces."""
    held = list(pieces)
    parts: Any = {name: np.concatenate([getattr(piece, name) for piece in held]) for name in PACKED_PARTS.values()}
    return replace(held[0], **parts)
