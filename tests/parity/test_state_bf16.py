"""Recurrent states in bf16: the same tokens in every way that a text can come, in half the memory."""

import json
import math
from pathlib import Path

import pytest
import torch

from sala.backends.memory import state_bytes
from sala.errors import InputError, SalaError
from sala.llm import LLM
from tests.golden import DEVICE, checkpoint
from tests.integrity import integrity

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(420)]  # dense, then sparse


def llm(**options: object) -> LLM:
    return LLM(checkpoint("block16"), device=DEVICE, **({"ctx": 1024, "state": "bf16"} | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return llm(max_batch=1, snapshots=0, prefill_chunk=1024).generate(PROMPT, **GREEDY).token_ids


@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_chunks(chunk: int, expected: list[int]) -> None:
    """Cuts at chunks of the lightning layers do not matter: the state is rounded there anyway."""
    assert llm(prefill_chunk=chunk).generate(PROMPT, **GREEDY).token_ids == expected


def test_neighbours_and_a_prefix(expected: list[int]) -> None:
    many, prompts = llm(), [PROMPT, PROMPT[:300], PROMPT[:50], PROMPT[9:99]]
    alone = [llm(max_batch=1, snapshots=0).generate(prompt, **GREEDY).token_ids for prompt in prompts]
    assert [answer.token_ids for answer in many.generate(prompts, **GREEDY)] == alone
    assert alone[0] == expected
    assert many.generate(PROMPT, **GREEDY).token_ids == expected  # most of it from a snapshot
    assert integrity(many.engine) == []


@pytest.mark.parametrize("source", ["lookup", "layers"])
def test_drafts(source: str, expected: list[int]) -> None:
    """A state is rounded as often with drafts as without."""
    drafted = llm(speculate=source, draft_layers=2)
    assert drafted.generate(PROMPT, **GREEDY).token_ids == expected
    assert integrity(drafted.engine) == []


def test_a_session(tmp_path: Path, expected: list[int]) -> None:
    first = llm()
    first.save_session(first.open_store(tmp_path), "text", PROMPT[:320])
    again = llm()
    assert again.load_session(again.open_store(tmp_path), "text") == PROMPT[:320]
    assert again.generate(PROMPT, **GREEDY).token_ids == expected
    other = llm(state="auto")
    assert other.fingerprint() != first.fingerprint()
    with pytest.raises(SalaError):
        other.load_session(other.open_store(tmp_path), "text")


def test_it_is_near_the_plain_one() -> None:
    found, right = (llm(state=state, prefill_chunk=1).perplexity(PROMPT[:200]) for state in ("bf16", "fp32"))
    assert found != right
    assert abs(math.log(found / right)) < 0.05


def test_half_the_memory() -> None:
    budget = 1 << 20
    plain, half = (llm(state=state, ctx=256, cache_memory=budget, max_batch=64) for state in ("auto", "bf16"))
    assert {states.dtype for states in half._executor.cache.states.values()} == {torch.bfloat16}  # type: ignore[attr-defined]
    held = sum(states.nbytes for states in half._executor.cache.states.values())  # type: ignore[attr-defined]
    assert held == half.capacity.num_slots * state_bytes(half.config, 2)
    assert half.capacity.num_slots > 1.9 * plain.capacity.num_slots
    assert (plain.capacity.dtype, half.capacity.dtype) == ("F32", "F32, states BF16")
    assert llm(kv="fp8").capacity.dtype == "F32, keys and values F8_E4M3, states BF16"


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALA_STATE", "bf16")
    assert LLM(checkpoint("block16"), device=DEVICE, ctx=1024).capacity.dtype.endswith("states BF16")
    monkeypatch.setenv("SALA_STATE", "int3")
    with pytest.raises(InputError, match="SALA_STATE"):
        LLM(checkpoint("block16"), device=DEVICE, ctx=1024)


def test_mlx_does_not_have_it() -> None:
    pytest.importorskip("mlx.core")
    with pytest.raises(InputError, match="MLX"):
        LLM(checkpoint("block16"), backend="mlx", device="cpu", state="bf16")


def test_the_estimate_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    from sala import cli

    found = {}
    for state in ("auto", "bf16"):
        assert cli.run(["estimate", "--shape", "9b", "--batch", "64", "--state", state, "--json"]) == 0
        found[state] = json.loads(capsys.readouterr().out)
    assert 2 * found["bf16"]["states"] == found["auto"]["states"]
    assert 2 * found["bf16"]["snapshots"] == found["auto"]["snapshots"]
