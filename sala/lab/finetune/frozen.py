"""Frozen quantized linears that pass gradients through: the base model of QLoRA.

The weights are dequantized for every product, in the forward and again in the backward pass, and never kept. peft wraps
adapters around these linears as around any other.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.torch.linears import AffineWeight
from sala.backends.torch.ops.affine import dequantize
from sala.lab.train.losses import compiled


class FrozenLinear(nn.Linear):
    """Map x [..., in] to [..., out] in x's dtype. The matrix is a non-persistent buffer, not a parameter."""

    qweight: Tensor  # the codes; peft looks for this name to find the device
    scales: Tensor
    biases: Tensor
    order: Tensor | None

    def __init__(self, weight: AffineWeight, bias: nn.Parameter | None = None, order: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = weight.num_in, weight.num_out
        self.bits, self.group_size = weight.bits, weight.group_size
        self.register_parameter("weight", None)
        self.register_parameter("bias", bias)
        self.register_buffer("qweight", weight.codes, persistent=False)
        self.register_buffer("scales", weight.scales, persistent=False)
        self.register_buffer("biases", weight.biases, persistent=False)
        self.register_buffer("order", order, persistent=False)  # the input of each column, if the columns are permuted

    def forward(self, x: Tensor) -> Tensor:
        columns = x if self.order is None else x[..., self.order]
        y: Tensor = _FrozenProduct.apply(columns, self)
        return y if self.bias is None else y + self.bias

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized matrix [out, in] with its columns in stored order."""
        device = self.qweight.device.type
        form = _expand_nibbles if device == "cuda" and self.bits == 4 else _expand
        return compiled(form, device)(self.qweight, self.scales, self.biases, self.bits, self.group_size, dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> "FrozenLinear":
        """Move to another device; raise TypeError on a change of dtype, which would round the scales."""
        kept = {name: getattr(self, name).dtype for name in ("scales", "biases")}
        super()._apply(fn, recurse)
        for name, dtype in kept.items():
            if getattr(self, name).dtype != dtype:
                raise TypeError("a frozen linear cannot change its dtype; convert the model before packing it")
        return self


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: FrozenLinear) -> Tensor:
        ctx.linear = linear
        return nn.functional.linear(x, linear.expand(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return grad @ ctx.linear.expand(grad.dtype), None


def _expand(codes: Tensor, scales: Tensor, biases: Tensor, bits: int, group_size: int, dtype: torch.dtype) -> Tensor:
    return dequantize(codes, scales, biases, bits, group_size).to(dtype)


def _expand_nibbles(
    codes: Tensor, scales: Tensor, biases: Tensor, bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Dequantize as `_expand` does; the form for 4 bits compiles into a single pass over the memory."""
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)
    values = ((codes.unsqueeze(-1) >> shifts) & 15).flatten(-2).unflatten(-1, (scales.shape[-1], group_size))
    return (values.float() * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)).flatten(-2).to(dtype)
