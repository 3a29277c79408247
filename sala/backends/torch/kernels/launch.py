"""What the launches of all Triton kernels share: configurations, facts about the device, rows fit for wide loads."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """How a kernel is compiled and launched: constants of its tile by name, warps, and stages of the pipeline.

    A kernel's module chooses it by shape and device; tests and benchmarks may pass another one. `num_stages` and
    `max_registers` of None are Triton's defaults. For `uses_pdl` see `pdl.py`.
    """

    tile: dict[str, int]
    num_warps: int
    num_stages: int | None = None
    uses_pdl: bool = False
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}
        pdl = {"launch_pdl": True} if self.uses_pdl else {}
        return {name: value for name, value in options.items() if value is not None} | pdl


@functools.cache
def capability(device: torch.device) -> int:
    """Return the compute capability, 90 on Hopper, or 0 without a GPU."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use; those of Hopper where there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 2 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def aligned_rows(x: Tensor) -> Tensor:
    """Return x [n, K] or [n, H, D] if its rows, which may lie apart, are whole and aligned to 16 bytes, else a copy."""
    is_whole = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x if is_whole and is_aligned else x.clone(memory_format=torch.contiguous_format)


def largest_power_of_2(count: int) -> int:
    """Return the largest power of two up to `count`; 1 where that is less than 1."""
    return 1 << max(count, 1).bit_length() - 1
