"""What a kernel case is, and the sizes and random inputs from which cases are built."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.ops.lightning import decay_slopes
from sala.checkpoint.random import RELEASED
from sala.config import SalaConfig, SparseConfig
from sala.options.schema import length_label

Call = Callable[[], Any]
STATE_BYTES = 4  # states and scores are fp32
ROUNDING = 2e-2  # tolerance of results in bf16, relative to the largest number


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a kernel, and of its reference on the same inputs. The reference must be called first.

    `peer` is timed beside the kernel where that is not the reference; `also` returns what else the kernel has written.
    """

    kernel: Call
    reference: Call
    peer: Call | None = None
    also: Call | None = None

    @classmethod
    def of(
        cls, kernel: Callable[..., Any], reference: Callable[..., Any], *inputs: Any, peer: Call | None = None
    ) -> "KernelCall":
        """Return the call of a kernel and a reference that take the same arguments."""
        return cls(partial(kernel, *inputs), partial(reference, *inputs), peer)

    def error(self, measure: Callable[[Tensor, Tensor], float]) -> float:
        """Return the largest error of the kernel's results."""
        wanted = tensors(self.reference())
        found = [*tensors(self.kernel()), *(tensors(self.also()) if self.also is not None else ())]
        return max(measure(one, other) for one, other in zip(found, wanted, strict=True))


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel at some size: shared by `sala doctor`, `sala bench kernels` and the tests.

    `works` yields any number of sets of inputs, each in separate memory. `flops` and `num_bytes` are the
    least that the kernel must do: inputs read once, outputs written once; cases without bytes are checked but not
    timed. Short kernels are timed in a CUDA graph, over `num_sets` sets that together exceed every cache.
    """

    name: str
    size: str
    works: Callable[[], Iterable[KernelCall]]
    flops: int = 0
    num_bytes: int = 0
    peer: str = "reference"
    num_sets: int = 1
    measure: Callable[[Tensor, Tensor], float] | None = None  # None: `relative_error`
    tolerance: float = ROUNDING

    @property
    def in_graph(self) -> bool:
        return self.num_sets > 1

    def build(self, count: int) -> list[KernelCall]:
        """Build that many sets of inputs."""
        return list(islice(self.works(), count))

    def error(self) -> float:
        """Build one set of inputs and compare the kernel with its reference."""
        return self.build(1)[0].error(self.measure or relative_error)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The model whose kernels are run, and the sizes of their inputs."""

    device: torch.device
    lengths: tuple[int, ...] = (8192, 131_072)  # of prompts
    config: SalaConfig = RELEASED
    dtype: torch.dtype = torch.bfloat16
    num_rows: int = 8192  # of a prefill chunk
    batches: tuple[int, ...] = (1, 32)  # rows of a decode step
    rotated_bytes: int = 256 << 20  # more than any cache holds: what decode steps walk through before they come back
    shared: tuple[float, ...] = (0.75, 0.0)  # part of their free blocks that neighbouring queries have in common

    @property
    def sparse(self) -> SparseConfig:
        return self.config.sparse_config

    @property
    def context(self) -> int:
        """Tokens of the context of sparse layers: the longest prompt, but long enough to be sparse."""
        return max(*self.lengths, self.sparse.dense_len)

    @property
    def num_blocks(self) -> int:
        return -(-self.context // self.sparse.block_size)

    @property
    def num_queries(self) -> int:
        return min(self.num_rows, self.context)

    @property
    def scale(self) -> float:
        return float(self.config.head_dim**-0.5)

    @property
    def slopes(self) -> Tensor:
        return decay_slopes(self.config.lightning_nh, self.device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def projected(self, num_tokens: int, heads: int, dim: int, count: int) -> list[Tensor]:
        """Parts [n, heads, dim] of one wider projection, as the model's are."""
        both = self.random(num_tokens, count * heads * dim)
        return [part.unflatten(1, (heads, dim)) for part in both.chunk(count, 1)]

    def lightning(self, num_tokens: int) -> list[Tensor]:
        """Queries, keys and values of a lightning layer, [n, H, D] each."""
        return self.projected(num_tokens, self.config.lightning_nh, self.config.lightning_head_dim, 3)

    def states(self, count: int) -> Tensor:
        dim = self.config.lightning_head_dim
        return torch.randn(count, self.config.lightning_nh, dim, dim, device=self.device)

    def queries(self, num_tokens: int) -> Tensor:
        return self.random(num_tokens, self.config.num_attention_heads, self.config.head_dim)

    def arange(self, *limits: int) -> Tensor:
        return torch.arange(*limits, device=self.device)

    def num_sets(self, num_bytes: int) -> int:
        """Return how many sets of inputs of this size no cache can hold."""
        return max(2, -(-self.rotated_bytes // num_bytes))


def small_shapes(device: torch.device) -> Shapes:
    """Return the released shapes with as few rows as still select blocks, for checking; ragged in every direction."""
    return Shapes(
        device, (RELEASED.sparse_config.dense_len + 5,), num_rows=200, batches=(3,), rotated_bytes=0, shared=(0.75,)
    )


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference over the largest number."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def share_of_others(found: Tensor, wanted: Tensor) -> float:
    """Return the share of selected blocks that the reference did not select: ties may go either way."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    is_known = (found[..., :, None] == wanted[..., None, :]).any(-1)
    return float((~is_known).double().mean())


def row_count(count: int) -> str:
    return "1 row" if count == 1 else f"{length_label(count)} rows"
