"""Trained exits: what turns the hidden states after the first layers into those from which tokens are guessed.

An exit is a directory with `config.json` and `model.safetensors`, by default `draft-exit` in the model's own directory;
`sala draft train --exit N` writes it, and `--speculate layers` drafts with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sala.checkpoint.arrays import Array
from sala.checkpoint.draft_head import open_tensors, read_sizes, write_tensors
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import ConfigError

FORMAT = "sala-draft-exit"
_LARGEST = 1 << 20
COMMAND = "sala draft train --exit N"
_REMEDY = f"train it again: {COMMAND}"


@dataclass(frozen=True, slots=True)
class DraftExitConfig:
    """An exit after `num_layers` layers. It belongs to models with the same sizes."""

    hidden_size: int
    num_hidden_layers: int  # of the model
    vocab_size: int  # of the model
    num_layers: int  # that run before the exit
    intermediate_size: int
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        counts = [self.hidden_size, self.num_hidden_layers, self.vocab_size, self.num_layers, self.intermediate_size]
        if not all(type(one) is int and 0 < one <= _LARGEST for one in counts):
            raise ConfigError("the sizes of the exit are not positive integers", _REMEDY)
        if self.num_layers >= self.num_hidden_layers:
            message = f"an exit after {self.num_layers} of {self.num_hidden_layers} layers is none"
            raise ConfigError(message, f"choose fewer than {self.num_hidden_layers} layers")

    @classmethod
    def of(cls, model: SalaConfig, num_layers: int, **changes: Any) -> "DraftExitConfig":
        """Return the sizes that suit a model, with changes."""
        sizes: dict[str, Any] = {
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_hidden_layers,
            "vocab_size": model.vocab_size,
            "num_layers": num_layers,
            "intermediate_size": model.hidden_size,
            "rms_norm_eps": model.rms_norm_eps,
        }
        return cls(**sizes | changes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors by name."""
        hidden, wide = self.hidden_size, self.intermediate_size
        return {"up_proj.weight": (wide, hidden), "down_proj.weight": (hidden, wide), "norm.weight": (hidden,)}


def read_config(path: Path) -> DraftExitConfig:
    """Read and check the configuration of an exit."""
    return read_sizes(path, DraftExitConfig, FORMAT, "a trained exit", COMMAND)


def open_draft_exit(path: Path, model: SalaConfig) -> tuple[DraftExitConfig, Checkpoint]:
    """Return configuration and tensors of an exit, checked against the model for which it drafts."""
    config = read_config(path)
    return config, open_tensors(path, config, model, _REMEDY)


def write_draft_exit(path: Path, config: DraftExitConfig, tensors: Mapping[str, Array], dtype: str) -> None:
    """Write a new directory with an exit; `dtype` is the precision in the file."""
    write_tensors(path, config, tensors, dtype, FORMAT)
