"""`sources.json` beside a model: how much the attention of each head of its sparse layers tells about sources.

`sala eval sources --learn` writes it. Without it all heads weigh the same.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sala.config import SalaConfig, read_json_object
from sala.errors import ConfigError

NAME = "sources.json"
REMEDY = "remove it, or write it again: sala eval sources --learn"


def read_head_weights(directory: Path, config: SalaConfig) -> list[list[float]] | None:
    """Return the weights [sparse layers, heads] of a model; None if it has none. Raises ConfigError."""
    file = directory / NAME
    if not file.is_file() or not config.sparse_layers:
        return None
    layers = read_json_object(file).get("heads")
    if not isinstance(layers, dict):
        raise ConfigError(
            f"{file} holds no weights of heads", "remove it, or write it again: sala eval sources --learn"
        )
    found: list[Any] = [layers.get(str(layer)) for layer in config.sparse_layers]
    is_fit = all(_is_row(row, config.num_attention_heads) for row in found)
    if not is_fit or not any(any(row) for row in found):
        count = config.num_attention_heads
        message = f"{file} does not have {count} weights for each of the layers {list(config.sparse_layers)}"
        raise ConfigError(message, REMEDY)
    return found


def _is_row(row: Any, count: int) -> bool:
    if not isinstance(row, list) or len(row) != count:
        return False
    return all(isinstance(one, int | float) and math.isfinite(one) and one >= 0 for one in row)


def format_head_weights(weights: Sequence[Sequence[float]], config: SalaConfig, **facts: Any) -> str:
    """Return the text of `sources.json`; `facts` say what the weights were learnt from."""
    rows = zip(config.sparse_layers, weights, strict=True)
    lines = [f'    "{layer}": {json.dumps([round(float(one), 5) for one in row])}' for layer, row in rows]
    return f'{{\n  "learnt": {json.dumps(facts)},\n  "heads": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
