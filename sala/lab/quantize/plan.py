"""Which matrix gets how many bits: one rule for all, and patterns for exceptions."""

import math
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sala.checkpoint.names import expected_tensors
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError
from sala.quantization_config import GROUP_SIZES, Groups, matrix_modules

BITS = (8, 4)
METHODS = ("rtn", "gptq", "awq")
WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Keep:
    """A pattern of modules and their bits; None keeps them whole."""

    pattern: str
    bits: int | None

    @classmethod
    def parse(cls, text: str) -> "Keep":
        """`PATTERN` (8 bits), `PATTERN=8`, `PATTERN=4` or `PATTERN=whole`."""
        pattern, _, choice = text.partition("=")
        known = {"": 8, "8": 8, "4": 4, WHOLE: None}
        if not pattern or choice not in known:
            raise InputError("keep", f"has {text[:100]!r}", "write it like v_proj=8 or 'model.layers.0.*=whole'")
        return cls(pattern, known[choice])

    def matches(self, module: str) -> bool:
        """By the whole name or by its last parts: `v_proj`, `mlp.down_proj`, `model.layers.0.*`."""
        return fnmatchcase(module, self.pattern) or fnmatchcase(module, f"*.{self.pattern}")


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """How to quantize. Patterns of `keep` come after the default ones; the last match of a module wins."""

    bits: int = 4
    group_size: int = 64
    method: str | None = None  # None: rtn for 8 bits, where it loses nothing measurable, else gptq
    keep: tuple[str, ...] = ()
    num_tokens: int = 32768  # of calibration
    length: int = 1024  # of its pieces

    def __post_init__(self) -> None:
        for field, known in (("bits", BITS), ("group_size", GROUP_SIZES), ("method", (None, *METHODS))):
            value = getattr(self, field)
            if value not in known:
                choices = ", ".join(str(choice) for choice in known if choice is not None)
                raise InputError(field, f"is {str(value)[:100]!r}", f"use {choices}")
        if not 2 <= self.length <= self.num_tokens:
            raise InputError("num_tokens", f"is {self.num_tokens}", f"it must be at least {self.length}")

    @property
    def chosen_method(self) -> str:
        return self.method or ("rtn" if self.bits == 8 else "gptq")


def plan_modules(config: SalaConfig, settings: QuantizeSettings) -> dict[str, Groups | None]:
    """Return the groups of every matrix, None if it stays whole, in the order of the computation."""
    shapes = expected_tensors(config)
    known = matrix_modules(config.mixers)
    modules = [name.removesuffix(".weight") for name in shapes if name.removesuffix(".weight") in known]
    own = [Keep.parse(text) for text in settings.keep]
    for rule in own:
        if not any(rule.matches(module) for module in modules):
            problem = f"has {rule.pattern[:100]!r}, which matches no module of this model"
            raise InputError("keep", problem, "see: sala show")
    rules = [*(Keep(pattern, 8) for pattern in default_keep(config)), *own]
    plan: dict[str, Groups | None] = {}
    for module in modules:
        bits = [settings.bits, *(rule.bits for rule in rules if rule.matches(module))][-1]
        plan[module] = None if bits is None else Groups(bits, settings.group_size)
        shape = shapes[f"{module}.weight"]
        if bits is not None and shape[1] % settings.group_size:
            fitting = [size for size in GROUP_SIZES if shape[1] % size == 0]
            remedy = f"use --group-size {fitting[-1]}" if fitting else f"keep it whole: --keep {module}={WHOLE}"
            raise CheckpointError(f"{module}.weight {list(shape)} has no groups of {settings.group_size}", remedy)
    if not any(plan.values()):
        raise InputError("keep", "leaves nothing to quantize", "keep less")
    return plan


def default_keep(config: SalaConfig) -> tuple[str, ...]:
    """Return the modules that have 8 bits by default: they are small and sensitive; see benchmarks/quant_quality.py."""
    return "embed_tokens", "lm_head", "v_proj", f"model.layers.{config.num_hidden_layers - 1}.*"


def count_bits(plan: dict[str, Groups | None], shapes: dict[str, tuple[int, ...]], whole_bits: int) -> float:
    """Return the bits per weight of all matrices together, including 16-bit scales and biases."""
    total = weights = 0.0
    for module, groups in plan.items():
        count = float(math.prod(shapes[f"{module}.weight"]))
        weights += count
        total += count * (whole_bits if groups is None else groups.bits + 32 / groups.group_size)
    return total / weights


def describe(plan: dict[str, Groups | None]) -> str:
    """Say how many matrices have how many bits."""
    kinds = Counter(f"matrices {WHOLE}" if groups is None else f"in {groups.bits} bits" for groups in plan.values())
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
