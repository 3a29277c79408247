"""Load weights into the model: one tensor at a time, from the mapped file, never two copies of the model."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from sala.backends.mlx.model import SalaModel
from sala.backends.mlx.quantized_linear import AffineEmbedding, AffineLinear, AffineWeight
from sala.checkpoint.arrays import as_array
from sala.checkpoint.dtypes import dtypes_by_name
from sala.checkpoint.external_formats import fp8_rows, read_matrix
from sala.checkpoint.names import check_tensors, expected_tensors, external_modules, quantized_modules
from sala.checkpoint.packing import Packed
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError
from sala.quantization_config import Groups

DTYPES = dtypes_by_name(mx)
_FEW = 1 << 20  # elements per step where several steps follow: they stay in the processor's cache


def load_model(checkpoint: Checkpoint, config: SalaConfig, dtype: mx.Dtype) -> SalaModel:
    """Build the model, whose initial weights are never computed, then give every parameter its tensor.

    A quantized matrix stays as it is in the file. Every array is computed when this returns, because another thread may
    run the model.
    """
    check_tensors(checkpoint, config)
    packed, external = quantized_modules(checkpoint.tensors, config), external_modules(checkpoint.tensors, config)
    model = SalaModel(config)
    for name, shape in expected_tensors(config).items():
        module, _, leaf = name.rpartition(".")
        if (module in packed or module in external) and leaf == "weight":
            continue
        tensor = read_tensor(checkpoint, name, dtype)
        assert tensor.shape == shape, name
        setattr(find_module(model, module), leaf, tensor)
    for name, groups in packed.items():
        if name not in external and (name != "lm_head" or not config.tie_word_embeddings):
            put_quantized(model, name, read_packed(checkpoint, name, groups), dtype)
    for name, shape in external.items():
        put_external(model, checkpoint, name, shape, dtype)
    if config.tie_word_embeddings and "model.embed_tokens" not in packed:
        model.lm_head.weight = model.model.embed_tokens.weight
    mx.eval(model.parameters(), [mixer._slopes for mixer in model.modules() if hasattr(mixer, "_slopes")])
    mx.clear_cache()
    return model


def find_module(model: SalaModel, name: str) -> Module:
    module: Any = model
    for part in name.split("."):
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    found: Module = module
    return found


def put_quantized(
    model: SalaModel, name: str, weight: AffineWeight, dtype: mx.Dtype, order: mx.array | None = None
) -> None:
    """Replace a linear or the embedding (and the head that shares it) by a quantized matrix.

    `order` names the input of every column.
    """
    weight = weight.fitted(dtype)
    mx.eval(weight.codes, weight.scales, weight.biases)
    is_embedding = name == "model.embed_tokens"
    if is_embedding:
        model.model.embed_tokens = AffineEmbedding(weight, dtype)  # type: ignore[assignment]
    if not is_embedding or model.config.tie_word_embeddings:
        place = "lm_head" if is_embedding else name
        parent, _, leaf = place.rpartition(".")
        holder = find_module(model, parent) if parent else model
        linear = getattr(holder, leaf)
        setattr(holder, leaf, AffineLinear(weight, linear.bias if "bias" in linear else None, order))


def put_external(model: SalaModel, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """Replace a linear by a matrix in an external format; at most one module is in memory twice."""
    layout = model.config.layout
    assert layout is not None
    if layout.kind == "fp8":
        find_module(model, name).weight = expand_fp8(checkpoint, name, layout.block, dtype)
        return
    matrix = read_matrix(checkpoint, name, shape, layout)
    order = None if matrix.order is None else mx.array(matrix.order.astype(np.int32))
    put_quantized(model, name, to_affine(matrix.packed), dtype, order)


def expand_fp8(checkpoint: Checkpoint, name: str, block: tuple[int, int] | None, dtype: mx.Dtype) -> mx.array:
    """Return an FP8 matrix [out, in] in the precision of the model, rounded once, some rows at a time."""
    rows = fp8_rows(checkpoint, name, block)
    num_out, num_in = checkpoint.tensors[f"{name}.weight"].shape
    step, pieces = max(1, _FEW // num_in), []
    for begin in range(0, num_out, step):
        end = min(begin + step, num_out)
        pieces.append(mx.array(rows(begin, end)).astype(dtype))
        mx.eval(pieces[-1])
        checkpoint.forget(f"{name}.weight", begin * num_in, end * num_in)
    out = mx.concatenate(pieces)
    mx.eval(out)
    return out


def to_affine(packed: Packed) -> AffineWeight:
    """Return a packed matrix as MLX arrays."""
    scales, biases = (_to_array(values, packed.dtype) for values in (packed.scales, packed.biases))
    return AffineWeight(mx.array(packed.codes), scales, biases, packed.bits, packed.group_size)


def read_packed(checkpoint: Checkpoint, name: str, groups: Groups) -> AffineWeight:
    """Return a quantized matrix as it is in the file."""
    codes, scales, biases = (_read(checkpoint, f"{name}.{part}") for part in ("weight", "scales", "biases"))
    return AffineWeight(codes, scales, biases, groups.bits, groups.group_size)


def read_tensor(checkpoint: Checkpoint, name: str, dtype: mx.Dtype) -> mx.array:
    tensor = _read(checkpoint, name).astype(dtype)
    mx.eval(tensor)
    return tensor


def _read(checkpoint: Checkpoint, name: str) -> mx.array:
    """Return a tensor in the precision of the file, whose pages are dropped after reading: one copy stays."""
    raw = checkpoint.read(name)
    array = _to_array(as_array(raw), raw.dtype)
    mx.eval(array)
    checkpoint.forget(name)
    return array


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
    wanted = config.dtype if name == "auto" else name
    if wanted not in DTYPES:
        raise InputError("dtype", f"is {name!r}", "use auto, " + ", ".join(DTYPES))
    return DTYPES[wanted]
