"""Read matrices that other programs quantized into sala's layout: the same codes, scales and zero points.

    GPTQ                qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx
    AWQ                 qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    compressed-tensors  weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point, weight_g_idx
    FP8                 weight [out, in] as e4m3, and weight_scale or weight_scale_inv for the matrix, rows or blocks

In all of them but FP8, w = (code - zero) * scale. Here it is code * scale + bias with bias = -zero * scale, which fp32
holds exactly for scales of 16 bits. Words hold their first code in the lowest bits, except AWQ's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sala.checkpoint.arrays import Array, Floats, as_array, decode, encode
from sala.checkpoint.dtypes import FLOAT_DTYPES
from sala.checkpoint.packing import Order, Packed, Words
from sala.checkpoint.reader import Checkpoint, TensorInfo
from sala.errors import CheckpointError
from sala.quantization_config import ExternalLayout, Groups, split_group

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Shape = tuple[int, ...]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each code in a word, lowest bits first
_PIECE = 1 << 20  # codes unpacked at a time: they fit in a processor's cache
# The tensor that marks a quantized module.
_MARKS = {"gptq": "qweight", "awq": "qweight", "pack-quantized": "weight_packed"}
_FP8_SCALES = ("weight_scale", "weight_scale_inv")  # both names mean a factor of the codes


@dataclass(frozen=True, slots=True)
class TensorRule:
    """The shapes and precisions that a tensor of a checkpoint may have."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    is_required: bool = True


def find_modules(tensors: Mapping[str, TensorInfo], layout: ExternalLayout) -> list[str]:
    """Return the modules that a file holds in this layout."""
    if layout.kind == "fp8":
        marked = [name for name, info in tensors.items() if info.dtype.startswith("F8") and name.endswith(".weight")]
    else:
        marked = [name for name in tensors if name.endswith(f".{_MARKS[layout.kind]}")]
    return [name.rpartition(".")[0] for name in marked]


def groups_of(module: str, shape: Shape, layout: ExternalLayout) -> Groups:
    """Return the groups of a matrix [out, in]; a group of the file that is too large is split."""
    size = shape[1] if layout.group_size is None else layout.group_size
    own = split_group(size)
    if shape[1] % size or own is None:
        raise CheckpointError(f"{module} {list(shape)} has no groups of {size}", "use groups that divide its inputs")
    return Groups(layout.bits, own)


def parts_of(module: str, shape: Shape, layout: ExternalLayout, found: Iterable[str]) -> dict[str, TensorRule]:
    """Return the tensors that a module with a matrix [out, in] must have."""
    num_out, num_in = shape
    if layout.kind == "fp8":
        return _fp8_parts(module, shape, layout, found)
    groups_of(module, shape, layout)
    per_word = 32 // layout.bits
    if num_in % per_word or (num_out % per_word and layout.kind != "pack-quantized"):
        raise CheckpointError(f"{module} {list(shape)} does not fill whole words", "use a model with even sizes")
    num_groups = 1 if layout.group_size is None else num_in // layout.group_size
    words, order = ("I32",), TensorRule(((num_in,),), ("I32",), layout.has_order)
    if not _has_outputs_first(layout):
        codes = (num_in, num_out // per_word) if layout.kind == "awq" else (num_in // per_word, num_out)
        parts = {
            "qweight": TensorRule((codes,), words),
            "qzeros": TensorRule(((num_groups, num_out // per_word),), words),
            "scales": TensorRule(((num_groups, num_out),), FLOAT_DTYPES),
        }
        if layout.kind == "gptq":
            parts["g_idx"] = order
    else:
        parts = {
            "weight_packed": TensorRule(((num_out, num_in // per_word),), words),
            "weight_scale": TensorRule(((num_out, num_groups),), FLOAT_DTYPES),
            "weight_shape": TensorRule(((2,),), ("I64", "I32")),
            "weight_g_idx": order,
        }
        if not layout.is_symmetric:
            parts["weight_zero_point"] = TensorRule(((-(-num_out // per_word), num_groups),), words)
    return {f"{module}.{name}": part for name, part in parts.items()}


def _fp8_parts(module: str, shape: Shape, layout: ExternalLayout, found: Iterable[str]) -> dict[str, TensorRule]:
    num_out, num_in = shape
    shapes: tuple[Shape, ...] = ((), (1,), (1, 1), (num_out,), (num_out, 1))
    if layout.block is not None:
        shapes = ((-(-num_out // layout.block[0]), -(-num_in // layout.block[1])),)
    names = set(found)
    scale = next((name for name in _FP8_SCALES if f"{module}.{name}" in names), _FP8_SCALES[0])
    return {
        f"{module}.weight": TensorRule((shape,), ("F8_E4M3",)),
        f"{module}.{scale}": TensorRule(shapes, FLOAT_DTYPES),
        # Activations are not quantized here.
        f"{module}.input_scale": TensorRule(((), (1,)), FLOAT_DTYPES, is_required=False),
    }


def read_matrix(checkpoint: Checkpoint, module: str, shape: Shape, layout: ExternalLayout) -> Packed:
    """Read a module of GPTQ, AWQ or compressed-tensors, whose tensors have been checked."""
    groups = groups_of(module, shape, layout)
    order = _read_order(checkpoint, module, shape, layout)
    scales, dtype = _read_scales(checkpoint, f"{module}.{'weight_scale' if _has_outputs_first(layout) else 'scales'}")
    zeros = _read_zeros(checkpoint, module, shape, layout)
    if not _has_outputs_first(layout):
        scales, zeros = scales.T, zeros.T
    biases = -zeros.astype(np.float32) * scales
    times = shape[1] // groups.group_size // scales.shape[1]
    with np.errstate(over="ignore"):
        is_exact = bool((decode(encode(biases, dtype), dtype) == biases).all())
    kept = dtype if is_exact else "F32"
    codes = _read_codes(checkpoint, module, shape, layout, order)
    scales, biases = (np.repeat(encode(values, kept), times, 1) for values in (scales, biases))
    packed = Packed(codes, scales, biases, groups.bits, groups.group_size, kept, order)
    for name in parts_of(module, shape, layout, ()):
        if name in checkpoint.tensors:
            checkpoint.forget(name)
    return packed


def read_fp8_scales(checkpoint: Checkpoint, module: str) -> Floats:
    """Return fp32 scales [blocks of outputs, blocks of inputs]: [1, 1] for the whole matrix, [out, 1] for rows."""
    name = next(name for name in (f"{module}.{part}" for part in _FP8_SCALES) if name in checkpoint.tensors)
    scales = _read_scales(checkpoint, name)[0]
    return scales if scales.ndim == 2 else scales.reshape(-1, 1)


def _has_outputs_first(layout: ExternalLayout) -> bool:
    """Return whether outputs come first, as in sala's layout."""
    return layout.kind == "pack-quantized"


def _read(checkpoint: Checkpoint, name: str) -> Array:
    array = as_array(checkpoint.read(name))
    return array.view(np.uint32) if array.dtype == np.int32 else array  # words of codes


def _read_scales(checkpoint: Checkpoint, name: str) -> tuple[Floats, str]:
    dtype = checkpoint.tensors[name].dtype
    scales = decode(_read(checkpoint, name), dtype)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{checkpoint.path}: {name} has a value that is not finite", "download it again")
    return scales, dtype


def _read_zeros(checkpoint: Checkpoint, module: str, shape: Shape, layout: ExternalLayout) -> Array:
    """Return zero points as codes, [groups, out]; for compressed-tensors [out, groups]."""
    middle = 1 << (layout.bits - 1)
    if _has_outputs_first(layout):
        if layout.is_symmetric:
            return np.full((1, 1), middle, np.uint8)
        return _unpack(_read(checkpoint, f"{module}.weight_zero_point").T, layout.bits)[:, : shape[0]].T
    words = _read(checkpoint, f"{module}.qzeros")
    if layout.kind == "awq":
        return _in_awq_order(_unpack(words, layout.bits))
    if layout.is_zero_less_one:  # subtracted from whole words: a zero point of 0 has borrowed from the next code
        words = words + np.uint32(0x11111111 if layout.bits == 4 else 0x01010101)
    zeros = _unpack(words, layout.bits)
    if layout.is_symmetric and (zeros != middle).any():
        message = f"{checkpoint.path}: {module}.qzeros are not all {middle}, as symmetric ones are"
        raise CheckpointError(message, "sym or checkpoint_format (gptq or gptq_v2) in config.json is wrong")
    return zeros


def _read_order(checkpoint: Checkpoint, module: str, shape: Shape, layout: ExternalLayout) -> Order | None:
    """Return the inputs sorted by group; None if they are in that order already."""
    name = f"{module}.{'weight_g_idx' if _has_outputs_first(layout) else 'g_idx'}"
    if name not in checkpoint.tensors:
        return None
    size = shape[1] if layout.group_size is None else layout.group_size
    index = _read(checkpoint, name).view(np.int32).astype(np.int64)
    if _has_outputs_first(layout) and (index == -1).all():  # the mark for "no order"
        return None
    is_known = index.min() >= 0 and index.max() < shape[1] // size
    if not is_known or (np.bincount(index, minlength=shape[1] // size) != size).any():
        message = f"{checkpoint.path}: {name} does not divide {shape[1]} inputs into groups of {size}"
        raise CheckpointError(message, "download it again")
    order = np.argsort(index, kind="stable")
    return None if (order == np.arange(len(order))).all() else order


def _read_codes(
    checkpoint: Checkpoint, module: str, shape: Shape, layout: ExternalLayout, order: Order | None
) -> Words:
    """Return words [out, in * bits / 32] of codes in the order of the columns; some rows are read at a time."""
    name = f"{module}.{_MARKS[layout.kind]}"
    words, bits = _read(checkpoint, name), layout.bits
    if _has_outputs_first(layout) and _read(checkpoint, f"{module}.weight_shape").tolist() != list(shape):
        raise CheckpointError(f"{checkpoint.path}: {module}.weight_shape is not {list(shape)}", "download it again")
    out: Words = np.empty((shape[0], shape[1] * bits // 32), np.uint32)
    step = max(8, _PIECE // shape[1] // 8 * 8)
    for begin in range(0, shape[0], step):
        end = min(begin + step, shape[0])
        if layout.kind == "awq":
            out[begin:end] = _pack_columns(_in_awq_order(_unpack(words[:, begin // 8 : end // 8], bits)), bits)
        else:
            columns = words[begin:end].T if _has_outputs_first(layout) else words[:, begin:end]
            out[begin:end] = columns.T if order is None else _pack_columns(_unpack_columns(columns, bits)[order], bits)
    return out


def _in_awq_order(codes: Bytes) -> Bytes:
    """Reorder codes [n, out] from the order within words to that of the outputs."""
    words = codes.reshape(len(codes), -1, len(_AWQ_ORDER))
    out = np.empty_like(words)
    out[..., _AWQ_ORDER] = words
    return out.reshape(codes.shape)


def _unpack(words: Array, bits: int) -> Bytes:
    """Words [n, W] → codes [n, W * 32 / bits] of 4 or 8 bits, lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    codes = np.empty((*octets.shape, 2), np.uint8)
    np.bitwise_and(octets, 15, out=codes[..., 0])
    np.right_shift(octets, 4, out=codes[..., 1])
    return codes.reshape(len(octets), -1)


def _unpack_columns(words: Array, bits: int) -> Bytes:
    """Words [W, n] → codes [W * 32 / bits, n], lowest bits first."""
    count, mask = 32 // bits, np.uint32((1 << bits) - 1)
    codes = np.empty((len(words), count, words.shape[1]), np.uint8)
    for at in range(count):
        codes[:, at] = words >> np.uint32(at * bits) & mask
    return codes.reshape(-1, words.shape[1])


def _pack_columns(codes: Bytes, bits: int) -> Words:
    """Codes [in, n] → words [n, in * bits / 32]."""
    octets = codes if bits == 8 else codes[0::2] | codes[1::2] << 4
    return np.ascontiguousarray(octets.T).view(np.uint32)
