"""The same tokens, however the prompt is cut; and the right precision everywhere."""

import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from sala.backends.torch.executor import open_executor
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.llm import LLM
from sala.protocol import Options, Plan, Row, Sampling
from tests.golden import DATA, DEVICE

NUM_TOKENS = 6
SLOW_EVERY = 1 if os.environ.get("SALA_TEST_FULL") else 4  # of the prompts, which are fed token by token too


def border_lengths(config: SalaConfig, count: int, seed: int) -> list[int]:
    """Lengths near the borders where implementations go wrong: chunks of 64, blocks, window, agreement, dense_len."""
    rng = random.Random(seed)
    sparse = config.sparse_config
    borders = [64, sparse.block_size, sparse.window_size, sparse.agreement_len, sparse.dense_len, 2 * sparse.block_size]
    lengths = [rng.choice(borders) * rng.choice([1, 1, 1, 2]) + rng.randint(-2, 2) for _ in range(count)]
    return [min(max(length, 1), sparse.dense_len + 40) for length in lengths]


@pytest.mark.parametrize(("model", "count"), [("block16", 170), ("block64", 30)])
def test_whole_chunked_and_token_by_token(model: str, count: int) -> None:
    path = DATA / model
    config = SalaConfig.load(path)
    rng = random.Random(7)
    ways = {chunk: LLM(path, device=DEVICE, ctx=2048, prefill_chunk=chunk) for chunk in (2048, 29, 1)}
    for number, length in enumerate(border_lengths(config, count, seed=11)):
        prompt = [rng.randrange(config.vocab_size) for _ in range(length)]
        answers = {}
        for chunk, llm in ways.items():
            if chunk == 1 and number % SLOW_EVERY:
                continue
            llm.reset()
            answers[chunk] = llm.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True).token_ids
        assert all(answer == answers[2048] for answer in answers.values()), f"prompt of {length} tokens"


def test_a_reused_cache_gives_the_same_tokens() -> None:
    """Continue, edit the end, regenerate, cross into the sparse regime: always as if computed afresh."""
    path = DATA / "block16"
    config = SalaConfig.load(path)
    live, fresh = LLM(path, device=DEVICE, ctx=2048), LLM(path, device=DEVICE, ctx=2048)
    rng = random.Random(3)
    prompt = [rng.randrange(config.vocab_size) for _ in range(40)]
    reused = 0
    for turn in range(24):
        fresh.reset()
        settings = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
        got, want = live.generate(prompt, **settings), fresh.generate(prompt, **settings)
        assert got.token_ids == want.token_ids, f"turn {turn}, {len(prompt)} tokens"
        assert want.usage.cached_tokens == 0
        reused += got.usage.cached_tokens
        new = [rng.randrange(config.vocab_size) for _ in range(rng.randint(1, 20))]
        match turn % 4:
            case 0 | 1:
                prompt = prompt + got.token_ids + new
            case 2:
                prompt = prompt + new  # the answer is dropped, as reasoning is
            case 3:
                prompt = list(prompt)  # the same again
    assert reused > 1000


def test_regimes_share_only_what_agrees() -> None:
    """A dense past serves a sparse request up to the agreement bound, where a snapshot was left, and no further."""
    path = DATA / "block16"
    config = SalaConfig.load(path)
    sparse = config.sparse_config
    llm = LLM(path, device=DEVICE, ctx=2048)
    rng = random.Random(5)
    short = [rng.randrange(256) for _ in range(sparse.dense_len - 5)]
    assert len(short) > sparse.agreement_len
    llm.generate(short, temperature=0, max_tokens=2, ignore_eos=True)
    longer = short + [rng.randrange(256) for _ in range(30)]
    got = llm.generate(longer, temperature=0, max_tokens=8, ignore_eos=True)
    assert got.usage.cached_tokens == sparse.agreement_len
    again = LLM(path, device=DEVICE, ctx=2048).generate(longer, temperature=0, max_tokens=8, ignore_eos=True)
    assert got.token_ids == again.token_ids


def test_neighbours_change_nothing() -> None:
    """Rows of one plan with ragged lengths: each draws what it would draw alone."""
    path = DATA / "block16"
    config = SalaConfig.load(path)
    rng = random.Random(9)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 17, 64, 130)]

    def run(groups: list[list[int]]) -> dict[int, int]:
        executor = open_executor(Checkpoint(path), config, Options(ctx=1024, device=DEVICE, max_batch=4))
        sampled = {}
        for group in groups:
            rows = tuple(
                Row(
                    tuple(prompts[i]), 0, tuple(range(16 * i, 16 * i + 16)), i,
                    config.sparse_config.sparse_from(len(prompts[i])), Sampling(temperature=1.0, seed=i),
                )
                for i in group
            )  # fmt: skip
            for i, result in zip(group, executor.run(Plan(rows)).sampled, strict=True):
                sampled[i] = result[0].token
        return sampled

    assert run([[0, 1, 2, 3]]) == run([[0], [1], [2], [3]]) == run([[3, 0], [2, 1]])


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    """No activation and no key is promoted; only the recurrent state and the logits are fp32."""
    from dataclasses import replace

    write_random(tmp_path / "m", replace(TINY, dtype="bfloat16"))
    config = SalaConfig.load(tmp_path / "m")
    kernels = "auto" if DEVICE == "cpu" else "off"  # the kernels for GPUs replace all modules
    options = Options(ctx=2048, device=DEVICE, kernels=kernels)
    executor = open_executor(Checkpoint(tmp_path / "m"), config, options)
    seen: dict[str, torch.dtype] = {}

    def record(name: str):
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            seen[name] = output.dtype
            assert args[0].dtype in (torch.bfloat16, torch.int64), f"input of {name}"

        return hook

    for name, module in executor.model.named_modules():
        if name and not isinstance(module, nn.ModuleList) and name != "model":
            module.register_forward_hook(record(name))
    pages = tuple(range(executor.capacity.max_tokens // executor.capacity.page_size))
    for length, start in ((1100, 0), (1, 1100)):
        logits = executor.logits(Row(tuple([65] * length), start, pages, 0, 0))
        assert str(logits.dtype) == "float32"
        assert bool(torch.isfinite(torch.from_numpy(logits)).all())
    assert len(seen) > 40
    assert {name for name, dtype in seen.items() if dtype != torch.bfloat16} == set()
    for kv in executor.cache.pages.values():
        assert {pool.dtype for pool in (kv.k, kv.v, kv.k1, kv.k2)} == {torch.bfloat16}
    assert {states.dtype for states in executor.cache.states.values()} == {torch.float32}


def test_a_poisoned_cache_harms_nobody() -> None:
    """Pages and slots full of NaN, as a broken request may leave them, do not reach the next one."""
    path = DATA / "block16"
    config = SalaConfig.load(path)
    prompt = [random.Random(1).randrange(256) for _ in range(150)]
    clean = LLM(path, device=DEVICE, ctx=512, snapshots=16)
    poisoned = LLM(path, device=DEVICE, ctx=512, snapshots=16)
    for kv in poisoned._executor.cache.pages.values():
        for pool in (kv.k, kv.v, kv.k1, kv.k2):
            pool.fill_(float("nan"))
    for states in poisoned._executor.cache.states.values():
        states.fill_(float("nan"))
    for length in (5, 16, 100, 127, 128, 150):
        settings = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
        for llm in (clean, poisoned):
            llm.reset()
        got, want = poisoned.generate(prompt[:length], **settings), clean.generate(prompt[:length], **settings)
        assert got.token_ids == want.token_ids
        assert all(sampled.logprob == sampled.logprob for sampled in got.logprobs)
    assert config.sparse_config.dense_len == 128
