"""A hybrid so small that it trains in seconds, rows for it, and a run that other processes can repeat."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from sala.backends.torch.model import SalaModel
from sala.checkpoint.random import TINY, write_random
from sala.config import SparseConfig
from sala.lab.train import loop
from sala.lab.train.accelerated import Accelerated, RateGroups
from sala.lab.train.data import Mixture, StreamRows, TokenStream, TrainingRow
from sala.lab.train.loop import OutOfTime, Progress, train
from sala.lab.train.models import load_for_training
from sala.lab.train.objectives import Align, Distil, NextToken, Objective
from sala.lab.train.processes import destroy_process, exit_process, gather_parameters, is_main_process
from sala.lab.train.recipe import Source, TrainStage
from sala.lab.train.steps import StepPart

SMALL = replace(
    TINY,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    head_dim=8,
    lightning_nh=4,
    lightning_nkv=4,
    lightning_head_dim=8,
    dim_model_base=32,
    num_hidden_layers=3,
    mixer_types=("minicpm4", "lightning-attn", "minicpm4"),
    sparse_config=SparseConfig(kernel_size=4, kernel_stride=2, block_size=8, window_size=8, topk=2, dense_len=24),
)


def small_model(directory: Path, seed: int = 0, **changes: object) -> SalaModel:
    path = directory / f"model-{seed}"
    if not path.exists():
        write_random(path, replace(SMALL, **changes), seed)  # type: ignore[arg-type]
    return load_for_training(path, torch.device("cpu"))


def rows_of(seed: int, length: int = 32) -> Callable[[int], TrainingRow]:
    """Documents of many lengths; every third token belongs to an answer."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, 50, 60))
    tokens = rng.integers(0, 256, ends[-1]).astype(np.uint32)
    line = StreamRows(TokenStream(tokens, rng.random(ends[-1]) > 0.2, ends), length, seed)

    def make(index: int) -> TrainingRow:
        row = line(index)
        answer = np.arange(length) % 3 == 0
        return TrainingRow(row.tokens, row.loss_mask & ~answer, answer, row.lengths)

    return make


def small_mixture() -> Mixture:
    return Mixture([rows_of(1), rows_of(2)], [1.0, 0.5], 3)


def small_stage(**changes: object) -> TrainStage:
    values = {
        "name": "small",
        "kind": "train",
        "data": (Source(),),
        "seq_len": 32,
        "batch_rows": 4,
        "steps": 12,
        "warmup_steps": 2,
        "lr": 1e-2,
        "save_every": 5,
        "answer_weight": 0.5,
    }
    return TrainStage(**values | changes)  # type: ignore[arg-type]


def learn(
    model: SalaModel,
    directory: Path,
    stage: TrainStage | None = None,
    mixture: Mixture | None = None,
    note: Callable[[Progress], None] = lambda progress: None,
    deadline: float | None = None,
    teacher: SalaModel | None = None,
) -> list[dict[str, float]]:
    stage = stage or small_stage()
    has_selection_loss = stage.block_selection_weight > 0
    objective = (
        NextToken(model, has_selection_loss) if teacher is None else Distil(model, teacher, None, has_selection_loss)
    )
    model.requires_grad_(True)
    names = [name for name, _ in objective.named_parameters()]
    groups = {1.0: [n for n in names if ".mlp." not in n], 0.5: [n for n in names if ".mlp." in n]}
    return run_loop(objective, stage, groups, mixture or small_mixture(), directory, note, deadline)


def align(
    model: SalaModel, teacher: SalaModel, directory: Path, stage: TrainStage, deadline: float | None = None
) -> list[dict[str, float]]:
    model.requires_grad_(True)
    objective = Align({i: model.model.layers[i].self_attn for i in (0, 2)}, teacher)
    groups = {1.0: [name for name, _ in objective.named_parameters()]}
    return run_loop(objective, stage, groups, small_mixture(), directory, lambda progress: None, deadline)


def run_loop(
    objective: Objective,
    stage: TrainStage,
    groups: RateGroups,
    mixture: Mixture,
    directory: Path,
    note: Callable[[Progress], None],
    deadline: float | None,
) -> list[dict[str, float]]:
    parts = [StepPart(mixture, stage.batch_rows, stage.seq_len)]
    return train(Accelerated(objective, stage, groups), stage, parts, directory, note, deadline)


def shard_on_cpu() -> None:
    """Accelerate shards on accelerators only; told that this is one, it does the same with processes on a CPU."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


SPREAD = {"steps": 6, "save_every": 2, "micro_rows": 1, "packing": "documents"}
KINDS = ("train", "tied", "distil", "align")


def run_kind(kind: str, models: Path, directory: Path, deadline: float | None = None) -> SalaModel:
    """A short run of one kind of objective."""
    stage = small_stage(**SPREAD)
    teacher = small_model(models, 1) if kind in ("align", "distil") else None
    model = small_model(models, 2, tie_word_embeddings=True) if kind == "tied" else small_model(models)
    if kind == "align":
        assert teacher is not None
        align(model, teacher, directory, stage, deadline)
    else:
        learn(model, directory, stage, deadline=deadline, teacher=teacher)
    return model


def run_all(models: Path, directory: Path, is_sharded: bool) -> None:
    """Every kind, stopped after a step and then run to its end; the weights it ends with are written."""
    for kind in KINDS:
        try:
            run_kind(kind, models, directory / kind, deadline=0.0)
        except OutOfTime:
            model = run_kind(kind, models, directory / kind)
        assert any(isinstance(weight, DTensor) for weight in model.parameters()) == is_sharded
        gather_parameters(model)
        if is_main_process():
            torch.save(dict(model.named_parameters()), directory / f"{kind}.pt")


def main() -> None:
    """In a process of its own: `killed MODELS RUN` ends at step 10; `all MODELS RUNS` is one of several processes."""
    what, models, directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if what == "killed":
        loop.LOG_EVERY = 1
        stage = small_stage(save_every=4)
        learn(small_model(models), directory, stage, note=lambda p: p.step < 10 or os.kill(os.getpid(), 9))  # type: ignore[func-returns-value,arg-type,return-value]
        return
    is_sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if is_sharded:
        shard_on_cpu()
    run_all(models, directory, is_sharded)
    destroy_process()
    exit_process(0)


if __name__ == "__main__":
    main()
