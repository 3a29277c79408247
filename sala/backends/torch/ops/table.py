"""The operations for which a device may have a kernel, as one value that travels with the batch.

The defaults are the reference. `fast/dispatch.py` makes the table that also uses kernels; nothing here chooses.
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
