"""Write a model and its adapter as one checkpoint, tensor by tensor; it is visible only when complete."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sala.checkpoint.arrays import Array, as_array, as_bytes, decode, encode
from sala.checkpoint.dtypes import FILE_DTYPES, FLOAT_DTYPES, NUMPY_DTYPES
from sala.checkpoint.lora import MergedCheckpoint, read_adapter
from sala.checkpoint.names import expected_tensors, external_modules, quantized_modules
from sala.checkpoint.reader import Checkpoint, RawTensor
from sala.checkpoint.writer import Spec, copy_companions, new_directory, write_text, write_weights
from sala.config import SalaConfig
from sala.errors import InputError

_PIECE = 1 << 22

Note = Callable[[str, int, int], None]  # stage, done, total


def fuse(
    model: Path,
    adapter: Path | None,
    target: Path,
    dtype: str | None = None,
    is_whole: bool = False,
    note: Note = lambda stage, done, total: None,
) -> SalaConfig:
    """Write the merged checkpoint and return its configuration.

    Modules that the adapter does not change stay as they are, quantized or not. All become plain with `is_whole`, or if
    the base is in an external format, in which single modules cannot be exempted.
    """
    if dtype is not None and dtype not in FILE_DTYPES:
        raise InputError("dtype", f"is {dtype!r}", "use " + ", ".join(FILE_DTYPES))
    config = SalaConfig.load(model)
    config = config if dtype is None else replace(config, dtype=dtype)
    changes = None if adapter is None else read_adapter(adapter, config)
    with MergedCheckpoint(model, config, changes, _to_expand(model, config, is_whole)) as merged:
        specs = _specs(merged, dtype)
        done = 0

        def read(name: str) -> memoryview:
            nonlocal done
            note("writing", done, len(specs))
            done += 1
            raw = merged.read(name)
            wanted = specs[name][0]
            return raw.data if raw.dtype == wanted else as_bytes(_convert(raw, wanted))

        with new_directory(target) as draft:
            write_weights(draft, specs, read)
            write_text(draft / "config.json", json.dumps(merged.config.to_dict(), indent=2) + "\n")
            copy_companions(model, draft)
        note("writing", len(specs), len(specs))
        return merged.config


def _to_expand(model: Path, config: SalaConfig, is_whole: bool) -> list[str]:
    with Checkpoint(model) as checkpoint:
        external = external_modules(checkpoint.tensors, config)
        packed = quantized_modules(checkpoint.tensors, config)
    names = [*external, *(packed if is_whole else ())]
    hidden = {"lm_head"} if config.tie_word_embeddings else set()
    return [name for name in dict.fromkeys(names) if name not in hidden]


def _specs(merged: MergedCheckpoint, dtype: str | None) -> dict[str, Spec]:
    """Return precision and shape by name, in the order of the computation; a tied head is written once."""
    packed = quantized_modules(merged.tensors, merged.config)
    wanted = FILE_DTYPES[dtype] if dtype is not None else None
    codes = {f"{module}.{part}" for module in packed for part in ("weight", "scales", "biases")}
    specs: dict[str, Spec] = {}
    for name in expected_tensors(merged.config, packed):
        info = merged.tensors[name]
        is_free = wanted is not None and info.dtype in FLOAT_DTYPES and name not in codes
        specs[name] = (wanted if is_free and wanted is not None else info.dtype, info.shape)
    return specs


def _convert(raw: RawTensor, dtype: str) -> Array:
    values = as_array(raw).reshape(-1)
    out = np.empty(len(values), NUMPY_DTYPES[dtype])
    for begin in range(0, len(values), _PIECE):
        piece = slice(begin, begin + _PIECE)
        out[piece] = encode(decode(values[piece], raw.dtype), dtype)
    return out
