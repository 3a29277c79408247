# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Cases of the sparse layers: block selection, attention over selected and over all blocks, writing of the KV cache."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sala.backends.torch import kernels
from sala.backends.torch.cache import KVPages, Span
from sala.backends.torch.cases.shapes import (
    STATE_BYTES,
    Call,
    KernelCall,
    KernelCase,
    Shapes,
    relative_error,
    row_count,
    share_of_others,
)
from sala.backends.torch.host_memory import HostMemory
from sala.backends.torch.hot_pages import HotPages
from sala.backends.torch.ops import hot_pages as hot_pages_reference
from sala.backends.torch.ops import sparse as reference
from sala.backends.torch.ops.dense import dense_attention
from sala.config import SparseConfig
from sala.options.schema import length_label

RUN = 64  # neighbouring queries that share free blocks
SELECTED_AT_ONCE = 4096  # queries whose random selection is made at a time, to bound memory


def attention_cases(shapes: Shapes) -> Iterator[KernelCase]:
    yield _block_scores(shapes)
    yield _select_prefill(shapes)
    yield from (_select_decode(shapes, rows) for rows in shapes.batches)
    yield _top_blocks(shapes)
    yield from (_prefill_attention(shapes, shared) for shared in (*shapes.shared, None))
    yield from (_decode_attention(shapes, rows) for rows in shapes.batches)
    yield from (_fetch(shapes, rows) for rows in shapes.batches)
    yield _append(shapes)


# block selection


def num_windows(position: int, sparse: SparseConfig) -> tuple[int, int, int]:
    """Return what a query must score: blocks that are not forced, fine windows that touch them, coarse windows."""
    own = position // sparse.block_size
    if own < sparse.num_selected:
        return 0, 0, 0
    blocks = own - sparse.num_window_blocks - sparse.init_blocks
    stride = sparse.kernel_stride
    fine = blocks * (sparse.block_size // stride) + sparse.kernel_size // stride - 1
    return blocks, fine, (position + 1 - 4 * sparse.kernel_size) // (4 * stride) + 1


def _pooled_bytes(shapes: Shapes) -> int:
    """Return the bytes of the pooled keys that the last query must read."""
    _, fine, coarse = num_windows(shapes.context - 1, shapes.sparse)
    return (fine + coarse) * shapes.config.num_key_value_heads * shapes.config.head_dim * shapes.dtype.itemsize


def _flops(shapes: Shapes, count: int) -> int:
    """Return the FLOPs of the products of every query head with `count` vectors."""
    return 2 * shapes.config.num_attention_heads * shapes.config.head_dim * count


def _query_bytes(shapes: Shapes, num_queries: int) -> int:
    return num_queries * shapes.config.num_attention_heads * shapes.config.head_dim * shapes.dtype.itemsize


def _selected_bytes(shapes: Shapes, num_queries: int) -> int:
    count = min(shapes.sparse.num_selected, shapes.num_blocks)
    return num_queries * shapes.config.num_key_value_heads * count * torch.int32.itemsize


def _chunk_windows(shapes: Shapes) -> tuple[int, int]:
    """Return the blocks to score and the windows to read, of all queries of the last chunk together."""
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
        """Return all windows of a sequence in order, including those that start before it: [G, windows, D] each."""
        k1, k2 = (pool.index_select(1, self.tables[row]).flatten(1, 2) for pool in (self.k1, self.k2))
        return k1, k2

    def windows(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the complete windows, which the reference takes."""
        k1, k2 = (
            keys[:, self.before : self.shapes.context // stride]
            for keys, stride in zip(self.line(row), self.strides, strict=True)
        )
        return k1, k2

    def select(self, q: Tensor, positions: Tensor, row: int) -> Tensor:
        """Compute the reference on pages."""
        shapes = self.shapes
        return reference.select_blocks(q, *self.windows(row), positions, shapes.num_blocks, shapes.sparse, shapes.scale)

    def select_last(self, q: Tensor) -> Tensor:
        """Compute the reference for the last token of each sequence."""
        last = self.shapes.arange(self.shapes.context)[-1:]
        return torch.cat([self.select(part, last, row) for row, part in enumerate(q.split(1))])


def _block_scores(shapes: Shapes) -> KernelCase:
    n, groups, sparse = shapes.num_queries, shapes.config.num_key_value_heads, shapes.sparse
    start = shapes.context - n
    positions = shapes.arange(start, shapes.context)

    def works() -> list[KernelCall]:
        pooled, q = Pooled(shapes, 1), shapes.queries(n)
        line, windows = pooled.line(0), pooled.windows(0)
        width = (shapes.context - 1) // sparse.block_size - sparse.num_window_blocks
        config = kernels.block_scores.score_config(q.element_size(), q.shape[2], kernels.launch.shared_memory(q.device))
        tile = min(kernels.block_scores.queries_at_once(q, groups, width, sparse, config), n)
        scores = torch.zeros(tile, groups, width, dtype=torch.float32, device=shapes.device)

        def kernel() -> Tensor:
            for begin in range(0, n, tile):
                rows = q[begin : begin + tile]
                kernels.block_scores.launch_scores(rows, *line, scores, start + begin, sparse, shapes.scale, config)
            return scores

        return [KernelCall(kernel, partial(_scores, shapes, q, *windows, positions))]

    def measure(found: Tensor, wanted: Tensor) -> float:
        """Compare only blocks that are forced on no query."""
        first = (start // sparse.block_size) - sparse.num_window_blocks
        free = slice(sparse.init_blocks, max(first, sparse.init_blocks + 1))
        return relative_error(found[:n, :, free], wanted[: len(found), :, free])

    num_scores, num_seen = _chunk_windows(shapes)
    num_bytes = _query_bytes(shapes, n) + _pooled_bytes(shapes) + groups * num_scores * STATE_BYTES
    flops = _flops(shapes, num_seen)
    return KernelCase("block scores", _chunk_size(shapes), works, flops, num_bytes, measure=measure)


def _scores(shapes: Shapes, q: Tensor, k1: Tensor, k2: Tensor, positions: Tensor) -> Tensor:
    """Compute the reference in tiles of queries: [n, G, N]."""
    tile = max(1, reference.tile_bytes(q) // (4 * q.shape[1] * (k1.shape[1] + k2.shape[1])))
    parts = []
    for rows, at in zip(q.split(tile), positions.split(tile), strict=True):
        windows = reference.window_scores(rows, k1, k2, at, shapes.sparse, shapes.scale)
        parts.append(reference.block_scores(windows, shapes.num_blocks, shapes.sparse))
    return torch.cat(parts)


def _chunk_size(shapes: Shapes) -> str:
    return f"{length_label(shapes.num_queries)} at {length_label(shapes.context)}"


def _select_prefill(shapes: Shapes) -> KernelCase:
    n = shapes.num_queries
    start = shapes.context - n

    def works() -> list[KernelCall]:
        pooled, q = Pooled(shapes, 1), shapes.queries(n)
        rest = (pooled.tables[0], start, shapes.sparse, shapes.scale)
        kernel = partial(kernels.block_selection.select_prefill, q, pooled.k1, pooled.k2, *rest)
        return [KernelCall(kernel, partial(pooled.select, q, shapes.arange(start, shapes.context), 0))]

    flops = _flops(shapes, _chunk_windows(shapes)[1])
    num_bytes = _query_bytes(shapes, n) + _pooled_bytes(shapes) + _selected_bytes(shapes, n)
    return KernelCase("block selection", _chunk_size(shapes), works, flops, num_bytes, measure=share_of_others)


def _select_decode(shapes: Shapes, rows: int) -> KernelCase:
    def works() -> Iterator[KernelCall]:
        lengths, flags = _decode_rows(shapes, rows)
        while True:
            pooled, q = Pooled(shapes, rows), shapes.queries(rows)
            rest = (pooled.tables.int(), lengths, shapes.sparse, shapes.scale, shapes.num_blocks, flags)
            kernel = partial(kernels.block_selection.select_decode, q, pooled.k1, pooled.k2, *rest)
            yield KernelCall(kernel, partial(pooled.select_last, q))

    _, fine, coarse = num_windows(shapes.context - 1, shapes.sparse)
    num_bytes = rows * _pooled_bytes(shapes) + _query_bytes(shapes, rows) + _selected_bytes(shapes, rows)
    flops, sets = _flops(shapes, rows * (fine + coarse)), shapes.num_sets(num_bytes)
    size = _decode_size(shapes, rows)
    return KernelCase("decode block selection", size, works, flops, num_bytes, num_sets=sets, measure=share_of_others)


def _decode_rows(shapes: Shapes, rows: int) -> tuple[Tensor, Tensor]:
    """Return the lengths of a decode step's rows, and that all of them are sparse."""
    lengths = torch.full((rows,), shapes.context, device=shapes.device)
    return lengths, torch.ones(rows, dtype=torch.bool, device=shapes.device)


def _decode_size(shapes: Shapes, rows: int) -> str:
    return f"{row_count(rows)} at {length_label(shapes.context)}"


def _top_blocks(shapes: Shapes) -> KernelCase:
    """Take as many scores as a chunk at the end of the longest prompt has; every query may select from all of them."""
    n, groups, sparse = shapes.num_queries, shapes.config.num_key_value_heads, shapes.sparse
    num_blocks = shapes.num_blocks
    end = num_blocks - 1 - sparse.num_window_blocks  # of the blocks that are not forced
    num_free = max(0, end - sparse.init_blocks)

    def works() -> list[KernelCall]:
        scores = torch.rand(n, groups, num_blocks, device=shapes.device)
        positions = torch.full((n,), num_blocks * sparse.block_size - 1, device=shapes.device)
        free = scores[:, :, sparse.init_blocks : end].contiguous()
        count = min(num_free, sparse.num_selected - sparse.num_window_blocks - sparse.init_blocks - 1)
        peer = partial(torch.topk, free, count, sorted=False)
        kernel = kernels.top_blocks.top_blocks
        return [KernelCall.of(kernel, reference.top_blocks, scores, positions, sparse, peer=peer)]

    num_bytes = n * groups * num_free * STATE_BYTES + _selected_bytes(shapes, n)
    size = f"{row_count(n)} of {length_label(num_blocks)}"
    return KernelCase("top blocks", size, works, 0, num_bytes, "torch.topk", measure=share_of_others)


# attention


def num_attended(begin: int, end: int, sparse: SparseConfig) -> int:
    """Count the keys that queries at these positions attend to by the sparse rule, all together."""
    block, most = sparse.block_size, sparse.num_selected
    return sum(min(at // block, most - 1) * block + at % block + 1 for at in range(begin, end))


def _key_bytes(shapes: Shapes, count: int) -> int:
    """Return the bytes of `count` keys and their values."""
    return 2 * count * shapes.config.num_key_value_heads * shapes.config.head_dim * shapes.dtype.itemsize


def random_selection(
    positions: Tensor, num_blocks: int, groups: int, sparse: SparseConfig, shared: float = 0.0
) -> Tensor:
    """Return [n, G, C] int32, ascending, -1 behind, with the forced blocks; runs of queries share part of the free."""
    block = torch.arange(num_blocks, device=positions.device)
    num_shared = round(shared * (sparse.num_selected - sparse.num_window_blocks - sparse.init_blocks - 1))
    parts = []
    for at in positions.split(SELECTED_AT_ONCE):
        scores = torch.rand(len(at), groups, num_blocks, device=at.device)
        if num_shared > 0:
            common = torch.rand(len(at[::RUN]), groups, num_blocks, device=at.device)
            is_free = block < (at[::RUN] // sparse.block_size - sparse.num_window_blocks)[:, None]
            is_free &= block >= sparse.init_blocks
            common = common.masked_fill(~is_free[:, None], -1)
            best = common.topk(min(num_blocks, num_shared), -1).indices
            bonus = torch.zeros_like(common).scatter_(2, best, 2.0)
            scores += bonus.repeat_interleave(RUN, 0)[: len(at)]
        ids = reference.top_blocks(scores, at, sparse)
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
        """torch's own attention by its fastest backend: [1, H, n, D]."""
        q = q.transpose(0, 1)[None].contiguous()
        k, v = (x[None] for x in self.lines)
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        if q.device.type != "cuda":
            return attend
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        return sdpa_kernel(backends, set_priority=True)(attend)


def _prefill_attention(shapes: Shapes, shared: float | None) -> KernelCase:
    """Attend with a whole prompt, the longest or a dense one: torch's causal attention supports nothing else."""
    is_sparse = shared is not None
    length = shapes.context if is_sparse else shapes.sparse.dense_len

    def works() -> list[KernelCall]:
        line, q, positions, scale = Line(shapes, length), shapes.queries(length), shapes.arange(length), shapes.scale
        selected, twin = None, partial(dense_attention, q, *line.lines, 0, scale)
        if shared is not None:
            selected = random_selection(positions, len(line.table), line.k.shape[0], shapes.sparse, shared)
            pages = (line.k, line.v, line.table, selected.long())
            twin = partial(reference.sparse_attention, q, *pages, positions, scale)
        kernel = partial(kernels.attention.prefill, q, line.k, line.v, line.table, selected, 0, scale)
        return [KernelCall(kernel, twin, line.causal(q, scale))]

    num_bytes = 2 * _query_bytes(shapes, length) + _key_bytes(shapes, length)
    num_seen = length * (length + 1) // 2
    name, size = "dense attention", length_label(length)
    if is_sparse:
        num_bytes += _selected_bytes(shapes, length)
        num_seen = num_attended(0, length, shapes.sparse)
        name, size = "sparse attention", f"{size}, {shared:.0%} shared"
    return KernelCase(name, size, works, _flops(shapes, 2 * num_seen), num_bytes, "SDPA")


def _decode_attention(shapes: Shapes, rows: int) -> KernelCase:
    config, sparse = shapes.config, shapes.sparse
    groups, num_seen = config.num_key_value_heads, num_attended(shapes.context - 1, shapes.context, sparse)

    def works() -> Iterator[KernelCall]:
        num_pages = max(shapes.num_blocks, 4 * shapes.rotated_bytes // _key_bytes(shapes, sparse.block_size))
        k, v = (shapes.random(groups, num_pages, sparse.block_size, config.head_dim) for _ in range(2))
        lengths, flags = _decode_rows(shapes, rows)
        max_dense = min(shapes.num_blocks, -(-sparse.dense_len // sparse.block_size))
        while True:
            orders = [torch.randperm(num_pages, device=shapes.device)[: shapes.num_blocks] for _ in range(rows)]
            tables, q = torch.stack(orders), shapes.queries(rows)
            selected = random_selection(lengths - 1, shapes.num_blocks, groups, sparse)
            rest = (tables.int(), lengths, flags, selected, shapes.scale, max_dense)
            kernel = partial(kernels.decode_attention.decode_attention, q, k, v, *rest)
            yield KernelCall(
                kernel, partial(_attend_by_rows, q, k, v, tables, selected.long(), lengths - 1, shapes.scale)
            )

    read_bytes, size = rows * _key_bytes(shapes, num_seen), _decode_size(shapes, rows)
    num_bytes, sets = read_bytes + 2 * _query_bytes(shapes, rows), shapes.num_sets(read_bytes)
    return KernelCase("decode attention", size, works, _flops(shapes, 2 * rows * num_seen), num_bytes, num_sets=sets)


def _attend_by_rows(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, selected: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Compute the reference, which takes one sequence at a time."""
    rows = zip(q.split(1), tables, selected.split(1), positions.split(1), strict=True)
    return torch.cat([reference.sparse_attention(row, k, v, table, ids, at, scale) for row, table, ids, at in rows])


def _fetch(shapes: Shapes, rows: int) -> KernelCase:
    """Two steps whose blocks come into a hot pool that is too small for both; what it holds then, and where."""
    config, sparse = shapes.config, shapes.sparse
    groups, num_blocks = config.num_key_value_heads, shapes.num_blocks

    def works() -> Iterator[KernelCall]:
        shape = (groups, num_blocks, sparse.block_size, config.head_dim)
        numbers = [shapes.random(*shape) for _ in range(2)]
        memory = HostMemory(shapes.device, sum(pool.nbytes for pool in numbers), 2)
        k, v = (memory.empty(shape, shapes.dtype).copy_(pool) for pool in numbers)
        lengths, flags = _decode_rows(shapes, rows)
        steps = []
        for _ in range(2):
            tables = torch.stack([torch.randperm(num_blocks, device=shapes.device) for _ in range(rows)])
            steps.append((tables.int(), lengths, flags, random_selection(lengths - 1, num_blocks, groups, sparse)))

        def fetch(fetch_step: Callable[..., None]) -> list[Tensor]:
            hot = HotPages(k, None, sparse.num_selected + 8, shapes.device)
            for pool in (hot.k, hot.v):
                pool.zero_()
            for step in steps:
                hot.clock += 1
                fetch_step(hot, k, v, None, *step, 0)
            return [hot.pages, hot.k, hot.v]

        while True:
            yield KernelCall(partial(fetch, kernels.hot_pages.fetch), partial(fetch, hot_pages_reference.fetch))

    return KernelCase("hot pool", _decode_size(shapes, rows), works)


def _append(shapes: Shapes) -> KernelCase:
    """Append the first chunk of a prompt."""
    config, sparse, n = shapes.config, shapes.sparse, shapes.num_rows
    groups, dim = config.num_key_value_heads, config.head_dim
    num_pooled = sum(
        max(0, (n - factor * sparse.kernel_size) // (factor * sparse.kernel_stride) + 1) for factor in (1, 4)
    )
    num_bytes = (4 * n + num_pooled) * groups * dim * shapes.dtype.itemsize

    def works() -> Iterator[KernelCall]:
        num_pages = -(-n // sparse.block_size)
        order = torch.randperm(num_pages)
        span = Span(0, n, 0, 0, 0, tuple(order.tolist()), shapes.device)
        positions = shapes.arange(n)
        where = (order.to(shapes.device)[None], positions[:1], torch.zeros_like(positions), positions, sparse)

        def kernel(pages: KVPages, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            kernels.pooling.append(k, v, *pages.pools, *where)
            return pages.pools

        def twin(pages: KVPages, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            pages.append(span, k, v)
            return pages.pools

        while True:
            k, v = shapes.projected(n, groups, dim, 2)
            ours, theirs = (KVPages(num_pages, config, shapes.dtype, shapes.device) for _ in range(2))
            for pool in (*ours.pools, *theirs.pools):
                pool.zero_()
            yield KernelCall(partial(kernel, ours, k, v), partial(twin, theirs, k, v))

    size = f"{length_label(n)} tokens"
    return KernelCase("append and pool", size, works, 0, num_bytes, num_sets=shapes.num_sets(num_bytes))
