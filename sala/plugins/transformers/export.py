"""Export for `trust_remote_code=True`: plain weights and two small files that import this package."""

import json
import shutil
from pathlib import Path
from typing import Any

from sala.checkpoint.lora import Note, fuse
from sala.checkpoint.writer import new_directory, write_text
from sala.config import SalaConfig
from sala.plugins.transformers.names import LAYER_TYPES

AUTO_MAP = {
    "AutoConfig": "configuration_sala.SalaHfConfig",
    "AutoModel": "modeling_sala.SalaDecoder",
    "AutoModelForCausalLM": "modeling_sala.SalaForCausalLM",
}
# Imports stand under `try`: otherwise transformers would advise to install the unrelated package `sala`.
_CONFIGURATION = '''\
"""The configuration of MiniCPM-SALA; the package minicpm-sala holds it."""

try:
    from sala.plugins.transformers import SalaHfConfig as Config
except ImportError:
    raise ImportError("this model needs the package minicpm-sala: install it from its repository") from None


class SalaHfConfig(Config):
    def __init__(self, **values):
        super().__init__(**values)
'''
_MODEL = '''\
"""MiniCPM-SALA; the package minicpm-sala holds it."""

from .configuration_sala import SalaHfConfig

try:
    from sala.plugins.transformers import SalaDecoder as Decoder
    from sala.plugins.transformers import SalaForCausalLM as ForCausalLM
except ImportError:
    raise ImportError("this model needs the package minicpm-sala: install it from its repository") from None


class SalaDecoder(Decoder):
    config_class = SalaHfConfig


class SalaForCausalLM(ForCausalLM):
    config_class = SalaHfConfig
'''


def export(
    model: Path,
    target: Path,
    adapter: Path | None = None,
    dtype: str | None = None,
    note: Note = lambda stage, done, total: None,
) -> SalaConfig:
    """Write the directory, with an adapter merged in if one is given; it appears when it is complete."""
    with new_directory(target) as draft:
        config = fuse(model, adapter, draft / "model", dtype, is_whole=True, note=note)
        for file in sorted((draft / "model").iterdir()):
            if file.name != "config.json":
                file.rename(draft / file.name)
        shutil.rmtree(draft / "model")
        write_text(draft / "config.json", json.dumps(describe(config), indent=2) + "\n")
        write_text(draft / "configuration_sala.py", _CONFIGURATION)
        write_text(draft / "modeling_sala.py", _MODEL)
    return config


def describe(config: SalaConfig) -> dict[str, Any]:
    """Return `config.json` with the layer types that transformers knows and the place of the code."""
    types = [LAYER_TYPES[mixer] for mixer in config.mixers]
    return {**config.to_dict(), "layer_types": types, "auto_map": AUTO_MAP}
