"""The graph of one step, taken apart: every operation that MLX would compute, with the precisions of what it gives."""

from dataclasses import dataclass, replace

import mlx.core as mx

from sala.backends.mlx.batch import take
from sala.backends.mlx.executor import MlxExecutor
from sala.backends.mlx.sampler import sample_all
from sala.protocol import Plan, Row


@dataclass(frozen=True)
class Operation:
    name: str
    inputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]


def operations(executor: MlxExecutor, *rows: Row) -> list[Operation]:
    """Of the whole step: tokens in; sampled tokens, written pages and next states out. The cache stays as it is."""
    plan = Plan(rows)
    batch = executor.prepare(plan)
    cache = executor.cache.fork()
    found: list[dict] = []

    def step(tokens: mx.array) -> list[mx.array]:
        hidden = executor.model(replace(batch, computed=tokens), cache)
        sampling = batch.sampled_rows(plan)
        sampled = sample_all(executor.model.logits(take(hidden, sampling)), [(row, 0) for row in rows])
        return [sampled.tokens, *cache.arrays(batch.slots)]

    mx.export_function(found.append, step, mx.array(batch.ids, dtype=mx.int32))
    return [
        Operation(
            item["name"],
            tuple((tuple(shape), dtype) for _, shape, dtype in item["inputs"]),
            tuple((tuple(shape), dtype) for _, shape, dtype in item["outputs"]),
        )
        for item in found
        if item["type"] == "primitive"
    ]
