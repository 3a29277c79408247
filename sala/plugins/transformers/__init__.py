"""SALA as a model of transformers: `AutoModelForCausalLM.from_pretrained(...)` after `sala.register()`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sala.errors import MissingExtra
from sala.plugins import versions

_HOMES = {
    "SalaHfConfig": "config",
    "SalaCache": "cache",
    "SalaDecoder": "model",
    "SalaForCausalLM": "model",
    "load": "loading",
    "register": "model",
}

__all__ = list(_HOMES)

if TYPE_CHECKING:
    from sala.plugins.transformers.cache import SalaCache as SalaCache
    from sala.plugins.transformers.config import SalaHfConfig as SalaHfConfig
    from sala.plugins.transformers.loading import load as load
    from sala.plugins.transformers.model import SalaDecoder as SalaDecoder
    from sala.plugins.transformers.model import SalaForCausalLM as SalaForCausalLM
    from sala.plugins.transformers.model import register as register


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    version = versions.TRANSFORMERS.installed()
    if version is not None:
        versions.check(versions.TRANSFORMERS, version)
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtra("transformers", "train") from None
