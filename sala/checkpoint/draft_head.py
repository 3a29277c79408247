"""Draft heads: a small layer that guesses the next tokens from hidden states of the model.

A head is a directory with `config.json` and `model.safetensors`, by default `draft-head` in the model's own directory;
`sala draft train` writes it. The tensors are those of `DraftHeadConfig.shapes`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sala.checkpoint.arrays import Array, as_bytes, encode
from sala.checkpoint.dtypes import FLOAT_DTYPES
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_json, write_weights
from sala.config import SalaConfig, read_json_object
from sala.errors import CheckpointError, ConfigError, InputError
from sala.options import Options

DIRECTORY, EXIT_DIRECTORY = "draft-head", "draft-exit"  # in the directory of a model
FORMAT = "sala-draft-head"
TOKENS = "tokens"  # the tensor with the ids of the reduced vocabulary
NUM_FEATURES = 3  # hidden states that are fused
_LARGEST = 1 << 20
T = TypeVar("T")
_REMEDY = "train it again: sala draft train"


@dataclass(frozen=True, slots=True)
class DraftHeadConfig:
    """Sizes of a draft head. It belongs to models with the same `hidden_size`, number of layers and vocabulary."""

    hidden_size: int
    num_hidden_layers: int  # of the model
    vocab_size: int  # of the model
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    feature_layers: tuple[int, ...]  # the hidden states are those after so many layers: low, middle, high; not the last
    draft_vocab_size: int  # tokens that can be drafted
    window: int = 2048  # tokens that the head attends to, besides the first ones
    num_first: int = 16
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    shares_head: bool = True  # scores are by the model's own head, without a matrix of its own

    def __post_init__(self) -> None:
        counts = [self.hidden_size, self.intermediate_size, self.num_attention_heads, self.num_key_value_heads]
        counts += [self.head_dim, self.draft_vocab_size, self.window, self.num_hidden_layers, self.vocab_size]
        if not all(type(one) is int and 0 < one <= _LARGEST for one in counts) or not 0 <= self.num_first <= _LARGEST:
            raise ConfigError("the sizes of the draft head are not positive integers", _REMEDY)
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ConfigError("the attention heads of the draft head do not fit together", _REMEDY)
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError("the draft head has a larger vocabulary than the model", _REMEDY)
        layers = self.feature_layers
        is_rising = list(layers) == sorted(set(layers)) and all(type(one) is int for one in layers)
        if len(layers) != NUM_FEATURES or not is_rising or not 0 < layers[0] <= layers[-1] < self.num_hidden_layers:
            raise ConfigError(f"the feature layers of the draft head are {list(layers)}", _REMEDY)

    @classmethod
    def of(cls, model: SalaConfig, **changes: Any) -> "DraftHeadConfig":
        """Return the sizes that suit a model, with changes."""
        count = model.num_hidden_layers
        sizes: dict[str, Any] = {
            "hidden_size": model.hidden_size,
            "num_hidden_layers": count,
            "vocab_size": model.vocab_size,
            "intermediate_size": model.intermediate_size,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
            "feature_layers": (max(1, count // 4), max(2, count * 5 // 8), count - 1),
            "draft_vocab_size": min(model.vocab_size, 32_768),
            "rms_norm_eps": model.rms_norm_eps,
        }
        return cls(**sizes | changes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors by name."""
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fuse.weight": (hidden, NUM_FEATURES * hidden),
            "embed_norm.weight": (hidden,),
            "feature_norm.weight": (hidden,),
            "q_proj.weight": (queries, 2 * hidden),
            "k_proj.weight": (keys, 2 * hidden),
            "v_proj.weight": (keys, 2 * hidden),
            "o_proj.weight": (hidden, queries),
            "mlp_norm.weight": (hidden,),
            "gate_proj.weight": (wide, hidden),
            "up_proj.weight": (wide, hidden),
            "down_proj.weight": (hidden, wide),
            "norm.weight": (hidden,),
            TOKENS: (self.draft_vocab_size,),
        }
        if not self.shares_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
        return shapes

    @property
    def kv_width(self) -> int:
        """How many numbers the key and the value of a token have."""
        return 2 * self.num_key_value_heads * self.head_dim


def check_sizes(own: Any, model: SalaConfig, where: object) -> None:
    """Raise CheckpointError if a head or an exit was made for a model of other sizes."""
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        theirs = getattr(model, name)
        if getattr(own, name) != theirs:
            message = f"{where} drafts for models with {name} {getattr(own, name):,}, this one has {theirs:,}"
            raise CheckpointError(message, "use what was trained for this model, or train: sala draft train")


def read_config(path: Path) -> DraftHeadConfig:
    """Read and check the configuration of a draft head."""
    return read_sizes(path, DraftHeadConfig, FORMAT, "a draft head", "sala draft train")


def read_sizes(path: Path, kind: type[T], format: str, what: str, command: str) -> T:
    """Read and check the configuration of a head or an exit, which `command` has written."""
    table = read_json_object(path / "config.json")
    if table.pop("format", None) != format:
        raise CheckpointError(f"{path} is not {what}", f"give the directory that `{command}` has written")
    if unknown := sorted(set(table) - {field.name for field in fields(kind)}):  # type: ignore[arg-type]
        raise ConfigError(f"{path / 'config.json'} has {unknown[0][:80]!r}, which is unknown", "update sala")
    lists = {name: tuple(value) for name, value in table.items() if isinstance(value, list)}
    try:
        return kind(**table | lists)
    except (TypeError, ConfigError) as error:
        raise ConfigError(
            f"{path / 'config.json'} is not that of {what}: {error}", f"train it again: {command}"
        ) from None


def open_draft_head(path: Path, model: SalaConfig) -> tuple[DraftHeadConfig, Checkpoint]:
    """Return configuration and tensors of a draft head, checked against the model for which it drafts."""
    config = read_config(path)
    return config, open_tensors(path, config, model, _REMEDY)


def open_tensors(path: Path, config: Any, model: SalaConfig, remedy: str) -> Checkpoint:
    """Return the tensors of a head or an exit, checked against its configuration and the model."""
    check_sizes(config, model, path)
    checkpoint, shapes = Checkpoint(path), config.shapes
    if different := sorted(set(shapes) ^ set(checkpoint)):
        raise CheckpointError(f"{path}: {different[0][:200]} is missing or unknown", remedy)
    for name, shape in shapes.items():
        info = checkpoint.tensors[name]
        is_fit = info.dtype == "I32" if name == TOKENS else info.dtype in FLOAT_DTYPES
        if info.shape != shape or not is_fit:
            raise CheckpointError(f"{path}: {name} is {info.dtype} {list(info.shape)}, not {list(shape)}", remedy)
    return checkpoint


def find_draft_head(model: Path, options: Options) -> Path | None:
    """Return the directory of the head or the exit that the options ask for: the chosen one, or the model's own."""
    if options.speculate not in ("layers", "head", "auto"):
        return None
    choice, own = options.draft_head, model / (EXIT_DIRECTORY if options.speculate == "layers" else DIRECTORY)
    if choice is not None and not choice.is_dir():
        raise CheckpointError(f"{choice} is not a directory", "give that of a draft head: --draft-head DIR")
    if choice is None and options.speculate == "head" and not own.is_dir():
        remedy = "train one: sala draft train; or give its directory: --draft-head DIR; or use --speculate auto"
        raise InputError("speculate", f"is head, and {model} has no draft head", remedy)
    return choice or (own if own.is_dir() else None)


def write_draft_head(path: Path, config: DraftHeadConfig, tensors: Mapping[str, Array], dtype: str) -> None:
    """Write a new directory with a draft head; `dtype` is the precision of its matrices and vectors in the file."""
    write_tensors(path, config, tensors, dtype, FORMAT)


def write_tensors(path: Path, config: Any, tensors: Mapping[str, Array], dtype: str, format: str) -> None:
    with new_directory(path) as place:
        specs = {name: ("I32" if name == TOKENS else dtype, shape) for name, shape in config.shapes.items()}

        def read(name: str) -> memoryview:
            values = tensors[name]
            return as_bytes(values.astype(np.int32) if name == TOKENS else encode(values.astype(np.float32), dtype))

        write_weights(place, specs, read)
        write_json(place / "config.json", {"format": format, **asdict(config)})
