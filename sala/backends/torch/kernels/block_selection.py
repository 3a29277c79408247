"""Block selection on a GPU: the selected blocks of `ops/sparse.py`, ascending.

`block_scores.py` scores the blocks, `top_blocks.py` picks the best of every query.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sala.backends.torch.kernels.block_scores import (
    decode_scores,
    launch_scores,
    queries_at_once,
    score_config,
    supports,
)
from sala.backends.torch.kernels.launch import aligned_rows, shared_memory
from sala.backends.torch.kernels.pdl import MAX_ROWS
from sala.backends.torch.kernels.top_blocks import distinct_sizes, every_block, launch_top
from sala.config import SparseConfig

__all__ = ["compile_calls", "select_decode", "select_prefill", "select_rows", "supports"]


def select_prefill(
    q: Tensor, pages_k1: Tensor, pages_k2: Tensor, table: Tensor, start: int, sparse: SparseConfig, scale: float
) -> Tensor:
    """q [n, H, D] at positions start …, pooled pages [G, P, rows, D], table [N] → selected [n, G, C] int32, ascending.

    C = min(num_selected, blocks so far); -1 follows the ids where fewer than C blocks exist.
    """
    pages = table[: -(-(start + q.shape[0]) // sparse.block_size)]
    k1, k2 = (pool.index_select(1, pages).flatten(1, 2) for pool in (pages_k1, pages_k2))
    return select_rows(q, k1, k2, start, sparse, scale)


def select_rows(q: Tensor, k1: Tensor, k2: Tensor, start: int, sparse: SparseConfig, scale: float) -> Tensor:
    """`select_prefill` of pooled rows [G, rows, D] in order, without pages."""
    (n, _, dim), groups = q.shape, k1.shape[0]
    num_blocks = -(-(start + n) // sparse.block_size)
    positions = torch.arange(start, start + n, dtype=torch.int32, device=q.device)
    if num_blocks <= sparse.num_selected:
        return every_block(positions, groups, num_blocks, sparse)
    width = (start + n - 1) // sparse.block_size - sparse.num_window_blocks
    selected = torch.empty(n, groups, sparse.num_selected, dtype=torch.int32, device=q.device)
    q = aligned_rows(q)
    config = score_config(q.element_size(), dim, shared_memory(q.device))
    tile = queries_at_once(q, groups, width, sparse, config)
    scores = torch.empty(min(tile, n), groups, width, dtype=torch.float32, device=q.device)
    for begin in range(0, n, tile):
        rows = q[begin : begin + tile]
        launch_scores(rows, k1, k2, scores, start + begin, sparse, scale, config)
        launch_top(scores, selected[begin : begin + tile], positions[begin : begin + tile], None, 0, sparse)
    return selected


def select_decode(
    q: Tensor, pages_k1: Tensor, pages_k2: Tensor, tables: Tensor, lengths: Tensor, sparse: SparseConfig, scale: float,
    max_blocks: int, is_sparse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [S, H, D], the last token of each sequence; tables [S, N], lengths [S] → selected [S, G, C] int32, ascending.

    C = min(num_selected, max_blocks); rows without a length, or that are not sparse (is_sparse [S]), are all -1.
    """
    num_rows, groups = q.shape[0], pages_k1.shape[0]
    if max_blocks <= sparse.num_selected:
        active = lengths if is_sparse is None else torch.where(is_sparse != 0, lengths, 0)
        return every_block(active - 1, groups, max_blocks, sparse)
    selected = torch.empty(num_rows, groups, sparse.num_selected, dtype=torch.int32, device=q.device)
    flags = is_sparse if is_sparse is None or is_sparse.dtype != torch.bool else is_sparse.view(torch.uint8)
    scores = decode_scores(aligned_rows(q), pages_k1, pages_k2, tables, lengths, flags, sparse, scale, max_blocks)
    launch_top(scores, selected, lengths, flags, 1, sparse)
    return selected


def compile_calls(sparse: SparseConfig, groups: int, max_blocks: int, device: torch.device) -> list[Callable[[], None]]:
    """Return calls, each of which compiles one variant that prompts of up to `max_blocks` blocks may need.

    Variants grow with the context; those of prompts, and those of their last rows, differ. Calls may run side by side.
    """
    if max_blocks <= sparse.num_selected:
        return []
    sizes = distinct_sizes(sparse, groups, max_blocks)
    launches = [(*size, False) for size in sizes] + [(*size, True) for size in sizes if size[0] <= MAX_ROWS]
    return [partial(_select_nothing, n, width, groups, sparse, device, kind) for n, width, kind in launches]


def _select_nothing(
    n: int, width: int, groups: int, sparse: SparseConfig, device: torch.device, is_decode: bool
) -> None:
    """Select as in `select_rows` or `select_decode`, but for rows of padding, whose scores are not read."""
    positions = torch.full((n,), 0 if is_decode else -1, dtype=torch.int32, device=device)
    selected = torch.empty(n, groups, sparse.num_selected, dtype=torch.int32, device=device)
    scores = torch.empty(1, device=device).expand(n, groups, width)
    launch_top(scores, selected, positions, positions if is_decode else None, int(is_decode), sparse)
