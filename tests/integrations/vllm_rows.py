"""Rows of several requests through vLLM's blocks, and the same through the engine's own cache."""

from dataclasses import replace

import torch
from torch import Tensor

from sala.backends.torch.cache import KVPages, Span
from sala.backends.torch.model import SparseMixer
from sala.backends.torch.ops import REFERENCE
from sala.checkpoint.random import TINY
from sala.config import SparseConfig
from sala.plugins.vllm.dispatch import attend
from sala.plugins.vllm.memory import BlockLayout, Pages, RequestRow, plan_step

SMALL = SparseConfig(kernel_size=8, kernel_stride=4, block_size=16, window_size=32, topk=4, dense_len=128)
CONFIG = replace(TINY, sparse_config=SMALL)
CPU = torch.device("cpu")
# Steps of (request, tokens): a sparse prompt in odd pieces, a dense one that grows into the sparse regime, a short one.
PROMPTS = (203, 101, 9)
STEPS = [
    [(0, 77), (1, 101)],
    [(1, 1), (0, 126)],
    *[[(0, 1), (1, 1)]] * 16,
    [(2, 9), (1, 1), (0, 1)],
    *[[(2, 1), (0, 1), (1, 1)]] * 20,
]


class Blocks:
    """A cache as vLLM allocates it, with blocks in disorder."""

    def __init__(self, num_requests: int, block_tokens: int = 64, num_blocks: int = 5) -> None:
        self.layout = BlockLayout(SMALL, CONFIG.num_key_value_heads, CONFIG.head_dim)
        width = self.layout.token_bytes(4) // 4
        self.cache = torch.zeros(1 + num_requests * num_blocks, 1, block_tokens, width)
        order = 1 + torch.randperm(num_requests * num_blocks, generator=torch.Generator().manual_seed(1))
        self.tables = order.view(num_requests, num_blocks).int()
        self.pages = Pages(self.cache, self.layout, block_tokens)

    def mix(self, rows: list[RequestRow], q: Tensor, k: Tensor, v: Tensor, has_kernels: bool) -> Tensor:
        step = plan_step(rows, self.tables, self.pages.block_tokens, SMALL)
        self.pages.append(step, k, v)
        return attend(self.pages, step, q, CONFIG.head_dim**-0.5, has_kernels)


class Own:
    """The engine's pages, one after another for each request."""

    def __init__(self, num_requests: int, num_pages: int = 20) -> None:
        self.num_pages = num_pages
        self.pages = KVPages(num_requests * num_pages, CONFIG, torch.float32, CPU)
        for pool in (self.pages.k, self.pages.v, self.pages.k1, self.pages.k2):
            pool.zero_()
        self.mixer = SparseMixer(CONFIG)

    def mix(self, rows: list[RequestRow], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = [row.length for row in rows]
        outputs = []
        for row, *parts in zip(rows, q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            pages = tuple(range(row.index * self.num_pages, (row.index + 1) * self.num_pages))
            span = Span(row.start, row.length, 0, row.sparse_from, 0, pages, CPU)
            outputs.append(self.mixer.attend(span, *parts, self.pages, REFERENCE))
        return torch.cat(outputs)


def compare(steps: list[list[tuple[int, int]]], most_by_kernels: int = 0) -> float:
    """The largest difference between the two in any step; steps of few tokens may be run by the kernels."""
    torch.manual_seed(0)
    blocks, own, starts, worst = Blocks(len(PROMPTS)), Own(len(PROMPTS)), [0] * len(PROMPTS), 0.0
    for step in steps:
        rows = [RequestRow(i, starts[i], count, SMALL.sparse_from(PROMPTS[i])) for i, count in step]
        heads, groups, dim = CONFIG.num_attention_heads, CONFIG.num_key_value_heads, CONFIG.head_dim
        total = sum(row.length for row in rows)
        q, k, v = (torch.randn(total, count, dim) for count in (heads, groups, groups))
        difference = blocks.mix(rows, q, k, v, total <= most_by_kernels) - own.mix(rows, q, k, v)
        worst = max(worst, float(difference.abs().max()))
        for row in rows:
            starts[row.index] = row.end
    return worst
