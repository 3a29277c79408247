"""Keys and values in host memory on the GPU path: the same tokens as with all pages on the device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from sala.backends.memory import IN_HOST_MEMORY
from sala.backends.torch.batch import pack
from sala.backends.torch.cache import FP8, raw
from sala.backends.torch.executor import TorchExecutor, page_bytes_away
from sala.backends.torch.fast import gpu_forward, gpu_prefill, gpu_staging
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.host_memory import HostMemory
from sala.backends.torch.hot_pages import UNCLAIMED
from sala.engine.engine import Engine
from sala.engine.scheduler import Request
from sala.protocol import Options, Plan, Sampling
from tests.kernels.test_gpu_forward import MAX_TOKENS, SHAPE, Replay, make_model, row, sparse_row, tokens
from tests.kernels.test_run_ahead import CAPACITY, answers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PLANS = [  # prompts alone, together and beside decode rows; a chunk that begins in the middle of a page; drafts
    ((row(tokens(1, 66), 0, (7, 3, 11, 20, 5), 0),), [65]),
    ((row(tokens(2, 9), 0, (12, 13), 2), sparse_row(tokens(3, 37), 0, (30, 31, 32), 1)), [8, 45]),
    ((row(tokens(4, 1), 66, (7, 3, 11, 20, 5), 0), row(tokens(5, 1), 9, (12, 13), 2)), None),
    ((sparse_row(tokens(6, 17), 37, (30, 31, 32, 33), 1), row(tokens(7, 1), 67, (7, 3, 11, 20, 5), 0)), [16, 17]),
    ((row(tokens(8, 4), 68, (7, 3, 11, 20, 5), 0, 3), sparse_row(tokens(9, 1), 54, (30, 31, 32, 33), 1)), None),
    ((row(tokens(10, 12), 70, (7, 3, 11, 20, 5, 2), 0),), []),
    ((row(tokens(11, 1), 82, (7, 3, 11, 20, 5, 2), 0), row(tokens(12, 1), 10, (12, 13), 2)), None),
]  # fmt: skip


BY_THE_MODEL = 5  # of the plans: by the definition, as rows with adapters are


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little padding: the interpreter is slow."""
    monkeypatch.setattr(gpu_prefill, "MIN_ROWS", 16)
    monkeypatch.setattr(gpu_prefill, "ROW_MULTIPLE", 16)
    gpu_prefill.stable_rows.cache_clear()  # it may hold those of another test, with other sizes
    yield
    gpu_prefill.stable_rows.cache_clear()


def make_executor(device: torch.device, hot: int | None, is_ahead: bool = True, **more: Any) -> TorchExecutor:
    """Keys and values on the device, or in host memory with a hot pool of so many frames."""
    options = Options(**{"kernels": "off", "snapshots": 4, **more})
    capacity = CAPACITY
    if hot is not None:
        kv_dtype = FP8 if options.kv == "fp8" else torch.float32
        frame_bytes = page_bytes_away(SHAPE, torch.float32, kv_dtype)
        capacity = replace(CAPACITY, offload=IN_HOST_MEMORY, hot_bytes=hot * frame_bytes)
    executor = TorchExecutor(make_model(SHAPE).to(device), capacity, device, torch.float32, options)
    if is_ahead:
        executor.run_ahead(GpuForward(executor.model, device, MAX_TOKENS, has_graphs=device.type == "cuda"))
    return executor


def check(executor: TorchExecutor) -> None:
    """What is in the hot pool is what lies in host memory."""
    for pages in executor.cache.pages.values():
        hot = pages.hot
        if hot is None:
            continue
        assert (hot.claims == UNCLAIMED).all()
        for group, held in enumerate(hot.pages.tolist()):
            for frame, page in enumerate(held):
                if page >= 0:
                    assert int(hot.frames[group, page]) == frame
                    for pool, copy in ((pages.k, hot.k), (pages.v, hot.v)):
                        assert torch.equal(raw(pool)[group, page], raw(copy)[group, frame])
        assert (hot.frames >= 0).sum() == (hot.pages >= 0).sum()


@torch.inference_mode()
def states_of_plans(executor: TorchExecutor) -> list[torch.Tensor]:
    found = []
    forward: Any = executor.fused
    for at, (rows, wanted) in enumerate(PLANS):
        batch = pack(Plan(rows), executor.device)
        if at == BY_THE_MODEL:
            found.append(executor.model(batch, executor.cache).clone())
        else:
            found.append(forward(batch, executor.cache, None, wanted).clone())
        batch.fold_accepted([one.num_drafts // 2 + 1 for one in rows])
        check(executor)
    return found


def test_without_kernels_there_is_no_hot_pool(device: torch.device) -> None:
    """The definition reads host memory itself."""
    executor = make_executor(device, 12, is_ahead=False)
    assert isinstance(executor.home, HostMemory)
    assert executor.fused is None
    assert all(pages.hot is None for pages in executor.cache.pages.values())


@pytest.fixture(scope="module")
def computed() -> dict[str, list[torch.Tensor]]:
    return {}


@pytest.fixture
def resident(computed: dict[str, list[torch.Tensor]], device: torch.device) -> list[torch.Tensor]:
    """The hidden states with all pages on the device, computed once: as a test would, with its fixtures."""
    if "states" not in computed:
        computed["states"] = states_of_plans(make_executor(device, None))
    return computed["states"]


@pytest.mark.parametrize("hot", [0, 2, 12])
def test_hidden_states_are_equal_bit_for_bit(hot: int, device: torch.device, resident: list[torch.Tensor]) -> None:
    """Without a hot pool, with one that is too small for a step, and with one that holds some of what steps need."""
    executor = make_executor(device, hot)
    for at, (one, other) in enumerate(zip(states_of_plans(executor), resident, strict=True)):
        assert torch.equal(one, other), at
    pools = [pages.hot for pages in executor.cache.pages.values()]
    assert [pool is not None for pool in pools] == [hot > 0] * 2
    assert all(pool is None or (pool.pages >= 0).any() == (hot > 2) for pool in pools)


FIRST = (row(tokens(1, 33), 0, (7, 3, 11), 0), sparse_row(tokens(2, 20), 0, (30, 31), 1))
SECOND = (
    row(tokens(3, 20), 33, (7, 3, 11, 20), 0),
    sparse_row(tokens(4, 7), 20, (30, 31), 1),
    row(tokens(5, 4), 0, (12,), 2),
)


@torch.inference_mode()
def test_prompts_that_one_pass_has_no_room_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: in one pass with all pages on the device; with less room, one after another, copied in two ways."""
    monkeypatch.setattr(gpu_prefill, "MIN_ROWS", 48)  # the products of a CPU depend on the number of rows
    found = []
    for hot, most_runs in ((None, 0), (12, 0), (12, 99)):
        monkeypatch.setattr(gpu_staging, "MOST_RUNS", most_runs)
        executor = make_executor(device, hot)
        fused: Any = executor.fused
        if hot is not None:
            fused.staging.num_frames = 4
            passes = list(gpu_staging.passes([[0, 1, 2]], pack(Plan(SECOND), device).spans, fused.staging))
            assert passes == [[0], [1, 2]]
        for one in FIRST:
            fused(pack(Plan((one,)), device), executor.cache, None, [])
        found.append(fused(pack(Plan(SECOND), device), executor.cache, None, [19, 26, 30]).clone())
        check(executor)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@torch.inference_mode()
def test_captured_passes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph copies what its pages hold at that time."""
    if device.type == "cpu":
        monkeypatch.setattr(gpu_prefill, "MIN_ROWS", 48)
        monkeypatch.setattr(gpu_forward, "GRAPH_ROWS", (48,))
    if device.type == "cpu":
        monkeypatch.setattr(gpu_prefill, "capture", lambda forward, _: (Replay(forward, hidden := forward()), hidden))
    found = []
    for hot in (None, 12):
        executor = make_executor(device, hot)
        fused, home = cast("Any", executor.fused), cast("HostMemory", executor.home)
        fused.has_graphs, fused.pool = True, object() if device.type == "cpu" else None
        if hot is not None:
            assert not fused.graph_rows  # room for one sequence, not for those of a graph
            fused.staging = gpu_staging.Staging(executor.cache, home, 64, device)
        states = []
        second = (row(tokens(3, 8), 40, (7, 3, 11), 0), SECOND[2])
        for rows in ((row(tokens(1, 40), 0, (7, 3, 11), 0),), [replace(one, prompt_len=60) for one in second]):
            wanted = [sum(len(one.tokens) for one in rows) - 1]
            states.append(fused(pack(Plan(tuple(rows)), device), executor.cache, None, wanted).clone())
        assert len(fused.prefill_graphs) == 1
        found.append(torch.cat(states))
    assert torch.equal(*found)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_the_same_tokens(kv: str, device: torch.device) -> None:
    """Through the engine: batches, drafts, prefixes that are shared and continued, and pages from a lower tier."""
    common = list(tokens(20, 21))
    settings = Sampling(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = [common + list(tokens(21, 47)), common + list(tokens(22, 5)), list(tokens(23, 9)) * 2]
    found = []
    for hot in (None, 12):
        executor = make_executor(device, hot, kv=kv, speculate="lookup", num_draft=3, snapshots=2, cache_ram=1 << 20)
        engine = Engine(
            executor, SHAPE.sparse_config, Options(kernels="off", speculate="lookup", num_draft=3, snapshots=2)
        )
        sampled = []
        for wanted in (prompts, prompts[:1]):
            sequences = answers(engine, [Request(prompt, settings, boundaries=(21,)) for prompt in wanted])
            sampled += [[one.token for one in sequence.sampled] for sequence in sequences]
        blobs = executor.dump((7, 3, 11), 40, 0)
        executor.restore(blobs, (20, 21, 22), 40, 1)
        again = executor.dump((20, 21, 22), 40, 1)
        assert all(bytes(blobs[name].data) == bytes(again[name].data) for name in blobs)
        check(executor)
        found.append(sampled)
    assert found[0] == found[1]
