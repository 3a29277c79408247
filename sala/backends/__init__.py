"""The table of backends. Each module offers `open_executor(checkpoint, config, options)`."""

import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sala.checkpoint.dtypes import FILE_DTYPES
from sala.errors import InputError, MissingExtra
from sala.protocol import Executor, Options

if TYPE_CHECKING:
    from sala.checkpoint.lora import Adapter
    from sala.checkpoint.reader import Checkpoint
    from sala.config import SalaConfig

BACKENDS = {"torch": "sala.backends.torch.executor", "mlx": "sala.backends.mlx.executor"}
_WITH_ADAPTERS = ("torch",)
_MLX_DEVICES = ("auto", "gpu", "mps")  # those of a Mac's GPU; on a CPU torch is faster


def pick_backend(name: str, device: str = "auto") -> str:
    """Return the backend of that name; `auto` is MLX on Apple Silicon where it is installed, else torch."""
    if name == "auto":
        is_apple = platform.system() == "Darwin" and platform.machine() == "arm64"
        has_mlx = find_spec("mlx") is not None and find_spec("mlx.core") is not None
        return "mlx" if is_apple and has_mlx and device in _MLX_DEVICES else "torch"
    if name not in BACKENDS:
        raise InputError("backend", f"is {name!r}", "known backends: auto, " + ", ".join(BACKENDS))
    return name


def pick_dtype_name(name: str, config: "SalaConfig") -> str:
    """Return the precision in which a model is computed; `auto` is that of the checkpoint."""
    wanted = config.dtype if name == "auto" else name
    if wanted not in FILE_DTYPES:
        raise InputError("dtype", f"is {name!r}", "use auto, " + ", ".join(FILE_DTYPES))
    return wanted


def name_device(backend: str, device: str) -> str:
    """Return the device on which a model would run, in words."""
    name = pick_backend(backend, device)
    found = _module(f"sala.backends.{name}.loader").pick_device(device)
    return str(found) if name == "torch" else f"{name} {found.type.name}"


def open_executor(
    backend: str,
    checkpoint: "Checkpoint",
    config: "SalaConfig",
    options: Options,
    adapters: "Sequence[Adapter]" = (),
) -> Executor:
    """Load the weights of `checkpoint` into the backend of that name; `auto` takes the best one present.

    Rows may name the fingerprints of `adapters`.
    """
    name = pick_backend(backend, options.device)
    if adapters and name not in _WITH_ADAPTERS:
        remedy = "merge one: --adapter PATH without a name, or use --backend torch"
        raise InputError("adapter", f"has a name, and {name} cannot use adapters by request", remedy)
    more = [adapters] if adapters else []
    if "torch" not in sys.modules:
        wait_passively(options.threads)
    executor: Executor = _module(BACKENDS[name]).open_executor(checkpoint, config, options, *more)
    return executor


def wait_passively(threads: int | None) -> None:
    """Let idle CPU threads sleep instead of spin; they would take the core of another process.

    OpenMP reads these variables when it is loaded, that is, before torch is imported; what the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _module(name: str) -> Any:
    if ".mlx." in name and find_spec("mlx") is None:
        raise MissingExtra("mlx", "mlx")
    return import_module(name)
