"""A quantized checkpoint computes what its dequantized weights compute, however its rows are batched."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sala
from sala.backends.torch.fast import dispatch
from sala.backends.torch.kernels import native
from sala.backends.torch.linears import DECODE_ROWS, AffineEmbedding, AffineLinear, AffineWeight, LinearKernels
from sala.backends.torch.ops import affine
from sala.checkpoint.names import check_tensors
from sala.checkpoint.packing import Packed, dequantize, quantize, unpack
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_weights
from sala.cli.show import describe
from sala.config import SalaConfig
from sala.errors import SalaError
from sala.llm import LLM
from sala.quantization_config import Groups, QuantConfig

SCALE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MIXED = QuantConfig(
    4,
    32,
    (
        ("model.embed_tokens", Groups(8, 32)),
        ("model.layers.0.self_attn.q_proj", Groups(3, 64)),
        ("model.layers.1.mlp.up_proj", None),
        ("model.layers.2.self_attn.z_proj", Groups(6, 128)),
    ),
)


def to_torch(packed: Packed) -> AffineWeight:
    dtype = SCALE_DTYPES[packed.dtype]
    scales, biases = (torch.from_numpy(x.view(np.uint8)).view(dtype) for x in (packed.scales, packed.biases))
    return AffineWeight(torch.from_numpy(packed.codes.view(np.int32)), scales, biases, packed.bits, packed.group_size)


def write_pair(target: Path, config: SalaConfig, quantization: QuantConfig, dtype: str = "F16") -> tuple[Path, Path]:
    """A checkpoint with quantized matrices, and one with the same matrices dequantized."""
    write_random(target / "source", config)
    tensors: dict[str, tuple[str, Any]] = {}
    plain: dict[str, tuple[str, Any]] = {}
    with Checkpoint(target / "source") as source:
        for name, info in source.tensors.items():
            value = np.frombuffer(source.read(name).data, np.float32).reshape(info.shape)
            module = name.removesuffix(".weight")
            groups = quantization.of(module) if value.ndim == 2 else None
            tensors[name] = plain[name] = ("F32", value)
            if groups is not None:
                packed = quantize(value, groups.bits, groups.group_size, dtype)
                tensors[name] = ("U32", packed.codes)
                tensors[f"{module}.scales"] = (dtype, packed.scales)
                tensors[f"{module}.biases"] = (dtype, packed.biases)
                plain[name] = ("F32", dequantize(packed))
    for name, held, own in (("packed", tensors, replace(config, quantization=quantization)), ("plain", plain, config)):
        with new_directory(target / name) as draft:
            specs = {key: (kind, value.shape) for key, (kind, value) in held.items()}
            write_weights(draft, specs, lambda key, held=held: np.ascontiguousarray(held[key][1]).data.cast("B"))
            (draft / "config.json").write_text(json.dumps(own.to_dict()))
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(target / "source" / file, draft)
    return target / "packed", target / "plain"


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = tmp_path_factory.mktemp("quantized")
    return write_pair(target, replace(TINY, tie_word_embeddings=request.param, attention_bias=request.param), MIXED)


def test_logits_of_the_dequantized_weights(pair: tuple[Path, Path]) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 150).tolist()
    logits = []
    for path in pair:
        model = sala.load_model(path, device="cpu")
        caches = sala.create_layer_caches(model, max_tokens=256)
        logits.append(
            torch.cat([sala.forward(model, part, caches) for part in (tokens[:100], *([t] for t in tokens[100:]))])
        )
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[1].abs().max()


def test_what_stays_packed(pair: tuple[Path, Path]) -> None:
    model = sala.load_model(pair[0], device="cpu")
    if native.load() is None:
        pytest.skip("no C++ compiler")
    assert isinstance(model.model.embed_tokens, AffineEmbedding)
    assert isinstance(model.lm_head, AffineLinear)
    assert isinstance(model.model.layers[0].mlp.up_proj, AffineLinear)
    assert isinstance(model.model.layers[0].self_attn.q_proj, AffineLinear)  # 3 bits: in four
    assert isinstance(model.model.layers[1].mlp.up_proj, torch.nn.Linear)


@pytest.mark.parametrize("num_tokens", [40, 300])
def test_the_same_tokens_however_the_prompt_is_cut(pair: tuple[Path, Path], num_tokens: int) -> None:
    prompt = np.random.default_rng(num_tokens).integers(0, 256, num_tokens).tolist()
    answers = [
        LLM(path, device="cpu", prefill_chunk=chunk, ctx=512).generate(prompt, temperature=0, max_tokens=12).token_ids
        for path, chunk in ((pair[1], None), (pair[0], None), (pair[0], 7), (pair[0], 64))
    ]
    assert all(answer == answers[0] for answer in answers)


def test_without_a_compiler(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = sala.load_model(pair[0], device="cpu")
    monkeypatch.setattr(native, "load", lambda: None)
    assert "dequantized at load" in dispatch.describe_cpu_linears()
    model = sala.load_model(pair[0], device="cpu")
    assert isinstance(model.lm_head, torch.nn.Linear)
    x = torch.randn(2, TINY.hidden_size)
    torch.testing.assert_close(model.logits(x), before.logits(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_reference_is_that_of_the_file(bits: int) -> None:
    weight = np.random.default_rng(bits).standard_normal((5, 192)).astype(np.float32)
    packed = quantize(weight, bits, 64, "BF16")
    held = to_torch(packed)
    np.testing.assert_array_equal(affine.unpack(held.codes, bits).numpy(), unpack(packed.codes, bits, 192))
    np.testing.assert_array_equal(held.rows(slice(None)).numpy(), dequantize(packed))


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("shape", [(1, 128), (7, 640), (33, 2176)])
def test_the_kernel_against_the_reference(bits: int, group_size: int, dtype: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(bits + group_size)
    weight = rng.standard_normal(shape).astype(np.float32) * rng.uniform(0.01, 9, (shape[0], 1)).astype(np.float32)
    weight[0, :64] = 1e-6
    linear = AffineLinear(to_torch(quantize(weight, bits, group_size, dtype)), kernels=LinearKernels(native.load()))
    if linear.kernel is None:
        pytest.skip("no C++ compiler")
    plain = linear.packed.rows(slice(None))
    torch.testing.assert_close(linear.expand(0, shape[0]), plain, rtol=1e-6, atol=2e-7 * float(plain.abs().max()))
    x = torch.from_numpy(rng.standard_normal((DECODE_ROWS + 3, shape[1])).astype(np.float32))
    wanted = F.linear(x.double(), plain.double())
    bound = 1e-5 * wanted.abs().amax(0)
    for rows in (1, 2, 3, 5, 8, 15, DECODE_ROWS, DECODE_ROWS + 3):
        found = linear(x[:rows])
        assert ((found - wanted[:rows]).abs().amax(0) <= bound).all()
        if rows <= DECODE_ROWS:
            assert torch.equal(found[0], linear(x[0]))  # the same bits, alone or among others
    half = linear(x[:2].bfloat16())
    assert half.dtype == torch.bfloat16
    assert linear(x.view(1, *x.shape)).shape == (1, len(x), shape[0])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("shape", [(1, 128), (33, 640), (2100, 2048)])
def test_products_of_prompts_in_onednn(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """Where MKL is slow: the same sums, alike for any number of rows, and with gradients."""
    rng = np.random.default_rng(0)
    weight = to_torch(quantize(rng.standard_normal(shape).astype(np.float32), 8, 64, "F16"))
    linear = AffineLinear(weight, kernels=LinearKernels(native.load()))
    x = torch.from_numpy(rng.standard_normal((3 * DECODE_ROWS + 1, shape[1])).astype(np.float32))
    wanted = F.linear(x.double(), linear.packed.rows(slice(None)).double())
    calls = []
    plain = F.linear
    monkeypatch.setattr(F, "linear", lambda *arguments: calls.append(0) or plain(*arguments))
    monkeypatch.setattr(native, "has_slow_mkl", lambda: True)
    with torch.inference_mode():
        found = linear(x)
        assert ((found - wanted).abs().amax(0) <= 1e-5 * wanted.abs().amax(0)).all()
        for rows in (DECODE_ROWS + 1, 2 * DECODE_ROWS, 3 * DECODE_ROWS):
            assert torch.equal(linear(x[:rows]), found[:rows])
    assert not calls
    learns = x.clone().requires_grad_()
    linear(learns).sum().backward()
    assert calls
    assert learns.grad is not None
    torch.testing.assert_close(learns.grad[0], linear.packed.rows(slice(None)).sum(0), rtol=1e-4, atol=1e-3)


def test_refusals(pair: tuple[Path, Path]) -> None:
    config = SalaConfig.load(pair[0])
    module = "model.layers.0.mlp.up_proj"
    wrong = {
        "config.json says": replace(MIXED, overrides=(*MIXED.overrides, (module, Groups(8, 32)))),
        "not quantized": replace(MIXED, overrides=(*MIXED.overrides, (module, None))),
        "says that it is quantized": replace(MIXED, overrides=(("model.layers.1.mlp.up_proj", Groups(4, 32)),)),
        "does not mention": None,
    }
    with Checkpoint(pair[0]) as checkpoint:
        check_tensors(checkpoint, config)
        for problem, quantization in wrong.items():
            with pytest.raises(SalaError, match=problem):
                check_tensors(checkpoint, replace(config, quantization=quantization))


def test_sala_show_counts_weights_not_words(pair: tuple[Path, Path]) -> None:
    facts = []
    for path in pair:
        with Checkpoint(path) as checkpoint:
            facts.append(describe(SalaConfig.load(path), checkpoint))
    assert facts[0]["parameters"] == facts[1]["parameters"]
    assert facts[0]["weight_bytes"] < facts[1]["weight_bytes"] / 2
    assert facts[0]["quantization"].startswith("4 bits, groups of 32; ")
    assert facts[1]["quantization"] is None
