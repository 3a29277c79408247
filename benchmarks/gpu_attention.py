"""Attention kernels on a GPU: right at ugly sizes, and how fast at the released shapes against floors and peers.

PYTHONPATH=. python benchmarks/gpu_attention.py [PART …]     writes benchmarks/gpu_attention.txt, or --output FILE
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from benchmarks.outputs import measure_text
from sala.backends.torch.cases.attention import random_selection as random_blocks
from sala.backends.torch.kernels import attention, decode_attention
from sala.backends.torch.kernels.attention import block_union, prefill
from sala.backends.torch.kernels.launch import Config, shared_memory
from sala.backends.torch.ops.dense import dense_attention
from sala.backends.torch.ops.sparse import sparse_attention
from sala.config import SparseConfig

DEVICE = torch.device("cuda")
SPARSE = SparseConfig()
BLOCK, SELECTED = SPARSE.block_size, SPARSE.num_selected
HEADS, GROUPS, DIM = 32, 2, 128
SCALE = DIM**-0.5
MAX_DENSE = SPARSE.dense_len // BLOCK
RELEASED, SMALL = (32, 2, 128), (9, 3, 64)
TERA = 1e12
READ_RATE, PRODUCT_RATE = 4.3, 790.0  # TB/s and TFLOP/s of an H200


def random_pages(length: int, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and a scattered table of one sequence; spare pages and unwritten rows are NaN."""
    _, groups, dim = shape
    count = -(-length // BLOCK)
    table = torch.randperm(count + 5, device=DEVICE)[:count]
    pools = []
    for _ in range(2):
        pool = torch.full((groups, count + 5, BLOCK, dim), float("nan"), dtype=dtype, device=DEVICE)
        rows = torch.full((groups, count * BLOCK, dim), float("nan"), dtype=dtype, device=DEVICE)
        rows[:, :length] = torch.randn(groups, length, dim, dtype=dtype, device=DEVICE)
        pool[:, table] = rows.unflatten(1, (count, BLOCK))
        pools.append(pool)
    return pools[0], pools[1], table


def random_selection(n: int, start: int, groups: int, shared: float = 0.0, sparse: SparseConfig = SPARSE) -> Tensor:
    """[n, G, C] ascending, with the forced blocks; of the free ones, runs of queries share this part."""
    positions = torch.arange(start, start + n, device=DEVICE)
    ids = random_blocks(positions, -(-(start + n) // BLOCK), groups, sparse, shared)
    return F.pad(ids, (0, sparse.num_selected - ids.shape[2]), value=-1)


def report_error(name: str, actual: Tensor, expected: Tensor) -> None:
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    limit = 2e-2 if actual.dtype != torch.float32 else 1e-4
    verdict = "ok" if error.item() < limit else "WRONG"
    print(f"{name:72} relative error {error.item():.2e} {verdict}")


def check_prefill() -> None:
    for shape, dtype in ((RELEASED, torch.bfloat16), (RELEASED, torch.float32), (SMALL, torch.bfloat16)):
        heads, groups, dim = shape
        sizes = (1, 63, 64, 65, 1000, 8191, 8192, 100003) if dtype == torch.bfloat16 else (65, 8191)
        for length in sizes:
            n = min(length, 777 if dtype == torch.bfloat16 else 99)
            start = length - n
            k, v, table = random_pages(length, shape, dtype)
            q = torch.randn(n, heads, dim, dtype=dtype, device=DEVICE)
            selected = random_selection(n, start, groups, 0.5)
            positions = torch.arange(start, length, device=DEVICE)
            clean = (k.float().nan_to_num(), v.float().nan_to_num())
            expected = sparse_attention(q.float(), *clean, table, selected.long(), positions, dim**-0.5)
            name = f"{heads}/{groups}/{dim} {str(dtype)[6:]} length {length} n {n}"
            report_error(f"sparse_prefill {name}", prefill(q, k, v, table, selected, start, dim**-0.5), expected)
            if length <= 8192:
                line = [x[:, table].flatten(1, 2)[:, :length] for x in clean]
                expected = dense_attention(q.float(), *line, start, dim**-0.5)
                report_error(f"dense_prefill  {name}", prefill(q, k, v, table, None, start, dim**-0.5), expected)


def check_tiles() -> None:
    """A row's bits must not depend on where its call begins."""
    k, v, table = random_pages(20000, RELEASED, torch.bfloat16)
    q = torch.randn(500, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    selected = random_selection(500, 19500, GROUPS, 0.5)
    for tokens, warps in ((2, 4), (4, 4), (8, 8)):
        config = Config({"TOKENS": tokens}, warps, 2)
        whole = prefill(q, k, v, table, selected, 19500, SCALE, config)
        part = prefill(q[3:301], k, v, table, selected[3:301], 19503, SCALE, config)
        print(f"sparse_prefill tiles of {tokens}: batch-invariant: {torch.equal(whole[3:301], part)}")


class Decode:
    """Rows of different length and regime on pages that they share with nobody."""

    def __init__(self, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        heads, groups, dim = shape
        counts = [-(-max(length, 1) // BLOCK) for length in lengths]
        order = torch.randperm(sum(counts) + 9, device=DEVICE)
        pool = (groups, sum(counts) + 9, BLOCK, dim)
        self.k, self.v = (torch.full(pool, float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.long, device=DEVICE)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            pages, order = order[:count], order[count:]
            self.tables[row, :count] = pages
            for x in (self.k, self.v):
                rows = torch.full((groups, count * BLOCK, dim), float("nan"), dtype=dtype, device=DEVICE)
                rows[:, :length] = torch.randn(groups, length, dim, dtype=dtype, device=DEVICE)
                x[:, pages] = rows.unflatten(1, (count, BLOCK))
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.is_sparse = self.lengths >= SPARSE.dense_len
        self.selected = torch.cat([random_selection(1, max(length - 1, 0), groups) for length in lengths])
        self.q = torch.randn(len(lengths), heads, dim, dtype=dtype, device=DEVICE)
        self.gate = torch.randn(len(lengths), heads * dim, dtype=dtype, device=DEVICE)
        self.scale = dim**-0.5

    def run(self, rows: slice, has_gate: bool = True) -> Tensor:
        own = (self.lengths[rows], self.is_sparse[rows], self.selected[rows], self.scale, MAX_DENSE)
        gate = self.gate[rows] if has_gate else None
        return decode_attention.decode_attention(self.q[rows], self.k, self.v, self.tables[rows], *own, gate=gate)

    def expected(self) -> Tensor:
        outputs = []
        clean = (self.k.float().nan_to_num(), self.v.float().nan_to_num())
        for row, length in enumerate(self.lengths.tolist()):
            q, table = self.q[row : row + 1].float(), self.tables[row]
            if length < 1:
                outputs.append(torch.zeros_like(q))
            elif length >= SPARSE.dense_len:
                at = torch.tensor([length - 1], device=DEVICE)
                ids = self.selected[row : row + 1].long()
                outputs.append(sparse_attention(q, *clean, table, ids, at, self.scale))
            else:
                line = [x[:, table].flatten(1, 2)[:, :length] for x in clean]
                outputs.append(dense_attention(q, *line, length - 1, self.scale))
        out = torch.cat(outputs).to(self.q.dtype).flatten(1)
        return (out * torch.sigmoid(self.gate)).view_as(self.q)


def check_decode() -> None:
    for shape, dtype in ((RELEASED, torch.bfloat16), (RELEASED, torch.float32), (SMALL, torch.bfloat16)):
        lengths = [1, 63, 0, 64, 65, 1000, 8191, 8192, 100003]
        batch = Decode(lengths, shape, dtype)
        whole = batch.run(slice(None))
        report_error(f"decode_attention {shape} {str(dtype)[6:]} {lengths}", whole, batch.expected())
        alone = torch.cat([batch.run(slice(row, row + 1)) for row in range(len(lengths))])
        print(f"  batch-invariant: {torch.equal(alone, whole)}; padding is 0: {not whole[2].any().item()}")


def milliseconds(run: Callable[[], Any], rep: int = 60) -> float:
    return do_bench(run, warmup=10, rep=rep, return_mode="median")


def print_sorted(title: str, results: list[tuple[float, str]]) -> None:
    print(title)
    for _, line in sorted(results):
        print("  " + line)


def time_cudnn(n: int) -> float:
    q = torch.randn(1, HEADS, n, DIM, dtype=torch.bfloat16, device=DEVICE)
    k, v = (torch.randn(1, GROUPS, n, DIM, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def time_sparse_prefill() -> None:
    length = 131072
    k, v, table = random_pages(length, RELEASED, torch.bfloat16)
    peer = time_cudnn(length)
    print(f"peer: SDPA causal, {length} tokens: {peer:.1f} ms, {2 * DIM * HEADS * length**2 / peer / 1e9:.0f} TFLOP/s")
    configs = [
        Config({"TOKENS": x}, *rest)
        for x, *rest in ((2, 4, 3), (4, 4, 2), (4, 4, 3), (4, 4, 4), (8, 8, 2), (8, 8, 3), (8, 8, 4))
    ]
    default = attention._config(16, BLOCK, DIM, 2, shared_memory(DEVICE), True)
    for n, shared in ((length, 0.75), (length, 0.0), (8192, 0.75)):
        start = length - n
        q = torch.randn(n, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
        selected = random_selection(n, start, GROUPS, shared)
        useful = 4.0 * DIM * HEADS * BLOCK * (selected >= 0).sum().item() / GROUPS
        results = []
        for config in configs:
            try:
                ms = milliseconds(lambda: prefill(q, k, v, table, selected, start, SCALE, config))  # noqa: B023
                union_ms = milliseconds(lambda: _union(selected, table, start, config.tile["TOKENS"]), 20)  # noqa: B023
                mean = _union(selected, table, start, config.tile["TOKENS"])[1].float().mean().item()
                mark = " (default)" if config == default else ""
                rates = f"{ms:8.2f} ms {useful / ms / 1e9:5.0f} TFLOP/s useful, union {union_ms:.2f} ms"
                results.append((ms, f"{rates}, {mean:.0f} blocks {config}{mark}"))
            except Exception as error:
                results.append((math.inf, f"{config}: {type(error).__name__} {str(error)[:200]}"))
        floor = useful / PRODUCT_RATE / 1e9
        title = (
            f"sparse_prefill n {n} of {length}, neighbours share {shared:.0%} of the free blocks; floor {floor:.1f} ms"
        )
        print_sorted(title + (f", {peer / min(results)[0]:.1f} x SDPA" if n == length else ""), results)


def _union(selected: Tensor, table: Tensor, start: int, tokens: int) -> tuple[Tensor, Tensor]:
    max_entries = min(tokens * selected.shape[2] + 2, -(-(start + selected.shape[0]) // BLOCK))
    return block_union(selected, table, start, BLOCK, tokens, max_entries)


def time_dense_prefill() -> None:
    n = 8192
    k, v, table = random_pages(n, RELEASED, torch.bfloat16)
    q = torch.randn(n, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    peer, flops = time_cudnn(n), 2.0 * DIM * HEADS * n * n
    results = []
    for config in (
        Config({"TOKENS": x}, *rest) for x, *rest in ((4, 4, 2), (4, 4, 3), (4, 4, 4), (8, 8, 2), (8, 8, 3), (8, 8, 4))
    ):
        try:
            ms = milliseconds(lambda: prefill(q, k, v, table, None, 0, SCALE, config))  # noqa: B023
            results.append((ms, f"{ms:8.3f} ms {flops / ms / 1e9:5.0f} TFLOP/s {config}"))
        except Exception as error:
            results.append((math.inf, f"{config}: {type(error).__name__} {str(error)[:200]}"))
    floor = flops / PRODUCT_RATE / 1e9
    print_sorted(
        f"dense_prefill n {n}; floor {floor:.2f} ms; SDPA {peer:.3f} ms, {flops / peer / 1e9:.0f} TFLOP/s", results
    )


def microseconds_in_graph(calls: list[Callable[[], Any]]) -> float:
    """One call in a captured graph of all of them, each on memory of its own, so that no cache helps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    ms = milliseconds(graph.replay)
    del kept
    return ms * 1000 / len(calls)


def time_decode() -> None:
    num_blocks, num_pages = 2048, 16384
    pool = (GROUPS, num_pages, BLOCK, DIM)
    k, v = (torch.randn(pool, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    configs = [
        Config({"SPLIT_BLOCKS": x}, *rest)
        for x, *rest in ((1, 4, 2), (2, 4, 2), (2, 4, 3), (2, 8, 3), (4, 4, 3), (4, 4, 5), (8, 4, 4))
    ]
    default = decode_attention._config(BLOCK * DIM * 2, shared_memory(DEVICE))
    for rows in (1, 8, 32):
        inputs = []
        for _ in range(16 if rows == 1 else 4):
            tables = torch.stack([torch.randperm(num_pages, device=DEVICE)[:num_blocks] for _ in range(rows)])
            selected = torch.cat([random_selection(1, num_blocks * BLOCK - 1, GROUPS) for _ in range(rows)])
            q = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
            inputs.append((q, tables, selected, torch.randn(rows, HEADS * DIM, dtype=torch.bfloat16, device=DEVICE)))
        lengths = torch.full((rows,), num_blocks * BLOCK, dtype=torch.int32, device=DEVICE)
        is_sparse = torch.ones(rows, dtype=torch.bool, device=DEVICE)
        num_bytes = rows * SELECTED * BLOCK * DIM * GROUPS * 2 * 2
        results = []
        for config in configs:
            mark = " (default)" if config == default else ""

            def call(q: Tensor, tables: Tensor, selected: Tensor, gate: Tensor, config: Config = config) -> Tensor:
                own = (lengths, is_sparse, selected, SCALE, MAX_DENSE, gate)  # noqa: B023
                return decode_attention.decode_attention(q, k, v, tables, *own, config=config)

            try:
                us = microseconds_in_graph([lambda x=x: call(*x) for x in inputs])
                results.append((us, f"{us:7.2f} us {num_bytes / us / 1e6:5.2f} TB/s {config}{mark}"))
            except Exception as error:
                results.append((math.inf, f"{config}: {type(error).__name__} {str(error)[:200]}"))
        peer = "failed"
        try:
            q, tables, selected, _ = inputs[0]
            gathered = [
                (k, v, tables[row], selected[row : row + 1].long(), lengths[row : row + 1] - 1) for row in range(rows)
            ]
            calls = [
                lambda x=x, row=row: sparse_attention(q[row : row + 1], *x, SCALE)  # noqa: B023
                for row, x in enumerate(gathered)
            ]
            peer = f"{microseconds_in_graph(calls) * rows:.1f} us"
        except Exception as error:
            peer = f"failed: {type(error).__name__} {str(error)[:100]}"
        floor = num_bytes / READ_RATE / 1e6
        print_sorted(
            f"decode_attention, {rows} rows; floor {floor:.1f} us; peer, SDPA on gathered blocks: {peer}", results
        )


def main() -> int:
    parts = (check_prefill, check_tiles, check_decode, time_decode, time_dense_prefill, time_sparse_prefill)
    return measure_text(__doc__, __file__, parts)


if __name__ == "__main__":
    sys.exit(main())
