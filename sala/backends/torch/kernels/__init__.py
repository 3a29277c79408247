"""Fast implementations of the references in `ops/`. None of them is needed for a correct answer."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a module of kernels when it is first used: most of them need Triton, which may be missing."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
