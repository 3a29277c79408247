"""The reference: each operation of the model as a plain function with its shape contract. Nothing here uses kernels.

Shapes: T packed tokens, S sequences, H query heads, G kv heads, D head dim, B block size, N blocks.

`Ops` are the operations for which a device may have a kernel, as one value that travels with the batch. Its defaults
are the reference; the backend's dispatch module makes the table that also uses kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sala.backends.torch.ops.lightning import lightning_fold, lightning_whole
from sala.backends.torch.ops.sparse import sparse_attention, whole_sparse_attention


@dataclass(frozen=True)
class Ops:
    """Functions with the signatures and shapes of their namesakes in this package."""

    sparse_attention: Callable[..., Tensor] = sparse_attention
    lightning_fold: Callable[..., Tensor] = lightning_fold
    lightning_whole: Callable[..., Tensor] = lightning_whole  # whole sequences, with gradients
    whole_sparse_attention: Callable[..., Tensor] = whole_sparse_attention


REFERENCE = Ops()
