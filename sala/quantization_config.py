"""QuantConfig: how many bits the matrices of a checkpoint have, as MLX writes it into `config.json`.

    "quantization": {"group_size": 64, "bits": 4, "model.embed_tokens": {"group_size": 64, "bits": 8}, "lm_head": false}

The first two hold for every module that has scales in the checkpoint; the others are for one module each.
A table with a `quant_method` was written by another program: its `ExternalLayout` says how the matrices are stored.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sala.errors import ConfigError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
Kind = Literal["gptq", "awq", "pack-quantized", "fp8"]
_TITLES: dict[Kind, str] = {
    "gptq": "GPTQ", "awq": "AWQ", "pack-quantized": "compressed-tensors", "fp8": "FP8 (e4m3)",
}  # fmt: skip
QKV_LINEARS = ("q_proj", "k_proj", "v_proj")
LINEARS_BY_MIXER = {
    "lightning": (*QKV_LINEARS, "o_proj", "z_proj"),
    "sparse": (*QKV_LINEARS, "o_proj", "o_gate"),
}
MIXER_LINEARS = tuple(dict.fromkeys(name for names in LINEARS_BY_MIXER.values() for name in names))
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
LINEARS = (*MIXER_LINEARS, *MLP_LINEARS)
IGNORED_FIELDS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("ignored_fields.toml").read_text())


@dataclass(frozen=True, slots=True)
class Groups:
    """Affine groups along the input dimension: w = code * scale + bias."""

    bits: int
    group_size: int

    def to_dict(self) -> dict[str, int]:
        return {"group_size": self.group_size, "bits": self.bits}


@dataclass(frozen=True, slots=True)
class ExternalLayout:
    """How another program stored the matrices, by its table in `config.json`."""

    kind: Kind
    bits: int
    group_size: int | None = None  # None: a row is one group
    is_symmetric: bool = False  # every zero point is the middle code
    has_order: bool = False  # the inputs of a group need not be neighbours
    is_zero_less_one: bool = False  # zero points are stored less one
    block: tuple[int, int] | None = None  # of one FP8 scale; None: a scale for a matrix or a row
    spared: tuple[str, ...] = ()  # modules, or parts of their names, that are not quantized
    table: str = "{}"  # as it was read, in JSON

    def is_spared(self, module: str) -> bool:
        """Return whether a module is left as it was. Patterns (`re:…`) are ignored: the tensors show it too."""
        return any(f".{name}." in f".{module}." for name in self.spared)

    def describe(self) -> str:
        """Return the method, bits and groups in words."""
        if self.kind == "fp8":
            scales = "matrix or row" if self.block is None else f"block of {self.block[0]}x{self.block[1]}"
            return f"{_TITLES[self.kind]}, a scale per {scales}"
        groups = "one group per row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{_TITLES[self.kind]}, {self.bits} bits, {groups}"


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Bits and group size of every quantized module; `overrides` are for single ones, None for "not quantized".

    With a `layout` they are what the matrices are read as; FP8 is read as plain weights.
    """

    bits: int
    group_size: int
    overrides: tuple[tuple[str, Groups | None], ...] = ()
    layout: ExternalLayout | None = None

    @classmethod
    def of_modules(cls, modules: "Mapping[str, Groups]") -> "QuantConfig":
        """Create a table from the groups of every module: the most frequent ones hold for all, others by name."""
        values = list(modules.values())
        common = max(set(values), key=lambda groups: (values.count(groups), groups.bits, groups.group_size))
        own = tuple((name, groups) for name, groups in modules.items() if groups != common)
        return cls(common.bits, common.group_size, own)

    def of(self, module: str) -> Groups | None:
        """Return how a module is quantized; None if the table says that it is not."""
        return dict(self.overrides).get(module, Groups(self.bits, self.group_size))

    def check_modules(self, mixers: Sequence[str], where: str) -> None:
        """Refuse an override that does not name a matrix of a model with these mixers."""
        known = matrix_modules(mixers)
        for name, _ in self.overrides:
            if name not in known:
                message = f"{where}: {name[:100]!r} is not a module of this model"
                raise ConfigError(message, "name one like model.layers.0.mlp.up_proj")

    def to_dict(self) -> dict[str, Any]:
        if self.layout is not None:
            return dict(json.loads(self.layout.table))
        own = {name: False if groups is None else groups.to_dict() for name, groups in self.overrides}
        return {"group_size": self.group_size, "bits": self.bits, **own}

    @classmethod
    def from_dict(cls, table: Any, where: str) -> "QuantConfig":
        if isinstance(table, dict) and "quant_method" in table:
            return _parse_external(table, where)
        fields = _TableReader(table, where)
        own, overrides = fields.groups(), dict[str, Groups | None]()
        for name, value in fields.fields.items():
            module = _TableReader(
                value or {}, f"{where}: {name[:100]}", "a module is false, or has bits and group_size"
            )
            overrides[name] = None if value is False else module.groups()
            module.finish()
        return cls(own.bits, own.group_size, tuple(overrides.items()))


def matrix_modules(mixers: Sequence[str]) -> set[str]:
    """Return the names of the modules that can be quantized: those whose weight is a matrix."""
    names = {"model.embed_tokens", "lm_head"}
    for index, mixer in enumerate(mixers):
        names |= {f"model.layers.{index}.self_attn.{name}" for name in LINEARS_BY_MIXER[mixer]}
        names |= {f"model.layers.{index}.mlp.{name}" for name in MLP_LINEARS}
    return names


_MAX_GROUP = 1 << 22


class _TableReader:
    """Takes fields from a table one by one; what is left at the end is unknown."""

    def __init__(self, table: Any, where: str, remedy: str = "it must be an object") -> None:
        if not isinstance(table, dict):
            raise ConfigError(f"{where} is {str(table)[:100]!r}", remedy)
        self.fields = dict(table)
        self.where = where

    def fail(self, name: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name[:100]} {problem[:200]}", remedy)

    def wrong(self, name: str, value: Any, remedy: str) -> ConfigError:
        return self.fail(name, "is missing" if value is None else f"is {str(value)[:100]!r}", remedy)

    def take(self, *names: str) -> Any:
        """Return the first of these fields that is set; None if none is."""
        values = [self.fields.pop(name, None) for name in names]
        return next((value for value in values if value is not None), None)

    def choice(self, names: Sequence[str], allowed: Sequence[Any], default: Any = None) -> Any:
        value = self.take(*names)
        value = default if value is None else value
        if isinstance(value, str):
            value = value.lower()
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise self.wrong(names[0], value, "only " + " or ".join(map(str, allowed)) + " can be read")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.choice((name,), (True, False), False))

    def groups(self) -> Groups:
        """Take the fields that MLX writes."""
        self.choice(("mode",), ("affine",), "affine")
        return Groups(self.choice(("bits",), BITS), self.choice(("group_size",), GROUP_SIZES))

    def empty(self, *names: str) -> None:
        """Refuse fields that are set and would change the computation."""
        for name in names:
            if self.take(name):
                raise self.fail(name, "is set", "a checkpoint without it can be read")

    def group_size(self, *names: str) -> int | None:
        value, smallest = self.take(*names), GROUP_SIZES[0]
        if type(value) is int and value == -1:
            return None
        if type(value) is not int or not smallest <= value <= _MAX_GROUP or value % smallest:
            raise self.wrong(names[0], value, f"use a multiple of {smallest}, or -1 for whole rows")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """Take two sizes: as a list, or as in `128x128`."""
        value = self.take(name)
        if value is None:
            return None
        sizes = re.fullmatch(r"\[?([1-9][0-9]{0,4})(?:x|, ?)([1-9][0-9]{0,4})\]?", str(value))
        if sizes is None:
            raise self.wrong(name, value, "it must be two whole numbers")
        return int(sizes[1]), int(sizes[2])

    def names(self, *names: str) -> tuple[str, ...]:
        value = self.take(*names)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(names[0], value, "it must be a list of module names")
        return tuple(item for item in value if item)

    def inner(self, name: str) -> "_TableReader":
        return _TableReader(self.take(name), f"{self.where}: {name[:100]}")

    def finish(self) -> None:
        for name in self.fields:
            if name not in IGNORED_FIELDS["quantization"]:
                raise self.fail(repr(str(name)), "is not known", "remove it if the weights do not depend on it")


def _parse_external(table: dict[str, Any], where: str) -> QuantConfig:
    method = table["quant_method"]
    parse = _METHODS.get(method) if isinstance(method, str) else None
    if parse is None:
        remedy = "known are " + ", ".join(_METHODS) + "; or quantize the original model: sala quantize"
        raise ConfigError(f"{where}: quant_method is {str(method)[:100]!r}", remedy)
    fields = _TableReader(table, where)
    fields.take("quant_method")
    layout = parse(fields, json.dumps(table))
    fields.finish()
    group = GROUP_SIZES[-1] if layout.group_size is None else split_group(layout.group_size)
    return QuantConfig(layout.bits, group or GROUP_SIZES[0], layout=layout)


def split_group(size: int) -> int | None:
    """Return the largest of our group sizes that divides another; None if none does."""
    return next((group for group in reversed(GROUP_SIZES) if size % group == 0), None)


def _parse_gptq(fields: _TableReader, table: str) -> ExternalLayout:
    fields.choice(("is_marlin_format",), (False,), False)
    fields.choice(("pack_dtype",), ("int32",), "int32")
    written = [value for value in map(fields.take, _FORMATS) if value is not None] or ["gptq"]
    if any(value != written[0] for value in written) or written[0] not in ("gptq", "gptq_v2"):
        problem = "is " + " and ".join(str(value)[:60] for value in written)
        raise fields.fail("checkpoint_format", problem, "only gptq or gptq_v2 can be read")
    fields.empty("adapter")
    _refuse_dynamic(fields)
    return ExternalLayout(
        "gptq",
        bits=fields.choice(("bits",), (4, 8)),
        group_size=fields.group_size("group_size"),
        is_symmetric=fields.flag("sym"),
        has_order=fields.flag("desc_act"),
        is_zero_less_one=written[0] == "gptq",
        spared=fields.names("modules_to_not_convert"),
        table=table,
    )


_FORMATS = ("checkpoint_format", "format")


def _refuse_dynamic(fields: _TableReader) -> None:
    """Patterns that spare modules (`-:…`) need no reading: those modules have plain weights. Others change the bits."""
    dynamic = fields.take("dynamic") or {}
    for pattern, change in dynamic.items() if isinstance(dynamic, dict) else ((dynamic, dynamic),):
        if not str(pattern).startswith("-:") and change:
            raise fields.fail(f"dynamic {str(pattern)[:60]!r}", "changes single modules", "that cannot be read")


def _parse_awq(fields: _TableReader, table: str) -> ExternalLayout:
    fields.choice(("version", *_FORMATS), ("gemm",), "gemm")
    fields.choice(("zero_point",), (True,), True)
    fields.choice(("pack_dtype",), ("int32",), "int32")
    fields.flag("sym")
    fields.choice(("desc_act",), (False,), False)
    return ExternalLayout(
        "awq",
        bits=fields.choice(("bits", "w_bit"), (4,)),
        group_size=fields.group_size("group_size", "q_group_size"),
        spared=fields.names("modules_to_not_convert"),
        table=table,
    )


def _parse_fp8(fields: _TableReader, table: str) -> ExternalLayout:
    fields.choice(("fmt",), ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.choice(("activation_scheme",), ("dynamic", "static"), "dynamic")
    fields.choice(("is_checkpoint_fp8_serialized",), (True,), True)
    fields.empty("kv_cache_scheme", "kv_cache_quant_method")
    spared = fields.names("modules_to_not_convert") + fields.names("ignored_layers")
    return ExternalLayout("fp8", bits=8, block=fields.block("weight_block_size"), spared=spared, table=table)


def _parse_compressed_tensors(fields: _TableReader, table: str) -> ExternalLayout:
    kinds = ("pack-quantized", "float-quantized", "naive-quantized")
    kind = fields.choice(("format",), kinds)
    fields.empty("kv_cache_scheme", "transform_config")
    sparsity = fields.take("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense"):
        raise fields.fail("sparsity_config", "is set", "only dense weights can be read")
    groups = fields.inner("config_groups")
    if len(groups.fields) != 1:
        raise groups.fail("it", f"has {len(groups.fields)} groups", "only one scheme for all modules can be read")
    scheme = groups.inner(next(iter(groups.fields)))
    scheme.take("input_activations", "output_activations")  # activations keep the precision of the model
    scheme.names("targets")
    scheme.choice(("format",), kinds, kind)
    layout = _parse_scheme(scheme.inner("weights"), kind, fields.names("ignore"), table)
    scheme.finish()
    return layout


def _parse_scheme(weights: _TableReader, kind: str, spared: tuple[str, ...], table: str) -> ExternalLayout:
    weights.take("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.choice(("dynamic",), (False,), False)
    is_packed = kind == "pack-quantized"
    weights.choice(("type",), ("int",) if is_packed else ("float",), "int")
    bits = weights.choice(("num_bits",), (4, 8) if is_packed else (8,), 8)
    is_symmetric = weights.choice(("symmetric",), (True, False) if is_packed else (True,), True)
    order = weights.choice(("actorder",), (False, True, "group", "dynamic", "weight", "static"), False)
    strategies = ("group", "channel") if is_packed else ("tensor", "channel", "block")
    strategy = weights.choice(("strategy",), strategies, "group" if is_packed else "tensor")
    if not is_packed:
        weights.take("group_size")
        block = weights.block("block_structure")
        if (strategy == "block") != (block is not None):
            raise weights.fail("block_structure", "and strategy contradict each other", "give both, or neither")
        weights.finish()
        return ExternalLayout("fp8", bits=8, block=block, spared=spared, table=table)
    size = weights.group_size("group_size") if strategy == "group" else None
    weights.take("group_size", "block_structure")
    weights.finish()
    return ExternalLayout(
        "pack-quantized",
        bits=bits,
        group_size=size,
        is_symmetric=is_symmetric,
        has_order=order in (True, "group", "dynamic"),
        spared=spared,
        table=table,
    )


_METHODS: dict[str, Callable[[_TableReader, str], ExternalLayout]] = {
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "fp8": _parse_fp8,
    "compressed-tensors": _parse_compressed_tensors,
}
