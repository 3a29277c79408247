"""Whether the Triton kernels can run on a device: an NVIDIA GPU of compute capability 8.0 or newer, and Triton."""

import functools
import importlib.util

import torch

from sala.errors import install_command

LEAST = (8, 0)  # the first with asynchronous copies and bf16 tensor cores


def describe(device: torch.device, kernels: str = "auto") -> str:
    """Return in words which kernels a model on this device uses."""
    reason = "they are switched off (--kernels off)" if kernels == "off" else why_not(device)
    return "Triton kernels" if reason is None else f"none: {reason}"


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return why the kernels cannot run on this device, in words, or None if they can."""
    if device.type != "cuda" or torch.version.hip:
        return "there are kernels for NVIDIA GPUs only"
    if torch.cuda.get_device_capability(device) < LEAST:
        return f"the GPU is older than the kernels need (compute capability {LEAST[0]}.{LEAST[1]})"
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {install_command('cuda')}"
    return None
