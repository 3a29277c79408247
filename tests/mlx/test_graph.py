"""What a step costs: operations, memory and precisions, at any length of context."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from sala.backends.mlx import cache as cache_module
from sala.backends.mlx import model as model_module
from sala.backends.mlx.cache import FIRST_PAGES, HybridCache
from sala.backends.mlx.executor import MlxExecutor, open_executor
from sala.backends.mlx.quantized_linear import AffineLinear
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.protocol import Options, Plan, Row, Sampling
from sala.quantization_config import QuantConfig
from tests.mlx.graph import Operation, operations
from tests.mlx.place import DEVICE
from tests.parity.test_quantized import write_pair

SHORT, LONG = 1 << 10, 1 << 16
GREEDY = Sampling(temperature=0)
VIEWS = {"Reshape", "Transpose", "ExpandDims", "Squeeze", "Slice", "Broadcast", "Split"}  # they move no number
HALVES = {"bfloat16": mx.bfloat16, "float16": mx.float16}


def open_one(path: Path, **options: object) -> MlxExecutor:
    settings = Options(device=DEVICE, max_batch=2, snapshots=0, **options)  # type: ignore[arg-type]
    return open_executor(Checkpoint(path), SalaConfig.load(path), settings)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> MlxExecutor:
    """Room for 64K tokens, all of it in use; the pages are full of zeros."""
    path = tmp_path_factory.mktemp("models") / "m"
    write_random(path, replace(TINY, max_position_embeddings=2 * LONG))
    executor = open_one(path, ctx=LONG + 256)
    executor.cache.reach(range(LONG // 64 + 4))
    return executor


def decode_row(position: int, is_scattered: bool = False) -> Row:
    pages = range(LONG // 64 + 4)
    if is_scattered:
        pages = np.random.default_rng(0).permutation(pages).tolist()
    return Row((65,), position, tuple(pages), 0, 0, GREEDY)


def test_steps_run_on_the_device_of_the_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the thread's default is: here the executor is given a stream of its own."""
    write_random(tmp_path / "m", TINY)
    executor, build, seen = open_one(tmp_path / "m", ctx=512), MlxExecutor.build, []

    def record(*arguments: Any) -> Any:
        seen.append(mx.default_stream(mx.default_device()))
        return build(*arguments)

    monkeypatch.setattr(MlxExecutor, "build", record)
    executor.device = stream = mx.new_stream(mx.default_device())
    executor.run(Plan((Row((65, 66), 0, (0,), 0, 0, GREEDY),)))
    assert seen
    assert set(map(str, seen)) == {str(stream)}


@pytest.mark.parametrize("is_scattered", [False, True], ids=["in a run", "scattered"])
@pytest.mark.parametrize("offset", [20, 15, 0], ids=["plain", "with a window", "on a new page"])
def test_as_many_operations_at_64k_as_at_1k(long: MlxExecutor, offset: int, is_scattered: bool) -> None:
    counts = [
        sorted(operation.name for operation in operations(long, decode_row(length + offset, is_scattered)))
        for length in (SHORT, LONG)
    ]
    assert counts[0] == counts[1]
    assert len(counts[0]) > 100


@pytest.mark.parametrize("is_scattered", [False, True], ids=["in a run", "scattered"])
def test_no_operation_is_as_large_as_the_cache(long: MlxExecutor, is_scattered: bool) -> None:
    """Pools are reshaped, which moves nothing, and updated; nothing else comes near their size."""
    pool = long.cache.pages[0].k.size
    steps = operations(long, decode_row(LONG + 15, is_scattered))
    large = {operation.name for operation in steps if any(np.prod(shape) > pool / 8 for shape, _ in operation.outputs)}
    assert large == {"Reshape", "Scatter"}
    assert sum(operation.name == "Scatter" for operation in steps) == 3 * 2  # keys, values, k1 of two sparse layers


def used_by(executor: MlxExecutor, row: Row) -> tuple[int, int]:
    """Bytes that a step takes for a moment, and bytes that it keeps."""
    for warm in (replace(row, start=row.start - 1), row):  # the first one gets what is kept between steps
        gc.collect()
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        executor.run(Plan((warm,)))
        mx.synchronize()
    gc.collect()
    return mx.get_peak_memory() - before, mx.get_active_memory() - before


@pytest.mark.parametrize("is_scattered", [False, True], ids=["in a run", "scattered"])
def test_a_step_neither_copies_nor_keeps(long: MlxExecutor, is_scattered: bool) -> None:
    row = decode_row(LONG + 30, is_scattered)
    pool_bytes, sparse = long.cache.pages[0].k.nbytes, long.model.config.sparse_config  # who holds a pool makes it move
    where = [address(pool) for layer in long.cache.pages.values() for pool in layer.pools]
    peak, kept = used_by(long, row)
    assert [address(pool) for layer in long.cache.pages.values() for pool in layer.pools] == where
    windows = LONG // sparse.kernel_stride
    scores = windows * long.model.config.num_attention_heads * 4
    pooled = windows * 2 * 16 * 4
    assert peak < 6 * scores + 4 * pooled  # what choosing among 4096 windows takes; the pool is larger
    assert 6 * scores + 4 * pooled < pool_bytes / 2
    assert abs(kept) < 1 << 14


def test_steps_built_ahead_neither_copy_nor_keep(long: MlxExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that goes on: its next step is built while the last one runs, and writes in place all the same."""
    adopted = spy_on_adopted(monkeypatch)
    row = decode_row(LONG + 70)
    (token,) = long.run(Plan((row,))).sampled[0]
    where = [address(pool) for layer in long.cache.pages.values() for pool in layer.pools]
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(20):  # over a window's end
        row = replace(row, tokens=(token.token,), start=row.start + 1)
        (token,) = long.run(Plan((row,))).sampled[0]
    mx.synchronize()
    assert adopted == [False] + [True] * 20
    assert [address(pool) for layer in long.cache.pages.values() for pool in layer.pools] == where
    assert mx.get_peak_memory() - before < long.cache.pages[0].k.nbytes / 2
    assert abs(mx.get_active_memory() - before) < 1 << 16


def spy_on_adopted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fills with every step: whether it had been built ahead."""
    adopted: list[bool] = []
    adopt = MlxExecutor.adopt

    def spy(self: MlxExecutor, plan: Plan):
        step = adopt(self, plan)
        adopted.append(step is not None)
        return step

    monkeypatch.setattr(MlxExecutor, "adopt", spy)
    return adopted


def address(pool: mx.array) -> int:
    return int(np.array(pool, copy=False).ctypes.data)


def test_memory_of_a_short_context(long: MlxExecutor) -> None:
    """The same cache, and so few tokens in it: what a step takes is no matter of the cache's size."""
    peak, kept = used_by(long, decode_row(SHORT + 30))
    assert peak < 1 << 20
    assert abs(kept) < 1 << 14


def test_a_copied_page_is_no_copied_pool(long: MlxExecutor) -> None:
    long.clear_state(1)  # whatever was built ahead is forgotten
    where = [address(pool) for layer in long.cache.pages.values() for pool in layer.pools]
    keys = mx.random.normal((2, 64, 16))
    for layer in long.cache.pages.values():
        layer.k[:, 5] = keys
    mx.eval([layer.k for layer in long.cache.pages.values()])
    long.copy_page(5, 9, 40)
    mx.synchronize()
    assert [address(pool) for layer in long.cache.pages.values() for pool in layer.pools] == where
    for layer in long.cache.pages.values():
        np.testing.assert_array_equal(np.array(layer.k[:, 9, :40]), np.array(keys[:, :40]))
        assert not np.array(layer.k[:, 9, 40:]).any()


def test_pools_are_doubled_when_they_are_used(tmp_path: Path) -> None:
    write_random(tmp_path / "m", TINY)
    executor = open_one(tmp_path / "m", ctx=300 * 64)
    assert executor.capacity.num_pages == 600
    assert {layer.k.shape[1] for layer in executor.cache.pages.values()} == {FIRST_PAGES}
    first = executor.logits(Row(tuple(range(60)), 0, (3,), 0, 0))
    executor.cache.reach([FIRST_PAGES])
    assert {pool.shape[1] for layer in executor.cache.pages.values() for pool in layer.pools} == {2 * FIRST_PAGES}
    rest = executor.logits(Row(tuple(range(60, 80)), 60, (3, 599), 0, 0))
    assert {layer.k2.shape[1] for layer in executor.cache.pages.values()} == {600}
    again = executor.logits(Row(tuple(range(80)), 0, (0, 1), 1, 0))
    np.testing.assert_allclose(np.concatenate((first, rest)), again, atol=1e-5, rtol=0)


def test_states_of_a_batch_are_parted() -> None:
    """Whoever leaves a batch takes its own state along, not the memory of all."""
    config = replace(TINY, lightning_nh=4, lightning_head_dim=256)
    cache = HybridCache(config, 1, 10, mx.float32)
    state = cache.empty.nbytes
    mx.eval(cache.empty)
    before = mx.get_active_memory()
    for _ in range(3):
        cache.join(range(8))
        for states in cache.states.values():
            joint = mx.zeros((8, *cache.empty.shape)) + 1
            mx.eval(joint)
            states[:8] = list(joint)
            mx.eval(states)
            del joint
    assert mx.get_active_memory() - before < 2 * 8.5 * state
    cache.copy_states([(2, 9)])
    cache.join([1])
    for states in cache.states.values():
        states[1] = mx.ones(cache.empty.shape)  # as a step leaves it
    for slot in (0, 2, 3, 4, 5, 6):
        cache.clear_state(slot)
    mx.eval(list(cache.states.values()))
    assert mx.get_active_memory() - before < 2 * 3.5 * state  # slots 1, 7 and 9 of two layers
    assert np.array(cache.states[1][9]).mean() == np.array(cache.states[1][7]).mean() == 1


def test_views_are_all_that_is_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No activation is promoted to float32: outside of the few ops that are meant to, nothing computes in it."""
    for half in HALVES:
        write_random(tmp_path / half, replace(TINY, dtype=half))
        executor = open_one(tmp_path / half, ctx=2048)
        put_narrow(executor, monkeypatch, HALVES[half])
        assert wide(steps_of(executor)) == set()


def test_a_planted_promotion_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that makes others slow: a factor that is an array and not a number."""
    write_random(tmp_path / "m", replace(TINY, dtype="bfloat16"))
    executor = open_one(tmp_path / "m", ctx=2048)
    put_narrow(executor, monkeypatch, mx.bfloat16)
    monkeypatch.setattr(model_module.dense, "add_scaled", lambda x, change, scale: x + change * mx.array(scale))
    with pytest.raises(AssertionError, match="float32"):
        steps_of(executor)


def test_quantized_linears_stay_narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_pair(tmp_path, TINY, QuantConfig(4, 64), "BF16")
    executor = open_one(path, ctx=2048, dtype="bfloat16")
    assert isinstance(executor.model.model.layers[0].mlp.up_proj, AffineLinear)
    put_narrow(executor, monkeypatch, mx.bfloat16)
    assert wide(steps_of(executor)) == set()
    path, _ = write_pair(tmp_path / "exact", TINY, QuantConfig(4, 64), "F16")
    executor = open_one(path, ctx=2048, dtype="bfloat16")  # which cannot hold these scales: better slow than wrong
    put_narrow(executor, monkeypatch, mx.bfloat16)
    assert wide(steps_of(executor)) == {"QuantizedMatmul", "Gather", "Multiply", "Add"}  # the last three: embedding


def steps_of(executor: MlxExecutor) -> list[Operation]:
    pages = tuple(range(32))
    chunk = Row(tuple(range(200)), 1000, pages, 0, 0, GREEDY)
    dense = Row((65,), 100, pages, 1, 1 << 20, GREEDY)
    return operations(executor, chunk) + operations(executor, replace(chunk, tokens=(1,)), dense)


def wide(steps: list[Operation]) -> set[str]:
    """Operations that give float32, other than those that only move or convert, and the choice of the token."""
    return {
        operation.name
        for operation in steps
        if any(dtype == mx.float32 for _, dtype in operation.outputs)
        and operation.name not in VIEWS | {"AsType", "Concatenate", "Full"}
    }


def put_narrow(executor: MlxExecutor, monkeypatch: pytest.MonkeyPatch, half: mx.Dtype) -> None:
    """In the place of each op that computes in float32 by design one that does not, and sees what it is given."""

    def norm(self: model_module.RMSNorm, x: mx.array) -> mx.array:
        assert x.dtype == self.weight.dtype == half
        return x * self.weight

    def rope(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        assert (x.dtype, cos.dtype) == (half, mx.float32)
        return x

    def lightning(q, k, v, states, lengths, slopes, scale):
        assert {q.dtype, k.dtype, v.dtype} == {half}
        assert {states.dtype, slopes.dtype} == {mx.float32}
        return q.astype(mx.float32), states

    def select(q, k1, k2, positions, num_blocks, sparse, scale):
        assert {q.dtype, k1.dtype, k2.dtype} == {half}
        return mx.zeros((q.shape[0], 2, 4), dtype=mx.int32)

    def pool(keys: mx.array, kernel: int, stride: int) -> mx.array:
        assert keys.dtype == half
        return keys[:, : (keys.shape[1] - kernel) // stride + 1]

    executor.ops = replace(executor.ops, lightning_ragged=lightning, select_blocks=select)
    monkeypatch.setattr(model_module.RMSNorm, "__call__", norm)
    stand_ins = {"apply_rope": rope}
    stand_ins |= {"rope_angles": lambda positions, dim, theta: (mx.zeros((1, 8)), mx.zeros((1, 8)))}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(model_module.dense, name, stand_in)
    monkeypatch.setattr(cache_module, "pool_keys", pool)


@pytest.mark.parametrize("half", HALVES)
def test_wide_ops_give_narrow_numbers_back(half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops themselves: what leaves them is of the model's precision, but for the state and its output."""
    write_random(tmp_path / "m", replace(TINY, dtype=half))
    executor = open_one(tmp_path / "m", ctx=2048)
    seen: dict[str, set[mx.Dtype]] = {}

    def listened(name: str, function):
        def call(*args):
            out = function(*args)
            seen.setdefault(name, set()).update(x.dtype for x in (out if isinstance(out, tuple) else (out,)))
            return out

        return call

    norm = model_module.RMSNorm
    monkeypatch.setattr(norm, "__call__", listened("rms_norm", norm.__call__))
    for name in ("apply_rope", "dense_attention", "sigmoid_gate", "silu_gate"):
        monkeypatch.setattr(model_module.dense, name, listened(name, getattr(model_module.dense, name)))
    for name in ("lightning_ragged", "sparse_attention"):
        executor.ops = replace(executor.ops, **{name: listened(name, getattr(executor.ops, name))})
    monkeypatch.setattr(cache_module, "pool_keys", listened("pool_keys", cache_module.pool_keys))
    assert len(steps_of(executor)) > 200
    assert seen.pop("lightning_ragged") == {mx.float32}
    assert len(seen) == 7
    assert all(dtypes == {HALVES[half]} for dtypes in seen.values())
    assert {pool.dtype for layer in executor.cache.pages.values() for pool in layer.pools} == {HALVES[half]}
