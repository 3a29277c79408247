# mypy: disable-error-code="no-untyped-call, no-any-return"
"""What is measured of every Triton kernel: its inputs at a model's shapes, the least that it must do, and its peer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.batch import Span
from sala.backends.torch.cache import KVPages
from sala.backends.torch.ops.lightning import decay_slopes, lightning_prefill, lightning_step
from sala.backends.torch.ops.rope import rope_angles
from sala.backends.torch.ops.sparse import (
    block_scores,
    select_blocks,
    sparse_attention,
    tile_bytes,
    top_blocks,
    window_scores,
)
from sala.checkpoint.random import RELEASED
from sala.config import SalaConfig, SparseConfig
from sala.lab.bench.plots import label
from sala.lab.bench.roofline import Call, Calls, Measurement, copying

SHARED = (0.75, 0.0)  # of their free blocks, what neighbours have in common
RUN = 64  # queries that share them
CHOICE_ROWS = 4096  # sampled at a time
STATE_BYTES = 4  # states and scores are in fp32


@dataclass(frozen=True, slots=True)
class Shapes:
    """Whose kernels, and how much of everything."""

    device: torch.device
    lengths: tuple[int, ...] = (8192, 131_072)  # of the prompts
    config: SalaConfig = RELEASED
    dtype: torch.dtype = torch.bfloat16
    num_rows: int = 8192  # of a chunk of a prompt
    batches: tuple[int, ...] = (1, 32)  # rows of a decode step
    rotated_bytes: int = 256 << 20  # more than any cache holds: what decode steps walk through before they come back

    @property
    def sparse(self) -> SparseConfig:
        return self.config.sparse_config

    @property
    def context(self) -> int:
        """Tokens that sparse layers look back on: the longest prompt, but long enough to be sparse."""
        return max(*self.lengths, self.sparse.dense_len)

    @property
    def num_blocks(self) -> int:
        return -(-self.context // self.sparse.block_size)

    @property
    def num_queries(self) -> int:
        return min(self.num_rows, self.context)

    @property
    def scale(self) -> float:
        return float(self.config.head_dim**-0.5)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def projected(self, num_tokens: int, heads: int, dim: int, count: int) -> list[Tensor]:
        """Parts [n, heads, dim] of one wider projection, as the model's are."""
        both = self.random(num_tokens, count * heads * dim)
        return [part.unflatten(1, (heads, dim)) for part in both.chunk(count, 1)]

    def queries(self, num_tokens: int) -> Tensor:
        return self.random(num_tokens, self.config.num_attention_heads, self.config.head_dim)

    def num_sets(self, num_bytes: int) -> int:
        """How many sets of inputs of this size no cache can hold."""
        return max(2, -(-self.rotated_bytes // num_bytes))


def measurements(shapes: Shapes) -> list[Measurement]:
    return [
        *(_lightning_prefill(shapes, length) for length in shapes.lengths),
        *(_lightning_decode(shapes, rows) for rows in shapes.batches),
        _block_scores(shapes),
        _select_prefill(shapes),
        *(_select_decode(shapes, rows) for rows in shapes.batches),
        _top_blocks(shapes),
        *(_sparse_attention(shapes, shared) for shared in SHARED),
        _dense_attention(shapes),
        *(_decode_attention(shapes, rows) for rows in shapes.batches),
        _append(shapes),
        *(_output(shapes, rows) for rows in shapes.batches),
        *(_mlp(shapes, rows) for rows in shapes.batches),
        _add_norm(shapes),
        _norm_rope(shapes),
        _norm_gate(shapes),
        _silu_mul(shapes),
    ]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{label(count)} rows"


# lightning attention


def _lightning_prefill(shapes: Shapes, length: int) -> Measurement:
    heads, dim = shapes.config.lightning_nh, shapes.config.lightning_head_dim
    library = _simple_gla() if shapes.device.type == "cuda" else None

    def build() -> Calls:
        from sala.backends.torch.kernels import lightning

        q, k, v = shapes.projected(length, heads, dim, 3)
        state = torch.randn(heads, dim, dim, device=shapes.device)
        rest = (state, decay_slopes(heads, shapes.device), dim**-0.5)
        if library is None:
            peer = partial(lightning_prefill, q, k, v, *rest)
        else:
            batch = (x.contiguous()[None] for x in (q, k, v))
            peer = partial(
                library, *batch, g_gamma=-rest[1], scale=rest[2], initial_state=state[None], output_final_state=True
            )
        return Calls([partial(lightning.lightning_prefill, q, k, v, *rest)], [peer])

    num_bytes = 4 * length * heads * dim * shapes.dtype.itemsize + 2 * heads * dim * dim * STATE_BYTES
    peer = "reference" if library is None else "fla"
    return Measurement("lightning prefill", label(length), _recurrence(shapes, length), num_bytes, peer, build)


def _simple_gla() -> Callable[..., Any] | None:
    """flash-linear-attention's kernel for the same recurrence, where it is installed."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception:  # not installed, or not for this torch
        return None
    return chunk_simple_gla


def _recurrence(shapes: Shapes, num_tokens: int) -> int:
    """A token adds to a state, and reads it: two products of its size per head."""
    return 4 * num_tokens * shapes.config.lightning_nh * shapes.config.lightning_head_dim**2


def _lightning_decode(shapes: Shapes, rows: int) -> Measurement:
    heads, dim = shapes.config.lightning_nh, shapes.config.lightning_head_dim
    num_states = rows * heads * dim * dim * STATE_BYTES

    def build() -> Calls:
        from sala.backends.torch.kernels import lightning

        q, k, v = shapes.projected(rows, heads, dim, 3)
        rest = (decay_slopes(heads, shapes.device), dim**-0.5)
        slots = torch.arange(rows, device=shapes.device)
        count = shapes.num_sets(num_states)
        states = [torch.randn(rows, heads, dim, dim, device=shapes.device) for _ in range(count)]
        ours = [partial(lightning.lightning_decode, q, k, v, state, slots, *rest) for state in states]
        peer = [partial(lightning_step, q, k, v, state, *rest) for state in states]
        return Calls(ours, peer, in_graph=True)

    num_bytes = 2 * num_states + 4 * rows * heads * dim * shapes.dtype.itemsize
    return Measurement("lightning decode", _rows(rows), _recurrence(shapes, rows), num_bytes, "reference", build)


# the choice of blocks


def num_windows(position: int, sparse: SparseConfig) -> tuple[int, int, int]:
    """What a query must look at: blocks that are not selected anyway, fine windows that touch them, coarse windows."""
    own = position // sparse.block_size
    if own < sparse.num_selected:
        return 0, 0, 0
    blocks = own - sparse.num_window_blocks - sparse.init_blocks
    stride = sparse.kernel_stride
    fine = blocks * (sparse.block_size // stride) + sparse.kernel_size // stride - 1
    return blocks, fine, (position + 1 - 4 * sparse.kernel_size) // (4 * stride) + 1


def _pooled_row(shapes: Shapes) -> int:
    """Bytes of the pooled keys that the last query must read."""
    _, fine, coarse = num_windows(shapes.context - 1, shapes.sparse)
    return (fine + coarse) * shapes.config.num_key_value_heads * shapes.config.head_dim * shapes.dtype.itemsize


def _product_of_windows(shapes: Shapes, count: int) -> int:
    return 2 * shapes.config.num_attention_heads * shapes.config.head_dim * count


def _query_bytes(shapes: Shapes, num_queries: int) -> int:
    return num_queries * shapes.config.num_attention_heads * shapes.config.head_dim * shapes.dtype.itemsize


def _selected_bytes(shapes: Shapes, num_queries: int) -> int:
    count = min(shapes.sparse.num_selected, shapes.num_blocks)
    return num_queries * shapes.config.num_key_value_heads * count * torch.int32.itemsize


def _chunk_windows(shapes: Shapes) -> tuple[int, int]:
    """Of all queries of the last chunk together: blocks to score, windows to look at."""
    found = [num_windows(at, shapes.sparse) for at in range(shapes.context - shapes.num_queries, shapes.context)]
    return sum(blocks for blocks, _, _ in found), sum(fine + coarse for _, fine, coarse in found)


class Pooled:
    """Pooled keys of `count` sequences, scattered over pages: k1, k2 [G, P, rows, D], tables [count, N]."""

    def __init__(self, shapes: Shapes, count: int) -> None:
        config, sparse = shapes.config, shapes.sparse
        self.shapes, self.before = shapes, sparse.kernel_size // sparse.kernel_stride - 1
        self.strides = (sparse.kernel_stride, 4 * sparse.kernel_stride)
        num_pages = count * shapes.num_blocks
        self.k1, self.k2 = (
            shapes.random(config.num_key_value_heads, num_pages, sparse.block_size // stride, config.head_dim)
            for stride in self.strides
        )
        self.tables = torch.randperm(num_pages, device=shapes.device).view(count, -1)

    def line(self, row: int) -> tuple[Tensor, Tensor]:
        """All windows of a sequence in order, those before its beginning too: [G, windows, D] each."""
        k1, k2 = (pool.index_select(1, self.tables[row]).flatten(1, 2) for pool in (self.k1, self.k2))
        return k1, k2

    def windows(self, row: int) -> tuple[Tensor, Tensor]:
        """Those that the reference takes: the whole ones."""
        k1, k2 = (
            keys[:, self.before : self.shapes.context // stride]
            for keys, stride in zip(self.line(row), self.strides, strict=True)
        )
        return k1, k2

    def select(self, q: Tensor, positions: Tensor, row: int) -> Tensor:
        """The reference, on pages."""
        shapes = self.shapes
        return select_blocks(q, *self.windows(row), positions, shapes.num_blocks, shapes.sparse, shapes.scale)


def _block_scores(shapes: Shapes) -> Measurement:
    n, groups, sparse = shapes.num_queries, shapes.config.num_key_value_heads, shapes.sparse
    start = shapes.context - n

    def build() -> Calls:
        from sala.backends.torch.kernels import block_scores as kernels
        from sala.backends.torch.kernels.attention import shared_memory

        pooled, q = Pooled(shapes, 1), shapes.queries(n)
        line, windows = pooled.line(0), pooled.windows(0)
        width = (shapes.context - 1) // sparse.block_size - sparse.num_window_blocks
        config = kernels.score_config(q.element_size(), q.shape[2], shared_memory(q.device))
        tile = min(kernels.queries_at_once(q, groups, width, sparse, config), n)
        scores = torch.empty(tile, groups, width, dtype=torch.float32, device=shapes.device)

        def ours() -> Tensor:
            for begin in range(0, n, tile):
                rows = q[begin : begin + tile]
                kernels.launch_scores(rows, *line, scores, start + begin, sparse, shapes.scale, config)
            return scores

        positions = torch.arange(start, shapes.context, device=shapes.device)
        return Calls([ours], [partial(_scores, shapes, q, *windows, positions)])

    num_scores, num_seen = _chunk_windows(shapes)
    num_bytes = _query_bytes(shapes, n) + _pooled_row(shapes) + groups * num_scores * STATE_BYTES
    flops = _product_of_windows(shapes, num_seen)
    return Measurement("block scores", _chunk_size(shapes), flops, num_bytes, "reference", build)


def _scores(shapes: Shapes, q: Tensor, k1: Tensor, k2: Tensor, positions: Tensor) -> Tensor:
    """The reference, in tiles of queries: [n, G, N]."""
    tile = max(1, tile_bytes(q) // (4 * q.shape[1] * (k1.shape[1] + k2.shape[1])))
    parts = []
    for rows, at in zip(q.split(tile), positions.split(tile), strict=True):
        windows = window_scores(rows, k1, k2, at, shapes.sparse, shapes.scale)
        parts.append(block_scores(windows, shapes.num_blocks, shapes.sparse))
    return torch.cat(parts)


def _chunk_size(shapes: Shapes) -> str:
    return f"{label(shapes.num_queries)} at {label(shapes.context)}"


def _select_prefill(shapes: Shapes) -> Measurement:
    n = shapes.num_queries
    start = shapes.context - n

    def build() -> Calls:
        from sala.backends.torch.kernels import block_selection

        pooled, q = Pooled(shapes, 1), shapes.queries(n)
        rest = (pooled.tables[0], start, shapes.sparse, shapes.scale)
        positions = torch.arange(start, shapes.context, device=shapes.device)
        ours = partial(block_selection.select_prefill, q, pooled.k1, pooled.k2, *rest)
        return Calls([ours], [partial(pooled.select, q, positions, 0)])

    flops = _product_of_windows(shapes, _chunk_windows(shapes)[1])
    num_bytes = _query_bytes(shapes, n) + _pooled_row(shapes) + _selected_bytes(shapes, n)
    return Measurement("choice", _chunk_size(shapes), flops, num_bytes, "reference", build)


def _select_decode(shapes: Shapes, rows: int) -> Measurement:
    num_bytes = rows * _pooled_row(shapes) + _query_bytes(shapes, rows) + _selected_bytes(shapes, rows)

    def build() -> Calls:
        from sala.backends.torch.kernels import block_selection

        count = shapes.num_sets(num_bytes)
        pooled, queries = Pooled(shapes, count * rows), [shapes.queries(rows) for _ in range(count)]
        tables = pooled.tables.int().view(count, rows, -1)
        lengths = torch.full((rows,), shapes.context, device=shapes.device)
        flags = torch.ones(rows, dtype=torch.bool, device=shapes.device)
        rest = (lengths, shapes.sparse, shapes.scale, shapes.num_blocks, flags)
        ours = [
            partial(block_selection.select_decode, q, pooled.k1, pooled.k2, table, *rest)
            for q, table in zip(queries, tables, strict=True)
        ]

        def peer(index: int) -> Tensor:
            parts = queries[index].split(1)
            return torch.cat([pooled.select(q, lengths[:1] - 1, index * rows + i) for i, q in enumerate(parts)])

        return Calls(ours, [partial(peer, index) for index in range(count)], in_graph=True)

    _, fine, coarse = num_windows(shapes.context - 1, shapes.sparse)
    flops = _product_of_windows(shapes, rows * (fine + coarse))
    return Measurement("choice", _decode_size(shapes, rows), flops, num_bytes, "reference", build)


def _decode_size(shapes: Shapes, rows: int) -> str:
    return f"{_rows(rows)} at {label(shapes.context)}"


def _top_blocks(shapes: Shapes) -> Measurement:
    """As many scores as a chunk at the end of the longest prompt has; every query may choose from all of them."""
    n, groups, sparse = shapes.num_queries, shapes.config.num_key_value_heads, shapes.sparse
    num_blocks = shapes.num_blocks
    end = num_blocks - 1 - sparse.num_window_blocks  # of the blocks that are not forced
    num_free = max(0, end - sparse.init_blocks)

    def build() -> Calls:
        from sala.backends.torch.kernels import top_blocks as kernels

        scores = torch.rand(n, groups, num_blocks, device=shapes.device)
        positions = torch.full((n,), num_blocks * sparse.block_size - 1, device=shapes.device)
        free = scores[:, :, sparse.init_blocks : end].contiguous()
        count = min(num_free, sparse.num_selected - sparse.num_window_blocks - sparse.init_blocks - 1)
        ours = partial(kernels.top_blocks, scores, positions, sparse)
        return Calls([ours], [partial(torch.topk, free, count, sorted=False)])

    num_bytes = n * groups * num_free * STATE_BYTES + _selected_bytes(shapes, n)
    size = f"{_rows(n)} of {label(num_blocks)}"
    return Measurement("top blocks", size, 0, num_bytes, "torch.topk", build)


# attention


def num_attended(begin: int, end: int, sparse: SparseConfig) -> int:
    """Keys that queries at these positions attend to by the sparse rule, counted together."""
    block, most = sparse.block_size, sparse.num_selected
    return sum(min(at // block, most - 1) * block + at % block + 1 for at in range(begin, end))


def _attention_flops(shapes: Shapes, count: int) -> int:
    """A product with a key and one with a value."""
    return 4 * shapes.config.num_attention_heads * shapes.config.head_dim * count


def _key_bytes(shapes: Shapes, count: int) -> int:
    """So many keys, and their values."""
    return 2 * count * shapes.config.num_key_value_heads * shapes.config.head_dim * shapes.dtype.itemsize


def random_selection(
    positions: Tensor, num_blocks: int, groups: int, sparse: SparseConfig, shared: float = 0.0
) -> Tensor:
    """[n, G, C] int32, ascending, -1 behind, with the forced blocks; of the free ones, runs of queries share a part."""
    block = torch.arange(num_blocks, device=positions.device)
    num_shared = round(shared * (sparse.num_selected - sparse.num_window_blocks - sparse.init_blocks - 1))
    parts = []
    for at in positions.split(CHOICE_ROWS):
        scores = torch.rand(len(at), groups, num_blocks, device=at.device)
        if num_shared > 0:
            common = torch.rand(len(at[::RUN]), groups, num_blocks, device=at.device)
            is_free = block < (at[::RUN] // sparse.block_size - sparse.num_window_blocks)[:, None]
            is_free &= block >= sparse.init_blocks
            common = common.masked_fill(~is_free[:, None], -1)
            best = common.topk(min(num_blocks, num_shared), -1).indices
            bonus = torch.zeros_like(common).scatter_(2, best, 2.0)
            scores += bonus.repeat_interleave(RUN, 0)[: len(at)]
        ids = top_blocks(scores, at, sparse)
        ids = ids.masked_fill(ids < 0, num_blocks).sort(-1).values
        parts.append(ids.masked_fill(ids == num_blocks, -1).int())
    return torch.cat(parts)


class Line:
    """Keys and values of one sequence: in order, k and v [G, n, D], and scattered over pages [G, P, B, D]."""

    def __init__(self, shapes: Shapes, length: int) -> None:
        config, block = shapes.config, shapes.sparse.block_size
        count = -(-length // block)
        self.table = torch.randperm(count, device=shapes.device)
        k, v = (shapes.random(config.num_key_value_heads, count * block, config.head_dim) for _ in range(2))
        self.lines = (k[:, :length].contiguous(), v[:, :length].contiguous())
        order = torch.argsort(self.table)
        self.k, self.v = (x.unflatten(1, (count, block)).index_select(1, order) for x in (k, v))

    def causal(self, q: Tensor, scale: float) -> Call:
        """torch's own attention, by the fastest of its ways: [1, H, n, D]."""
        q = q.transpose(0, 1)[None].contiguous()
        k, v = (x[None] for x in self.lines)
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return attend if q.device.type != "cuda" else partial(_by_the_fastest, attend)


def _by_the_fastest(attend: Call) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return attend()


def _sparse_attention(shapes: Shapes, shared: float) -> Measurement:
    """A whole prompt, since torch's causal attention knows no other."""
    length = shapes.context

    def build() -> Calls:
        from sala.backends.torch.kernels import attention

        line, q = Line(shapes, length), shapes.queries(length)
        positions = torch.arange(length, device=shapes.device)
        selected = random_selection(positions, len(line.table), line.k.shape[0], shapes.sparse, shared)
        ours = partial(attention.sparse_prefill, q, line.k, line.v, line.table, selected, 0, shapes.scale)
        return Calls([ours], [line.causal(q, shapes.scale)])

    num_bytes = 2 * _query_bytes(shapes, length) + _key_bytes(shapes, length) + _selected_bytes(shapes, length)
    flops = _attention_flops(shapes, num_attended(0, length, shapes.sparse))
    size = f"{label(length)}, {shared:.0%} shared"
    return Measurement("sparse attention", size, flops, num_bytes, "SDPA", build)


def _dense_attention(shapes: Shapes) -> Measurement:
    """The longest prompt that the model reads densely."""
    length = shapes.sparse.dense_len

    def build() -> Calls:
        from sala.backends.torch.kernels import attention

        line, q = Line(shapes, length), shapes.queries(length)
        ours = partial(attention.dense_prefill, q, line.k, line.v, line.table, 0, shapes.scale)
        return Calls([ours], [line.causal(q, shapes.scale)])

    num_bytes = 2 * _query_bytes(shapes, length) + _key_bytes(shapes, length)
    flops = _attention_flops(shapes, length * (length + 1) // 2)
    return Measurement("dense attention", label(length), flops, num_bytes, "SDPA", build)


def _decode_attention(shapes: Shapes, rows: int) -> Measurement:
    config, sparse = shapes.config, shapes.sparse
    groups, num_seen = config.num_key_value_heads, num_attended(shapes.context - 1, shapes.context, sparse)

    def build() -> Calls:
        from sala.backends.torch.kernels import decode_attention

        num_pages = max(shapes.num_blocks, 4 * shapes.rotated_bytes // _key_bytes(shapes, sparse.block_size))
        k, v = (shapes.random(groups, num_pages, sparse.block_size, config.head_dim) for _ in range(2))
        lengths = torch.full((rows,), shapes.context, device=shapes.device)
        flags = torch.ones(rows, dtype=torch.bool, device=shapes.device)
        max_dense = min(shapes.num_blocks, -(-sparse.dense_len // sparse.block_size))
        ours, peer = [], []
        for _ in range(shapes.num_sets(rows * _key_bytes(shapes, num_seen))):
            orders = [torch.randperm(num_pages, device=shapes.device)[: shapes.num_blocks] for _ in range(rows)]
            tables, q = torch.stack(orders), shapes.queries(rows)
            selected = random_selection(lengths - 1, shapes.num_blocks, groups, sparse)
            rest = (tables.int(), lengths, flags, selected, shapes.scale, max_dense)
            ours.append(partial(decode_attention.decode_attention, q, k, v, *rest))
            peer.append(partial(_attend_by_rows, q, k, v, tables, selected.long(), lengths - 1, shapes.scale))
        return Calls(ours, peer, in_graph=True)

    num_bytes = rows * _key_bytes(shapes, num_seen) + 2 * _query_bytes(shapes, rows)
    flops = _attention_flops(shapes, rows * num_seen)
    return Measurement("decode attention", _decode_size(shapes, rows), flops, num_bytes, "reference", build)


def _attend_by_rows(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, selected: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """The reference, which knows one sequence at a time."""
    rows = zip(q.split(1), tables, selected.split(1), positions.split(1), strict=True)
    return torch.cat([sparse_attention(row, k, v, table, ids, at, scale) for row, table, ids, at in rows])


def _append(shapes: Shapes) -> Measurement:
    """The first chunk of a prompt."""
    config, sparse, n = shapes.config, shapes.sparse, shapes.num_rows
    groups, dim = config.num_key_value_heads, config.head_dim
    num_windows = sum(
        max(0, (n - factor * sparse.kernel_size) // (factor * sparse.kernel_stride) + 1) for factor in (1, 4)
    )
    num_bytes = (4 * n + num_windows) * groups * dim * shapes.dtype.itemsize

    def build() -> Calls:
        from sala.backends.torch.kernels import pooling

        num_pages = -(-n // sparse.block_size)
        order = torch.randperm(num_pages)
        span = Span(0, n, 0, 0, 0, tuple(order.tolist()), shapes.device)
        positions = torch.arange(n, device=shapes.device)
        where = (order.to(shapes.device)[None], positions[:1], torch.zeros_like(positions), positions, sparse)

        def ours(pages: KVPages, k: Tensor, v: Tensor) -> KVPages:
            pooling.append(k, v, pages.k, pages.v, pages.k1, pages.k2, *where)
            return pages

        def peer(pages: KVPages, k: Tensor, v: Tensor) -> KVPages:
            pages.append(span, k, v)
            return pages

        calls: tuple[list[Call], list[Call]] = ([], [])
        for _ in range(shapes.num_sets(num_bytes)):
            k, v = shapes.projected(n, groups, dim, 2)
            for some, append in zip(calls, (ours, peer), strict=True):
                pages = KVPages(num_pages, config, shapes.dtype, shapes.device)
                for pool in (pages.k, pages.v, pages.k1, pages.k2):
                    pool.zero_()
                some.append(partial(append, pages, k, v))
        return Calls(*calls, in_graph=True)

    return Measurement("append and pool", f"{label(n)} tokens", 0, num_bytes, "reference", build)


# products of a decode step


def _output(shapes: Shapes, rows: int) -> Measurement:
    """The output projection and the norm behind it, beside the library's product and our pass."""
    config, hidden = shapes.config, shapes.config.hidden_size
    width = config.num_attention_heads * config.head_dim
    num_bytes = hidden * width * shapes.dtype.itemsize

    def build() -> Calls:
        from sala.backends.torch.kernels import fused, linear

        x, o, norm = shapes.random(rows, hidden), shapes.random(rows, width), shapes.random(hidden)
        rest = (config.residual_scale, norm, config.rms_norm_eps)
        weights = [shapes.random(hidden, width) for _ in range(shapes.num_sets(num_bytes))]
        ours = [lambda w=w: linear.add_partials_rms_norm(x, linear.split_linear(o, w), *rest) for w in weights]
        peer = [lambda w=w: fused.add_rms_norm(x, F.linear(o, w), *rest) for w in weights]
        return Calls(ours, peer, in_graph=True)

    flops = 2 * rows * hidden * width
    return Measurement("output projection and norm", _rows(rows), flops, num_bytes, "F.linear", build)


def _mlp(shapes: Shapes, rows: int) -> Measurement:
    config, hidden, wide = shapes.config, shapes.config.hidden_size, shapes.config.intermediate_size
    num_bytes = 3 * hidden * wide * shapes.dtype.itemsize

    def build() -> Calls:
        from sala.backends.torch.kernels import fused, linear

        x, normed, norm = shapes.random(rows, hidden), shapes.random(rows, hidden), shapes.random(hidden)
        rest = (config.residual_scale, norm, config.rms_norm_eps)

        def ours(gate_up: Tensor, down: Tensor) -> Any:
            partials = linear.split_linear(linear.linear_silu_mul(normed, gate_up), down)
            return linear.add_partials_rms_norm(x, partials, *rest)

        def peer(gate_up: Tensor, down: Tensor) -> Any:
            return fused.add_rms_norm(x, F.linear(fused.silu_mul(F.linear(normed, gate_up)), down), *rest)

        sets = [
            (shapes.random(2 * wide, hidden) * hidden**-0.5, shapes.random(hidden, wide) * wide**-0.5)
            for _ in range(shapes.num_sets(num_bytes))
        ]
        return Calls([partial(ours, *one) for one in sets], [partial(peer, *one) for one in sets], in_graph=True)

    flops = 6 * rows * hidden * wide
    return Measurement("MLP and norm", _rows(rows), flops, num_bytes, "F.linear", build)


# passes over rows


def _pass(shapes: Shapes, name: str, num_bytes: int, build: Callable[[], Call]) -> Measurement:
    """One pass over memory, beside a copy that moves as much."""
    return Measurement(
        name,
        _rows(shapes.num_rows),
        0,
        num_bytes,
        "copy",
        lambda: Calls([build()], [copying(num_bytes, shapes.device)]),
    )


def _add_norm(shapes: Shapes) -> Measurement:
    rows, width = shapes.num_rows, shapes.config.hidden_size

    def build() -> Call:
        from sala.backends.torch.kernels import fused

        x, delta, weight = shapes.random(rows, width), shapes.random(rows, width), shapes.random(width)
        config = shapes.config
        return partial(fused.add_rms_norm, x, delta, config.residual_scale, weight, config.rms_norm_eps)

    return _pass(shapes, "add and norm", (4 * rows + 1) * width * shapes.dtype.itemsize, build)


def _norm_rope(shapes: Shapes) -> Measurement:
    """Queries and keys of a lightning layer."""
    config, rows = shapes.config, shapes.num_rows
    heads, dim = config.lightning_nh, config.lightning_head_dim

    def build() -> Call:
        from sala.backends.torch.kernels import fused

        q, k, _ = shapes.projected(rows, heads, dim, 3)
        angles = rope_angles(torch.arange(rows, device=shapes.device), dim, config.rope_theta)
        weights = (shapes.random(dim), shapes.random(dim))
        return partial(fused.qk_norm_rope, q, k, *weights, config.rms_norm_eps, *angles, None)

    num_bytes = (4 * rows * heads + 2) * dim * shapes.dtype.itemsize + 2 * rows * dim * torch.float32.itemsize
    return _pass(shapes, "norm and rope of q, k", num_bytes, build)


def _norm_gate(shapes: Shapes) -> Measurement:
    """The output of a lightning layer."""
    rows, width = shapes.num_rows, shapes.config.lightning_nh * shapes.config.lightning_head_dim

    def build() -> Call:
        from sala.backends.torch.kernels import fused

        o, weight, gate = shapes.random(rows, width), shapes.random(width), shapes.random(rows, width)
        return partial(fused.norm_gate, o, weight, gate, shapes.config.rms_norm_eps)

    return _pass(shapes, "norm and gate", (3 * rows + 1) * width * shapes.dtype.itemsize, build)


def _silu_mul(shapes: Shapes) -> Measurement:
    rows, width = shapes.num_rows, shapes.config.intermediate_size

    def build() -> Call:
        from sala.backends.torch.kernels import fused

        return partial(fused.silu_mul, shapes.random(rows, 2 * width))

    return _pass(shapes, "silu and product", 3 * rows * width * shapes.dtype.itemsize, build)
