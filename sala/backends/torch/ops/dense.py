"""What SALA shares with dense transformers: RMSNorm, rotary positions and causal attention over grouped heads.

Norms, angles and rotations are computed in fp32 whatever the weights are in (fp64, which tests use, stays as it is).
RMSNorm multiplies with the weight in model precision. Attention runs in tiles of queries, so that memory stays linear.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] → [..., D] in x's dtype."""
    if x.dtype == weight.dtype and upcast(x) is x:  # no rounding in between
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = upcast(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rms_norm_share(
    x: Tensor, weight: Tensor, eps: float, num_shares: int, add_up: Callable[[Tensor], Tensor]
) -> Tensor:
    """RMSNorm over channels on several ranks: x [..., D / num_shares] and weight are this rank's share.

    `add_up` sums a tensor over the ranks; it gets one number per row.
    """
    wide = upcast(x)
    mean = add_up(wide.square().sum(-1, keepdim=True)) / (num_shares * x.shape[-1])
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


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


QUERY_TILE = 256
MASK_BYTES = 128 << 20  # of a tile in fp32; longer contexts have fewer queries in a tile


def dense_attention(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """Attend with queries at positions start, start+1, …: q [n, H, D], k and v [G, start + n, D] → [n, H, D].

    The heads of a group are folded into the query rows, so that keys are never copied per head.
    """
    tiles, shared = [], q.shape[1] // k.shape[0]
    size = max(1, min(QUERY_TILE, MASK_BYTES // (4 * shared * k.shape[1])))
    for begin in range(0, q.shape[0], size):
        tile = q[begin : begin + size]
        visible = start + begin + tile.shape[0]
        tiles.append(_tile(tile, k[:, :visible], v[:, :visible], start + begin, scale))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _tile(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    (n, heads, dim), groups = q.shape, k.shape[0]
    q = q.view(n, groups, heads // groups, dim).permute(1, 2, 0, 3)  # [G, H/G, n, D]
    mask = None
    if n > 1:
        rows = torch.arange(start, start + n, device=q.device)
        causal = rows[:, None] >= torch.arange(k.shape[1], device=q.device)
        mask = causal.repeat(heads // groups, 1)[None, None]  # [1, 1, H/G * n, len]
    folded = q.reshape(1, groups, -1, dim)
    output = F.scaled_dot_product_attention(folded, k[None], v[None], attn_mask=mask, scale=scale)
    return output.view(groups, heads // groups, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)


def whole_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Causal attention inside each packed sequence, differentiable: q [T, H, D], k and v [T, G, D] → [T, H, D]."""
    if len(set(lengths)) == 1:
        q, k, v = (x.unflatten(0, (len(lengths), -1)) for x in (q, k, v))
        return _causal(q, k, v, scale).flatten(0, 1)
    sizes = list(lengths)
    rows = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    return torch.cat([_causal(q_row[None], k_row[None], v_row[None], scale)[0] for q_row, k_row, v_row in rows])


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[B, n, heads, D] → the same."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped).transpose(1, 2)
