"""Dense causal attention over grouped heads."""

import mlx.core as mx


def dense_attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Queries at the last n positions: q [n, H, D], k and v [G, start + n, D] → [n, H, D]."""
    mask = "causal" if q.shape[0] > 1 else None  # the last query sees all keys
    output = mx.fast.scaled_dot_product_attention(q.swapaxes(0, 1)[None], k[None], v[None], scale=scale, mask=mask)
    return output[0].swapaxes(0, 1)
