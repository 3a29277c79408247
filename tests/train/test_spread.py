"""Two processes, plainly or with weights sharded over them, learn what one process learns."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.small import small_model

ROOT = Path(__file__).parents[2]
PLAIN = {"ACCELERATE_USE_CPU": "true"}
SHARDED = PLAIN | {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
STAGE = {"steps": 6, "save_every": 2, "micro_rows": 1, "packing": "documents"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    small_model(path)
    small_model(path, 1)
    small_model(path, 2, tie_word_embeddings=True)
    return path


def launch(world: int, settings: dict[str, str], *arguments: str) -> list[int]:
    """The exit codes of `world` processes that know of each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = os.environ | settings | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(world)} if world > 1 else {} for r in range(world)
    ]
    command = [sys.executable, "-m", "tests.train.small", *arguments]
    processes = [subprocess.Popen(command, cwd=ROOT, env=shared | rank) for rank in ranks]
    try:
        return [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()


def losses(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("settings", [PLAIN, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("kind", ["train", "tied", "distil", "align"])
def test_two_processes_learn_what_one_learns(models: Path, tmp_path: Path, settings: dict[str, str], kind: str) -> None:
    stage = json.dumps(STAGE)
    assert launch(1, PLAIN, kind, str(models), str(tmp_path / "one"), stage) == [0]
    assert launch(2, settings, kind, str(models), str(tmp_path / "two"), stage) == [0, 0]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [entry["step"] for entry in one] == [1, 2, 4, 6]
    for got, want in zip(two, one, strict=True):
        assert got == pytest.approx(want, rel=1e-4)
