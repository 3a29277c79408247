"""GPTQ: columns are rounded one after another, and later columns compensate for the error of each.

The error to minimize is that of the outputs, |(W - Q) X|². With H = X Xᵀ, rounding column j by e_j changes the optimum
of the later columns by -e_j · H⁻¹[j, later] / H⁻¹[j, j]; all those rows of inverses are one Cholesky factor.
A group's range is found when its first column is reached, from weights that include the corrections so far.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sala.backends.torch.ops.affine import to_codes
from sala.checkpoint.packing import Packed
from sala.errors import CheckpointError
from sala.lab.quantize.layers import Chunks
from sala.lab.quantize.ranges import search_range, to_packed
from sala.quantization_config import Groups

DAMPING = 0.01  # share of the mean of the diagonal that is added to it
BLOCK = 128  # columns after which the corrections are applied to all later ones


@torch.inference_mode()
def sum_hessian(chunks: Chunks) -> Tensor:
    """Return H, the mean of x xᵀ over all rows, [in, in]."""
    first = next(chunks)
    total, count = first.T @ first, len(first)
    for x in chunks:
        total.addmm_(x.T, x)
        count += len(x)
    return total.div_(count)


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """The inputs of a site: the order of its columns, and the Cholesky factor of the inverse Hessian."""

    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, hessian: Tensor, group_size: int) -> "InputStatistics":
        """The most important groups come first, and within each its most important columns.

        More columns can compensate for what is rounded early. The stored layout does not change.
        """
        order = order_columns(hessian.diagonal(), group_size)
        return cls(order, inverse_factor(hessian[order][:, order]))  # indexing makes a copy, which is overwritten


def round_columns(weight: Tensor, inputs: InputStatistics, groups: Groups, dtype: str) -> Packed:
    """Return weight [out, in] as codes in plain groups along the inputs."""
    bits, size, order, factor = groups.bits, groups.group_size, inputs.order, inputs.factor
    left = weight.float().T[order]  # [in, out]: a column of the matrix is contiguous
    codes = torch.empty(left.shape, dtype=torch.uint8, device=left.device)
    scales = torch.empty(len(left) // size, left.shape[1], device=left.device)
    biases = torch.empty_like(scales)
    importance = factor.diagonal().square().reciprocal()
    for begin in range(0, len(left), BLOCK):
        end = min(begin + BLOCK, len(left))
        errors = torch.empty(end - begin, left.shape[1], device=left.device)
        for at in range(begin, end):
            group = at // size
            if at % size == 0:
                own = slice(at, at + size)
                scales[group], biases[group] = search_range(left[own].T, importance[own], bits, dtype)
            scale, bias = scales[group], biases[group]
            code = to_codes(left[at], scale, bias, bits)
            codes[at] = code
            errors[at - begin] = error = (left[at] - (code * scale + bias)) / factor[at, at]
            left[at + 1 : end].addr_(factor[at, at + 1 : end], error, alpha=-1)
        left[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1)
    place, group_place = order.argsort(), (order[::size] // size).argsort()
    return to_packed(codes[place].T, scales[group_place].T, biases[group_place].T, groups, dtype)


def order_columns(diagonal: Tensor, group_size: int) -> Tensor:
    """Return the columns by importance of their inputs, a permutation that keeps every group together."""
    grouped = diagonal.view(-1, group_size)
    within = grouped.sort(dim=1, descending=True, stable=True).indices
    first = grouped.sum(1).sort(descending=True, stable=True).indices
    return (within + torch.arange(len(grouped), device=diagonal.device)[:, None] * group_size)[first].flatten()


def inverse_factor(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """Return the upper Cholesky factor of the inverse; damping grows until the factorization succeeds.

    `hessian` is overwritten, because that of a wide matrix takes a gigabyte.
    """
    if not torch.isfinite(hessian).all():
        raise CheckpointError("activations are infinite or NaN", "the model is damaged")
    diagonal = hessian.diagonal()  # a view
    diagonal[diagonal == 0] = 1  # an input that is always zero: its weights are rounded independently
    mean = diagonal.mean()
    for _ in range(8):
        diagonal += damping * mean
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            del lower
            factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return factor
        damping *= 10
    problem = "the inputs of a matrix are too similar to calibrate with"
    raise CheckpointError(problem, "give more text, or use --method rtn")
