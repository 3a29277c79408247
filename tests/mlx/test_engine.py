"""The engine on the MLX executor: chunked, batched, preempted, prefix-reused, speculative: always torch's tokens."""

import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from sala.config import SalaConfig
from sala.errors import InputError
from sala.llm import LLM
from tests.golden import DATA, checkpoint
from tests.integrity import integrity
from tests.mlx.place import DEVICE
from tests.mlx.test_graph import spy_on_adopted
from tests.parity.test_engine_exact import GREEDY, length_near, plain, requests

MODEL = "block16"


def llm(**options: object) -> LLM:
    return LLM(checkpoint(MODEL), backend="mlx", device=DEVICE, ctx=1024, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [1, 2])
def test_neighbours_preemption_and_small_caches(seed: int) -> None:
    rng = random.Random(seed)
    config = SalaConfig.load(DATA / MODEL)
    tight = llm(max_batch=3, snapshots=rng.randint(0, 2), prefill_chunk=[17, 64][seed % 2])
    prompts = [[rng.randrange(256) for _ in range(length_near(config, rng))] for _ in range(4)]
    sequences = [tight.engine.submit(request) for request in requests(tight, *prompts)]
    while not all(sequence.is_finished for sequence in sequences):
        tight.engine.step()
        if tight.engine.scheduler.running and rng.random() < 0.1:
            tight.engine.scheduler.preempt(rng.choice(tight.engine.scheduler.running))
        assert integrity(tight.engine) == []
    for ids, sequence in zip(prompts, sequences, strict=True):
        assert sequence.error is None
        assert [sampled.token for sampled in sequence.sampled] == plain(MODEL, ids), f"{len(ids)} tokens"


def test_splits_of_a_prefix() -> None:
    rng = random.Random(21)
    config = SalaConfig.load(DATA / MODEL)
    cached = llm(snapshots=6, prefill_chunk=50)
    base = [rng.randrange(256) for _ in range(config.sparse_config.dense_len + 60)]
    answer: list[int] = []
    reused = 0
    for number in range(10):
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
        assert answer == plain(MODEL, prompt), f"split {number}, {len(prompt)} tokens, {out.usage.cached_tokens} cached"
    assert reused > 300


@pytest.mark.parametrize(("mode", "layers", "temperature"), [("lookup", 1, 0.0), ("layers", 2, 0.8), ("layers", 99, 0)])
def test_speculation_is_lossless(mode: str, layers: int, temperature: float) -> None:
    """Drafts of the text itself, junk ones (two layers of a random model) and perfect ones (all layers)."""
    rng = random.Random(5)
    drafting = llm(speculate=mode, num_draft=3, draft_layers=layers)
    drafting.engine.speculation._is_measured = False
    for length in (20, 115):  # the second answer crosses into the sparse regime
        prompt = [rng.randrange(256) for _ in range(length)]
        prompt = prompt[: length // 2] * 2
        options = {"temperature": temperature, "seed": 3, "max_tokens": 20}
        got = drafting.generate(prompt, **{**GREEDY, **options}).token_ids
        assert got == plain(MODEL, prompt, **options)
        longer = prompt + got + [1, 2, 3]  # what is cached after drafts is as if never drafted
        assert drafting.generate(longer, **GREEDY).token_ids == plain(MODEL, longer)
    if layers == 99:
        assert drafting.engine.speculation.acceptance > 0.99
    assert integrity(drafting.engine) == []


def test_sampled_answers_do_not_depend_on_neighbours() -> None:
    rng = random.Random(8)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 150))] for _ in range(4)]
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 77, "max_tokens": 8}
    answers = llm().generate(prompts, **{**GREEDY, **settings})
    assert [out.token_ids for out in answers] == [plain(MODEL, prompt, **settings) for prompt in prompts]


def test_a_snapshot_keeps_its_own_state() -> None:
    """States that a batch left side by side are parted when one of them leaves or is copied."""
    together = llm(max_batch=3, snapshots=12)
    prompts = [[seed + 3 * at for at in range(30)] for seed in range(3)]
    for _ in range(2):
        answers = together.generate(prompts, **GREEDY)
        assert [out.token_ids for out in answers] == [plain(MODEL, prompt) for prompt in prompts]
    alone = [1, 2, 3]
    assert together.generate(alone, **GREEDY).token_ids == plain(MODEL, alone)
    assert together._executor.cache.joined == set()  # type: ignore[attr-defined]
    again = together.generate(prompts[0], **GREEDY)
    assert again.usage.cached_tokens > 20
    assert again.token_ids == plain(MODEL, prompts[0])


def test_what_was_built_ahead_is_used_or_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that goes on takes it; one that is interrupted, joined by others or steered otherwise does not."""
    used = spy_on_adopted(monkeypatch)
    model, prompt = llm(max_batch=3), list(range(20))
    assert model.generate(prompt, **GREEDY).token_ids == plain(MODEL, prompt)
    assert sum(used) >= 7  # a page ends in between
    used.clear()
    settings = {"repetition_penalty": 1.2, "logit_bias": {7: 1.0}}
    assert model.generate(prompt, **GREEDY, **settings).token_ids == plain(MODEL, prompt, **settings)
    assert not any(used)
    late = []
    for request in requests(model, prompt[:9], prompt[3:]):  # the second comes while the first goes on
        late.append(model.engine.submit(request))
        for _ in range(4):
            model.engine.step()
    while not all(sequence.is_finished for sequence in late):
        model.engine.step()
    found = [[sampled.token for sampled in sequence.sampled] for sequence in late]
    assert found == [plain(MODEL, prompt[:9]), plain(MODEL, prompt[3:])]


@pytest.mark.parametrize("saver", ["torch", "mlx"])
def test_a_session_of_one_backend_loads_in_the_other(saver: str, tmp_path: Path) -> None:
    rng = random.Random(13)
    loader = {"torch": "mlx", "mlx": "torch"}[saver]
    text = [rng.randrange(256) for _ in range(150)]
    devices = {"torch": "cpu", "mlx": DEVICE}
    first = LLM(checkpoint(MODEL), backend=saver, device=devices[saver], ctx=512)
    first.save_session(first.open_store(tmp_path), "book", text)
    second = LLM(checkpoint(MODEL), backend=loader, device=devices[loader], ctx=512)
    assert second.load_session(second.open_store(tmp_path), "book") == text
    question = [*text, 4, 5, 6]
    out = second.generate(question, **GREEDY)
    assert out.usage.cached_tokens == len(text)
    assert out.token_ids == plain(MODEL, question)


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_short_sessions(tiny: Path, tmp_path: Path, length: int) -> None:
    text = [1 + (5 * i) % 200 for i in range(length)]
    models = [LLM(tiny, backend="mlx", device=DEVICE, ctx=256) for _ in range(2)]
    assert models[0].save_session(models[0].open_store(tmp_path), "note", text) == length
    assert models[1].load_session(models[1].open_store(tmp_path), "note") == text
    out = models[1].generate([*text, 4, 5], **GREEDY)
    assert out.usage.cached_tokens == length
    models[0].reset()
    assert out.token_ids == models[0].generate([*text, 4, 5], **GREEDY).token_ids


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_halves_cross_bit_by_bit(half: str) -> None:
    """Dumped by MLX, restored by torch and dumped again: the same bytes, whatever pages they lay in."""
    from sala.backends.mlx import executor as ours
    from sala.backends.torch import executor as theirs
    from sala.checkpoint.reader import Checkpoint
    from sala.protocol import Options, Row

    path = checkpoint(MODEL)
    config, settings = SalaConfig.load(path), {"ctx": 256, "dtype": half, "max_batch": 2, "num_snapshots": 0}
    one = ours.open_executor(Checkpoint(path), config, Options(device=DEVICE, **settings))
    other = theirs.open_executor(Checkpoint(path), config, Options(device="cpu", **settings))
    one.logits(Row(tuple(range(77)), 0, (9, 3, 7, 1, 0), 1, 0))
    blobs = one.dump((9, 3, 7, 1, 0), 77, 1)
    other.restore(blobs, (4, 2, 8, 5, 6), 77, 0)
    again = other.dump((4, 2, 8, 5, 6), 77, 0)
    one.restore(again, (11, 10, 12, 13, 14), 77, 0)
    last = one.dump((11, 10, 12, 13, 14), 77, 0)
    for name, blob in blobs.items():
        assert bytes(blob.data) == bytes(again[name].data) == bytes(last[name].data), name
        assert (blob.dtype, blob.shape) == (again[name].dtype, again[name].shape)
    assert {blob.dtype for name, blob in blobs.items() if not name.startswith("state")} == {
        {"bfloat16": "BF16", "float16": "F16"}[half]
    }
    with pytest.raises(ValueError, match="is F32"):
        one.restore({**blobs, "k.0": blobs["state.1"]}, (4, 2, 8, 5, 6), 77, 0)
    with pytest.raises(ValueError, match="other layers"):
        one.restore({"k.0": blobs["k.0"]}, (4, 2, 8, 5, 6), 77, 0)


def test_structured_output(tiny: Path) -> None:
    model = LLM(tiny, backend="mlx", device=DEVICE, ctx=512)
    settings = {"temperature": 1.0, "seed": 3, "max_tokens": 30}
    text = model.generate("A date: ", regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}", **settings).text
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text)
    want = LLM(tiny, device="cpu", backend="torch", ctx=512)
    assert text == want.generate("A date: ", regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}", **settings).text


def test_another_thread_may_run_it() -> None:
    """As the server does: loaded here, run there, and from another one again."""
    model, prompt = llm(), [5] * 40
    answers: list[list[int]] = []
    for number in range(2):
        thread = threading.Thread(
            target=lambda number=number: answers.append(model.generate([*prompt, number], **GREEDY).token_ids)
        )
        thread.start()
        thread.join()
    answers.append(model.generate(prompt, **GREEDY).token_ids)
    assert answers == [plain(MODEL, [*prompt, 0]), plain(MODEL, [*prompt, 1]), plain(MODEL, prompt)]


def test_a_poisoned_cache_harms_nobody() -> None:
    """Pages and slots full of NaN, as a broken request may leave them, do not reach the next one."""
    import mlx.core as mx

    prompt = [random.Random(1).randrange(256) for _ in range(150)]
    poisoned = llm()
    cache = poisoned._executor.cache  # type: ignore[attr-defined]

    def poison() -> None:
        for kv in cache.pages.values():
            for name in ("k", "v", "k1", "k2"):
                setattr(kv, name, mx.full(getattr(kv, name).shape, float("nan")))
        for states in cache.states.values():
            states[:] = [mx.full(states[0].shape, float("nan"))] * len(states)

    poisoned.service.execute(poison).result()
    for length in (5, 127, 150):
        poisoned.reset()
        got = poisoned.generate(prompt[:length], **GREEDY, logprobs=1)
        assert got.token_ids == plain(MODEL, prompt[:length])
        assert all(np.isfinite(sampled.logprob) for sampled in got.logprobs)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("head", "use --speculate lookup or layers"),
        ("auto", "leave it out"),
        ("layers", "MLX has no exits; leave it out"),
    ],
)
def test_a_draft_head_that_would_never_be_read_is_refused(mode: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        llm(speculate=mode, draft_head=tmp_path)


@pytest.mark.parametrize("fault", ["advance", "snapshot"])
def test_planted_faults_change_the_tokens(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: a state advanced past the accepted tokens, or a snapshot one token off, is seen."""
    from sala.backends.mlx.batch import Batch

    rng = random.Random(31)
    prompt = [rng.randrange(256) for _ in range(100)]
    model = llm(speculate="layers", draft_layers=2, num_draft=3)
    model.engine.speculation._is_measured = False
    want = plain(MODEL, prompt, max_tokens=40)
    if fault == "advance":
        fold = Batch.fold
        monkeypatch.setattr(Batch, "fold", lambda self, accepted, by: fold(self, self.lengths, by))
    else:
        model.generate(prompt, **GREEDY)

        def decay() -> None:
            for snapshot in model.engine.hybrid.prefix:
                for states in model._executor.cache.states.values():  # type: ignore[attr-defined]
                    states[snapshot.slot] = states[snapshot.slot] * 0.9  # as if it had decayed once more

        model.service.execute(decay).result()
    assert model.generate(prompt, **{**GREEDY, "max_tokens": 40}).token_ids != want
