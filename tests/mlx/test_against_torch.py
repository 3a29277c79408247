"""MLX and torch on the same weights: activations layer by layer, quantized files, sampled tokens."""

import random
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch

from sala.backends.mlx import executor as mlx_executor
from sala.backends.mlx import sampler as mlx_sampler
from sala.backends.mlx.quantized_linear import AffineEmbedding, AffineLinear
from sala.backends.rows import keep_agreed, places_of
from sala.backends.torch import executor as torch_executor
from sala.backends.torch import sampler as torch_sampler
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig, SparseConfig
from sala.lab.quantize.pipeline import quantize_model
from sala.lab.quantize.plan import QuantizeSettings
from sala.protocol import Options, Plan, Row, Sampling
from tests.foreign import write as write_foreign
from tests.mlx.place import DEVICE
from tests.parity.test_foreign import CASES as FOREIGN
from tests.parity.test_quantized import MIXED, write_pair

SPARSE = SparseConfig(8, 4, 1, 16, 32, 4, dense_len=128)
SMALL = replace(TINY, sparse_config=SPARSE)
VARIANTS = {
    "released": SMALL,
    "converted": replace(
        SMALL, attention_bias=True, attn_qk_norm=True, attn_use_rope=True, attn_log_base=64.0, lightning_nkv=2,
        tie_word_embeddings=True, lightning_nh=6, hidden_size=96,
    ),
    "bare": replace(
        SMALL, qk_norm=False, use_output_gate=False, use_output_norm=False, attn_use_output_gate=False,
        lightning_use_rope=False,
    ),
}  # fmt: skip


def open_both(path: Path, **options: object):
    """The torch executor and the one of MLX."""
    config = SalaConfig.load(path)
    settings = {"ctx": 256, "dtype": "float32", "max_batch": 5, "num_snapshots": 0, **options}
    theirs = torch_executor.open_executor(Checkpoint(path), config, Options(device="cpu", **settings))
    return theirs, mlx_executor.open_executor(Checkpoint(path), config, Options(device=DEVICE, **settings))


def ragged_rows(config: SalaConfig, seed: int) -> list[Row]:
    """Sequences of ugly lengths: dense, at the switch, sparse; pages scattered."""
    rng = random.Random(seed)
    lengths = (1, 17, 127, 129, 200)
    pages = rng.sample(range(len(lengths) * 16), len(lengths) * 16)
    return [
        Row(
            tuple(rng.randrange(config.vocab_size) for _ in range(length)), 0, tuple(pages[16 * at : 16 * at + 16]), at,
            config.sparse_config.sparse_from(length), Sampling(temperature=1.0, seed=at),
        )
        for at, length in enumerate(lengths)
    ]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_of_every_layer(variant: str, tmp_path: Path) -> None:
    """Five sequences in one plan, then one token more for each."""
    write_random(tmp_path / "m", VARIANTS[variant])
    config = SalaConfig.load(tmp_path / "m")
    theirs, ours = open_both(tmp_path / "m")
    theirs.fused = None  # all through the model itself
    expected: list[torch.Tensor] = []
    for layer in theirs.model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: expected.append(args[0].clone()))
    theirs.model.model.norm.register_forward_hook(lambda *args: expected.append(args[2].clone()))
    rows = ragged_rows(config, 1)
    for plan in (Plan(tuple(rows)), Plan(tuple(next_row(row) for row in rows))):
        theirs.run(plan)
        batch = ours.prepare(plan)
        found = [ours.model.model.embed_tokens(batch.tokens) * config.scale_emb]
        for index, layer in enumerate(ours.model.model.layers):
            past = ours.cache.pages.get(index) or ours.cache.states[index]
            found.append(layer(found[-1], batch, past))
        found[-1] = ours.model.model.norm(found[-1])
        ours.start(batch.slots, found)
        assert len(found) == len(expected)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.array(got), want.numpy(), atol=1e-4, rtol=0)
        expected.clear()


def next_row(row: Row) -> Row:
    return replace(row, tokens=(7,), start=len(row.tokens))


def logits_of(executor, tokens: list[int]) -> np.ndarray:
    pages = tuple(range(16))
    parts = [executor.logits(Row(tuple(tokens[:100]), 0, pages, 0, 0))]
    parts += [executor.logits(Row((token,), 100 + at, pages, 0, 0)) for at, token in enumerate(tokens[100:])]
    return np.concatenate(parts)


TOKENS = np.random.default_rng(0).integers(0, 256, 106).tolist()


@pytest.mark.parametrize("is_tied", [False, True], ids=["head", "tied"])
def test_mixed_bits_compute_what_their_weights_say(tmp_path: Path, is_tied: bool) -> None:
    config = replace(TINY, tie_word_embeddings=is_tied, attention_bias=is_tied)
    packed, plain = write_pair(tmp_path, config, MIXED)
    want, _ = open_both(plain)
    _, ours = open_both(packed)
    assert isinstance(ours.model.model.embed_tokens, AffineEmbedding)
    assert isinstance(ours.model.lm_head, AffineLinear)
    assert ours.model.model.layers[0].self_attn.q_proj.bits == 3
    np.testing.assert_allclose(logits_of(ours, TOKENS), logits_of(want, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_files_of_the_quantizer(tmp_path: Path, bits: int) -> None:
    """As `sala quantize` writes them from 16-bit weights: codes of the file, and torch's dequantized result."""
    write_random(tmp_path / "m", replace(TINY, dtype="bfloat16"))
    quantize_model(tmp_path / "m", tmp_path / "q", QuantizeSettings(bits=bits, method="rtn"), None, torch.device("cpu"))
    theirs, ours = open_both(tmp_path / "q")
    with Checkpoint(tmp_path / "q") as file:
        name = "model.layers.1.mlp.up_proj"
        codes = np.frombuffer(file.read(f"{name}.weight").data, np.uint32)
        np.testing.assert_array_equal(np.array(ours.model.model.layers[1].mlp.up_proj.weight).reshape(-1), codes)
    np.testing.assert_allclose(logits_of(ours, TOKENS), logits_of(theirs, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gptq-8-asymmetric", "gptq-order", "awq", "packed-8-rows", "fp8-row", "fp8-block"])
def test_files_of_other_programs(name: str, tmp_path: Path) -> None:
    write_foreign(tmp_path / "m", FOREIGN[name])
    theirs, ours = open_both(tmp_path / "m")
    np.testing.assert_allclose(logits_of(ours, TOKENS), logits_of(theirs, TOKENS), atol=1e-4, rtol=0)


def samplings(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
        top_p=rng.choice([1.0, 0.95, 0.5]),
        top_k=rng.choice([0, 1, 20]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, -0.4]),
        seed=rng.randrange(1 << 40),
        logit_bias=rng.choice([{}, {3: 4.0, 11: -100.0}]),
        logprobs=rng.choice([None, 0, 5]),
    )


def drawing_row(rng: random.Random, vocab: int) -> Row:
    history = tuple(rng.randrange(vocab) for _ in range(30))
    mask = rng.choice([None, bytes(rng.randrange(1, 256) for _ in range(vocab // 8))])
    drafts = rng.choice([0, 0, 2])
    return Row(
        history[20:], 20, (0,), 0, 0, samplings(rng), num_drafts=drafts, history=history, prompt_len=12,
        banned=rng.choice([(), (5, 9)]), mask=mask,
    )  # fmt: skip


def test_the_same_tokens_are_drawn() -> None:
    """Many rows of all settings at once, ties included: token by token what torch samples, and the same logarithms."""
    rng, vocab = random.Random(4), 200
    rows = [drawing_row(rng, vocab) for _ in range(150)]
    places = places_of(Plan(tuple(rows)))
    logits = np.random.default_rng(2).standard_normal((len(places), vocab)).astype(np.float32) * 2
    logits[::3] = np.round(logits[::3])  # many equal ones
    want = torch_sampler.sample_all(torch.from_numpy(logits), places)
    got = mlx_sampler.sample_all(mx.array(logits), places).read()
    assert [sampled.token for sampled in got] == [sampled.token for sampled in want]
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.logprob is None) == (theirs.logprob is None)
        if theirs.logprob is not None:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            values = [value for _, value in theirs.top_logprobs]
            assert [value for _, value in ours.top_logprobs] == pytest.approx(values, abs=1e-5)
    accepted = keep_agreed(Plan(tuple(rows)), got)
    assert [[sampled.token for sampled in tokens] for tokens in accepted] == _verified(want, rows)


def _verified(sampled, rows):
    """What torch's sampler accepts of these samples, as far as tokens go."""
    found, out = iter(sampled), []
    for row in rows:
        tokens, kept = [next(found) for _ in range(row.num_drafts + 1)], []
        drafts = (*row.tokens[len(row.tokens) - row.num_drafts :], None)
        for token, draft in zip(tokens, drafts, strict=True):
            kept.append(token.token)
            if token.token != draft:
                break
        out.append(kept)
    return out
