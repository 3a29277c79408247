"""Attention over pages, sparse and dense, of many tokens and of one: against the readable twins."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from sala.backends.torch.kernels import attention, decode_attention
from sala.backends.torch.kernels.attention import dense_prefill, prefill
from sala.backends.torch.kernels.decode_attention import decode_attention as decode
from sala.backends.torch.kernels.launch import Config
from sala.backends.torch.kernels.spans import PackedSpan, table_of
from sala.backends.torch.ops.dense import dense_attention
from sala.backends.torch.ops.sparse import block_shares, sparse_attention
from sala.lab.train.halo.slots import attend_masked, attend_pages
from tests.kernels.aot import Build

BLOCK = 16  # small, so that short sequences have many blocks; the released geometry is compiled below


class Memory:
    """Pages in which a few sequences lie scattered; all else is NaN."""

    def __init__(self, lengths: list[int], groups: int, dim: int, block: int, device: torch.device) -> None:
        counts = [-(-length // block) for length in lengths]
        num_pages = sum(counts) + 3
        self.k, self.v = (torch.full((groups, num_pages, block, dim), float("nan"), device=device) for _ in range(2))
        order = torch.randperm(num_pages)
        self.tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.long)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            pages, order = order[:count], order[count:]
            self.tables[row, :count] = pages
            for pool in (self.k, self.v):
                rows = torch.full((groups, count * block, dim), float("nan"))
                rows[:, :length] = torch.randn(groups, length, dim)
                pool[:, pages] = rows.unflatten(1, (count, block)).to(device)
        self.tables = self.tables.to(device)

    def clean(self) -> tuple[Tensor, Tensor]:
        """What the references get: they multiply unwritten rows by 0."""
        return self.k.nan_to_num(), self.v.nan_to_num()

    def line(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        return tuple(x[:, self.tables[row]].flatten(1, 2)[:, :length] for x in (self.k, self.v))  # type: ignore[return-value]


def choose(positions: Tensor, groups: int, count: int, block: int) -> Tensor:
    """Random blocks [n, G, count], ascending, the own one always; -1 behind where there are too few."""
    selected = torch.full((len(positions), groups, count), -1, dtype=torch.int32)
    for row, position in enumerate(positions.tolist()):
        own = position // block
        for group in range(groups):
            others = torch.randperm(own)[: count - 1]
            ids = torch.cat([others.sort().values, torch.tensor([own])])
            selected[row, group, : len(ids)] = ids
    return selected


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert not actual.isnan().any()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "dim", "n", "start", "block"),
    [
        (4, 4, 2, 16, 37, 0, BLOCK),
        (8, 4, 2, 16, 21, 75, BLOCK),
        (2, 8, 1, 16, 5, 30, BLOCK),
        (8, 9, 3, 64, 19, 180, 64),
        (4, 2, 2, 16, 1, 63, BLOCK),
    ],
)
def test_sparse_prefill(
    tokens: int, heads: int, groups: int, dim: int, n: int, start: int, block: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    memory = Memory([start + n], groups, dim, block, device)
    positions = torch.arange(start, start + n, device=device)
    selected = choose(positions, groups, 3, block).to(device)
    q = torch.randn(n, heads, dim, device=device)
    out = prefill(q, memory.k, memory.v, memory.tables[0], selected, start, dim**-0.5, Config({"TOKENS": tokens}, 4, 2))
    expected = sparse_attention(q, *memory.clean(), memory.tables[0], selected, positions, dim**-0.5)
    assert_close(out, expected)


def test_sparse_prefill_in_rounds_and_from_a_wider_tensor(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    torch.manual_seed(1)
    memory = Memory([60], 2, 16, BLOCK, device)
    selected = choose(torch.arange(40, 60), 2, 3, BLOCK).to(device)
    wide = torch.randn(20, 100, device=device)
    q = wide[:, :64].view(20, 4, 16)
    arguments = (q, memory.k, memory.v, memory.tables[0], selected, 40, 0.25)
    whole = prefill(*arguments)
    monkeypatch.setattr(attention, "UNION_BYTES", 64)
    monkeypatch.setattr(attention, "UNION_PROGRAMS", 3)
    monkeypatch.setattr(attention, "UNION_CHUNK", 2)
    assert torch.equal(prefill(*arguments), whole)


def test_sparse_prefill_of_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    torch.manual_seed(2)
    memory = Memory([70], 2, 16, BLOCK, device)
    selected = choose(torch.arange(50, 70), 2, 3, BLOCK).to(device)
    q = torch.randn(20, 4, 16, device=device)
    pages = (memory.k, memory.v, memory.tables[0])
    whole = prefill(q, *pages, selected, 50, 0.25, Config({"TOKENS": 8}, 4, 2))
    part = prefill(q[3:14], *pages, selected[3:14], 53, 0.25, Config({"TOKENS": 8}, 4, 2))
    assert torch.equal(whole[3:14], part)


def test_block_union(device: torch.device) -> None:
    table = torch.arange(8, device=device) + 100
    selected = torch.tensor([[[0, 2, 4]], [[2, 3, 4]], [[-1, -1, -1]], [[0, 4, 5]]], dtype=torch.int32, device=device)
    entries, counts = attention.block_union(selected, table, 4 * BLOCK + 13, BLOCK, 4, 8)
    assert counts.tolist() == [[3]]
    found = [(entry >> 8, entry & 255) for entry in entries[0, 0, :5].tolist()]
    assert found == [(100, 0b1001), (102, 0b0011), (103, 0b0010), (104, 0b1011), (105, 0b1000)]


@pytest.mark.parametrize(
    ("n", "start", "heads", "groups"), [(33, 0, 4, 2), (19, 45, 3, 1), (1, 31, 4, 2), (1, 32, 2, 2)]
)
def test_dense_prefill(n: int, start: int, heads: int, groups: int, device: torch.device) -> None:
    torch.manual_seed(3)
    memory = Memory([start + n], groups, 16, BLOCK, device)
    q = torch.randn(n, heads, 16, device=device)
    out = prefill(q, memory.k, memory.v, memory.tables[0], None, start, 0.25)
    assert_close(out, dense_attention(q, *memory.line(0, start + n), start, 0.25))


def test_dense_prefill_of_spans(device: torch.device) -> None:
    """Each span as if it were alone, bit for bit; rows that are sparse or of no span stay as they are."""
    torch.manual_seed(5)
    ends, starts, dense = [37, 60, 48, 20], [0, 45, 30, 19], [37, 15, 7, 1]
    memory = Memory(ends, 2, 16, BLOCK, device)
    spans, first = [], 3
    for start, end, count in zip(starts, ends, dense, strict=True):
        spans.append(PackedSpan(first, end - start, start, num_dense=count))
        first += end - start
    spans.insert(1, PackedSpan(0, 0))
    tables = memory.tables[[0, 0, 1, 2, 3]]
    q = torch.randn(first + 2, 4, 16, device=device)
    out = torch.full_like(q, 7.0)
    dense_prefill(q, memory.k, memory.v, tables.int(), table_of(spans, device), 0.25, out)
    expected = torch.full_like(q, 7.0)
    for span, table in zip(spans, tables, strict=True):
        rows = slice(span.first, span.first + span.num_dense)
        expected[rows] = prefill(q[rows], memory.k, memory.v, table, None, span.start, 0.25)
    assert torch.equal(out, expected)


class Steps:
    """A batch in which dense and sparse rows, long, short and absent ones meet."""

    def __init__(
        self, device: torch.device, heads: int = 4, groups: int = 2, dim: int = 16, block: int = BLOCK
    ) -> None:
        torch.manual_seed(4)
        lengths = [7 * block - 3, 1, 0, 4 * block, 2 * block + 1]
        self.scale, self.lengths = dim**-0.5, torch.tensor(lengths, device=device)
        self.memory = Memory(lengths, groups, dim, block, device)
        self.is_sparse = torch.tensor([True, False, True, False, True], device=device)
        self.selected = choose((self.lengths - 1).clamp(min=0), groups, 5, block).to(device)
        self.q = torch.randn(len(lengths), heads, dim, device=device)

    def run(self, rows: slice, gate: Tensor | None = None, config: Config | None = None) -> Tensor:
        return decode(
            self.q[rows],
            self.memory.k,
            self.memory.v,
            self.memory.tables[rows],
            self.lengths[rows],
            self.is_sparse[rows],
            self.selected[rows],
            self.scale,
            max_dense_blocks=4,
            gate=gate,
            config=config,
        )

    def expected(self, row: int) -> Tensor:
        length, q = int(self.lengths[row]), self.q[row : row + 1]
        if length < 1:
            return torch.zeros_like(q[0])
        if not self.is_sparse[row]:
            return dense_attention(q, *self.memory.line(row, length), length - 1, self.scale)[0]
        at, ids = self.lengths[row : row + 1] - 1, self.selected[row : row + 1]
        return sparse_attention(q, *self.memory.clean(), self.memory.tables[row], ids, at, self.scale)[0]


@pytest.mark.parametrize(("heads", "groups", "dim", "block"), [(4, 2, 16, BLOCK), (9, 3, 64, 64)])
def test_decode(heads: int, groups: int, dim: int, block: int, device: torch.device) -> None:
    steps = Steps(device, heads, groups, dim, block)
    assert_close(steps.run(slice(0, 5)), torch.stack([steps.expected(row) for row in range(5)]))


def test_decode_of_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    steps = Steps(device)
    whole = steps.run(slice(0, 5))
    for row in range(5):
        assert torch.equal(steps.run(slice(row, row + 1))[0], whole[row])


def test_decode_joins_in_several_turns(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    steps = Steps(device)
    monkeypatch.setattr(decode_attention, "JOIN_CHUNK", 2)
    assert_close(steps.run(slice(0, 5)), torch.stack([steps.expected(row) for row in range(5)]))


@pytest.mark.parametrize(("most", "size"), [(1, 1), (3, 1), (1, 2)])
def test_decode_in_long_splits(most: int, size: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Rows with more blocks than fit into the smallest splits have longer ones, whatever their neighbours."""
    steps = Steps(device)
    config = Config({"SPLIT_BLOCKS": size}, 4, 1)
    short = steps.run(slice(0, 5), config=config)
    monkeypatch.setattr(decode_attention, "MOST_SPLITS", most)
    whole = steps.run(slice(0, 5), config=config)
    assert_close(whole, torch.stack([steps.expected(row) for row in range(5)]))
    for row in range(5):
        assert torch.equal(steps.run(slice(row, row + 1), config=config)[0], whole[row])
        blocks = -(-int(steps.lengths[row]) // steps.memory.k.shape[2])
        if not steps.is_sparse[row] and blocks <= size * most:
            assert torch.equal(whole[row], short[row])  # the bits of a short row are as ever


def test_decode_with_a_gate(device: torch.device) -> None:
    steps = Steps(device)
    gate = torch.randn(5, 64, device=device)
    expected = steps.run(slice(0, 5)).flatten(1) * torch.sigmoid(gate)
    gate[2] = float("nan")  # padding
    expected[2] = 0
    assert_close(steps.run(slice(0, 5), gate).flatten(1), expected)


def test_decode_with_rows_of_shared_tables(device: torch.device) -> None:
    steps = Steps(device)
    rows = torch.tensor([3, 0, 3], device=device)
    pages = (steps.memory.k, steps.memory.v)
    own = (steps.lengths[rows], steps.is_sparse[rows], steps.selected[rows], steps.scale, 4)
    out = decode(steps.q[rows], *pages, steps.memory.tables, *own, row_of=rows)
    assert torch.equal(out, steps.run(slice(0, 5))[rows])


def prefill_build(
    limit: int, is_sparse: bool, dtype: str = "bf16", config: Config | None = None, has_spans: bool = False
) -> Build:
    size = 4 if dtype == "fp32" else 2
    config = config or attention._config(16, 64, 128, size, limit, is_sparse)
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
    lists = {"entries_ptr": "*i32" if is_sparse or has_spans else "*i64", "counts_ptr": "*i32"}
    lists |= {"spans_ptr": "*i32" if has_spans else "constexpr", "out_ptr": f"*{dtype}"}
    sizes = dict.fromkeys(("num_tokens", "start", "num_spans", "num_pages", "max_entries", "q_stride"), "i32")
    constants = attention.prefill_constants(2, 16, 64, 128, is_sparse, config, has_spans)
    constants |= {"exponents_ptr": None} if has_spans else {"exponents_ptr": None, "spans_ptr": None}
    signature = {**pointers, **lists, **sizes, "scale": "fp32"}
    return Build(attention.prefill_kernel, signature, constants, config.options)


def union_build() -> Build:
    signature = dict.fromkeys(("num_tokens", "num_selected", "start", "num_tiles", "max_entries", "row_size"), "i32")
    pointers = {
        "selected_ptr": "*i32",
        "table_ptr": "*i64",
        "entries_ptr": "*i32",
        "counts_ptr": "*i32",
        "seen_ptr": "*u8",
    }
    constants = {"GROUPS": 2, "SELECTED": 128, "TOKENS": 4, "BLOCK": 64, "CHUNK": 1024}
    return Build(attention.union_kernel, {**pointers, **signature}, constants, {"num_warps": 4, "num_stages": 1})


NOT_HOT = dict.fromkeys(("frames_ptr", "hot_k_ptr", "hot_v_ptr", "hot_exponents_ptr"))
GEOMETRY = {"SHARED": 16, "BLOCK": 64, "DIM": 128}


def split_build(limit: int, config: Config | None = None, is_long: bool = False, gathers: bool = False) -> Build:
    config = config or decode_attention._config(64 * 128 * 2, limit)
    pointers = {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16"), "tables_ptr": "*i64", "lengths_ptr": "*i32"}
    more = {"is_sparse_ptr": "*i1", "selected_ptr": "*i32", "acc_ptr": "*fp32", "stats_ptr": "*fp32", "scale": "fp32"}
    sizes = dict.fromkeys(("num_frames", "num_pages", "table_size", *decode_attention.SIZES, "q_stride"), "i32")
    stats = {"block_stats_ptr": "*fp32"} if gathers else {}
    own = {"exponents_ptr": None, "row_of_ptr": None, **({} if gathers else {"block_stats_ptr": None}), **NOT_HOT}
    own |= {"GROUPS": 2, "SHARED_PADDED": 16, "PRECISION": "ieee", "PDL": 0}
    constants = {**GEOMETRY, **own, **config.tile, "LONG": is_long}
    return Build(decode_attention.split_kernel, {**pointers, **more, **stats, **sizes}, constants, config.options)


def share_build() -> Build:
    pointers = {"block_stats_ptr": "*fp32", "lengths_ptr": "*i32", "is_sparse_ptr": "*i1", "selected_ptr": "*i32"}
    sizes = dict.fromkeys(("num_selected", "max_dense", "width", "shares_stride", "blocks_stride"), "i32")
    constants = {"SHARED": 16, "BLOCK": 64, "CHUNK": decode_attention.JOIN_CHUNK}
    more = {"shares_ptr": "*fp32", "blocks_ptr": "*i32"}
    return Build(decode_attention.share_kernel, {**pointers, **more, **sizes}, constants, {"num_warps": 1})


def join_build() -> Build:
    pointers = {"acc_ptr": "*fp32", "stats_ptr": "*fp32", "gate_ptr": "*bf16", "lengths_ptr": "*i32"}
    more = {"is_sparse_ptr": "*i1", "out_ptr": "*bf16"}
    sizes = dict.fromkeys((*decode_attention.SIZES, "gate_stride"), "i32")
    constants = {**GEOMETRY, "SPLITS": 64, "SPLIT_BLOCKS": 2, "CHUNK": decode_attention.JOIN_CHUNK}
    constants |= {"LONG": False, "PDL": 0}
    return Build(decode_attention.join_kernel, {**pointers, **more, **sizes}, constants, {"num_warps": 4})


LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def builds_for(capability: int) -> list[Build]:
    """All kernels at the released shapes, configured as for a device of this capability."""
    limit = LIMITS[capability]
    builds = [prefill_build(limit, True), prefill_build(limit, False), split_build(limit), union_build(), join_build()]
    builds.append(split_build(limit, is_long=True))
    builds += [split_build(limit, gathers=True), share_build()]
    builds.append(prefill_build(limit, False, has_spans=True))
    return [*builds, prefill_build(limit, True, "fp32")] if capability == 120 else builds  # where room is scarcest


def builds_80() -> list[Build]:
    return builds_for(80)


def builds_86() -> list[Build]:
    return builds_for(86)


def builds_89() -> list[Build]:
    return builds_for(89)


def builds_90() -> list[Build]:
    return builds_for(90)


def builds_100() -> list[Build]:
    return builds_for(100)


def builds_120() -> list[Build]:
    return builds_for(120)


@pytest.mark.parametrize("capability", LIMITS)
def test_compiles(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    name = f"tests.kernels.test_attention:builds_{capability}"
    command = [sys.executable, "-m", "tests.kernels.aot", str(capability), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert all(result["shared"] <= LIMITS[capability] for result in results), results
    if capability == 90:
        assert not any(result["spills"] for result in results), results
        assert results[0]["has_wgmma"], results
        assert results[1]["has_wgmma"], results


def test_slots_of_the_sampler(device: torch.device) -> None:
    """Training texts are sampled in slots whose pages follow each other; rows of all lengths, on both paths."""
    keys, values = (torch.randn(2, 9, 64, 16, device=device) for _ in range(2))
    q, lengths = torch.randn(3, 4, 16, device=device), torch.tensor([1, 64, 130], device=device)
    found, wanted = (attend(q, keys, values, lengths) for attend in (attend_pages, attend_masked))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most_splits", [decode_attention.MOST_SPLITS, 1])
def test_shares_of_blocks(device: torch.device, most_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering fills blocks and shares of the reference for sparse, dense and padded rows, and changes no output."""
    monkeypatch.setattr(decode_attention, "MOST_SPLITS", most_splits)
    generator = torch.Generator().manual_seed(0)
    groups, heads, size, num_pages = 2, 4, 16, 12
    pages_k, pages_v = (torch.randn(groups, num_pages, size, 16, generator=generator).to(device) for _ in range(2))
    q = torch.randn(3, heads, 16, generator=generator).to(device)
    tables = torch.stack([torch.randperm(num_pages, generator=generator)[:10] for _ in range(3)]).int().to(device)
    lengths, is_sparse = torch.tensor([150, 60, 0], device=device), torch.tensor([True, False, False], device=device)
    selected = torch.full((3, groups, 5), -1, dtype=torch.int32, device=device)
    selected[0] = torch.tensor([[0, 3, 5, 8, 9], [0, 1, 2, 8, 9]])
    blocks = torch.full((3, 2, groups, 6), -9, dtype=torch.int32, device=device)
    shares = torch.full((3, 2, heads, 6), 9.0, device=device)
    inputs = (q, pages_k, pages_v, tables, lengths, is_sparse, selected, 0.25, 6)
    assert torch.equal(decode(*inputs, gathered=(blocks[:, 1], shares[:, 1])), decode(*inputs))
    dense = torch.arange(4, dtype=torch.int32, device=device).expand(groups, 4)
    for row, ids in ((0, selected[0]), (1, dense)):
        count = ids.shape[1]
        position = lengths[row : row + 1] - 1
        expected = block_shares(q[row : row + 1], pages_k, tables[row].long(), ids[None].long(), position, 0.25)
        torch.testing.assert_close(shares[row, 1, :, :count], expected[0], atol=1e-5, rtol=1e-4)
        assert torch.equal(blocks[row, 1, :, :count], ids)
        assert not shares[row, 1, :, count:].any()
        assert (blocks[row, 1, :, count:] == -1).all()
    assert not shares[2, 1].any()
    assert (blocks[2, 1] == -1).all()
    assert (blocks[:, 0] == -9).all()
