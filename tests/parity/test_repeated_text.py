"""Text that repeats: blocks with equal scores are selected the same way however the prompt reaches the model."""

from pathlib import Path

import pytest

import sala.engine.sessions as sessions
from tests.golden import DEVICE
from tests.repeated import IS_FULL, NUM_PERIODS, NUM_PROMPTS, Ways, check


@pytest.mark.parametrize(("kernels", "count"), [("auto", NUM_PROMPTS), ("off", NUM_PERIODS)])
def test_repeated_text_is_exact_in_every_way(
    kernels: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)  # of the disk tier
    check(Ways(tmp_path, device=DEVICE, kernels=kernels), NUM_PROMPTS if IS_FULL else count, seed=3)
