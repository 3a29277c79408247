"""Shared fixtures: golden checkpoints and a tiny random one with tokenizer and chat template."""

import os
import signal
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton asks when it is imported, by whoever comes first

from sala.checkpoint.random import TINY, write_random
from tests import pins

DATA = Path(__file__).parent / "data"
PINS = pytest.StashKey[pins.Process]()
torch.set_num_threads(1)  # the models are tiny: threads only get in each other's way
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # begun by a shell in the background, which children would inherit: tests of Ctrl-C could not press it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """In a run of all tests, resolve the pins beside the others."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput"):
        config.stash[PINS] = pins.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the test that waits for the pins last."""
    items.sort(key=lambda item: item.name == "test_every_extra_resolves_on_the_public_index")


def pytest_unconfigure(config: pytest.Config) -> None:
    if process := config.stash.get(PINS, None):
        pins.stop(process)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_random(path, TINY)
    return path
