"""RMSNorm as the model has it: the variance in fp32, the product with the weight in model precision."""

import torch
from torch import Tensor

from sala.backends.torch.ops.precision import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] → [..., D] in x's dtype."""
    wide = widen(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
