"""Whether the Triton kernels can run on a device: an NVIDIA GPU of compute capability 8.0 or newer, and Triton."""

import functools
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from sala import __version__
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


def _warm_up_directory() -> Path:
    """Return where warm-ups are recorded: beside Triton's compiled kernels, so that both are deleted together."""
    from triton import knobs  # type: ignore[import-untyped]

    return Path(knobs.cache.dir) / "sala-warm-up"


def _versions() -> dict[str, str]:
    """Return the versions that compiled kernels depend on."""
    import triton

    return {"sala": __version__, "torch": torch.__version__, "triton": triton.__version__}


def note_warm_up(facts: dict[str, Any]) -> None:
    """Record that the kernels of a model are compiled; failing to write the record is not an error."""
    facts = facts | _versions()
    key = {name: value for name, value in facts.items() if name != "seconds"}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    try:
        _warm_up_directory().mkdir(parents=True, exist_ok=True)
        (_warm_up_directory() / f"{name}.json").write_text(json.dumps(facts))
    except OSError:
        return


def warm_ups() -> list[dict[str, Any]]:
    """Return the records of earlier warm-ups on this machine with the versions that are installed now."""
    if importlib.util.find_spec("triton") is None:
        return []
    found = []
    for path in sorted(_warm_up_directory().glob("*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return [facts for facts in found if isinstance(facts, dict) and facts.items() >= _versions().items()]
