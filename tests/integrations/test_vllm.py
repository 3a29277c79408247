"""The parts of the vLLM plug-in that need no vLLM: where things lie in its blocks, and who may share a prefix."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from sala.backends.torch.ops.lightning import decay_slopes, lightning_prefill
from sala.backends.torch.ops.sparse import pool_keys
from sala.checkpoint.packing import dequantize, quantize
from sala.checkpoint.random import RELEASED
from sala.config import SparseConfig
from sala.errors import CheckpointError, ConfigError, MissingExtra, install_command
from sala.plugins import vllm
from sala.plugins.vllm import middleware
from sala.plugins.vllm.dispatch import advance_states
from sala.plugins.vllm.memory import BlockLayout, RequestRow, plan_step
from sala.plugins.vllm.quantized import expand
from sala.plugins.vllm.regime import SPARSE_KEY, block_keys
from sala.plugins.vllm.sizing import plan_blocks
from sala.quantization_config import Groups, QuantConfig
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


def packed_matrix(bits: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The three tensors of a matrix [8, 64] as safetensors gives them to vLLM, and what they stand for."""
    weights = np.random.default_rng(bits).standard_normal((8, 64), np.float32)
    packed = quantize(weights, bits, 32, "F32")
    tensors = {
        "weight": torch.from_numpy(packed.codes.copy()).view(torch.uint32),
        "scales": torch.from_numpy(packed.scales.copy()),
        "biases": torch.from_numpy(packed.biases.copy()),
    }
    return tensors, torch.from_numpy(dequantize(packed).copy())


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_packed_weights_are_expanded_in_any_order(bits: int) -> None:
    tensors, wanted = packed_matrix(bits)
    table = QuantConfig(2, 64, (("a", Groups(bits, 32)),))
    norm = torch.ones(3)
    mixed = [("a.biases", tensors["biases"]), ("n.weight", norm), ("a.weight", tensors["weight"])]
    got = dict(expand([*mixed, ("a.scales", tensors["scales"])], table, torch.float32))
    assert list(got) == ["n.weight", "a.weight"]
    assert got["n.weight"] is norm
    torch.testing.assert_close(got["a.weight"], wanted)
    assert (
        dict(expand([(f"a.{part}", one) for part, one in tensors.items()], table, torch.bfloat16))["a.weight"].dtype
        == torch.bfloat16
    )


def test_packed_weights_that_are_damaged() -> None:
    tensors, _ = packed_matrix(4)
    named = [(f"a.{part}", one) for part, one in tensors.items()]
    with pytest.raises(CheckpointError, match="a has no weight, scales or biases"):
        list(expand(named[:2], QuantConfig(4, 32), torch.float32))
    with pytest.raises(CheckpointError, match="a does not have the bits"):
        list(expand(named, QuantConfig(8, 32), torch.float32))


def test_block_plan() -> None:
    """What vLLM says when it starts: blocks of 2,048 tokens with the released model, 512 with smol-sala in fp32."""
    plan = plan_blocks(RELEASED, 2)
    assert (plan.block_tokens, plan.block_bytes, plan.groups) == (2048, 8 * 2048 * 1088, (1, 3))
    assert plan.bytes_of(1) == 7 * plan.block_bytes  # one block, and two states in each of three groups
    assert plan.blocks_of(2049) == 8
    assert plan.longest(plan.bytes_of(10_000)) == 10_240
    assert plan.longest(plan.bytes_of(1) - 1) == 0
    halves, stages = plan_blocks(RELEASED, 2, num_ranks=2), plan_blocks(RELEASED, 2, num_stages=2)
    assert (halves.block_tokens, halves.block_bytes) == (2048, plan.block_bytes // 2)
    assert (stages.block_tokens, stages.block_bytes) == (2048, plan.block_bytes // 2)
    assert plan_blocks(RELEASED, 2, num_ranks=4).block_tokens == 1024  # a state is halved again, a kv head is not


def test_errors_have_the_codes_of_the_api() -> None:
    def code(status: int, **error: object) -> str:
        body = json.dumps({"error": {"message": "no", "type": "BadRequestError", "code": status, **error}}).encode()
        return json.loads(middleware.name_error(status, body))["error"]["code"]

    assert code(404, param="model") == "model_not_found"
    assert code(404) == "not_found"
    assert code(400, param="temperature") == "invalid_value"
    assert code(400, message="This model's maximum context length is 4096 tokens.") == "context_length_exceeded"
    assert code(503) == "server_error"
    key = json.loads(middleware.name_error(401, b'{"error": "Unauthorized"}'))["error"]
    assert (key["message"], key["code"]) == ("Unauthorized", "invalid_api_key")
    for other in (b"not json", b"[1]", b'{"detail": "Not Found"}'):
        assert middleware.name_error(404, other) == other


def test_routes_that_vllm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        answers: dict[str, tuple[int, Any]] = {
            "/v1/models": (200, {"data": [{"id": "small"}]}),
            "/health": (200, {}),
            "/v1/chat/completions": (400, {"error": {"code": 400}}),
        }
        status, content = answers[scope["path"]]
        body = json.dumps(content).encode()
        headers = [(b"content-length", str(len(body)).encode()), (b"x-request-id", b"7")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})

    monkeypatch.setattr(middleware, "allow_several_greedy", lambda: None)  # the only part that needs vLLM
    client = TestClient(middleware.ClientMiddleware(inner))
    assert client.get("/v1/models/small").json() == {"id": "small"}
    assert client.get("/v1/models").json() == {"data": [{"id": "small"}]}
    missing = client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/health/ready").status_code == client.get("/health/live").status_code == 200
    refused = client.post("/v1/chat/completions")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    assert refused.headers["x-request-id"] == "7"
