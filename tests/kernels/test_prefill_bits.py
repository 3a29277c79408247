"""On a GPU, in bf16 and with the widths of the released model: chunks and company do not change a bit of a prompt.

Its matrix products come from the library, whose rows have the same bits for any number of rows that a pass has.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache, raw
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.loader import random_model
from sala.checkpoint.random import RELEASED
from sala.protocol import Plan, Row, Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CONFIG = replace(
    RELEASED, num_hidden_layers=4, mixer_types=("minicpm4", "lightning-attn", "lightning-attn", "minicpm4")
)
LENGTH, PAGES = 2300, tuple(range(3, 40))
SNAPSHOTS = ((999, 5), (1024, 6), (LENGTH - 1, 7))


class Prompts:
    """A model and an empty cache; a prompt in slot 1, others beside it."""

    def __init__(self, forward: GpuForward, kv: torch.dtype | None) -> None:
        self.forward = forward
        self.cache = HybridCache(CONFIG, 100, 8, torch.bfloat16, forward.device, kv)
        for pages in self.cache.pages.values():
            for pool in pages.pools:
                raw(pool).zero_()

    def run(self, *rows: Row) -> torch.Tensor:
        batch = pack(Plan(rows), self.forward.device)
        return self.forward(batch, self.cache, wanted=batch.sampled_rows(Plan(rows)))

    def bits(self) -> list[torch.Tensor]:
        """The keys, values and pooled keys of the prompt, and its states."""
        pools = [raw(pool)[:, list(PAGES)] for pages in self.cache.pages.values() for pool in pages.pools]
        return pools + [states[[1, 5, 6, 7]] for states in self.cache.states.values()]


def part(ids: tuple[int, ...], begin: int, end: int, sparse_from: int) -> Row:
    snapshots = tuple((length, slot) for length, slot in SNAPSHOTS if begin < length <= end)
    sampling = Sampling(temperature=0) if end == LENGTH else None
    return Row(ids[begin:end], begin, PAGES, 1, sparse_from, sampling, prompt_len=LENGTH, snapshots=snapshots)


@pytest.mark.parametrize("kv", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("sparse_from", [1 << 30, 0])
@torch.inference_mode()
def test_chunks_and_company_change_no_bit(sparse_from: int, kv: torch.dtype | None) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    forward = GpuForward(random_model(CONFIG, torch.bfloat16, device), device, 8192)
    ids = tuple(torch.randint(0, CONFIG.vocab_size, (LENGTH,)).tolist())
    whole = Prompts(forward, kv)
    hidden = whole.run(part(ids, 0, LENGTH, sparse_from))
    for cuts in ((0, 64, 999, 1024, LENGTH), (0, 1984, LENGTH - 1, LENGTH)):
        cut = Prompts(GpuForward(forward.model, device, 8192, has_graphs=False), kv)
        for begin, end in pairwise(cuts):
            other = Row(ids[7:300], 0, tuple(range(50, 55)), 2, sparse_from, Sampling(temperature=0), prompt_len=293)
            last = cut.run(part(ids, begin, end, sparse_from), *([other] if begin else []))
        assert torch.equal(last[:1], hidden)
        for found, expected in zip(cut.bits(), whole.bits(), strict=True):
            assert torch.equal(found, expected)
