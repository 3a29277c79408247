"""Gathering of sources: how much attention the sampled positions of a step give to each block.

The sparse layers add what they select to the graph of the step, so that nothing is computed twice but the shares of the
rows that want them.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from sala.backends.mlx.cache import KVPages, Span
from sala.backends.mlx.ops.sparse import block_shares
from sala.backends.sources import GatheredBlocks, GatherRequest, HeadWeights
from sala.config import SalaConfig
from sala.protocol import Plan


class Gather:
    """The attention of one step's sampled positions, by span and sparse layer: not computed until `results`."""

    def __init__(self, asked: GatherRequest, config: SalaConfig) -> None:
        self.asked, self.config = asked, config
        self.layers: dict[int, list[tuple[mx.array, mx.array]]] = {index: [] for index, _ in asked.spans}

    @classmethod
    def of(cls, plan: Plan, config: SalaConfig) -> "Gather | None":
        """Return what gathers for a plan; None if no row wants sources."""
        asked = GatherRequest.of(plan.rows) if config.sparse_layers else None
        return None if asked is None else cls(asked, config)

    def add(self, index: int, span: Span, q: mx.array, selected: mx.array | None, pages: KVPages, scale: float) -> None:
        """Gather the next sparse layer for a span: q [n, H, D], and the blocks that its sparse rows have selected."""
        if index not in self.layers:
            return
        rows = self.asked.places[index]
        count = rows.stop - rows.start
        positions = mx.array(np.asarray(self.asked.positions[rows], np.int32))
        num_dense = count - sum(self.asked.is_sparse[rows])  # the first ones
        parts = []
        if num_dense:
            parts.append(every_block(positions[:num_dense], pages, -(-span.end // pages.sparse.block_size)))
        if selected is not None and num_dense < count:
            parts.append(selected[num_dense - count :])
        width = max(part.shape[2] for part in parts)
        padding = [[(0, 0), (0, 0), (0, width - part.shape[2])] for part in parts]
        blocks = mx.concatenate([mx.pad(*each, constant_values=-1) for each in zip(parts, padding, strict=True)])
        shares = block_shares(q[-count:], pages.k, span.table, blocks, positions, scale)
        self.layers[index].append((blocks, shares))

    @property
    def arrays(self) -> Iterator[mx.array]:
        """Yield what the device has to compute."""
        for layers in self.layers.values():
            for pair in layers:
                yield from pair

    def results(self, plan: Plan, weights: HeadWeights) -> tuple[GatheredBlocks | None, ...]:
        count, config = self.asked.num_blocks(self.config.sparse_config), self.config
        shape = len(self.asked.rows), len(config.sparse_layers)
        blocks = np.full((*shape, config.num_key_value_heads, count), -1, np.int32)
        shares = np.zeros((*shape, config.num_attention_heads, count), np.float32)
        for index, layers in self.layers.items():
            for number, pair in enumerate(layers):
                for target, found in zip((blocks, shares), pair, strict=True):
                    read = np.array(found)[..., :count]  # what is cut off are columns without a block
                    target[self.asked.places[index], number, :, : read.shape[2]] = read
        return self.asked.join(plan, blocks, weights.weigh(shares, config.num_key_value_heads), config)


def every_block(positions: mx.array, pages: KVPages, num_blocks: int) -> mx.array:
    """Return the blocks that dense rows attend to, [n, G, N]; -1 beyond their own."""
    own = (positions // pages.sparse.block_size)[:, None, None]
    block = mx.arange(num_blocks, dtype=mx.int32)
    return mx.broadcast_to(mx.where(block <= own, block, -1), (positions.shape[0], pages.k.shape[0], num_blocks))
