"""Import a dense model as a special case of MiniCPM-SALA: RoPE attention in every layer, no gates, no sparsity.

The teacher then runs on the same code as the student.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sala.checkpoint.gguf import GGUF
from sala.checkpoint.names import check_tensors, expected_tensors
from sala.checkpoint.packing import PACKED_PARTS, packed_specs
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import Spec, new_directory, write_model
from sala.config import RELEASED_NAMES, SalaConfig, own_file, read_json_object
from sala.errors import CheckpointError, ConfigError, ModelNotFound
from sala.lab.train.models import copy_tokenizer
from sala.quantization_config import Groups, QuantConfig

ALWAYS_DENSE = 1 << 40
_MAX_SIZE = 1 << 20
_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_IGNORED_TENSORS = ("rotary_emb.inv_freq",)  # derived values that some checkpoints store


def import_dense(source: Path, target: Path) -> None:
    """Write a Llama- or Qwen-style model (safetensors directory or GGUF file) as a dense MiniCPM-SALA checkpoint.

    Do nothing if `target` exists. Raise ModelNotFound or ConfigError if the model cannot be imported.
    """
    if target.is_dir():
        return
    if source.is_file() and source.suffix == ".gguf":
        _import_gguf(GGUF(source), target)
        return
    if not (source / "config.json").is_file():
        raise ModelNotFound(f"{source} has no config.json", "give a model's directory, or a .gguf file")
    values = read_json_object(source / "config.json")
    if values.get("model_type") == "minicpm_sala":
        _copy_dense(source, target)
        return
    config = dense_config(values)
    with Checkpoint(source) as checkpoint, new_directory(target) as draft:
        known = {name: info for name, info in checkpoint.tensors.items() if not name.endswith(_IGNORED_TENSORS)}
        checkpoint.tensors = known
        check_tensors(checkpoint, config)
        specs = {name: (checkpoint.tensors[name].dtype, shape) for name, shape in expected_tensors(config).items()}
        write_model(draft, config, specs, lambda name: checkpoint.read(name).data)
        copy_tokenizer(source, draft)


def _import_gguf(source: GGUF, target: Path) -> None:
    """Import a GGUF file; quantized matrices keep their codes if the affine layout can represent them."""
    config = dense_config(source.config())
    shapes = expected_tensors(config)
    wrong = sorted(name for name in {*source, *shapes} if name not in source or source.shape(name) != shapes.get(name))
    if wrong:
        raise CheckpointError(f"{source.path}: {wrong[0]} is missing or has another shape", "download it again")
    specs: dict[str, Spec] = {}
    packed: dict[str, Groups] = {}
    for name in source:
        matrix = source.read_packed(name)
        if matrix is None:
            specs[name] = ("F32", source.shape(name))
            continue
        module = name.removesuffix(".weight")
        packed[module] = Groups(matrix.bits, matrix.group_size)
        specs |= packed_specs(module, matrix)
    config = replace(config, quantization=QuantConfig.of_modules(packed) if packed else None)
    with new_directory(target) as draft:
        write_model(draft, config, specs, lambda name: _gguf_bytes(source, name))
        source.write_tokenizer(draft)


def _gguf_bytes(source: GGUF, name: str) -> memoryview:
    module, _, part = name.rpartition(".")
    matrix = source.read_packed(f"{module}.weight") if f"{module}.weight" in source else None
    array = source.read(name) if matrix is None else getattr(matrix, PACKED_PARTS[part])
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _copy_dense(source: Path, target: Path) -> None:
    """Copy a dense MiniCPM-SALA checkpoint; raise ConfigError for a hybrid."""
    config = SalaConfig.load(source)
    if config.lightning_layers or not config.attn_use_rope:
        raise ConfigError(f"{source} is a hybrid already", "give a dense model")
    with new_directory(target) as draft:
        for file in source.iterdir():
            if file.is_file():
                shutil.copy2(own_file(file), draft / file.name)


def dense_config(values: Mapping[str, Any]) -> SalaConfig:
    """Return the configuration of a Llama, Mistral, Qwen2 or Qwen3 model.

    Raise ConfigError for features that cannot be computed exactly.
    """
    kind = values.get("model_type")
    if kind not in _KINDS:
        message = f"config.json: model_type is {kind!r}"
        raise ConfigError(message, "models like " + ", ".join(_KINDS) + " can be converted")
    _refuse(values, "hidden_act", ("silu",))
    _refuse(values, "mlp_bias", (False,))
    _refuse(values, "sliding_window", (None,), unless=not values.get("use_sliding_window", kind == "mistral"))
    theta = _rope_theta(values)
    layers, hidden, heads = (
        _size(values, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    dim = values.get("head_dim") or hidden // heads
    return SalaConfig.from_dict(
        {
            "vocab_size": values.get("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": values.get("intermediate_size"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": values.get("num_key_value_heads") or heads,
            "head_dim": dim,
            "mixer_types": [RELEASED_NAMES["sparse"]] * layers,
            "lightning_nh": heads,
            "lightning_nkv": heads,
            "lightning_head_dim": dim,
            "sparse_config": {"dense_len": ALWAYS_DENSE},
            "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "max_position_embeddings": values.get("max_position_embeddings", 8192),
            "scale_emb": 1.0,
            "scale_depth": math.sqrt(layers),
            "dim_model_base": hidden,
            "attn_use_rope": True,
            "attn_use_output_gate": False,
            "attn_qk_norm": kind == "qwen3",
            "attention_bias": bool(values.get("attention_bias", kind == "qwen2")),
            "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
            "bos_token_id": values.get("bos_token_id"),
            "eos_token_id": values.get("eos_token_id"),
            "pad_token_id": values.get("pad_token_id"),
            "dtype": values.get("dtype") or values.get("torch_dtype") or "bfloat16",
        }
    )


def _rope_theta(values: Mapping[str, Any]) -> float:
    table = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise ConfigError("config.json: the parameters of RoPE are not an object", "download it again")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: RoPE is scaled ({kind!r})", "convert a model without RoPE scaling")
    theta: float = table.get("rope_theta") or values.get("rope_theta", 10000.0)
    return theta  # checked with the rest of the configuration


def _size(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
        raise ConfigError(f"config.json: {name} is {value!r:.80}", f"it must be from 1 to {_MAX_SIZE:,}")
    return value


def _refuse(values: Mapping[str, Any], name: str, allowed: tuple[Any, ...], unless: bool = False) -> None:
    if name in values and values[name] not in allowed and not unless:
        raise ConfigError(f"config.json: {name} is {values[name]!r}", f"only {allowed[0]!r} can be converted")
