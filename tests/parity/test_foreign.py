"""A checkpoint that another program quantized computes what its weights mean, packed or not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sala
from sala.backends.torch import loader
from sala.backends.torch.kernels import native
from sala.backends.torch.linears import AffineLinear
from sala.backends.torch.model import SalaModel
from sala.checkpoint.random import TINY
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_weights
from sala.cli.show import describe
from sala.config import SalaConfig
from sala.llm import LLM
from tests import foreign

CASES = {
    "gptq": foreign.gptq_case(),
    "gptq-asymmetric": foreign.gptq_case(group=64, sym=False),
    "gptq-v2-asymmetric": foreign.gptq_case(group=128, sym=False, is_v2=True),
    "gptq-8": foreign.gptq_case(bits=8, group=128),
    "gptq-8-asymmetric": foreign.gptq_case(bits=8, group=32, sym=False),
    "gptq-rows": foreign.gptq_case(group=-1),
    "gptq-order": foreign.gptq_case(order=True),
    "gptq-8-order": foreign.gptq_case(bits=8, group=64, sym=False, order=True),
    "awq": foreign.awq_case(),
    "awq-32": foreign.awq_case(group=32),
    "packed": foreign.packed_case(),
    "packed-asymmetric": foreign.packed_case(group=32, sym=False),
    "packed-8-rows": foreign.packed_case(bits=8, group=-1),
    "packed-order": foreign.packed_case(group=32, order=True),
    "fp8-tensor": foreign.fp8_case("tensor"),
    "fp8-row": foreign.fp8_case("row", is_compressed=True),
    "fp8-block": foreign.fp8_case("block", "weight_scale_inv", has_head=True),
    "fp8-compressed-block": foreign.fp8_case("block", is_compressed=True),
}
TOKENS = np.random.default_rng(0).integers(0, 256, 40).tolist()


def logits(model: Any) -> torch.Tensor:
    caches = sala.create_layer_caches(model, max_tokens=64)
    return torch.cat([sala.forward(model, part, caches) for part in (TOKENS[:30], *([t] for t in TOKENS[30:]))])


def plain_model(config: SalaConfig, plain: dict[str, torch.Tensor]) -> SalaModel:
    with torch.device("meta"):
        model = SalaModel(replace(config, quantization=None))
    model.load_state_dict(plain, assign=True)
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = foreign.write(tmp_path / "model", CASES[name])
    config = SalaConfig.load(tmp_path / "model")
    wanted = logits(plain_model(config, plain))
    model = sala.load_model(tmp_path / "model", device="cpu")
    bound = 2e-5 * wanted.abs().max()
    assert (logits(model) - wanted).abs().max() <= bound
    linear = model.model.layers[1].mlp.down_proj
    has_kernel = native.load() is not None and not name.startswith("fp8")
    assert isinstance(linear, AffineLinear) == has_kernel
    assert (getattr(linear, "order", None) is not None) == (has_kernel and "order" in name)
    monkeypatch.setattr(native, "load", lambda: None)
    expanded = sala.load_model(tmp_path / "model", device="cpu")
    assert type(expanded.model.layers[1].mlp.down_proj) is torch.nn.Linear
    assert (logits(expanded) - wanted).abs().max() <= bound


@pytest.mark.parametrize("name", CASES)
def test_weights_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """Scales of 16 bits times codes fit into fp32: nothing is rounded on the way to the expanded weights."""
    plain = foreign.write(tmp_path / "model", CASES[name], seed=1)
    with Checkpoint(tmp_path / "model") as checkpoint:
        config = SalaConfig.load(tmp_path / "model")
        model = loader.load_model(checkpoint, config, torch.float32, torch.device("cpu"))
        name = "model.layers.1.mlp.down_proj.weight"
        single = loader.read_parameter(checkpoint, config, name, torch.float32, torch.device("cpu"))
    found = dict(model.named_parameters())
    assert set(found) == set(plain)
    assert torch.equal(single, plain[name])
    for key, value in plain.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", ["gptq", "gptq-order", "awq", "fp8-block"])
def test_the_same_tokens(name: str, tmp_path: Path) -> None:
    plain = foreign.write(tmp_path / "model", CASES[name])
    config = replace(SalaConfig.load(tmp_path / "model"), quantization=None)
    specs = {key: ("F32", tuple(value.shape)) for key, value in plain.items()}
    with new_directory(tmp_path / "plain") as draft:
        write_weights(draft, specs, lambda key: plain[key].contiguous().numpy().data.cast("B"))
        (draft / "config.json").write_text(json.dumps(config.to_dict()))
    answers = [
        LLM(tmp_path / path, device="cpu", ctx=128, prefill_chunk=chunk)
        .generate(TOKENS, temperature=0, max_tokens=8)
        .token_ids
        for path, chunk in (("plain", None), ("model", None), ("model", 7))
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("name", ["gptq", "gptq-order", "awq", "fp8-row"])
def test_biases_of_the_model(name: str, tmp_path: Path) -> None:
    plain = foreign.write(tmp_path / "model", CASES[name], replace(TINY, attention_bias=True))
    wanted = logits(plain_model(SalaConfig.load(tmp_path / "model"), plain))
    found = logits(sala.load_model(tmp_path / "model", device="cpu"))
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_modules_that_stay_plain(tmp_path: Path) -> None:
    case = foreign.awq_case(modules_to_not_convert=["mlp.up_proj", "model.layers.2"])
    plain = foreign.write(tmp_path / "model", case, spared=("up_proj", "layers.2."))
    wanted = logits(plain_model(SalaConfig.load(tmp_path / "model"), plain))
    model = sala.load_model(tmp_path / "model", device="cpu")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert type(model.model.layers[2].mlp.down_proj) is torch.nn.Linear
    assert (logits(model) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_sala_show(tmp_path: Path) -> None:
    said = {}
    for name in ("gptq", "gptq-rows", "awq", "packed", "fp8-tensor", "fp8-block"):
        foreign.write(tmp_path / name, CASES[name])
        with Checkpoint(tmp_path / name) as checkpoint:
            facts = describe(SalaConfig.load(tmp_path / name), checkpoint)
        said[name] = facts["quantization"]
        assert facts["quantized_modules"] == 4 * 8 + (name == "fp8-block")
    assert said == {
        "gptq": "GPTQ, 4 bits, groups of 32",
        "gptq-rows": "GPTQ, 4 bits, one group per row",
        "awq": "AWQ, 4 bits, groups of 64",
        "packed": "compressed-tensors, 4 bits, groups of 128",
        "fp8-tensor": "FP8 (e4m3), a scale per matrix or row",
        "fp8-block": "FP8 (e4m3), a scale per block of 128x128",
    }
