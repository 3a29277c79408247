"""Gathering of sources on the golden checkpoints: the vendor's blocks, and the same numbers by all paths."""

import random
from functools import cache

import numpy as np
import pytest

from sala.backends.sources import GatheredBlocks, Part
from sala.backends.torch.executor import open_executor
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.engine.requests import Call
from sala.llm import LLM
from sala.protocol import Executor, Options, Plan, Row, Sampling
from tests.golden import CASES, DEVICE, Case, checkpoint

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def gathered_steps(case: Case, kernels: str) -> list[Part]:
    options = Options(ctx=2048, device=DEVICE, dtype="float32", kernels=kernels)
    return decode(open_executor(Checkpoint(case.model), SalaConfig.load(case.model), options), case)


def decode(executor: Executor, case: Case) -> list[Part]:
    """Decode the tokens of a case one by one, and return what each step gathered, by head."""
    config, data = SalaConfig.load(case.model), case.data
    executor.weigh_heads(None, keeps_heads=True)
    ids, prompt_len = data["input_ids"].tolist(), len(data["prefill_logits"])
    pages, sparse_from = tuple(range(executor.capacity.num_pages)), config.sparse_config.sparse_from(prompt_len)
    executor.run(Plan((Row(tuple(ids[:prompt_len]), 0, pages, 0, sparse_from, prompt_len=prompt_len),)))
    found = []
    for at in range(prompt_len, len(ids)):
        row = Row((ids[at],), at, pages, 0, sparse_from, Sampling(), prompt_len=prompt_len, wants_sources=True)
        (gathered,) = executor.run(Plan((row,))).gathered
        assert isinstance(gathered, GatheredBlocks)
        found.append(gathered.parts[0])
    return found


def check_blocks(case: Case, steps: list[Part]) -> None:
    """Compare with the blocks that the vendor's model selects, layer by layer and group by group."""
    expected = case.data.get("decode_topk_idx")
    assert (expected is None) == (case.name in ("short_dense", "odd_length"))
    for part, blocks in zip(steps[-len(expected) :], expected, strict=True) if expected is not None else ():
        for layer in range(blocks.shape[0]):
            for group in range(blocks.shape[1]):
                ours = part.blocks[0, layer, group]
                assert set(ours[ours >= 0]) == {int(block) for block in blocks[layer, group] if block >= 0}


def by_block(part: Part) -> np.ndarray:
    """Shares of one position, [L, H, blocks]."""
    blocks = np.repeat(part.blocks[0], part.shares.shape[2] // part.blocks.shape[2], 1)
    out = np.zeros((*blocks.shape[:2], int(blocks.max()) + 2))
    np.put_along_axis(out, blocks, part.shares[0], -1)
    return out[..., :-1]  # without the place of -1: no block


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_of_the_vendor_and_shares_of_the_reference(case: Case) -> None:
    steps = gathered_steps(case, "auto")
    for ours, reference in zip(steps, gathered_steps(case, "off"), strict=True):
        np.testing.assert_allclose(by_block(ours), by_block(reference), atol=1e-5)
        np.testing.assert_allclose(by_block(ours).sum(-1), 1.0, atol=1e-5)
    check_blocks(case, steps)


@cache
def plain() -> LLM:
    return LLM(checkpoint("block16"), device=DEVICE, ctx=1024, max_batch=1, snapshots=0)


def weights(llm: LLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    completion = llm.generate(prompt, return_sources=True, **GREEDY)
    assert completion.sources is not None
    return completion.token_ids, completion.sources.gathered.by_block()


@pytest.mark.parametrize("options", [{"speculate": "lookup"}, {"speculate": "layers", "draft_layers": 2}, {}], ids=str)
def test_the_same_with_drafts_and_cached_prefixes(options: dict[str, object]) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(8) for _ in range(150)]  # repeats itself, so that drafts are found
    tokens, expected = weights(plain(), prompt)
    llm = LLM(checkpoint("block16"), device=DEVICE, ctx=1024, **options)  # type: ignore[arg-type]
    llm.engine.speculation._is_measured = False
    for _ in range(2):  # the second time from a snapshot
        again, found = weights(llm, prompt)
        assert again == tokens
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("length", range(119, 128))
def test_drafts_that_cross_into_the_sparse_regime(length: int) -> None:
    """One step then holds positions of both regimes, and the last ones begin a block."""
    prompt = [7, 8, 9] * 60
    prompt = prompt[:length]
    tokens, expected = weights(plain(), prompt)
    llm = LLM(checkpoint("block16"), device=DEVICE, ctx=1024, speculate="layers", draft_layers=99)
    llm.engine.speculation._is_measured = False
    again, found = weights(llm, prompt)
    assert again == tokens
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert llm.engine.speculation.acceptance > 0.99


def test_beside_rows_without_sources_and_after_preemption() -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (150, 40, 200)]
    expected = [weights(plain(), prompt) for prompt in prompts]
    llm = LLM(checkpoint("block16"), device=DEVICE, ctx=1024, prefill_chunk=32, max_batch=3)
    calls = [
        Call(index, Sampling(return_sources=index != 1, **GREEDY), prompt=prompt)  # type: ignore[arg-type]
        for index, prompt in enumerate(prompts)
    ]
    states = [llm.inputs.prepare(call)[0] for call in calls]
    sequences = [llm.engine.submit(state.request) for state in states]
    steps = 0
    while not llm.engine.is_idle:
        llm.engine.step()
        steps += 1
        if steps % 9 == 0 and llm.engine.scheduler.running:
            llm.engine.scheduler.preempt(rng.choice(llm.engine.scheduler.running))
    assert llm.engine.scheduler.num_preemptions
    for index, (sequence, (tokens, blocks)) in enumerate(zip(sequences, expected, strict=True)):
        assert [one.token for one in sequence.sampled] == tokens
        if index == 1:
            assert sequence.gathered is None
        else:
            assert sequence.gathered is not None
            np.testing.assert_allclose(sequence.gathered.by_block(), blocks, atol=1e-4)


def test_sources_do_not_change_the_answer() -> None:
    prompt = [random.Random(7).randrange(256) for _ in range(300)]
    without = plain().generate(prompt, logprobs=2, **GREEDY)
    with_sources = plain().generate(prompt, logprobs=2, return_sources=True, **GREEDY)
    assert without.logprobs == with_sources.logprobs
    assert without.sources is None


def test_heads_with_weight_zero_do_not_count() -> None:
    llm = plain()
    config, prompt = llm.config, [random.Random(8).randrange(256) for _ in range(200)]
    executor = llm._executor
    executor.weigh_heads(None, keeps_heads=True)
    kept = llm.generate(prompt, return_sources=True, **GREEDY).sources
    assert kept is not None
    kept.gathered.by_block()
    shape = len(config.sparse_layers), config.num_attention_heads
    one = np.zeros(shape)
    one[1, 2] = 5.0
    executor.weigh_heads(one.tolist())
    found = weights(llm, prompt)[1]
    executor.weigh_heads(None)
    np.testing.assert_allclose(found, kept.gathered.sums[shape[1] + 2], atol=1e-5)
