"""The hot pool: kernels against the readable rule, and attention that reads the same wherever a block lies."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sala.backends.torch.cache import FP8, KVPages, raw, to_fp8
from sala.backends.torch.hot_pages import UNCLAIMED, HotPages
from sala.backends.torch.kernels import hot_pages, pooling
from sala.backends.torch.kernels.decode_attention import decode_attention as decode
from sala.backends.torch.kernels.spans import COUNT, START, PackedSpan, table_of
from sala.backends.torch.ops import hot_pages as reference
from tests.kernels import aot
from tests.kernels.aot import Build
from tests.kernels.test_attention import LIMITS, choose, split_build
from tests.kernels.test_block_selection import append_build
from tests.kernels.test_gpu_forward import SHAPE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GROUPS, PAGES, BLOCK, DIM = 2, 40, 16, 16


def make_pages(device: torch.device, is_fp8: bool = False) -> KVPages:
    """Pages of random numbers."""
    config = replace(SHAPE, num_key_value_heads=GROUPS, head_dim=DIM)
    pages = KVPages(PAGES, config, torch.float32, device, FP8 if is_fp8 else None)
    for index, pool in enumerate((pages.k, pages.v)):
        numbers = torch.randn(pool.shape, generator=torch.Generator().manual_seed(index)).to(device)
        if pages.exponents is not None:
            codes, pages.exponents[..., index] = to_fp8(numbers)
            numbers = codes
        raw(pool).copy_(raw(numbers))
    return pages


def make_hot(pages: KVPages, num_frames: int, ways: int) -> HotPages:
    hot = HotPages(pages.k, pages.exponents, num_frames, pages.k.device, most_ways=ways)
    assert (hot.num_frames, hot.ways) == (num_frames, ways)
    for pool in (hot.k, hot.v):
        raw(pool).fill_(0x7F)
    return hot


def make_step(number: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tables, lengths, flags and selected blocks of four rows: sparse ones that share pages, a dense one, padding."""
    torch.manual_seed(number)
    tables = torch.stack([torch.randperm(PAGES)[:12] for _ in range(3)] + [torch.zeros(12).long()])
    tables[1, :8] = tables[0, :8]  # a common prefix
    lengths = torch.tensor([150 + number, 170, 20 + number, 0])
    is_sparse = torch.tensor([True, True, False, False])
    selected = choose(lengths.clamp(min=1) - 1, GROUPS, 5, BLOCK)
    return tables.int().to(device), lengths.to(device), is_sparse.to(device), selected.to(device)


def check(hot: HotPages, pages: KVPages) -> None:
    """Frames and pages name each other, no page is claimed, and a frame holds what its page does."""
    assert (hot.claims == UNCLAIMED).all()
    for group in range(GROUPS):
        held = {page: frame for frame, page in enumerate(hot.pages[group].tolist()) if page >= 0}
        assert {page: frame for page, frame in enumerate(hot.frames[group].tolist()) if frame >= 0} == held
        for page, frame in held.items():
            assert frame // hot.ways == page % hot.num_sets
            assert torch.equal(raw(hot.k)[group, frame], raw(pages.k)[group, page])
            assert torch.equal(raw(hot.v)[group, frame], raw(pages.v)[group, page])
            if pages.exponents is not None and hot.exponents is not None:
                assert torch.equal(hot.exponents[group, frame], pages.exponents[group, page])


@pytest.mark.parametrize(
    ("num_frames", "ways", "is_fp8"), [(8, 8, False), (16, 4, False), (32, 8, True), (12, 4, False)]
)
def test_the_rule(
    num_frames: int, ways: int, is_fp8: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step after step, pools that hold some and all of what a step needs; blocks come in several rounds."""
    monkeypatch.setattr(hot_pages, "CHUNK", 8)
    pages = make_pages(device, is_fp8)
    pools = (pages.k, pages.v, pages.exponents)
    ours, theirs = (make_hot(pages, num_frames, ways) for _ in range(2))
    counts = []
    for number in range(6):
        for hot in (ours, theirs):
            hot.clock += 1
        step = make_step(number % 4, device)
        hot_pages.fetch(ours, *pools, *step, 4)
        reference.fetch(theirs, *pools, *step, 4)
        check(ours, pages)
        for name in ("frames", "pages", "stamps"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        counts.append(int((ours.pages >= 0).sum()))
    assert max(counts) <= GROUPS * num_frames
    assert counts[-1] > GROUPS * ways // 2


def test_what_is_used_stays_and_the_oldest_goes(device: torch.device) -> None:
    pages = make_pages(device)
    hot = make_hot(pages, 4, 4)
    table = torch.arange(PAGES, dtype=torch.int32, device=device)[None]
    length, flag = torch.tensor([600], device=device), torch.tensor([True], device=device)

    def step(*blocks: int) -> list[int]:
        hot.clock += 1
        selected = torch.tensor(blocks, dtype=torch.int32, device=device).expand(1, GROUPS, -1)
        hot_pages.fetch(hot, pages.k, pages.v, None, table, length, flag, selected, 0)
        check(hot, pages)
        return sorted(hot.pages[0].tolist())

    assert step(1, 2, 3) == [-1, 1, 2, 3]
    assert step(2, 3, 4) == [1, 2, 3, 4]
    assert step(2, 4, 5) == [2, 3, 4, 5]
    assert step(3, 6, 7) == [3, 4, 6, 7]  # 2, 4 and 5 were used in the same step: the lowest frames go first
    assert step(10, 11, 12, 13) == [10, 11, 12, 13]
    hot.clock.fill_(2**31 - 1)  # the number of the step begins anew
    assert step(10, 20) == [10, 12, 13, 20]


def test_a_row_with_more_blocks_than_frames_fetches_nothing(device: torch.device) -> None:
    pages = make_pages(device)
    hot = make_hot(pages, 4, 4)
    hot_pages.fetch(hot, pages.k, pages.v, None, *make_step(0, device), 5)
    assert (hot.pages == -1).all()


@pytest.mark.parametrize("is_fp8", [False, True])
def test_attention_reads_the_same(is_fp8: bool, device: torch.device) -> None:
    """Bit for bit, with an empty pool and a filled one, where host memory holds nothing of what has a frame."""
    pages = make_pages(device, is_fp8)
    tables, lengths, is_sparse, selected = make_step(1, device)
    q = torch.randn(4, 4, DIM, device=device)

    def run(hot: HotPages | None, more: KVPages = pages) -> Tensor:
        step = (tables, lengths, is_sparse, selected, 0.25, 4)
        return decode(q, more.k, more.v, *step, exponents=more.exponents, hot=hot)

    wanted = run(None)
    hot = make_hot(pages, 16, 4)
    assert torch.equal(run(hot), wanted)
    hot_pages.fetch(hot, pages.k, pages.v, pages.exponents, tables, lengths, is_sparse, selected, 4)
    assert torch.equal(run(hot), wanted)
    poisoned = make_pages(device, is_fp8)
    for group in range(GROUPS):
        for pool in poisoned.token_pools:
            pool[group, hot.pages[group][hot.pages[group] >= 0].long()] = 77
    assert torch.equal(run(hot, poisoned), wanted)
    assert not torch.equal(run(None, poisoned), wanted)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_what_is_written_is_written_to_its_frame(is_fp8: bool, device: torch.device) -> None:
    """New pages and the rest of old ones; afterwards frames hold what their pages do."""
    pages = make_pages(device, is_fp8)
    hot = make_hot(pages, 16, 4)
    step = make_step(2, device)
    hot_pages.fetch(hot, pages.k, pages.v, pages.exponents, *step, 4)
    held = hot.pages.clone()
    tables, starts = step[0], torch.tensor([140, 40], device=device)
    counts = [30, 7]
    row_of = torch.tensor([0] * counts[0] + [2] * counts[1], device=device)
    starts = torch.tensor([140, 0, 16, 0], device=device)
    positions = torch.cat([torch.arange(140, 170), torch.arange(16, 23)]).to(device)
    k, v = torch.randn(2, sum(counts), GROUPS, DIM, device=device)
    sparse = pages.sparse
    pooling.append(k, v, *pages.pools, tables, starts, row_of, positions, sparse, pages.exponents, hot)
    assert torch.equal(hot.pages, held)
    written = set(tables[0, 140 // BLOCK : 11].tolist()) | {int(tables[2, 1])}
    assert written & set(held.flatten().tolist())
    check(hot, pages)


def test_pages_that_are_forgotten(device: torch.device) -> None:
    pages = make_pages(device)
    hot = make_hot(pages, 16, 4)
    hot_pages.fetch(hot, pages.k, pages.v, None, *make_step(2, device), 4)
    gone = hot.pages[0][hot.pages[0] >= 0][:3].long()
    hot.forget(gone)
    pages.k[:, gone] = 7
    check(hot, pages)
    assert (hot.pages >= 0).any()
    assert (hot.frames[:, gone] == -1).all()


@pytest.mark.parametrize("is_fp8", [False, True])
def test_staging(is_fp8: bool, device: torch.device) -> None:
    """The past of two spans and then what they write, or all at once; other frames stay as they are."""
    pages = make_pages(device, is_fp8)
    tables = torch.stack([torch.randperm(PAGES)[:6] for _ in range(4)]).int().to(device)
    spans = table_of([PackedSpan(0, 20, 37), PackedSpan(20, 5, 0), PackedSpan(25, 0, 0), PackedSpan(25, 0, 0)], device)
    first = torch.tensor([0, 4, 5, 5], dtype=torch.int32, device=device)
    pools = (pages.k, pages.v, pages.exponents)
    wanted = [*zip(range(4), tables[0].tolist(), strict=False), (4, int(tables[1, 0]))]
    for parts, held in (((1,), wanted[:3]), ((1, 2), wanted), ((0,), wanted)):
        hot = make_hot(pages, 16, 4)
        for part in parts:
            hot_pages.stage(*pools, hot.k, hot.v, hot.exponents, tables, spans, first, part)
        for frame, page in held:
            assert torch.equal(raw(hot.k)[:, frame], raw(pages.k)[:, page])
            assert torch.equal(raw(hot.v)[:, frame], raw(pages.v)[:, page])
            if hot.exponents is not None and pages.exponents is not None:
                assert torch.equal(hot.exponents[:, frame], pages.exponents[:, page])
        rest = sorted(set(range(16)) - {frame for frame, _ in held})
        assert (raw(hot.k)[:, rest] == raw(make_hot(pages, 16, 4).k)[:, rest]).all()


def place_build() -> Build:
    kernel = hot_pages._place_kernel
    sizes = ("num_rows", "num_pages", "table_size", "num_selected", "max_dense", "width", "num_sets")
    kinds = {"lengths_ptr": "*i64", "is_sparse_ptr": "*i1", **dict.fromkeys(sizes, "i32")}
    constants = {"row_of_ptr": None, "GROUPS": 2, "BLOCK": 64, "WAYS": 64, "CHUNK": hot_pages.CHUNK, "PDL": 0}
    names = [name for name in kernel.arg_names if name not in constants]
    return Build(kernel, {name: kinds.get(name, "*i32") for name in names}, constants, {"num_warps": 4})


def copy_build(kernel: Any, is_fp8: bool, **constants: int) -> Build:
    pages = torch.empty(1, 1, 64, 128, dtype=torch.uint8 if is_fp8 else torch.bfloat16)
    fixed: dict[str, Any] = {**hot_pages.copy_constants(pages), **constants}
    if not is_fp8:
        fixed |= {name: None for name in kernel.arg_names if "exponents" in name}
    sizes = dict.fromkeys(("num_pages", "num_frames", "num_spans", "table_size", "total"), "i32")
    names = [name for name in kernel.arg_names if name not in fixed]
    kinds = {name: "*i16" if "exponents" in name else sizes.get(name, "*i32") for name in names}
    return Build(kernel, kinds, fixed, {"num_warps": 4})


def with_hot(build: Build, is_fp8: bool) -> Build:
    """Return the build of a kernel that reads or writes the hot pool too."""
    signature, constants = dict(build.signature), dict(build.constants)
    for name in [name for name in constants if "hot" in name or name == "frames_ptr"]:
        del constants[name]
    page = {name: kind for name, kind in signature.items() if name in ("k_ptr", "v_ptr", "k_pages", "v_pages")}
    for name, kind in page.items():
        signature[name] = "*fp8e4nv" if is_fp8 else kind
        signature["hot_" + name.removesuffix("_pages")] = signature[name]
    signature["frames_ptr"] = "*i32"
    if is_fp8:
        del constants["exponents_ptr"]
        signature |= {"exponents_ptr": "*i16", "hot_exponents_ptr": "*i16"}
    else:
        constants["hot_exponents_ptr"] = None
    return Build(build.kernel, signature, constants, build.options)


def builds_for(capability: int) -> list[Build]:
    """All kernels that know the hot pool, at the released shapes."""
    stage = {"PART": 0, "START": START.value, "COUNT": COUNT.value}
    builds = [place_build()]
    for is_fp8 in (False, True) if capability >= 89 else (False,):
        builds += [
            copy_build(hot_pages._fetch_kernel, is_fp8, PDL=0),
            copy_build(hot_pages._stage_kernel, is_fp8, **stage),
            with_hot(split_build(LIMITS[capability]), is_fp8),
            with_hot(split_build(LIMITS[capability], is_long=True), is_fp8),
            with_hot(append_build(), is_fp8),
        ]
    return builds


builds_80, builds_90, builds_120 = (partial(builds_for, capability) for capability in (80, 90, 120))


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles(capability: int) -> None:
    done = aot.run(capability, f"{__name__}:builds_{capability}")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == (6 if capability == 80 else 11)
    assert all(result["shared"] <= LIMITS[capability] for result in results), results
    if capability == 90:
        *others, fp8_long, _ = results  # dense rows of a long context in FP8 need a register more than there are
        assert not any(result["spills"] for result in others), results
        assert fp8_long["spills"] <= 4, results
