"""The file with the weights of heads: written, read, and refused if it does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from sala.checkpoint.random import TINY
from sala.errors import ConfigError
from sala.head_weights import NAME, format_head_weights, read_head_weights

CONFIG = replace(TINY, num_attention_heads=4)
WEIGHTS = [[0.1 * (layer + head) for head in range(4)] for layer in range(len(CONFIG.sparse_layers))]


def test_written_and_read(tmp_path: Path) -> None:
    assert read_head_weights(tmp_path, CONFIG) is None
    (tmp_path / NAME).write_text(format_head_weights(WEIGHTS, CONFIG, questions=3))
    assert read_head_weights(tmp_path, CONFIG) == [[pytest.approx(one) for one in row] for row in WEIGHTS]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"heads": []}',
        format_head_weights([row[:3] for row in WEIGHTS], CONFIG),
        format_head_weights([[0.0] * 4 for _ in WEIGHTS], CONFIG),
        format_head_weights([[-1.0] * 4 for _ in WEIGHTS], CONFIG),
    ],
)
def test_a_table_that_does_not_fit(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ConfigError, match="sala eval sources --learn"):
        read_head_weights(tmp_path, CONFIG)
