"""LoRA adapters over one loaded model: rows of different adapters run in one batch.

The linears that adapters change are replaced by ones that add scale * up @ down to the rows of each adapter. Products
with the low-rank matrices are fp32, so the result is that of merged weights, up to rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from sala.backends.torch.model import SalaModel
from sala.checkpoint.lora import Adapter

Rows = Sequence[tuple[str, int]]  # fingerprints of adapters, each with the number of rows that follow


@dataclass
class Runs:
    """The rows of the batch that is being computed, by adapter: (begin, end, fingerprint)."""

    now: list[tuple[int, int, str]] = field(default_factory=list)


class AdaptedLinear(nn.Module):
    """A linear, x [T, in] → [T, out], and by fingerprint what adapters add: down [r, in] and up [out, r] in fp32."""

    def __init__(self, base: nn.Module, runs: Runs) -> None:
        super().__init__()
        self.base, self.runs = base, runs
        self.changes: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        for begin, end, fingerprint in self.runs.now:
            if fingerprint in self.changes:
                down, up = self.changes[fingerprint]
                y[begin:end] += (x[begin:end].float() @ down.T @ up.T).to(y.dtype)
        return y


class AdapterSet:
    """The adapters of a model."""

    def __init__(self, model: SalaModel, adapters: Sequence[Adapter], device: torch.device) -> None:
        """Replace the linears that the adapters change. What reads weights of the model must have done so before."""
        self._runs = Runs()
        for adapter in adapters:
            for name, change in adapter.changes.items():
                linear = model.get_submodule(name)
                if not isinstance(linear, AdaptedLinear):
                    linear = AdaptedLinear(linear, self._runs)
                    model.set_submodule(name, linear)
                down, up = torch.from_numpy(change.down), torch.from_numpy(change.up) * change.scale
                linear.changes[adapter.fingerprint] = down.to(device), up.to(device)

    @contextmanager
    def applied(self, rows: Rows) -> Iterator[None]:
        """Apply adapters to the rows of the batches that are computed in the block."""
        begin = 0
        for fingerprint, group in groupby(rows, lambda one: one[0]):
            end = begin + sum(count for _, count in group)
            if fingerprint:
                self._runs.now.append((begin, end, fingerprint))
            begin = end
        try:
            yield
        finally:
            self._runs.now.clear()
