"""The precision of intermediate results: fp32 whatever the weights are; fp64, which tests use, stays fp64."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
