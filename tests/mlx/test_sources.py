"""Sources on MLX: the blocks of the vendor's model, and the shares that torch gathers, on the golden cases."""

import random

import numpy as np
import pytest

from sala.backends.mlx.executor import open_executor
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.llm import LLM
from sala.protocol import Options
from tests.golden import CASES, Case, checkpoint
from tests.mlx.place import DEVICE
from tests.parity.test_sources import by_block, check_blocks, decode, gathered_steps, weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_of_the_vendor_and_shares_of_torch(case: Case) -> None:
    options = Options(ctx=2048, device=DEVICE, dtype="float32", max_batch=1, snapshots=0)
    steps = decode(open_executor(Checkpoint(case.model), SalaConfig.load(case.model), options), case)
    for ours, theirs in zip(steps, gathered_steps(case, "off"), strict=True):
        np.testing.assert_allclose(by_block(ours), by_block(theirs), atol=1e-5)
    check_blocks(case, steps)


@pytest.mark.parametrize("options", [{}, {"speculate": "layers", "draft_layers": 99}], ids=["plain", "drafts"])
@pytest.mark.parametrize("length", [40, 122, 200])
def test_answers_have_the_sources_of_torch(length: int, options: dict[str, object]) -> None:
    """Steps that are built ahead, drafts of both regimes in one step, and the weights of heads."""
    prompt = [random.Random(length).randrange(256) for _ in range(length)]
    found = []
    for backend, more in (("mlx", options), ("torch", {})):
        device = DEVICE if backend == "mlx" else "cpu"
        llm = LLM(checkpoint("block16"), backend=backend, device=device, ctx=1024, **more)  # type: ignore[arg-type]
        llm.engine.speculation._is_measured = False
        layers, heads = len(llm.config.sparse_layers), llm.config.num_attention_heads
        llm._executor.weigh_heads([[1.0 + layer + 2 * head for head in range(heads)] for layer in range(layers)])
        found.append(weights(llm, prompt))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4)


def test_sources_do_not_change_the_answer() -> None:
    llm = LLM(checkpoint("block16"), backend="mlx", device=DEVICE, ctx=1024)
    options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    prompt = [random.Random(7).randrange(256) for _ in range(300)]
    without, with_sources = (llm.generate(prompt, return_sources=wants, **options) for wants in (False, True))
    assert without.logprobs == with_sources.logprobs
    assert without.sources is None
