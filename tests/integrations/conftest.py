"""Trainers of others as people install them, each in an environment of its own, with this package beside them.

They take minutes: `SALA_TEST_FINETUNE=1` asks for them; a directory instead of 1 keeps the environments.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from sala.checkpoint.random import TINY, write_random
from tests.clients.conftest import PIP, Environment, _try

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "finetune"
PROGRAMS = Path(__file__).parent / "programs"
WANTED = os.environ.get("SALA_TEST_FINETUNE", "0")
# What torch depends on changes from version to version; the one at hand is known to be there.
TORCH = "torch==" + version("torch").split("+")[0]


@dataclass(frozen=True)
class Recipe:
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()  # installed without what they depend on
    stubs: tuple[str, ...] = ()  # modules that are imported and never used


RECIPES = {
    "trl": Recipe(("trl==1.16.0", "transformers==5.22.2", "peft==0.21.2", "accelerate==1.15.0", "datasets>=3")),
    "deepspeed": Recipe(
        ("transformers==5.22.2", "peft==0.21.2", "accelerate==1.15.0", "datasets>=3", "setuptools", "wheel"),
        alone=("hjson", "py-cpuinfo", "ninja", "einops", "msgpack", "deepspeed==0.19.8"),
    ),
    # It wants torchvision, torchaudio and gradio, for pictures, sound and a web page.
    "llamafactory": Recipe(
        (
            *("transformers==5.6.0", "peft==0.18.1", "trl<=0.24.0", "accelerate<=1.11.0", "datasets<=4.0.0", "einops"),
            *("fire", "omegaconf", "pandas", "scipy", "av<=16.0.0", "tyro<0.9.0", "sentencepiece", "tiktoken"),
            *("sse-starlette", "fastapi", "uvicorn", "matplotlib", "modelscope", "torchdata>=0.10.0,<=0.11.0"),
            *("protobuf", "hf-transfer"),
        ),
        alone=("llamafactory==0.9.5",),
        stubs=("torchaudio",),
    ),
}


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], Environment]:
    """The environment of a recipe; skips if it is not asked for or cannot be had."""
    if WANTED in ("", "0"):
        pytest.skip("set SALA_TEST_FINETUNE=1 for the trainers of others")
    base = tmp_path_factory.getbasetemp()
    room = base if worker_id == "master" else base.parent
    if WANTED != "1":
        room = Path(WANTED).expanduser().resolve()

    def make(name: str) -> Environment:
        folder = room / name
        with FileLock(f"{folder}.lock"):
            if not (folder / "installed").exists():
                _install(folder, RECIPES[name])
                (folder / "installed").touch()
        return Environment(folder, str(folder / "bin"))

    return make


def _install(folder: Path, recipe: Recipe) -> None:
    _try([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
    pip = [*PIP, "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-compile"]
    _try([*pip, TORCH, *recipe.packages])
    if recipe.alone:
        _try([*pip, "--no-deps", "--no-build-isolation", *recipe.alone])
    _try([*pip, TORCH, *recipe.packages, "--editable", str(ROOT)])
    for stub in recipe.stubs:
        (next(folder.glob("lib/python*/site-packages")) / f"{stub}.py").touch()


@pytest.fixture(scope="session")
def pupil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can be taught."""
    path = tmp_path_factory.mktemp("models") / "pupil"
    write_random(path, TINY)
    return path


def history(run: Path, name: str = "loss") -> list[float]:
    """What a run of transformers' Trainer wrote down about one number, in the order of the steps."""
    state = next(
        file for file in (run / "trainer_state.json", *run.glob("checkpoint-*/trainer_state.json")) if file.exists()
    )
    entries: list[dict[str, Any]] = json.loads(state.read_text())["log_history"]
    return [float(entry[name]) for entry in entries if name in entry]
