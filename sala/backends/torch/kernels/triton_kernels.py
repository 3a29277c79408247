"""Whether the Triton kernels are used: on an NVIDIA GPU of 8.0 or newer with Triton, unless SALA_KERNELS=0 is set."""

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LEAST = (8, 0)
_is_wanted = os.environ.get("SALA_KERNELS", "1") != "0"


@contextmanager
def use_kernels(is_wanted: bool) -> Iterator[None]:
    """Inside, models are opened with kernels or, if false, run by the reference alone."""
    global _is_wanted
    before, _is_wanted = _is_wanted, is_wanted
    try:
        yield
    finally:
        _is_wanted = before


def can_run(device: torch.device) -> bool:
    return _is_wanted and why_not(device) is None


def describe(device: torch.device) -> str:
    """What a model on this device runs by, in words for people."""
    reason = why_not(device)
    if reason is not None:
        return f"none: {reason}"
    return "Triton kernels" if _is_wanted else "none: they are switched off (SALA_KERNELS=0 or use_kernels(False))"


@functools.cache
def why_not(device: torch.device) -> str | None:
    """What stands in the way of the kernels on this device, in words for people; None if nothing does."""
    if device.type != "cuda" or torch.version.hip:
        return "there are kernels for NVIDIA GPUs only"
    if torch.cuda.get_device_capability(device) < LEAST:
        return f"the GPU is older than the kernels need (compute capability {LEAST[0]}.{LEAST[1]})"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'minicpm-sala[cuda]'"
    return None
