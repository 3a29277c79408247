"""Metal sources and their launches: a `Launch` describes one completely, `run` passes it to MLX.

A source is the body of a kernel; MLX writes the signature around it from the names and arrays of the launch. Inputs of
fewer than eight elements are in another address space than longer ones, so sources index them by name and never pass
their addresses on.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

THREADS = 256  # per threadgroup, for every kernel


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel: arrays by name, template arguments, outputs by name (shape and dtype), threadgroups."""

    kernel: str
    inputs: Mapping[str, mx.array]
    template: Mapping[str, mx.Dtype | int]
    outputs: Mapping[str, tuple[tuple[int, ...], mx.Dtype]]
    threadgroups: tuple[int, int, int]
    threadgroup: tuple[int, int, int] = (THREADS, 1, 1)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The number of threads."""
        return self.threadgroups[0] * self.threadgroup[0], *self.threadgroups[1:]


Run = Callable[[Launch], list[mx.array]]


@functools.cache
def source(kernel: str) -> str:
    return (Path(__file__).parent / f"{kernel}.metal").read_text(encoding="utf-8")


def fingerprint(kernels: tuple[str, ...]) -> str:
    """Return a hash of the sources, by which verdicts are kept."""
    return hashlib.sha256("\0".join(map(source, kernels)).encode()).hexdigest()[:16]


@functools.cache
def _build(kernel: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Callable[..., Any]:
    name = f"sala_{kernel}"
    built: Any = mx.fast.metal_kernel(name=name, input_names=inputs, output_names=outputs, source=source(kernel))
    return built


def run(launch: Launch, is_shown: bool = False) -> list[mx.array]:
    """Launch lazily on the GPU; `is_shown` prints the source that MLX wrote."""
    kernel = _build(launch.kernel, tuple(launch.inputs), tuple(launch.outputs))
    return kernel(
        inputs=list(launch.inputs.values()),
        template=list(launch.template.items()),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=[shape for shape, _ in launch.outputs.values()],
        output_dtypes=[dtype for _, dtype in launch.outputs.values()],
        verbose=is_shown,
    )
