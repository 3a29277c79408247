"""RMSNorm of the model: the variance in fp32, the product with the weight in the model's precision."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.ops.precision import upcast


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] → [..., D] in x's dtype."""
    if x.dtype == weight.dtype and upcast(x) is x:  # no rounding in between
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = upcast(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rms_norm_share(
    x: Tensor, weight: Tensor, eps: float, num_shares: int, add_up: Callable[[Tensor], Tensor]
) -> Tensor:
    """RMSNorm over channels on several ranks: x [..., D / num_shares] and weight are this rank's share.

    `add_up` sums a tensor over the ranks; it gets one number per row.
    """
    wide = upcast(x)
    mean = add_up(wide.square().sum(-1, keepdim=True)) / (num_shares * x.shape[-1])
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight
