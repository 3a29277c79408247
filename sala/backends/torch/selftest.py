"""Every kernel against its reference, on the device where it will run: what `sala doctor` shows.

The kernels come from the table in `cases/`; then whole steps of a small model run by the fused forward and by the
model. A check never raises: a kernel that cannot be compiled or started has failed, with the reason.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.cases import KernelCase, gpu_cases
from sala.backends.torch.cases.cpu import cpu_cases
from sala.backends.torch.cases.shapes import small_shapes
from sala.backends.torch.fast.cpu_decode import CpuDecode
from sala.backends.torch.fast.dispatch import FusedForward, cpu_kernel, linear_kernels
from sala.backends.torch.kernels import native, triton_kernels
from sala.backends.torch.linears import AffineLinear, AffineWeight
from sala.backends.torch.loader import random_model
from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops import affine
from sala.checkpoint.random import TINY
from sala.config import SalaConfig
from sala.errors import describe_error
from sala.protocol import Plan, Row

PROMPT = 1100  # tokens; more blocks than the model selects
ANSWER = (1, 1, 4, 1)  # tokens of the steps that follow
DENSE_LEN = 2048  # beyond them: no dense row is longer than this
SMALL = replace(  # heads as wide as those of the released model
    TINY, head_dim=64, lightning_head_dim=64, sparse_config=replace(TINY.sparse_config, dense_len=DENSE_LEN)
)
KINDS, REGIMES = ("prefill", "decode"), ("dense", "sparse")
STEP_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """The error of a kernel relative to the largest number of its reference; infinite if it did not run."""

    name: str
    error: float
    tolerance: float
    message: str = ""

    @property
    def is_good(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


@dataclass(frozen=True, slots=True)
class Trial:
    """Something to be checked: `measure` returns the relative error."""

    measure: Callable[[], float]
    tolerance: float


def checks(device: torch.device) -> Iterator[KernelCheck]:
    """Yield the checks of this device's kernels as they are made; none where there are no kernels."""
    for name, trial in trials(device).items():
        yield check(name, trial)


def trials(device: torch.device) -> Mapping[str, Trial]:
    if device.type == "cpu" and native.load() is not None:
        return {**case_trials("native", cpu_cases()), **cpu_step_trials()}
    if device.type == "cuda" and triton_kernels.why_not(device) is None:
        return {**case_trials("Triton", gpu_cases(small_shapes(device))), **gpu_step_trials(device)}
    return {}


def check(name: str, trial: Trial) -> KernelCheck:
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return KernelCheck(name, trial.measure(), trial.tolerance)
    except Exception as error:  # whatever it is, it is the result
        return KernelCheck(name, math.inf, trial.tolerance, describe_error(error))


def case_trials(kind: str, cases: Sequence[KernelCase]) -> dict[str, Trial]:
    """Name the cases, by their sizes too where one name has several."""
    names = [case.name for case in cases]
    sizes = [f", {case.size}" if names.count(case.name) > 1 else "" for case in cases]
    found = zip(cases, sizes, strict=True)
    return {f"{kind} {case.name}{size}": Trial(case.error, case.tolerance) for case, size in found}


def cpu_step_trials() -> dict[str, Trial]:
    """Try the steps of an answer, after a prompt that the model computes for both."""
    step = partial(_step_error, torch.device("cpu"), torch.float32, "decode")
    return {f"native step, {regime}": Trial(partial(step, regime == "sparse"), 1e-4) for regime in REGIMES}


def gpu_step_trials(device: torch.device) -> dict[str, Trial]:
    """Try a prompt in two chunks, or an answer after one, by all kernels together."""
    plain = {
        f"GPU {kind}, {regime}, {str(dtype).removeprefix('torch.')}": Trial(
            partial(_step_error, device, dtype, kind, regime == "sparse"), tolerance
        )
        for dtype, tolerance in STEP_ERRORS.items()
        for kind in KINDS
        for regime in REGIMES
    }
    packed = {
        f"GPU {kind}, {bits} bits": Trial(
            partial(_step_error, device, torch.bfloat16, kind, True, bits), STEP_ERRORS[torch.bfloat16]
        )
        for kind in KINDS
        for bits in (4, 8)
    }
    return plain | packed


def _step_error(device: torch.device, dtype: torch.dtype, kind: str, is_sparse: bool, bits: int | None = None) -> float:
    """Compare the fused forward with the model; with `bits`, packed matrices with the same ones dequantized."""
    model = fused_model = random_model(SMALL, dtype, device)
    if bits is not None:
        fused_model, kernels = random_model(SMALL, dtype, device), linear_kernels(device, dtype)
        assert kernels is not None
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                weight = _nearest(module.weight, bits)
                module.weight.copy_(weight.rows(slice(None)))
                fused_model.set_submodule(name, AffineLinear(weight, module.bias, kernels=kernels))
    if device.type == "cpu":
        kernel = cpu_kernel(device)
        assert kernel is not None
        return Pair(CpuDecode(fused_model, kernel), model, is_sparse).compare_kind(kind)
    from sala.backends.torch.fast.gpu_forward import GpuForward

    return Pair(GpuForward(fused_model, device, PROMPT + 64), model, is_sparse).compare_kind(kind)


def _nearest(weight: Tensor, bits: int, group_size: int = 32) -> AffineWeight:
    """Quantize between the smallest and the largest number of each group."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.aminmax(dim=-1)
    scales = (high - low) / ((1 << bits) - 1)
    codes = ((groups - low.unsqueeze(-1)) / scales.unsqueeze(-1)).round().int().flatten(1)
    return AffineWeight(affine.pack(codes, bits), scales, low, bits, group_size)


class Pair:
    """The fused forward and the model that defines it, each with a cache of its own."""

    def __init__(self, fused: FusedForward, model: SalaModel, is_sparse: bool) -> None:
        self.fused, self.model = fused, model
        self.config: SalaConfig = model.config
        weight = model.model.norm.weight
        self.device = weight.device
        num_pages = PROMPT // self.config.sparse_config.block_size + 2
        self.caches = [HybridCache(self.config, num_pages, 2, weight.dtype, self.device) for _ in range(2)]
        self.pages = tuple(torch.randperm(num_pages).tolist())
        self.sparse_from = 0 if is_sparse else self.config.sparse_config.dense_len - 1
        self.end = 0

    def row(self, count: int) -> Row:
        tokens = tuple(torch.randint(self.config.vocab_size, (count,)).tolist())
        row = Row(tokens, self.end, self.pages, 1, self.sparse_from)
        self.end += count
        return row

    def compare_kind(self, kind: str) -> float:
        """Compare a prompt in two chunks ("prefill"), or the steps of an answer after it ("decode")."""
        if kind == "prefill":
            return self.compare((PROMPT - 300, 300))
        plan = Plan((self.row(PROMPT),))
        for cache in self.caches:
            self.model(pack(plan, self.device), cache)
        return self.compare(ANSWER)

    def compare(self, sizes: Sequence[int]) -> float:
        """Run rows of these sizes and return the distance of all hidden states, relative to their norm.

        All together, because in 16 bits a near tie between two blocks may go one way here and another way there.
        """
        found, wanted = [], []
        for size in sizes:
            plan = Plan((self.row(size),))
            batch = pack(plan, self.device)
            assert self.fused.can_run(batch)
            found.append(self.fused(batch, self.caches[0]).clone())
            wanted.append(self.model(pack(plan, self.device), self.caches[1]))
        a, b = torch.cat(found).double(), torch.cat(wanted).double()
        return float((a - b).norm() / b.norm())
