"""Waits for transformers and mlx-lm, so that they know our model without anybody asking.

`import sala` must stay free: nothing is imported here. When one of them loads a table of models, ours is added to it;
if it was loaded before, that happens at once.
"""

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HOME = "sala.plugins.transformers.registration"
_TABLES = {
    "transformers.models.auto.configuration_auto": (_HOME, "register_config"),
    "transformers.models.auto.modeling_auto": (_HOME, "register_models"),
    "transformers.models.auto.tokenization_auto": (_HOME, "register_tokenizer"),
    "mlx_lm.utils": ("sala.plugins.mlx_lm", "register"),
}


def expect() -> None:
    """Register with what is loaded already, and wait for the rest."""
    for name in _TABLES:
        if name in sys.modules:
            _greet(name)
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


class _Watcher:
    """Finds nothing by itself: it only adds a step to the loading of the tables."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _TABLES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _greet(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _greet(name: str) -> None:
    try:
        home, function = _TABLES[name]
        getattr(import_module(home), function)()
    except Exception as error:  # another program's import must not fail for our sake
        warnings.warn(f"sala could not register its model with {name.partition('.')[0]}: {error}", stacklevel=2)
