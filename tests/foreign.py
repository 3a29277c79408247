"""Checkpoints as other programs quantize them, packed here by the plain formulas; and the weights that they mean."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sala.checkpoint.names import expected_tensors
from sala.checkpoint.random import TINY, spread, write_byte_tokenizer
from sala.config import SalaConfig

Array = np.ndarray[Any, Any]
Tensors = dict[str, tuple[str, Array]]
AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Codes:
    """A matrix [out, in] as codes, and the scale and zero point of every input's group: [groups, out]."""

    codes: Array
    scales: Array
    zeros: Array
    group: Array  # of every input

    def values(self) -> Array:
        scales, zeros = self.scales.astype(np.float64)[self.group].T, self.zeros.astype(np.int64)[self.group].T
        return ((self.codes.astype(np.int64) - zeros) * scales).astype(np.float32)


def save(file: Path, tensors: Tensors) -> None:
    """safetensors without metadata."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def quantize(
    weight: Array, bits: int, group_size: int, is_symmetric: bool, rng: np.random.Generator, has_order: bool = False
) -> Codes:
    num_in = weight.shape[1]
    size = num_in if group_size == -1 else group_size
    group = np.arange(num_in) // size
    if has_order:
        group = rng.permutation(group)
    most, count = (1 << bits) - 1, num_in // size
    parts = [weight[:, group == index] for index in range(count)]
    low, high = (np.stack([pick(part, axis=1) for part in parts]) for pick in (np.min, np.max))
    if is_symmetric:
        scales = (2 * np.maximum(-low, high) / most).astype(np.float16)
        zeros = np.full(scales.shape, 1 << (bits - 1))
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = ((high - low) / most).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, most).astype(np.int64)
        zeros[rng.random(zeros.shape) < 0.1] = 0  # the corner where one less borrows from the next zero point
    codes = np.rint(weight / scales.astype(np.float32)[group].T) + zeros[group].T
    return Codes(np.clip(codes, 0, most).astype(np.int64), scales, zeros, group)


def pack_rows(codes: Array, bits: int) -> Array:
    """[n, m] → words [n / per word, m]: neighbours of the first dimension share a word, the first lowest."""
    count = 32 // bits
    padded = np.concatenate([codes, np.zeros((-len(codes) % count, codes.shape[1]), np.int64)])
    return sum(padded[i::count].astype(np.uint64) << np.uint64(bits * i) for i in range(count)).astype(np.uint32)


def gptq(held: Codes, bits: int, is_v2: bool = False) -> Tensors:
    zeros = pack_rows(held.zeros.T, bits).T
    if not is_v2:
        zeros = zeros - np.uint32(sum(1 << at for at in range(0, 32, bits)))
    return {
        "qweight": ("I32", pack_rows(held.codes.T, bits)),
        "qzeros": ("I32", zeros),
        "scales": ("F16", held.scales),
        "g_idx": ("I32", held.group.astype(np.int32)),
    }


def awq(held: Codes) -> Tensors:
    def pack(codes: Array) -> Array:
        words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
        for at, output in enumerate(AWQ_OUTPUTS):
            words |= (codes[:, output::8] << (4 * at)).astype(np.uint32)
        return words

    return {
        "qweight": ("I32", pack(held.codes.T)),
        "qzeros": ("I32", pack(held.zeros)),
        "scales": ("F16", held.scales),
    }


def packed(held: Codes, bits: int, is_symmetric: bool, has_order: bool = False) -> Tensors:
    """compressed-tensors, pack-quantized."""
    tensors: Tensors = {
        "weight_packed": ("I32", pack_rows(held.codes.T, bits).T),
        "weight_scale": ("F16", held.scales.T),
        "weight_shape": ("I64", np.array(held.codes.shape)),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = ("I32", pack_rows(held.zeros.T, bits))
    if has_order:
        tensors["weight_g_idx"] = ("I32", held.group.astype(np.int32))
    return tensors


def fp8(weight: Array, scales: str, leaf: str, block: int = 128) -> tuple[Tensors, Array]:
    """Scales for the matrix, its rows, or its blocks → tensors and the weights that they mean."""
    num_out, num_in = weight.shape
    sizes = {"tensor": (num_out, num_in), "row": (1, num_in), "block": (block, block)}[scales]
    shape = (-(-num_out // sizes[0]), -(-num_in // sizes[1]))
    factors = np.empty(shape, np.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            part = weight[i * sizes[0] : (i + 1) * sizes[0], j * sizes[1] : (j + 1) * sizes[1]]
            factors[i, j] = np.abs(part).max() / 448
    wide = factors.repeat(sizes[0], 0)[:num_out].repeat(sizes[1], 1)[:, :num_in]
    codes = torch.from_numpy(weight / wide).to(torch.float8_e4m3fn)
    held = factors.reshape(1) if scales == "tensor" else factors
    tensors: Tensors = {"weight": ("F8_E4M3", codes.view(torch.uint8).numpy()), leaf: ("F32", held)}
    return tensors, codes.double().numpy().astype(np.float32) * wide


Pack = Callable[[Array, np.random.Generator], tuple[Tensors, Array]]


@dataclass(frozen=True)
class Case:
    """A way to quantize: the table in config.json, and the tensors of a module."""

    table: dict[str, Any]
    pack: Pack
    has_head: bool = False


def _of(quantized: Callable[[Array, np.random.Generator], Codes], pack: Callable[[Codes], Tensors]) -> Pack:
    def run(weight: Array, rng: np.random.Generator) -> tuple[Tensors, Array]:
        held = quantized(weight, rng)
        return pack(held), held.values()

    return run


def gptq_case(
    bits: int = 4, group: int = 32, sym: bool = True, order: bool = False, is_v2: bool = False, **more: Any
) -> Case:
    table = {
        "bits": bits, "group_size": group, "damp_percent": 0.01, "desc_act": order, "static_groups": False, "sym": sym,
        "true_sequential": True, "lm_head": False, "quant_method": "gptq", "pack_dtype": "int32",
        "checkpoint_format": "gptq_v2" if is_v2 else "gptq", "meta": {"quantizer": ["gptqmodel:4.1.0"]},
    }  # fmt: skip
    quantized = lambda weight, rng: quantize(weight, bits, group, sym, rng, order)  # noqa: E731
    return Case(table | more, _of(quantized, lambda held: gptq(held, bits, is_v2)))


def awq_case(group: int = 64, **more: Any) -> Case:
    table = {
        "bits": 4, "group_size": group, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    }  # fmt: skip
    return Case(table | more, _of(lambda weight, rng: quantize(weight, 4, group, False, rng), awq))


def packed_case(bits: int = 4, group: int = 128, sym: bool = True, order: bool = False) -> Case:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": sym, "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group, "block_structure": None, "dynamic": False,
        "actorder": "group" if order else None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    table = compressed_tensors("pack-quantized", weights)
    quantized = lambda weight, rng: quantize(weight, bits, group, sym, rng, order)  # noqa: E731
    return Case(table, _of(quantized, lambda held: packed(held, bits, sym, order)))


def compressed_tensors(kind: str, weights: dict[str, Any]) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "config_groups": {"group_0": scheme}, "format": kind, "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def fp8_case(scales: str, leaf: str = "weight_scale", is_compressed: bool = False, has_head: bool = False) -> Case:
    is_block = scales == "block"
    table: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": []}
    if is_block:
        table |= {"fmt": "e4m3", "weight_block_size": [128, 128]}
    if is_compressed:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "channel" if scales == "row" else scales}
        weights |= {"block_structure": [128, 128]} if is_block else {}
        table = compressed_tensors("float-quantized", weights)
    return Case(table, lambda weight, _: fp8(weight, scales, leaf), has_head)


def write(
    directory: Path, case: Case, config: SalaConfig = TINY, seed: int = 0, spared: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """A checkpoint directory → the weights that it means."""
    directory.mkdir(parents=True)
    tensors, plain = make(case, config, seed, spared)
    save(directory / "model.safetensors", tensors)
    table = config.to_dict() | {"quantization_config": case.table}
    (directory / "config.json").write_text(json.dumps(table))
    write_byte_tokenizer(directory)
    return plain


def make(
    case: Case, config: SalaConfig = TINY, seed: int = 0, spared: tuple[str, ...] = ()
) -> tuple[Tensors, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    plain: dict[str, Array] = {}
    for name, shape in expected_tensors(config).items():
        module = name.removesuffix(".weight")
        size = spread(name, shape, config) if len(shape) == 2 else 0.1
        values = (rng.standard_normal(shape) * size + (name.endswith("norm.weight"))).astype(np.float32)
        is_plain = len(shape) != 2 or module == "model.embed_tokens" or any(one in module for one in spared)
        if is_plain or (module == "lm_head" and not case.has_head):
            tensors[name], plain[name] = ("F32", values), values
            continue
        parts, plain[name] = case.pack(values, rng)
        tensors |= {f"{module}.{leaf}": part for leaf, part in parts.items()}
    return tensors, {name: torch.from_numpy(values) for name, values in plain.items()}
