"""Two processes, plainly or with weights sharded over them, learn what one process learns."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.small import KINDS, run_kind

PLAIN = {"ACCELERATE_USE_CPU": "true"}
SHARDED = PLAIN | {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}


def launch(world: int, settings: dict[str, str], *arguments: str) -> list[int]:
    """The exit codes of `world` processes that know of each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = os.environ | settings | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    processes = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        processes.append(subprocess.Popen(command, cwd=Path(__file__).parents[2], env=shared | place))
    try:
        return [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()


def losses(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("settings", [PLAIN, SHARDED], ids=["plain", "sharded"])
def test_two_processes_learn_what_one_learns(tmp_path: Path, settings: dict[str, str]) -> None:
    """Each run of the two is stopped after its first step, and goes on."""
    ones = {kind: run_kind(kind, tmp_path, tmp_path / "one" / kind) for kind in KINDS}
    assert launch(2, settings, "tests.train.small", "all", str(tmp_path), str(tmp_path / "two")) == [0, 0]
    for kind, model in ones.items():
        one, two = losses(tmp_path / "one" / kind), losses(tmp_path / "two" / kind)
        assert [entry["step"] for entry in two] == [1, 2, 4, 6]
        for got, want in zip(two, one, strict=True):
            assert got == pytest.approx(want, rel=1e-4), kind
        learnt = torch.load(tmp_path / "two" / f"{kind}.pt")
        for name, weight in model.named_parameters():
            torch.testing.assert_close(learnt[name], weight, atol=1e-3, rtol=0, msg=f"{kind}: {name}")
