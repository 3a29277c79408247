"""Fine-tuning that several processes share, each started as `python -m tests.train.tuned ROOM OUTPUT METHOD …`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from sala.lab.finetune import run
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.train.processes import exit_process
from tests.train.small import shard_on_cpu


def options_of(room: Path, output: Path, method: str, rows: int) -> FinetuneOptions:
    """`rows` per process and update; the rows of an update are the same however many processes share them."""
    return FinetuneOptions(
        model=str(room / "model"),
        train=room / "train.jsonl",
        output=output,
        method=method,
        max_length=64,
        packing=False,
        accumulate=rows,
        steps=4,
        lr=1e-2,
        dropout=0.0,
        rank=4,
        save_every=2,
        device="cpu",
        keep_long=0.0,
    )


def main() -> None:
    torch.set_num_threads(1)
    room, output, methods = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        make = run.make_trainer

        def make_sharded(*arguments: Any, **named: Any) -> Any:
            shard_on_cpu()
            trainer = make(*arguments, **named)
            assert trainer.is_fsdp_enabled
            return trainer

        run.make_trainer = make_sharded
    for method in methods:
        run.finetune(options_of(room, output / method, method, 2))
    exit_process(0)


if __name__ == "__main__":
    main()
