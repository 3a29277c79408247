"""The training loop of a stage: a run that was killed resumes with identical results.

Accelerate distributes it over devices and nodes (data-parallel, or sharded with FSDP). Weights and optimizer state are
saved as safetensors, and only while losses and gradients are finite.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sala.errors import InputError, MissingExtra, SalaError
from sala.lab.train.data import Mixture, TrainingRow
from sala.lab.train.objectives import Objective, counts
from sala.lab.train.processes import any_process
from sala.lab.train.recipe import Learning
from sala.lab.train.state import load_state, save_state

LOG_EVERY = 10


class Diverged(SalaError):
    """Raised for a loss or gradient that is not finite; the last good state is kept."""


class OutOfTime(SalaError):
    """Raised when the deadline is reached; the state is saved."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that train at `scale` times the stage's learning rate."""

    names: tuple[str, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    num_steps: int
    values: Mapping[str, float]


def train(
    objective: Objective,
    stage: Learning,
    mixture: Mixture,
    directory: Path,
    groups: Sequence[Group],
    note: Callable[[Progress], None],
    deadline: float | None = None,
    dtype: str = "bfloat16",
) -> list[dict[str, float]]:
    """Train the objective for the stage's steps, and return the log.

    `directory` holds the state and `metrics.jsonl`. Raise Diverged if a loss is not finite, OutOfTime at the deadline.
    """
    accelerator = _accelerator(dtype, next(objective.parameters()).device, objective.units)
    if stage.batch_rows % accelerator.num_processes:
        raise InputError("batch_rows", f"is {stage.batch_rows}", f"use a multiple of {accelerator.num_processes}")
    directory.mkdir(parents=True, exist_ok=True)
    named = dict(objective.named_parameters())
    rates = [group.scale for group in groups]
    optimizer = torch.optim.AdamW(
        [{"params": [named[name] for name in group.names], "lr": stage.lr * group.scale} for group in groups],
        betas=stage.betas,
        weight_decay=stage.weight_decay,
        fused=accelerator.device.type == "cuda",
    )
    objective.to(accelerator.device)
    wrapped, optimizer = accelerator.prepare(objective, optimizer)
    first = load_state(directory, wrapped, optimizer)
    log = _Log(directory / "metrics.jsonl", first, is_writer=accelerator.is_main_process)
    steps = _StepRows(stage, mixture, accelerator.process_index, accelerator.num_processes)
    feed = _prefetch(steps, first, accelerator.device)
    last_save = first
    for step in range(first, stage.num_steps):
        rate = stage.rate.rate(step)
        for group, scale in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        parts = [collate(rows, stage.packing) for rows in next(feed)]
        sums, totals, norm = _update(accelerator, wrapped, objective, optimizer, parts, stage)
        is_late = deadline is not None and any_process(time.monotonic() > deadline, accelerator.device)
        is_last = step + 1 == stage.num_steps
        is_due = (step + 1) % stage.save_every == 0 or is_last or is_late
        if (step + 1) % LOG_EVERY == 0 or step == 0 or is_due:
            values = _values(objective, sums, totals, norm, rate)
            _check_finite(values, step, last_save, directory)
            log.add(step + 1, values)
            note(Progress(step + 1, stage.num_steps, values))
        if is_due:
            save_state(directory, step + 1, wrapped, optimizer, accelerator)
            last_save = step + 1
        if is_late and not is_last:
            raise OutOfTime(f"out of time after step {step + 1} of {stage.num_steps}", "run it again to resume")
    accelerator.unwrap_model(wrapped)
    return log.entries


def _accelerator(dtype: str, device: torch.device, units: Sequence[str]) -> Any:
    try:
        from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtra("accelerate", "train") from None
    is_mixed = dtype == "bfloat16" and device.type == "cuda"
    accelerator = Accelerator(mixed_precision="bf16" if is_mixed else "no", cpu=device.type == "cpu")
    sharding = getattr(accelerator.state, "fsdp_plugin", None)
    if sharding is not None:  # the plugin is shared by all stages and keeps the units of the previous one
        sharding.transformer_cls_names_to_wrap = list(units)
    return accelerator


def _update(
    accelerator: Any,
    wrapped: Any,
    objective: Objective,
    optimizer: Any,
    parts: list[dict[str, Tensor]],
    stage: Learning,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step over the global batch, and return the sums of the terms, their counts and the gradient norm."""
    device, world = accelerator.device, accelerator.num_processes
    totals = torch.tensor([counts(objective, part) for part in parts], dtype=torch.float64).sum(0).to(device)
    totals = accelerator.reduce(totals.float(), "sum")
    extra = [getattr(stage, name, 0.0) for name in ("answer_weight", "choice_weight")]
    weights = torch.tensor([1.0, *extra][: len(totals)], device=device)
    scales = weights / totals.clamp(min=1) * world  # data parallelism averages the gradients; this restores the sum
    sums = torch.zeros_like(totals)
    for index, part in enumerate(parts):
        wrapped.train()
        rows = {name: tensor.to(device, non_blocking=True) for name, tensor in part.items()}
        is_last = index + 1 == len(parts)
        with _no_sync_unless(accelerator, wrapped, is_last):
            loss, part_sums = wrapped(rows, scales)
            accelerator.backward(loss)
        sums += part_sums
    norm = accelerator.clip_grad_norm_(wrapped.parameters(), stage.clip or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return accelerator.reduce(sums, "sum"), totals, torch.as_tensor(norm)


def _no_sync_unless(accelerator: Any, wrapped: Any, is_last: bool) -> Any:
    return nullcontext() if is_last else accelerator.no_sync(wrapped)


def _values(objective: Objective, sums: Tensor, totals: Tensor, norm: Tensor, rate: float) -> dict[str, float]:
    means = (sums / totals.clamp(min=1)).tolist()
    named = dict(zip(objective.terms, means, strict=True))
    return named | {"norm": float(norm), "rate": rate}


def _check_finite(values: Mapping[str, float], step: int, last_save: int, directory: Path) -> None:
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        kept = f"the state of step {last_save} is kept" if last_save else "nothing was saved yet"
        raise Diverged(
            f"{bad[0]} is not finite at step {step + 1}; {kept}",
            f"lower lr, remove {directory}, and run it again",
        )


class _StepRows(Dataset[list[list[TrainingRow]]]):
    """The rows of each step, split into micro-batches."""

    def __init__(self, stage: Learning, mixture: Mixture, rank: int, world: int) -> None:
        self.stage, self.mixture, self.rank, self.world = stage, mixture, rank, world

    def __getitem__(self, step: int) -> list[list[TrainingRow]]:
        count = self.stage.batch_rows
        rows = self.mixture.rows(step * count, count, self.rank, self.world)
        size = min(self.stage.micro_rows or len(rows), len(rows))
        return [rows[at : at + size] for at in range(0, len(rows), size)]


def _prefetch(steps: _StepRows, first: int, device: torch.device) -> Iterator[list[list[TrainingRow]]]:
    """Prepare the rows of the next steps in worker processes if training runs on a GPU."""
    num_workers = min(8, (os.cpu_count() or 1) // 2) if device.type == "cuda" else 0
    return prefetch(steps, range(first, steps.stage.num_steps), num_workers)


def prefetch(steps: Dataset[Any], numbers: range, num_workers: int, **more: Any) -> Iterator[Any]:
    """Return an iterator over the given steps that `num_workers` processes prepare ahead."""
    return iter(
        DataLoader(
            steps,
            batch_size=None,
            sampler=numbers,
            collate_fn=_identity,
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
            **more,
        )
    )


def _identity(rows: Any) -> Any:
    return rows


def collate(rows: Sequence[TrainingRow], packing: str) -> dict[str, Tensor]:
    out = {
        "tokens": torch.from_numpy(np.stack([row.tokens for row in rows])),
        "loss_mask": torch.from_numpy(np.stack([row.loss_mask for row in rows])),
        "answer": torch.from_numpy(np.stack([row.answer for row in rows])),
    }
    if any(row.truth for row in rows):
        out["truth"] = torch.tensor([row.truth for row in rows])
    if packing == "documents":
        out["lengths"] = torch.tensor([length for row in rows for length in row.lengths])
    return out


class _Log:
    """`metrics.jsonl`, truncated to the step of the saved state when a run is resumed."""

    def __init__(self, file: Path, first: int, is_writer: bool) -> None:
        self.file, self.is_writer = file, is_writer
        self.entries: list[dict[str, float]] = []
        if is_writer and file.is_file():
            lines = file.read_text().split("\n")[:-1]  # a killed run may leave an incomplete last line
            self.entries = [entry for entry in map(json.loads, lines) if entry["step"] <= first]
        if is_writer:
            file.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.entries.append({"step": step, **values})
        if self.is_writer:
            with self.file.open("a") as handle:
                handle.write(json.dumps(self.entries[-1]) + "\n")
