"""SalaConfig as a configuration of transformers: mutable, with defaults, saved beside the weights."""

from dataclasses import fields
from typing import Any

import transformers
from transformers import PretrainedConfig

from sala.checkpoint.dtypes import FILE_DTYPES
from sala.checkpoint.random import RELEASED
from sala.config import MIXERS, RELEASED_NAMES, SalaConfig
from sala.errors import ConfigError
from sala.plugins import ARCHITECTURE, LAYER_TYPES
from sala.quantization_config import MIXER_LINEARS, MLP_LINEARS, QuantConfig

_MIXERS_BY_TYPE = {name: RELEASED_NAMES[mixer] for mixer, name in LAYER_TYPES.items()}  # type: ignore[index]
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DEFAULTS = (*_SIZES, "num_key_value_heads", "head_dim", "eos_token_id", "pad_token_id")
_RELEASED = {name: value for name, value in RELEASED.to_dict().items() if name in _DEFAULTS}
_FIELDS = tuple(item.name for item in fields(SalaConfig) if item.name not in ("dtype", "model_type", "quantization"))

# How a linear's weights are sharded over devices. Norms and block selection of mixers span all heads, so the outputs of
# their projections are gathered and only memory is divided there; the work of the MLP is divided too.
IS_OLD = transformers.__version__.startswith("4.")  # sharding and tied weights are spelled differently there
GATHERED, _SPLIT = ("colwise_rep", "rowwise_rep") if IS_OLD else ("colwise_gather_output", "rowwise_split_input")
_PLAN = {f"layers.*.self_attn.{name}": _SPLIT if name == "o_proj" else GATHERED for name in MIXER_LINEARS} | {
    f"layers.*.mlp.{name}": "rowwise" if name == "down_proj" else "colwise" for name in MLP_LINEARS
}


class SalaHfConfig(PretrainedConfig):
    """Every field of the released `config.json`, and `layer_types` beside `mixer_types`; the released model by default.

    A quantized checkpoint's table is kept under `quantization`, where transformers does not look for it.
    """

    model_type = "minicpm_sala"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    base_model_tp_plan = _PLAN
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    def __init__(self, **values: Any) -> None:
        own = {name: values.pop(name) for name in _FIELDS if name in values}
        own = {name: value for name, value in own.items() if value is not None}
        table, copy = values.pop("quantization", None), values.pop("quantization_config", None)
        types = values.pop("layer_types", None)
        rope = _check_rope(values.pop("rope_parameters", None)) | _check_rope(values.pop("rope_scaling", None))
        own.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        self.quantization = table or copy
        self.auto_map = values.pop("auto_map", None) or {}  # TRL reads it
        self.use_cache = values.pop("use_cache", True)
        self.initializer_range = values.pop("initializer_range", 0.02)
        tokens = self._take_fields(own, types)
        super().__init__(**{**tokens, **values})

    def _take_fields(self, own: dict[str, Any], types: list[str] | None) -> dict[str, Any]:
        """Set the fields of the model and return those that the parent class sets."""
        shape = {**_RELEASED, **own} if not own.keys() & {"vocab_size", "hidden_size"} else dict(own)
        for name in _SIZES:
            shape.setdefault(name, _RELEASED[name])
        if "mixer_types" not in shape:
            shape["mixer_types"] = _mixers_for(shape["num_hidden_layers"], types)
        for name, value in _complete(shape).items():
            setattr(self, name, value)
        self.layer_types = [LAYER_TYPES[MIXERS[name]] for name in self.mixer_types if name in MIXERS]
        parents = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
        return {name: getattr(self, name) for name in parents}

    @classmethod
    def from_sala(cls, config: SalaConfig, **values: Any) -> "SalaHfConfig":
        return cls(**{**config.to_dict(), **values})

    def to_sala(self) -> SalaConfig:
        """Return the SalaConfig; raise ConfigError for a value that is not supported."""
        _check_rope(getattr(self, "rope_scaling", None))
        values: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        if values["eos_token_id"] is None:
            values["eos_token_id"] = []
        dtype = str(getattr(self, "dtype", None) or "bfloat16").removeprefix("torch.")
        values["dtype"] = dtype if dtype in FILE_DTYPES else "float32"
        return SalaConfig.from_dict(values)

    @property
    def logits_scaling(self) -> float:
        """The divisor of hidden states before the head, for TRL, which applies the head itself."""
        return self.hidden_size / self.dim_model_base

    def quant_config(self) -> QuantConfig | None:
        table = self.quantization
        return None if table is None else QuantConfig.from_dict(table, "config.json: quantization")

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()
        for name in ("quantization", "auto_map"):
            if not values.get(name):
                values.pop(name, None)
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the content of `config.json` with all fields of the model, also those that equal a default."""
        values: dict[str, Any] = super().to_diff_dict()
        values |= {name: getattr(self, name) for name in _FIELDS}
        if values.get("architectures") == ["SalaForCausalLM"]:
            values["architectures"] = [ARCHITECTURE]
        return values


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """Return all fields; invalid values raise when a model is built, as in transformers, not before."""
    try:
        parsed = SalaConfig.from_dict(values)
    except ConfigError:
        return {**_complete(RELEASED.to_dict()), **values}
    complete = {name: getattr(parsed, name) for name in _FIELDS}
    sparse = parsed.sparse_config
    complete["sparse_config"] = {item.name: getattr(sparse, item.name) for item in fields(sparse)}
    complete["mixer_types"], complete["eos_token_id"] = list(parsed.mixer_types), list(parsed.eos_token_id)
    if len(parsed.eos_token_id) < 2:  # a single id is a number, as most programs expect
        complete["eos_token_id"] = next(iter(parsed.eos_token_id), None)
    return complete


def _check_rope(table: dict[str, Any] | None) -> dict[str, Any]:
    """Return the RoPE table; raise ConfigError if it has scaling."""
    table = table or {}
    kind = table.get("rope_type", table.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: rope_scaling is {kind!r}", "the model does not use it: set it to null")
    return table


def _mixers_for(num_layers: int, types: list[str] | None) -> list[str]:
    if types is not None:
        return [_MIXERS_BY_TYPE.get(name, name) for name in types]
    sparse = RELEASED.sparse_layers if num_layers == 32 else {*range(0, num_layers, 4), num_layers - 1}
    return [RELEASED_NAMES["sparse" if layer in sparse else "lightning"] for layer in range(num_layers)]
