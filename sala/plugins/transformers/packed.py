"""Packed matrices as frozen linears of torch, so that PEFT puts adapters around them as around any linear."""

from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.torch.linears import AffineLinear

_ROWS = 4096  # of a matrix expanded at a time in the backward pass


class PackedLinear(nn.Linear):
    """x [..., in] → [..., out] by a packed matrix, which is not a parameter; gradients flow to x."""

    def __init__(self, packed: AffineLinear) -> None:
        nn.Module.__init__(self)
        self.packed = packed
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)  # the packed linear adds its own

    @property
    def qweight(self) -> Tensor:
        """The codes, under the name by which PEFT finds the device."""
        linear = self.packed
        return linear.packed.codes if linear.gpu is None else linear.gpu.codes

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return _Product.apply(x, self.packed)
        return self.packed(x)


class _Product(torch.autograd.Function):
    """The product with the matrix expanded again in the backward pass, so that it is never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: AffineLinear) -> Tensor:
        ctx.packed = packed
        return packed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), linear = grads, ctx.packed
        columns = grad.new_zeros(*grad.shape[:-1], linear.in_features)
        for begin in range(0, linear.out_features, _ROWS):
            end = min(begin + _ROWS, linear.out_features)
            columns += grad[..., begin:end] @ _expand(linear, begin, end, grad)
        if linear.order is None:
            return columns, None
        return torch.empty_like(columns).index_copy_(-1, linear.order.to(columns.device), columns), None


def _expand(linear: AffineLinear, begin: int, end: int, like: Tensor) -> Tensor:
    """Return rows begin…end of the matrix in the precision and on the device of `like`."""
    if linear.gpu is None:
        return linear.expand(begin, end).to(like)
    from sala.backends.torch.kernels import packed

    return packed.expand(linear.gpu, torch.arange(begin, end, device=like.device)).to(like)


def wrap_packed(model: nn.Module) -> None:
    """Replace every packed matrix of a model by a PackedLinear that holds it."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AffineLinear):
            model.set_submodule(name, PackedLinear(module))
