"""Forward and backward of a micro-batch as one CUDA graph per shape.

A small model leaves the GPU waiting for Python: launching a forward and backward pass takes longer than running it.
The micro-batches of a mixture have few shapes, so each shape is captured once and then replayed.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_ERROR = 0.02  # relative difference between the gradients of a replay and of the eager pass; bf16 explains 0.01
WARM_UPS = 2  # eager passes before a capture: compilation and library handles must exist already

# (inputs on the device) -> (loss, sums); the loss is differentiable
Function = Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor]]


class GraphedPass:
    """Run a differentiable function and its backward pass, which adds to the gradients in `grads`, from graphs.

    A shape whose capture fails or whose replay disagrees with the eager pass runs eagerly from then on.
    """

    def __init__(self, function: Function, grads: Sequence[Tensor], note: Callable[[str], None] = print) -> None:
        self.function, self.grads, self.note = function, list(grads), note
        self._graphs: dict[Hashable, _Graph | None] = {}
        self._pool: Any = None

    def __call__(self, inputs: tuple[Tensor, ...], kind: Hashable = None) -> Tensor:
        """Return the sums; inputs may be in pinned memory of the host. `kind` tells functions of one shape apart."""
        key = (kind, *(value.shape for value in inputs))
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs)
        graph = self._graphs[key]
        return self._run_eagerly(inputs) if graph is None else graph.replay(inputs)

    def _run_eagerly(self, inputs: tuple[Tensor, ...]) -> Tensor:
        device = self.grads[0].device
        loss, sums = self.function(tuple(value.to(device, non_blocking=True) for value in inputs))
        loss.backward()
        return sums

    def _capture(self, inputs: tuple[Tensor, ...]) -> "_Graph | None":
        name = "x".join(map(str, inputs[0].shape))
        kept = [grad.clone() for grad in self.grads]
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._clear_grads()
                    self._run_eagerly(inputs)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.empty_cache()
            wanted = [grad.clone() for grad in self.grads]
            graph = _Graph(self.function, inputs, self._pool)
            self._pool = graph.graph.pool()
            self._clear_grads()
            graph.replay(inputs)
            error = _relative_error(self.grads, wanted)
            self.note(f"captured a step of {name}: relative error {error:.1e}")
            return graph if error < MAX_ERROR else None
        except Exception as problem:  # the eager pass does the same, only slower
            torch.cuda.synchronize()
            self.note(f"a step of {name} cannot be captured: {problem!r}"[:500])
            return None
        finally:
            for grad, value in zip(self.grads, kept, strict=True):
                grad.copy_(value)

    def _clear_grads(self) -> None:
        for grad in self.grads:
            grad.zero_()


class _Graph:
    """A captured pass with its input and output tensors."""

    def __init__(self, function: Function, inputs: tuple[Tensor, ...], pool: Any) -> None:
        self.inputs = tuple(value.to("cuda", copy=True) for value in inputs)
        self.graph = torch.cuda.CUDAGraph()
        # the data loader pins memory in another thread meanwhile, which a strict capture would forbid
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="relaxed"):
            loss, self.sums = function(self.inputs)
            loss.backward()

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for target, value in zip(self.inputs, inputs, strict=True):
            target.copy_(value, non_blocking=True)
        self.graph.replay()
        return self.sums


def _relative_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    difference = sum(float((a - b).double().square().sum()) for a, b in zip(found, wanted, strict=True))
    return float((difference / max(sum(float(b.double().square().sum()) for b in wanted), 1e-30)) ** 0.5)
