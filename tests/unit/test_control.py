"""Controls: grammars, thinking budgets, the guard against repetition."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from sala.engine.requests import Call, LoopGuard
from sala.errors import InputError
from sala.llm import LLM
from sala.protocol import Sampling
from sala.text.control import ThinkBudget
from sala.text.tokenizer import Tokenizer
from sala.text.workers import SandboxTask

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=2048)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_json_schema(llm: LLM, seed: int) -> None:
    out = llm.chat([{"role": "user", "content": "who?"}], json_schema=json.dumps(SCHEMA), temperature=1.0, seed=seed)
    data = json.loads(out.text)
    assert set(data) == {"name", "age"}
    assert 0 <= data["age"] <= 99
    assert out.finish_reason == "stop"


@pytest.mark.parametrize("seed", range(4))
def test_regex(llm: LLM, seed: int) -> None:
    out = llm.generate("x", regex="[a-c]{3}-[0-9]+;", temperature=1.0, seed=seed, max_tokens=200)
    assert re.fullmatch("[a-c]{3}-[0-9]+;", out.text)


def test_a_grammar_that_was_late_once_is_tried_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have been busy."""
    llm.generate("x", regex="[xyz]{2}")
    process = llm.inputs._grammars._worker._process
    with monkeypatch.context() as patch:
        for name in ("LOAD_SECONDS", "COMPILE_SECONDS"):
            patch.setattr(f"sala.text.control.{name}", 0.1)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(InputError, match=r"takes longer than 0\.1 s"):
            llm.generate("x", regex="[xyz]{7}")
    assert re.fullmatch("[xyz]{7}", llm.generate("x", regex="[xyz]{7}").text)


def test_loading_a_tokenizer_takes_no_time_from_a_grammar(llm: LLM) -> None:
    """A new process of the compiler loads it first, which takes longer than most grammars."""
    compiler = llm.inputs._grammars
    asked = []

    class Spy:
        def ask_all(self, *tasks: SandboxTask) -> dict[str, Any]:
            asked.extend((task.name, task.seconds) for task in tasks)
            return worker.ask_all(*tasks)

    worker, compiler._worker = compiler._worker, Spy()
    try:
        llm.generate("x", regex="[xyz]{3}")
    finally:
        compiler._worker = worker
    assert asked == [("tokenizer", 30.0), ("grammar", 2.0)]


def test_lark_grammar(llm: LLM) -> None:
    out = llm.generate("x", grammar='start: ("yes" | "no") "!"', temperature=1.0, seed=1)
    assert out.text in ("yes!", "no!")


def test_a_short_answer_is_a_beginning_of_json(llm: LLM) -> None:
    out = llm.generate("x", json_schema=json.dumps(SCHEMA), temperature=0, max_tokens=5)
    assert out.finish_reason == "length"
    assert out.text.startswith("{")


BAD: list[dict[str, Any]] = [
    {"json_schema": "{"},
    {"json_schema": '{"type": "hiccup"}'},
    {"regex": "("},
    {"regex": "(?=a)b"},
    {"grammar": "start: nothing_defined"},
    {"regex": "a", "json_schema": "{}"},
    {"json_schema": " " * 300_000},
]


@pytest.mark.parametrize("settings", BAD, ids=lambda item: str(item)[:40])
def test_bad_grammars_are_refused_before_anything_runs(llm: LLM, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        llm.generate("x", **settings)
    assert llm.engine.is_idle
    assert llm.generate("x", temperature=0, max_tokens=3).token_ids


@pytest.mark.parametrize("regex", ["(a+)+b", "(a|aa){500}", "a{1000000}"])
def test_hostile_patterns_end_in_time(llm: LLM, regex: str) -> None:
    with contextlib.suppress(InputError):
        llm.generate("x", regex=regex, temperature=0, max_tokens=3)
    assert llm.engine.is_idle
    assert llm.generate("x", temperature=0, max_tokens=3).token_ids


def think(tokenizer: Tokenizer, budget: int, text: str, is_open: bool = False) -> str:
    """The text as a budget would shape it, if the model wanted to say `text`."""
    control = ThinkBudget(tokenizer, budget, is_open)
    forced, out = list(control.opening), []
    source = tokenizer.encode(text, bos=False)
    while source or forced:
        token = forced.pop(0) if forced else source.pop(0)
        out.append(token)
        verdict = control.observe(token)
        forced += verdict.force if verdict else ()
    return tokenizer.decode(out)


def test_thinking_budget(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    closing = "\n</think>\n\n"
    assert think(tokenizer, 4, "<think>abcdefgh") == f"<think>abcd{closing}efgh"
    assert think(tokenizer, 0, "<think>abc") == f"<think>{closing}abc"
    assert think(tokenizer, 99, "<think>abc</think>def") == "<think>abc</think>def"
    assert think(tokenizer, 2, "no thoughts at all") == "no thoughts at all"
    assert think(tokenizer, 3, "abcdef", is_open=True) == f"abc{closing}def"
    assert think(tokenizer, 0, "abc", is_open=True) == f"{closing}abc"
    assert think(tokenizer, 30, "<think>a</think>b<think>" + "c" * 60).count("</think>") == 1


def test_thinking_budget_end_to_end(llm: LLM) -> None:
    """The model is made to open a thought; the budget closes it and an answer follows."""
    prompt = llm.tokenizer.encode("<think>")
    sampling = Sampling(temperature=0, max_tokens=60, think_budget=5)
    completion = llm.answer(Call(None, sampling, prompt, is_chat=True))
    assert len(completion.reasoning) == 5
    assert len(completion.text) > 10
    assert completion.usage.completion_tokens == 60


def test_loop_guard() -> None:
    def runs(tokens: list[int], limit: int = 64) -> str | None:
        guard = LoopGuard(limit)
        for token in tokens:
            verdict = guard.observe(token)
            if verdict:
                return verdict.finish
        return None

    assert runs([5] * 200) == "repetition"
    assert runs([1, 2, 3] * 60) == "repetition"
    assert runs(list(range(40)) * 5) == "repetition"
    assert runs(list(range(64)) * 4) == "repetition"
    assert runs(list(range(65)) * 4) is None  # a period longer than the limit
    assert runs(list(range(40)) * 2 + [7] + list(range(40)) * 2) is None  # less than three times
    assert runs([7] * 30 + list(range(20)) * 3) is None  # too few tokens
    assert runs(list(range(10)) * 6, 48) == "repetition"
    assert runs(list(range(300))) is None
    assert runs([5] * 50 + list(range(100))) is None


def test_loop_guard_end_to_end(llm: LLM) -> None:
    out = llm.generate("hello", temperature=0, max_tokens=2000, loop_guard=64, ignore_eos=True)
    assert out.finish_reason == "repetition"
    assert out.usage.completion_tokens < 2000


def test_min_tokens(llm: LLM) -> None:
    bias = {257: 100.0}
    assert llm.generate("x", temperature=0, logit_bias=bias).usage.completion_tokens == 1
    out = llm.generate("x", temperature=0, logit_bias=bias, min_tokens=7)
    assert out.usage.completion_tokens == 8
    assert out.finish_reason == "stop"


def test_echo_scoring(llm: LLM) -> None:
    ids = llm.tokenizer.encode("score me")
    scores = llm.score(ids, top=3, chunk=4)
    assert [sampled.token for sampled in scores] == ids[1:]
    assert all(len(sampled.top_logprobs) == 3 for sampled in scores)
    logits = llm.logits(ids).astype("float64")
    assert scores[2].top_logprobs[0][0] == int(logits[2].argmax())


def test_a_grammar_waits_for_the_end_of_reasoning(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("<think>")
    for budget in (0, 5):
        sampling = Sampling(temperature=0, max_tokens=60, think_budget=budget, regex="[0-9]{3}")
        completion = llm.answer(Call(None, sampling, prompt, is_chat=True))
        assert re.fullmatch("[0-9]{3}", completion.text)
        assert len(completion.reasoning) == budget
