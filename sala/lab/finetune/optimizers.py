"""AdamW whose memory has 16 bits: for full fine-tuning where fp32 copies of everything do not fit.

Weights of 16 bits cannot take small steps: rounded to nearest, they would stay where they are. Here they are rounded up
or down at random, so that on the average nothing is lost.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_PIECE = 1 << 26  # weights updated at a time: what is computed in fp32 stays small


class NarrowAdamW(Optimizer):
    """Both moments in the weights' own precision; the arithmetic is fp32."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        (first, second), lr, count = group["betas"], group["lr"], state["step"]
        flat = [_flat(x) for x in (parameter, parameter.grad, state["mean"], state["square"])]
        for weight, grad, mean, square in zip(*(x.split(_PIECE) for x in flat), strict=True):
            wide = grad.float()
            new_mean = mean.float().lerp_(wide, 1 - first)
            new_square = square.float().mul_(second).addcmul_(wide, wide, value=1 - second)
            change = (new_mean / (1 - first**count)).div_((new_square / (1 - second**count)).sqrt_().add_(group["eps"]))
            value = weight.float().mul_(1 - lr * group["weight_decay"]).sub_(change, alpha=lr)
            for target, new in ((mean, new_mean), (square, new_square), (weight, value)):
                target.copy_(round_randomly(new, target.dtype))


def _flat(tensor: Any) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a process's own shard
    flat: Tensor = local.view(-1)
    return flat


def round_randomly(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 → bf16, up or down with the probability that keeps the mean; other precisions to nearest."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(dtype)
