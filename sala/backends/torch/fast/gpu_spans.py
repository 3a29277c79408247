"""The mixers of the GPU path: of one prefill span (`PrefillSpan`), or of the decode rows of all sequences.

A breakpoint in `PrefillSpan` is hit for every chunk of a prompt. Code of `DecodeSpans` runs in Python only while a
graph is captured (`gpu_graphs.py`); afterwards the GPU replays it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.batch import Span
from sala.backends.torch.cache import KVPages
from sala.backends.torch.fast.gpu_layers import Angles, FusedLayer, Mixers, rotate
from sala.backends.torch.kernels import attention, block_selection, decode_attention, fused, lightning, linear, pooling
from sala.backends.torch.kernels.lightning import Heads
from sala.backends.torch.ops.lightning import decay_slopes
from sala.config import SparseConfig

ROW_MULTIPLE = 64  # rows beyond those of our product kernels are padded to a multiple: fewer library kernels in use


class PrefillSpan(Mixers):
    """One span of a prompt."""

    def __init__(self, angles: Angles, span: Span, positions: Tensor) -> None:
        self.angles, self.span, self.positions = angles, span, positions
        self.table = span.table
        self.row_of = torch.zeros_like(positions)
        self.start = positions[:1]

    def lightning(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, states: Tensor, index: int) -> Tensor:
        slopes, slot = decay_slopes(layer.num_heads, q.device), self.span.slot
        q, k = rotate(q, k, layer.heads(self.angles.lightning), None)
        output, after = lightning.lightning_prefill(q, k, v, states[slot], slopes, layer.head_dim**-0.5)
        states[slot] = after
        return output.flatten(1)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        self.append(k, v, pages)
        return self._attend_from(layer, q, self.span.start, gate, pages, (k, v))

    def append(self, k: Tensor, v: Tensor, pages: KVPages) -> None:
        pooling.append(
            k, v, pages.k, pages.v, pages.k1, pages.k2, self.table[None], self.start, self.row_of, self.positions,
            pages.sparse,
        )  # fmt: skip

    def attend_last(self, layer: FusedLayer, q: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        """Attend with the last rows of the span, whose keys and values are in the pages."""
        return self._attend_from(layer, q, self.span.end - q.shape[0], gate, pages)

    def _attend_from(
        self,
        layer: FusedLayer,
        q: Tensor,
        start: int,
        gate: Tensor | None,
        pages: KVPages,
        fresh: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Queries at start, start + 1, … over the pages; `fresh` are keys and values of the span, if at hand."""
        scale = layer.head_dim**-0.5
        num_dense = min(max(self.span.sparse_from - start, 0), q.shape[0])
        outputs = []
        if num_dense:
            outputs.append(self._attend_dense(q[:num_dense], start, fresh, pages, scale))
        if num_dense < q.shape[0]:
            q, start = q[num_dense:], start + num_dense
            selected = block_selection.select_prefill(q, pages.k1, pages.k2, self.table, start, pages.sparse, scale)
            outputs.append(attention.sparse_prefill(q, pages.k, pages.v, self.table, selected, start, scale))
        o = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)
        return o if gate is None else fused.norm_gate(o, None, gate, layer.eps)

    def _attend_dense(
        self, q: Tensor, start: int, fresh: tuple[Tensor, Tensor] | None, pages: KVPages, scale: float
    ) -> Tensor:
        if start or fresh is None or pages.is_fp8:
            return attention.dense_prefill(q, pages.k, pages.v, self.table, start, scale)
        k, v = fresh
        n, is_grouped = q.shape[0], q.shape[1] != k.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[:n], v[:n]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)[0].transpose(
            0, 1
        )


class DecodeSpans(Mixers):
    """`num_spans` sequences of `count` tokens each, as device tensors only; positions of -1 are padding.

    Everything that changes from step to step is in one tensor, `inputs`: one copy brings it to the device.
    """

    def __init__(
        self,
        sparse: SparseConfig,
        angles_of: Callable[[Tensor], Angles],
        num_spans: int,
        count: int,
        max_blocks: int,
        device: torch.device,
    ) -> None:
        num_rows = num_spans * count
        self.sparse, self.angles_of, self.max_blocks = sparse, angles_of, max_blocks
        self.num_spans, self.count = num_spans, count
        self.num_padded = num_rows if num_rows <= linear.MAX_ROWS else -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
        sizes = [self.num_padded, self.num_padded, *[num_spans] * 4]
        self.inputs = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        self.tokens, self.all_positions, self.slots, self.starts, self.sparse_from, self.advances = self.inputs.split(
            sizes
        )
        self.positions = self.all_positions[:num_rows]
        self.tables = torch.zeros(num_spans, max_blocks, dtype=torch.int32, device=device)
        self.row_of = torch.arange(num_spans, device=device).repeat_interleave(count)
        self.kept: dict[int, tuple[Tensor, Tensor, Heads]] = {}  # layer → k and v of drafts to be verified

    def prepare(self) -> None:
        """Compute on the device what all layers of a step share."""
        self.angles = self.angles_of(self.all_positions)
        self.lengths = self.positions + 1
        self.is_sparse = self.positions >= self.sparse_from[self.row_of]
        self.row_tables = self.tables if self.count == 1 else self.tables[self.row_of]

    def lightning(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, states: Tensor, index: int) -> Tensor:
        slopes, scale = decay_slopes(layer.num_heads, q.device), layer.head_dim**-0.5
        heads, first = layer.heads(self.angles.lightning), layer.dependents_first
        output = q.new_empty(q.shape)  # rows of padding stay uninitialised; their results are never read
        q_, k_, v_, o_ = (x[: self.num_spans * self.count] for x in (q, k, v, output))
        if self.count == 1:
            lightning.lightning_decode(q_, k_, v_, states, self.slots, slopes, scale, o_, heads, first)
            return output.flatten(1)
        q_, k_, v_, o_ = (x.unflatten(0, (self.num_spans, self.count)) for x in (q_, k_, v_, o_))
        lightning.lightning_verify(q_, k_, v_, states, self.slots, slopes, scale, o_, heads, first)
        self.kept[index] = k_, v_, heads
        lightning.lightning_fold(k_, v_, states, self.slots, self.advances, slopes, heads)  # spans without drafts
        return output.flatten(1)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        num_rows, scale = self.num_spans * self.count, layer.head_dim**-0.5
        output = q.new_empty(q.shape)
        q_, k_, v_ = (x[:num_rows] for x in (q, k, v))
        pooling.append(
            k_, v_, pages.k, pages.v, pages.k1, pages.k2, self.tables, self.starts, self.row_of, self.positions,
            self.sparse,
        )  # fmt: skip
        selected = block_selection.select_decode(
            q_, pages.k1, pages.k2, self.row_tables, self.lengths, self.sparse, scale, self.max_blocks, self.is_sparse
        )
        max_dense = min(self.max_blocks, -(-self.sparse.dense_len // self.sparse.block_size))
        decode_attention.decode_attention(
            q_, pages.k, pages.v, self.row_tables, self.lengths, self.is_sparse, selected, scale, max_dense,
            gate=None if gate is None else gate[:num_rows], output=output[:num_rows],
            dependents_first=layer.dependents_first,
        )  # fmt: skip
        return output.flatten(1)
