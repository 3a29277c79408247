"""The engine on the GPU path, which samples on the device and runs ahead: the tokens of the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sala.backends.torch.executor import TorchExecutor
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.checkpoint.lora import Adapter, Change
from sala.engine.engine import Engine
from sala.engine.scheduler import Request, SequenceState
from sala.errors import ModelBroken
from sala.protocol import Capacity, Options, Sampling, Verdict
from tests.integrity import integrity
from tests.kernels.test_gpu_forward import MAX_TOKENS, SHAPE, make_model, tokens

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CAPACITY = Capacity(num_pages=90, page_size=16, num_slots=16, prefill_chunk=64, max_tokens=MAX_TOKENS, max_batch=4)


class Odd:
    """Allows every other token, so that the next step needs to know the last one."""

    allows_drafts = False

    def __init__(self) -> None:
        self.parity = 0

    def mask(self) -> bytes:
        return bytes([0x55 if self.parity else 0xAA] * 8)

    def observe(self, token: int) -> Verdict | None:
        self.parity = token % 2
        return None


def make_engine(device: torch.device, is_ahead: bool, **more: Any) -> Engine:
    options = Options(**{"kernels": "off", "snapshots": 4, **more})
    executor = TorchExecutor(make_model(SHAPE).to(device), CAPACITY, device, torch.float32, options)
    if is_ahead:
        has_graphs = device.type == "cuda"
        executor.run_ahead(GpuForward(executor.model, device, MAX_TOKENS, has_graphs=has_graphs))
    return Engine(executor, SHAPE.sparse_config, options)


def requests() -> list[Request]:
    """Prompts of both regimes and all kinds of sampling."""
    length = {"max_tokens": 9, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9},
        {"temperature": 1.2, "seed": -5, "top_k": 7, "logprobs": 3},
        {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"temperature": 0.5, "seed": 11, "min_p": 0.05, "logit_bias": {5: 4.0, 9: -100.0}},
        {"temperature": 0, "min_tokens": 6, "logprobs": 0},
    ]
    sizes = (5, 30, 70, 41, 17, 90)
    found = [
        Request(list(tokens(i, size)), Sampling(**{**kind, **length}), stop_ids=(7, 9))
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]
    found[1].controls = (Odd(),)
    return found


def answers(engine: Engine, wanted: list[Request]) -> list[SequenceState]:
    sequences = [engine.submit(request) for request in wanted]
    for _ in range(200):
        if all(sequence.is_finished for sequence in sequences):
            break
        engine.step()
        assert integrity(engine) == []
    for sequence in sequences:
        assert sequence.error is None
        assert sequence.finish_reason == "length"
    return sequences


def test_the_same_tokens_as_the_reference(device: torch.device) -> None:
    together, alone = make_engine(device, is_ahead=True), make_engine(device, is_ahead=False)
    assert together.capacity.can_run_ahead
    for mine, theirs in zip(answers(together, requests()), answers(alone, requests()), strict=True):
        assert [one.token for one in mine.sampled] == [one.token for one in theirs.sampled]
        for one, other in zip(mine.sampled, theirs.sampled, strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            assert one.logprob is None or one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top_logprobs] == [token for token, _ in other.top_logprobs]


def test_a_model_of_no_numbers_ends_its_requests(device: torch.device) -> None:
    """One row of the head is damaged; the check rides with the tokens. The engine lives."""
    engine = make_engine(device, is_ahead=True)
    executor: Any = engine._executor
    head = executor.fused.head
    good = head[7].clone()
    head[7] = float("nan")
    sequences = [engine.submit(request) for request in requests()[:2]]
    for _ in range(50):
        engine.step()
    assert [type(sequence.error) for sequence in sequences] == [ModelBroken] * 2
    assert integrity(engine) == []
    head[7] = good
    settings = Sampling(temperature=0, max_tokens=2, ignore_eos=True)
    assert answers(engine, [Request(list(tokens(0, 5)), settings)])


def test_a_second_request_in_a_slot_has_counts_of_its_own(device: torch.device) -> None:
    """The counts of penalties stay on the device: those of an earlier sequence in the slot must not show."""
    penalized = [request for request in requests() if request.sampling.has_penalty] * 3
    engine = make_engine(device, is_ahead=True, max_batch=1, snapshots=0)
    first, *others = answers(engine, penalized)
    for other in others:
        assert other.sampled == first.sampled


def test_snapshots_that_prefill_stores_on_its_way(device: torch.device) -> None:
    """Requests that continue from a snapshot in the middle of an earlier prompt answer as if nothing were cached."""
    prompt = list(tokens(20, 90))
    is_fast = device.type == "cuda"  # the interpreter takes seconds for a prompt
    settings = Sampling(temperature=0, max_tokens=6 if is_fast else 3, ignore_eos=True)
    engine, fresh = make_engine(device, is_ahead=True, snapshots=12), make_engine(device, is_ahead=is_fast, snapshots=0)
    answers(engine, [Request(prompt, settings, boundaries=(37, 70))])
    for length, cached in ((90, 89), (80, 70), (69, 64), (38, 37)):
        again = Request(prompt[:length], settings)
        mine, theirs = answers(engine, [again])[0], answers(fresh, [again])[0]
        assert mine.num_cached == cached
        assert mine.sampled == theirs.sampled


def test_adapters_beside_the_gpu_path(device: torch.device) -> None:
    """Rows with an adapter run in the model, all others in the fused forward: the tokens of the reference."""
    rng = np.random.default_rng(4)

    def change(linear: Any) -> Change:
        up, down = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((linear.out_features, 2), (2, linear.in_features))
        )
        return Change(up, down, 0.05)

    def short() -> list[Request]:
        return [
            replace(requests()[at], sampling=Sampling(temperature=0, max_tokens=3, ignore_eos=True)) for at in (4, 0)
        ]

    shown = make_model(SHAPE)
    names = [name for name, linear in shown.named_modules() if name.endswith(("q_proj", "down_proj"))]
    adapter = Adapter(Path("a"), {name: change(shown.get_submodule(name)) for name in names}, "a")
    found = []
    for is_fused in (False, True):
        model, options = make_model(SHAPE).to(device), Options(kernels="off", snapshots=4)
        fused = GpuForward(model, device, MAX_TOKENS, has_graphs=device.type == "cuda") if is_fused else None
        executor = TorchExecutor(model, CAPACITY, device, torch.float32, options, [adapter])
        executor.fused = fused
        wanted = short()
        wanted[0].adapter = wanted[0].salt = "a"
        found.append(answers(Engine(executor, SHAPE.sparse_config, options), wanted))
    plain = [[each.token for each in one.sampled] for one in answers(make_engine(device, is_ahead=False), short())]
    reference, fast = ([[each.token for each in one.sampled] for one in some] for some in found)
    assert reference == fast
    assert [one == other for one, other in zip(fast, plain, strict=True)] == [False, True]


def test_sources_of_the_reference(device: torch.device) -> None:
    """Beside rows without sources, from prompts and from decode rows of both regimes."""
    found = []
    for is_ahead in (True, False):
        engine = make_engine(device, is_ahead)
        engine._executor.weigh_heads([[1.0 + layer + 2 * head for head in range(4)] for layer in range(2)])
        wanted = requests()[2:5]
        for request in wanted:
            request.sampling = replace(request.sampling, max_tokens=3, return_sources=request is not wanted[1])
        found.append(answers(engine, wanted))
    for mine, theirs in zip(*found, strict=True):
        assert [one.token for one in mine.sampled] == [one.token for one in theirs.sampled]
        if not mine.sampling.return_sources:
            assert mine.gathered is None
            continue
        assert mine.gathered is not None
        assert theirs.gathered is not None
        ours, expected = mine.gathered.by_block(), theirs.gathered.by_block()
        np.testing.assert_allclose(ours, expected, rtol=2e-3, atol=1e-4)
        assert sum(ours) == pytest.approx(3, rel=1e-3)
