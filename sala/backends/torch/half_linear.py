"""Linears with 16-bit weights on a CPU: the weights stay as in the file, the arithmetic is fp32.

Few processors multiply in 16 bits; on the others torch converts as it goes, which costs several times the products
themselves. Here decode rows run in the C++ kernel, which reads half the bytes of fp32 at memory speed, and prefill rows
cast the weights to fp32 piece by piece. Like quantized linears, these replace linears of the model from outside.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.kernels import native
from sala.backends.torch.quantized_linear import DECODE_ROWS

_MANY_ROWS = 40  # from here on, casting the weights costs less than torch's own conversion
_PIECE = 1 << 22  # weights cast at a time, to bound memory
_HALF = (torch.bfloat16, torch.float16)


class HalfLinear(nn.Linear):
    """x [..., in] → [..., out] in the precision of x; sums are fp32."""

    kernel: native.Kernel
    native: native.WeightStruct

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        y = self.by_kernel(rows) if len(rows) <= DECODE_ROWS else self.by_expansion(rows)
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def by_kernel(self, x: Tensor) -> Tensor:
        """In the kernel: x [n, in] → [n, out] in fp32."""
        x = x.float().contiguous()
        y = torch.empty(x.shape[0], self.out_features)
        self.native.num_threads = torch.get_num_threads()
        self.kernel.linear(ctypes.addressof(self.native), x.data_ptr(), y.data_ptr(), x.shape[0])
        return y

    def by_expansion(self, x: Tensor) -> Tensor:
        """By torch for a few rows or where the processor multiplies in 16 bits; else by weights cast to fp32."""
        if x.dtype == self.weight.dtype and (
            len(x) < _MANY_ROWS or native.multiplies_in(str(x.dtype).removeprefix("torch."))
        ):
            return F.linear(x, self.weight)
        x = x.float()
        step, end = max(1, _PIECE // self.in_features), self.out_features
        pieces = [F.linear(x, self.expand(begin, min(begin + step, end))) for begin in range(0, end, step)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def expand(self, begin: int, end: int) -> Tensor:
        """Rows of the weights in fp32, [end - begin, in]."""
        out = torch.empty(end - begin, self.in_features)
        self.native.num_threads = torch.get_num_threads()
        self.kernel.expand(ctypes.addressof(self.native), begin, end, out.data_ptr())
        return out


def put_half_linears(model: nn.Module) -> None:
    """Replace every 16-bit linear on the CPU, where there is a kernel."""
    halves = [(name, one) for name, one in model.named_modules() if type(one) is nn.Linear and can_be_half(one)]
    kernel = native.load() if halves else None
    if kernel is None:
        return
    for name, linear in halves:
        model.set_submodule(name, _half(linear, kernel))


def can_be_half(linear: nn.Linear) -> bool:
    weight = linear.weight
    is_near = weight.device.type == "cpu" and weight.is_contiguous()
    return is_near and weight.dtype in _HALF and not linear.in_features % native.LANES


def native_weight(linear: nn.Linear) -> native.WeightStruct:
    """Return the struct that describes a plain matrix to the kernel."""
    weight = linear.weight
    return native.WeightStruct(
        codes=weight.data_ptr(),
        num_out=linear.out_features,
        num_in=linear.in_features,
        bits=8 * weight.dtype.itemsize,
        scale_type=native.element_type(weight.dtype),
        num_threads=1,
    )


def _half(linear: nn.Linear, kernel: native.Kernel) -> HalfLinear:
    half = HalfLinear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    half.weight, half.bias = linear.weight, linear.bias
    half.kernel, half.native = kernel, native_weight(linear)
    return half
