"""RMSNorm of the model: the variance in fp32, the product with the weight in the model's precision."""

import mlx.core as mx


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x [..., D], weight [D] → [..., D] in x's dtype."""
    return mx.fast.rms_norm(x, weight, eps)
