"""config.json: the released one is read whole; impossible ones are refused by name."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.random import RELEASED
from sala.config import SalaConfig
from sala.errors import ConfigError, ModelNotFound
from sala.quantization_config import Groups, matrix_modules
from tests.golden import DATA

RELEASE: dict[str, Any] = json.loads((DATA / "released" / "config.json").read_text())
SHAPES: dict[str, Any] = json.loads((DATA / "released" / "tensor_shapes.json").read_text())


def test_the_release() -> None:
    config = SalaConfig.load(DATA / "released")
    assert config.sparse_layers == (0, 9, 16, 17, 22, 29, 30, 31)
    assert len(config.lightning_layers) == 24
    assert config.sparse_config.num_selected == 96
    assert config.sparse_config.agreement_len == 6144
    assert config.eos_token_id == (2, 73440)
    assert config.residual_scale == pytest.approx(0.2474874)
    assert config.logit_divisor == 16
    assert config.max_position_embeddings == 524288
    assert config == RELEASED


def test_every_tensor_of_the_release() -> None:
    shapes = expected_tensors(SalaConfig.load(DATA / "released"))
    assert {name: list(shape) for name, shape in shapes.items()} == SHAPES["all"]
    assert len(shapes) == SHAPES["n_tensors"]
    assert count_parameters(shapes) == SHAPES["n_params"]


def test_written_and_read_again() -> None:
    config = SalaConfig.load(DATA / "released")
    assert SalaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_trained_length_is_written_only_where_it_is_known() -> None:
    config = SalaConfig.load(DATA / "released")
    assert config.trained_length is None
    assert "trained_length" not in config.to_dict()
    shorter = replace(config, trained_length=32768)
    assert SalaConfig.from_dict(shorter.to_dict()) == shorter


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        SalaConfig.load(DATA / "released").hidden_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("alias", ["minicpm", "standard", "attention", "attn"])
def test_aliases_of_mixers(alias: str) -> None:
    names = [alias if name == "minicpm4" else "lightning_attn" for name in RELEASE["mixer_types"]]
    assert SalaConfig.from_dict({**RELEASE, "mixer_types": names}) == SalaConfig.from_dict(RELEASE)


def test_quantization() -> None:
    config = SalaConfig.from_dict({**RELEASE, "quantization": {"group_size": 64, "bits": 8}})
    assert config.quantization is not None
    assert (config.quantization.bits, config.quantization.group_size) == (8, 64)


MODULES = {
    "model.embed_tokens": {"group_size": 32, "bits": 8},
    "model.layers.0.self_attn.q_proj": {"group_size": 128, "bits": 6},
    "model.layers.3.mlp.up_proj": False,
}


def test_quantization_of_single_modules() -> None:
    table = {"group_size": 64, "bits": 4, **MODULES}
    config = SalaConfig.from_dict({**RELEASE, "quantization": table, "quantization_config": table})
    quant = config.quantization
    assert quant is not None
    assert quant.of("model.embed_tokens") == Groups(8, 32)
    assert quant.of("model.layers.3.mlp.up_proj") is None
    assert quant.of("lm_head") == Groups(4, 64)
    assert config.to_dict()["quantization"] == table
    assert SalaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    hash(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.32.mlp.up_proj", False),
        ("model.layers.0.mlp.up_proj.weight", False),
        ("model.layers.0.self_attn.z_proj", False),  # layer 0 is sparse: it has o_gate
        ("model.norm", False),
        ("group_sizes", 64),
        ("lm_head", True),
        ("lm_head", {"bits": 4}),
        ("lm_head", {"bits": 4, "group_size": 64, "mode": "mxfp4"}),
        ("lm_head", {"bits": 4, "group_size": 64, "color": 1}),
        ("lm_head", {"bits": True, "group_size": 64}),
        ("mode", "nvfp4"),
    ],
)
def test_modules_that_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="quantization") as caught:
        SalaConfig.from_dict({**RELEASE, "quantization": {"group_size": 64, "bits": 4, name: value}})
    assert caught.value.remedy


def test_matrices_are_the_modules_that_can_be_quantized() -> None:
    shapes = expected_tensors(RELEASED)
    matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    assert matrix_modules(RELEASED.mixers) == matrices


def test_regimes() -> None:
    sparse = SalaConfig.load(DATA / "released").sparse_config
    assert sparse.sparse_from(8192) == 0
    assert sparse.sparse_from(8191) == 8191  # the next token makes 8192


WRONG = [
    ("num_attention_heads", 0),
    ("num_attention_heads", 31),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", 31),
    ("num_hidden_layers", 32.5),
    ("num_hidden_layers", True),
    ("hidden_size", 0),
    ("hidden_size", "4096"),
    ("vocab_size", 10**12),
    ("head_dim", 127),
    ("lightning_nkv", 5),
    ("lightning_head_dim", 0),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", -1e-6),
    ("rope_theta", float("inf")),
    ("rope_scaling", {"type": "yarn", "factor": 4}),
    ("scale_emb", "12"),
    ("mixer_types", None),
    ("mixer_types", "minicpm4"),
    ("mixer_types", ["mamba"] * 32),
    ("mixer_types", [None] * 32),
    ("mixer_types", ["minicpm4"] * 31),
    ("hidden_act", "gelu"),
    ("attention_bias", 1),
    ("attn_qk_norm", "yes"),
    ("attn_log_base", 1.0),
    ("trained_length", 0),
    ("attn_use_rope", "no"),
    ("lightning_scale", "2/d"),
    ("dtype", "int4"),
    ("model_type", "llama"),
    ("eos_token_id", [2, 10**9]),
    ("eos_token_id", ["</s>"]),
    ("bos_token_id", 73448),
    ("quantization", {"bits": 7, "group_size": 64}),
    ("quantization", {"bits": 4, "group_size": 48}),
    ("quantization", {"bits": 4}),
    ("quantization", "8bit"),
    ("trust_remote_code", True),
    ("num_attention_head", 32),
    ("sparse_config.block_size", 0),
    ("sparse_config.block_size", 100),
    ("sparse_config.kernel_size", 33),
    ("sparse_config.window_size", 2047),
    ("sparse_config.topk", 1),
    ("sparse_config.dense_len", -1),
    ("sparse_config.use_nope", True),
    ("sparse_config.blocksize", 64),
    ("sparse_config", 7),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda item: str(item)[:40])
def test_refused_by_name(field: str, value: object) -> None:
    values = deepcopy(RELEASE)
    table, _, leaf = field.rpartition(".")
    (values[table] if table else values)[leaf] = value
    with pytest.raises(ConfigError) as caught:
        SalaConfig.from_dict(values)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.remedy
    named = {"num_hidden_layers": ["num_hidden_layers", "mixer_types"]}.get(field, [leaf])
    assert any(name in text for name in named)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "mixer_types"])
def test_missing_fields(field: str) -> None:
    values = {key: value for key, value in RELEASE.items() if key != field}
    with pytest.raises(ConfigError, match=field):
        SalaConfig.from_dict(values)


def test_a_typo_is_explained() -> None:
    with pytest.raises(ConfigError, match="did you mean num_attention_heads"):
        SalaConfig.from_dict({**RELEASE, "num_atention_heads": 32})


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "[" * 100_000])
def test_files_that_are_no_config(tmp_path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        SalaConfig.load(tmp_path)


def test_no_file(tmp_path) -> None:
    with pytest.raises(ModelNotFound):
        SalaConfig.load(tmp_path)
