"""LoRA adapters: low-rank changes of a model's matrices, in the directories that PEFT writes; `fuse` merges them.

W' = W + scale * up @ down. An adapter is merged when the checkpoint is opened: the matrices that it changes are read as
plain ones in the precision of the model, computed in fp32 and rounded once. So a backend runs an adapter like any
checkpoint, at full speed, and a merged checkpoint on disk holds the same bytes.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from sala.checkpoint.arrays import Array, Floats, as_array, as_bytes, decode, encode
from sala.checkpoint.dtypes import FILE_DTYPES, FLOAT_DTYPES, NUMPY_DTYPES
from sala.checkpoint.matrices import QuantizedMatrices
from sala.checkpoint.names import check_tensors, expected_tensors, quantized_modules
from sala.checkpoint.packing import PACKED_PARTS
from sala.checkpoint.reader import Checkpoint, RawTensor, TensorInfo, read_file_header, read_tensors
from sala.checkpoint.writer import Spec, copy_companions, new_directory, spec_bytes, write_model
from sala.config import SalaConfig, own_file, read_json_object
from sala.errors import CheckpointError, InputError, ModelNotFound
from sala.quantization_config import Groups, matrix_modules

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
Note = Callable[[str, int, int], None]  # stage, done, total
_PIECE = 1 << 20  # weights merged at a time: they fit in a processor's cache
_THREADS = 4
_MAX_BYTES = 16 << 30
_REFUSED = {  # fields that change the arithmetic, and what they mean
    "use_dora": "DoRA", "use_qalora": "QA-LoRA", "use_bdlora": "BD-LoRA", "lora_bias": "a bias in the adapter",
    "layer_replication": "repeated layers", "modules_to_save": "whole modules that it replaces",
    "trainable_token_indices": "tokens that it trains", "target_parameters": "changes of bare parameters",
    "alora_invocation_tokens": "activation by tokens", "arrow_config": "routing", "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA", "megatron_config": "Megatron's layers", "fan_in_fan_out": "transposed weights",
}  # fmt: skip
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the base


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one matrix [out, in]: scale * up [out, r] @ down [r, in]."""

    up: Floats
    down: Floats
    scale: float

    def rows(self, begin: int, end: int) -> Floats:
        return np.float32(self.scale) * (self.up[begin:end] @ self.down)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The changes by module, and a fingerprint of them."""

    path: Path
    changes: Mapping[str, Change]
    fingerprint: str


def is_adapter(path: Path) -> bool:
    """Return whether a directory holds an adapter and no model."""
    return (path / CONFIG_FILE).is_file() and not (path / "config.json").is_file()


def base_of(path: Path) -> str | None:
    """Return the name of the base model that an adapter states, if it states one."""
    name = read_json_object(path / CONFIG_FILE).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def read_adapter(path: str | Path, config: SalaConfig) -> Adapter:
    """Read an adapter and check it against the model that it changes."""
    path = Path(path)
    if not (path / CONFIG_FILE).is_file():
        raise ModelNotFound(f"{path} has no {CONFIG_FILE}", "give the directory of a LoRA adapter")
    if not (path / WEIGHTS_FILE).is_file():
        if any(path.glob("adapter_model.bin")):
            raise CheckpointError(f"{path} has pickled weights, which can run code", "save it as safetensors")
        raise ModelNotFound(f"{path} has no {WEIGHTS_FILE}", "the adapter is incomplete")
    table = read_json_object(path / CONFIG_FILE)
    _check_kind(path, table)
    infos = read_file_header(own_file(path / WEIGHTS_FILE))[1]
    pairs = _pair(path, infos, config)
    raw = read_tensors(path / WEIGHTS_FILE, infos)
    changes = {module: _change(path, module, table, *(raw[name] for name in names)) for module, names in pairs.items()}
    digest = hashlib.sha256()
    for name, tensor in sorted(raw.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        digest.update(tensor.data)
    for module, change in sorted(changes.items()):
        digest.update(f"{module} {change.scale!r}".encode())
    return Adapter(path, MappingProxyType(changes), digest.hexdigest())


def _check_kind(path: Path, table: Mapping[str, Any]) -> None:
    where = path / CONFIG_FILE
    if table.get("peft_type") != "LORA":
        raise CheckpointError(f"{where} is of type {str(table.get('peft_type'))[:40]!r}", "only LORA can be read")
    for name, meaning in _REFUSED.items():
        if table.get(name):
            raise CheckpointError(f"{where} has {name}: {meaning}", "only plain LoRA can be read")
    if (bias := table.get("bias", "none")) != "none":
        raise CheckpointError(f"{where} has bias {str(bias)[:40]!r}", "only adapters without biases can be read")
    start = str(table.get("init_lora_weights")).lower()
    if start.startswith(_OTHER_BASES):
        message = f"{where} began as {start[:40]}, which changes the base weights"
        raise CheckpointError(message, "convert it to a plain adapter")


def _pair(path: Path, infos: Mapping[str, TensorInfo], config: SalaConfig) -> dict[str, tuple[str, str]]:
    """Return the names of (down, up) by module; raise if the file holds anything else or a shape does not fit."""
    if sum(info.nbytes for info in infos.values()) > _MAX_BYTES:
        raise CheckpointError(f"{path / WEIGHTS_FILE} is larger than {_MAX_BYTES >> 30} GiB", "is it an adapter?")
    shapes, known = expected_tensors(config), matrix_modules(config.mixers) - {"model.embed_tokens"}
    found: dict[str, dict[str, str]] = {}
    for name, info in infos.items():
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        module = match[1] if match else None
        if match is None or module not in known or f"{module}.weight" not in shapes:
            message = f"{path}: {name[:200]} does not belong to a linear of this model"
            raise CheckpointError(message, "it was made for another model")
        if info.dtype not in FLOAT_DTYPES or len(info.shape) != 2:
            raise CheckpointError(f"{path}: {name} is {info.dtype} {list(info.shape)}", "save the adapter again")
        if found.setdefault(match[1], {}).setdefault(match[2], name) != name:
            raise CheckpointError(f"{path}: {match[1]} is changed twice", "save the adapter again")
    if not found:
        raise CheckpointError(f"{path} changes nothing", "is it the right directory?")
    for module, parts in found.items():
        if set(parts) != {"A", "B"}:
            raise CheckpointError(f"{path}: {module} has only one of lora_A and lora_B", "the adapter is incomplete")
        (num_out, num_in), (rank, inner) = shapes[f"{module}.weight"], infos[parts["A"]].shape
        if inner != num_in or infos[parts["B"]].shape != (num_out, rank) or not rank:
            have = f"{list(infos[parts['B']].shape)} x {list(infos[parts['A']].shape)}"
            message = f"{path}: {module} is {[num_out, num_in]} in the model, and the adapter has {have}"
            raise CheckpointError(message, "it was made for another model")
    return {module: (parts["A"], parts["B"]) for module, parts in found.items()}


def _change(path: Path, module: str, table: Mapping[str, Any], down: RawTensor, up: RawTensor) -> Change:
    rank = _by_pattern(path, table, "rank_pattern", module, table.get("r"))
    alpha = _by_pattern(path, table, "alpha_pattern", module, table.get("lora_alpha"))
    if rank != down.shape[0]:
        raise CheckpointError(f"{path}: {module} has rank {down.shape[0]}, not {rank}", f"correct {CONFIG_FILE}")
    scale = alpha / rank**0.5 if table.get("use_rslora") else alpha / rank
    parts = [decode(as_array(part), part.dtype) for part in (up, down)]
    if not all(np.isfinite(part).all() for part in parts):
        raise CheckpointError(f"{path}: {module} has a value that is not finite", "its training diverged")
    return Change(parts[0], parts[1], scale)


def _by_pattern(path: Path, table: Mapping[str, Any], field: str, module: str, common: Any) -> float:
    """Return the value of the first pattern that matches a module, as PEFT looks it up, or else `common`."""
    patterns = table.get(field) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path / CONFIG_FILE}: {field} is not an object", "save the adapter again")
    value = common
    for pattern, own in patterns.items():
        if not re.fullmatch(r"\^?[\w.]+\$?", pattern):  # an arbitrary regular expression could run for years
            raise CheckpointError(f"{path / CONFIG_FILE}: {field} has {pattern[:60]!r}", "use plain module names")
        if re.fullmatch(rf"(.*\.)?({pattern})$", module):
            value = own
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 20:
        raise CheckpointError(f"{path / CONFIG_FILE}: {field} of {module} is {str(value)[:40]}", "it must be a number")
    return value


class MergedCheckpoint(Checkpoint):
    """A checkpoint with an adapter merged into it; `config` describes the tensors that it returns.

    Matrices that the adapter does not change are dequantized too if `expand` names them.
    """

    def __init__(
        self, path: str | Path, config: SalaConfig, adapter: Adapter | None,
        expand: Literal["none", "external", "all"] = "none",
    ) -> None:  # fmt: skip
        self._base = Checkpoint(path)
        check_tensors(self._base, config)
        self.path, self._origin, self._adapter = self._base.path, config, adapter
        self._matrices = QuantizedMatrices(self._base, config)
        self._changes: dict[str, Change | None] = {} if adapter is None else dict(adapter.changes)
        names: dict[str, Iterable[str]] = {"none": (), "external": self._matrices.external, "all": self._matrices}
        for name in names[expand]:
            if name != "lm_head" or not config.tie_word_embeddings:
                self._changes.setdefault(name)
        dtype, shapes = FILE_DTYPES[config.dtype], expected_tensors(config)
        gone = {part for module in self._changes for part in self._matrices.parts(module)}
        tensors = {name: info for name, info in self._base.tensors.items() if name not in gone}
        for name in (f"{module}.weight" for module in self._changes):
            tensors[name] = TensorInfo(dtype, shapes[name], self.path, 0, spec_bytes((dtype, shapes[name])))
        self.tensors = MappingProxyType(tensors)
        self.config = self._merged_config()

    def read(self, name: str) -> RawTensor:
        module = name.removesuffix(".weight")
        if module not in self._changes or name == module:
            return self._base.read(name)
        info = self.tensors[name]
        out = np.empty(info.shape, NUMPY_DTYPES[info.dtype])
        rows = self._matrices.rows(module)
        step = max(1, _PIECE // info.shape[1])
        change = self._changes[module]

        def merge(begin: int) -> None:
            end = min(begin + step, info.shape[0])
            values = rows(begin, end)
            values = values if change is None else values + change.rows(begin, end)
            if not np.isfinite(values).all():
                raise CheckpointError(f"{self.path}: {name} has a value that is not finite", "download it again")
            out[begin:end] = encode(values, info.dtype)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(merge, range(0, info.shape[0], step)))
        for part in self._matrices.parts(module):
            self._base.forget(part)
        return RawTensor(info.dtype, info.shape, as_bytes(out))

    def forget(self, name: str, begin: int = 0, end: int | None = None) -> None:
        if name.removesuffix(".weight") not in self._changes:
            self._base.forget(name, begin, end)

    def close(self) -> None:
        self._base.close()

    def fingerprint(self) -> str:
        """Return a hash of the base and the adapter, without merging them."""
        text = f"{self._base.fingerprint()} {self._adapter.fingerprint if self._adapter is not None else ''}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _merged_config(self) -> SalaConfig:
        """Return a configuration in which merged modules are not quantized."""
        quant = self._origin.quantization
        if quant is None:
            return self._origin
        left = set(self._matrices) - set(self._changes)
        if not left:
            return replace(self._origin, quantization=None)
        plain = {module: None for module in self._changes if module in self._matrices.groups}
        overrides: dict[str, Groups | None] = {**dict(quant.overrides), **plain}
        quant = quant if quant.layout is not None else replace(quant, overrides=tuple(overrides.items()))
        return replace(self._origin, quantization=quant)


def open_checkpoint(path: Path, config: SalaConfig, adapter: str | Path | None) -> tuple[Checkpoint, SalaConfig]:
    """Return a checkpoint, with an adapter merged into it if one is given, and its configuration."""
    if adapter is None:
        return Checkpoint(path), config
    merged = MergedCheckpoint(path, config, read_adapter(adapter, config))
    return merged, merged.config


def fuse(
    model: Path,
    adapter: Path | None,
    target: Path,
    dtype: str | None = None,
    is_whole: bool = False,
    note: Note = lambda stage, done, total: None,
) -> SalaConfig:
    """Write a model and its adapter as one checkpoint, visible only when complete; return its configuration.

    Modules that the adapter does not change stay as they are, quantized or not. All become plain with `is_whole`, or if
    the base is in an external format, in which single modules cannot be exempted.
    """
    if dtype is not None and dtype not in FILE_DTYPES:
        raise InputError("dtype", f"is {dtype!r}", "use " + ", ".join(FILE_DTYPES))
    config = SalaConfig.load(model)
    config = config if dtype is None else replace(config, dtype=dtype)
    changes = None if adapter is None else read_adapter(adapter, config)
    with MergedCheckpoint(model, config, changes, "all" if is_whole else "external") as merged:
        specs, done = _specs(merged, dtype), count()

        def read(name: str) -> memoryview:
            note("writing", next(done), len(specs))
            raw, wanted = merged.read(name), specs[name][0]
            return raw.data if raw.dtype == wanted else as_bytes(_convert(raw, wanted))

        with new_directory(target) as draft:
            write_model(draft, merged.config, specs, read)
            copy_companions(model, draft)
        note("writing", len(specs), len(specs))
        return merged.config


def _specs(merged: MergedCheckpoint, dtype: str | None) -> dict[str, Spec]:
    """Return precision and shape by name, in the order of the computation; a tied head is written once."""
    packed = quantized_modules(merged.tensors, merged.config)
    fixed = {f"{module}.{part}" for module in packed for part in PACKED_PARTS}
    specs: dict[str, Spec] = {}
    for name in expected_tensors(merged.config, packed):
        info = merged.tensors[name]
        own = FILE_DTYPES[dtype] if dtype is not None and info.dtype in FLOAT_DTYPES else info.dtype
        specs[name] = (info.dtype if name in fixed else own, info.shape)
    return specs


def _convert(raw: RawTensor, dtype: str) -> Array:
    values = as_array(raw).reshape(-1)
    out = np.empty(len(values), NUMPY_DTYPES[dtype])
    for begin in range(0, len(values), _PIECE):
        piece = slice(begin, begin + _PIECE)
        out[piece] = encode(decode(values[piece], raw.dtype), dtype)
    return out
