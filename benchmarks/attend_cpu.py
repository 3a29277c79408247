"""Attention over selected blocks on the CPU: the native kernel against the definition in torch, in one run.

    python benchmarks/attend_cpu.py     writes attend_cpu.json beside it

A chunk of 256 queries at the end of 8K and of 32K tokens, shapes of smol-sala and of the released model, fp32 and bf16.
Neighbours choose alike, as they do in text: each has 48 of its 64 blocks in common with the others. The least of a few
times counts.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.kernels import native
from sala.backends.torch.ops.sparse import sparse_attention

SHAPES = {"smol-sala": (9, 3, 64), "released": (32, 2, 128)}  # heads, kv heads, dimension
QUERIES, BLOCK, SELECTED, ALIKE, ROUNDS = 256, 64, 64, 48, 3


def choices(num_blocks: int, groups: int) -> Tensor:
    """[queries, groups, selected]: some blocks that all have, some of each one's own."""
    order = torch.randperm(num_blocks)
    own = torch.rand(QUERIES, groups, num_blocks - ALIKE).argsort(-1)[..., : SELECTED - ALIKE]
    return torch.cat((order[:ALIKE].expand(QUERIES, groups, ALIKE), order[ALIKE:][own]), -1)


def least(work: Callable[[], Tensor]) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@torch.inference_mode()
def main() -> None:
    attend = select_ops().sparse_attention
    torch.manual_seed(0)
    results: dict = {
        "threads": torch.get_num_threads(),
        "kernel": native.describe(),
        "instructions": native.instructions(),
    }
    for name, (heads, groups, dim) in SHAPES.items():
        for length in (8192, 32768):
            for dtype in (torch.float32, torch.bfloat16):
                num_blocks = length // BLOCK
                q = torch.randn(QUERIES, heads, dim, dtype=dtype)
                k, v = (torch.randn(groups, num_blocks, BLOCK, dim, dtype=dtype) for _ in range(2))
                positions = torch.arange(length - QUERIES, length)
                case = q, k, v, torch.randperm(num_blocks), choices(num_blocks, groups), positions, dim**-0.5
                ours, theirs = least(lambda c=case: attend(*c)), least(lambda c=case: sparse_attention(*c))
                key = f"{name}, {length // 1024}K, {str(dtype).removeprefix('torch.')}"
                results[key] = {"ms": ours * 1e3, "torch_ms": theirs * 1e3, "ratio": theirs / ours}
                print(f"{key:32} {theirs / ours:5.1f}x", flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
