"""A draft head on top of the engine: the tokens of plain decoding, and a cache that no way of computing changes."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sala.backends.torch.executor import TorchExecutor
from sala.config import SalaConfig
from sala.errors import CheckpointError, ConfigError, InputError
from sala.llm import LLM
from tests.draft_heads import write_random_exit, write_random_head
from tests.golden import DATA, DEVICE, checkpoint
from tests.integrity import integrity
from tests.parity.test_engine_exact import GREEDY, MODELS, length_near, plain, requests

WINDOW = 40  # shorter than the prompts


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    room = tmp_path_factory.mktemp("heads")
    for model in MODELS:
        write_random_head(room / model, checkpoint(model), window=WINDOW, num_first=4)
    return {model: room / model for model in MODELS}


def drafting(model: str, head: Path, mode: str = "head", **options: Any) -> LLM:
    """Return a model that always drafts."""
    llm = LLM(checkpoint(model), device=DEVICE, ctx=1024, speculate=mode, draft_head=head, num_draft=3, **options)
    llm.engine.speculation._is_measured = False
    return llm


def entries(llm: LLM, prompt: list[int]) -> list[torch.Tensor]:
    """Return keys, values and last state that the head has for a prompt, which the engine computes."""
    executor = llm.engine.executor
    assert isinstance(executor, TorchExecutor)
    assert executor.drafter is not None
    (request,) = requests(llm, prompt)
    sequence = llm.engine.submit(request)
    while not sequence.sampled:
        llm.engine.step()
    assert sequence.slot is not None
    table = torch.tensor(sequence.pages)
    found = [one.clone() for one in executor.drafter.cache.tensors(table, len(prompt), sequence.slot).values()]
    llm.engine.cancel(sequence)
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", ["head", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_plain_decoding(model: str, mode: str, temperature: float, heads: dict[str, Path]) -> None:
    rng = random.Random(5)
    config = SalaConfig.load(DATA / model)
    llm = drafting(model, heads[model], mode)
    for number in range(2):
        prompt = [rng.randrange(256) for _ in range(length_near(config, rng))]
        prompt = (prompt + prompt)[-400:]
        options = {"temperature": temperature, "seed": 3, "max_tokens": 30}
        options |= {"repetition_penalty": 1.3, "top_p": 0.9} if number % 2 else {}
        got = llm.generate(prompt, **{**GREEDY, **options}).token_ids
        assert got == plain(model, prompt, **options), f"{len(prompt)} tokens"
        longer = prompt + got + [1, 2, 3]  # what is cached after drafts is as if never drafted
        assert llm.generate(longer, **GREEDY).token_ids == plain(model, longer)
    assert llm.engine.speculation.drafted > 50
    assert integrity(llm.engine) == []


@pytest.mark.parametrize("mode", ["head", "auto"])
def test_a_useless_head_stays_behind(mode: str, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows few of the steps without drafts; the answers are the same, also where it begins again."""
    llm = LLM(checkpoint("block16"), device=DEVICE, ctx=1024, speculate=mode, draft_head=heads["block16"], num_draft=3)
    speculation, clock = llm.engine.speculation, iter(range(1 << 30))
    monkeypatch.setattr("sala.engine.engine.time.perf_counter", lambda: float(next(clock)))  # drafting costs a step
    executor = llm.engine.executor
    assert isinstance(executor, TorchExecutor)
    assert executor.drafter is not None
    follow, followed = executor.drafter.follow, list[int]()
    monkeypatch.setattr(executor.drafter, "follow", lambda *some: followed.append(some[0].lengths[0]) or follow(*some))
    prompt = [random.Random(8).randrange(256) for _ in range(90)]
    got = llm.generate(prompt, **{**GREEDY, "max_tokens": 150}).token_ids
    assert got == plain("block16", prompt, max_tokens=150)
    assert speculation.rounds > 0
    assert 0 < followed.count(1) < 60
    longer = prompt + got + [1, 2, 3]
    assert llm.generate(longer, **GREEDY).token_ids == plain("block16", longer)


@pytest.mark.parametrize("model", MODELS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_neighbours_preemption_and_small_caches(model: str, heads: dict[str, Path], seed: int) -> None:
    rng = random.Random(seed)
    config = SalaConfig.load(DATA / model)
    sizes = {"max_batch": rng.randint(2, 5), "snapshots": rng.randint(0, 4)}
    llm = drafting(model, heads[model], rng.choice(["head", "auto"]), prefill_chunk=rng.choice([17, 64, 200]), **sizes)
    prompts = [[rng.randrange(256) for _ in range(length_near(config, rng))] for _ in range(4)]
    sequences = [llm.engine.submit(request) for request in requests(llm, *prompts)]
    while not all(sequence.is_finished for sequence in sequences):
        llm.engine.step()
        if llm.engine.scheduler.running and rng.random() < 0.1:
            llm.engine.scheduler.preempt(rng.choice(llm.engine.scheduler.running))
        assert integrity(llm.engine) == []
    for ids, sequence in zip(prompts, sequences, strict=True):
        assert sequence.error is None
        assert [sampled.token for sampled in sequence.sampled] == plain(model, ids), f"{len(ids)} tokens"


def test_controls_and_stops_are_obeyed(tiny: Path, tmp_path: Path) -> None:
    write_random_head(tmp_path / "head", tiny)
    plain_llm = LLM(tiny, device=DEVICE, ctx=512)
    llm = LLM(tiny, device=DEVICE, ctx=512, speculate="head", draft_head=tmp_path / "head")
    llm.engine.speculation._is_measured = False
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    text = plain_llm.generate("Hello", temperature=0, max_tokens=40, ignore_eos=True).text
    for options in ({"json_schema": schema}, {"stop": [text[20:23]]}, {"min_tokens": 10}, {"loop_guard": 32}):
        settings = {"temperature": 0, "max_tokens": 40, **options}
        got, want = (one.generate("Hello", **settings) for one in (llm, plain_llm))
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason), options


@pytest.mark.parametrize("model", MODELS)
def test_entries_do_not_depend_on_how_tokens_were_computed(model: str, heads: dict[str, Path], tmp_path: Path) -> None:
    """In one chunk, in several, on a cached prefix, after drafts, and from disk."""
    rng = random.Random(9)
    prompt = [rng.randrange(256) for _ in range(150)]
    answer = plain(model, prompt, max_tokens=30)
    whole = [*prompt, *answer, 5, 6, 7]
    want = entries(drafting(model, heads[model], prefill_chunk=1024, snapshots=0), whole)

    def ways() -> Iterator[tuple[str, LLM]]:
        yield "chunks", drafting(model, heads[model], prefill_chunk=23)
        cached = drafting(model, heads[model])
        cached.generate(whole[:97], **GREEDY)
        yield "a cached prefix", cached
        drafted = drafting(model, heads[model])
        drafted.generate(prompt, **{**GREEDY, "max_tokens": 30})
        yield "drafts", drafted
        store = cached.open_store(tmp_path / model)
        cached.save_session(store, "one", whole[:120])
        restored = drafting(model, heads[model])
        restored.load_session(store, "one")
        yield "a file", restored

    for way, llm in ways():
        for name, got, one in zip(("k", "v", "last"), entries(llm, whole), want, strict=True):
            torch.testing.assert_close(got, one, atol=2e-4, rtol=2e-4, msg=f"{name} after {way}")


def test_sessions_are_read_with_and_without_a_head(heads: dict[str, Path], tmp_path: Path) -> None:
    prompt = [number % 251 for number in range(180)]
    with_head, without = drafting("block16", heads["block16"]), LLM(checkpoint("block16"), device=DEVICE, ctx=1024)
    for first, second in ((with_head, without), (without, with_head)):
        store = first.open_store(tmp_path / str(id(first)))
        first.save_session(store, "one", prompt)
        second.reset()
        second.load_session(second.open_store(tmp_path / str(id(first))), "one")
        answer = second.generate([*prompt, 9, 9], **GREEDY)
        assert answer.usage.cached_tokens >= 170
        assert answer.token_ids == plain("block16", [*prompt, 9, 9])


def test_a_trained_exit_changes_drafts_and_no_answer(tiny: Path, tmp_path: Path) -> None:
    write_random_exit(tmp_path / "exit", tiny, 1)
    settings: Any = {"temperature": 0.8, "seed": 3, "max_tokens": 30, "ignore_eos": True}
    want = LLM(tiny, device=DEVICE, ctx=512).generate("Hello", **settings).token_ids
    drafts = []
    for choice in (None, tmp_path / "exit"):
        llm = LLM(tiny, device=DEVICE, ctx=512, speculate="layers", draft_head=choice, draft_layers=1)
        llm.engine.speculation._is_measured = False
        made: list[Any] = []
        draft = llm.engine.executor.draft
        llm.engine.executor.draft = lambda *some, made=made, draft=draft: made.append(draft(*some)) or made[-1]  # type: ignore[method-assign]
        assert llm.generate("Hello", **settings).token_ids == want
        drafts.append(made)
    assert drafts[0][0] != drafts[1][0]
    with pytest.raises(CheckpointError, match="is not a trained exit"):
        LLM(tiny, device=DEVICE, speculate="layers", draft_head=tiny)
    with pytest.raises(CheckpointError, match="drafts for models with"):
        LLM(checkpoint("block64"), device=DEVICE, speculate="layers", draft_head=tmp_path / "exit")
    with pytest.raises(ConfigError, match="layers is none"):
        write_random_exit(tmp_path / "bad", tiny, 99)


def test_heads_that_do_not_fit_are_refused(heads: dict[str, Path], tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="drafts for models with"):
        LLM(checkpoint("block64"), device=DEVICE, speculate="head", draft_head=heads["block16"])
    with pytest.raises(InputError, match="has no draft head"):
        LLM(tiny, device=DEVICE, speculate="head")
    with pytest.raises(CheckpointError, match="is not a directory"):
        LLM(tiny, device=DEVICE, speculate="auto", draft_head=tmp_path / "none")
    with pytest.raises(CheckpointError, match="is not a draft head"):
        LLM(tiny, device=DEVICE, speculate="head", draft_head=tiny)
    for changes, words in (({"window": 0}, "sizes"), ({"num_key_value_heads": 3}, "together")):
        with pytest.raises(ConfigError, match=words):
            write_random_head(tmp_path / "bad", tiny, **changes)
