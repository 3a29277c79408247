"""The reference: each operation of the model as a plain function with its shape contract. Nothing here uses kernels.

Shapes: T packed tokens, S sequences, H query heads, G kv heads, D head dim, B block size, N blocks.

`Ops` are the operations that a Metal kernel may replace, as one value that travels with the batch. Its defaults are the
reference; `dispatch.py` makes the value that holds kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from sala.backends.mlx.ops.lightning import lightning_ragged
from sala.backends.mlx.ops.sparse import select_blocks, sparse_attention


@dataclass(frozen=True)
class Ops:
    """Functions with the signatures and shapes of their namesakes in this package."""

    lightning_ragged: Callable[..., tuple[mx.array, mx.array]] = lightning_ragged
    select_blocks: Callable[..., mx.array] = select_blocks
    sparse_attention: Callable[..., mx.array] = sparse_attention


REFERENCE = Ops()
