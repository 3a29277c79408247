"""Round to nearest: every weight to the nearest code of its group, without data."""

import numpy as np
import torch
from torch import Tensor

from sala.checkpoint.packing import Packed, quantize
from sala.lab.quantize.ranges import search_range, to_codes, to_packed
from sala.quantization_config import Groups

_PIECE = 1 << 24  # weights at a time; rows are independent


def round_matrix(weight: Tensor, groups: Groups, dtype: str) -> Packed:
    """Return the nearest codes of weight [out, in], bit for bit those of MLX."""
    pieces = [
        quantize(piece.float().cpu().numpy(), groups.bits, groups.group_size, dtype)
        for piece in weight.split(max(1, _PIECE // weight.shape[1]))
    ]
    if len(pieces) == 1:
        return pieces[0]
    codes, scales, biases = (
        np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("codes", "scales", "biases")
    )
    return Packed(codes, scales, biases, groups.bits, groups.group_size, dtype)


def round_within_ranges(weight: Tensor, importance: Tensor, groups: Groups, dtype: str) -> Packed:
    """Round with each group's range clipped for the least error, weighted by `importance` [in] of the inputs."""
    size = groups.group_size
    weights = importance.view(-1, size)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for piece in weight.split(max(1, _PIECE // weight.shape[1])):
        grouped = piece.float().view(len(piece), -1, size)
        scale, bias = search_range(grouped, weights, groups.bits, dtype)
        codes = to_codes(grouped, scale[..., None], bias[..., None], groups.bits)
        parts.append((codes.view(piece.shape).to(torch.uint8), scale, bias))
    codes, scales, biases = (torch.cat(part) for part in zip(*parts, strict=True))
    return to_packed(codes, scales, biases, groups.bits, size, dtype)
