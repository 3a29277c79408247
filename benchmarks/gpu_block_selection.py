"""Pooling and choice of blocks on a GPU: right at ugly sizes, and how far from the floor at the 9B shapes.

    PYTHONPATH=. python benchmarks/gpu_block_selection.py [PART …]

writes benchmarks/gpu_block_selection.txt, or --output FILE; parts alone are only printed.

Floors: bytes at 4.3 TB/s or FLOPs at 790 TFLOP/s. Peers: the reference ops where they fit, torch.topk.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.outputs import measure_text
from sala.backends.torch.cache import KVPages
from sala.backends.torch.kernels import block_scores, block_selection, pooling, top_blocks
from sala.backends.torch.kernels.block_scores import ScoreConfig
from sala.backends.torch.kernels.launch import Config, shared_memory
from sala.backends.torch.ops import sparse as ops
from sala.config import SparseConfig

SPARSE = SparseConfig()
SMALL = SparseConfig(window_size=1024, topk=48, dense_len=4096)
HEADS, GROUPS, DIM = 32, 2, 128
SCALE = DIM**-0.5
DEVICE = torch.device("cuda")
BYTES, FLOPS = 4.3e12, 790e12


def top(size: int, segments: int, num_warps: int, part: int = 0) -> Config:
    return Config({"SIZE": size, "SEGMENTS": segments, "SLICE": part}, num_warps)


SCORE_CONFIGS = [
    ScoreConfig(64, 128, 64, 4, 2, 3),
    ScoreConfig(64, 128, 64, 4, 3, 2),
    ScoreConfig(128, 128, 64, 4, 2, 2),
    ScoreConfig(128, 128, 64, 8, 2, 2),
    ScoreConfig(128, 256, 64, 8, 3, 1),
]
TOP_CONFIGS = {
    2048: [
        top(2048, 0, 4),
        top(2048, 0, 1),
        top(2048, 256, 4),
    ],
    16384: [
        top(2048, 1024, 4),
        top(4096, 1024, 8),
        top(2048, 512, 4),
        top(2048, 0, 4, 512),
        top(1024, 0, 2, 1024),
    ],
}


def timed(call: Callable[..., object], *args: Any, rep: int = 50) -> float:
    """Median milliseconds."""
    return float(triton.testing.do_bench(lambda: call(*args), warmup=15, rep=rep, return_mode="median"))


def graphed(call: Callable[..., object], *args: Any, count: int = 20) -> float:
    """Microseconds per call inside a captured graph: what a decode step pays."""
    call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call(*args)
    return timed(graph.replay) / count * 1e3


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def pages_of(groups: int, dim: int, num_pages: int, sparse: SparseConfig, dtype: torch.dtype) -> KVPages:
    config: Any = SimpleNamespace(sparse_config=sparse, num_key_value_heads=groups, head_dim=dim)
    pages = KVPages(num_pages, config, dtype, DEVICE)
    for pool in (pages.k, pages.v, pages.k1, pages.k2):
        pool.fill_(float("nan"))
    return pages


def pooled_pages(keys: Tensor, sparse: SparseConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [n, G, D] → k1, k2 pages scattered among pages of NaN, and the table."""
    n, groups, dim = keys.shape
    num_blocks = -(-n // sparse.block_size)
    table = torch.randperm(num_blocks + 5, device=DEVICE)[:num_blocks]
    pools = []
    for factor in (1, 4):
        per_page = sparse.block_size // (factor * sparse.kernel_stride)
        rows = keys.new_full((groups, num_blocks * per_page, dim), float("nan"))
        first = sparse.kernel_size // sparse.kernel_stride - 1
        for group in range(groups):
            mean = ops.pool_keys(keys[:, group][None], factor * sparse.kernel_size, factor * sparse.kernel_stride)[0]
            rows[group, first : first + len(mean)] = mean
        pool = keys.new_full((groups, num_blocks + 5, per_page, dim), float("nan"))
        pool[:, table] = rows.unflatten(1, (num_blocks, per_page))
        pools.append(pool)
    return pools[0], pools[1], table


def random_pages(num_tokens: int, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled pages of `rows` sequences with random numbers at the 9B shapes, for timing."""
    num_blocks = -(-num_tokens // 64)
    pools = [torch.randn(GROUPS, rows * num_blocks, per, DIM, device=DEVICE, dtype=torch.bfloat16) for per in (4, 1)]
    tables = torch.randperm(rows * num_blocks, device=DEVICE).view(rows, num_blocks).int()
    return pools[0], pools[1], tables


def agreement(got: Tensor, want: Tensor) -> str:
    """Share of equal rows and of shared blocks; both ascending or not."""
    got, want = got.long().sort(-1).values, want.long().sort(-1).values
    same = (got == want).all(-1)
    shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(got[~same][:50], want[~same][:50], strict=True)]
    text = f"equal rows {same.float().mean().item():.4f}"
    return text + (f", the others share {min(shared)} of {got.shape[-1]} at least" if shared else "")


def check_append() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for counts in ((1, 1), (63, 64), (65, 1), (1000, 8191), (8192, 127), (1, 100_003)):
            ours, theirs = (pages_of(GROUPS, DIM, 1800, SPARSE, dtype) for _ in range(2))
            tables = torch.randperm(1800, device=DEVICE).view(2, 900)
            if max(counts) > 900 * 64:
                tables = torch.randperm(1800, device=DEVICE)[None, :1700].expand(2, -1).contiguous()
                counts = (0, counts[1])
            starts = [0, 0]
            worst = 0.0
            for lengths in (counts, (1, 1), (15, 130), (64, 1)):
                total = sum(lengths)
                if counts[0] == 0:
                    lengths, total = (0, lengths[1]), lengths[1]
                k, v = (torch.randn(total, GROUPS, DIM, device=DEVICE, dtype=dtype) for _ in range(2))
                row_of = torch.tensor([0] * lengths[0] + [1] * lengths[1], device=DEVICE)
                spans = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
                positions = torch.tensor([p for span in spans for p in span], device=DEVICE)
                begins = torch.tensor(starts, device=DEVICE)
                pooling.append(k, v, ours.k, ours.v, ours.k1, ours.k2, tables, begins, row_of, positions, SPARSE)
                begin = 0
                for row, length in enumerate(lengths):
                    end = starts[row] + length
                    span: Any = SimpleNamespace(start=starts[row], end=end, table=tables[row], first_page=None)
                    if length:
                        theirs.append(span, k[begin : begin + length], v[begin : begin + length])
                    begin += length
                    starts[row] = end
                assert torch.equal(ours.k.nan_to_num(7), theirs.k.nan_to_num(7)), "keys"
                assert torch.equal(ours.v.nan_to_num(7), theirs.v.nan_to_num(7)), "values"
                for a, b in ((ours.k1, theirs.k1), (ours.k2, theirs.k2)):
                    assert torch.equal(a.isnan(), b.isnan()), "which rows are written"
                    worst = max(worst, error(a.nan_to_num(0), b.nan_to_num(0)))
            print(f"append {str(dtype)[6:]:9} {counts}: pooled keys off by {worst:.1e}")


def check_prefill() -> None:
    shapes = [(HEADS, GROUPS, DIM, SPARSE), (9, 3, 64, SMALL)]
    for dtype in (torch.float32, torch.bfloat16):
        for heads, groups, dim, sparse in shapes:
            for n, start in ((1, 0), (1000, 5501), (63, 8128), (1, 100_002), (65, 99_937)):
                q = torch.randn(n, heads, dim, device=DEVICE, dtype=dtype)
                keys = torch.randn(start + n, groups, dim, device=DEVICE, dtype=dtype)
                k1, k2, table = pooled_pages(keys, sparse)
                positions = torch.arange(start, start + n, device=DEVICE)
                got = block_selection.select_prefill(q, k1, k2, table, start, sparse, dim**-0.5)
                assert got.max() < len(table)
                rows = keys.transpose(0, 1)
                fine = ops.pool_keys(rows, sparse.kernel_size, sparse.kernel_stride)
                coarse = ops.pool_keys(rows, 4 * sparse.kernel_size, 4 * sparse.kernel_stride)
                want = ops.select_blocks(q, fine, coarse, positions, len(table), sparse, dim**-0.5)
                lengths = (positions + 1).int()
                few = slice(max(0, n - 33), n)
                tables = table[None].expand(len(lengths[few]), -1)
                one = block_selection.select_decode(
                    q[few], k1, k2, tables.int().contiguous(), lengths[few], sparse, dim**-0.5, len(table)
                )
                kind = f"{str(dtype)[6:]:9} {heads}/{groups} n {n} start {start}"
                print(f"{kind}: {agreement(got, want)}; decode against prefill: {agreement(one, got[few])}")


def check_scores() -> None:
    """Block scores themselves, from pooled keys of 20000 tokens, in fp64 as the judge."""
    for dtype in (torch.float32, torch.bfloat16):
        n, start = 40, 19_960
        q = torch.randn(n, HEADS, DIM, device=DEVICE, dtype=dtype)
        keys = torch.randn(start + n, GROUPS, DIM, device=DEVICE, dtype=dtype)
        k1, k2, table = pooled_pages(keys, SPARSE)
        pools = [pool.index_select(1, table).flatten(1, 2) for pool in (k1, k2)]
        positions = torch.arange(start, start + n, device=DEVICE)
        windows = ops.window_scores(q, pools[0][:, 1:], pools[1][:, 1:], positions, SPARSE, SCALE)
        want = ops.block_scores(windows, len(table), SPARSE)
        high = start // 64 - 32
        configs = [block_scores.score_config(dtype.itemsize, DIM, shared_memory(DEVICE))]
        for config in configs + (SCORE_CONFIGS if dtype == torch.bfloat16 else []):
            out = torch.full((n, GROUPS, len(table)), float("nan"), device=DEVICE)
            block_scores.launch_scores(q, *pools, out, start, SPARSE, SCALE, config)
            alone = torch.full((1, GROUPS, len(table)), float("nan"), device=DEVICE)
            block_scores.launch_scores(q[17:18], *pools, alone, start + 17, SPARSE, SCALE, config)
            same = torch.equal(alone[0, :, 1:high], out[17, :, 1:high])
            off = error(out[:, :, 1:high], want[:, :, 1:high])
            print(f"scores {str(dtype)[6:]:9} {tuple(config)}: off by {off:.1e}; alone bit for bit: {same}")


def check_top() -> None:
    for num_blocks in (97, 130, 2000, 2048, 4097, 16384, 32768):
        n = 64
        scores = torch.rand(n, GROUPS, num_blocks, device=DEVICE)
        scores[1::4] = (scores[1::4] * 20).round()
        scores[2::4] = 0
        scores[3::4, :, 1:] = torch.maximum(scores[3::4, :, 1:], scores[3::4, :, :-1])  # neighbours share
        positions = torch.randint(0, num_blocks * 64, (n,), device=DEVICE)
        positions[:8] = num_blocks * 64 - 1
        want = ops.top_blocks(scores, positions, SPARSE)
        results = {"default": top_blocks.top_blocks(scores, positions, SPARSE)}
        for config in TOP_CONFIGS.get(num_blocks, []):
            out = torch.full_like(results["default"], -7)
            top_blocks.launch_top(scores, out, positions, None, 0, SPARSE, config)
            results[str(tuple(config))] = out
        for name, got in results.items():
            is_same = torch.equal(got.long().sort(-1).values, want.sort(-1).values)
            print(f"top of {num_blocks} {name}: {'equal' if is_same else 'DIFFERENT'}")


def score_all(q: Tensor, k1: Tensor, k2: Tensor, scores: Tensor, start: int, config: ScoreConfig) -> None:
    for begin in range(0, len(q), len(scores)):
        rows = q[begin : begin + len(scores)]
        block_scores.launch_scores(rows, k1, k2, scores, start + begin, SPARSE, SCALE, config)


def time_scores() -> None:
    for n, chunk in ((131_072, 131_072), (1_000_000, 2048)):
        k1, k2, tables = random_pages(n)
        q = torch.randn(chunk, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        k1, k2 = (pool.index_select(1, tables[0]).flatten(1, 2) for pool in (k1, k2))
        start, width = n - chunk, (n - 1) // 64 - 32
        flops = 2 * HEADS * DIM * (chunk * (start + n) / 2) * (1 / 16 + 1 / 64)
        found = []
        for config in SCORE_CONFIGS:
            try:
                tile = min(block_scores.queries_at_once(q, GROUPS, width, SPARSE, config), chunk)
                scores = torch.empty(tile, GROUPS, width, device=DEVICE)
                found.append((timed(score_all, q, k1, k2, scores, start, config), tuple(config)))
            except Exception as problem:
                print(f"   {tuple(config)}: {type(problem).__name__} {str(problem)[:100]}")
        for ms, name in sorted(found):
            rate, floor = flops / ms / 1e9, flops / FLOPS * 1e3
            print(f"scores {chunk} of {n}: {ms:8.3f} ms, {rate:5.0f} TFLOP/s, floor {floor:.3f} ms, {name}")


def time_top() -> None:
    for num_blocks, n in ((2048, 16384), (16384, 8192)):
        scores = torch.rand(n, GROUPS, num_blocks, device=DEVICE)
        scores[..., 1:] = torch.maximum(scores[..., 1:], scores[..., :-1] * (scores[..., 1:] < 0.2))
        positions = torch.full((n,), num_blocks * 64 - 1, device=DEVICE)
        out = torch.empty(n, GROUPS, SPARSE.num_selected, dtype=torch.int32, device=DEVICE)
        floor = scores.numel() * 4 / BYTES * 1e3
        found = [(timed(torch.topk, scores, 62), "torch.topk")]
        for config in TOP_CONFIGS[num_blocks]:
            ms = timed(top_blocks.launch_top, scores, out, positions, None, 0, SPARSE, config)
            found.append((ms, str(tuple(config))))
        for ms, name in sorted(found):
            print(f"top of {num_blocks}, {n} queries x {GROUPS}: {ms:7.3f} ms, floor {floor:.3f}, {name}")


def time_prefill() -> None:
    """The whole choice of a prompt's last chunk, against the reference where that fits."""
    for n, chunk in ((32_768, 8192), (131_072, 8192), (1_000_000, 4096)):
        k1, k2, tables = random_pages(n)
        q = torch.randn(chunk, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        ms = timed(block_selection.select_prefill, q, k1, k2, tables[0], n - chunk, SPARSE, SCALE)
        text = f"select_prefill {chunk} at {n}: {ms:.2f} ms"
        if n <= 131_072:
            some = 512
            at = torch.arange(n - some, n, device=DEVICE)
            fine, coarse = (pool.index_select(1, tables[0]).flatten(1, 2)[:, 1:] for pool in (k1, k2))
            ms = timed(ops.select_blocks, q[-some:], fine, coarse, at, tables.shape[1], SPARSE, SCALE) * chunk / some
            text += f"; reference {ms:.1f} ms (from {some} queries)"
        print(text)


def time_decode() -> None:
    for rows, n in ((1, 32_768), (1, 131_072), (1, 1_000_000), (8, 131_072), (32, 131_072), (8, 1_000_000)):
        k1, k2, tables = random_pages(n, rows)
        q = torch.randn(rows, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        lengths = torch.full((rows,), n, device=DEVICE)
        flags = torch.ones(rows, dtype=torch.bool, device=DEVICE)
        width = tables.shape[1]
        us = graphed(block_selection.select_decode, q, k1, k2, tables, lengths, SPARSE, SCALE, width, flags)
        floor = rows * GROUPS * (n / 16 + n / 64) * DIM * 2 / BYTES * 1e6
        print(f"select_decode {rows} x {n}: {us:7.1f} us in a graph, floor {floor:.1f} us")
        if n == 131_072 and rows == 1:
            wide = torch.nn.functional.pad(tables, (0, 16384 - width))
            us = graphed(block_selection.select_decode, q, k1, k2, wide, lengths, SPARSE, SCALE, 16384, flags)
            print(f"select_decode {rows} x {n}, table of 16384: {us:7.1f} us in a graph")
            fine, coarse = (pool.index_select(1, tables[0]).flatten(1, 2)[:, 1:] for pool in (k1, k2))
            us = timed(ops.select_blocks, q, fine, coarse, lengths - 1, width, SPARSE, SCALE) * 1e3
            print(f"   reference, eager: {us:.0f} us")


def time_decode_top() -> None:
    """The last of the three kernels alone, one row at 1M, with other cuts."""
    num_blocks = 15_625
    scores = torch.rand(1, GROUPS, num_blocks, device=DEVICE)
    lengths = torch.tensor([1_000_000], device=DEVICE)
    out = torch.empty(1, GROUPS, SPARSE.num_selected, dtype=torch.int32, device=DEVICE)
    found = []
    sliced = [top(2048, 0, 4, 512), top(1024, 0, 2, 1024), top(1024, 0, 1, 1024), top(512, 0, 1, 2048)]
    for config in (top(4096, 1024, 8), top(8192, 1024, 16), top(16384, 1024, 16), *sliced):
        us = graphed(top_blocks.launch_top, scores, out, lengths, None, 1, SPARSE, config)
        found.append((us, tuple(config)))
    for us, name in sorted(found):
        print(f"top of a row of {num_blocks}: {us:6.1f} us {name}")


def time_append() -> None:
    for tokens, rows, start in ((8192, 1, 100_000), (1, 1, 131_071), (32, 32, 131_071), (32, 32, 131_000)):
        pages = pages_of(GROUPS, DIM, 2100 * rows, SPARSE, torch.bfloat16)
        tables = torch.randperm(2100 * rows, device=DEVICE).view(rows, -1)
        k, v = (torch.randn(tokens, GROUPS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        row_of = torch.arange(tokens, device=DEVICE) // (tokens // rows)
        positions = start + torch.arange(tokens, device=DEVICE) % (tokens // rows)
        starts = torch.full((rows,), start, device=DEVICE)
        pools = (pages.k, pages.v, pages.k1, pages.k2)
        us = graphed(pooling.append, k, v, *pools, tables, starts, row_of, positions, SPARSE)
        floor = tokens * GROUPS * DIM * 2 * (4 + 2 + 5 / 64) / BYTES * 1e6
        print(f"append {tokens} tokens of {rows} rows at {start}: {us:.1f} us in a graph, floor {floor:.2f} us")


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = (
        check_top, check_scores, check_append, check_prefill,
        time_scores, time_top, time_prefill, time_decode, time_decode_top, time_append,
    )  # fmt: skip
    return measure_text(__doc__, __file__, parts)


if __name__ == "__main__":
    sys.exit(main())
