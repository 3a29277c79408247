"""A learner that Accelerate distributes over devices and nodes: data-parallel, or sharded with FSDP."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from sala.errors import MissingExtra
from sala.lab.train.objectives import Objective
from sala.lab.train.recipe import Learning
from sala.lab.train.steps import TrainingBatch

RateGroups = Mapping[float, Sequence[str]]  # names of parameters, by the factor of their learning rate


class Accelerated:
    """AdamW on the objective's parameters. The terms of the loss are means over the batches of all processes."""

    tile_rows = 0

    def __init__(self, objective: Objective, stage: Learning, groups: RateGroups, dtype: str = "bfloat16") -> None:
        self.objective, self.stage = objective, stage
        self.accelerator = _accelerator(dtype, next(objective.parameters()).device, objective.units)
        self.device: torch.device = self.accelerator.device
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        named = dict(objective.named_parameters())
        self.scales = list(groups)
        optimizer = torch.optim.AdamW(
            [{"params": [named[name] for name in names], "lr": stage.lr * scale} for scale, names in groups.items()],
            betas=stage.betas,
            weight_decay=stage.weight_decay,
            fused=self.device.type == "cuda",
        )
        objective.to(self.device)
        self.wrapped, self.optimizer = self.accelerator.prepare(objective, optimizer)
        self.inner = getattr(self.optimizer, "optimizer", self.optimizer)  # torch's own

    def update(self, batches: Sequence[TrainingBatch], step: int, rate: float, done: float = 0.0) -> None:
        for group, scale in zip(self.optimizer.param_groups, self.scales, strict=True):
            group["lr"] = rate * scale
        counts = torch.tensor([self.objective.counts(batch) for batch in batches], dtype=torch.float64)
        self.totals = self.accelerator.reduce(counts.sum(0).to(self.device).float(), "sum")
        of_terms = self.objective.weights or self.stage.term_weights[: len(self.totals)]
        weights = torch.tensor(of_terms, device=self.device)
        # data parallelism averages the gradients; the number of processes restores the sum
        scales = weights / self.totals.clamp(min=1) * self.world
        sums = torch.zeros_like(self.totals)
        for index, batch in enumerate(batches):
            self.wrapped.train()
            is_last = index + 1 == len(batches)
            with nullcontext() if is_last else self.accelerator.no_sync(self.wrapped):
                loss, part_sums = self.wrapped(batch.to(self.device), scales)
                self.accelerator.backward(loss)
            sums += part_sums
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.stage.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.sums, self.norm = self.accelerator.reduce(sums, "sum"), torch.as_tensor(norm)

    def values(self) -> dict[str, float]:
        """Return the means of the last step's terms and the gradient norm."""
        means = (self.sums / self.totals.clamp(min=1)).tolist()
        return dict(zip(self.objective.terms, means, strict=True)) | {"norm": float(self.norm)}

    def find_divergence(self, values: Mapping[str, float]) -> str | None:
        return next((name for name, value in values.items() if not math.isfinite(value)), None)

    def tensors(self) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, memory = cast(Any, get_state_dict(self.wrapped, self.inner, options=_options()))
        out = {f"weight.{name}": tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
        for name, entries in memory.get("state", {}).items():  # only the main process gets the full tensors
            out |= {f"memory.{kind}.{name}": torch.as_tensor(value) for kind, value in entries.items()}
        return out

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        _, memory = get_state_dict(self.wrapped, self.inner, options=_options(is_whole=False))
        weights: dict[str, Any] = {}
        state: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "weight":
                weights[rest] = value
            else:
                moment, _, parameter = rest.partition(".")
                state.setdefault(parameter, {})[moment] = value
        groups: dict[str, Any] = {"state": state, "param_groups": memory["param_groups"]}
        set_state_dict(self.wrapped, self.inner, model_state_dict=weights, optim_state_dict=groups, options=_options())


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


def _options(is_whole: bool = True) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=is_whole, cpu_offload=is_whole, ignore_frozen_params=True, strict=False)
