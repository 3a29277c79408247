"""Quantized matrices: codes are unpacked from their words, then w = code * scale + bias."""

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """words [..., W] as int32 → codes [..., W * 32 / bits] as int32, from a little-endian stream of bits."""
    if bits == 8:
        return words.contiguous().view(torch.uint8).int()
    groups = words.unflatten(-1, (words.shape[-1] // bits, bits))
    codes = torch.empty((*groups.shape[:-1], 32), dtype=torch.int32, device=words.device)
    for index in range(32):
        word, offset = divmod(index * bits, 32)
        code = groups[..., word] >> offset  # an arithmetic shift; the mask removes copies of the sign
        if offset + bits > 32:
            low = (1 << (32 - offset)) - 1
            code = (code & low) | (groups[..., word + 1] << (32 - offset))
        codes[..., index] = code & ((1 << bits) - 1)
    return codes.flatten(-2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Reverse `unpack` for codes of 4 or 8 bits, which never cross the border of a word."""
    parts = codes.unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return parts.sum(-1, dtype=torch.int32)  # no bit is set in two of the parts


def fit_range(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scale and bias of a group by MLX's rule from the ends of its weights.

    The end farther from zero is represented exactly, and so is zero.
    """
    is_low = low.abs() > high.abs()
    scale = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-7)
    scale = torch.where(is_low, scale, -scale)
    edge = torch.where(is_low, low, high)
    zero = (edge / scale).round()
    has_zero = zero != 0
    scale = torch.where(has_zero, edge / torch.where(has_zero, zero, 1), scale)
    return scale, torch.where(has_zero, edge, 0)


def to_codes(weight: Tensor, scale: Tensor, bias: Tensor, bits: int) -> Tensor:
    """Return the nearest codes as floats; 0 where the scale is zero."""
    safe = torch.where(scale == 0, 1, scale)
    codes = torch.where(scale == 0, 0, (weight - bias) / safe)
    return codes.round().clamp(0, (1 << bits) - 1)


def dequantize(words: Tensor, scales: Tensor, biases: Tensor, bits: int, group_size: int) -> Tensor:
    """words [..., in * bits / 32], scales and biases [..., in / group_size] → weights [..., in] in fp32."""
    codes = unpack(words, bits).unflatten(-1, (scales.shape[-1], group_size)).float()
    return (codes * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)).flatten(-2)
