"""Latent weights: fp32 values that the optimizer updates, while the model computes with their quantized form.

Parameters with the same shape and storage lie in one tensor, a *stack*, so that rounding, clipping, the update and the
running mean take a few kernels per step, independently of the number of matrices. The model's parameters and gradients
are views of these stacks: nothing is copied.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sala.lab.train.adapters import round_to_codes
from sala.lab.train.block_selection_loss import count_queries
from sala.lab.train.fast_paths import FastPaths
from sala.lab.train.graphs import GraphedPass
from sala.lab.train.loop import Probe
from sala.lab.train.losses import compiled
from sala.lab.train.objectives import Distil
from sala.lab.train.on_policy import StudentRows
from sala.lab.train.recipe import MixStage
from sala.lab.train.steps import TrainingBatch, collate

MAX_SKIPPED = 3  # consecutive log entries with a non-finite gradient
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Storage:
    """How a parameter is stored: in `bits` (0: unquantized) and groups, as the difference from `base` if given."""

    bits: int = 0
    group_size: int = 64
    base: Tensor | None = None


@dataclass(slots=True)
class Stack:
    """N parameters of one shape: `latent` is trained, the model uses `work`, `mean` is the running mean of `latent`."""

    names: Sequence[str]
    latent: nn.Parameter
    work: Tensor
    mean: Tensor
    base: Tensor | None
    bits: int
    group_size: int

    def store(self, values: Tensor) -> None:
        """Make the model compute with the stored form of `values`."""
        if self.bits:
            round_into = compiled(_round_into, values.device.type)
            round_into(self.work, values, self.base, self.bits, self.group_size)
        else:
            self.work.copy_(values)


class Latents:
    """The trained parameters of a model, their optimizer and their running mean.

    `storage` maps names to their storage; other parameters are not quantized. After construction the parameters of
    `model` are views of the stacks and hold the stored form.
    """

    def __init__(self, model: nn.Module, storage: Mapping[str, Storage], betas: tuple[float, float]) -> None:
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        groups: dict[Any, list[str]] = {}  # names of parameters with the same shape and storage
        for name, value in trained.items():
            how = storage.get(name, Storage())
            groups.setdefault((value.shape, how.bits, how.group_size, how.base is None), []).append(name)
        self.stacks = [_stack(trained, names, storage) for names in groups.values()]
        self.optimizer = torch.optim.AdamW(
            [stack.latent for stack in self.stacks],
            betas=betas,
            weight_decay=0.0,
            fused=self.stacks[0].latent.is_cuda,
        )
        self.use_latent()

    @property
    def grads(self) -> list[Tensor]:
        """Return the gradients of the stacks, which stay in place."""
        return [stack.latent.grad for stack in self.stacks if stack.latent.grad is not None]

    @torch.no_grad()
    def use_latent(self) -> None:
        """Make the model compute with the current weights."""
        for stack in self.stacks:
            stack.store(stack.latent)

    @torch.no_grad()
    def use_mean(self, is_rounded: bool = True) -> None:
        """Make the model compute with the running mean, to measure it or, not rounded, to pack it.

        `use_latent` reverts this.
        """
        for stack in self.stacks:
            if is_rounded:
                stack.store(stack.mean)
            else:
                stack.work.copy_(stack.mean)

    @torch.no_grad()
    def update(self, rate: float, clip: float, decay: float) -> Tensor:
        """Take one optimizer step of `rate`, and return the norm of the gradients before clipping.

        If the norm is not finite, the gradients are replaced by zeros.
        """
        grads = self.grads
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        factor = (clip / norm.clamp(min=clip)) if clip else torch.ones_like(norm)
        is_good = torch.isfinite(norm)
        for grad in grads:
            grad.copy_(torch.where(is_good, grad * factor, torch.zeros_like(grad)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for stack in self.stacks:
            stack.mean.lerp_(stack.latent, 1 - decay)
        self.use_latent()
        for grad in grads:
            grad.zero_()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return the state to save, by name."""
        out: dict[str, Tensor] = {}
        for index, stack in enumerate(self.stacks):
            state = self.optimizer.state.get(stack.latent, {})
            out |= {f"{index}.latent": stack.latent.data, f"{index}.mean": stack.mean}
            out |= {f"{index}.{name}": state[name] for name in _MOMENTS if name in state}
        return out

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Restore what `tensors` returned after `step` updates."""
        for index, stack in enumerate(self.stacks):
            stack.latent.copy_(tensors[f"{index}.latent"])
            stack.mean.copy_(tensors[f"{index}.mean"])
            if f"{index}.{_MOMENTS[0]}" in tensors:
                state: dict[str, Tensor] = {"step": torch.tensor(float(step), device=stack.latent.device)}
                state |= {name: tensors[f"{index}.{name}"].to(stack.latent.device).clone() for name in _MOMENTS}
                self.optimizer.state[stack.latent] = state
        self.use_latent()


@dataclass
class LatentLearner:
    """Latent weights on one device that learn by distillation on a mixture; the result is their running mean.

    The loss of a step is divided by the number of its positions with a loss. Gradients that are not finite change
    nothing; if there are several in a row, training continues without the fast paths.
    """

    objective: Distil
    latents: Latents
    stage: MixStage
    note: Callable[[str], None]
    student_rows: StudentRows | None = None
    rank, world = 0, 1
    num_skipped = 0  # consecutive log entries with a non-finite gradient

    def __post_init__(self) -> None:
        self._graphs: GraphedPass | None = None
        self._batch: TrainingBatch | None = None  # the micro-batch that runs now
        self._scales: dict[int, Tensor] = {}  # by number of queries
        self.device = self.latents.stacks[0].latent.device
        self.tile_rows = self.objective.tile_rows or 0
        self._restart()

    def _restart(self) -> None:
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.num_steps = self.num_tokens = 0
        self.began = time.monotonic()

    def update(self, batches: Sequence[TrainingBatch], step: int, rate: float, done: float = 0.0) -> None:
        if self.student_rows is not None and done >= self.student_rows.options.after:
            batches = [*batches, collate(self.student_rows(step), tile_rows=self.tile_rows)]
        total = max(1, sum(batch.counts[2] for batch in batches))
        for batch in batches:
            sums = self.run(batch, total)
            self.sums[batch.name] = self.sums.get(batch.name, 0) + sums
            self.counts[batch.name] = self.counts.get(batch.name, 0) + np.array(self.objective.counts(batch))
            self.num_tokens += batch.tokens.numel()
        self.norm = self.latents.update(rate, self.stage.clip, mean_decay(self.stage.mean_decay, step))
        self.num_steps += 1

    def run(self, batch: TrainingBatch, total: int) -> Tensor:
        """Add the gradients of a micro-batch, and return the sums of its terms."""
        if not self.objective.fast.has_graphs:
            loss, sums = self._loss(batch.to(self.device), total)
            loss.backward()
            return sums
        if self._graphs is None:
            self._graphs = GraphedPass(self._graphed_loss, self.latents.grads, self.note)
        self._batch = batch
        inputs = tuple(value for value in batch if isinstance(value, Tensor))
        return self._graphs((*inputs, torch.tensor(float(total))), batch.is_symmetric)

    def _graphed_loss(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        assert self._batch is not None
        values = iter(inputs)
        moved: Any = (next(values) if isinstance(value, Tensor) else value for value in self._batch)
        return self._loss(TrainingBatch(*moved), inputs[-1])

    def _loss(self, batch: TrainingBatch, total: int | Tensor) -> tuple[Tensor, Tensor]:
        scaled = batch._replace(main=batch.main / total, label=batch.label / total)
        with self._precision():
            outcome: tuple[Tensor, Tensor] = self.objective(scaled, self._scales_of(batch))
        return outcome

    def _scales_of(self, batch: TrainingBatch) -> Tensor:
        queries = count_queries(*batch.tokens.shape)
        if queries not in self._scales:
            scales = [1.0, 1.0, self.stage.block_selection_weight / queries]
            self._scales[queries] = torch.tensor(scales, device=self.device)
        return self._scales[queries]

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def values(self) -> dict[str, float]:
        """Return the means of the terms of each shape since the last call, the gradient norm and the speed."""
        out = {"norm": float(self.norm)}  # waits for the device
        seconds = max(time.monotonic() - self.began, 1e-9)
        for name, sums in self.sums.items():
            means = (value / max(int(count), 1) for value, count in zip(sums.tolist(), self.counts[name], strict=True))
            terms = dict(zip(("kl", "truth", "choice"), means, strict=False))
            out |= {f"{term}.{name}": mean for term, mean in terms.items() if mean or term != "choice"}
        out |= {"ms": round(1000 * seconds / self.num_steps), "tokens_per_s": round(self.num_tokens / seconds)}
        self._restart()
        return out

    def find_divergence(self, values: Mapping[str, float]) -> str | None:
        self.num_skipped = 0 if math.isfinite(values["norm"]) else self.num_skipped + 1
        if self.num_skipped < MAX_SKIPPED:
            return None
        if self.objective.fast.is_plain:
            return "the gradient"
        self.note("the gradient is not finite: continuing without the fast paths")
        self.objective.use(FastPaths())
        self._graphs = None
        self.num_skipped = 0
        return None

    @torch.no_grad()
    def measure(self, probe: Probe, is_last: bool) -> Mapping[str, float]:
        """Measure the running mean."""
        began = time.monotonic()
        self.latents.use_mean()
        values: dict[str, float] = {}
        try:
            with torch.compiler.set_stance("force_eager"), self._precision():
                values = {"probe_s": 0.0, **probe(is_last)}
                values["probe_s"] = round(time.monotonic() - began, 1)
        except Exception as error:  # a failed measurement must not end the run
            self.note(f"the probe failed: {error!r}")
        self.latents.use_latent()
        self.began += time.monotonic() - began
        return values

    def tensors(self) -> dict[str, Tensor]:
        return self.latents.tensors()

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        self.latents.load(tensors, step)


def mean_decay(decay: float, step: int) -> float:
    """Return the decay of the running mean at a step: lower at first, so that it forgets the initial weights."""
    return min(decay, (1 + step) / (10 + step))


def _stack(trained: Mapping[str, Any], names: Sequence[str], storage: Mapping[str, Storage]) -> Stack:
    latent = nn.Parameter(torch.stack([trained[name].detach().float() for name in names]))
    latent.grad = torch.zeros_like(latent)
    how = storage.get(names[0], Storage())
    bases = [storage[name].base for name in names] if how.base is not None else []
    base = torch.stack([one.to(latent) for one in bases if one is not None]) if bases else None
    work = torch.empty_like(latent.data)
    for index, name in enumerate(names):
        trained[name].data = work[index]
        trained[name].grad = latent.grad[index]
    return Stack(names, latent, work, latent.detach().clone(), base, how.bits, how.group_size)


def _round_into(work: Tensor, values: Tensor, base: Tensor | None, bits: int, group_size: int) -> None:
    """Set work to base + rounded(values - base); all are [N, out, in]."""
    flat = values if base is None else values - base
    rounded = round_to_codes(flat.flatten(0, 1), bits, group_size).view_as(values)
    work.copy_(rounded if base is None else base + rounded)
