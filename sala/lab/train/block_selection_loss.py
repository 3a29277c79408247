"""Learning to choose: a block's score should say how much attention would look at it.

Blocks are chosen without a gradient, so what is never chosen is never learnt. Here a few queries of each row look at
everything, and the scores of the blocks that they may choose among follow what they saw there.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.model import SalaModel, SparseMixer
from sala.backends.torch.ops.sparse import block_scores, window_scores
from sala.config import SparseConfig

NUM_QUERIES = 64  # of a row


class BlockSelectionLoss:
    """Hears the queries and keys of every sparse layer, and adds up what their choices would have cost."""

    def __init__(self, model: SalaModel) -> None:
        self._mixers = [layer.self_attn for layer in model.model.layers if isinstance(layer.self_attn, SparseMixer)]
        self._at: Tensor | None = None
        self._losses: list[Tensor] = []

    def begin(self, tokens: Tensor, is_answer: Tensor) -> None:
        """tokens and is_answer [B, n]: is the token after this one part of an answer?"""
        self._losses = []
        self._at = select_queries(tokens, is_answer, self._mixers[0].sparse)
        for mixer in self._mixers:
            mixer.observer = self._hear(mixer)

    def end(self) -> Tensor:
        """The sum over rows and queries of the layers' mean loss."""
        for mixer in self._mixers:
            mixer.observer = None
        return torch.stack(self._losses).mean(0)

    def _hear(self, mixer: SparseMixer) -> Callable[[Tensor, Tensor], None]:
        def hear(q: Tensor, k: Tensor) -> None:
            assert self._at is not None
            q, k = (x.unflatten(0, (len(self._at), -1)) for x in (q, k))
            with torch.autocast(q.device.type, enabled=False):
                self._losses.append(selection_loss(q, k, self._at, mixer.sparse))

        return hear


def count_queries(num_rows: int, length: int) -> int:
    return num_rows * min(NUM_QUERIES, length)


def min_length(sparse: SparseConfig) -> int:
    """Tokens of a row whose last query has a choice."""
    forced = sparse.init_blocks + sparse.num_window_blocks + 1
    return max((forced + 1) * sparse.block_size, 4 * sparse.kernel_size)


def select_queries(tokens: Tensor, is_answer: Tensor, sparse: SparseConfig) -> Tensor:
    """Positions [B, Q] of the queries that learn: those that answer, then any others that have a choice at all.

    Which others follows from the tokens themselves, so that a run that goes on picks the same.
    """
    position = torch.arange(tokens.shape[1], device=tokens.device)
    mixed = (tokens * 7919 + position * 104_729) % 65_537
    has_choice = position >= min_length(sparse) - 1
    priority, at = ((mixed / 65_537 + is_answer) * has_choice).topk(min(NUM_QUERIES, tokens.shape[1]), dim=1)
    return torch.where(priority > 0, at, tokens.shape[1] - 1)  # where there are too few, the last one learns more


def selection_loss(q: Tensor, k: Tensor, at: Tensor, sparse: SparseConfig) -> Tensor:
    """q [B, n, H, D], k [B, n, G, D], at [B, Q] → the loss, summed over rows and queries.

    It is the divergence of the normalised block scores from the attention that blocks get, as a share of all attention:
    a query that looks at nothing but its surroundings has nothing to learn.
    """
    q = q.float().gather(1, at[:, :, None, None].expand(-1, -1, *q.shape[2:]))
    return torch.vmap(partial(_row_loss, sparse=sparse))(q, k.float().transpose(1, 2), at).sum()


def _row_loss(q: Tensor, keys: Tensor, at: Tensor, sparse: SparseConfig) -> Tensor:
    """One row: q [Q, H, D], keys [G, n, D], at [Q]."""
    scale, length = q.shape[-1] ** -0.5, keys.shape[1]
    num_blocks = -(-length // sparse.block_size)
    block, own = torch.arange(num_blocks, device=q.device), (at // sparse.block_size)[:, None]
    is_free = ((block >= sparse.init_blocks) & (block < own - sparse.num_window_blocks))[:, None]  # [Q, 1, N]
    seen = _block_attention(q.detach(), keys.detach(), at, sparse.block_size, scale) * is_free
    k1, k2 = (_pool(keys, size * sparse.kernel_size, size * sparse.kernel_stride) for size in (1, 4))
    scores = block_scores(window_scores(q, k1, k2, at, sparse, scale), num_blocks, sparse)
    logs = scores.clamp(min=1e-30).log().masked_fill(~is_free, float("-inf"))
    logp = logs.log_softmax(-1).masked_fill(~is_free, 0.0)
    wanted = seen.clamp(min=1e-12).log() - seen.sum(-1, keepdim=True).clamp(min=1e-12).log()
    return (seen * (wanted - logp)).sum() / keys.shape[0]


def _block_attention(q: Tensor, keys: Tensor, at: Tensor, block_size: int, scale: float) -> Tensor:
    """The share of attention that each block gets, averaged over the heads of a group: [Q, G, N]."""
    (count, heads, dim), (groups, length) = q.shape, keys.shape[:2]
    rows = (q * scale).view(count, groups, heads // groups, dim).permute(1, 2, 0, 3)  # [G, H/G, Q, D]
    logits = (rows.flatten(1, 2) @ keys.transpose(1, 2)).view(groups, heads // groups, count, length)
    is_past = torch.arange(length, device=q.device) <= at[:, None]
    shares = logits.masked_fill(~is_past, float("-inf")).softmax(-1).mean(1)
    pad = -length % block_size
    return F.pad(shares, (0, pad)).unflatten(-1, (-1, block_size)).sum(-1).transpose(0, 1)


def _pool(keys: Tensor, kernel: int, stride: int) -> Tensor:
    """As `pool_keys`, with a gradient that is cheap."""
    if keys.shape[1] < kernel:
        return keys[:, :0]
    return F.avg_pool1d(keys.transpose(1, 2), kernel, stride).transpose(1, 2)
