"""LLaMA-Factory with SALA models: its commands, in processes where the model is registered, without remote code.

`python -m sala.plugins.llamafactory train FILE.yaml` does what `llamafactory-cli train FILE.yaml` does. `sala
llamafactory train FILE.yaml`, which torchrun starts in each process too, also measures recall before and after.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sala.errors import InputError, SalaError

# command: module and function of LLaMA-Factory
COMMANDS = {
    "train": ("llamafactory.train.tuner", "run_exp"),
    "export": ("llamafactory.train.tuner", "export_model"),
    "chat": ("llamafactory.chat.chat_model", "run_chat"),
    "api": ("llamafactory.api.app", "run_api"),
}


def launch(command: str, arguments: Sequence[str], make_callbacks: Callable[[], list[Any]] | None = None) -> int:
    """Run a command of LLaMA-Factory with a YAML file and `key=value` overrides; return its exit code.

    `make_callbacks` returns further callbacks of its Trainer.
    """
    if command not in COMMANDS:
        raise InputError("command", f"is {command!r}", f"choose one of {', '.join(COMMANDS)}")
    if find_spec("llamafactory") is None:
        raise SalaError("LLaMA-Factory is not installed", "run: pip install llamafactory==0.9.5")
    if command == "train" and needs_processes(os.environ, _count_devices):
        return subprocess.run(torchrun(os.environ, _count_devices(), arguments), check=False).returncode
    from sala.plugins.transformers import register

    register()
    place, name = COMMANDS[command]
    sys.argv = [f"llamafactory-cli {command}", *arguments]  # LLaMA-Factory reads its arguments from here
    run = getattr(import_module(place), name)
    if command == "train" and make_callbacks is not None:
        run(callbacks=make_callbacks())
    else:
        run()
    return 0


def needs_processes(environment: Mapping[str, str], count_devices: Callable[[], int]) -> bool:
    """Return whether training must start several processes: for several GPUs, or because of FORCE_TORCHRUN."""
    if "LOCAL_RANK" in environment:
        return False  # this is one of the processes
    return environment.get("FORCE_TORCHRUN", "0").lower() in ("1", "true", "yes", "y") or count_devices() > 1


def torchrun(environment: Mapping[str, str], num_devices: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts this module in every process, by the variables that LLaMA-Factory reads."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", environment.get("NNODES", "1")),
        *("--node-rank", environment.get("NODE_RANK", "0")),
        *("--nproc-per-node", environment.get("NPROC_PER_NODE", str(max(1, num_devices)))),
        *("--master-addr", environment.get("MASTER_ADDR", "127.0.0.1")),
        *("--master-port", environment.get("MASTER_PORT") or str(_find_port())),
        *("-m", "sala", "llamafactory", "train", *arguments),
    ]


def _count_devices() -> int:
    import torch

    return torch.cuda.device_count()


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int | str:
    try:
        return launch("".join(sys.argv[1:2]), sys.argv[2:])
    except SalaError as error:
        return f"sala: {error}"


if __name__ == "__main__":
    sys.exit(main())
