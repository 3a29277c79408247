"""What a step and moving a conversation cost at least: bytes by the bandwidths of the tiers that they pass."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sala.errors import InputError, writing

MEASURED = "measured"
TIERS = ("device", "host", "disk")
_GB = 1e9
_COPY_BYTES, _FILE_BYTES = 256 << 20, 128 << 20  # of a measurement
_ROUNDS = 3  # of which the fastest counts


def bandwidths(text: str, directory: Path) -> dict[str, float]:
    """Return bytes per second by tier: given as `device=3350,host=50,disk=5` in GB/s, or measured on this machine.

    That of the device is of reading its memory, those of host memory and disk of copies to and from it. `directory` is
    where the disk is measured. Raises InputError.
    """
    if text == MEASURED:
        return {**_measure_memory(), "disk": _measure_disk(directory)}
    found = {}
    for part in text.split(","):
        tier, _, number = part.partition("=")
        try:
            found[tier] = float(number) * _GB
        except ValueError:
            found[tier] = 0.0
        if tier not in TIERS or not 0 < found[tier] < float("inf"):
            remedy = f"write GB/s as device=3350,host=50,disk=5, or {MEASURED}"
            raise InputError("bandwidth", f"has the part {part!r}", remedy)
    return found


def _measure_memory() -> dict[str, float]:
    import numpy as np
    import torch

    if not torch.cuda.is_available():
        source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
        seconds = _fastest(lambda: np.copyto(target, source))
        return {"device": 2 * _COPY_BYTES / seconds, "host": _COPY_BYTES / seconds}
    pinned = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    own, other = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    inside, across = _fastest(lambda: copy(other, own)), _fastest(lambda: copy(own, pinned))
    return {"device": 2 * _COPY_BYTES / inside, "host": _COPY_BYTES / across}


def _measure_disk(directory: Path) -> float:
    """Return the speed of writing a file to the disk, or of reading it where that is slower."""
    data = os.urandom(_FILE_BYTES)
    with writing(directory / "bandwidth", _FILE_BYTES):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            began = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            written = time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):  # otherwise it would be read from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            file.read()
            return _FILE_BYTES / max(written, time.perf_counter() - began)


def _fastest(work: Callable[[], None]) -> float:
    work()  # touches all memory
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def step_seconds(speeds: dict[str, float], device_bytes: int, selected_bytes: int, home: str | None) -> list[float]:
    """Return the least time of a decode step, at best and at worst.

    It reads weights, states and pooled keys on the device, and the selected keys and values there too or, if their home
    is another tier, at worst there. Empty if a bandwidth is missing.
    """
    if "device" not in speeds or (home is not None and home not in speeds):
        return []
    best = (device_bytes + selected_bytes) / speeds["device"]
    worst = best if home is None else device_bytes / speeds["device"] + selected_bytes / speeds[home]
    return [best, worst]


def moving_seconds(speeds: dict[str, float], num_bytes: int) -> dict[str, float]:
    """Return the least time of copying a conversation down to each tier, or up again."""
    return {tier: num_bytes / speeds[tier] for tier in TIERS[1:] if tier in speeds}
