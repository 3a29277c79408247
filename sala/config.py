"""SalaConfig: what a checkpoint is, read from its `config.json`.

Strict on purpose: a field that we do not know, or a value that cannot be computed with, is refused by name
before a single weight is touched. Nothing in the file can switch code on (`auto_map` is read past).
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from sala.errors import ConfigError, ModelNotFound
from sala.quantization_config import QuantConfig

Mixer = Literal["sparse", "lightning"]

MIXERS: dict[str, Mixer] = {
    "minicpm4": "sparse",
    "minicpm": "sparse",
    "standard": "sparse",
    "attention": "sparse",
    "attn": "sparse",
    "lightning-attn": "lightning",
    "lightning_attn": "lightning",
    "lightning": "lightning",
}
RELEASED_NAMES: dict[Mixer, str] = {"sparse": "minicpm4", "lightning": "lightning-attn"}

# Written by other tools, without influence on the numbers.
_IGNORED = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_from_model_config",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "chunk_size_feed_forward",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "layer_types",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "shift_labels",
    "transformers_version",
    "use_cache",
}
# Ours, for models that were converted from others; the released model has none of them.
_OWN_FIELDS = ("attn_qk_norm", "attn_log_base")
_MAX_CONFIG_BYTES = 16 << 20
_MAX_VOCAB = 1 << 24


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Geometry of InfLLM-v2: pooling windows, blocks, and when to be sparse."""

    kernel_size: int = 32
    kernel_stride: int = 16
    init_blocks: int = 1
    block_size: int = 64
    window_size: int = 2048
    topk: int = 64
    use_nope: bool = False
    dense_len: int = 8192

    @property
    def num_window_blocks(self) -> int:
        return self.window_size // self.block_size

    @property
    def num_selected(self) -> int:
        """Blocks a query attends to, the forced ones included."""
        return self.topk + self.num_window_blocks

    @property
    def agreement_len(self) -> int:
        """Rows below this position see every block in both regimes, so dense and sparse agree on them."""
        return self.num_selected * self.block_size

    def sparse_from(self, prompt_len: int) -> int:
        """First position that follows the sparse rule, for a request whose prompt has `prompt_len` tokens.

        A long prompt is sparse from its first row; a short one is dense until the context reaches dense_len.
        """
        return 0 if prompt_len >= self.dense_len else self.dense_len - 1


@dataclass(frozen=True, slots=True)
class SalaConfig:
    """Every field of a released `config.json` that takes part in the computation, under its released name.

    Three more serve models converted from others: `attention_bias` (on q, k and v, as Qwen2 has it), `attn_qk_norm`
    (in the sparse layers, as Qwen3 has it) and `attn_log_base` a: queries at position t grow by log(t + a) / log(a).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mixer_types: tuple[str, ...]
    lightning_nh: int
    lightning_nkv: int
    lightning_head_dim: int
    sparse_config: SparseConfig = field(default_factory=SparseConfig)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 524288
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 256
    mup_denominator: int = 32
    attn_use_rope: bool = False
    attn_use_output_gate: bool = True
    attn_qk_norm: bool = False
    attn_log_base: float | None = None
    qk_norm: bool = True
    use_output_gate: bool = True
    use_output_norm: bool = True
    lightning_use_rope: bool = True
    lightning_scale: str = "1/sqrt(d)"
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: tuple[int, ...] = (2,)
    pad_token_id: int | None = None
    dtype: str = "bfloat16"
    model_type: str = "minicpm_sala"
    quantization: QuantConfig | None = None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(MIXERS[name] for name in self.mixer_types)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        return tuple(i for i, mixer in enumerate(self.mixers) if mixer == "sparse")

    @property
    def lightning_layers(self) -> tuple[int, ...]:
        return tuple(i for i, mixer in enumerate(self.mixers) if mixer == "lightning")

    @property
    def residual_scale(self) -> float:
        return self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logit_divisor(self) -> float:
        return self.hidden_size / self.dim_model_base

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SalaConfig":
        return _Parser(dict(values)).config()

    @classmethod
    def load(cls, path: str | Path) -> "SalaConfig":
        """Read `config.json`, given the file or the directory that holds it."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        return cls.from_dict(read_json_object(file))

    def to_dict(self) -> dict[str, Any]:
        """The released spelling, ready for `config.json`."""
        out: dict[str, Any] = {"architectures": ["MiniCPMSALAForCausalLM"]}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _OWN_FIELDS and value == item.default:
                continue
            if item.name == "sparse_config":
                value = {f.name: getattr(value, f.name) for f in fields(value)}
            elif item.name == "quantization":
                if value is None:
                    continue
                value = value.to_dict()
            elif item.name == "mixer_types":
                value = [RELEASED_NAMES[MIXERS[name]] for name in value]
            elif item.name == "eos_token_id":
                value = list(value)
            out[item.name] = value
        return out


def read_json_object(file: Path) -> dict[str, Any]:
    """A JSON object from a small file; every failure is one line that names the file."""
    try:
        values = json.loads(read_small_file(file, _MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise ModelNotFound(f"{file} does not exist", "give a directory that holds a MiniCPM-SALA checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}", "download it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no JSON object", "download it again")
    return values


def read_small_file(file: Path, limit: int) -> bytes:
    """The bytes of an ordinary file, never more than `limit` of them."""
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is not a file", "give a directory that holds a checkpoint")
    with file.open("rb") as handle:
        data = handle.read(limit + 1)
    if len(data) > limit:
        raise ConfigError(f"{file} is larger than {limit >> 20} MiB", "this is not what it should be")
    return data


class _Parser:
    """Takes keys out of the dictionary one by one; what is left at the end is unknown."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self.seen: set[str] = set()

    def fail(self, name: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} {problem}"[:500], remedy)

    def take(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        value = self.values.pop(name, None)
        return default if value is None else value

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.take(name, default)
        if value is None:
            raise self.fail(name, "is missing", f"add it, a whole number from {low} to {high}")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, f"is {value!r}", f"it must be a whole number from {low} to {high}")
        return value

    def real(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise self.fail(name, f"is {value!r}"[:200], f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, f"is {value!r}", "it must be true or false")
        return value

    def only(self, name: str, allowed: tuple[Any, ...]) -> Any:
        value = self.take(name, allowed[0])
        if not any(value == item and type(value) is type(item) for item in allowed):
            choices = " or ".join(repr(item) for item in allowed)
            raise self.fail(name, f"is {value!r}", f"only {choices} is supported")
        return value

    def table(self, name: str) -> "_Parser":
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise self.fail(name, f"is {value!r}", "it must be an object")
        return _Parser(dict(value), f"{self.where}: {name}")

    def finish(self) -> None:
        for name in self.values:
            near = difflib.get_close_matches(name, sorted(self.seen), n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it, or update this package if the model is newer"
            raise self.fail(repr(name), "is not a field of this model", hint)

    def config(self) -> SalaConfig:
        for name in _IGNORED:
            self.take(name)
        layers = self.whole("num_hidden_layers", 1, 1024)
        heads = self.whole("num_attention_heads", 1, 1024)
        hidden = self.whole("hidden_size", 1, 1 << 20)
        kv_heads = self.whole("num_key_value_heads", 1, 1024, heads)
        head_dim = self.whole("head_dim", 1, 1024, max(1, hidden // heads))
        lightning_heads = self.whole("lightning_nh", 1, 1024, heads)
        config = SalaConfig(
            vocab_size=self.whole("vocab_size", 1, _MAX_VOCAB),
            hidden_size=hidden,
            intermediate_size=self.whole("intermediate_size", 1, 1 << 22),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            mixer_types=self.mixer_types(layers),
            lightning_nh=lightning_heads,
            lightning_nkv=self.whole("lightning_nkv", 1, 1024, lightning_heads),
            lightning_head_dim=self.whole("lightning_head_dim", 1, 1024, head_dim),
            sparse_config=_sparse_config(self.table("sparse_config")),
            rms_norm_eps=self.real("rms_norm_eps", 1e-12, 1.0, 1e-6),
            rope_theta=self.rope_theta(),
            max_position_embeddings=self.whole("max_position_embeddings", 1, 1 << 40, 524288),
            scale_emb=self.real("scale_emb", 1e-6, 1e6, 12.0),
            scale_depth=self.real("scale_depth", 1e-6, 1e6, 1.4),
            dim_model_base=self.whole("dim_model_base", 1, 1 << 20, 256),
            mup_denominator=self.whole("mup_denominator", 1, 1 << 20, 32),
            attn_use_rope=self.flag("attn_use_rope", False),
            attn_use_output_gate=self.flag("attn_use_output_gate", True),
            attn_qk_norm=self.flag("attn_qk_norm", False),
            attn_log_base=self.log_base(),
            qk_norm=self.flag("qk_norm", True),
            use_output_gate=self.flag("use_output_gate", True),
            use_output_norm=self.flag("use_output_norm", True),
            lightning_use_rope=self.flag("lightning_use_rope", True),
            lightning_scale=self.only("lightning_scale", ("1/sqrt(d)",)),
            hidden_act=self.only("hidden_act", ("silu",)),
            attention_bias=self.flag("attention_bias", False),
            tie_word_embeddings=self.flag("tie_word_embeddings", False),
            bos_token_id=self.token("bos_token_id"),
            eos_token_id=self.tokens("eos_token_id"),
            pad_token_id=self.token("pad_token_id"),
            dtype=self.dtype(),
            model_type=self.only("model_type", ("minicpm_sala",)),
            quantization=self.quantization(),
        )
        self.finish()
        self.check_sizes(config)
        return config

    def mixer_types(self, layers: int) -> tuple[str, ...]:
        value = self.take("mixer_types")
        if not isinstance(value, list | tuple):
            raise self.fail("mixer_types", "is missing or no list", "it names the mixer of every layer")
        for index, name in enumerate(value):
            if not isinstance(name, str) or name not in MIXERS:
                raise self.fail(f"mixer_types[{index}]", f"is {name!r}", "known mixers: " + ", ".join(MIXERS))
        if len(value) != layers:
            raise self.fail("mixer_types", f"names {len(value)} layers of {layers}", "give one mixer per layer")
        return tuple(RELEASED_NAMES[MIXERS[name]] for name in value)

    def rope_theta(self) -> float:
        parameters = self.table("rope_parameters")  # how transformers 5 spells rope_theta and rope_scaling
        theta = parameters.real("rope_theta", 1.0, 1e12, 10000.0)
        parameters.only("rope_type", ("default",))
        parameters.finish()
        if self.take("rope_scaling") is not None:
            raise self.fail("rope_scaling", "is set", "the model needs none: set it to null")
        return self.real("rope_theta", 1.0, 1e12, theta)

    def log_base(self) -> float | None:
        if self.values.get("attn_log_base") is None:
            self.take("attn_log_base")
            return None
        return self.real("attn_log_base", 2.0, 1e9, 2.0)

    def token(self, name: str) -> int | None:
        if self.values.get(name) is None:
            self.take(name)
            return None
        return self.whole(name, 0, _MAX_VOCAB)

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self.take(name, [])
        ids = value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX_VOCAB:
                raise self.fail(name, f"holds {item!r}", "token ids lie between 0 and vocab_size - 1")
        return tuple(ids)

    def dtype(self) -> str:
        old = self.take("torch_dtype", "bfloat16")
        value = self.take("dtype", old)
        if value not in ("bfloat16", "float16", "float32"):
            raise self.fail("dtype", f"is {value!r}", "use bfloat16, float16 or float32")
        return str(value)

    def quantization(self) -> QuantConfig | None:
        copy = self.take("quantization_config")  # MLX writes the same table twice
        table = self.take("quantization", copy)
        if table is None:
            return None
        return QuantConfig.from_dict(table, f"{self.where}: quantization")

    def check_sizes(self, config: SalaConfig) -> None:
        rules: list[tuple[str, Callable[[], bool], str]] = [
            (
                "num_attention_heads",
                lambda: config.num_attention_heads % config.num_key_value_heads == 0,
                f"must be divisible by num_key_value_heads ({config.num_key_value_heads})",
            ),
            (
                "lightning_nh",
                lambda: config.lightning_nh % config.lightning_nkv == 0,
                f"must be divisible by lightning_nkv ({config.lightning_nkv})",
            ),
            ("head_dim", lambda: config.head_dim % 2 == 0, "must be even"),
            ("lightning_head_dim", lambda: config.lightning_head_dim % 2 == 0, "must be even"),
        ]
        for name, holds, rule in rules:
            if not holds():
                raise self.fail(name, f"is {getattr(config, name)}", f"it {rule}")
        for name in ("bos_token_id", "pad_token_id"):
            value = getattr(config, name)
            if value is not None and value >= config.vocab_size:
                raise self.fail(name, f"is {value}", f"it must be below vocab_size ({config.vocab_size})")
        if config.quantization is not None:
            config.quantization.check_modules(config.mixers, f"{self.where}: quantization")
        if any(value >= config.vocab_size for value in config.eos_token_id):
            raise self.fail("eos_token_id", f"is {list(config.eos_token_id)}", "ids must be below vocab_size")


def _sparse_config(table: _Parser) -> SparseConfig:
    sparse = SparseConfig(
        kernel_size=table.whole("kernel_size", 1, 1 << 16, 32),
        kernel_stride=table.whole("kernel_stride", 1, 1 << 16, 16),
        init_blocks=table.whole("init_blocks", 0, 1 << 16, 1),
        block_size=table.whole("block_size", 1, 1 << 16, 64),
        window_size=table.whole("window_size", 1, 1 << 30, 2048),
        topk=table.whole("topk", 0, 1 << 20, 64),
        use_nope=table.only("use_nope", (False,)),
        dense_len=table.whole("dense_len", 0, 1 << 40, 8192),
    )
    table.finish()
    if sparse.kernel_size % sparse.kernel_stride:
        raise table.fail(
            "kernel_size",
            f"is {sparse.kernel_size}",
            f"it must be a multiple of kernel_stride ({sparse.kernel_stride})",
        )
    if sparse.block_size % (4 * sparse.kernel_stride):
        raise table.fail(
            "block_size",
            f"is {sparse.block_size}",
            f"it must be a multiple of 4 x kernel_stride ({4 * sparse.kernel_stride})",
        )
    if sparse.window_size % sparse.block_size:
        raise table.fail(
            "window_size",
            f"is {sparse.window_size}",
            f"it must be a multiple of block_size ({sparse.block_size})",
        )
    if sparse.init_blocks + sparse.num_window_blocks + 1 > sparse.num_selected:
        raise table.fail(
            "topk",
            f"is {sparse.topk}",
            f"it must leave room for {sparse.init_blocks} initial blocks and the block of the query",
        )
    return sparse
