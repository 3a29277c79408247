"""The parts of the vLLM plug-in that need no vLLM: where things lie in its blocks, and who may share a prefix."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sala.backends.torch.ops.lightning import decay_slopes, lightning_prefill
from sala.backends.torch.ops.sparse import pool_keys
from sala.config import SparseConfig
from sala.errors import ConfigError, MissingExtra, install_command
from sala.plugins import vllm
from sala.plugins.vllm.dispatch import advance_states
from sala.plugins.vllm.memory import BlockLayout, RequestRow, plan_step
from sala.plugins.vllm.regime import SPARSE_KEY, block_keys
from tests.integrations.vllm_rows import CONFIG, SMALL, STEPS, Blocks, compare

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def test_import_is_free() -> None:
    names = "('vllm', 'torch', 'transformers')"
    code = f"import sys, sala, sala.plugins.vllm; print([name for name in {names} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_register_says_what_is_missing() -> None:
    with pytest.raises(MissingExtra, match=re.escape(f"vllm is not installed; run: {install_command('vllm')}")):
        vllm.register()


@pytest.mark.parametrize(
    ("version", "is_known"), [("0.32.0+cpu", True), ("0.32.1", True), ("0.33.0", False), ("0.3.2", False)]
)
def test_one_minor_version(version: str, is_known: bool) -> None:
    assert vllm.fits(version) == is_known


def test_released_layout() -> None:
    layout = BlockLayout(SparseConfig(), num_groups=2, head_dim=128)
    assert layout.page_rows == 136  # 64 keys, 64 values, 4 + 1 pooled keys, 3 to spare
    assert layout.block_tokens == 512
    assert layout.token_bytes(2) == 1088  # 1024 of keys and values, 40 of pooled keys
    assert layout.page_rows * 512 // 64 % 64 == 0  # whole tiles


@pytest.mark.parametrize(
    ("kernel", "stride", "block"), [(32, 16, 64), (8, 4, 16), (16, 8, 64), (12, 6, 24), (2, 1, 64)]
)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_blocks_are_whole_tiles(kernel: int, stride: int, block: int, groups: int) -> None:
    layout = BlockLayout(SparseConfig(kernel, stride, block_size=block), groups, 48)
    rows = groups * layout.page_rows * (layout.block_tokens // block)
    assert rows % block == 0
    assert layout.page_rows >= 2 * block + block // stride + block // (4 * stride)
    assert layout.token_bytes(2) * layout.block_tokens == rows * 48 * 2


def test_a_shape_that_fills_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim 3"):
        BlockLayout(SparseConfig(), 1, 3).token_bytes(2)


def test_steps_give_what_the_engine_gives() -> None:
    assert compare(STEPS) < 1e-5


def test_pooled_keys_are_kept_step_by_step() -> None:
    """Whatever the pieces, the pools hold the means of all whole windows, each written once."""
    torch.manual_seed(0)
    blocks, start, written = Blocks(1), 0, 0
    keys = torch.randn(203, CONFIG.num_key_value_heads, CONFIG.head_dim)
    for length in (1, 30, 64, 77, 1, 1, 1, 28):
        step = plan_step([RequestRow(0, start, length, 0)], blocks.tables, 64, SMALL)
        part = keys[start : start + length]
        blocks.pages.append(step, part, part)
        start += length
        written += len(step.fine)
    assert start == 203
    k1, k2 = blocks.pages.pooled(blocks.tables[0].long())
    for pool, kernel, stride in ((k1, 8, 4), (k2, 32, 16)):
        want = pool_keys(keys.transpose(0, 1), kernel, stride)
        first = kernel // stride - 1
        assert torch.allclose(pool.flatten(1, 2)[:, first : first + want.shape[1]], want, atol=1e-6)
    assert written == 203 // 4 - 1


def test_a_step_without_tokens() -> None:
    step = plan_step([RequestRow(0, 5, 0, 0)], torch.zeros(1, 4, dtype=torch.int32), 64, SMALL)
    assert (step.rows, step.num_tokens, step.fine.shape, step.coarse.shape) == ((), 0, (0, 8), (0, 32))


def test_states_advance_in_their_slots() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 60, 4, 16)
    slopes, scale = decay_slopes(4), 0.25
    states = torch.full((6, 4, 16, 16), torch.nan)  # whatever the last owner left
    want, after = lightning_prefill(q[:40], k[:40], v[:40], torch.zeros(4, 16, 16), slopes, scale)
    other, _ = lightning_prefill(q[40:], k[40:], v[40:], torch.zeros(4, 16, 16), slopes, scale)
    outputs = []
    for mine, theirs in ((slice(0, 13), slice(40, 59)), (slice(13, 39), None), (slice(39, 40), slice(59, 60))):
        parts = [part for part in (mine, theirs) if part is not None]
        rows = [RequestRow(0, mine.start, mine.stop - mine.start, 0)]
        if theirs is not None:
            rows.append(RequestRow(1, theirs.start - 40, theirs.stop - theirs.start, 0))
        slots = torch.tensor([4, 1][: len(rows)])
        packed = (torch.cat([x[part] for part in parts]) for x in (q, k, v))
        outputs.append(advance_states(*packed, states, slots, rows, slopes, scale, has_kernels=False))
    assert torch.allclose(torch.cat((outputs[0][:13], outputs[1], outputs[2][:1])), want, atol=1e-5)
    assert torch.allclose(torch.cat((outputs[0][13:], outputs[2][1:])), other, atol=1e-5)
    assert torch.allclose(states[4], after, atol=1e-5)
    assert states[[0, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize(
    ("prompt_len", "end", "keys"),
    [
        (8191, 1 << 20, ()),  # dense
        (8192, 6144, ()),  # as far as both agree
        (8192, 6145, (SPARSE_KEY,)),
        (100_000, 8192, (SPARSE_KEY,)),
    ],
)
def test_regimes_share_what_they_agree_on(prompt_len: int, end: int, keys: tuple[tuple[str, str], ...]) -> None:
    assert block_keys(SimpleNamespace(num_prompt_tokens=prompt_len), end, SparseConfig()) == keys


def test_sparse_from_the_start_is_one_regime_key() -> None:
    always = replace(SparseConfig(), dense_len=0)
    assert block_keys(SimpleNamespace(num_prompt_tokens=1), 6145, always) == (SPARSE_KEY,)
