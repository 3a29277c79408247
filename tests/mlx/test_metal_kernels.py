"""Every Metal kernel's source, compiled as C++ and run thread by thread, against its op."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from sala import LLM, Sampling
from sala.backends.mlx import dispatch, selftest
from sala.backends.mlx.kernels import KERNELS, metal
from sala.backends.mlx.kernels.metal import Launch
from sala.backends.mlx.ops import lightning, sparse
from sala.backends.mlx.selftest import Scene
from sala.checkpoint.random import TINY, cut_layers, write_random
from sala.config import SparseConfig
from tests.mlx.shim import signature
from tests.mlx.shim.generated import generated_source
from tests.mlx.shim.runner import KernelError, Shim

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SIZES = (1, 63, 64, 65)
SOURCES = sorted({source for entry in KERNELS.values() for source in entry.sources})
FEW_BLOCKS = replace(selftest.SMALL, window_size=64, topk=2)
GOLDEN = SparseConfig(kernel_size=8, kernel_stride=4, block_size=16, window_size=32, topk=4, dense_len=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metal")


@pytest.fixture(scope="module")
def shim(folder: Path) -> Shim:
    return Shim(folder)


@pytest.fixture(scope="module")
def orders(folder: Path) -> Shim:
    """Runs everything in two orders of threads."""
    return Shim(folder, schedules=(0, 7))


def poison(arguments: tuple[Any, ...], scene: Scene) -> tuple[Any, ...]:
    """NaN wherever no token of the sequence lies."""
    q, k_pages, v_pages, table, *rest = arguments
    lengths = np.zeros(k_pages.shape[1], np.int32)
    for block, page in enumerate(table.tolist()):
        lengths[page] = min(scene.sparse.block_size, scene.end - block * scene.sparse.block_size)
    is_used = mx.array(np.arange(scene.sparse.block_size) < lengths[:, None])[None, :, :, None]
    return q, *(mx.where(is_used, pages, mx.nan).astype(pages.dtype) for pages in (k_pages, v_pages)), table, *rest


def error_of(found: mx.array, wanted: mx.array) -> float:
    assert found.shape == wanted.shape
    return float(mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_equal_to_its_op(shim: Shim, name: str) -> None:
    """The cases with which it will have to prove itself on a GPU."""
    before = shim.num_runs
    for arguments in selftest.small_cases(name):
        assert selftest.difference(name, arguments, shim.run) <= selftest.tolerance_of(name, arguments[0].dtype)
    assert shim.num_runs > before


@pytest.mark.parametrize("num", SIZES)
def test_lightning_at_sizes(orders: Shim, num: int) -> None:
    rng = np.random.default_rng(num)
    step = selftest.step_arguments(rng, mx.float32, num if num < 64 else 2, 3, 64)
    ragged = selftest.ragged_arguments(rng, mx.float32, [num, 3], 3, 64)
    assert selftest.difference("lightning_step", step, orders.run) < 2e-6
    assert selftest.difference("lightning_ragged", ragged, orders.run) < 2e-6


@pytest.mark.parametrize("num", SIZES)
def test_sparse_at_sizes(orders: Shim, num: int) -> None:
    """At the beginning of a sequence, and where it has more blocks than are selected, across the end of one."""
    for start in (0, 600):
        scene = Scene(num, start, 1, 3, 64, mx.float32, FEW_BLOCKS)
        rng = np.random.default_rng(num)
        assert selftest.difference("score_blocks", scene.scores(rng), orders.run) < 2e-6
        arguments = scene.attention(rng)
        found = KERNELS["sparse_attention"].kernel(*poison(arguments, scene), run=orders.run)
        assert error_of(found, sparse.sparse_attention(*arguments)) < 2e-6


@pytest.mark.parametrize("dim", [16, 40])
def test_narrow_heads_and_small_blocks(shim: Shim, dim: int) -> None:
    """Widths that are no multiple of a simdgroup; a tile of keys has two blocks."""
    rng = np.random.default_rng(dim)
    for arguments, name in (
        (selftest.step_arguments(rng, mx.float32, 3, 7, dim), "lightning_step"),
        (selftest.ragged_arguments(rng, mx.float32, [9, 17], 7, dim), "lightning_ragged"),
        (Scene(3, 200, 2, 5, dim, mx.float32, GOLDEN).scores(rng), "score_blocks"),
        (Scene(3, 200, 2, 5, dim, mx.float32, GOLDEN).attention(rng), "sparse_attention"),
    ):
        assert selftest.difference(name, arguments, shim.run) < 2e-6


@pytest.mark.parametrize("cut", [1, 8, 63, 64, 100])
def test_prefill_goes_on_from_any_position(shim: Shim, cut: int) -> None:
    q, k, v, state, _, slopes, scale = selftest.ragged_arguments(np.random.default_rng(cut), mx.float32, [130], 3, 64)
    run = {"slopes": slopes, "scale": scale, "run": shim.run}
    ragged: Callable[..., Any] = KERNELS["lightning_ragged"].kernel
    first, between = ragged(q[:cut], k[:cut], v[:cut], state, [cut], **run)
    second, after = ragged(q[cut:], k[cut:], v[cut:], between, [130 - cut], **run)
    whole, end = ragged(q, k, v, state, [130], **run)
    assert mx.array_equal(mx.concatenate((first, second)), whole)
    assert mx.array_equal(after, end)
    wanted, _ = lightning.lightning_ragged(q, k, v, state, [130], slopes, scale)
    assert error_of(whole, wanted) < 2e-6


def test_equal_windows_give_equal_blocks(shim: Shim) -> None:
    """Neighbours share a window; if it is the best of both, the choice between them must not be one of rounding."""
    q, k1, k2, *rest = Scene(1, 1500, 1, 3, 64, mx.float32).scores(np.random.default_rng(0))
    k1[:, 19] = 4 * q[:, 0]  # begins in block 4, reaches into block 5
    scores = KERNELS["score_blocks"].kernel(q, k1, k2, *rest, run=shim.run)
    assert scores[0, 0, 4] == scores[0, 0, 5] > scores[0, 0, 6]


def test_largest_heads_fit_into_threadgroup_memory(shim: Shim) -> None:
    """The most that `find` lets through, in the widest precision."""
    rng = np.random.default_rng(0)
    scene = Scene(1, 300, 1, 16, 128, mx.float32, FEW_BLOCKS)
    assert KERNELS["sparse_attention"].fits(mx.zeros((1, 16, 128)), 1)
    assert selftest.difference("score_blocks", scene.scores(rng), shim.run) < 2e-6
    assert selftest.difference("sparse_attention", scene.attention(rng), shim.run) < 2e-6


def test_model_runs_by_the_kernels(shim: Shim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a Mac whose kernels have proved themselves: prompts in parts, dense and sparse, several sequences."""
    write_random(tmp_path / "tiny", replace(cut_layers(TINY, 2), sparse_config=replace(GOLDEN, dense_len=96)))
    prompts = [list(range(1, 151)), [7, 8, 9], list(range(60, 131))]
    greedy = Sampling(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(tmp_path / "tiny", backend="mlx", prefill_chunk=64) as llm:
        wanted = [result.token_ids for result in llm.generate(prompts, greedy)]
    used = set()

    def find(name: str, _q: mx.array, groups: int = 1, metal: str = "auto") -> Callable[..., Any]:
        used.add(name)
        return partial(KERNELS[name].kernel, run=shim.run)

    monkeypatch.setattr(dispatch, "find", find)
    with LLM(tmp_path / "tiny", backend="mlx", prefill_chunk=64) as llm:
        assert [result.token_ids for result in llm.generate(prompts, greedy)] == wanted
    assert used == set(KERNELS)


def launches(name: str) -> Iterator[Launch]:
    """What the kernels of an op would start, for few and for many numbers in every input."""
    found: list[Launch] = []

    def note(launch: Launch) -> list[mx.array]:
        found.append(launch)
        return [mx.zeros(shape, dtype) for shape, dtype in launch.outputs.values()]

    for arguments in selftest.small_cases(name):
        KERNELS[name].kernel(*arguments, run=note)
    yield from found


@pytest.mark.parametrize("name", KERNELS)
def test_mlx_writes_the_signature_that_is_tested(name: str) -> None:
    """MLX can write the whole source without Metal; only Metal could compile it."""
    for launch in launches(name):
        text = generated_source(launch)
        assert metal.source(launch.kernel) in text
        head = text.partition(") {\n")[0].partition("(\n")[2]
        written = [re.sub(r" \[\[.*", "", line).strip() for line in head.splitlines()]
        assert written == [declaration for declaration, _ in signature.parameters(launch)]
        values = ", ".join(
            v if isinstance(v, str) else signature.type_name(v) for v in map(_plain, launch.template.values())
        )
        assert f"<{values}>;" in text


def _plain(value: mx.Dtype | int) -> Any:
    return str(value) if isinstance(value, int) else value


def barriers() -> list[tuple[str, int]]:
    return [
        (source, number) for source in SOURCES for number in range(metal.source(source).count("threadgroup_barrier("))
    ]


@pytest.mark.parametrize(("kernel", "number"), barriers())
def test_every_barrier_is_needed_and_missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, number: int
) -> None:
    """Without one of its barriers a kernel is wrong, or depends on the order of its threads: the shim sees it."""
    lines = metal.source(kernel).splitlines()
    places = [at for at, line in enumerate(lines) if "threadgroup_barrier(" in line]
    del lines[places[number]]
    whole = metal.source
    monkeypatch.setattr(metal, "source", lambda name: "\n".join(lines) if name == kernel else whole(name))
    name = next(name for name, entry in KERNELS.items() if kernel in entry.sources)
    shim = Shim(folder, schedules=(0, 1, 7))
    rng = np.random.default_rng(0)
    arguments = {
        "lightning_step": lambda: selftest.step_arguments(rng, mx.float32, 1, 1, 64),
        "lightning_ragged": lambda: selftest.ragged_arguments(rng, mx.float32, [20], 1, 64),
        "score_blocks": lambda: Scene(1, 1000, 1, 3, 64, mx.float32).scores(rng),
        "sparse_attention": lambda: Scene(33, 200, 1, 3, 16, mx.float32, FEW_BLOCKS).attention(rng),  # in one piece
    }[name]()
    try:
        error = selftest.difference(name, arguments, shim.run)
    except KernelError:
        return
    assert not error <= 2e-5


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BAD = {
    f"if (thread_index_in_threadgroup < 8) {{ {BARRIER} }}\nout[0] = 0.0f;": "not reached by all threads",
    "if (thread_index_in_simdgroup < 8) { out[0] = simd_sum(1.0f); }": "not reached by all lanes",
    "out[-1] = 0.0f;": "wrote outside of out",
    "threadgroup float much[9000];\nmuch[thread_index_in_threadgroup] = 0.0f;\nout[0] = much[0];": "36000 bytes",
    "out[0] = float(thread_index_in_threadgroup);": "depends on the order of the threads",
    "out[0] = 0.1;": "conversion",
}


@pytest.mark.parametrize("body", BAD)
def test_shim_notices(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(metal, "source", lambda _: body)
    launch = Launch("bad", {}, {}, {"out": ((4,), mx.float32)}, (1, 1, 1), (64, 1, 1))
    with pytest.raises(KernelError, match=BAD[body]):
        Shim(folder, schedules=(0, 1)).run(launch)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_shim_rounds_as_mlx_does(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    """Normal and subnormal numbers, halves between two, the largest, infinity."""
    body = "const uint at = thread_position_in_grid.x;\nout[at] = T(x[at]);\nback[at] = float(T(x[at]));"
    monkeypatch.setattr(metal, "source", lambda _: body)
    rng = np.random.default_rng(0)
    numbers = (rng.standard_normal(1008) * 2.0 ** rng.integers(-26, 16, 1008)).astype(np.float32)
    special = [
        0.0,
        -0.0,
        65504.0,
        65519.9,
        65520.0,
        2049.0,
        2051.0,
        6e-8,
        2.9e-8,
        6.1e-5,
        1e30,
        np.inf,
        1.00390625,
        -1e-9,
        1.01171875,
        3.0,
    ]
    x = mx.array(np.concatenate((numbers, np.array(special, np.float32))))
    outputs = {"out": (x.shape, dtype), "back": (x.shape, mx.float32)}
    out, back = Shim(folder).run(Launch("round", {"x": x}, {"T": dtype}, outputs, (4, 1, 1), (256, 1, 1)))
    assert mx.array_equal(out, x.astype(dtype))
    assert mx.array_equal(back, x.astype(dtype).astype(mx.float32))
