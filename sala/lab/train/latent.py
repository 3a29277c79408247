"""Latent weights: fp32 values that the optimizer updates, while the model computes with their quantized form.

Parameters with the same shape and storage lie in one tensor, a *stack*, so that rounding, clipping, the update and the
running mean take a few kernels per step, independently of the number of matrices. The model's parameters and gradients
are views of these stacks: nothing is copied.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sala.checkpoint.reader import read_file_header, read_tensors
from sala.checkpoint.writer import write_file
from sala.lab.train.adapters import round_to_codes
from sala.lab.train.state import tensor_bytes, tensor_of

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

    names: tuple[str, ...]
    latent: nn.Parameter
    work: Tensor
    mean: Tensor
    base: Tensor | None
    bits: int
    group_size: int

    def store(self, values: Tensor) -> None:
        """Make the model compute with the stored form of `values`."""
        if self.bits:
            _rounding(values.device.type)(self.work, values, self.base, self.bits, self.group_size)
        else:
            self.work.copy_(values)


class Latents:
    """The trained parameters of a model, their optimizer and their running mean.

    `storage` maps names to their storage; other parameters are not quantized. After construction the parameters of
    `model` are views of the stacks and hold the stored form.
    """

    def __init__(self, model: nn.Module, storage: Mapping[str, Storage], betas: tuple[float, float]) -> None:
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.stacks = [
            _stack(trained, names, [storage.get(name, Storage()) for name in names])
            for names in _group_by_storage(trained, storage)
        ]
        self.optimizer = torch.optim.AdamW(
            [stack.latent for stack in self.stacks],
            betas=betas,
            weight_decay=0.0,
            fused=self.stacks[0].latent.is_cuda,
        )
        self.use_latent()

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
        grads = [stack.latent.grad for stack in self.stacks]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        factor = (clip / norm.clamp(min=clip)) if clip else torch.ones_like(norm)
        is_good = torch.isfinite(norm)
        for grad in grads:
            assert grad is not None
            grad.copy_(torch.where(is_good, grad * factor, torch.zeros_like(grad)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for stack in self.stacks:
            stack.mean.lerp_(stack.latent, 1 - decay)
        self.use_latent()
        for grad in grads:
            assert grad is not None
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
                device = stack.latent.device if stack.latent.is_cuda else "cpu"
                state: dict[str, Tensor] = {"step": torch.tensor(float(step), device=device)}
                state |= {name: tensors[f"{index}.{name}"].to(stack.latent.device).clone() for name in _MOMENTS}
                self.optimizer.state[stack.latent] = state
        self.use_latent()


def save_latents(file: Path, latents: Latents, facts: Mapping[str, str]) -> None:
    """Replace the saved state atomically."""
    tensors = latents.tensors()
    draft = file.with_name(f".{file.name}.part")
    draft.unlink(missing_ok=True)
    specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_file(draft, specs, lambda name: tensor_bytes(tensors[name]), dict(facts))
    draft.replace(file)


def load_latents(file: Path, latents: Latents) -> dict[str, str]:
    """Load a saved state into `latents`, and return the facts saved with it, including `step`."""
    facts, infos = read_file_header(file)
    tensors = {name: tensor_of(raw) for name, raw in read_tensors(file, infos).items()}
    latents.load(tensors, int(facts["step"]))
    return facts


def mean_decay(decay: float, step: int) -> float:
    """Return the decay of the running mean at a step: lower at first, so that it forgets the initial weights."""
    return min(decay, (1 + step) / (10 + step))


def _group_by_storage(trained: Mapping[str, Tensor], storage: Mapping[str, Storage]) -> Iterable[tuple[str, ...]]:
    """Return groups of names with the same shape and storage."""
    groups: dict[Any, list[str]] = {}
    for name, value in trained.items():
        how = storage.get(name, Storage())
        key = (tuple(value.shape), how.bits, how.group_size, how.base is not None)
        groups.setdefault(key, []).append(name)
    return [tuple(names) for names in groups.values()]


def _stack(trained: Mapping[str, Any], names: tuple[str, ...], storage: list[Storage]) -> Stack:
    latent = nn.Parameter(torch.stack([trained[name].detach().float() for name in names]))
    latent.grad = torch.zeros_like(latent)
    how = storage[0]
    base = None if how.base is None else torch.stack([s.base.to(latent) for s in storage if s.base is not None])
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


@cache
def _rounding(device: str) -> Callable[..., None]:
    return torch.compile(_round_into, dynamic=False) if device == "cuda" else _round_into
