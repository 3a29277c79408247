"""A loss for block selection: the score of a block should predict the attention that the block gets.

Block selection has no gradient, so blocks that are never selected are never learned. This loss computes full attention
for a few queries of each row and trains the scores of the selectable blocks to match it.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.model import SalaModel, SparseMixer
from sala.backends.torch.ops.sparse import block_scores, window_scores
from sala.config import SparseConfig

NUM_QUERIES = 64  # per row


class BlockSelectionLoss:
    """Observes the queries and keys of every sparse layer between `begin` and `end`, and sums the layers' losses."""

    def __init__(self, model: SalaModel) -> None:
        self._mixers = [layer.self_attn for layer in model.model.layers if isinstance(layer.self_attn, SparseMixer)]
        self._at: Tensor | None = None
        self._losses: list[Tensor] = []

    def begin(self, tokens: Tensor, is_answer: Tensor) -> None:
        """Observe the next forward pass of tokens [B, n]; is_answer [B, n] marks positions that predict an answer."""
        self._losses = []
        self._at = select_queries(tokens, is_answer, self._mixers[0].sparse)
        for mixer in self._mixers:
            mixer.observer = partial(self._observe, mixer.sparse)

    def end(self) -> Tensor:
        """Stop observing, and return the layers' mean loss, summed over rows and queries."""
        for mixer in self._mixers:
            mixer.observer = None
        return torch.stack(self._losses).mean(0)

    def _observe(self, sparse: SparseConfig, q: Tensor, k: Tensor) -> None:
        assert self._at is not None
        q, k = (x.unflatten(0, (len(self._at), -1)) for x in (q, k))
        with torch.autocast(q.device.type, enabled=False):
            self._losses.append(selection_loss(q, k, self._at, sparse))


def count_queries(num_rows: int, length: int) -> int:
    return num_rows * min(NUM_QUERIES, length)


def min_length(sparse: SparseConfig) -> int:
    """Return the shortest row whose last query has a block to select."""
    forced = sparse.init_blocks + sparse.num_window_blocks + 1
    return max((forced + 1) * sparse.block_size, 4 * sparse.kernel_size)


def select_queries(tokens: Tensor, is_answer: Tensor, sparse: SparseConfig) -> Tensor:
    """Return the positions [B, Q] of the queries with a loss: those that predict answers, then others.

    Only queries with selectable blocks count. A hash of the tokens orders the others, so that a resumed run selects the
    same queries.
    """
    position = torch.arange(tokens.shape[1], device=tokens.device)
    hashed = (tokens * 7919 + position * 104_729) % 65_537
    is_selectable = position >= min_length(sparse) - 1
    priority, at = ((hashed / 65_537 + is_answer) * is_selectable).topk(min(NUM_QUERIES, tokens.shape[1]), dim=1)
    return torch.where(priority > 0, at, tokens.shape[1] - 1)  # if there are too few, the last one is repeated


def selection_loss(q: Tensor, k: Tensor, at: Tensor, sparse: SparseConfig) -> Tensor:
    """Return the loss of q [B, n, H, D], k [B, n, G, D] at positions at [B, Q], summed over rows and queries.

    The loss is the divergence of the normalised block scores from the blocks' attention, weighted with their share of
    all attention: a query that attends to its neighbourhood alone has no loss.
    """
    q = q.float().gather(1, at[:, :, None, None].expand(-1, -1, *q.shape[2:]))
    return torch.vmap(partial(_row_loss, sparse=sparse))(q, k.float().transpose(1, 2), at).sum()


def _row_loss(q: Tensor, keys: Tensor, at: Tensor, sparse: SparseConfig) -> Tensor:
    """Return the loss of one row: q [Q, H, D], keys [G, n, D], at [Q]."""
    scale, length = q.shape[-1] ** -0.5, keys.shape[1]
    num_blocks = -(-length // sparse.block_size)
    block, own = torch.arange(num_blocks, device=q.device), (at // sparse.block_size)[:, None]
    is_free = ((block >= sparse.init_blocks) & (block < own - sparse.num_window_blocks))[:, None]  # [Q, 1, N]
    attention = _block_attention(q.detach(), keys.detach(), at, sparse.block_size, scale) * is_free
    k1, k2 = (_pool(keys, size * sparse.kernel_size, size * sparse.kernel_stride) for size in (1, 4))
    scores = block_scores(window_scores(q, k1, k2, at, sparse, scale), num_blocks, sparse)
    logs = scores.clamp(min=1e-30).log().masked_fill(~is_free, float("-inf"))
    logp = logs.log_softmax(-1).masked_fill(~is_free, 0.0)
    target = attention.clamp(min=1e-12).log() - attention.sum(-1, keepdim=True).clamp(min=1e-12).log()
    return (attention * (target - logp)).sum() / keys.shape[0]


def _block_attention(q: Tensor, keys: Tensor, at: Tensor, block_size: int, scale: float) -> Tensor:
    """Return the share of attention of each block, averaged over the heads of a group: [Q, G, N]."""
    (count, heads, dim), (groups, length) = q.shape, keys.shape[:2]
    rows = (q * scale).view(count, groups, heads // groups, dim).permute(1, 2, 0, 3)  # [G, H/G, Q, D]
    logits = (rows.flatten(1, 2) @ keys.transpose(1, 2)).view(groups, heads // groups, count, length)
    is_causal = torch.arange(length, device=q.device) <= at[:, None]
    shares = logits.masked_fill(~is_causal, float("-inf")).softmax(-1).mean(1)
    pad = -length % block_size
    return F.pad(shares, (0, pad)).unflatten(-1, (-1, block_size)).sum(-1).transpose(0, 1)


def _pool(keys: Tensor, kernel: int, stride: int) -> Tensor:
    """Return what `pool_keys` does, with a cheap gradient."""
    if keys.shape[1] < kernel:
        return keys[:, :0]
    return F.avg_pool1d(keys.transpose(1, 2), kernel, stride).transpose(1, 2)
