"""Kernels for GPUs, run without one: Triton's interpreter takes CPU tensors."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

IS_FULL = bool(os.environ.get("SALA_TEST_FULL"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compiling takes seconds each: the newest and the tightest card by default, the older ones on demand."""
    older = pytest.mark.skip(reason="compiles for older GPUs with SALA_TEST_FULL=1")
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("capability", 90) < 90 and not IS_FULL:
            item.add_marker(older)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def dot_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles by BLAS: on some CPUs a row's fp32 sum depends on its place in the tile.

    Rounded from fp64 it does not. On a GPU a tensor core sums every row of a tile in the same order.
    """
    from triton.runtime import interpreter

    matmul = np.matmul

    def matmul_in_fp64(a: np.ndarray, b: np.ndarray, dtype: type | None = None) -> np.ndarray:
        return matmul(a, b, dtype=np.float64).astype(dtype or np.result_type(a, b))

    monkeypatch.setattr(interpreter.np, "matmul", matmul_in_fp64)


@pytest.fixture(autouse=True)
def scalars_as_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds scalars as arrays of one element, which numpy 2.4 no longer takes for a loop's bound."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: object, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_more)
