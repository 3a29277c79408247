"""Export for `trust_remote_code=True`: plain weights and two small files that import this package."""

import shutil
from pathlib import Path

from sala.checkpoint.lora import Note, fuse
from sala.checkpoint.writer import new_directory, write_json, write_text
from sala.config import SalaConfig
from sala.plugins import LAYER_TYPES

AUTO_MAP = {
    "AutoConfig": "configuration_sala.SalaHfConfig",
    "AutoModel": "modeling_sala.SalaDecoder",
    "AutoModelForCausalLM": "modeling_sala.SalaForCausalLM",
}
# They import inside `try`: otherwise transformers would tell users to install an unrelated package named `sala`.
_CODE = Path(__file__).parent / "remote_code"


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
        types = [LAYER_TYPES[mixer] for mixer in config.mixers]
        values = {**config.to_dict(), "layer_types": types, "auto_map": AUTO_MAP}
        write_json(draft / "config.json", values)
        for file in _CODE.glob("*.py.txt"):
            write_text(draft / file.stem, file.read_text(encoding="utf-8"))
    return config
