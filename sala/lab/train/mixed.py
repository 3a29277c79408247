"""Distillation on a single mixture: every update sees rows of several lengths and kinds.

The micro-batches of a step have fixed shapes, so each shape is compiled once. The student computes with its quantized
weights (`latent.py`) and is trained on a teacher's distribution and on the text's own tokens by per-token weights. The
result of a run is the running mean of the weights. A run is bounded by steps or by time, can stop at a deadline, and
resumes from the saved state.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sala.backends.torch.batch import whole
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.model import SalaModel, SparseMixer
from sala.lab.train.block_selection_loss import BlockSelectionLoss, count_queries
from sala.lab.train.data import MicroBatch, StepSource
from sala.lab.train.fast_paths import FastPaths, compile_layers, set_scan, uncompiled_sparse_layers
from sala.lab.train.latent import Latents, load_latents, mean_decay, save_latents
from sala.lab.train.loop import Diverged, prefetch
from sala.lab.train.losses import LossWeights, head_loss
from sala.lab.train.recipe import MixStage

STATE = "state.safetensors"
MAX_SKIPPED = 3  # consecutive log entries with a non-finite gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOptions:
    """A run lasts `steps` updates or, if that is 0, `seconds` including the time before it was resumed."""

    steps: int = 0
    seconds: float = 0.0
    lr: float = 5e-4
    final_lr: float = 1e-4
    warmup_steps: int = 50
    decay_share: float = 0.35  # last share of the run, in which the rate falls linearly to final_lr
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    mean_decay: float = 0.998
    choice_weight: float = 0.5
    teacher_window: int = 2048
    tile_rows: int = 2048
    cache_bytes: int = 0  # device memory for the teacher's hidden states of repeated rows
    log_every: int = 20
    probe_every: int = 300

    @classmethod
    def of(cls, stage: MixStage, device: torch.device) -> "MixedOptions":
        return cls(
            tile_rows=2048 if device.type == "cuda" else 128,
            steps=0 if stage.seconds else stage.num_steps,
            seconds=float(stage.seconds),
            lr=stage.lr,
            final_lr=stage.final_lr,
            warmup_steps=stage.warmup_steps,
            decay_share=stage.decay_share,
            betas=stage.betas,
            clip=stage.clip,
            mean_decay=stage.mean_decay,
            choice_weight=stage.choice_weight,
            teacher_window=stage.teacher_window or 1 << 40,
            cache_bytes=stage.cache_gb << 30,
            probe_every=stage.probe_every,
        )

    def rate(self, step: int, done: float) -> float:
        """Return the learning rate of update `step`, after the share `done` of the run."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        fall = (done - (1 - self.decay_share)) / self.decay_share if self.decay_share else 0.0
        return self.lr + (self.final_lr - self.lr) * min(max(fall, 0.0), 1.0)


class PreparedBatch(NamedTuple):
    """A micro-batch as the objective takes it; `at` are the positions [P] whose next token has a loss.

    P is padded to a multiple of the loss's tile; the padding has no weight.
    """

    tokens: Tensor  # [B, n]
    at: Tensor  # [P], into B * n
    labels: Tensor  # [P]
    teacher_weight: Tensor  # [P]
    truth_weight: Tensor  # [P]
    is_answer: Tensor  # [B, n]: whether the next token is part of an answer
    keys: tuple[int, ...]  # a hash of each row for the teacher cache; 0 for rows that never repeat
    name: str  # kinds and length, for the log
    num_tokens: int
    num_teacher: int
    num_truth: int

    def to(self, device: torch.device) -> "PreparedBatch":
        moved: Any = (x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in self)
        return PreparedBatch(*moved)


def prepare(batch: MicroBatch, tile_rows: int) -> PreparedBatch:
    """Return the micro-batch with the positions that have a loss, padded to a multiple of `tile_rows`."""
    has_loss = (batch.teacher_weight != 0) | (batch.truth_weight != 0)
    has_loss[:, 0] = False
    target = np.flatnonzero(has_loss)
    count = max(len(target), 1)
    padded = np.arange(-(-count // tile_rows) * tile_rows) % has_loss.size
    padded[: len(target)] = target
    is_real = np.arange(len(padded)) < len(target)
    teacher, truth = (
        np.where(is_real, weight.reshape(-1)[padded], 0).astype(np.float32)
        for weight in (batch.teacher_weight, batch.truth_weight)
    )
    answer = np.zeros_like(batch.answer)
    answer[:, :-1] = batch.answer[:, 1:]
    kinds = "+".join(sorted(set(batch.kinds)))
    return PreparedBatch(
        torch.from_numpy(np.ascontiguousarray(batch.tokens, np.int64)),
        torch.from_numpy(np.maximum(padded - 1, 0)),
        torch.from_numpy(np.ascontiguousarray(batch.tokens.reshape(-1)[padded], np.int64)),
        torch.from_numpy(teacher),
        torch.from_numpy(truth),
        torch.from_numpy(answer),
        tuple(0 if kind == "needle" else _key(row) for kind, row in zip(batch.kinds, batch.tokens, strict=True)),
        f"{kinds}-{batch.tokens.shape[1]}",
        batch.count,
        int(np.count_nonzero(teacher)),
        int(np.count_nonzero(truth)),
    )


def _key(row: Any) -> int:
    return int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "big")


class MixedDistil:
    """Σ (teacher_weight · KL(teacher || student) + truth_weight · cross-entropy), plus the block-selection loss."""

    def __init__(self, student: SalaModel, teacher: SalaModel, options: MixedOptions, fast: FastPaths) -> None:
        self.student, self.teacher, self.options = student, teacher, options
        self.device = teacher.lm_head.weight.device
        self.selection_loss = BlockSelectionLoss(student) if options.choice_weight else None
        self._set_paths(fast)
        if fast.is_compiled:
            compile_layers(student, teacher)

    def _set_paths(self, fast: FastPaths) -> None:
        self.fast = fast
        dtype = torch.bfloat16 if fast.has_bf16_head else torch.float32
        self.head, self.teacher_head = self.student.lm_head.weight.to(dtype), self.teacher.lm_head.weight.to(dtype)
        self.cache = TeacherCache(self.options.cache_bytes)
        set_scan(self.student, fast.has_scan)

    def use_plain_paths(self) -> None:
        """Continue without the custom kernels."""
        self._set_paths(replace(self.fast, has_scan=False, has_bf16_head=False))

    def __call__(self, part: PreparedBatch, total: int) -> tuple[Tensor, Tensor]:
        """Return the loss divided by the step's `total` tokens, and the sums of KL, cross-entropy and selection [3]."""
        is_sparse = self._is_sparse(part.tokens.shape[1])
        selection_loss = self.selection_loss if is_sparse else None
        with self._precision(), uncompiled_sparse_layers(self.student) if is_sparse else nullcontext():
            with torch.no_grad():
                wanted = self._teacher_hidden(part).index_select(0, part.at)
            if selection_loss is not None:
                selection_loss.begin(part.tokens, part.is_answer)
            hidden = self.student(whole(part.tokens, ops=select_ops())) / self.student.config.logit_divisor
            selection = hidden.new_zeros(()) if selection_loss is None else selection_loss.end()
        with torch.autocast(self.device.type, enabled=False):
            weights = LossWeights(part.teacher_weight / total, part.truth_weight / total)
            loss, sums = head_loss(
                hidden.index_select(0, part.at).to(self.head.dtype),
                self.head,
                part.labels,
                weights,
                (wanted, self.teacher_head),
                self.options.tile_rows,
            )
        if selection_loss is not None:
            loss = loss + selection * (self.options.choice_weight / count_queries(*part.tokens.shape))
        return loss, torch.cat((sums, selection.detach()[None].float()))

    def _is_sparse(self, length: int) -> bool:
        mixers = [layer.self_attn for layer in self.student.model.layers]
        return any(isinstance(mixer, SparseMixer) and length >= mixer.sparse.dense_len for mixer in mixers)

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _teacher_hidden(self, part: PreparedBatch) -> Tensor:
        """Return the teacher's last hidden states [B * n, h], from the cache where possible."""
        known = self.cache.get(part.keys)
        if known is None:
            hidden = self._run_teacher(part.tokens)
            self.cache.put(part.keys, hidden.view(*part.tokens.shape, -1))
            return hidden
        fresh = [index for index, key in enumerate(part.keys) if not key]
        rows = known
        if fresh:
            computed = self._run_teacher(part.tokens[fresh]).view(len(fresh), part.tokens.shape[1], -1)
            rows = [computed[fresh.index(at)] if at in fresh else known.pop(0) for at in range(len(part.keys))]
        return torch.cat(rows)

    def _run_teacher(self, tokens: Tensor) -> Tensor:
        """Return the teacher's hidden states; rows longer than its window are split."""
        window = self.options.teacher_window
        if tokens.shape[1] > window:
            tokens = tokens.view(-1, window)
        hidden = self.teacher(whole(tokens, ops=select_ops())) / self.teacher.config.logit_divisor
        return hidden.to(self.teacher_head.dtype)


class TeacherCache:
    """The teacher's hidden states of repeated rows, on the device: later epochs need not run the teacher."""

    def __init__(self, max_bytes: int) -> None:
        self.left = max_bytes
        self.rows: dict[int, Tensor] = {}

    def get(self, keys: tuple[int, ...]) -> list[Tensor] | None:
        """Return the states [n, h] of all rows that have a key, in order; None if there are none, or one is missing."""
        found = [self.rows.get(key) for key in keys if key]
        return found if found and all(row is not None for row in found) else None  # type: ignore[return-value]

    def put(self, keys: tuple[int, ...], states: Tensor) -> None:
        """Store the new rows of states [B, n, h] as long as the memory lasts."""
        new = [index for index, key in enumerate(keys) if key and key not in self.rows]
        size = states[0].numel() * states.element_size()
        new = new[: max(0, self.left // size)]
        if new:
            self.left -= size * len(new)
            self.rows |= zip((keys[index] for index in new), states[new].unbind(0), strict=True)


@dataclass(slots=True)
class MixedRun:
    """A training run; `directory` holds its state and `metrics.jsonl`."""

    objective: MixedDistil
    latents: Latents
    source: StepSource
    directory: Path
    options: MixedOptions
    note: Callable[[str], None] = print
    probe: Callable[[bool], Mapping[str, float]] | None = None  # called with True at the end of the run
    step: int = 0
    elapsed: float = 0.0
    best: tuple[float, list[Tensor]] | None = None
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _counts: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    @property
    def done(self) -> float:
        """Return the share of the run that is complete."""
        return self.step / self.options.steps if self.options.steps else self.elapsed / max(self.options.seconds, 1e-9)

    def resume(self) -> None:
        """Load the saved state, if there is one."""
        if (self.directory / STATE).is_file():
            facts = load_latents(self.directory / STATE, self.latents)
            self.step, self.elapsed = int(facts["step"]), float(facts["elapsed"])
            self.note(f"resuming from step {self.step}")

    def save(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        facts = {"step": json.dumps(self.step), "elapsed": json.dumps(self.elapsed)}
        save_latents(self.directory / STATE, self.latents, facts)

    def train(self, deadline: float | None = None) -> bool:
        """Train and save, and return whether the run is complete; stop at the deadline (by `time.monotonic`)."""
        self.directory.mkdir(parents=True, exist_ok=True)
        started, before = time.monotonic(), self.elapsed
        if self.probe is not None and self.step == 0:
            self._measure()
        feed = _prefetch(self.source, self.step, self.options, self.objective.device)
        skipped, logged, began = 0, self.step, time.monotonic()
        while self.done < 1:
            parts = next(feed)
            rate = self.options.rate(self.step, self.done)
            norm = self._update(parts, rate)
            self.step += 1
            if self.step % self.options.log_every == 0 or self.step <= 3:
                value = float(norm)  # waits for the device
                skipped = self._check_gradient(value, skipped)
                speed = (time.monotonic() - began) / (self.step - logged)
                self._log(value, rate, speed)
                logged, began = self.step, time.monotonic()
            if self.probe is not None and self.step % self.options.probe_every == 0:
                self._measure()
                began = time.monotonic()
            self.elapsed = before + time.monotonic() - started
            if deadline is not None and time.monotonic() > deadline and self.done < 1:
                self.save()
                return False
        if self.probe is not None:
            self._measure()
        self.save()
        return True

    def _check_gradient(self, norm: float, skipped: int) -> int:
        """Return the number of consecutive non-finite gradients; give up the fast paths, then raise Diverged."""
        if np.isfinite(norm):
            return 0
        if skipped + 1 < MAX_SKIPPED:
            return skipped + 1
        if self.objective.fast.is_plain:
            raise Diverged(f"the gradient is not finite at step {self.step}", "lower lr; the saved state is kept")
        self.note("the gradient is not finite: continuing without the fast paths")
        self.objective.use_plain_paths()
        return 0

    def _update(self, parts: list[PreparedBatch], rate: float) -> Tensor:
        total = max(1, sum(part.num_tokens for part in parts))
        for part in parts:
            on_device = part.to(self.objective.device)
            loss, sums = self.objective(on_device, total)
            loss.backward()
            self._sums[part.name] = self._sums.get(part.name, 0) + sums
            counts = np.array(
                [part.num_teacher, part.num_truth, count_queries(*part.tokens.shape), part.tokens.numel()]
            )
            self._counts[part.name] = self._counts.get(part.name, 0) + counts
        return self.latents.update(rate, self.options.clip, mean_decay(self.options.mean_decay, self.step))

    def _log(self, norm: float, rate: float, seconds: float) -> None:
        entry: dict[str, Any] = {"step": self.step, "done": round(self.done, 4), "norm": norm, "rate": rate}
        tokens = 0
        for name, sums in self._sums.items():
            counts = self._counts[name]
            means = [float(s) / max(int(c), 1) for s, c in zip(sums.tolist(), counts, strict=False)]
            entry |= {f"kl.{name}": means[0], f"truth.{name}": means[1]}
            if means[2]:
                entry[f"choice.{name}"] = means[2]
            tokens += int(counts[3])
        steps = self.step % self.options.log_every or self.options.log_every
        entry |= {"ms": round(seconds * 1000), "tokens_per_s": round(tokens / steps / max(seconds, 1e-9))}
        self._sums, self._counts = {}, {}
        self._write(entry)

    def _write(self, entry: Mapping[str, Any]) -> None:
        with (self.directory / "metrics.jsonl").open("a") as handle:
            handle.write(json.dumps(entry) + "\n")
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in entry.items()
        )
        self.note(" ".join(shown))

    @torch.no_grad()
    def _measure(self) -> None:
        """Measure the running mean with the probe, and keep the best one."""
        assert self.probe is not None
        began = time.monotonic()
        self.latents.use_mean()
        try:
            with torch.compiler.set_stance("force_eager"), self.objective._precision():
                values = dict(self.probe(self.done >= 1))
        except Exception as error:  # a failed measurement must not end the run
            self.note(f"the probe failed: {error!r}")
            values = {}
        self.latents.use_latent()
        if not values:
            return
        self._write({"step": self.step, "probe_s": round(time.monotonic() - began, 1)} | values)
        loss = values.get("kl", float("inf"))
        if self.best is None or loss < self.best[0]:
            self.best = (loss, [stack.mean.clone() for stack in self.latents.stacks])


class _PreparedSteps(Dataset[list[PreparedBatch]]):
    def __init__(self, source: StepSource, tile_rows: int) -> None:
        self.source, self.tile_rows = source, tile_rows

    def __getitem__(self, step: int) -> list[PreparedBatch]:
        return [prepare(batch, self.tile_rows) for batch in self.source(step)]


def _prefetch(
    source: StepSource, first: int, options: MixedOptions, device: torch.device
) -> Iterator[list[PreparedBatch]]:
    """Prepare the next steps in worker processes if training runs on a GPU."""
    num_workers = min(12, max(1, (os.cpu_count() or 2) - 2)) if device.type == "cuda" else 0
    return prefetch(
        _PreparedSteps(source, options.tile_rows),
        range(first, options.steps or first + 1_000_000),
        num_workers,
        prefetch_factor=4 if num_workers else None,
        pin_memory=device.type == "cuda",
    )
