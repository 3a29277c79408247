"""The training loop of a stage: a run that was killed resumes with identical results.

A step is a list of micro-batches (`steps.py`). What takes it is a learner: weights and optimizer state, distributed by
Accelerate (`accelerated.py`) or quantized on one device (`latent.py`). States are saved as safetensors, and only while
losses and gradients are finite.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sala.checkpoint.reader import read_file_header, read_tensors
from sala.checkpoint.writer import replacing, write_atomically, write_file
from sala.errors import SalaError, writing
from sala.lab.train.models import tensor_bytes
from sala.lab.train.processes import any_process, barrier
from sala.lab.train.recipe import Learning, MixStage
from sala.lab.train.steps import StepPart, Steps, TrainingBatch, collate

LOG_EVERY = 10
_STATE = "state.safetensors"
Probe = Callable[[bool], Mapping[str, float]]  # measures the weights; called with True at the end of the run


class Diverged(SalaError):
    """Raised for a loss or gradient that is not finite; the last good state is kept."""


class OutOfTime(SalaError):
    """Raised when the deadline is reached; the state is saved."""


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    num_steps: int
    values: Mapping[str, float]


class Learner(Protocol):
    """The trained weights of one process out of `world`, and their optimizer."""

    device: torch.device
    rank: int
    world: int
    tile_rows: int  # positions with a loss are padded to a multiple of this; 0: all positions have a loss

    def update(self, batches: Sequence[TrainingBatch], step: int, rate: float, done: float) -> None:
        """Take one optimizer step over the micro-batches of all processes, after the share `done` of the run."""

    def values(self) -> dict[str, float]:
        """Return the losses since the last call and the gradient norm."""

    def find_divergence(self, values: Mapping[str, float]) -> str | None:
        """Return the name of a value that shows that training cannot go on."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state to save, by name; every process must call this."""

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Restore what `tensors` returned after `step` updates."""


class _Clock:
    """How much of a stage is done, by steps or, if the stage is bounded by time, by the seconds of all its runs."""

    def __init__(self, stage: Learning, facts: Mapping[str, Any]) -> None:
        self.seconds = stage.seconds if isinstance(stage, MixStage) else 0
        self.num_steps = stage.num_steps
        self.step, self.before = int(facts.get("step", 0)), float(facts.get("elapsed", 0.0))
        self.began = time.monotonic()
        self.elapsed = self.before

    def tick(self) -> None:
        self.step += 1
        self.elapsed = self.before + time.monotonic() - self.began

    @property
    def done(self) -> float:
        return self.elapsed / self.seconds if self.seconds else self.step / self.num_steps

    @property
    def expected_steps(self) -> int:
        return max(self.step, round(self.step / max(self.done, 1e-9))) if self.seconds else self.num_steps


def train(
    learner: Learner,
    stage: Learning,
    parts: Sequence[StepPart],
    directory: Path,
    note: Callable[[Progress], None],
    deadline: float | None = None,
    probe: Probe | None = None,
) -> list[dict[str, float]]:
    """Train for the stage's steps or seconds, and return the log.

    `directory` holds the state and `metrics.jsonl`. Raise Diverged if a loss is not finite, OutOfTime at the deadline.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors, facts = read_state(directory)
    clock = _Clock(stage, facts)
    if tensors:
        learner.load(tensors, clock.step)
    log = _Log(directory / "metrics.jsonl", clock.step, is_writer=learner.rank == 0)
    make = partial(collate, packing=stage.packing, tile_rows=learner.tile_rows)
    steps = Steps(parts, make, learner.rank, learner.world, stage.micro_rows)
    numbers = range(clock.step, clock.step + 1_000_000 if clock.seconds else stage.num_steps)
    is_cuda = learner.device.type == "cuda"
    num_workers = min(12, max(1, (os.cpu_count() or 2) - 2)) if is_cuda else 0
    feed, last_save = prefetch(steps, numbers, num_workers, is_pinned=is_cuda), clock.step
    probe_every = stage.probe_every if isinstance(stage, MixStage) else stage.num_steps
    if probe is not None and clock.step == 0:
        log.add(0, probe(False))
    while clock.done < 1:
        rate = stage.learning_rate.at(clock.step, clock.done)
        learner.update(next(feed), clock.step, rate, clock.done)
        clock.tick()
        is_late = deadline is not None and any_process(time.monotonic() > deadline, learner.device)
        is_last = clock.done >= 1
        is_due = clock.step % stage.save_every == 0 or is_last or is_late
        if clock.step % LOG_EVERY == 0 or clock.step == 1 or is_due:
            values = learner.values() | {"rate": rate} | ({"done": round(clock.done, 4)} if clock.seconds else {})
            bad = learner.find_divergence(values)
            if bad is not None:
                kept = f"the state of step {last_save} is kept" if last_save else "nothing was saved yet"
                problem = f"{bad} is not finite at step {clock.step}; {kept}"
                raise Diverged(problem, f"lower lr, remove {directory}, and run it again")
            log.add(clock.step, values)
            note(Progress(clock.step, clock.expected_steps, values))
        if probe is not None and (is_last or clock.step % probe_every == 0):
            log.add(clock.step, probe(is_last))
        if is_due:
            write_state(directory, learner, {"step": clock.step, "elapsed": clock.elapsed})
            barrier()
            last_save = clock.step
        if is_late and not is_last:
            raise OutOfTime(f"out of time after step {clock.step} of {clock.expected_steps}", "run it again to resume")
    return log.entries


def write_state(directory: Path, learner: Learner, facts: Mapping[str, float]) -> None:
    """Replace the saved state atomically; every process must call this, and wait for the others."""
    tensors = learner.tensors()  # a collective operation if the weights are sharded
    if learner.rank == 0:
        specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
        texts = {name: json.dumps(value) for name, value in facts.items()}
        with replacing(directory / _STATE) as draft:
            write_file(draft, specs, lambda name: tensor_bytes(tensors[name]), texts)


def read_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors and facts of the saved state; both are empty if there is none."""
    file = directory / _STATE
    if not file.is_file():
        return {}, {}
    facts, infos = read_file_header(file)
    tensors = {
        name: torch.from_numpy(np.frombuffer(raw.data, np.float32).reshape(raw.shape).copy())
        for name, raw in read_tensors(file, infos).items()
    }
    return tensors, {name: json.loads(facts[name]) for name in ("step", "elapsed") if name in facts}


def prefetch(make: Callable[[int], Any], numbers: range, num_workers: int, is_pinned: bool = False) -> Iterator[Any]:
    """Return an iterator over make(number), which `num_workers` processes prepare ahead."""
    return iter(
        DataLoader(
            cast(Any, numbers),
            batch_size=None,
            collate_fn=cast(Any, make),
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
            prefetch_factor=4 if num_workers else None,
            pin_memory=is_pinned,
        )
    )


class _Log:
    """`metrics.jsonl`, truncated to the step of the saved state when a run is resumed."""

    def __init__(self, file: Path, first: int, is_writer: bool) -> None:
        self.file, self.is_writer = file, is_writer
        self.entries: list[dict[str, float]] = []
        if is_writer and file.is_file():
            lines = file.read_text().split("\n")[:-1]  # a killed run may leave an incomplete last line
            self.entries = [entry for entry in map(json.loads, lines) if entry["step"] <= first]
        if is_writer:
            write_atomically(file, "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if not values:
            return
        self.entries.append({"step": step, **values})
        if self.is_writer:
            with writing(self.file), self.file.open("a") as handle:
                handle.write(json.dumps(self.entries[-1]) + "\n")
