"""The table of kernel cases: every kernel with inputs, reference, peer, bytes and FLOPs.

`sala doctor` checks the cases at small shapes (`selftest.py`), `sala bench kernels` times those that have bytes, and
tests/kernels runs both. To add a kernel, add a case here.
"""

from sala.backends.torch.cases.attention import attention_cases
from sala.backends.torch.cases.rows import lightning_cases, row_cases
from sala.backends.torch.cases.shapes import KernelCase, Shapes

__all__ = ["KernelCase", "Shapes", "gpu_cases"]


def gpu_cases(shapes: Shapes) -> list[KernelCase]:
    """Return the cases of all Triton kernels."""
    return [*lightning_cases(shapes), *attention_cases(shapes), *row_cases(shapes)]
