"""The operations for which there are Metal kernels, as one value that travels with the batch.

The defaults are the reference. `mlx/dispatch.py` makes the table that also uses kernels; nothing here chooses.
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
