"""Sampling on the GPU against sampler.py, token by token; and what the compiler makes of the kernels."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.rows import allowed_tokens, point_of, sampling_of, uniform
from sala.backends.torch import sampler
from sala.backends.torch.fast.gpu_sampling import SampledRows
from sala.backends.torch.kernels import sampling
from sala.errors import ModelBroken
from sala.protocol import Row, Sampling
from tests.kernels import aot
from tests.kernels.aot import Build

NEAR = 1e-6  # how close to the border between two tokens the point may lie if the tokens differ


def run(logits: Tensor, rows: Sequence[Row], device: torch.device) -> tuple[list[int], sampling.SamplingBuffers]:
    """Sample with the kernels, in slots that were full of other sequences' numbers."""
    (n, vocab), num_slots = logits.shape, max(row.slot for row in rows) + 1
    buffers = sampling.SamplingBuffers(num_slots, vocab, device)
    for tensor in (buffers.counts, buffers.in_prompt, buffers.bias, buffers.last):
        tensor.fill_(7)
    masks = np.zeros((n, -(-vocab // 8)), np.uint8)
    for index, row in enumerate(rows):
        buffers.load(row)
        if row.mask is not None or row.banned:
            masks[index] = sampling.packed_mask(row, vocab)
    parameters = torch.tensor([sampling.parameters_of(row) for row in rows], device=device)
    out = torch.full((n,), -1, device=device)
    sampling.sample_rows(logits.to(device), parameters, buffers, torch.from_numpy(masks).to(device), out)
    return out.tolist(), buffers


def distance(logits: Tensor, row: Row, token: int) -> float:
    """Return how far the row's point lies outside of the token's part of the distribution, in fp64.

    Tokens whose probabilities are equal to 1e-6 may stand in any order; so may those at the border of a filter.
    """
    settings = sampling_of(row)
    adjusted = sampler.adjust(logits.float(), settings, row).double()
    p = ((adjusted - adjusted.max()) / float(np.float32(settings.temperature))).softmax(-1)
    order = p.argsort(descending=True, stable=True)
    before = p[order].cumsum(0) - p[order]
    kept = []
    for slack in (NEAR, -NEAR):
        keep = (before < settings.top_p - slack) | (settings.top_p >= 1.0)
        keep &= p[order] >= settings.min_p * p[order][0] * (1 + slack)
        keep &= torch.arange(len(p)) < (settings.top_k or len(p))
        keep[0] = True
        kept.append(p[order][keep].sum().item())
    alike = (p >= p[token] * (1 - NEAR)) & (p <= p[token] * (1 + NEAR))
    first = p[p > p[token] * (1 + NEAR)].sum().item()
    point = point_of(row, 0)
    end = first + p[alike].sum().item()
    return max(first - point * max(kept), point * min(kept) - end, 0.0)


def assert_same(logits: Tensor, rows: Sequence[Row], device: torch.device) -> int:
    """Compare the tokens with those of sampler.py; return how many differ, all of them next to a border."""
    got, buffers = run(logits, rows, device)
    expected = [found.token for found in sampler.sample_all(logits.float(), [(row, 0) for row in rows])]
    num_different = 0
    for scores, row, token, other in zip(logits, rows, got, expected, strict=True):
        assert buffers.last[row.slot] == token
        if token != other:
            assert distance(scores, row, token) < NEAR, (token, other, row)
            num_different += 1
    return num_different


def make_row(index: int, settings: Sampling, vocab: int, chance: random.Random) -> Row:
    history = tuple(chance.randrange(vocab) for _ in range(20)) if settings.has_penalty else ()
    row = Row(history[-1:] or (1,), 1000 + index, (), index, 0, settings, history=history, prompt_len=12)
    if chance.random() < 0.2:
        row = replace(row, banned=tuple(chance.sample(range(vocab), 3)))
    if chance.random() < 0.2:
        bits = bytes(chance.randrange(256) for _ in range(vocab // 8 - 1))  # shorter than the vocabulary
        row = replace(row, mask=bits)
    return row


def make_sampling(vocab: int, chance: random.Random) -> Sampling:
    penalties = chance.random() < 0.3
    return Sampling(
        temperature=chance.choice([0.0, 1e-6, 2e-5, 0.05, 0.3, 0.7, 1.0, 1.0, 1.5, 100.0]),
        top_k=chance.choice([0, 0, 1, 2, 20, 50, vocab - 1, vocab, 2**31 - 1]),
        top_p=chance.choice([1.0, 1.0, 0.95, 0.8, 0.5, 0.1, 1e-6]),
        min_p=chance.choice([0.0, 0.0, 0.01, 0.1, 1.0]),
        repetition_penalty=chance.choice([1.0, 1.3, 0.8]) if penalties else 1.0,
        presence_penalty=chance.choice([0.0, 1.5, -0.3]) if penalties else 0.0,
        frequency_penalty=chance.choice([0.0, 0.7]) if penalties else 0.0,
        seed=chance.choice([None, 0, -1, -(2**63), 2**63 - 1, chance.getrandbits(62)]),
        logit_bias={chance.randrange(vocab): 4.5, chance.randrange(vocab): -100.0} if chance.random() < 0.2 else {},
    )


SHARPNESS = {"flat": 0.01, "broad": 1.0, "usual": 3.0, "peaked": 15.0}


@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("vocab", [301, 700])
def test_same_tokens_as_the_sampler(vocab: int, is_rounded: bool, sharpness: str, device: torch.device) -> None:
    chance = random.Random(f"{vocab} {is_rounded} {sharpness}")
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab)) * SHARPNESS[sharpness]
    if is_rounded:
        logits = logits.bfloat16().float() if sharpness == "flat" else logits.mul(4).round().div(4)  # many exact ties
    rows = [make_row(index, make_sampling(vocab, chance), vocab, chance) for index in range(len(logits))]
    assert assert_same(logits, rows, device) <= 1


@pytest.mark.parametrize("top_p", [1.0, 0.97])
def test_whole_rows_are_searched_where_candidates_do_not_suffice(
    top_p: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CANDIDATES", 16)
    monkeypatch.setattr(sampling, "SCAN", 512)
    logits = torch.randn(12, 430, generator=torch.Generator().manual_seed(1)).mul(3).round().div(2)
    settings = [Sampling(temperature=[0.3, 1.0, 100.0][seed % 3], seed=seed, top_p=top_p) for seed in range(6)]
    settings += [replace(one, top_k=100, min_p=0.001) for one in settings]
    rows = [Row((1,), 5, (), index, 0, one) for index, one in enumerate(settings)]
    assert assert_same(logits, rows, device) <= 1
    assert assert_same(torch.zeros(12, 430), rows, device) <= 1


@pytest.mark.parametrize("count", [sampling.CANDIDATES - 1, sampling.CANDIDATES, sampling.CANDIDATES + 1])
def test_as_many_heavy_tokens_as_the_candidates_have_places(count: int, device: torch.device) -> None:
    logits = torch.full((1, 3 * sampling.CANDIDATES), -9.0, device=device)
    logits[0, torch.randperm(logits.shape[1], generator=torch.Generator().manual_seed(count))[:count]] = 0.0
    for top_k in (50, count, 0):
        for seed in range(4):
            row = Row((1,), 10, (0,), 0, 0, Sampling(temperature=1.0, top_k=top_k, seed=seed))
            assert_same(logits, [row], device)


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_a_whole_vocabulary(scale: float, device: torch.device) -> None:
    vocab = 73448
    logits = (torch.randn(2, vocab, generator=torch.Generator().manual_seed(2)) * scale).half()
    settings = [Sampling(temperature=1.0, seed=3), Sampling(temperature=0.8, top_p=0.95, top_k=4000, seed=4)]
    rows = [Row((1,), 9, (), index, 0, one) for index, one in enumerate(settings)]
    assert assert_same(logits, rows, device) <= 1


def test_extreme_logits(device: torch.device) -> None:
    vocab = 333
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(3))
    logits[0, :] = float("-inf")
    logits[0, 77] = -3.0
    logits[1, 5:] = float("-inf")
    logits[2] *= 1e30
    logits[3] = -0.0
    logits[3, 9] = 0.0
    only = bytes(0 if index != 11 else 16 for index in range(42))
    settings = Sampling(temperature=1.0, seed=5)
    rows = [Row((1,), 3, (), index, 0, settings) for index in range(6)]
    rows[3] = replace(rows[3], sampling=replace(settings, temperature=0.0))
    rows[4] = replace(rows[4], mask=only)
    rows[5] = replace(rows[5], mask=only, banned=tuple(range(80)), sampling=replace(settings, temperature=0.0))
    got, _ = run(logits, rows, device)
    assert assert_same(logits, rows, device) == 0
    assert (got[0], got[3], got[4]) == (77, 0, 92)
    everything_is_banned = [replace(row, banned=tuple(range(vocab))) for row in rows]
    assert run(logits, everything_is_banned, device)[0] == [0] * 6
    logits[:, 50] = float("nan")
    assert run(logits[:3], rows[:3], device)[0] == [~50] * 3


def test_a_token_does_not_depend_on_the_batch_or_the_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(4))
    rows = [Row((1,), 3, (), index, 0, Sampling(temperature=1.3, top_p=0.9, seed=index)) for index in range(4)]
    together, _ = run(logits, rows, device)
    alone = [run(logits[index : index + 1], rows[index : index + 1], device)[0][0] for index in range(4)]
    monkeypatch.setattr(sampling, "CANDIDATES", 32)
    monkeypatch.setattr(sampling, "SCAN", 256)
    assert together == alone == run(logits, rows, device)[0]


def test_counts_follow_the_answer(device: torch.device) -> None:
    """Two steps with the same buffers sample as the sampler does with the longer history."""
    vocab, chance = 300, random.Random(0)
    settings = Sampling(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.4, seed=6)
    history = tuple(chance.randrange(vocab) for _ in range(15))
    row = Row(history[-1:], 14, (), 1, 0, settings, history=history, prompt_len=10)
    logits = torch.randn(3, 1, vocab, generator=torch.Generator().manual_seed(5))
    buffers = sampling.SamplingBuffers(2, vocab, device)
    buffers.load(row)
    out, masks = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, 38, dtype=torch.uint8, device=device)
    for scores in logits:
        parameters = torch.tensor([sampling.parameters_of(row)], device=device)
        sampling.sample_rows(scores.to(device), parameters, buffers, masks, out)
        assert out.item() == sampler.sample(scores[0], row).token
        history = (*history, int(out.item()))
        row = replace(row, tokens=history[-1:], start=row.start + 1, history=history)
    expected = np.bincount(np.asarray(history[10:]), minlength=vocab)
    assert buffers.counts[1].tolist() == expected.tolist()
    assert not buffers.counts[0].any()


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000], ids=["positive", "negative"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_a_number_is_told_with_the_token(bits: int, temperature: float, device: torch.device) -> None:
    """The token fed back on the device stays one that exists; rows beside it are sampled as ever."""
    logits = torch.randn(2, 3000, device=device)
    logits.view(torch.int32)[1, 2500] = bits - (1 << 32 if bits >> 31 else 0)
    rows = [
        Row((1,), 3, (), slot, slot, Sampling(temperature=temperature, seed=1), history=(1,), prompt_len=1)
        for slot in range(2)
    ]
    buffers = sampling.SamplingBuffers(2, 3000, device)
    parameters = torch.tensor([sampling.parameters_of(row) for row in rows], device=device)
    masks, out = torch.zeros(2, 375, dtype=torch.uint8, device=device), torch.zeros(2, dtype=torch.long, device=device)
    sampling.sample_rows(logits, parameters, buffers, masks, out)
    assert out[0] == buffers.last[0] == sampler.sample(logits[0].cpu(), rows[0]).token
    assert out[1] == ~2500
    assert buffers.last[1] == 2500
    asked = [replace(row, sampling=replace(sampling_of(row), logprobs=2)) for row in rows]
    assert len(SampledRows(asked[:1], out[:1], logits[:1]).wait()) == 1
    with pytest.raises(ModelBroken):
        SampledRows(asked, out, logits).wait()
    with pytest.raises(ModelBroken):
        sampler.sample_all(logits, [(row, 0) for row in rows])


def test_padding_writes_nothing(device: torch.device) -> None:
    settings = Sampling(temperature=1.0, seed=1, frequency_penalty=1.0)
    row = Row((1,), 3, (), 0, 0, settings, history=(1,), prompt_len=1)
    buffers = sampling.SamplingBuffers(1, 64, device)
    buffers.last.fill_(5)
    parameters = torch.tensor([sampling.parameters_of(row)] * 2, device=device)
    parameters[:, sampling.FIELDS.index("is_on")] = 0
    out = torch.full((2,), -7, device=device)
    masks = torch.zeros(2, 8, dtype=torch.uint8, device=device)
    sampling.sample_rows(torch.randn(2, 64, device=device), parameters, buffers, masks, out)
    assert out.tolist() == [-7, -7]
    assert buffers.last.tolist() == [5]
    assert not buffers.counts.any()


def test_parameters_and_masks() -> None:
    chance = random.Random(3)
    for index in range(50):
        row = make_row(index, make_sampling(300, chance), 300, chance)
        fields = dict(zip(sampling.FIELDS, sampling.parameters_of(row), strict=True))
        assert sampling.parameters_of(row) == list(fields.values())
        assert (fields["slot"], fields["position"], fields["is_on"]) == (index, 1001 + index, 1)
        assert all(-(2**63) <= value < 2**63 for value in fields.values())
        bits = np.unpackbits(sampling.packed_mask(row, 300), bitorder="little")[:300]
        assert (bits == allowed_tokens(row, 300)).all()
    drafted = replace(row, tokens=(1, 2, 3), num_drafts=2)
    assert [sampling.parameters_of(drafted, count)[1] for count in range(3)] == [row.start + 1 + n for n in range(3)]


@triton.jit
def _uniform_kernel(seeds, positions, out):
    index = tl.program_id(0)
    bits = sampling._random_bits(tl.load(seeds + index), tl.load(positions + index))
    tl.store(out + index, (bits >> 11).to(tl.int64))


def test_uniform_numbers_are_those_of_the_rule(device: torch.device) -> None:
    chance = random.Random(1)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), *(chance.getrandbits(62) for _ in range(40))]
    positions = [0, 1, 2**20, 7, 2**31 + 5, *(chance.randrange(2**21) for _ in range(40))]
    out = torch.zeros(len(seeds), dtype=torch.int64, device=device)
    numbers = (torch.tensor(values, device=device) for values in (seeds, positions))
    _uniform_kernel[(len(seeds),)](*numbers, out)
    assert [bits / 2**53 for bits in out.tolist()] == list(map(uniform, seeds, positions))


def test_top_logprobs() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(6))
    settings = Sampling(temperature=0.0, logprobs=4)
    expected = [sampler.sample(scores, Row((1,), 0, (), 0, 0, settings)) for scores in logits]
    own, values, ids = sampling.top_logprobs(logits, torch.tensor([one.token for one in expected]), 4)
    for index, one in enumerate(expected):
        assert own[index].item() == pytest.approx(one.logprob)
        assert dict(zip(ids[index].tolist(), values[index].tolist(), strict=True)) == pytest.approx(
            dict(one.top_logprobs)
        )


TYPES = {
    "logits": "*bf16", "counts": "*i32", "in_prompt": "*u8", "bias": "*fp32", "masks": "*u8", "weights": "*fp32",
    "bins": "*i32",
}  # fmt: skip


def builds() -> list[Build]:
    vocab = 73448
    tile = {"TILE": sampling.TILE, "VOCAB": vocab, "TILES": triton.cdiv(vocab, sampling.TILE), "PDL": 0}
    held = {"CANDIDATES": sampling.CANDIDATES}
    last = {name: value for name, value in tile.items() if name != "TILE"}
    last |= {"LOG": sampling.CANDIDATES.bit_length() - 1, "SCAN": sampling.SCAN}
    kernels: list[tuple[Any, dict[str, Any], int]] = [
        (sampling._adjust_kernel, tile | {"STRIDE": vocab, "MASK_STRIDE": vocab // 8}, 4),
        (sampling._weigh_kernel, tile, 4),
        (sampling._collect_kernel, tile | held, 4),
        (sampling._choose_kernel, last, 16),
    ]
    kinds = [{name: TYPES.get(name, "*i64") for name in kernel.arg_names} for kernel, _, _ in kernels]
    return [
        Build(kernel, kind | dict.fromkeys(constants, "constexpr"), constants, {"num_warps": num_warps})
        for (kernel, constants, num_warps), kind in zip(kernels, kinds, strict=True)
    ]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_compiles(capability: int) -> None:
    """The last kernel may spill a few registers: addresses of the sort that flat distributions need."""
    done = aot.run(capability, "tests.kernels.test_sampling:builds")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 4
    for result in results:
        assert result["spills"] <= (40 if result["kernel"] == "_choose_kernel" else 0), result
        assert result["shared"] <= 99 << 10, result
