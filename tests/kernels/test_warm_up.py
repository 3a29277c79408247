"""What a warm-up leaves to be compiled later: nothing that depends on the length of a prompt."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from sala.backends.torch import executor
from sala.backends.torch.batch import pack
from sala.backends.torch.executor import TorchExecutor
from sala.backends.torch.fast import gpu_decode, gpu_prefill
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.kernels import block_scores, pdl, top_blocks, triton_kernels
from sala.backends.torch.model import SalaModel
from sala.checkpoint.lora import Adapter, Change
from sala.checkpoint.random import RELEASED
from sala.engine.engine import Engine
from sala.engine.scheduler import Request
from sala.protocol import Capacity, Options, Plan, Row, Sampling
from tests.kernels.test_gpu_forward import SHAPE, Replay, make_model

LONGEST = 1 << 20
SPARSE = RELEASED.sparse_config
CONFIG = replace(SHAPE, sparse_config=SPARSE)
CAPACITY = Capacity(num_pages=600, page_size=64, num_slots=16, prefill_chunk=8448, max_tokens=LONGEST, max_batch=2)
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter is asked for")


class Recorder:
    """In place of the interpreter: notes which variants of kernels are asked for, and computes nothing."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        left = set(kernel.kwargs.get("do_not_specialize") or ())
        constants = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
        key = [
            (name, value if name in constants or name not in kernel.arg_names else variant(value, name in left))
            for name, value in sorted(given.items())
        ]
        self.seen.add((kernel.__name__, *key))

    def new(self, work: Any) -> set[tuple[Any, ...]]:
        """Return what only this work asks for."""
        before = set(self.seen)
        work()
        return self.seen - before


def variant(value: Any, is_general: bool) -> Any:
    """Return what a compiler makes of an argument: its type and, unless told otherwise, whether 16 divides it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = 32 if -(1 << 31) <= value < 1 << 31 else 64
        return (size,) if is_general else (size, value == 1, value % 16 == 0)
    return value if value is None else type(value)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    from triton.runtime.interpreter import InterpretedFunction

    found = Recorder()
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *args, **named: found.run(kernel, *args, **named))
    monkeypatch.setattr(pdl, "can_use_pdl", lambda device: True)
    monkeypatch.setattr(block_scores, "num_processors", lambda device: 132)
    for module in (gpu_decode, gpu_prefill):
        monkeypatch.setattr(module, "capture", lambda forward, _: (Replay(forward, hidden := forward()), hidden))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(triton_kernels, "note_warm_up", lambda facts: None)
    return found


def make_engine(monkeypatch: pytest.MonkeyPatch, adapters: Sequence[Adapter] = (), **more: Any) -> Engine:
    """An engine as on a GPU: its executor finds the fused forward by itself, and captures graphs."""

    def select(model: SalaModel, device: torch.device, max_tokens: int, options: Options) -> GpuForward:
        fused = GpuForward(model, device, max_tokens)
        fused.pool = object()
        return fused

    monkeypatch.setattr(executor, "select_forward", select)
    options = Options(**{"kernels": "off", "snapshots": 4, **more})
    model = make_model(CONFIG).bfloat16()
    return Engine(TorchExecutor(model, CAPACITY, CPU, torch.bfloat16, options, adapters), SPARSE, options)


@torch.inference_mode()
def read(engine: Engine, start: int, count: int, is_last: bool, is_sparse: bool) -> None:
    """A piece of a prompt, whose pages are all the same one."""
    one: Any = engine.executor
    num_pages = -(-(start + count) // SPARSE.block_size)
    row = Row((1,) * count, start, (3,) * num_pages, 0, 0 if is_sparse else SPARSE.dense_len, prompt_len=start + count)
    one.fused(pack(Plan((row,)), CPU), one.cache, None, [count - 1] if is_last else [])


ENDS = (5, 300, 4000, 6144, 8191, 8192, 9000, 12000, 16500, 17001, 20000, 34900, 40000, 67000, 70000, 131072, 134000)
ENDS = (*ENDS, 200000, 262144, 270000, 524288, 540000, LONGEST)


def adapter() -> Adapter:
    change = Change(np.ones((CONFIG.hidden_size, 2), np.float32), np.ones((2, CONFIG.hidden_size), np.float32), 0.1)
    return Adapter(Path("a"), {"model.layers.0.mlp.gate_proj": change}, "a")


def test_no_length_of_a_prompt_asks_for_a_new_kernel(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch)
    assert recorder.new(lambda: engine.warm_up(lambda done, total: None))
    for end in ENDS:
        for count in (1, 40, 129, 700, 5000):
            start = max(0, end - count)
            for is_last in (False, True):
                for is_sparse in (True,) if end >= SPARSE.dense_len else (False, True):
                    new = recorder.new(lambda: read(engine, start, end - start, is_last, is_sparse))  # noqa: B023
                    assert not new, (end, count, is_last, is_sparse)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_sizes_that_launch_every_variant(groups: int) -> None:
    """Those of any width and number of queries are among them."""

    def constants(n: int, width: int) -> tuple[Any, ...]:
        config = top_blocks.top_config(width, n * groups, SPARSE)
        chosen = top_blocks.top_constants(SPARSE, groups, SPARSE.num_selected, width, config)
        return n <= pdl.MAX_ROWS, config.options.items(), tuple(chosen.items())

    known = [constants(*size) for size in top_blocks.distinct_sizes(SPARSE, groups, LONGEST // SPARSE.block_size)]
    for width in (*range(1, 16385, 61), *(1 << at for at in range(15)), *((1 << at) + 1 for at in range(14))):
        for n in (1, 31, 32, 33, 128, 129, 256, 257, 8448):
            assert constants(n, width) in known, (n, width)
    assert len(known) <= 16


@pytest.mark.parametrize("kind", ["ahead", "adapters", "drafts"])
def test_requests_find_all_graphs_captured(kind: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with adapters and with drafts, which are not judged by the steps of a warm-up."""
    adapters = [adapter()] if kind == "adapters" else []
    more = {"speculate": "lookup", "num_draft": 3} if kind == "drafts" else {}
    engine = make_engine(monkeypatch, adapters, **more)
    assert engine.capacity.can_run_ahead == (kind != "adapters")
    reports: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: reports.append((done, total)))
    done, totals = [one for one, _ in reports], {total for _, total in reports}
    assert done == list(range(1, len(done) + 1))
    assert totals == {len(done)}
    judged: Any = engine.speculation
    assert (judged.rounds, judged._plain.steps, judged._drafting.steps) == (0, 0 if kind == "drafts" else ANY, 0)
    fused: Any = engine.executor
    graphs = [dict(held) for held in (fused.fused.graphs, fused.fused.prefill_graphs)]
    assert all(graphs)

    def answer() -> None:
        for length in (30, 300, 9000):
            settings = Sampling(temperature=0.7, top_p=0.9, seed=1, max_tokens=8, ignore_eos=True)
            engine.submit(Request([length % 60] * length, replace(settings, repetition_penalty=1.2)))
            engine.submit(Request([1] * length, settings))
        while not engine.is_idle:
            engine.step()

    assert not recorder.new(answer)
    assert [fused.fused.graphs, fused.fused.prefill_graphs] == graphs


def test_a_note_of_a_warm_up_is_of_these_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    triton_kernels.note_warm_up({"model": "a model", "gpu": "a GPU", "seconds": 3.0})
    (tmp_path / "sala-warm-up" / "old.json").write_text('{"model": "a model", "gpu": "a GPU", "torch": "2.0"}')
    (tmp_path / "sala-warm-up" / "odd.json").write_text("[]")
    (note,) = triton_kernels.warm_ups()
    assert note["seconds"] == 3.0
    for module in ("sala.backends.torch.kernels.triton_kernels", "torch", "triton"):
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.__version__", "1000.0")
            assert triton_kernels.warm_ups() == []
