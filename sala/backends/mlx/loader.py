"""Load weights into the model: one tensor at a time, from the mapped file, never two copies of the model."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from sala.backends import pick_dtype_name
from sala.backends.mlx.model import SalaModel
from sala.backends.mlx.quantized_linear import Affine, AffineEmbedding, AffineLinear
from sala.checkpoint.arrays import as_array
from sala.checkpoint.dtypes import dtypes_by_name
from sala.checkpoint.matrices import Fp8Matrix, QuantizedMatrices
from sala.checkpoint.names import check_tensors, expected_tensors
from sala.checkpoint.packing import Packed
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError

DTYPES = dtypes_by_name(mx)


def load_model(checkpoint: Checkpoint, config: SalaConfig, dtype: mx.Dtype) -> SalaModel:
    """Build the model, whose initial weights are never computed, then give every parameter its tensor.

    A quantized matrix stays as it is in the file. Every array is computed when this returns, because another thread may
    run the model.
    """
    check_tensors(checkpoint, config)
    matrices = QuantizedMatrices(checkpoint, config)
    model = SalaModel(config)
    modules = dict(model.named_modules())
    for name, shape in expected_tensors(config).items():
        module, _, leaf = name.rpartition(".")
        if module in matrices and leaf == "weight":
            continue
        tensor = read_tensor(checkpoint, name, dtype)
        assert tensor.shape == shape, name
        setattr(modules[module], leaf, tensor)
    for name in matrices:
        if name != "lm_head" or not config.tie_word_embeddings:
            put_quantized(model, modules, name, matrices, dtype)
    if config.tie_word_embeddings and "model.embed_tokens" not in matrices:
        model.lm_head.weight = model.model.embed_tokens.weight
    mx.eval(model.parameters(), [mixer._slopes for mixer in model.modules() if hasattr(mixer, "_slopes")])
    mx.clear_cache()
    return model


def put_quantized(
    model: SalaModel, modules: Mapping[str, Module], name: str, matrices: QuantizedMatrices, dtype: mx.Dtype
) -> None:
    """Replace a linear or the embedding (and the head that shares it) by a quantized matrix; FP8 is expanded.

    At most one module is in memory twice.
    """
    matrix = matrices.read(name)
    if isinstance(matrix, Fp8Matrix):
        modules[name].weight = expand_fp8(matrices, name, matrix, dtype)
        return
    affine = to_affine(matrix, dtype)
    mx.eval(affine[:3])
    for part in matrices.parts(name):
        matrices.checkpoint.forget(part)
    if name == "model.embed_tokens":
        model.model.embed_tokens = AffineEmbedding(affine, dtype)  # type: ignore[assignment]
        if not model.config.tie_word_embeddings:
            return
        name = "lm_head"
    order = None if matrix.order is None else mx.array(matrix.order.astype(np.int32))
    parent, _, leaf = name.rpartition(".")
    setattr(modules[parent], leaf, AffineLinear(affine, modules[name].get("bias"), order))


def expand_fp8(matrices: QuantizedMatrices, name: str, matrix: Fp8Matrix, dtype: mx.Dtype) -> mx.array:
    """Return an FP8 matrix [out, in] in the precision of the model, rounded once, some rows at a time."""
    pieces = []
    for begin, end in matrices.fp8_pieces(name, matrix):
        pieces.append(mx.array(matrix.rows(begin, end)).astype(dtype))
        mx.eval(pieces[-1])
    out = mx.concatenate(pieces)
    mx.eval(out)
    return out


def to_affine(packed: Packed, dtype: mx.Dtype) -> Affine:
    """Return a packed matrix, with scales and biases in this precision if it holds them exactly, in fp32 otherwise."""
    parts = [_to_array(values, packed.dtype) for values in (packed.scales, packed.biases)]
    is_held = all(mx.array_equal(part.astype(dtype).astype(mx.float32), part.astype(mx.float32)) for part in parts)
    scales, biases = (part.astype(dtype if is_held else mx.float32) for part in parts)
    return mx.array(packed.codes), scales, biases, packed.bits, packed.group_size


def read_tensor(checkpoint: Checkpoint, name: str, dtype: mx.Dtype) -> mx.array:
    """Return a tensor in this precision; the pages of the file are dropped after reading: one copy stays."""
    raw = checkpoint.read(name)
    array = _to_array(as_array(raw), raw.dtype)
    mx.eval(array)
    checkpoint.forget(name)
    tensor = array.astype(dtype)
    mx.eval(tensor)
    return tensor


def _to_array(values: Any, dtype: str) -> mx.array:
    array = mx.array(np.ascontiguousarray(values))
    return array.view(mx.bfloat16) if dtype == "BF16" else array  # a type that numpy lacks


def pick_device(name: str) -> mx.Device:
    """Return the CPU, or MLX's default device: the GPU of a Mac."""
    if name == "cpu":
        return mx.Device(mx.cpu)
    if name not in ("auto", "gpu", "mps"):
        raise InputError("device", f"is {name!r}", "the mlx backend knows auto, cpu and gpu")
    found = mx.default_device()
    if name != "auto" and found.type != mx.gpu:
        raise InputError("device", f"is {name!r}, which needs a Mac with Apple Silicon", "use cpu")
    return found


def pick_dtype(name: str, config: SalaConfig) -> mx.Dtype:
    return DTYPES[pick_dtype_name(name, config)]
