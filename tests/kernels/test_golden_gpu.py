"""The vendor's numbers through the kernels for GPUs, end to end.

The golden models have heads of 8 numbers, and tensor cores want 16: they are widened, see `tests.widening`.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.kernels import block_selection
from sala.backends.torch.loader import load_model
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.protocol import Plan, Row, Sampling
from tests.golden import CASES, Case
from tests.kernels.conftest import IS_FULL
from tests.widening import widen

HAS_GPU = torch.cuda.is_available()
SHORT = [case for case in CASES if str(case) == "block16-boundary_128"]
WHOLE = 100_000
GREEDY = Sampling(temperature=0)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def widened(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    folder = tmp_path_factory.mktemp("wide")
    models = {case.model for case in CASES}
    for model in models:
        widen(model, folder / model.name)
    return {model: folder / model.name for model in models}


class Run:
    """A golden case by the kernels, or by the definition: its logits, and the blocks that the kernels chose."""

    @torch.inference_mode()
    def __init__(
        self,
        case: Case,
        model: Path,
        dtype: torch.dtype,
        device: torch.device,
        chunk: int = WHOLE,
        is_fast: bool = True,
        num_decode: int = WHOLE,
    ) -> None:
        self.data = case.data
        self.config = SalaConfig.load(model)
        self.device, self.num_pages = device, 2048 // self.config.sparse_config.block_size
        self.selected: list[np.ndarray] = []
        self.model = load_model(Checkpoint(model), self.config, dtype, device)
        self.steps = GpuForward(self.model, device, 2048, has_graphs=False) if is_fast else None
        self.cache = HybridCache(self.config, self.num_pages, 2, dtype, device)
        ids, count = self.data["input_ids"].tolist(), len(self.data["prefill_logits"])
        ids = ids[: count + num_decode]
        self.sparse_from = self.config.sparse_config.sparse_from(count)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("select_prefill", "select_decode"):
                patch.setattr(block_selection, name, self.heard(getattr(block_selection, name)))
            cuts = range(0, count, chunk)
            self.prefill = np.concatenate([self.feed(ids[at : min(at + chunk, count)], at) for at in cuts])
            self.num_prefill = len(self.selected)
            self.decode = np.concatenate([self.feed(ids[at : at + 1], at) for at in range(count, len(ids))])

    def heard(self, choose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def choose_and_keep(*args: object) -> torch.Tensor:
            selected = choose(*args)
            self.selected.append(selected.cpu().numpy())
            return selected

        return choose_and_keep

    def feed(self, ids: list[int], start: int) -> np.ndarray:
        row = Row(tuple(ids), start, tuple(reversed(range(self.num_pages))), 1, self.sparse_from, GREEDY)
        batch = pack(Plan((row,)), self.device)
        if self.steps is None:
            logits = self.model.logits(self.model(batch, self.cache))
        else:
            logits = self.steps.logits(self.steps(batch, self.cache))
        return logits.float().cpu().numpy()

    def error(self) -> float:
        """How far the logits are from the vendor's, as a share of their size."""
        expected = np.concatenate((self.data["prefill_logits"], self.data["decode_logits"]))
        found = np.concatenate((self.prefill, self.decode))
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))

    def check(self) -> None:
        np.testing.assert_allclose(self.prefill, self.data["prefill_logits"], atol=1e-4, rtol=0)
        np.testing.assert_allclose(self.decode, self.data["decode_logits"][: len(self.decode)], atol=1e-4, rtol=0)

    def same_choices(self) -> list[bool]:
        """Of every layer, kv head and row of a sparse prompt: are the blocks those of the vendor?"""
        wanted = self.data.get("prefill_topk_idx")
        if wanted is None:
            return []
        layers = len(self.config.sparse_layers)
        found = [[row for rows in self.selected[i : self.num_prefill : layers] for row in rows] for i in range(layers)]
        mine = [as_set(row[head]) for rows in found for head in range(len(rows[0])) for row in rows]
        theirs = [as_set(row) for layer in wanted for head in layer for row in head]
        return [a == b for a, b in zip(mine, theirs, strict=True)]


def as_set(blocks: np.ndarray) -> set[int]:
    return {int(block) for block in blocks if block >= 0}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wider_heads_are_the_same_model(case: Case, widened: dict[Path, Path], device: torch.device) -> None:
    Run(case, widened[case.model], torch.float32, device, is_fast=False).check()


@pytest.mark.skipif(not HAS_GPU and not IS_FULL, reason="slow in the interpreter: SALA_TEST_FULL=1")
@pytest.mark.parametrize("chunk", [65, WHOLE] if HAS_GPU else [WHOLE])
@pytest.mark.parametrize("case", CASES if HAS_GPU else SHORT, ids=str)
def test_in_fp32(case: Case, chunk: int, widened: dict[Path, Path], device: torch.device) -> None:
    run = Run(case, widened[case.model], torch.float32, device, chunk, num_decode=WHOLE if HAS_GPU else 2)
    assert len(run.decode) >= 2
    run.check()
    assert all(run.same_choices())


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter's bf16 products are wrong")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_bf16(case: Case, widened: dict[Path, Path], device: torch.device) -> None:
    """No further from the vendor's numbers than the definition is in bf16, and the same blocks but for near-ties."""
    run = Run(case, widened[case.model], torch.bfloat16, device)
    definition = Run(case, widened[case.model], torch.bfloat16, device, is_fast=False)
    same = run.same_choices()
    print(f"{case}: error {run.error():.2e}, the definition's {definition.error():.2e}, choices {np.mean(same):.1%}")
    assert run.error() <= 1.5 * definition.error() + 1e-3
    assert sum(same) >= 0.95 * len(same)
