"""The kernels on vLLM's blocks, where a page is found by the number of its tile."""

import pytest
import torch

from sala.backends.torch.ops.lightning import decay_slopes, lightning_ragged
from sala.plugins.vllm.dispatch import advance_states
from sala.plugins.vllm.memory import RequestRow
from tests.integrations.vllm_rows import compare

# Long ones by the reference: the interpreter is slow. Then rows of one token, of both regimes, alone and beside longer.
STEPS = [[(0, 190), (1, 100)], [(2, 9), (1, 1), (0, 1)], [(1, 1), (2, 1), (0, 3)]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with pages on the CPU")
def test_steps_give_what_the_engine_gives() -> None:
    assert compare(STEPS, most_by_kernels=20) < 1e-5


def test_states_advance_by_kernels(device: torch.device) -> None:
    torch.manual_seed(0)
    lengths = [1, 70, 1, 3]
    q, k, v = torch.randn(3, sum(lengths), 4, 16, device=device)
    states = torch.randn(7, 4, 16, 16, device=device)
    slopes, scale, slots = decay_slopes(4, device), 0.25, torch.tensor([5, 0, 2, 3], device=device)
    rows = [RequestRow(i, 8 if i < 3 else 0, length, 0) for i, length in enumerate(lengths)]
    past = states[slots]
    past[3] = 0
    want, after = lightning_ragged(q, k, v, past, lengths, slopes, scale)
    got = advance_states(q, k, v, states, slots, rows, slopes, scale, has_kernels=True)
    assert torch.allclose(got, want, atol=1e-4)
    assert torch.allclose(states[slots], after, atol=1e-4)
