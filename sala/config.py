"""SalaConfig: what a checkpoint is, read from its `config.json`.

A field that is not known, or a value that cannot be computed with, is refused by name before a weight is read. Nothing
in the file can make code run (`auto_map` is ignored).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from sala.errors import CheckpointError, ConfigError, InputError, ModelNotFound
from sala.options import Attention
from sala.options.schema import FILE_CONFIG, Kind, short, validate
from sala.quantization_config import IGNORED_FIELDS, ExternalLayout, QuantConfig

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

# Ours, for models that were converted from others; the released model has none of them.
_OWN_FIELDS = ("attn_qk_norm", "attn_log_base", "trained_length")
_MAX_CONFIG_BYTES = 16 << 20
_MAX_VOCAB = 1 << 24
_WHERE = "config.json"
ALWAYS_DENSE = 1 << 40  # as dense_len

Number = Annotated[int, Field(strict=True, ge=1, le=1024)]
Length = Annotated[int, Field(strict=True, ge=1, le=1 << 16)]
Size = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
Token = Annotated[int, Field(strict=True, ge=0, le=_MAX_VOCAB)]
Factor = Annotated[float, Field(strict=True, ge=1e-6, le=1e6)]
Theta = Annotated[float, Field(strict=True, ge=1.0, le=1e12)]
Switch = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True, slots=True)
class _RopeParameters:
    __pydantic_config__ = FILE_CONFIG

    rope_theta: Theta = 10000.0
    rope_type: Literal["default"] = "default"


class Regime(NamedTuple):
    """By which rule the rows of a request attend: to everything before `sparse_from`, later to `topk` blocks and more.

    What is cached of a request depends on it, as on its tokens.
    """

    sparse_from: int
    topk: int


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Geometry of InfLLM-v2: pooling windows, blocks, and when to be sparse."""

    __pydantic_config__ = FILE_CONFIG

    kernel_size: Length = 32
    kernel_stride: Length = 16
    init_blocks: Annotated[int, Field(strict=True, ge=0, le=1 << 16)] = 1
    block_size: Length = 64
    window_size: Annotated[int, Field(strict=True, ge=1, le=1 << 30)] = 2048
    topk: Annotated[int, Field(strict=True, ge=0, le=1 << 20)] = 64
    use_nope: Annotated[Literal[False], Kind("", "only false works")] = False
    dense_len: Annotated[int, Field(strict=True, ge=0, le=1 << 40)] = 8192

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

    def regime(self, prompt_len: int) -> Regime:
        """Return the regime of a request whose prompt has `prompt_len` tokens."""
        return Regime(self.sparse_from(prompt_len), self.topk)

    def agreed_len(self, one: Regime, other: Regime) -> int:
        """Rows below this position are the same in two different regimes: they see every block in both."""
        return min(max(regime.sparse_from, self.with_topk(regime.topk).agreement_len) for regime in (one, other))

    def with_topk(self, topk: int | None) -> "SparseConfig":
        """Return the geometry with another number of blocks; None: the same."""
        return self if topk is None or topk == self.topk else _with_topk(self, topk)

    def attending(self, choice: Attention) -> "SparseConfig":
        """Return the geometry with what a user has chosen. Raises InputError for a number of blocks that is too low."""
        if choice.topk is not None and choice.topk <= self.init_blocks:
            room = f"it must be above {self.init_blocks}: initial blocks count, and one more is the query's own"
            raise InputError("topk", f"is {choice.topk}", room)
        given = self.dense_len if choice.dense_below is None else choice.dense_below
        dense_len = {"dense": ALWAYS_DENSE, "sparse": 0}.get(choice.attention or "auto", given)
        return replace(self.with_topk(choice.topk), dense_len=dense_len)

    def describe_changes(self, own: "SparseConfig") -> str:
        """Say in a line how this differs from the model's own geometry; empty if it does not."""
        changes = []
        if self.topk != own.topk:
            changes.append(f"a query selects {self.topk} blocks instead of {own.topk}")
        if self.dense_len != own.dense_len:
            changes.append(f"{self.describe_density()} instead of {own.describe_density()}")
        return f"attention differs from the checkpoint's: {'; '.join(changes)}" if changes else ""

    def describe_density(self) -> str:
        if self.dense_len >= ALWAYS_DENSE:
            return "dense at any length"
        return f"dense below {self.dense_len:,} tokens" if self.dense_len else "sparse at any length"


@cache
def _with_topk(sparse: SparseConfig, topk: int) -> SparseConfig:
    return replace(sparse, topk=topk)


@dataclass(frozen=True, slots=True)
class SalaConfig:
    """Every field of a released `config.json` that takes part in the computation, under its released name.

    Three more serve models converted from others: `attention_bias` (on q, k and v, as Qwen2 has it), `attn_qk_norm`
    (in the sparse layers, as Qwen3 has it) and `attn_log_base` a: queries at position t grow by log(t + a) / log(a).
    `trained_length` is the longest sequence of the training, where it is known and less than max_position_embeddings:
    longer prompts are accepted, with a warning.
    """

    __pydantic_config__ = FILE_CONFIG

    vocab_size: Annotated[int, Field(strict=True, ge=1, le=_MAX_VOCAB)]
    hidden_size: Size
    intermediate_size: Annotated[int, Field(strict=True, ge=1, le=1 << 22)]
    num_hidden_layers: Number
    num_attention_heads: Number
    num_key_value_heads: Number
    head_dim: Number
    mixer_types: tuple[str, ...]
    lightning_nh: Number
    lightning_nkv: Number
    lightning_head_dim: Number
    sparse_config: SparseConfig = field(default_factory=SparseConfig)
    rms_norm_eps: Annotated[float, Field(strict=True, ge=1e-12, le=1.0)] = 1e-6
    rope_theta: Theta = 10000.0
    max_position_embeddings: Annotated[int, Field(strict=True, ge=1, le=1 << 40)] = 524288
    trained_length: Annotated[int, Field(strict=True, ge=1, le=1 << 40)] | None = None
    scale_emb: Factor = 12.0
    scale_depth: Factor = 1.4
    dim_model_base: Size = 256
    mup_denominator: Size = 32
    attn_use_rope: Switch = False
    attn_use_output_gate: Switch = True
    attn_qk_norm: Switch = False
    attn_log_base: Annotated[float, Field(strict=True, ge=2.0, le=1e9)] | None = None
    qk_norm: Switch = True
    use_output_gate: Switch = True
    use_output_norm: Switch = True
    lightning_use_rope: Switch = True
    lightning_scale: Literal["1/sqrt(d)"] = "1/sqrt(d)"
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Switch = False
    tie_word_embeddings: Switch = False
    bos_token_id: Token | None = 1
    eos_token_id: Annotated[tuple[Token, ...], Kind("", "give token ids below vocab_size")] = (2,)
    pad_token_id: Token | None = None
    dtype: Annotated[
        str, Field(pattern="^(bfloat16|float16|float32)$"), Kind("", "use bfloat16, float16 or float32")
    ] = "bfloat16"
    model_type: Literal["minicpm_sala"] = "minicpm_sala"
    quantization: QuantConfig | None = None

    @property
    def layout(self) -> ExternalLayout | None:
        """How another program stored the matrices; None if this package or MLX did."""
        return None if self.quantization is None else self.quantization.layout

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

    def attending(self, choice: Attention) -> "SalaConfig":
        """Return the configuration with what a user has chosen for the sparse layers. Raises InputError."""
        return replace(self, sparse_config=self.sparse_config.attending(choice))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SalaConfig":
        """Check and convert the values of a `config.json`; a ConfigError names the field that is wrong."""
        config = validate(cls, _normalise(values), _WHERE)
        _check_sizes(config)
        return config

    @classmethod
    def load(cls, path: str | Path) -> "SalaConfig":
        """Read `config.json`, given the file or the directory that holds it."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        return cls.from_dict(read_json_object(file))

    def to_dict(self) -> dict[str, Any]:
        """Return the released spelling, ready for `config.json`."""
        out: dict[str, Any] = {"architectures": ["MiniCPMSALAForCausalLM"], **asdict(self)}
        out["mixer_types"] = [RELEASED_NAMES[mixer] for mixer in self.mixers]
        out["eos_token_id"] = list(self.eos_token_id)
        out["quantization"] = self.quantization and self.quantization.to_dict()
        optional = [item for item in fields(self) if item.name in (*_OWN_FIELDS, "quantization")]
        unset = {item.name for item in optional if out[item.name] == item.default}
        return {name: value for name, value in out.items() if name not in unset}


def own_file(file: Path, remedy: str = "if you made it, put a copy or a hard link in its place") -> Path:
    """Return a file of a model's directory. Raises CheckpointError for a link that leads out of the directory.

    A model from elsewhere could otherwise show files of this machine. In the Hugging Face cache, the files of a
    snapshot are links into the `blobs` beside all snapshots.
    """
    home = file.parent.resolve()
    blobs = [place.parent / "blobs" for place in home.parents if place.name == "snapshots"]
    try:
        is_own = any(file.resolve().is_relative_to(place) for place in (home, *blobs))
    except (OSError, RuntimeError):  # links in a circle
        is_own = False
    if not is_own:
        raise CheckpointError(f"{file} is a link that leads out of its directory", remedy)
    return file


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a small file of a model; errors name the file."""
    try:
        values = json.loads(read_small_file(own_file(file), _MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise ModelNotFound(f"{file} does not exist", "give a directory that holds a MiniCPM-SALA checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}", "download it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a JSON object", "download it again")
    return values


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """Return a JSON object; None if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_small_file(file: Path, limit: int) -> bytes:
    """Return the bytes of an ordinary file of at most `limit` bytes."""
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is not a file", "give a directory that holds a checkpoint")
    with file.open("rb") as handle:
        data = handle.read(limit + 1)
    if len(data) > limit:
        raise ConfigError(f"{file} is larger than {limit >> 20} MiB", "check that it is the right file")
    return data


def _normalise(values: Mapping[str, Any]) -> dict[str, Any]:
    """Bring a `config.json` to the names and forms of `SalaConfig`, with defaults that depend on other fields."""
    found = {
        name: value for name, value in values.items() if value is not None and name not in IGNORED_FIELDS["config"]
    }
    old = found.pop("torch_dtype", "bfloat16")
    found.setdefault("dtype", old)
    copy = found.pop("quantization_config", None)  # MLX writes the same table twice
    table = found.pop("quantization", copy)
    if table is not None:
        found["quantization"] = QuantConfig.from_dict(table, f"{_WHERE}: quantization")
    if "rope_scaling" in found:
        raise _fail("rope_scaling", "is set", "the model does not use it: set it to null")
    if "rope_parameters" in found:  # how transformers 5 spells rope_theta and rope_scaling
        rope = validate(_RopeParameters, found.pop("rope_parameters"), f"{_WHERE}: rope_parameters")
        found.setdefault("rope_theta", rope.rope_theta)
    ids = found.get("eos_token_id", [])
    found["eos_token_id"] = ids if isinstance(ids, list) else [ids]
    found.setdefault("bos_token_id", None)
    found["mixer_types"] = _normalise_mixers(found.get("mixer_types"))
    heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
    found.setdefault("num_key_value_heads", heads)
    found.setdefault("lightning_nh", heads)
    found.setdefault("lightning_nkv", found["lightning_nh"])
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        found.setdefault("head_dim", max(1, hidden // heads))
    found.setdefault("lightning_head_dim", found.get("head_dim"))
    return found


def _normalise_mixers(names: Any) -> list[str]:
    if not isinstance(names, list | tuple):
        raise _fail("mixer_types", "is missing or not a list", "it names the mixer of every layer")
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in MIXERS:
            raise _fail(f"mixer_types[{index}]", f"is {short(name)}", "known mixers: " + ", ".join(MIXERS))
    return [RELEASED_NAMES[MIXERS[name]] for name in names]


def _check_sizes(config: SalaConfig) -> None:
    """Refuse sizes that do not fit each other."""
    layers, sparse = config.num_hidden_layers, config.sparse_config
    if len(config.mixer_types) != layers:
        raise _fail("mixer_types", f"names {len(config.mixer_types)} layers of {layers}", "give one mixer per layer")
    stride, block, groups, lightning = (
        sparse.kernel_stride, sparse.block_size, config.num_key_value_heads, config.lightning_nkv,
    )  # fmt: skip
    room = f"leave room for {sparse.init_blocks} initial blocks and the block of the query"
    rules = (
        ("num_attention_heads", config.num_attention_heads % groups == 0, f"be a multiple of {groups}, the kv heads"),
        ("lightning_nh", config.lightning_nh % lightning == 0, f"be divisible by lightning_nkv ({lightning})"),
        ("head_dim", config.head_dim % 2 == 0, "be even"),
        ("lightning_head_dim", config.lightning_head_dim % 2 == 0, "be even"),
        ("kernel_size", sparse.kernel_size % stride == 0, f"be a multiple of kernel_stride ({stride})"),
        ("block_size", block % (4 * stride) == 0, f"be a multiple of 4 x kernel_stride ({4 * stride})"),
        ("window_size", sparse.window_size % block == 0, f"be a multiple of block_size ({block})"),
        ("topk", sparse.init_blocks < sparse.topk, room),
    )  # fmt: skip
    for name, holds, rule in rules:
        if not holds:
            owner: Any = config if hasattr(config, name) else sparse
            raise _fail(name, f"is {getattr(owner, name)}", f"it must {rule}")
    bos, pad, eos = (config.bos_token_id,), (config.pad_token_id,), config.eos_token_id
    for name, ids in (("bos_token_id", bos), ("pad_token_id", pad), ("eos_token_id", eos)):
        for token in ids:
            if token is not None and token >= config.vocab_size:
                raise _fail(name, f"is {token}", f"it must be below vocab_size ({config.vocab_size})")
    if config.quantization is not None:
        config.quantization.check_modules(config.mixers, f"{_WHERE}: quantization")


def _fail(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"{_WHERE}: {name} {problem}", remedy)
