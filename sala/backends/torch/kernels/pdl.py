# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Programmatic dependent launch (PDL), from Hopper on: a kernel starts while the one ahead of it still runs.

It matters in decode steps, whose small kernels end in less time than a launch takes. A kernel launched with PDL first
waits for all kernels before it (`pdl_wait`); until then it reads and writes nothing, except for prefetches. Every
program must wait, also one that has nothing to do. The next kernel may start when all programs of this one have allowed
it: at once (the constant PDL is 1, `dependents_first`), or when they are nearly done (PDL is 2,
`pdl_launch_dependents`). PDL of 0 switches it off.

At once is better for products with packed matrices, of which a multiprocessor holds only two programs. For other
products, some multiprocessors would get too many programs and finish last. One sequence of the 9B model decodes in 4.8
instead of 5.1 ms per token on an H200.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sala.backends.torch.kernels.launch import capability

MAX_ROWS = 128  # rows of a step; larger steps take too long for launch times to matter


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the kernels before this one; must come before any read or write."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to start, where a program is nearly done."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Prefetch the lines of memory at these pointers into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def can_use_pdl(device: torch.device) -> bool:
    """Return whether the device supports PDL: Hopper and newer do."""
    return capability(device) >= 90


def pdl_options(device: torch.device, num_rows: int, dependents_first: bool = False) -> dict[str, Any]:
    """Return the launch options of a kernel; with `dependents_first` the next kernel may start at once."""
    if num_rows > MAX_ROWS or not can_use_pdl(device):
        return {"PDL": 0}
    return {"PDL": 1 if dependents_first else 2, "launch_pdl": True}
