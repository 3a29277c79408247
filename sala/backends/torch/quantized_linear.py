"""Quantized linears and embeddings, put into the model from outside: `model.py` does not know about bits.

On the CPU the weights stay mapped as they are in the file; codes of 2, 3, 5 and 6 bits are converted to the next number
of bits that the kernel reads. Decode rows run in a kernel that reads the codes themselves; prefill rows expand the
weights piece by piece and multiply in fp32. Expanding costs as much as a handful of rows, so nothing is kept. Both give
the numbers of fp32 arithmetic on w = code * scale + bias, whatever the precision of the activations: the result does
not depend on how many rows are computed together.

On an NVIDIA GPU the codes are reordered at first use into the order that its kernels read (`kernels/packed_weight.py`).
"""

import ctypes
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.kernels import native, packed_weight, triton_kernels
from sala.backends.torch.kernels.packed_weight import PackedWeight
from sala.backends.torch.ops.affine import dequantize, pack, unpack

DECODE_ROWS = 16  # up to here the kernel is faster than expanding the weights
NATIVE_BITS = {2: 4, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}  # bits of the file → bits that the kernels read
_PIECE = 1 << 22  # weights expanded at a time


def linear_backend() -> str:
    """Return in words how quantized linears run on this machine's CPU."""
    if native.load() is None:
        return f"torch, dequantized at load: {native.describe()}"
    return f"native: {native.describe()}"


def can_run_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for packed matrices on this device; those of GPUs multiply in 16 bits."""
    if device.type == "cpu":
        return native.load() is not None
    return dtype.itemsize == 2 and triton_kernels.why_not(device) is None


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

    def with_native_bits(self) -> "AffineWeight":
        """Return the same matrix with as many bits as the kernels read: codes times 2^n, scales divided by 2^n.

        So the middle of the codes, from which the kernel counts, stays the middle. In fp32 no scale underflows.
        """
        bits = NATIVE_BITS[self.bits]
        if bits == self.bits:
            return self
        pieces = (unpack(self.codes[begin:end], self.bits) << (bits - self.bits) for begin, end in _pieces(self))
        codes = torch.cat([pack(piece, bits) for piece in pieces])
        scales = self.scales.float() / 2 ** (bits - self.bits)
        return AffineWeight(codes, scales, self.biases.float(), bits, self.group_size)

    def rows(self, index: Tensor | slice) -> Tensor:
        """Return some rows, dequantized to fp32."""
        return dequantize(self.codes[index], self.scales[index], self.biases[index], self.bits, self.group_size)

    def for_gpu(self, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        """Return the matrix in the form that GPU kernels read, for activations of this precision."""
        codes, scales, biases = (part.to(device) for part in (self.codes, self.scales, self.biases))
        wide = AffineWeight(codes, scales, biases, self.bits, self.group_size).with_native_bits()
        size = math.gcd(self.group_size, packed_weight.block_size(wide.bits))  # no group crosses a block
        scales, biases = (part.repeat_interleave(self.group_size // size, 1) for part in (wide.scales, wide.biases))
        return packed_weight.pack(wide.codes, scales, biases, wide.bits, size, dtype)

    def expand(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the whole matrix [out, in], dequantized piece by piece."""
        out = torch.empty(self.num_out, self.num_in, dtype=dtype, device=device)
        for begin, end in _pieces(self):
            out[begin:end] = self.rows(slice(begin, end))
        return out


class AffineLinear(nn.Module):
    """Replaces a linear: x [..., in] → [..., out]."""

    def __init__(self, weight: AffineWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.kernel = native.load() if weight.codes.device.type == "cpu" else None
        self.packed = weight if self.kernel is None else weight.with_native_bits()
        self.gpu: PackedWeight | None = None
        self.in_features, self.out_features = weight.num_in, weight.num_out
        self.native = _native_weight(self.packed)  # no buffers: `.to()` must not move what the kernel points to

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and self.kernel is not None and _is_ready(x):  # decoding: every microsecond counts
            return self.by_kernel(x)
        if x.is_cuda and (self.gpu is not None or can_run_packed(x.device, x.dtype)):
            return self.on_gpu(x)
        rows = x.reshape(-1, self.in_features).float().contiguous()
        y = self.by_expansion(rows) if self.kernel is None or len(rows) > DECODE_ROWS else self.by_kernel(rows)
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def on_gpu(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out] by the kernels of GPUs, in x's precision."""
        from sala.backends.torch.kernels import packed

        y = packed.product(x.reshape(-1, self.in_features), self.gpu_weight(x.dtype, x.device))
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def gpu_weight(self, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        """Return the matrix in the order of the GPU's kernels; on a GPU no other copy is kept."""
        if self.gpu is None:
            self.put_gpu(self.packed.for_gpu(dtype, device))
        assert self.gpu is not None
        assert self.gpu.dtype == dtype
        return self.gpu

    def put_gpu(self, weight: PackedWeight) -> None:
        """Use these codes, which may be rows of a larger matrix, instead of a copy."""
        self.gpu = weight
        if self.packed.codes.is_cuda:
            self.packed = _without_rows(self.packed)

    def by_kernel(self, x: Tensor) -> Tensor:
        """In the kernel: x [n, in] → [n, out], both fp32."""
        assert self.kernel is not None
        y = torch.empty(x.shape[0], self.out_features)
        self.native.num_threads = torch.get_num_threads()
        self.kernel.linear(ctypes.addressof(self.native), x.data_ptr(), y.data_ptr(), x.shape[0])
        return y

    def by_expansion(self, x: Tensor) -> Tensor:
        """By expanded weights: x [n, in] → [n, out], both fp32."""
        pieces = [F.linear(x, self.expand(begin, end)) for begin, end in _pieces(self.packed)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def expand(self, begin: int, end: int) -> Tensor:
        """Rows of the weights in fp32, [end - begin, in]."""
        if self.kernel is None:
            return self.packed.rows(slice(begin, end))
        out = torch.empty(end - begin, self.in_features)
        self.native.num_threads = torch.get_num_threads()
        self.kernel.expand(ctypes.addressof(self.native), begin, end, out.data_ptr())
        return out


class AffineEmbedding(nn.Module):
    """Replaces an embedding: only the rows that are looked up are dequantized."""

    def __init__(self, weight: AffineWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = weight
        self.gpu: PackedWeight | None = None
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_cuda and (self.gpu is not None or can_run_packed(tokens.device, self.dtype)):
            return self.on_gpu(tokens)
        return self.packed.rows(tokens).to(self.dtype)

    def on_gpu(self, tokens: Tensor) -> Tensor:
        from sala.backends.torch.kernels import packed

        if self.gpu is None:
            self.put_gpu(self.packed.for_gpu(self.dtype, tokens.device))
        assert self.gpu is not None
        return packed.expand(self.gpu, tokens.flatten()).view(*tokens.shape, self.gpu.num_in)

    def put_gpu(self, weight: PackedWeight) -> None:
        """Use these codes, which the head may share, instead of a copy."""
        self.gpu = weight
        if self.packed.codes.is_cuda:
            self.packed = _without_rows(self.packed)


def _is_ready(x: Tensor) -> bool:
    """Return whether the kernel takes x as it is: decode rows in fp32."""
    return x.dim() == 2 and x.shape[0] <= DECODE_ROWS and x.dtype == torch.float32 and x.is_contiguous()


def _without_rows(weight: AffineWeight) -> AffineWeight:
    """Return the matrix without rows, for when the codes are held elsewhere."""
    codes, scales, biases = (part[:0].clone() for part in (weight.codes, weight.scales, weight.biases))
    return AffineWeight(codes, scales, biases, weight.bits, weight.group_size)


def _pieces(weight: AffineWeight) -> list[tuple[int, int]]:
    step = max(1, _PIECE // weight.num_in)
    return [(begin, min(begin + step, weight.num_out)) for begin in range(0, weight.num_out, step)]


def _native_weight(weight: AffineWeight) -> native.WeightStruct:
    for tensor in (weight.codes, weight.scales, weight.biases):
        assert tensor.is_contiguous()
    assert weight.scales.dtype == weight.biases.dtype
    return native.WeightStruct(
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        weight.biases.data_ptr(),
        None,
        weight.num_out,
        weight.num_in,
        weight.bits,
        weight.group_size,
        native.element_type(weight.scales.dtype),
        1,
    )
