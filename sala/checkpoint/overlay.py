"""Store a converted model as an overlay on its base, and assemble the two into an ordinary checkpoint.

An overlay holds, per module, one of three things:

- `{module}`: the whole matrix, packed (gates, which the base does not have);
- `{module}.change`: the packed difference from the base's matrix, W = W_base + change (mixers);
- `{module}.up` and `{module}.down`: a packed low-rank difference, W = W_base + up @ down (MLPs).

Norms are stored plain. A matrix for which the overlay holds nothing is the base's. The overlay of smol-sala 0.4
stores the mixers as whole matrices; both forms can be read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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


def write_overlay(
    directory: Path, modules: Mapping[str, Packed], norms: Mapping[str, Floats], file_bytes: int = 16_000_000
) -> None:
    """Write files `overlay-N.safetensors`, none larger than `file_bytes`."""
    specs: dict[str, Spec] = {name: ("F32", norm.shape) for name, norm in norms.items()}
    arrays: dict[str, Any] = dict(norms)
    for module, packed in modules.items():
        specs |= packed_specs(module, packed)
        arrays |= {f"{module}.{part}": getattr(packed, field) for part, field in PACKED_PARTS.items()}
    for number, names in enumerate(plan_shards(specs, file_bytes), 1):
        file = directory / f"overlay-{number}.safetensors"
        write_file(file, {name: specs[name] for name in names}, lambda name: as_bytes(arrays[name]), {})


def read_overlay(directory: Path, quantization: QuantConfig) -> tuple[dict[str, Packed], dict[str, Floats]]:
    """Return packed matrices by module and plain tensors by name; `quantization` is the overlay's own."""
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
        is_thin = module.endswith((".up", ".down"))
        groups = CHANGE_GROUPS if is_thin else quantization.of(module.removesuffix(".change"))
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


def low_rank(change: Floats, rank: int) -> tuple[Floats, Floats]:
    """Return up [out, rank] and down [rank, in], the best approximation of `change` [out, in] of that rank.

    Both halves have the same norm.
    """
    rng = np.random.default_rng(0)
    span = change @ rng.standard_normal((change.shape[1], rank + 8)).astype(np.float32)
    basis, _ = np.linalg.qr(change @ (change.T @ span))
    left, sizes, right = np.linalg.svd(basis.T @ change, full_matrices=False)
    half = np.sqrt(sizes[:rank])
    return (basis @ left[:, :rank]) * half, half[:, None] * right[:rank]


def assemble(
    draft: Path, config: SalaConfig, base: Base, overlay: Path, note: Callable[[int, int], None] = lambda *_: None
) -> SalaConfig:
    """Write the weights of an ordinary checkpoint into `draft` and return its configuration."""
    assert config.quantization is not None
    modules, plain = read_overlay(overlay, config.quantization)
    specs: dict[str, Spec] = {}
    packed: dict[str, Groups] = {}
    arrays: dict[str, Any] = {}
    names = list(expected_tensors(replace(config, quantization=None)))
    for at, name in enumerate(names):
        module = name.removesuffix(".weight")
        matrix = _matrix(module, modules, config, base) if name not in plain else None
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


def changes(modules: Mapping[str, tuple[Floats, Floats]]) -> Iterator[tuple[str, Packed]]:
    """Yield the thin matrices of every changed module, packed along their long sides: up.T [r, out], down [r, in]."""
    for name, (up, down) in modules.items():
        for half, matrix in (("up", up.T), ("down", down)):
            matrix = np.ascontiguousarray(matrix, np.float32)
            yield f"{name}.{half}", quantize(matrix, CHANGE_GROUPS.bits, CHANGE_GROUPS.group_size, "F16")


def pack_overlay(
    config: SalaConfig, tensors: Mapping[str, Floats], base: Base, packing: OverlayPacking
) -> tuple[dict[str, Packed], dict[str, Floats], QuantConfig]:
    """Pack a hybrid's `tensors` as differences from its base.

    Return what `write_overlay` takes, and the quantization that the overlay's `config.json` must state.
    """
    modules: dict[str, Packed] = {}
    norms: dict[str, Floats] = {}
    thin: dict[str, tuple[Floats, Floats]] = {}
    gates: list[tuple[str, Groups]] = []
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if value.ndim == 1:
            norms[name] = value
        elif module.endswith(GATES):
            gates.append((module, Groups(packing.gate_bits, packing.group_size)))
            modules[module] = quantize(value, packing.gate_bits, packing.group_size, "F16")
        elif ".self_attn." in name:
            change = value - base_matrix(config, base, module)
            modules[f"{module}.change"] = quantize(change, packing.bits, packing.group_size, "F16")
        elif ".mlp." in name:
            change = value - base.read(name)
            if np.abs(change).max() > 0:
                thin[module] = low_rank(change, packing.rank)
    overrides = tuple(gates) if packing.gate_bits != packing.bits else ()
    quantization = QuantConfig(packing.bits, packing.group_size, overrides)
    return modules | dict(changes(thin)), norms, quantization
