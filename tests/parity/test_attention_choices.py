"""What a user chooses for the sparse layers, dense at any length or more blocks, is computed as the definition says."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from sala.config import SalaConfig
from sala.engine.requests import Call
from sala.errors import InputError
from sala.llm import LLM
from sala.options import Attention
from sala.protocol import Options, Sampling
from tests.golden import DATA, DEVICE, checkpoint
from tests.integrity import integrity
from tests.parity.naive import NaiveModel

MODEL = "block16"  # 4 blocks of 16 beside a window of two; dense below 128 tokens
LENGTH = 140
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
CHOICES: dict[str, dict[str, Any]] = {
    "as the model says": {},
    "dense": {"attention": "dense"},
    "sparse": {"attention": "sparse"},
    "dense below 180": {"dense_below": 180},
    "dense below 20": {"dense_below": 20},
    "2 blocks": {"topk": 2},
    "5 blocks": {"topk": 5},
    "2 blocks at any length": {"topk": 2, "attention": "sparse"},
}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


@cache
def answered(name: str) -> tuple[list[int], np.ndarray]:
    """The greedy answer to a prompt, and the logits of prompt and answer by the definition."""
    choice = CHOICES[name]
    config = SalaConfig.load(DATA / MODEL).to_dict()
    sparse = config["sparse_config"]
    sparse["topk"] = choice.get("topk", sparse["topk"])
    sparse["dense_len"] = choice.get("dense_below", sparse["dense_len"])
    sparse["dense_len"] = {"dense": 10**9, "sparse": 0}.get(choice.get("attention", ""), sparse["dense_len"])
    answer = load(**choice).generate(prompt(LENGTH), **GREEDY).token_ids
    model = NaiveModel(config, load_file(DATA / MODEL / "model.safetensors"))
    return answer, model.logits([*prompt(LENGTH), *answer], LENGTH)


def load(**options: Any) -> LLM:
    return LLM(checkpoint(MODEL), device=DEVICE, ctx=512, **options)


@pytest.mark.parametrize("name", CHOICES)
def test_logits_and_tokens_are_those_of_the_definition(name: str) -> None:
    """Prompt and answer, by chunks, by the kernels and by the reference."""
    answer, expected = answered(name)
    assert answer == expected[LENGTH - 1 : -1].argmax(-1).tolist()
    for kernels in ("auto", "off"):
        logits = load(kernels=kernels, **CHOICES[name]).logits([*prompt(LENGTH), *answer], 29, LENGTH)
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_choices_matter() -> None:
    """The tests can fail: the last row of the prompt sees other blocks by each rule, except where they are the same."""
    ends = {name: tuple(answered(name)[1][LENGTH - 1].round(3)) for name in CHOICES}
    kinds = [{name for name in CHOICES if ends[name] == end} for end in dict.fromkeys(ends.values())]
    assert kinds == [
        {"as the model says", "sparse", "dense below 20"},
        {"dense", "dense below 180"},
        {"2 blocks", "2 blocks at any length"},
        {"5 blocks"},
    ]


@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_requests_choose_and_run_together(speculate: str) -> None:
    """One model, requests of all kinds at a time, then again on what is cached of the same tokens by other rules."""
    llm = load(prefill_chunk=37, max_batch=4, speculate=speculate)
    for turn in range(2):
        calls = [
            Call(name, Sampling(**GREEDY), prompt(LENGTH), attention=Attention(**choice))
            for name, choice in CHOICES.items()
        ]
        found = dict(llm.many(calls))
        assert {name: one.token_ids for name, one in found.items()} == {name: answered(name)[0] for name in CHOICES}
        assert turn == 0 or {one.usage.cached_tokens for one in found.values()} == {LENGTH - 1}
        assert integrity(llm.engine) == []


def test_a_prefix_serves_other_choices_as_far_as_they_agree() -> None:
    llm = load()
    llm.generate(prompt(LENGTH), **GREEDY)
    for name, agreed in (("5 blocks", 96), ("2 blocks", 0), ("dense", 112)):  # 112: with what "5 blocks" has left
        completion = llm.generate(prompt(LENGTH), **GREEDY, **CHOICES[name])
        assert completion.usage.cached_tokens == agreed
        assert completion.token_ids == answered(name)[0]


def test_sessions_and_files_belong_to_a_choice(tmp_path: Any) -> None:
    """What one process has computed serves another one with the same choice, and no other."""
    options = {"cache_dir": tmp_path / "cache"}
    long = prompt(300)
    first = load(**options, topk=5)
    answer = first.generate(long, **GREEDY).token_ids
    store = first.open_store(tmp_path / "sessions")
    first.save_session(store, "kept", long)
    first.close()
    with load(**options, topk=5) as again:
        completion = again.generate(long, **GREEDY)
        assert (completion.token_ids, completion.usage.cached_tokens) == (answer, 299)
    with load(**options) as other:
        assert other.generate(long, **GREEDY).usage.cached_tokens <= 96
        plain = other.generate(prompt(300, 1), **GREEDY).token_ids
        with pytest.warns(UserWarning, match="--topk 5"):
            other.load_session(other.open_store(tmp_path / "sessions"), "kept")
        again = other.generate([*long, 5], **GREEDY)
        other.reset()
        assert again.token_ids == other.generate([*long, 5], **GREEDY).token_ids
    with load() as fresh:
        assert fresh.generate(prompt(300, 1), **GREEDY).token_ids == plain


def test_choices_that_do_not_work_are_refused() -> None:
    for words in ({"attention": "dense", "dense_below": 100}, {"topk": 0}, {"topk": 5000}, {"attention": "some"}):
        with pytest.raises(InputError):
            Options(**words)  # type: ignore[arg-type]
    llm = load()
    with pytest.raises(InputError, match=r"topk is 1.*above 1"):
        llm.generate([1, 2, 3], topk=1)
    with pytest.raises(InputError, match="topk"):
        load(topk=1)
    assert load(topk=5, attention="dense").attention_changes == (
        "attention differs from the checkpoint's: a query selects 5 blocks instead of 4; "
        "dense at any length instead of dense below 128 tokens"
    )
    assert llm.attention_changes == ""


def test_a_request_goes_over_the_options() -> None:
    default = Attention(attention="dense", topk=5)
    assert Attention(topk=3).over(default) == Attention(attention="dense", topk=3)
    assert Attention(dense_below=9).over(default) == Attention(dense_below=9, topk=5)
    assert Attention(attention="auto").over(Attention(dense_below=9)) == Attention(attention="auto", dense_below=9)
    assert Attention(attention="sparse").over(Attention(dense_below=9)) == Attention(attention="sparse")
    own = SalaConfig.load(DATA / MODEL).sparse_config
    assert own.attending(Attention(attention="auto")) == own
    assert replace(own, dense_len=0) == own.attending(Attention(attention="sparse"))
