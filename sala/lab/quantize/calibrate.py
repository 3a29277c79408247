"""Statistics of the activations at a site, accumulated chunk by chunk."""

import torch
from torch import Tensor

from sala.errors import CheckpointError
from sala.lab.quantize.awq import SiteStatistics
from sala.lab.quantize.layers import Chunks

MAX_ROWS = 2048  # rows of activations that are kept


@torch.inference_mode()
def sum_hessian(chunks: Chunks) -> Tensor:
    """Return H, the mean of x xᵀ over all rows, [in, in]."""
    first = next(chunks)
    total, count = first.T @ first, len(first)
    for x in chunks:
        total.addmm_(x.T, x)
        count += len(x)
    return total.div_(count)


@torch.inference_mode()
def summarise_site(chunks: Chunks, num_rows: int) -> SiteStatistics:
    """Return magnitudes and squares of the inputs, and rows spread evenly over all `num_rows`."""
    step = max(1, num_rows // MAX_ROWS)
    sizes: list[Tensor] = []
    squares: list[Tensor] = []
    rows: list[Tensor] = []
    count = 0
    for x in chunks:
        sizes.append(x.abs().sum(0))
        squares.append(x.square().sum(0))
        rows.append(x[-count % step :: step].clone())
        count += len(x)
    mean, square = torch.stack(sizes).sum(0), torch.stack(squares).sum(0)
    if not torch.isfinite(square).all():
        raise CheckpointError("activations are infinite or NaN", "the model is damaged")
    return SiteStatistics(mean / count, square / count, torch.cat(rows)[:MAX_ROWS])
