"""What other programs write about their quantization, and tensors that do not keep to it: refused by name."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sala.backends.torch.loader import load_model
from sala.checkpoint import external_formats as source
from sala.checkpoint.external_formats import read_matrix
from sala.checkpoint.matrices import E4M3
from sala.checkpoint.names import check_tensors, external_modules, quantized_modules
from sala.checkpoint.packing import dequantize
from sala.checkpoint.random import TINY
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import CheckpointError, ConfigError, SalaError
from sala.quantization_config import Groups, QuantConfig
from tests import foreign

GPTQ, AWQ = foreign.gptq_case().table, foreign.awq_case().table
PACKED, FP8 = foreign.packed_case().table, foreign.fp8_case("block").table
FLOAT = foreign.fp8_case("row", is_compressed=True).table
MODULE = "model.layers.1.mlp.down_proj"  # [128, 256]


def parse(table: dict[str, Any]) -> QuantConfig:
    return QuantConfig.from_dict(table, "config.json: quantization")


def within(table: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A table of compressed-tensors whose weights are described otherwise."""
    scheme = table["config_groups"]["group_0"]
    return table | {"config_groups": {"group_0": scheme | {"weights": scheme["weights"] | changes}}}


def test_tables() -> None:
    layout = parse(GPTQ).layout
    assert layout is not None
    assert (layout.kind, layout.bits, layout.group_size, layout.is_symmetric) == ("gptq", 4, 32, True)
    assert layout.is_zero_less_one
    for written in ({"checkpoint_format": "gptq_v2"}, {"checkpoint_format": None, "format": "gptq_v2"}):
        v2 = parse(GPTQ | written).layout
        assert v2 is not None
        assert not v2.is_zero_less_one
    old = parse({"bits": 4, "group_size": 128, "quant_method": "gptq", "desc_act": True}).layout
    assert old is not None
    assert old.is_zero_less_one
    assert old.has_order
    assert not old.is_symmetric  # nothing is said: the zero points are taken as they are
    awq = parse({"quant_method": "awq", "zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"})
    assert (awq.bits, awq.group_size) == (4, 128)
    assert parse(GPTQ | {"group_size": 1024}).group_size == 128
    assert parse(GPTQ | {"group_size": 96}).group_size == 32
    fp8 = parse(FP8).layout
    assert fp8 is not None
    assert (fp8.kind, fp8.block) == ("fp8", (128, 128))
    assert parse(within(FLOAT, strategy="block", block_structure="64x32")).layout.block == (64, 32)  # type: ignore[union-attr]


@pytest.mark.parametrize("table", [GPTQ, AWQ, PACKED, FP8, FLOAT], ids=["gptq", "awq", "packed", "fp8", "float"])
def test_a_table_survives(table: dict[str, Any]) -> None:
    config = SalaConfig.from_dict(TINY.to_dict() | {"quantization_config": table})
    assert config.quantization is not None
    assert config.quantization.to_dict() == table
    assert SalaConfig.from_dict(config.to_dict()) == config


def test_what_others_note_and_what_spares_modules() -> None:
    parse(GPTQ | {"dynamic": {r"-:.*\.o_gate": {}}, "adapter": None, "modules_in_block_to_quantize": [["q_proj"]]})
    layout = parse(AWQ | {"modules_to_not_convert": ["lm_head", "mlp.up", "layers.3"]}).layout
    assert layout is not None
    assert layout.is_spared("lm_head")
    assert layout.is_spared("model.layers.3.mlp.up_proj")
    assert not layout.is_spared("model.layers.2.mlp.up_proj")  # "mlp.up" is no module
    assert not layout.is_spared("model.layers.31.mlp.down_proj")


@pytest.mark.parametrize(
    ("table", "culprit"),
    [
        ({"quant_method": "modelopt"}, "modelopt"),
        ({"quant_method": "bitsandbytes", "bits": 4}, "bitsandbytes"),
        ({"quant_method": ["gptq"]}, "quant_method"),
        ({"quant_method": None}, "quant_method"),
        (GPTQ | {"bits": 3}, "bits is '3'"),
        (GPTQ | {"bits": True}, "bits"),
        (GPTQ | {"bits": 4.0}, "bits"),
        (GPTQ | {"bits": None}, "bits is missing"),
        (GPTQ | {"group_size": 0}, "group_size"),
        (GPTQ | {"group_size": 48}, "group_size"),
        (GPTQ | {"group_size": 16}, "group_size"),
        (GPTQ | {"group_size": -2}, "group_size"),
        (GPTQ | {"group_size": 1 << 40}, "group_size"),
        (GPTQ | {"group_size": "128"}, "group_size"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is marlin"),
        (GPTQ | {"format": "gptq_v2"}, "checkpoint_format is gptq and gptq_v2"),
        (GPTQ | {"checkpoint_format": ["gptq"]}, "checkpoint_format"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype"),
        (GPTQ | {"sym": "yes"}, "sym"),
        (GPTQ | {"adapter": {"lora": 1}}, "adapter"),
        (GPTQ | {"dynamic": {r".*\.1\..*": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"dynamic": "all"}, "dynamic"),
        (GPTQ | {"rotation": "hadamard"}, "rotation"),
        (GPTQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (GPTQ | {"modules_to_not_convert": [1]}, "modules_to_not_convert"),
        (AWQ | {"bits": 8}, "bits"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (FP8 | {"fmt": "e5m2"}, "fmt"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size"),
        (FP8 | {"activation_scheme": "other"}, "activation_scheme"),
        (PACKED | {"format": "int-quantized"}, "format is 'int-quantized'"),
        (PACKED | {"format": None}, "format is missing"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED | {"transform_config": {"config_groups": {"u": 1}}}, "transform_config"),
        (PACKED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        (PACKED | {"config_groups": {}}, "0 groups"),
        (PACKED | {"config_groups": []}, "config_groups"),
        (PACKED | {"config_groups": PACKED["config_groups"] | {"group_1": {}}}, "2 groups"),
        (within(PACKED, num_bits=2), "num_bits"),
        (within(PACKED, type="float"), "type"),
        (within(PACKED, strategy="tensor_group"), "strategy"),
        (within(PACKED, group_size=None), "group_size"),
        (within(PACKED, dynamic=True), "dynamic"),
        (within(FLOAT, symmetric=False), "symmetric"),
        (within(FLOAT, strategy="block"), "block_structure"),
        (within(FLOAT, rescaled=1), "rescaled"),
    ],
)
def test_tables_that_are_refused(table: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SalaConfig.from_dict(TINY.to_dict() | {"quantization_config": table})
    assert culprit in caught.value.message
    assert caught.value.remedy


def save(directory: Path, tensors: foreign.Tensors, table: dict[str, Any]) -> tuple[Checkpoint, SalaConfig]:
    directory.mkdir()
    foreign.save(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(TINY.to_dict() | {"quantization_config": table}))
    return Checkpoint(directory), SalaConfig.load(directory)


def set_to(value: float) -> Callable[[foreign.Array], foreign.Array]:
    def change(array: foreign.Array) -> foreign.Array:
        array = array.copy()
        array.reshape(-1)[5 % array.size] = value
        return array

    return change


Change = Callable[[foreign.Array], foreign.Array] | str | None  # None: left out; a string: another precision
ORDERED = foreign.gptq_case(order=True)
WRONG_TENSORS: list[tuple[foreign.Case, str, Change, str]] = [
    (foreign.gptq_case(), "scales", set_to(np.nan), "scales has a value that is not finite"),
    (foreign.gptq_case(), "scales", set_to(np.inf), "scales has a value that is not finite"),
    (foreign.gptq_case(), "scales", lambda x: x[:-1], "scales is [7, 128], config.json says [8, 128]"),
    (foreign.gptq_case(), "qweight", lambda x: x[:-1], "qweight is [31, 128]"),
    (foreign.gptq_case(), "qweight", lambda x: x.T, "qweight is [128, 32]"),
    (foreign.gptq_case(), "qweight", "F32", "qweight is stored as F32"),
    (foreign.gptq_case(), "qzeros", None, "lacks tensor model.layers.1.mlp.down_proj.qzeros"),
    (foreign.gptq_case(), "qzeros", lambda x: x + np.uint32(1), "qzeros are not all 8"),
    (foreign.gptq_case(), "qzeros", lambda x: x + np.uint32(0x11111111), "qzeros are not all 8"),  # of gptq_v2
    (ORDERED, "g_idx", None, "lacks tensor model.layers.1.mlp.down_proj.g_idx"),
    (ORDERED, "g_idx", set_to(8), "g_idx does not divide 256 inputs"),
    (ORDERED, "g_idx", set_to(-1), "g_idx does not divide 256 inputs"),
    (ORDERED, "g_idx", lambda x: np.zeros_like(x), "g_idx does not divide 256 inputs"),
    (foreign.awq_case(), "scales", set_to(np.nan), "scales has a value that is not finite"),
    (foreign.awq_case(), "qweight", lambda x: x[:, :-1], "qweight is [256, 15]"),
    (foreign.awq_case(), "qzeros", lambda x: x[:-1], "qzeros is [3, 16]"),
    (foreign.packed_case(), "weight_shape", set_to(99), "weight_shape is not [128, 256]"),
    (foreign.packed_case(), "weight_scale", set_to(np.nan), "weight_scale has a value that is not finite"),
    (foreign.packed_case(), "weight_packed", lambda x: x[:-1], "weight_packed is [127, 32]"),
    (foreign.packed_case(sym=False), "weight_zero_point", None, "weight_zero_point"),
    (foreign.fp8_case("block"), "weight_scale", set_to(np.nan), "weight_scale has a value that is not finite"),
    (foreign.fp8_case("block"), "weight_scale", lambda x: x[:, :1], "weight_scale is [1, 1]"),
    (foreign.fp8_case("row"), "weight_scale", lambda x: x[:-1], "weight_scale is [127, 1]"),
    (foreign.fp8_case("tensor"), "weight_scale", None, "lacks tensor model.layers.1.mlp.down_proj.weight_scale"),
    (foreign.fp8_case("tensor"), "weight", set_to(0x7F), "weight has a value that is not a number"),
    (foreign.fp8_case("tensor"), "weight", "F8_E5M2", "weight is stored as F8_E5M2"),
]


@pytest.mark.parametrize(("case", "leaf", "change", "problem"), WRONG_TENSORS)
def test_tensors_that_are_refused(case: foreign.Case, leaf: str, change: Change, problem: str, tmp_path: Path) -> None:
    tensors, _ = foreign.make(case)
    name = f"{MODULE}.{leaf}"
    dtype, array = tensors.pop(name)
    if isinstance(change, str):
        tensors[name] = (change, array)
    elif change is not None:
        tensors[name] = (dtype, change(array))
    checkpoint, config = save(tmp_path / "model", tensors, case.table)
    with checkpoint, pytest.raises(CheckpointError) as caught:
        load_model(checkpoint, config, torch.float32, torch.device("cpu"))
    assert problem in caught.value.message
    assert MODULE in caught.value.message
    assert caught.value.remedy


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    foreign.write(tmp_path / "model", foreign.gptq_case())
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        Checkpoint(tmp_path / "model")


def test_checkpoints_that_contradict_their_table(tmp_path: Path) -> None:
    tensors, plain = foreign.make(foreign.gptq_case())
    whole = {name: ("F32", value.numpy()) for name, value in plain.items()}
    wrong: dict[str, tuple[foreign.Tensors, dict[str, Any], str]] = {
        "plain": (whole, GPTQ, "no tensor has that format"),
        "layout": (tensors, AWQ | {"group_size": 32}, "unexpected tensor model.layers.0.self_attn.q_proj.g_idx"),
        "method": (tensors, FP8, "no tensor has that format"),
        "bits": (tensors, GPTQ | {"bits": 8}, "qweight"),
        "groups": (tensors, GPTQ | {"group_size": 64}, "qzeros"),
        "divide": (tensors, GPTQ | {"group_size": 96}, "has no groups of 96"),
        "spared": (tensors, GPTQ | {"modules_to_not_convert": ["mlp"]}, "config.json says that it is not"),
        "left": (
            tensors | {"model.layers.0.mlp.up_proj.extra": ("F32", np.ones(1, np.float32))},
            GPTQ,
            "unexpected tensor",
        ),
        "both": (tensors | {f"{MODULE}.weight": whole[f"{MODULE}.weight"]}, GPTQ, "unexpected tensor"),
        "embedding": (
            tensors | {"model.embed_tokens.qweight": ("I32", np.ones((1, 1), np.int32))},
            GPTQ,
            "only linear",
        ),
    }
    for name, (held, table, problem) in wrong.items():
        checkpoint, config = save(tmp_path / name, held, table)
        with checkpoint, pytest.raises(SalaError) as caught:
            check_tensors(checkpoint, config)
        assert problem in str(caught.value), name


def test_static_activations_are_left_aside(tmp_path: Path) -> None:
    case = foreign.fp8_case("tensor")
    tensors, _ = foreign.make(case)
    tensors[f"{MODULE}.input_scale"] = ("F32", np.ones(1, np.float32))
    checkpoint, config = save(tmp_path / "model", tensors, case.table | {"activation_scheme": "static"})
    with checkpoint:
        check_tensors(checkpoint, config)


def test_groups_that_are_read(tmp_path: Path) -> None:
    for name, group, own in (("rows", -1, 128), ("small", 32, 32), ("wide", 128, 128)):
        case = foreign.gptq_case(group=group)
        checkpoint, config = save(tmp_path / name, foreign.make(case)[0], case.table)
        with checkpoint:
            packed = quantized_modules(checkpoint.tensors, config)
        assert packed[MODULE] == Groups(4, own)
        assert len(packed) == 4 * 8


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_scales_stay_small_where_that_is_exact(is_symmetric: bool, tmp_path: Path) -> None:
    """-8 * scale has the bits of the scale; -11 * scale needs more of them."""
    case = foreign.gptq_case(sym=is_symmetric)
    checkpoint, config = save(tmp_path / "model", (made := foreign.make(case))[0], case.table)
    assert config.quantization is not None
    assert config.quantization.layout is not None
    with checkpoint:
        shape = external_modules(checkpoint.tensors, config)[MODULE]
        matrix = read_matrix(checkpoint, MODULE, shape, config.quantization.layout)
    assert matrix.dtype == ("F16" if is_symmetric else "F32")
    np.testing.assert_array_equal(dequantize(matrix), made[1][f"{MODULE}.weight"].numpy())


@pytest.mark.parametrize("kind", ["gptq", "awq", "order"])
def test_memory_while_converting(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are spread out some rows at a time: never a byte for every one of them."""
    monkeypatch.setattr(source, "_PIECE", 1 << 16)
    rng = np.random.default_rng(0)
    shape = (1024, 2048)
    codes = rng.integers(0, 16, shape)
    size, count = 128, shape[1] // 128
    group = np.arange(shape[1]) // size
    held = foreign.Codes(codes, np.full((count, shape[0]), 0.5, np.float16), np.full((count, shape[0]), 8), group)
    case = {"gptq": foreign.gptq_case(), "awq": foreign.awq_case(), "order": foreign.gptq_case(order=True)}[kind]
    if kind == "order":
        held.group = rng.permutation(group)
    parts = foreign.awq(held) if kind == "awq" else foreign.gptq(held, 4)
    foreign.save(tmp_path / "model.safetensors", {f"m.{leaf}": part for leaf, part in parts.items()})
    layout = parse(case.table | {"group_size": size}).layout
    assert layout is not None
    with Checkpoint(tmp_path) as checkpoint:
        tracemalloc.start()
        matrix = read_matrix(checkpoint, "m", shape, layout)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert matrix.codes.nbytes == codes.size // 2
    assert peak < 1.75 * matrix.codes.nbytes, peak
    columns = held.codes if matrix.order is None else held.codes[:, matrix.order]
    assert (matrix.order is None) == (kind != "order")
    expected = (columns[:3] - 8) * 0.5
    found = dequantize(replace(matrix, order=None))[:3]
    np.testing.assert_array_equal(dequantize(matrix)[:3], (held.codes[:3] - 8) * 0.5)
    np.testing.assert_array_equal(found, expected)


def test_every_fp8_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).float()
    is_number = ~wanted.isnan()
    assert int(is_number.sum()) == 254
    found = torch.from_numpy(E4M3)
    assert torch.equal(found[is_number].view(torch.int32), wanted[is_number].view(torch.int32))
