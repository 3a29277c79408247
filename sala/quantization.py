"""QuantConfig: how many bits the matrices of a checkpoint have, as MLX writes it into `config.json`.

    "quantization": {"group_size": 64, "bits": 4, "model.embed_tokens": {"group_size": 64, "bits": 8}, "lm_head": false}

The first two hold for every module that has scales in the checkpoint; the others are for one module each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sala.errors import ConfigError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
_MIXER_MODULES = {
    "sparse": ("q_proj", "k_proj", "v_proj", "o_proj", "o_gate"),
    "lightning": ("q_proj", "k_proj", "v_proj", "o_proj", "z_proj"),
}
_MLP_MODULES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Groups:
    """Affine groups along the input dimension: w = code * scale + bias."""

    bits: int
    group_size: int

    def to_dict(self) -> dict[str, int]:
        return {"group_size": self.group_size, "bits": self.bits}


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Bits and group size of every quantized module; `overrides` are for single ones, None for "not quantized"."""

    bits: int
    group_size: int
    overrides: tuple[tuple[str, Groups | None], ...] = ()

    @classmethod
    def of_modules(cls, modules: "Mapping[str, Groups]") -> "QuantConfig":
        """From the groups of every quantized module: the most frequent ones hold for all, the rest by name."""
        values = list(modules.values())
        common = max(set(values), key=lambda groups: (values.count(groups), groups.bits, groups.group_size))
        own = tuple((name, groups) for name, groups in modules.items() if groups != common)
        return cls(common.bits, common.group_size, own)

    def of(self, module: str) -> Groups | None:
        """How a module is quantized, if it is: whether it has scales decides, where nothing is said of it."""
        return dict(self.overrides).get(module, Groups(self.bits, self.group_size))

    def check_modules(self, mixers: Sequence[str], where: str) -> None:
        """Refuse an override whose name is no matrix of a model with these mixers."""
        known = matrix_modules(mixers)
        for name, _ in self.overrides:
            if name not in known:
                raise ConfigError(
                    f"{where}: {name[:100]!r} is no module of this model", "name one like model.layers.0.mlp.up_proj"
                )

    def to_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits}
        return own | {name: False if groups is None else groups.to_dict() for name, groups in self.overrides}

    @classmethod
    def from_dict(cls, table: Any, where: str) -> "QuantConfig":
        own = _parse_groups(table, where, may_have_more=True)
        named = {name: value for name, value in table.items() if name not in ("bits", "group_size", "mode")}
        for name, value in named.items():
            if value is not False and not isinstance(value, dict):
                raise ConfigError(
                    f"{where}: {str(name)[:100]!r} is {str(value)[:100]}",
                    "a module is false, or has bits and group_size",
                )
        overrides = tuple(
            (name, None if value is False else _parse_groups(value, f"{where}: {name[:100]}", may_have_more=False))
            for name, value in named.items()
        )
        return cls(own.bits, own.group_size, overrides)


def matrix_modules(mixers: Sequence[str]) -> set[str]:
    """Names of the modules whose weight is a matrix: those that can be quantized."""
    names = {"model.embed_tokens", "lm_head"}
    for index, mixer in enumerate(mixers):
        names |= {f"model.layers.{index}.self_attn.{name}" for name in _MIXER_MODULES[mixer]}
        names |= {f"model.layers.{index}.mlp.{name}" for name in _MLP_MODULES}
    return names


def _parse_groups(table: Any, where: str, may_have_more: bool) -> Groups:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {str(table)[:100]!r}", "it must be an object with bits and group_size")
    for name in table:
        if name not in ("bits", "group_size", "mode") and not may_have_more:
            raise ConfigError(f"{where}: {str(name)[:100]!r} is not known", "give bits and group_size")
    if table.get("mode", "affine") != "affine":
        raise ConfigError(f"{where}: mode is {str(table['mode'])[:100]!r}", "only 'affine' is supported")
    return Groups(_choice(table, "bits", BITS, where), _choice(table, "group_size", GROUP_SIZES, where))


def _choice(table: Mapping[str, Any], name: str, allowed: Sequence[int], where: str) -> int:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        problem = "is missing" if value is None else f"is {str(value)[:100]!r}"
        raise ConfigError(f"{where}: {name} {problem}", "use " + ", ".join(map(str, allowed)))
    return value
