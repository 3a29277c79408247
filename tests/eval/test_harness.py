"""Likelihoods and answers as lm-eval asks for them, on a tiny model, against its logits; without lm-eval itself."""

import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sala.engine.scheduler import as_bytes
from sala.errors import InputError, MissingExtra, install_command
from sala.lab.eval import harness
from sala.lab.eval.harness import to_rows
from sala.lab.eval.likelihood import (
    MIN_SHARED,
    Generation,
    HarnessModel,
    Likelihood,
    Query,
    _dictate,
    answer_all,
    families,
    read_scores,
    score_pairs,
    shared_len,
    to_sampling,
    windows,
)
from sala.lab.report.record import Log
from sala.llm import LLM
from sala.protocol import Sampling
from tests.integrity import integrity


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, device="cpu", ctx=2048, max_batch=4) as llm:
        yield llm


def draw(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def expected(llm: LLM, context: list[int], continuation: list[int]) -> Likelihood:
    """By definition: the logits of the whole, position by position."""
    logits = llm.logits([*context, *continuation]).astype(np.float64)[len(context) - 1 : -1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = logprobs[np.arange(len(continuation)), continuation]
    return Likelihood(float(chosen.sum()), bool((logits.argmax(-1) == continuation).all()))


def check(llm: LLM, pairs: list[tuple[list[int], list[int]]]) -> None:
    found = dict(score_pairs(llm, pairs))
    assert sorted(found) == list(range(len(pairs)))
    for index, (context, continuation) in enumerate(pairs):
        wanted = expected(llm, context, continuation)
        assert found[index].logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert found[index].is_greedy == wanted.is_greedy


def test_likelihoods_are_those_of_the_logits(llm: LLM) -> None:
    """Contexts of one token and of many, the same one several times, ones that begin alike, any order."""
    header, other = draw(150, 1), draw(90, 2)
    pairs = [(header, draw(count, count)) for count in (1, 2, 9, 64)]
    pairs += [([*header, *draw(20, seed)], draw(5, seed)) for seed in range(7)]
    pairs += [(other, draw(3, 5)), (other[:1], draw(4, 6)), (other, draw(3, 5))]
    random.Random(0).shuffle(pairs)
    check(llm, pairs)
    assert llm.engine.is_idle
    assert integrity(llm.engine) == []


def test_what_greedy_decoding_writes_is_greedy(llm: LLM) -> None:
    prompt = draw(40, 3)
    written = llm.generate(prompt, temperature=0, max_tokens=12, ignore_eos=True).token_ids
    other = [*written[:-1], (written[-1] + 1) % 256]
    found = dict(score_pairs(llm, [(prompt, written), (prompt, other), (prompt, [])]))
    assert [found[index].is_greedy for index in range(3)] == [True, False, True]
    assert found[0].logprob > found[1].logprob
    assert found[2].logprob == 0


def test_end_marks_are_tokens_like_others(llm: LLM) -> None:
    end = min(llm.stop_ids)
    check(llm, [(draw(10, 4), [end, 65, end])])


def test_long_continuations_and_the_switch_to_sparse_attention(llm: LLM) -> None:
    """What becomes sparse only with its continuation is read as a whole; a longer context is sparse from its start."""
    border = llm.config.sparse_config.dense_len
    lengths = [(3, 200), (border - 3, 2), (border - 3, 3), (border - 3, 10), (border, 4), (border + 300, 40)]
    check(llm, [(draw(first, first), draw(second, second)) for first, second in lengths])


def test_what_begins_alike_is_read_once(llm: LLM) -> None:
    llm.reset()
    header = draw(300, 8)
    pairs = [([*header, *draw(10, seed)], draw(4, seed)) for seed in (1, 1, 2, 3)]
    asked = [_dictate(llm, index, *pair) for index, pair in enumerate(pairs)]
    cached = sorted(done.usage.cached_tokens for _, done in answer_all(llm, asked))
    assert cached[0] == 0
    assert all(count >= 300 for count in cached[1:])
    assert cached[-1] == 309  # the same prompt: all but its last token


def test_families() -> None:
    def ask(index: int, prompt: list[int]) -> Query:
        return Query(index, as_bytes(prompt), lambda *_: None)  # type: ignore[arg-type]

    shared = draw(MIN_SHARED, 1)
    asked = [ask(0, [*shared, 1]), ask(1, draw(20, 2)), ask(2, [*shared, 2]), ask(3, [*shared[:-1], 999])]
    found = families(asked)
    assert sorted([one.key for one, _ in family] for family in found) == [[0, 2], [1], [3]]
    assert [family[0][1] for family in found if len(family) > 1] == [(MIN_SHARED,)]
    many = families([ask(index, [*shared, index]) for index in range(200)])
    assert [len(family) for family in many] == [64, 64, 64, 8]


def test_shared_len() -> None:
    one = draw(100, 1)
    for count in (0, 1, 37, 99, 100):
        assert shared_len(as_bytes(one), as_bytes([*one[:count], 999, 5])) == count
        assert shared_len(as_bytes(one), as_bytes(one[:count])) == count


def test_a_pair_that_cannot_be_scored(llm: LLM) -> None:
    with pytest.raises(InputError, match="context is empty"):
        list(score_pairs(llm, [([], [1])]))
    with pytest.raises(InputError, match="holds 300"):
        list(score_pairs(llm, [([1], [300])]))
    with pytest.raises(InputError, match="2,057 tokens"):
        list(score_pairs(llm, [(draw(2047, 1), draw(10, 1))]))
    assert llm.engine.is_idle


def test_scores_in_pieces(llm: LLM) -> None:
    ids = draw(1500, 9)
    wanted = [one.logprob for one in llm.score(ids)]
    seen: list[tuple[int, int]] = []
    found = np.concatenate([part[0] for part in read_scores(llm, ids, 700, lambda *news: seen.append(news))])
    assert found == pytest.approx(wanted[699:], abs=1e-5)
    assert seen[-1] == (1500, 1500)


@pytest.fixture(scope="module")
def merging(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarnessModel]:
    """A tokenizer with two tokens of several letters: ab, and " c"."""
    path = tmp_path_factory.mktemp("merging") / "model"
    shutil.copytree(tiny, path)
    definition = json.loads((path / "tokenizer.json").read_text())
    spelling = {index: piece for piece, index in definition["model"]["vocab"].items()}
    for index, piece in ((0, "ab"), (1, "Ġc")):
        del definition["model"]["vocab"][spelling[index]]
        definition["model"]["vocab"][piece] = index
    definition["model"]["merges"] = [["a", "b"], ["Ġ", "c"]]
    (path / "tokenizer.json").write_text(json.dumps(definition))
    with LLM(path, device="cpu", ctx=512) as llm:
        yield HarnessModel(llm)


BOS, AB, SPACE_C = 256, 0, 1


def test_the_border(merging: HarnessModel) -> None:
    x, a, b, c = (ord(letter) for letter in "xabc")
    assert merging.split("x", " c") == ([BOS, x], [SPACE_C])
    assert merging.split("x ", "c") == ([BOS, x], [SPACE_C])  # as in running text
    assert merging.split("xa", "bc") == ([BOS, x, a], [b, c])  # "ab" reaches over the border
    assert merging.split("xab", "c") == ([BOS, x, AB], [c])
    assert merging.split("", "ab") == ([BOS], [AB])
    assert merging.split(" ", "c") == ([BOS], [SPACE_C])
    assert merging.split("x", "") == ([BOS, x], [])
    plain = HarnessModel(merging.llm, bos=False)
    assert plain.split("x", " c") == ([x], [SPACE_C])
    assert plain.split("", "ab") == ([BOS], [AB])


def test_a_long_context_is_cut_on_the_left(llm: LLM) -> None:
    target = HarnessModel(llm, max_length=50)
    context, continuation = draw(80, 1), draw(10, 2)
    found = target.score([(context, continuation)])
    assert found[0].logprob == pytest.approx(expected(llm, context[-40:], continuation).logprob, abs=1e-4)
    assert target.num_cut == 1
    with pytest.raises(InputError, match="continuation has 60 tokens"):
        target.score([(context, draw(60, 1))])
    with pytest.raises(InputError, match="max_length is 4096"):
        HarnessModel(llm, max_length=4096)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 10, 18, 19, 57])
def test_windows(count: int) -> None:
    ids = list(range(count))
    cut = list(windows(ids, 99, 10))
    assert [token for _, continuation in cut for token in continuation] == ids
    assert all(len(context) >= 1 and len(context) + len(continuation) <= 10 for context, continuation in cut)
    for index, (context, continuation) in enumerate(cut[1:], 1):
        whole = [*context, *continuation]
        assert whole == list(range(whole[0], whole[-1] + 1))  # a piece of the text as it stands
        assert len(whole) == 10, index
    assert all(context == [99] for context, _ in cut[:1])


def test_whole_texts(llm: LLM) -> None:
    target, text = HarnessModel(llm, max_length=100), "".join(map(chr, random.Random(3).choices(range(97, 123), k=250)))
    ids = [BOS, *text.encode()]
    spans = [(0, 1, 100), (99, 100, 199), (151, 199, 251)]  # where the window begins, what it scores
    wanted = sum(expected(llm, ids[a:b], ids[b:c]).logprob for a, b, c in spans)
    assert target.score_texts([text, "", "short"])[0] == pytest.approx(wanted, abs=1e-3)
    assert target.score_texts(["", "a"])[0] == 0


def test_writing(llm: LLM) -> None:
    whole = llm.generate("hello", temperature=0, max_tokens=30).text
    stop = whole[5:8]
    target = HarnessModel(llm)
    generations = [
        Generation("hello", to_sampling({"until": [stop], "max_gen_toks": 30})),
        Generation("hello", to_sampling({}, 30)),
    ]
    assert target.generate(generations) == [whole[: whole.find(stop)], whole]
    sampled = to_sampling({"do_sample": True, "temperature": 1.5, "seed": 4, "max_gen_toks": 20})
    assert target.generate([Generation("hello", sampled)]) == [llm.generate("hello", sampled).text]
    long = HarnessModel(llm, max_length=60)
    assert long.generate([Generation("x" * 500, to_sampling({}, 20))]) == [
        llm.generate([ord("x")] * 40, temperature=0, max_tokens=20).text
    ]
    assert long.num_cut == 1
    with pytest.raises(InputError, match="max_gen_toks is 60"):
        long.generate([Generation("x", to_sampling({}, 60))])


def test_a_chat(llm: LLM) -> None:
    """Special tokens of the template are read, reasoning is left out, and a stop counts only outside of it."""
    target = HarnessModel(llm)
    target.is_chat = True
    text = llm.tokenizer.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert target.encode(text) == llm.encode_chat([{"role": "user", "content": "hi"}])
    whole = llm.chat([{"role": "user", "content": "hi"}], temperature=0, max_tokens=30).text
    stop = whole[4:6]
    both = [Generation(text, to_sampling({}, 30)), Generation(text, to_sampling({"until": stop}, 30))]
    assert target.generate(both) == [whole, whole[: whole.find(stop)]]
    assert target.generate([Generation(f"{text}<think>\n", to_sampling({}, 30))]) == [""]
    assert llm.engine.is_idle


def test_what_is_known_is_not_computed_again(tiny: Path, tmp_path: Path) -> None:
    file, generation = tmp_path / "run.jsonl", Generation("hello", Sampling(temperature=0))
    pairs = [(draw(9, seed), draw(2, seed)) for seed in range(3)]
    with LLM(tiny, device="cpu", ctx=512) as llm:
        target = HarnessModel(llm, log=Log(file))
        found, text = target.score(pairs), target.generate([generation])
        with file.open("a") as handle:
            handle.write('{"key": "cut o')  # the power went
        target = HarnessModel(llm, log=Log(file))
    assert target.score(pairs) == found  # the model is closed: it can compute nothing
    assert target.generate([generation]) == text
    with pytest.raises(Exception):  # noqa: B017
        target.score([(draw(9, 77), draw(2, 77))])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"temperature": 0.0, "max_tokens": 7}),
        ({"until": "\n\n", "max_new_tokens": 3}, {"stop": ("\n\n",), "max_tokens": 3}),
        ({"until": ["a", ""], "max_gen_toks": 9}, {"stop": ("a",), "max_tokens": 9}),
        ({"do_sample": False, "temperature": 0.8}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.3, "top_p": 0.9, "top_k": 5}, {"temperature": 0.3, "top_p": 0.9, "top_k": 5}),
        ({"num_beams": 1, "use_cache": True}, {"temperature": 0.0}),
    ],
)
def test_settings_of_a_generation(settings: dict[str, object], wanted: dict[str, object]) -> None:
    sampling = to_sampling(settings, 7)
    assert {name: getattr(sampling, name) for name in wanted} == wanted


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"typical_p": 0.3}])
def test_settings_without_counterpart(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        to_sampling(settings)


def test_rows() -> None:
    results = {
        "results": {
            "a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "sample_len": 4},
            "g": {"ppl,none": float("nan"), "ppl_stderr,none": 0.25},
        },
        "groups": {"g": {}},
        "n-shot": {"a": 3},
        "n-samples": {"a": {"original": 9, "effective": 4}},
        "higher_is_better": {"a": {"acc": True}},
        "versions": {"a": 1},
    }
    first, second = to_rows(results)
    assert first == {
        "task": "a", "is_group": False, "metric": "acc", "filter": "none", "value": 0.5, "stderr": None, "shots": 3,
        "count": 4, "version": 1, "higher_is_better": True,
    }  # fmt: skip
    assert (second["value"], second["stderr"], second["is_group"]) == (None, 0.25, True)


def test_lengths_that_were_not_asked_for_are_left_out() -> None:
    scores = {"alias": "niah_single_1", "4096,none": -1, "1024,none": 0.5, "1024_stderr,none": "N/A"}
    (row,) = to_rows({"results": {"niah_single_1": scores}})
    assert (row["metric"], row["value"]) == ("1024", 0.5)


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    harness.adapter.cache_clear()
    with pytest.raises(MissingExtra, match=re.escape(install_command("eval"))):
        harness.adapter()
