"""Modules of models/smol-sala, which are scripts beside their data and not part of the package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DIRECTORY = Path(__file__).parents[1] / "models" / "smol-sala"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"smol_sala_{name}", DIRECTORY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


compose, pack, rules = load("compose"), load("pack"), load("rules")
