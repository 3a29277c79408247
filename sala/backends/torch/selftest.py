"""Every kernel against its readable twin, on the device where it will run: what `sala doctor` shows.

A check never raises: a kernel that cannot be compiled or started is one that failed, with the reason.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.cpu_decode import CpuDecode
from sala.backends.torch.fast.dispatch import FusedForward, select_ops
from sala.backends.torch.half_linear import put_half_linears
from sala.backends.torch.kernels import native, triton_kernels
from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops.affine import dequantize
from sala.backends.torch.ops.lightning import decay_slopes, lightning_step
from sala.backends.torch.ops.sparse import sparse_attention
from sala.backends.torch.quantized_linear import AffineLinear, AffineWeight
from sala.backends.torch.random import random_model
from sala.checkpoint.random import TINY
from sala.config import SalaConfig
from sala.protocol import Plan, Row

PROMPT = 1100  # tokens; more blocks than the model chooses from
ANSWER = (1, 1, 4, 1)  # tokens of the steps that follow
DENSE_LEN = 2048  # beyond them: no dense row is longer than this
SMALL = replace(  # heads as wide as real ones
    TINY, head_dim=64, lightning_head_dim=64, sparse_config=replace(TINY.sparse_config, dense_len=DENSE_LEN)
)
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Check:
    """How far a kernel is from its reference, relative to the largest number; infinitely if it did not run."""

    name: str
    error: float
    tolerance: float
    message: str = ""

    @property
    def is_good(self) -> bool:
        return self.error <= self.tolerance  # and NaN is not


@dataclass(frozen=True, slots=True)
class Trial:
    """Something to be checked: `measure` gives the relative error."""

    measure: Callable[[], float]
    tolerance: float


def checks(device: torch.device) -> Iterator[Check]:
    """The checks of this device's kernels, as they are made; none where there are no kernels."""
    for name, trial in trials(device).items():
        yield check(name, trial)


def trials(device: torch.device) -> Mapping[str, Trial]:
    if device.type == "cpu" and native.load() is not None:
        return cpu_trials()
    if device.type == "cuda" and triton_kernels.why_not(device) is None:
        from sala.backends.torch import selftest_gpu

        return selftest_gpu.trials(device)
    return {}


def check(name: str, trial: Trial) -> Check:
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Check(name, trial.measure(), trial.tolerance)
    except Exception as error:  # whatever it is, it is the result
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Check(name, math.inf, trial.tolerance, reason[:_MESSAGE])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest number."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def cpu_trials() -> dict[str, Trial]:
    return {
        **{f"native linear, {bits} bits": Trial(partial(_linear, bits), 1e-5) for bits in (4, 8)},
        **{f"native linear, {name}": Trial(partial(_plain, dtype), 1e-5) for name, dtype in _HALVES.items()},
        **{f"native expansion, {bits} bits": Trial(partial(_expansion, bits), 1e-6) for bits in (4, 8)},
        "native fold": Trial(_fold, 1e-5),
        "native attention": Trial(_attention, 1e-5),
        "native step, dense": Trial(partial(_native_step, False), 1e-4),
        "native step, sparse": Trial(partial(_native_step, True), 1e-4),
    }


def _affine(bits: int, num_out: int = 96, num_in: int = 320, group_size: int = 64) -> AffineWeight:
    codes = torch.randint(-(1 << 31), 1 << 31, (num_out, num_in * bits // 32)).int()
    scales, biases = torch.randn(2, num_out, num_in // group_size) / (1 << bits)
    return AffineWeight(codes, scales.contiguous(), biases.contiguous(), bits, group_size)


def _linear(bits: int) -> float:
    weight, x = _affine(bits), torch.randn(3, 320)
    reference = dequantize(weight.codes, weight.scales, weight.biases, bits, weight.group_size)
    return relative_error(AffineLinear(weight).few(x), x.double() @ reference.double().T)


def _plain(dtype: torch.dtype) -> float:
    linear, x = torch.nn.Linear(320, 97, bias=False, dtype=dtype), torch.randn(3, 320)
    model = torch.nn.Sequential(linear)
    put_half_linears(model)
    return relative_error(model(x), x.double() @ linear.weight.double().T)


def _expansion(bits: int) -> float:
    weight = _affine(bits)
    reference = dequantize(weight.codes, weight.scales, weight.biases, bits, weight.group_size)
    return relative_error(AffineLinear(weight).expand(0, weight.num_out), reference)


def _fold() -> float:
    heads, dim, count = 3, 64, 5
    k, v = torch.randn(2, count, heads, dim)
    state, slopes = torch.randn(heads, dim, dim), decay_slopes(heads)
    wanted = state[None]
    for i in range(count):
        _, wanted = lightning_step(k[i : i + 1], k[i : i + 1], v[i : i + 1], wanted, slopes, 1.0)
    return relative_error(select_ops().lightning_fold(k, v, state, slopes), wanted[0])


def _attention() -> float:
    """Over blocks in no order, of which the last one is not yet full."""
    num_queries, heads, groups, dim, block_size, num_pages = 37, 9, 3, 64, 64, 12
    q, positions = torch.randn(num_queries, heads, dim), torch.arange(num_queries) + (num_pages - 1) * block_size
    k, v = torch.randn(2, groups, num_pages, block_size, dim)
    order = torch.rand(num_queries, groups, num_pages - 1).argsort(-1)
    selected = torch.cat((order[..., :5], torch.full((num_queries, groups, 1), num_pages - 1)), -1)
    case = q, k, v, torch.randperm(num_pages), selected, positions, dim**-0.5
    return relative_error(select_ops().sparse_attention(*case), sparse_attention(*case))


def _native_step(is_sparse: bool) -> float:
    model = random_model(SMALL, torch.float32, torch.device("cpu"))
    return _decode(CpuDecode(model), model, is_sparse)


def _decode(steps: FusedForward, model: SalaModel, is_sparse: bool) -> float:
    """The steps of an answer, after a prompt that the model reads for both."""
    two = Pair(steps, model, is_sparse)
    two.read(PROMPT)
    return two.compare(ANSWER)


class Pair:
    """The faster way and the model that defines it, each with a cache of its own."""

    def __init__(self, steps: FusedForward, model: SalaModel, is_sparse: bool) -> None:
        self.steps, self.model = steps, model
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

    def read(self, count: int) -> None:
        """Tokens that the model computes in both caches."""
        plan = Plan((self.row(count),))
        for cache in self.caches:
            self.model(pack(plan, self.device), cache)

    def compare(self, sizes: Sequence[int]) -> float:
        """Rows of these sizes: the distance of all hidden states together, relative to their length.

        Together, because in half precision a near tie between two blocks may go one way here and another there.
        """
        found, wanted = [], []
        for size in sizes:
            plan = Plan((self.row(size),))
            batch = pack(plan, self.device)
            assert self.steps.can_run(batch)
            found.append(self.steps(batch, self.caches[0]).clone())
            wanted.append(self.model(pack(plan, self.device), self.caches[1]))
        a, b = torch.cat(found).double(), torch.cat(wanted).double()
        return float((a - b).norm() / b.norm())
