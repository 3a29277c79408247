"""Word lists and wordings of the tasks, as TOML files. Seeded cases depend on the order of their entries."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def read_data(name: str) -> dict[str, Any]:
    """Return the content of NAME.toml; it is read once."""
    return tomllib.loads((files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))
