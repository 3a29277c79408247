"""Assemble an ordinary checkpoint from a base model and an overlay, which holds what its conversion changed.

An overlay holds, per module, one of three things:

- `{module}`: the whole matrix, packed (gates, which the base does not have);
- `{module}.change`: the packed difference from the base's matrix, W = W_base + change (mixers);
- `{module}.up` and `{module}.down`: a packed low-rank difference, W = W_base + up @ down (MLPs).

Norms are stored plain. A matrix for which the overlay holds nothing is the base's. The overlay of smol-sala 0.4
stores the mixers as whole matrices; both forms can be read.
"""

import lzma
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sala.checkpoint.arrays import Floats, as_array, as_bytes
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.packing import PACKED_PARTS, Packed, dequantize, pack, packed_specs, quantize, read_packed, unpack
from sala.checkpoint.reader import RawTensor, read_file_header, read_tensors
from sala.checkpoint.writer import Spec, write_model
from sala.config import SalaConfig
from sala.errors import CheckpointError
from sala.quantization_config import Groups, QuantConfig

CHANGE_GROUPS = Groups(8, 64)  # of the thin matrices of a low-rank change
MLP_GROUPS = Groups(8, 32)  # of a changed MLP in the assembled checkpoint: nothing measurable is lost
MIXER_BITS = 8  # of a changed mixer in the assembled checkpoint
GATES = (".z_proj", ".o_gate")  # mixer matrices that the base does not have
_KV_PROJECTIONS = ("k_proj", "v_proj")
_FAST_BITS = (4, 8)  # widths that are computed with as they are


@dataclass(frozen=True, slots=True)
class OverlayPacking:
    """Bits of the mixers' changes and of their gates, the group size of both, and the rank of the MLPs' changes."""

    bits: int = 4
    gate_bits: int = 5
    group_size: int = 64
    rank: int = 56


class Base(Protocol):
    """The source of unchanged tensors: by name, packed if they are stored packed."""

    def read(self, name: str) -> Floats: ...
    def read_packed(self, name: str) -> Packed | None: ...


def overlay_files(directory: Path) -> list[Path]:
    """Return the files of an overlay, which may be compressed."""
    return sorted(
        file for file in directory.glob("overlay-*") if file.name.endswith((".safetensors", ".safetensors.xz"))
    )


def _decompress(file: Path, room: Path) -> Path:
    plain = room / file.stem
    try:
        plain.write_bytes(lzma.decompress(file.read_bytes()))
    except (lzma.LZMAError, EOFError):
        raise CheckpointError(f"{file} is damaged", "install the package again") from None
    return plain


def read_overlay(directory: Path, quantization: QuantConfig) -> tuple[dict[str, Packed], dict[str, Floats]]:
    """Return packed matrices by module and plain tensors by name; `quantization` is the overlay's own."""
    files = overlay_files(directory)
    if not files:
        raise CheckpointError(f"{directory} holds no overlay", "install the package again")
    raw: dict[str, RawTensor] = {}
    with tempfile.TemporaryDirectory() as room:
        for file in files:
            plain = _decompress(file, Path(room)) if file.suffix == ".xz" else file
            raw |= read_tensors(plain, read_file_header(plain)[1])
    modules = {}
    for module in [name.removesuffix(".scales") for name in raw if name.endswith(".scales")]:
        is_thin = module.endswith((".up", ".down"))
        groups = CHANGE_GROUPS if is_thin else quantization.of(module.removesuffix(".change"))
        packed = None if groups is None else read_packed(raw.__getitem__, module, groups)
        if packed is None or packed.scales.shape[1] * packed.group_size != packed.shape[1]:
            message = f"{module} of the overlay does not have the bits that config.json says"
            raise CheckpointError(message, "install it again")
        modules[module] = packed
    parts = {f"{module}.{part}" for module in modules for part in PACKED_PARTS}
    return modules, {name: as_array(tensor) for name, tensor in raw.items() if name not in parts}


def base_matrix(config: SalaConfig, base: Base, module: str) -> Floats:
    """Return the base's matrix in the shape that conversion gave `module` of the hybrid.

    Lightning layers have a key and value head per query head: the base's heads are repeated. Attention layers have a
    gate that begins half open: the base's output projection is doubled.
    """
    weight = base.read(f"{module}.weight")
    layer, name = int(module.split(".")[2]), module.rpartition(".")[2]
    if layer in config.lightning_layers:
        shared = config.lightning_nkv * config.lightning_head_dim // weight.shape[0] if name in _KV_PROJECTIONS else 1
        heads = weight.reshape(-1, config.lightning_head_dim, weight.shape[1])
        return heads.repeat(shared, 0).reshape(-1, weight.shape[1]) if shared > 1 else weight
    return weight * np.float32(2) if name == "o_proj" and config.attn_use_output_gate else weight


def assemble(draft: Path, config: SalaConfig, base: Base, overlay: Path) -> SalaConfig:
    """Write the weights and the configuration of an ordinary checkpoint into `draft`; return the configuration."""
    assert config.quantization is not None
    modules, plain = read_overlay(overlay, config.quantization)
    specs: dict[str, Spec] = {}
    packed: dict[str, Groups] = {}
    arrays: dict[str, Any] = {}
    for name in expected_tensors(replace(config, quantization=None)):
        module = name.removesuffix(".weight")
        matrix = _matrix(module, modules, config, base) if name not in plain else None
        if matrix is None:
            arrays[name] = plain[name] if name in plain else base.read(name)
            specs[name] = ("F32", arrays[name].shape)
        else:
            packed[module] = Groups(matrix.bits, matrix.group_size)
            specs |= packed_specs(module, matrix)
            arrays |= {f"{module}.{part}": getattr(matrix, field) for part, field in PACKED_PARTS.items()}
    config = replace(config, quantization=QuantConfig.of_modules(packed))
    write_model(draft, config, specs, lambda name: as_bytes(arrays[name]))
    return config


def _matrix(module: str, modules: Mapping[str, Packed], config: SalaConfig, base: Base) -> Packed | None:
    if module in modules:
        return widen(modules[module])
    if f"{module}.change" in modules:
        change = modules[f"{module}.change"]
        return quantize(base_matrix(config, base, module) + dequantize(change), MIXER_BITS, change.group_size, "F16")
    if f"{module}.up" in modules:
        up, down = (dequantize(modules[f"{module}.{half}"]) for half in ("up", "down"))
        return quantize(base.read(f"{module}.weight") + up.T @ down, MLP_GROUPS.bits, MLP_GROUPS.group_size, "F16")
    return base.read_packed(f"{module}.weight")


def widen(packed: Packed) -> Packed:
    """Return the same matrix with codes of a width that kernels compute with; the values stay the same."""
    if packed.bits in _FAST_BITS:
        return packed
    codes = pack(unpack(packed.codes, packed.bits, packed.shape[1]), 8)
    return replace(packed, codes=codes, bits=8)
