"""Quantized linears and embeddings, put into the model from outside: `model.py` does not know about bits.

The codes stay as they are in the file: MLX computes with them. It requires scales and biases in the precision of the
activations. Where that would round them, they stay fp32 and the activations of a product are cast to fp32.
"""

import mlx.core as mx
from mlx.nn.layers.base import Module

Affine = tuple[mx.array, mx.array, mx.array, int, int]  # codes, scales, biases, bits, group size


class AffineModule(Module):
    """Holds a quantized matrix [out, in] under the names of its tensors in the file.

    Codes [out, in * bits / 32] as uint32, `weight`; scales and biases [out, in / group_size].
    """

    def __init__(self, affine: Affine) -> None:
        super().__init__()
        self.weight, self.scales, self.biases, self.bits, self.group_size = affine


class AffineLinear(AffineModule):
    """Replaces a linear: x [..., in] → [..., out]. `order` names the input that each column takes."""

    def __init__(self, affine: Affine, bias: mx.array | None = None, order: mx.array | None = None) -> None:
        super().__init__(affine)
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

    def __init__(self, affine: Affine, dtype: mx.Dtype) -> None:
        super().__init__(affine)
        self.dtype = dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        parts = (self.weight[tokens], self.scales[tokens], self.biases[tokens])
        return mx.dequantize(*parts, group_size=self.group_size, bits=self.bits).astype(self.dtype)
