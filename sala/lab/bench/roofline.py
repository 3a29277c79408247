# mypy: disable-error-code="import-untyped, no-untyped-call, no-any-return"
"""Time single kernels: against a peer, and against the least time that their work can take on this GPU.

The least time is a roofline measured in the same run: the FLOPs at the speed of a large matrix product, the bytes at
the speed of a large copy, whichever takes longer. Only unavoidable work counts: inputs read once, outputs written once,
no product that a better algorithm could leave out. The cases are those of `sala.backends.torch.cases`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sala.backends.torch.cases import gpu_cases
from sala.backends.torch.cases.rows import copying
from sala.backends.torch.cases.shapes import Call, KernelCase, Shapes
from sala.errors import SalaError, describe_error
from sala.lab.bench.measure import capture, release

MATRIX, COPY_BYTES = 8192, 1 << 30
WARM_MS, REPEAT_MS, LONG_MS = 10, 40, 200


@dataclass(frozen=True, slots=True)
class Roofline:
    """The highest speeds of this GPU, as measured."""

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, flops: int, num_bytes: int) -> float:
        return 1e3 * max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class KernelResult:
    """The result of a measurement; None where something did not run; `error` says why."""

    name: str
    size: str
    ms: float | None
    floor_ms: float
    share: float | None  # of the roofline
    peer: str
    peer_ms: float | None
    ratio: float | None  # how many times as fast as the peer
    tflops: float | None  # where products are the limit
    error: str = ""


def timed_cases(shapes: Shapes) -> list[KernelCase]:
    """Return the kernel cases that have a floor to be timed against."""
    return [case for case in gpu_cases(shapes) if case.num_bytes]


def measure_roofline(device: torch.device) -> Roofline:
    """Measure a large bf16 product and a large copy, read and write."""
    try:
        left, right = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=device) for _ in range(2))
        product_ms = milliseconds(partial(torch.matmul, left, right))
        del left, right
        num_bytes = 2 * min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
        copy_ms = milliseconds(copying(num_bytes, device))
    except torch.OutOfMemoryError:
        raise SalaError("the GPU has too little free memory", "stop other processes that use it") from None
    finally:
        release()
    return Roofline(2 * MATRIX**3 / product_ms * 1e3, num_bytes / copy_ms * 1e3)


def measure(one: KernelCase, roofline: Roofline) -> KernelResult:
    """Measure a kernel; one that fails or does not fit into memory gives a result with the reason."""
    try:
        ms, peer_ms, error = _times(one)
    except Exception as problem:  # any failure is the result
        ms, peer_ms, error = None, None, reason(problem)
    release()
    return result(one, roofline, ms, peer_ms, error)


def _times(one: KernelCase) -> tuple[float, float | None, str]:
    with torch.inference_mode():
        works = one.build(one.num_sets)
        time = milliseconds_in_graph if one.in_graph else lambda calls: milliseconds(calls[0])
        ms = time([work.kernel for work in works])
        try:
            return ms, time([work.peer or work.reference for work in works]), ""
        except Exception as problem:
            return ms, None, f"{one.peer}: {reason(problem)}"


def result(
    one: KernelCase, roofline: Roofline, ms: float | None, peer_ms: float | None, error: str = ""
) -> KernelResult:
    floor = roofline.floor_ms(one.flops, one.num_bytes)
    is_product = one.flops / roofline.flops_per_s > one.num_bytes / roofline.bytes_per_s
    return KernelResult(
        one.name,
        one.size,
        ms,
        floor,
        share=floor / ms if ms else None,
        peer=one.peer,
        peer_ms=peer_ms,
        ratio=peer_ms / ms if ms and peer_ms else None,
        tflops=one.flops / ms / 1e9 if ms and is_product else None,
        error=error,
    )


def reason(problem: BaseException) -> str:
    if isinstance(problem, MemoryError) or "out of memory" in str(problem).lower():
        return "out of memory"
    return describe_error(problem)


# timing


def milliseconds(call: Call) -> float:
    """Return the median of many calls with cold caches; of a long call, one after a warm-up."""
    from triton.testing import do_bench

    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    once = begin.elapsed_time(end)
    if once > LONG_MS:
        return once
    return float(do_bench(call, warmup=WARM_MS, rep=REPEAT_MS, return_mode="median"))


def milliseconds_in_graph(calls: Sequence[Call]) -> float:
    """Return the time of one call when the calls follow each other in a CUDA graph."""

    def run_all() -> None:
        for call in calls:
            call()

    return milliseconds(capture(run_all).replay) / len(calls)
