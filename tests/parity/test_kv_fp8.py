"""Keys and values in FP8: the same tokens in every way that a text can come, in half the memory."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sala.backends.memory import token_bytes
from sala.backends.torch.cache import FP8, HybridCache
from sala.errors import InputError, SalaError
from sala.llm import LLM
from tests.golden import DEVICE, checkpoint
from tests.integrity import integrity

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(420)]  # dense, then sparse


def llm(**options: object) -> LLM:
    return LLM(checkpoint("block16"), device=DEVICE, ctx=1024, kv="fp8", **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return llm(max_batch=1, snapshots=0, prefill_chunk=1024).generate(PROMPT, **GREEDY).token_ids


@pytest.mark.parametrize("chunk", [17, 64, 200])
def test_chunks(chunk: int, expected: list[int]) -> None:
    assert llm(prefill_chunk=chunk).generate(PROMPT, **GREEDY).token_ids == expected


def test_neighbours_a_prefix_and_drafts(expected: list[int]) -> None:
    many = llm(speculate="lookup")
    answers = many.generate([PROMPT, PROMPT[:300], PROMPT[:50]], **GREEDY)
    assert answers[0].token_ids == expected
    assert many.generate(PROMPT, **GREEDY).token_ids == expected  # most of it from the cache
    assert integrity(many.engine) == []


def test_a_session(tmp_path: Path, expected: list[int]) -> None:
    first = llm()
    first.save_session(first.open_store(tmp_path), "text", PROMPT[:300])
    again = llm()
    assert again.load_session(again.open_store(tmp_path), "text") == PROMPT[:300]
    assert again.generate(PROMPT, **GREEDY).token_ids == expected
    other = LLM(checkpoint("block16"), device=DEVICE, ctx=1024)
    with pytest.raises(SalaError):
        other.load_session(other.open_store(tmp_path), "text")


def test_it_is_near_the_plain_one() -> None:
    plain = LLM(checkpoint("block16"), device=DEVICE, ctx=1024)
    found, right = llm().perplexity(PROMPT), plain.perplexity(PROMPT)
    assert found != right
    assert abs(math.log(found / right)) < 0.05


def test_twice_as_many_tokens() -> None:
    config, budget = llm().config, 4 << 20
    assert token_bytes(config, 4, 1) < 0.38 * token_bytes(config, 4)  # its heads of 8 numbers have exponents too
    assert token_bytes(config, 2, 1) < 0.63 * token_bytes(config, 2)
    wide = replace(config, head_dim=128)
    assert token_bytes(wide, 2, 1) < 0.58 * token_bytes(wide, 2)
    cache = HybridCache(wide, 2, 2, torch.bfloat16, torch.device(DEVICE), FP8)
    pools = [pool for pages in cache.pages.values() for pool in (*pages.token_pools, pages.k1, pages.k2)]
    assert sum(pool.nbytes for pool in pools) == 2 * wide.sparse_config.block_size * token_bytes(wide, 2, 1)
    plain = LLM(checkpoint("block16"), device=DEVICE, cache_memory=budget, max_batch=4, dtype="bfloat16")
    narrow = LLM(checkpoint("block16"), device=DEVICE, cache_memory=budget, max_batch=4, dtype="bfloat16", kv="fp8")
    assert narrow.capacity.num_pages > 1.6 * plain.capacity.num_pages
    assert narrow.capacity.dtype == "BF16, keys and values F8_E4M3"


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALA_KV", "fp8")
    assert LLM(checkpoint("block16"), device=DEVICE, ctx=1024).capacity.dtype.endswith("F8_E4M3")
    monkeypatch.setenv("SALA_KV", "int3")
    with pytest.raises(InputError, match="SALA_KV"):
        LLM(checkpoint("block16"), device=DEVICE, ctx=1024)


def test_unknown_kinds() -> None:
    with pytest.raises(InputError, match="kv"):
        LLM(checkpoint("block16"), device=DEVICE, kv="int3")


def test_mlx_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core")
    monkeypatch.setenv("SALA_KV", "")
    assert LLM(checkpoint("block16"), backend="mlx", device="cpu", ctx=256).capacity.dtype == "F32"
    with pytest.raises(InputError, match="MLX"):
        LLM(checkpoint("block16"), backend="mlx", device="cpu", kv="fp8")


def test_the_estimate_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    from sala import cli

    pages = {}
    for kv in ("auto", "fp8"):
        assert cli.run(["estimate", "--shape", "9b", "--ctx", "1M", "--kv", kv, "--json"]) == 0
        pages[kv] = json.loads(capsys.readouterr().out)["pages"]
    assert 0.5 < pages["fp8"] / pages["auto"] < 0.55
