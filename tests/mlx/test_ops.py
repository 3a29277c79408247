"""Every op against torch's of the same name, at sizes that go wrong easily."""

import shutil
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from sala.backends.mlx.model import RMSNorm
from sala.backends.mlx.ops import dense, lightning, sparse
from sala.backends.torch.ops import dense as torch_dense
from sala.backends.torch.ops import lightning as torch_lightning
from sala.backends.torch.ops import sparse as torch_sparse
from sala.config import SparseConfig
from tests.mlx.place import DEVICE

GEOMETRIES = [SparseConfig(8, 4, 1, 16, 32, 4, dense_len=0), SparseConfig(32, 16, 1, 64, 128, 4, dense_len=0)]
GEOMETRIES += [SparseConfig(12, 4, 2, 32, 32, 5, dense_len=0)]  # windows that reach over two strides more


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def close(got: mx.array, want: torch.Tensor, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.array(got), want.numpy(), atol=atol, rtol=1e-5)


def both(*arrays: np.ndarray[Any, Any]) -> tuple[list[mx.array], list[torch.Tensor]]:
    return [mx.array(array) for array in arrays], [torch.from_numpy(array) for array in arrays]


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_slopes(heads: int) -> None:
    close(lightning.decay_slopes(heads), torch_lightning.decay_slopes(heads), 0)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 127, 200, 2048 + 77])
@pytest.mark.parametrize(("heads", "dim"), [(3, 6), (8, 16)])
def test_lightning_from_any_state(n: int, heads: int, dim: int) -> None:
    ours, theirs = both(*(normal(n, heads, dim, seed=i) for i in range(3)), normal(heads, dim, dim))
    slopes, scale = lightning.decay_slopes(heads), dim**-0.5
    got, state = lightning.lightning_prefill(*ours, slopes, scale)
    want, after = torch_lightning.lightning_prefill(*theirs, torch_lightning.decay_slopes(heads), scale)
    close(got, want, 1e-4)
    close(state, after, 1e-4)
    folded = lightning.lightning_fold(ours[1], ours[2], ours[3], slopes)
    close(folded, after, 1e-4)


def test_lightning_over_ragged_rows() -> None:
    lengths = [1, 70, 64, 5]
    ours, theirs = both(*(normal(sum(lengths), 4, 8, seed=i) for i in range(3)), normal(4, 4, 8, 8))
    got, states = lightning.lightning_ragged(*ours, lengths, lightning.decay_slopes(4), 0.3)
    want, after = torch_lightning.lightning_ragged(*theirs, lengths, torch_lightning.decay_slopes(4), 0.3)
    close(got, want, 1e-4)
    close(states, after, 1e-4)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("n", [5, 64, 65, 200])
def test_pooled_keys(geometry: SparseConfig, n: int) -> None:
    (ours,), (theirs,) = both(normal(2, n, 8))
    for times in (1, 4):
        kernel, stride = times * geometry.kernel_size, times * geometry.kernel_stride
        got, want = sparse.pool_keys(ours, kernel, stride), torch_sparse.pool_keys(theirs, kernel, stride)
        assert got.shape == tuple(want.shape)
        close(got, want)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("length", [3, 64, 130, 515])
def test_the_same_blocks_are_chosen(geometry: SparseConfig, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, and the choice by them, also where many are equal; in one tile and in several."""
    keys, q = normal(2, length, 8), normal(length, 6, 8, seed=1)
    keys[:, length // 3 :] = keys[:, :1]  # equal windows
    (k, queries), (k_, queries_) = both(keys, q)
    sizes = ((geometry.kernel_size, geometry.kernel_stride), (4 * geometry.kernel_size, 4 * geometry.kernel_stride))
    pooled = [sparse.pool_keys(k, *size) for size in sizes]
    pooled_ = [torch_sparse.pool_keys(k_, *size) for size in sizes]
    positions, positions_ = mx.arange(length, dtype=mx.int32), torch.arange(length)
    windows = sparse.window_scores(queries, *pooled, positions, geometry, 0.35)
    windows_ = torch_sparse.window_scores(queries_, *pooled_, positions_, geometry, 0.35)
    close(windows, windows_)
    count = -(-length // geometry.block_size)
    scores = torch_sparse.block_scores(windows_, count, geometry)
    close(sparse.block_scores(mx.array(windows_.numpy()), count, geometry), scores, 0)
    want = torch_sparse.top_blocks(scores, positions_, geometry)
    close(sparse.top_blocks(mx.array(scores.numpy()), positions, geometry), want, 0)
    rounded = (scores.view(torch.int32) + (200 * torch.rand_like(scores)).int()).view(torch.float32)  # tied, some not
    want_rounded = torch_sparse.top_blocks(rounded, positions_, geometry)
    close(sparse.top_blocks(mx.array(rounded.numpy()), positions, geometry), want_rounded, 0)
    whole = sparse.select_blocks(queries, *pooled, positions, count, geometry, 0.35)
    monkeypatch.setitem(sparse.TILE_BYTES, DEVICE, 20_000)
    tiles = sparse.select_blocks(queries, *pooled, positions, count, geometry, 0.35)
    np.testing.assert_array_equal(np.array(whole), np.array(tiles))
    if count <= geometry.num_selected:  # all that exist, in another order
        np.testing.assert_array_equal(np.sort(np.array(whole)), np.sort(want.numpy()))


@pytest.mark.parametrize("tile", [8 << 20, 10_000])
def test_attention_over_chosen_blocks(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sparse.TILE_BYTES, DEVICE, tile)
    rng = np.random.default_rng(0)
    (q, k, v), (q_, k_, v_) = both(normal(40, 6, 8), normal(2, 9, 16, 8), normal(2, 9, 16, 8, seed=1))
    table, positions = rng.permutation(9)[:6].astype(np.int32), np.arange(50, 90, dtype=np.int32)
    selected = np.stack([[rng.permutation(6)[:4] for _ in range(2)] for _ in range(40)]).astype(np.int32)
    selected[..., 0] = positions[:, None] // 16  # its own block, so that something is seen
    selected[3:9, :, 2:] = -1
    ours, theirs = both(table, selected, positions)
    got = sparse.sparse_attention(q, k, v, *ours, 0.3)
    want = torch_sparse.sparse_attention(q_, k_, v_, *(x.long() for x in theirs), 0.3)
    close(got, want)


@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 33), (70, 1), (70, 20)])
def test_dense_attention(start: int, n: int) -> None:
    (q, k, v), (q_, k_, v_) = both(normal(n, 6, 8), normal(2, start + n, 8), normal(2, start + n, 8, seed=1))
    close(dense.dense_attention(q, k, v, 0.3), torch_dense.dense_attention(q_, k_, v_, start, 0.3))


def test_norm_and_positions() -> None:
    (x, weight), (x_, weight_) = both(normal(7, 4, 16) * 30, normal(16))
    norm = RMSNorm(16, 1e-6)
    norm.weight = weight
    close(norm(x), torch_dense.rms_norm(x_, weight_, 1e-6))
    positions = np.array([0, 1, 63, 4096, 100_000, 524_287, 1_048_575], np.int32)
    ours, theirs = both(positions)
    for dim in (128, 16):
        cos, sin = dense.rope_angles(*ours, dim, 10_000.0)
        cos_, sin_ = torch_dense.rope_angles(*theirs, dim, 10_000.0)
        close(cos, cos_[:, : dim // 2], 1e-6)
        close(sin, sin_[:, : dim // 2], 1e-6)
    given = [mx.array(part[:, :8].numpy()) for part in (cos_, sin_)]
    close(dense.apply_rope(x, *given), torch_dense.apply_rope(x_, cos_, sin_), 1e-4)
    close(dense.grow_queries(x, *ours, 64.0), torch_dense.grow_queries(x_, *theirs, 64.0), 1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles for the CPU with g++")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_fused_or_not_it_is_the_same(dtype: mx.Dtype) -> None:
    """As a GPU gets them: compiled once for all shapes, and in the precision of what is given."""
    compiled = {name: mx.compile(getattr(dense, name).__wrapped__, shapeless=True) for name in FUSED}
    for n in (1, 5):
        a, b = (mx.array(normal(n, 4, 8, seed=i)).astype(dtype) for i in range(2))
        cos, sin = (mx.array(normal(n, 1, 8, seed=i)) for i in range(2, 4))
        arguments = {
            "silu_gate": (a, b),
            "sigmoid_gate": (a, b),
            "add_scaled": (a, b, 0.247),
            "rotate": (a, b, cos, sin),
        }
        for name, given in arguments.items():
            want, got = getattr(dense, name)(*given), compiled[name](*given)
            for one, other in zip(want, got, strict=True) if name == "rotate" else [(want, got)]:
                assert one.dtype == other.dtype == dtype
                np.testing.assert_allclose(
                    np.array(one.astype(mx.float32)), np.array(other.astype(mx.float32)), atol=1e-2, rtol=0
                )


FUSED = ("silu_gate", "sigmoid_gate", "add_scaled", "rotate")
