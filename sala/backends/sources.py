"""Which blocks of its context an answer has attended to: what all backends share of gathering it.

For every sampled position the sparse layers report which blocks each kv group attended to, and the share of its
attention that each head gave to each of them. Heads are weighed by how well they were measured to retrieve, and shares
are summed by block. `text.sources` leaves out the blocks that tell nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np

from sala.config import SalaConfig, SparseConfig
from sala.protocol import Plan, Row

Weights = Sequence[Sequence[float]]
MOST_PENDING = 64  # positions that are summed together


@dataclass(frozen=True)
class HeadWeights:
    """The weight of each query head of each sparse layer, [L, H]; with `keeps_heads` the heads are kept apart."""

    weights: "np.ndarray[Any, Any]"
    keeps_heads: bool = False

    @classmethod
    def of(
        cls, config: SalaConfig, weights: Sequence[Sequence[float]] | None = None, keeps_heads: bool = False
    ) -> Self:
        """Return given weights, or the same one for all heads; they sum to 1."""
        shape = len(config.sparse_layers), config.num_attention_heads
        found = np.ones(shape, np.float32) if weights is None else np.asarray(weights, np.float32).reshape(shape)
        return cls(found / max(float(found.sum()), 1e-12), keeps_heads)

    def weigh(self, shares: "np.ndarray[Any, Any]", num_groups: int) -> "np.ndarray[Any, Any]":
        """Weigh shares of heads [n, L, H, C] → sums over heads of each group [n, L, G, C], unless heads are kept."""
        if self.keeps_heads:
            return shares
        weighted = shares * self.weights[:, :, None]
        n, layers, heads, count = shares.shape
        found: np.ndarray[Any, Any] = weighted.reshape(n, layers, num_groups, heads // num_groups, count).sum(3)
        return found


@dataclass(frozen=True)
class GatherRequest:
    """The positions of a plan whose attention is gathered: `rows` are their places in the batch."""

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    is_sparse: tuple[bool, ...]
    topks: tuple[int | None, ...]  # blocks to select, see `Row`
    spans: tuple[tuple[int, int], ...]  # row of the plan and number of positions, in order

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "GatherRequest | None":
        """Return the sampled positions of the rows that want sources; None if there are none."""
        packed: list[int] = []
        positions: list[int] = []
        is_sparse: list[bool] = []
        topks: list[int | None] = []
        spans = []
        end = 0
        for index, row in enumerate(rows):
            end += len(row.tokens)
            if row.wants_sources and row.sampling is not None:
                count = 1 + row.num_drafts
                packed += range(end - count, end)
                positions += range(row.end - count, row.end)
                is_sparse += [at >= row.sparse_from for at in range(row.end - count, row.end)]
                topks += [row.topk] * count
                spans.append((index, count))
        found = (tuple(packed), tuple(positions), tuple(is_sparse), tuple(topks), tuple(spans))
        return cls(*found) if spans else None

    @cached_property
    def places(self) -> dict[int, slice]:
        """Where the positions of each row of the plan lie among all."""
        found, start = {}, 0
        for index, count in self.spans:
            found[index] = slice(start, start + count)
            start += count
        return found

    def num_blocks(self, sparse: SparseConfig) -> int:
        """Return the most blocks that one of the positions attends to."""
        seen = [position // sparse.block_size + 1 for position in self.positions]
        return max(
            min(count, sparse.with_topk(topk).num_selected) if is_sparse else count
            for count, is_sparse, topk in zip(seen, self.is_sparse, self.topks, strict=True)
        )

    def join(
        self, plan: Plan, blocks: "np.ndarray[Any, Any]", shares: "np.ndarray[Any, Any]", config: SalaConfig
    ) -> "tuple[GatheredBlocks | None, ...]":
        """Return what was gathered for each row of the plan: blocks [n, L, G, C] and shares [n, L, R, C]."""
        found: list[GatheredBlocks | None] = [None] * len(plan.rows)
        for index, here in self.places.items():
            part = Part(blocks[here], shares[here], np.array(self.positions[here]))
            found[index] = GatheredBlocks(config.sparse_config, [part])
        return tuple(found)


@dataclass(frozen=True)
class Part:
    """Positions [n]: blocks [n, L, G, C], -1 for none, and shares of attention [n, L, R, C]; R are groups or heads."""

    blocks: "np.ndarray[Any, Any]"
    shares: "np.ndarray[Any, Any]"
    positions: "np.ndarray[Any, Any]"


@dataclass
class GatheredBlocks:
    """What the sampled positions of one sequence have attended to; see `protocol.Gathered`."""

    sparse: SparseConfig
    parts: list[Part] = field(default_factory=list)
    sums: "np.ndarray[Any, Any]" = field(default_factory=lambda: np.zeros((0, 0)))  # [L * R, blocks]

    @property
    def block_size(self) -> int:
        return self.sparse.block_size

    @property
    def num_first(self) -> int:
        return self.sparse.init_blocks

    def joined(self, earlier: Any, count: int) -> "GatheredBlocks":
        (part,) = self.parts
        kept = Part(part.blocks[:count], part.shares[:count], part.positions[:count])
        if earlier is None:
            return GatheredBlocks(self.sparse, [kept])
        found: GatheredBlocks = earlier
        found.parts.append(kept)
        if len(found.parts) >= MOST_PENDING:
            found.add_up()
        return found

    def add_up(self) -> None:
        """Add the pending parts to the sums."""
        for part in self.parts:
            layers, rows = part.shares.shape[1:3]
            blocks = np.repeat(part.blocks, rows // part.blocks.shape[2], 2)
            width = max(self.sums.shape[1], int(part.positions.max()) // self.sparse.block_size + 1)
            if self.sums.shape[1] < width:
                grown = np.zeros((layers * rows, width))
                grown[: self.sums.shape[0], : self.sums.shape[1]] = self.sums
                self.sums = grown
            index = np.arange(layers * rows).reshape(1, layers, rows, 1) * width + blocks
            is_used = blocks >= 0
            flat = np.bincount(index[is_used], part.shares[is_used], self.sums.size)
            self.sums += flat.reshape(self.sums.shape)
        self.parts.clear()

    def by_block(self) -> list[float]:
        self.add_up()
        found: list[float] = self.sums.sum(0).tolist()
        return found
