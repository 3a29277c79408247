"""Faster training paths than the plain formulas, each checked on the device before it is used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.model import LightningMixer, SalaModel, SparseMixer
from sala.backends.torch.ops.lightning import decay_slopes, lightning_whole
from sala.lab.train.losses import LossWeights, head_loss


@dataclass(frozen=True, slots=True)
class FastPaths:
    """Switches for the fast paths; with all of them off only PyTorch's own operations run."""

    has_scan: bool = False  # the Triton kernel for lightning layers
    has_bf16_head: bool = False  # matrix products of head and loss in bf16
    has_graphs: bool = False  # forward and backward replayed as CUDA graphs

    @property
    def is_plain(self) -> bool:
        return not (self.has_scan or self.has_bf16_head or self.has_graphs)

    @classmethod
    def on(cls, device: torch.device, kernels: str = "auto") -> "FastPaths":
        """Return the paths whose results are correct on this device; with kernels off PyTorch's alone."""
        if device.type != "cuda":
            return cls()
        has_scan = kernels != "off" and _is_accurate(check_scan, device)
        return cls(has_scan, _is_accurate(check_head, device), has_graphs=True)


def set_scan(student: SalaModel, is_fast: bool) -> None:
    """Make the lightning layers use the training kernel for whole sequences, or the plain formula."""
    for layer in student.model.layers:
        if isinstance(layer.self_attn, LightningMixer):
            layer.self_attn.scan = fast_scan if is_fast else None


def fast_scan(q: Tensor, k: Tensor, v: Tensor, lengths: Any, slopes: Tensor, scale: float) -> Tensor:
    """Compute `lightning_whole` in bf16 with fp32 states; sequences of different lengths use the plain formula."""
    from sala.backends.torch.kernels.lightning_scan import lightning_scan

    if len(set(lengths)) > 1:
        return lightning_whole(q, k, v, lengths, slopes, scale)
    q, k, v = (x.to(torch.bfloat16).contiguous() for x in (q, k, v))
    return lightning_scan(q, k, v, slopes, lengths[0], scale)


@contextmanager
def uncompiled_sparse_layers(student: SalaModel) -> Iterator[None]:
    """Run sparse layers uncompiled: inside a compiled layer the gradients of sparse attention became NaN."""
    layers: list[Any] = [layer for layer in student.model.layers if isinstance(layer.self_attn, SparseMixer)]
    kept = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, compiled in zip(layers, kept, strict=True):
            layer._compiled_call_impl = compiled


def _is_accurate(check: Callable[[torch.device], float], device: torch.device) -> bool:
    """Return whether a fast path runs and differs from the plain one by bf16 rounding only."""
    try:
        error = check(device)
    except Exception as problem:
        print(f"{check.__name__} failed, using the plain path: {problem!r}"[:500])
        return False
    print(f"{check.__name__}: relative error {error:.2e}")
    return error < 2e-2


def check_scan(device: torch.device) -> float:
    """Return the largest relative error of the scan kernel's output and gradients against the formula in fp64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2 * 300, 9, 64, generator=generator).to(device, torch.bfloat16) for _ in range(4)]
    slopes = decay_slopes(9, device)
    outputs = []
    for dtype, function in ((torch.bfloat16, fast_scan), (torch.float64, lightning_whole)):
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in inputs[:3])
        out = function(q, k, v, (300, 300), slopes, 0.125)
        out.backward(inputs[3].to(out.dtype))
        outputs.append([out.detach(), q.grad, k.grad, v.grad])
    return max(_relative_error(a, b) for a, b in zip(*outputs, strict=True))


def check_head(device: torch.device) -> float:
    """Return the relative error of loss and gradient with products in bf16 against fp32."""
    generator = torch.Generator().manual_seed(0)
    hidden, wanted, head = (
        torch.randn(n, 64, generator=generator).to(device, torch.bfloat16) for n in (256, 256, 1024)
    )
    labels = torch.arange(256, device=device)
    weights = LossWeights(torch.ones(256, device=device), torch.full((256,), 0.25, device=device))
    outputs = []
    for dtype in (torch.bfloat16, torch.float32):
        rows = hidden.to(dtype, copy=True).requires_grad_()
        loss, _ = head_loss(rows, head.to(dtype), labels, weights, (wanted.to(dtype), head.to(dtype)), 256)
        loss.backward()
        outputs.append([loss.detach(), rows.grad])
    return max(_relative_error(a, b) for a, b in zip(*outputs, strict=True))


def _relative_error(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
