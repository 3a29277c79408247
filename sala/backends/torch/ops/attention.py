"""Dense causal attention over grouped heads, in tiles of queries so that memory stays linear."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_TILE = 256


def dense_attention(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """Queries at positions start, start+1, …: q [n, H, D], k and v [G, start + n, D] → [n, H, D].

    The heads of a group are folded into the query rows, so that keys are never copied per head.
    """
    tiles = []
    for begin in range(0, q.shape[0], QUERY_TILE):
        tile = q[begin : begin + QUERY_TILE]
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
