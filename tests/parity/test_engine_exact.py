"""The engine on the real model: chunked, batched, preempted, prefix-reused, speculative: always the same tokens."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sala.config import SalaConfig
from sala.engine.requests import Call
from sala.engine.scheduler import Request
from sala.llm import LLM
from sala.protocol import Sampling
from tests.golden import DATA, DEVICE, checkpoint
from tests.integrity import integrity

MODELS = ["block16", "block64"]
COUNT = 10
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}


def llm(model: str, **options: object) -> LLM:
    return LLM(checkpoint(model), device=DEVICE, ctx=1024, **options)  # type: ignore[arg-type]


_PLAIN: dict[str, LLM] = {}


def plain(model: str, prompt: list[int], **settings: object) -> list[int]:
    """One request alone, nothing cached, nothing drafted, the prompt in one chunk."""
    if model not in _PLAIN:
        _PLAIN[model] = llm(model, max_batch=1, snapshots=0, prefill_chunk=1024)
    return _PLAIN[model].generate(prompt, **{**GREEDY, **settings}).token_ids


def length_near(config: SalaConfig, rng: random.Random) -> int:
    sparse = config.sparse_config
    border = rng.choice([64, sparse.block_size, sparse.window_size, sparse.agreement_len, sparse.dense_len])
    return max(1, border + rng.randint(-3, 3))


@pytest.mark.parametrize("model", MODELS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_neighbours_preemption_and_small_caches(model: str, seed: int) -> None:
    rng = random.Random(seed)
    config = SalaConfig.load(DATA / model)
    tight = llm(
        model, max_batch=rng.randint(2, 5), snapshots=rng.randint(0, 4), prefill_chunk=rng.choice([17, 64, 200])
    )
    prompts = [[rng.randrange(256) for _ in range(length_near(config, rng))] for _ in range(5)]
    sequences = [tight.engine.submit(request) for request in requests(tight, *prompts)]
    while not all(sequence.is_finished for sequence in sequences):
        tight.engine.step()
        if tight.engine.scheduler.running and rng.random() < 0.1:
            tight.engine.scheduler.preempt(rng.choice(tight.engine.scheduler.running))
        assert integrity(tight.engine) == []
    for ids, sequence in zip(prompts, sequences, strict=True):
        assert sequence.error is None
        assert [sampled.token for sampled in sequence.sampled] == plain(model, ids), f"{len(ids)} tokens"


def requests(llm: LLM, *prompts: list[int]) -> list[Request]:
    """Greedy requests, for a test that steps the engine itself."""
    sampling = Sampling(**GREEDY)  # type: ignore[arg-type]
    return [llm.inputs.prepare(Call(None, sampling, ids))[0].request for ids in prompts]


@pytest.mark.parametrize("model", MODELS)
def test_fifty_random_splits_of_a_prefix(model: str) -> None:
    rng = random.Random(21)
    config = SalaConfig.load(DATA / model)
    cached = llm(model, snapshots=6, prefill_chunk=50)
    base = [rng.randrange(256) for _ in range(config.sparse_config.dense_len + 60)]
    answer: list[int] = []
    reused = 0
    for number in range(50):
        cut = rng.randint(1, len(base))
        match number % 5:
            case 0:
                prompt = base[:cut]
            case 1:
                prompt = base[:cut] + [rng.randrange(256) for _ in range(9)]  # divergence inside
            case 2:
                prompt = base[: length_near(config, rng)] + answer  # a longer conversation
            case 3:
                prompt = list(prompt)  # regenerate: all of it is known
            case 4:
                prompt = prompt[:-3] + [rng.randrange(256) for _ in range(5)]  # edited last turn
        out = cached.generate(prompt, **GREEDY)
        answer = out.token_ids
        reused += out.usage.cached_tokens
        assert answer == plain(model, prompt), f"split {number}, {len(prompt)} tokens, {out.usage.cached_tokens} cached"
        if number % 17 == 16:
            cached.reset()
    assert reused > 500


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("mode", "layers"), [("lookup", 1), ("layers", 2), ("layers", 99)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_is_lossless(model: str, mode: str, layers: int, temperature: float) -> None:
    """Junk drafts (two layers of a random model), perfect ones (all layers) and those of the text itself."""
    rng = random.Random(5)
    config = SalaConfig.load(DATA / model)
    drafting = llm(model, speculate=mode, num_draft=3, draft_layers=layers)
    drafting.engine.speculation._is_measured = False
    for _ in range(4):
        prompt = [rng.randrange(256) for _ in range(length_near(config, rng))]
        prompt = (prompt + prompt)[-400:]
        options = {"temperature": temperature, "seed": 3, "max_tokens": 30}
        got = drafting.generate(prompt, **{**GREEDY, **options}).token_ids
        assert got == plain(model, prompt, **options), f"{len(prompt)} tokens"
        longer = prompt + got + [1, 2, 3]  # what is cached after drafts is as if never drafted
        assert drafting.generate(longer, **GREEDY).token_ids == plain(model, longer)
    if layers == 99 and temperature == 0:
        assert drafting.engine.speculation.acceptance > 0.99
    assert integrity(drafting.engine) == []


def test_sampled_answers_do_not_depend_on_neighbours() -> None:
    rng = random.Random(8)
    together = llm("block16")
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 150))] for _ in range(6)]
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 77, "max_tokens": 15}
    answers = together.generate(prompts, **{**GREEDY, **settings})
    assert [out.token_ids for out in answers] == [plain("block16", prompt, **settings) for prompt in prompts]


def test_several_answers_share_one_reading(tiny: Path) -> None:
    model = LLM(tiny, device=DEVICE, ctx=2048)
    answers = model.generate("x" * 500, n=4, temperature=1.0, seed=5, max_tokens=8)
    assert len({tuple(out.token_ids) for out in answers}) == 4
    assert [out.usage.cached_tokens for out in answers] == [0, 500, 500, 500]
    alone = model.generate("x" * 500, temperature=1.0, seed=7, max_tokens=8)
    assert alone.token_ids == answers[2].token_ids


@pytest.mark.parametrize("fault", ["advance", "snapshot"])
def test_planted_faults_change_the_tokens(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: a state advanced past the accepted tokens, or a snapshot one token off, is seen."""
    from sala.backends.torch import batch

    rng = random.Random(31)
    prompt = [rng.randrange(256) for _ in range(100)]
    model = llm("block16", speculate="layers", draft_layers=2, num_draft=3)
    model.engine.speculation._is_measured = False
    want = plain("block16", prompt, max_tokens=40)
    if fault == "advance":
        fold = batch.Batch.fold_accepted
        monkeypatch.setattr(
            batch.Batch, "fold_accepted", lambda self, accepted: fold(self, [span.length for span in self.spans])
        )
    else:
        model.generate(prompt, **GREEDY)
        for snapshot in model.engine.hybrid.prefix:
            for states in model._executor.cache.states.values():  # type: ignore[attr-defined]
                states[snapshot.slot] *= 0.9  # as if it had decayed once more
    assert model.generate(prompt, **{**GREEDY, "max_tokens": 40}).token_ids != want
