"""MiniCPM-SALA on your machine.

Importing this package is free: the names that `__init__.pyi` lists are loaded when first used.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {name.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sala' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
