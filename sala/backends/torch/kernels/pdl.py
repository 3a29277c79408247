# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Kernels that start while the one ahead still runs, from Hopper on: the small ones of a decode step are over in less
time than it takes to start them.

An early kernel waits for all that was launched before it; nothing is read or written before that, though some of what
will be read may be asked for. Every program of it has to wait, also one that finds nothing to do. The kernel behind may
start when the programs of this one say so: at once (PDL is 1), or when they are nearly done (2). At once is better
for products with packed matrices, of which a processor holds two programs and no more; of other products some
processors would get too many, and be the last: one sequence with the 9B model takes 4.8 instead of 5.1 ms on an H200.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

MAX_ROWS = 128  # of a step that is short enough for it to matter


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """The first thing that an early kernel does."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Where a program is nearly done."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(places):
    """Asks for the lines of memory at `places` (pointers) to come into the L2 cache; what comes is not looked at."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@functools.cache
def can_use_pdl(device: torch.device) -> bool:
    """From Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device, num_rows: int, dependents_first: bool = False) -> dict[str, Any]:
    """For the launch of a kernel that has PDL; `dependents_first`: the one behind may start at once."""
    if num_rows > MAX_ROWS or not can_use_pdl(device):
        return {"PDL": 0}
    return {"PDL": 1 if dependents_first else 2, "launch_pdl": True}
