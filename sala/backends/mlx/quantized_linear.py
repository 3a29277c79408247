"""Quantized linears and embeddings, put into the model from outside: `model.py` does not know about bits.

The codes stay as they are in the file: MLX computes with them. It requires scales and biases in the precision of the
activations. Where that would round them, they stay fp32 and the activations of a product are cast to fp32.
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module


@dataclass(frozen=True, slots=True, eq=False)
class AffineWeight:
    """A matrix [out, in]: codes [out, in * bits / 32] as uint32; scales and biases [out, in / group_size]."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    def fitted(self, dtype: mx.Dtype) -> "AffineWeight":
        """Return the matrix with scales and biases in this precision if it holds them exactly, in fp32 otherwise."""
        parts = (self.scales, self.biases)
        is_held = all(mx.array_equal(part.astype(dtype).astype(mx.float32), part.astype(mx.float32)) for part in parts)
        scales, biases = (part.astype(dtype if is_held else mx.float32) for part in parts)
        return AffineWeight(self.codes, scales, biases, self.bits, self.group_size)


class AffineModule(Module):
    """Holds a quantized matrix under the names of its tensors in the file."""

    def __init__(self, weight: AffineWeight) -> None:
        super().__init__()
        self.weight, self.scales, self.biases = weight.codes, weight.scales, weight.biases
        self.bits, self.group_size = weight.bits, weight.group_size


class AffineLinear(AffineModule):
    """Replaces a linear: x [..., in] → [..., out]. `order` names the input that each column takes."""

    def __init__(self, weight: AffineWeight, bias: mx.array | None = None, order: mx.array | None = None) -> None:
        super().__init__(weight)
        self.bias, self._order = bias, order

    def __call__(self, x: mx.array) -> mx.array:
        y = x if self._order is None else mx.take(x, self._order, axis=-1)
        parts = (self.weight, self.scales, self.biases)
        y = mx.quantized_matmul(
            y.astype(self.scales.dtype), *parts, transpose=True, group_size=self.group_size, bits=self.bits
        ).astype(x.dtype)
        return y if self.bias is None else y + self.bias


class AffineEmbedding(AffineModule):
    """Replaces an embedding: only the rows that are looked up are dequantized."""

    def __init__(self, weight: AffineWeight, dtype: mx.Dtype) -> None:
        super().__init__(weight)
        self.dtype = dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        parts = (self.weight[tokens], self.scales[tokens], self.biases[tokens])
        return mx.dequantize(*parts, group_size=self.group_size, bits=self.bits).astype(self.dtype)
