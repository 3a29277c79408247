"""What `generation_config.json` says: the tokens that end an answer, and how its makers recommend to sample."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sala.config import SalaConfig, read_json_object
from sala.errors import ConfigError, InputError
from sala.options import Sampling

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "loop_guard")  # the last one is ours
# MiniCPM-SALA's own file recommends nothing; its model card recommends this.
RELEASED_SHAPE = (4096, 32, 73448)
RELEASED_TEMPERATURE = 0.9


def read_stop_ids(directory: Path, config: SalaConfig) -> frozenset[int]:
    """Return the tokens that end an answer, from generation_config.json or else from config.json."""
    file, values = _read(directory)
    ids = values.get("eos_token_id")
    if ids is None:
        return frozenset(config.eos_token_id)
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(item, int) for item in ids):
        raise ConfigError(f"{file}: eos_token_id is {ids!r}", "it must be a token id or a list of them")
    return frozenset(ids)


def recommended_sampling(directory: Path, config: SalaConfig) -> dict[str, Any]:
    """Return the sampling parameters that are the defaults of this model."""
    file, values = _read(directory)
    found = {name: values[name] for name in FIELDS if values.get(name) is not None}
    if (config.hidden_size, config.num_hidden_layers, config.vocab_size) == RELEASED_SHAPE:
        found.setdefault("temperature", RELEASED_TEMPERATURE)
    if found.get("top_k") == -1:
        found["top_k"] = 0
    try:
        Sampling(**found)
    except InputError as error:
        raise ConfigError(f"{file}: {error.field} {error.problem}", error.remedy) from None
    return found


def _read(directory: Path) -> tuple[Path, Mapping[str, Any]]:
    file = directory / "generation_config.json"
    return file, read_json_object(file) if file.is_file() else {}
