"""The table of backends. Each module offers `open_executor(checkpoint, config, options)`."""

from importlib import import_module
from typing import TYPE_CHECKING

from sala.errors import InputError
from sala.protocol import Executor, Options

if TYPE_CHECKING:
    from sala.checkpoint.reader import Checkpoint
    from sala.config import SalaConfig

BACKENDS = {"torch": "sala.backends.torch.executor"}


def open_executor(backend: str, checkpoint: "Checkpoint", config: "SalaConfig", options: Options) -> Executor:
    """Load the weights of `checkpoint` into the backend of that name; `auto` takes the best one present."""
    name = "torch" if backend == "auto" else backend
    if name not in BACKENDS:
        raise InputError("backend", f"is {backend!r}", "known backends: auto, " + ", ".join(BACKENDS))
    executor: Executor = import_module(BACKENDS[name]).open_executor(checkpoint, config, options)
    return executor
