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


def dequantize(words: Tensor, scales: Tensor, biases: Tensor, bits: int, group_size: int) -> Tensor:
    """words [..., in * bits / 32], scales and biases [..., in / group_size] → weights [..., in] in fp32."""
    codes = unpack(words, bits).unflatten(-1, (scales.shape[-1], group_size)).float()
    return (codes * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)).flatten(-2)
