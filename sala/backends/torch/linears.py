"""Linears and embeddings that are put into the model from outside: `model.py` does not know about bits.

`HalfLinear` has 16-bit weights on a CPU. They stay as in the file; the arithmetic is fp32, because few processors
multiply in 16 bits and torch's conversion on the others costs several times the products themselves.

`AffineLinear` and `AffineEmbedding` have quantized weights. On the CPU these stay mapped as they are in the file; codes
of 2, 3, 5 and 6 bits are converted to the next number of bits that the kernel reads. The result is that of
fp32 arithmetic on w = code * scale + bias, whatever the precision of the activations: it does not depend on how many
rows are computed together. On an NVIDIA GPU the codes are reordered at first use into the order that its kernels read
(`kernels/packed_weight.py`).

On the CPU, decode rows of both run in a C++ kernel that reads the stored weights themselves, at memory speed; prefill
rows expand the weights to fp32 piece by piece. Expanding costs as much as a handful of rows, so nothing is kept.
"""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.kernels import native, packed_weight
from sala.backends.torch.kernels.packed_weight import PackedWeight
from sala.backends.torch.ops.affine import dequantize, pack, unpack

DECODE_ROWS = 16  # up to here the kernel is faster than expanding the weights
NATIVE_BITS = {2: 4, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}  # bits of the file → bits that the kernels read
_MANY_ROWS = 40  # from here on, casting 16-bit weights costs less than torch's own conversion
_PIECE = 1 << 22  # weights expanded at a time, to bound memory
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """The kernels of products with quantized weights; without any, the weights are expanded for each product."""

    cpu: native.Kernel | None = None  # in C++
    has_triton: bool = False  # on a GPU, for activations of 16 bits


@dataclass(frozen=True, slots=True, eq=False)
class AffineWeight:
    """A matrix [out, in]: codes [out, in * bits / 32] as int32; scales and biases [out, in / group_size]."""

    codes: Tensor
    scales: Tensor
    biases: Tensor
    bits: int
    group_size: int

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    @property
    def num_in(self) -> int:
        return self.scales.shape[1] * self.group_size

    def map(self, change: Callable[[Tensor], Tensor]) -> "AffineWeight":
        """Return the matrix with changed tensors."""
        codes, scales, biases = (change(part) for part in (self.codes, self.scales, self.biases))
        return AffineWeight(codes, scales, biases, self.bits, self.group_size)

    def with_native_bits(self) -> "AffineWeight":
        """Return the same matrix with as many bits as the kernels read: codes times 2^n, scales divided by 2^n.

        So the middle of the codes, from which the kernel counts, stays the middle. In fp32 no scale underflows.
        """
        bits = NATIVE_BITS[self.bits]
        if bits == self.bits:
            return self
        more = bits - self.bits
        pieces = [self.codes[begin:end] for begin, end in _pieces(self.num_out, self.num_in)]
        codes = torch.cat([pack(unpack(piece, self.bits) << more, bits) for piece in pieces])
        scales = self.scales.float() / 2**more
        return AffineWeight(codes, scales, self.biases.float(), bits, self.group_size)

    def rows(self, index: Tensor | slice) -> Tensor:
        """Return some rows, dequantized to fp32."""
        return dequantize(self.codes[index], self.scales[index], self.biases[index], self.bits, self.group_size)

    def for_gpu(self, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        """Return the matrix in the form that GPU kernels read, for activations of this precision."""
        wide = self.map(lambda part: part.to(device)).with_native_bits()
        size = math.gcd(self.group_size, packed_weight.block_size(wide.bits))  # no group crosses a block
        scales, biases = (part.repeat_interleave(self.group_size // size, 1) for part in (wide.scales, wide.biases))
        return packed_weight.pack(wide.codes, scales, biases, wide.bits, size, dtype)

    def expand(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the whole matrix [out, in], dequantized piece by piece."""
        out = torch.empty(self.num_out, self.num_in, dtype=dtype, device=device)
        for begin, end in _pieces(self.num_out, self.num_in):
            out[begin:end] = self.rows(slice(begin, end))
        return out


class NativeProducts:
    """Products in fp32 with a matrix [out, in] that the C++ kernels read."""

    kernel: native.Kernel | None
    native: native.WeightStruct
    in_features: int
    out_features: int

    def by_kernel(self, x: Tensor) -> Tensor:
        """Multiply in the kernel: x [n, in] → [n, out], both fp32; x is contiguous."""
        assert self.kernel is not None
        y = torch.empty(x.shape[0], self.out_features)
        self.native.num_threads = torch.get_num_threads()
        self.kernel.linear(ctypes.addressof(self.native), x.data_ptr(), y.data_ptr(), x.shape[0])
        return y

    def by_expansion(self, x: Tensor) -> Tensor:
        """Multiply by expanded weights: x [n, in] → [n, out], both fp32."""
        pieces = [_product(x, self.expand(begin, end)) for begin, end in _pieces(self.out_features, self.in_features)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def expand(self, begin: int, end: int) -> Tensor:
        """Return rows of the weights in fp32, [end - begin, in]."""
        assert self.kernel is not None
        out = torch.empty(end - begin, self.in_features)
        self.native.num_threads = torch.get_num_threads()
        self.kernel.expand(ctypes.addressof(self.native), begin, end, out.data_ptr())
        return out


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] times weight [out, in] → [n, out], both fp32: in oneDNN where torch's default, MKL, is slow.

    Both sum each row alike, however many there are. oneDNN's product has no gradient.
    """
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    if x.device.type == "cpu" and not needs_gradient and native.has_slow_mkl() and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


class HalfLinear(NativeProducts, nn.Linear):
    """A linear with 16-bit weights: x [..., in] → [..., out] in the precision of x; sums are fp32."""

    def __init__(self, linear: nn.Linear, kernel: native.Kernel) -> None:
        nn.Linear.__init__(self, linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.kernel, self.native = kernel, native_weight(linear)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        is_decode = len(rows) <= DECODE_ROWS
        y = self.by_kernel(rows.float().contiguous()) if is_decode else self.by_expansion(rows)
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def by_expansion(self, x: Tensor) -> Tensor:
        """Multiply by torch if rows are few or the processor multiplies in 16 bits; else by weights cast to fp32."""
        if x.dtype == self.weight.dtype and (
            len(x) < _MANY_ROWS or native.multiplies_in(str(x.dtype).removeprefix("torch."))
        ):
            return F.linear(x, self.weight)
        return super().by_expansion(x.float())


def can_be_half(linear: nn.Module) -> bool:
    """Return whether `HalfLinear` can replace a module."""
    if type(linear) is not nn.Linear:
        return False
    weight = linear.weight
    is_near = weight.device.type == "cpu" and weight.is_contiguous()
    return is_near and weight.dtype in _HALF and not linear.in_features % native.LANES


class AffineModule(nn.Module):
    """Holds a quantized matrix; on a GPU in the order of its kernels, into which it is brought at first use."""

    def __init__(self, weight: AffineWeight, kernels: LinearKernels) -> None:
        super().__init__()
        self.packed = weight
        self.kernels = kernels
        self.gpu: PackedWeight | None = None

    def can_run_on_gpu(self, x: Tensor, dtype: torch.dtype) -> bool:
        return x.is_cuda and (self.gpu is not None or (self.kernels.has_triton and dtype.itemsize == 2))

    def gpu_weight(self, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        """Return the matrix in the order of the GPU's kernels; on a GPU no other copy is kept."""
        if self.gpu is None:
            self.put_gpu(self.packed.for_gpu(dtype, device))
        assert self.gpu is not None
        assert self.gpu.dtype == dtype
        return self.gpu

    def put_gpu(self, weight: PackedWeight) -> None:
        """Use these codes, which may be rows of a larger matrix or shared with the head, instead of a copy."""
        self.gpu = weight
        if self.packed.codes.is_cuda:
            self.packed = self.packed.map(lambda part: part[:0].clone())


class AffineLinear(NativeProducts, AffineModule):
    """Replaces a linear: x [..., in] → [..., out].

    `order` names the input that each column takes: columns of a group are adjacent, inputs need not be (GPTQ's
    act-order).
    """

    def __init__(
        self,
        weight: AffineWeight,
        bias: Tensor | None = None,
        order: Tensor | None = None,
        kernels: LinearKernels = LinearKernels(),  # noqa: B008 - frozen
    ) -> None:
        kernel = kernels.cpu if weight.codes.device.type == "cpu" else None
        super().__init__(weight if kernel is None else weight.with_native_bits(), kernels)
        self.bias, self.kernel, self.order = bias, kernel, order
        self.in_features, self.out_features = weight.num_in, weight.num_out
        self.native = _native_affine(self.packed)  # no buffers: `.to()` must not move what the kernel points to

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order.to(x.device))
        if self.bias is None and self.kernel is not None and _is_ready(x):  # decoding: every microsecond counts
            return self.by_kernel(x)
        if self.can_run_on_gpu(x, x.dtype):
            from sala.backends.torch.kernels import linear

            y = linear.product(x.reshape(-1, self.in_features), self.gpu_weight(x.dtype, x.device))
        else:
            rows = x.reshape(-1, self.in_features).float().contiguous()
            y = self.by_expansion(rows) if self.kernel is None or len(rows) > DECODE_ROWS else self.by_kernel(rows)
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def expand(self, begin: int, end: int) -> Tensor:
        return self.packed.rows(slice(begin, end)) if self.kernel is None else super().expand(begin, end)


class AffineEmbedding(AffineModule):
    """Replaces an embedding: only the rows that are looked up are dequantized."""

    def __init__(
        self,
        weight: AffineWeight,
        dtype: torch.dtype,
        kernels: LinearKernels = LinearKernels(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(weight, kernels)
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.can_run_on_gpu(tokens, self.dtype):
            return self.packed.rows(tokens).to(self.dtype)
        from sala.backends.torch.kernels import packed

        weight = self.gpu_weight(self.dtype, tokens.device)
        return packed.expand(weight, tokens.flatten()).view(*tokens.shape, weight.num_in)


def _is_ready(x: Tensor) -> bool:
    """Return whether the kernel takes x as it is: decode rows in fp32."""
    return x.dim() == 2 and x.shape[0] <= DECODE_ROWS and x.dtype == torch.float32 and x.is_contiguous()


def _pieces(num_out: int, num_in: int) -> list[tuple[int, int]]:
    """Return begin and end of the rows of a matrix that are expanded at a time."""
    step = max(1, _PIECE // num_in)
    return [(begin, min(begin + step, num_out)) for begin in range(0, num_out, step)]


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


def _native_affine(weight: AffineWeight) -> native.WeightStruct:
    parts = (weight.codes, weight.scales, weight.biases)
    assert all(part.is_contiguous() for part in parts)
    assert weight.scales.dtype == weight.biases.dtype
    return native.WeightStruct(
        *(part.data_ptr() for part in parts),
        num_out=weight.num_out,
        num_in=weight.num_in,
        bits=weight.bits,
        group_size=weight.group_size,
        scale_type=native.element_type(weight.scales.dtype),
        num_threads=1,
    )
