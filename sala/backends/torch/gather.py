"""Gathering of sources: how much attention the sampled positions of a step give to each block.

The C++ decode fills `blocks` and `shares` itself. Elsewhere the sparse layers call `add`, which computes the shares
once more for the few rows that want them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sala.backends.sources import GatheredBlocks, GatherRequest, HeadWeights
from sala.backends.torch.cache import KVPages, Span
from sala.backends.torch.ops.sparse import block_shares, select_blocks
from sala.config import SalaConfig
from sala.protocol import Plan


class Gather:
    """The attention of one step's sampled positions, by sparse layer: blocks [n, L, G, C] and shares [n, L, H, C]."""

    def __init__(self, asked: GatherRequest, config: SalaConfig) -> None:
        self.asked, self.config = asked, config
        layers, count = len(config.sparse_layers), asked.num_blocks(config.sparse_config)
        shape = len(asked.rows), layers
        self.blocks = torch.full((*shape, config.num_key_value_heads, count), -1, dtype=torch.int32)
        self.shares = torch.zeros(*shape, config.num_attention_heads, count)
        self.num_done = 0  # layers

    @classmethod
    def of(cls, plan: Plan, config: SalaConfig) -> "Gather | None":
        """Return what gathers for a plan; None if no row wants sources."""
        asked = GatherRequest.of(plan.rows) if config.sparse_layers else None
        return None if asked is None else cls(asked, config)

    def add(self, q: Tensor, spans: Sequence[Span], pages: KVPages, scale: float) -> None:
        """Gather the next sparse layer: q [T, H, D] of all rows of the batch, whose keys are in the pages."""
        for index, rows in self.asked.places.items():
            self.attend(index, self.num_done, q[list(self.asked.rows[rows])], spans[index], pages, scale)
        self.num_done += 1

    def attend(self, index: int, layer: int, q: Tensor, span: Span, pages: KVPages, scale: float) -> None:
        """Gather a sparse layer, given by its number among these, for the positions of one span: q [n, H, D]."""
        rows = self.asked.places[index]
        positions = torch.tensor(self.asked.positions[rows], device=q.device)
        is_sparse = torch.tensor(self.asked.is_sparse[rows], device=q.device)
        blocks, shares = attended(q, span, positions, is_sparse, pages, scale)
        width = min(blocks.shape[2], self.blocks.shape[3])  # columns beyond hold no block: drafts enter the next one
        self.blocks[rows, layer, :, :width] = blocks[..., :width].int().cpu()
        self.shares[rows, layer, :, :width] = shares[..., :width].cpu()

    def put(self, index: int, blocks: Tensor, shares: Tensor) -> None:
        """Store what a fused decode has gathered for the positions of one span, [n, L, G, W] and [n, L, H, W]."""
        rows, width = self.asked.places[index], self.blocks.shape[3]
        self.blocks[rows], self.shares[rows] = blocks[..., :width], shares[..., :width]

    def results(self, plan: Plan, weights: HeadWeights) -> tuple[GatheredBlocks | None, ...]:
        shares = weights.weigh(self.shares.numpy(), self.config.num_key_value_heads)
        return self.asked.join(plan, self.blocks.numpy(), shares, self.config)


def attended(
    q: Tensor, span: Span, positions: Tensor, is_sparse: Tensor, pages: KVPages, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the blocks that queries of a row attend to, [n, G, C], and the share each head gives them, [n, H, C]."""
    num_blocks, groups = -(-span.end // pages.sparse.block_size), pages.k.shape[0]
    blocks = torch.arange(num_blocks, device=q.device)
    own = (positions // pages.sparse.block_size)[:, None]
    blocks = torch.where(blocks <= own, blocks, -1)[:, None].expand(-1, groups, -1)  # dense
    if is_sparse.any():
        k1, k2 = pages.pooled(span, span.end)
        selected = select_blocks(q, k1, k2, positions, num_blocks, pages.sparse.with_topk(span.topk), scale)
        if is_sparse.all():
            blocks = selected
        else:
            selected = torch.nn.functional.pad(selected, (0, num_blocks - selected.shape[2]), value=-1)
            blocks = torch.where(is_sparse[:, None, None], selected, blocks)
    keys, table = pages.k, span.table
    if pages.is_fp8:
        keys = pages.blocks(span)[0]
        table = torch.arange(keys.shape[1], device=q.device)
    return blocks, block_shares(q, keys, table, blocks, positions, scale)
