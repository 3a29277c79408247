"""Several processes on one recipe, as `accelerate launch` starts them: all train, the main process writes."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from sala.backends.torch.loader import pick_device
from sala.errors import MissingExtra

TIMEOUT = timedelta(days=2)  # the others wait while the main process samples text or measures layers


def init_process(device: str) -> torch.device:
    """Return the device of this process, after joining the process group if there is one."""
    if num_processes() == 1:
        return pick_device(device)
    try:
        from accelerate import PartialState
    except ImportError:
        raise MissingExtra("accelerate", "train") from None
    local_device: torch.device = PartialState(cpu=device == "cpu", timeout=TIMEOUT).device
    return local_device


def destroy_process() -> None:
    """Leave the process group."""
    if _are_many():
        distributed.barrier()
        distributed.destroy_process_group()


def exit_process(code: int) -> NoReturn:
    """End this process; one of several ends without shutting the interpreter down.

    The threads of a process group outlive it. One that still releases a tensor asks for the interpreter, and if that is
    shutting down, the process aborts although its work is done.
    """
    if num_processes() == 1:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this process reports and writes; launchers set RANK in the environment."""
    return int(os.environ.get("RANK", "0")) == 0


def barrier() -> None:
    """Wait until every process has reached this call."""
    if _are_many():
        distributed.barrier()


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block in the main process first, then in the others, which find its files on disk."""
    if not is_main_process():
        barrier()
    yield
    if is_main_process():
        barrier()


def any_process(is_so: bool, device: torch.device) -> bool:
    """Return whether `is_so` is true in any process."""
    if not _are_many():
        return is_so
    flag = torch.tensor(float(is_so), device=device)
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return bool(flag > 0)


def gather_parameters(model: nn.Module) -> None:
    """Replace sharded parameters by whole ones in every process; tied parameters stay tied."""
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(parameter, DTensor):
            if parameter not in whole:
                whole[parameter] = nn.Parameter(DTensor.full_tensor(parameter).detach())
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, whole[parameter])


def _are_many() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
