"""A model that is mostly another one: what is new lies in an overlay, the rest comes from a base when it is needed.

An overlay's tensors are new mixers (packed), norms (plain), and changes of the MLPs as two thin packed matrices each:
W = W_base + up @ down. `assemble` puts base and overlay together into an ordinary checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sala.checkpoint.arrays import Floats, as_array, as_bytes
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.packing import PACKED_PARTS, Packed, dequantize, pack, packed_specs, quantize, unpack
from sala.checkpoint.reader import RawTensor, read_file_header, read_tensors
from sala.checkpoint.writer import Spec, plan_shards, write_file, write_weights
from sala.config import SalaConfig
from sala.errors import CheckpointError
from sala.quantization_config import Groups, QuantConfig

CHANGE_GROUPS = Groups(8, 64)
MLP_GROUPS = Groups(8, 32)  # how a changed MLP is stored: fine enough that nothing measurable is lost
_FAST_BITS = (4, 8)  # widths that are computed with as they are


class Base(Protocol):
    """Where the unchanged part comes from: tensors by name, packed if they are stored so."""

    def read(self, name: str) -> Floats: ...
    def read_packed(self, name: str) -> Packed | None: ...


def write_overlay(
    directory: Path, modules: Mapping[str, Packed], norms: Mapping[str, Floats], file_bytes: int = 16_000_000
) -> None:
    """Files `overlay-N.safetensors`, none larger than `file_bytes`."""
    specs: dict[str, Spec] = {name: ("F32", norm.shape) for name, norm in norms.items()}
    arrays: dict[str, Any] = dict(norms)
    for module, packed in modules.items():
        specs |= packed_specs(module, packed)
        arrays |= {f"{module}.{part}": getattr(packed, field) for part, field in PACKED_PARTS.items()}
    for number, names in enumerate(plan_shards(specs, file_bytes), 1):
        file = directory / f"overlay-{number}.safetensors"
        write_file(file, {name: specs[name] for name in names}, lambda name: as_bytes(arrays[name]), {})


def read_overlay(directory: Path, quantization: QuantConfig) -> tuple[dict[str, Packed], dict[str, Floats]]:
    """Packed matrices by module, and plain tensors by name; `quantization` is the overlay's own."""
    files = sorted(directory.glob("overlay-*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no overlay", "install the package again")
    raw: dict[str, RawTensor] = {}
    for file in files:
        raw |= read_tensors(file, read_file_header(file)[1])
    arrays = {name: as_array(tensor) for name, tensor in raw.items()}
    modules = {}
    for name in [name for name in arrays if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        groups = CHANGE_GROUPS if module.endswith((".up", ".down")) else quantization.of(module)
        modules[module] = _packed(module, arrays, groups)
    parts = {f"{module}.{part}" for module in modules for part in PACKED_PARTS}
    return modules, {name: array for name, array in arrays.items() if name not in parts}


def _packed(module: str, arrays: Mapping[str, Any], groups: Groups | None) -> Packed:
    codes, scales, biases = (arrays[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
    if groups is None or scales.shape[1] * groups.group_size * groups.bits != codes.shape[1] * 32:
        raise CheckpointError(
            f"{module} of the overlay does not have the bits that config.json says", "install it again"
        )
    return Packed(codes, scales, biases, groups.bits, groups.group_size, "F16" if scales.dtype == np.float16 else "F32")


def low_rank(change: Floats, rank: int) -> tuple[Floats, Floats]:
    """change [out, in] ≈ up [out, rank] @ down [rank, in], the best of that rank; both halves of like size."""
    rng = np.random.default_rng(0)
    span = change @ rng.standard_normal((change.shape[1], rank + 8)).astype(np.float32)
    basis, _ = np.linalg.qr(change @ (change.T @ span))
    left, sizes, right = np.linalg.svd(basis.T @ change, full_matrices=False)
    half = np.sqrt(sizes[:rank])
    return (basis @ left[:, :rank]) * half, half[:, None] * right[:rank]


def assemble(
    draft: Path, config: SalaConfig, base: Base, overlay: Path, note: Callable[[int, int], None] = lambda *_: None
) -> SalaConfig:
    """Write the weights of an ordinary checkpoint into `draft` → its configuration."""
    assert config.quantization is not None
    modules, plain = read_overlay(overlay, config.quantization)
    specs: dict[str, Spec] = {}
    packed: dict[str, Groups] = {}
    arrays: dict[str, Any] = {}
    names = list(expected_tensors(replace(config, quantization=None)))
    for at, name in enumerate(names):
        module = name.removesuffix(".weight")
        matrix = _matrix(module, modules, base) if name not in plain else None
        if matrix is None:
            arrays[name] = plain[name] if name in plain else base.read(name)
            specs[name] = ("F32", arrays[name].shape)
        else:
            packed[module] = Groups(matrix.bits, matrix.group_size)
            specs |= packed_specs(module, matrix)
            arrays |= {f"{module}.{part}": getattr(matrix, field) for part, field in PACKED_PARTS.items()}
        note(at + 1, len(names))
    write_weights(draft, specs, lambda name: as_bytes(arrays[name]))
    return replace(config, quantization=QuantConfig.of_modules(packed))


def _matrix(module: str, modules: Mapping[str, Packed], base: Base) -> Packed | None:
    if module in modules:
        return widen(modules[module])
    if f"{module}.up" in modules:
        up, down = (dequantize(modules[f"{module}.{half}"]) for half in ("up", "down"))
        return quantize(base.read(f"{module}.weight") + up.T @ down, MLP_GROUPS.bits, MLP_GROUPS.group_size, "F16")
    return base.read_packed(f"{module}.weight")


def widen(packed: Packed) -> Packed:
    """The same matrix in codes that can be computed with as they lie; the values stay the same."""
    if packed.bits in _FAST_BITS:
        return packed
    codes = pack(unpack(packed.codes, packed.bits, packed.shape[1]), 8)
    return replace(packed, codes=codes, bits=8)


def changes(modules: Mapping[str, tuple[Floats, Floats]]) -> Iterator[tuple[str, Packed]]:
    """The thin matrices of every changed module, packed along their long sides: up.T [r, out] and down [r, in]."""
    for name, (up, down) in modules.items():
        for half, matrix in (("up", up.T), ("down", down)):
            matrix = np.ascontiguousarray(matrix, np.float32)
            yield f"{name}.{half}", quantize(matrix, CHANGE_GROUPS.bits, CHANGE_GROUPS.group_size, "F16")
