"""AdamW with 16-bit state, for full fine-tuning where fp32 copies do not fit.

Small updates of 16-bit weights would be lost in rounding to nearest. Stochastic rounding preserves them on average.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_PIECE = 1 << 26  # weights updated at a time, to bound the fp32 temporaries


class Bf16AdamW(Optimizer):
    """Keep both moments in the dtype of the weights; compute in fp32."""

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
                target.copy_(round_stochastically(new, target.dtype))


def _flat(tensor: Any) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # the shard of this process
    flat: Tensor = local.view(-1)
    return flat


def round_stochastically(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to bf16 such that the expected value is exact; round to nearest for other dtypes."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(dtype)
