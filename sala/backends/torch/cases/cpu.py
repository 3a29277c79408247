"""Cases of the C++ kernels of the CPU. They are checked, not timed."""

from functools import partial

import torch

from sala.backends.torch.cases.rows import random_affine, step_by_step
from sala.backends.torch.cases.shapes import KernelCall, KernelCase
from sala.backends.torch.fast.dispatch import linear_kernels, put_half_linears, select_ops
from sala.backends.torch.linears import AffineLinear, LinearKernels
from sala.backends.torch.ops.affine import dequantize
from sala.backends.torch.ops.lightning import decay_slopes
from sala.backends.torch.ops.sparse import sparse_attention
from sala.checkpoint.dtypes import dtypes_by_name

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # fp32 sums in another order
NUM_IN, NUM_OUT, GROUP = 320, 96, 64  # ragged: five groups, six vectors of rows
HALF = {name: dtype for name, dtype in dtypes_by_name(torch).items() if dtype.itemsize == 2}


def cpu_cases() -> list[KernelCase]:
    return [
        *(KernelCase("linear", f"{bits} bits", partial(_linear, bits), tolerance=TOLERANCE) for bits in (4, 8)),
        *(KernelCase("linear", name, partial(_half, dtype), tolerance=TOLERANCE) for name, dtype in HALF.items()),
        *(KernelCase("expansion", f"{bits} bits", partial(_expansion, bits), tolerance=1e-6) for bits in (4, 8)),
        KernelCase("fold", "", _fold, tolerance=TOLERANCE),
        KernelCase("attention", "", _attention, tolerance=TOLERANCE),
    ]


def _kernels() -> LinearKernels:
    kernels = linear_kernels(CPU, torch.float32)
    assert kernels is not None
    return kernels


def _linear(bits: int) -> list[KernelCall]:
    weight, kernels = random_affine(bits, NUM_OUT, NUM_IN, GROUP, CPU), _kernels()
    x = torch.randn(3, NUM_IN)
    matrix = dequantize(weight.codes, weight.scales, weight.biases, bits, weight.group_size)
    linear = AffineLinear(weight, kernels=kernels)
    return [KernelCall(lambda: linear.by_kernel(x), lambda: x.double() @ matrix.double().T)]


def _half(dtype: torch.dtype) -> list[KernelCall]:
    linear, x = torch.nn.Linear(NUM_IN, NUM_OUT + 1, bias=False, dtype=dtype), torch.randn(3, NUM_IN)
    model = torch.nn.Sequential(linear)
    put_half_linears(model)
    return [KernelCall(lambda: model(x), lambda: x.double() @ linear.weight.double().T)]


def _expansion(bits: int) -> list[KernelCall]:
    weight, kernels = random_affine(bits, NUM_OUT, NUM_IN, GROUP, CPU), _kernels()
    matrix = partial(dequantize, weight.codes, weight.scales, weight.biases, bits, weight.group_size)
    return [KernelCall(lambda: AffineLinear(weight, kernels=kernels).expand(0, NUM_OUT), matrix)]


def _fold() -> list[KernelCall]:
    heads, dim, count = 3, 64, 5
    k, v = torch.randn(2, count, heads, dim)
    state, slopes = torch.randn(heads, dim, dim), decay_slopes(heads)
    twin = partial(step_by_step, k[None], k[None], v[None], state[None], slopes, 1.0)
    return [KernelCall(partial(select_ops().lightning_fold, k, v, state, slopes), lambda: twin()[1][0])]


def _attention() -> list[KernelCall]:
    """Attend over blocks in random order; the last one is not full."""
    num_queries, heads, groups, dim, block_size, num_pages = 37, 9, 3, 64, 64, 12
    q, positions = torch.randn(num_queries, heads, dim), torch.arange(num_queries) + (num_pages - 1) * block_size
    k, v = torch.randn(2, groups, num_pages, block_size, dim)
    order = torch.rand(num_queries, groups, num_pages - 1).argsort(-1)
    selected = torch.cat((order[..., :5], torch.full((num_queries, groups, 1), num_pages - 1)), -1)
    case = q, k, v, torch.randperm(num_pages), selected, positions, dim**-0.5
    return [KernelCall(partial(select_ops().sparse_attention, *case), partial(sparse_attention, *case))]
