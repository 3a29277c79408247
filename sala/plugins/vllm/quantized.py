"""Matrices in MLX's layout, expanded while vLLM loads them: they take the memory of the model's precision there."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sala.backends.torch.ops.affine import dequantize
from sala.errors import CheckpointError
from sala.quantization_config import QuantConfig

_REMEDY = "the checkpoint is damaged or incomplete: get it again"


def expand(
    weights: Iterable[tuple[str, Tensor]], table: QuantConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under their names, packed ones [out, in * bits / 32] as matrices [out, in].

    The three tensors of a matrix may be in several files, in any order. Raises CheckpointError if one is missing.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        module, _, part = name.rpartition(".")
        if part not in ("scales", "biases") and tensor.dtype != torch.uint32:
            yield name, tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        if len(parts) == 3:
            yield f"{module}.weight", _matrix(module, table, **waiting.pop(module)).to(dtype)
    if waiting:
        raise CheckpointError(f"{min(waiting)} has no weight, scales or biases", _REMEDY)


def _matrix(module: str, table: QuantConfig, weight: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
    groups = table.of(module)
    if groups is None or weight.shape[-1] * 32 != scales.shape[-1] * groups.group_size * groups.bits:
        raise CheckpointError(f"{module} does not have the bits that config.json states", _REMEDY)
    return dequantize(weight.view(torch.int32), scales, biases, groups.bits, groups.group_size)
