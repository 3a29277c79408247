"""Text that repeats, on MLX: blocks with equal scores are selected the same way however the prompt arrives."""

from pathlib import Path

import pytest

import sala.engine.sessions as sessions
from tests.mlx.place import DEVICE
from tests.repeated import IS_FULL, NUM_PERIODS, NUM_PROMPTS, Ways, check


def test_repeated_text_is_exact_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)  # of the disk tier
    check(Ways(tmp_path, device=DEVICE, backend="mlx"), NUM_PROMPTS if IS_FULL else NUM_PERIODS, seed=3)
