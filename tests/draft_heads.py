"""Draft heads with random weights: their drafts are junk, which must not be seen in any answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sala.checkpoint.draft_exit import DraftExitConfig, write_draft_exit
from sala.checkpoint.draft_head import TOKENS, DraftHeadConfig, write_draft_head
from sala.config import SalaConfig


def write_random_head(path: Path, model: Path, seed: int = 0, **changes: Any) -> DraftHeadConfig:
    """Write a head for a model, which drafts a part of its vocabulary."""
    own = SalaConfig.load(model)
    config = replace(DraftHeadConfig.of(own, draft_vocab_size=max(1, own.vocab_size * 3 // 4)), **changes)
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * shape[1] ** -0.5
        for name, shape in config.shapes.items()
    }
    tensors[TOKENS] = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False))
    write_draft_head(path, config, tensors, "F32")
    return config


def write_random_exit(path: Path, model: Path, num_layers: int) -> None:
    config = DraftExitConfig.of(SalaConfig.load(model), num_layers)
    rng = np.random.default_rng(1)
    write_draft_exit(
        path, config, {name: rng.standard_normal(one, np.float32) for name, one in config.shapes.items()}, "F32"
    )
