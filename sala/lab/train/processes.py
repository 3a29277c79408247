"""Several processes on one recipe, as `accelerate launch` starts them: all train, the first one writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from sala.backends.torch.loader import pick_device
from sala.errors import MissingExtra

PATIENCE = timedelta(days=2)  # the others wait while the first one writes text or measures layers


def init_process(device: str) -> torch.device:
    """The device of this process, which joins the others if there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return pick_device(device)
    try:
        from accelerate import PartialState
    except ImportError:
        raise MissingExtra("accelerate", "train") from None
    here: torch.device = PartialState(cpu=device == "cpu", timeout=PATIENCE).device
    return here


def destroy_process() -> None:
    """Part from the others: a process that ends while threads still wait for them is aborted."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def is_main_process() -> bool:
    return not _are_many() or distributed.get_rank() == 0


def barrier() -> None:
    """Until every process is here."""
    if _are_many():
        distributed.barrier()


@contextmanager
def main_process_first() -> Iterator[None]:
    """The first process goes through the block alone, the others after it: they find what it left on disk."""
    if not is_main_process():
        barrier()
    yield
    if is_main_process():
        barrier()


def any_process(is_so: bool, device: torch.device) -> bool:
    """Whether it is so for any of the processes."""
    if not _are_many():
        return is_so
    flag = torch.tensor(float(is_so), device=device)
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return bool(flag > 0)


def gather_parameters(model: nn.Module) -> None:
    """Weights that are spread over the processes become whole again, in every one of them; tied ones stay tied."""
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(parameter, DTensor):
            if parameter not in whole:
                whole[parameter] = nn.Parameter(DTensor.full_tensor(parameter).detach())
            place, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(place), leaf, whole[parameter])


def _are_many() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
