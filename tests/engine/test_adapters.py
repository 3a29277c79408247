"""Adapters by request: several over one loaded model give the tokens of the models into which they are merged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sala.cli import run
from sala.errors import InputError
from sala.llm import LLM
from sala.models.embedded import find_model
from sala.options import Options
from sala.protocol import Sampling
from tests.integrity import integrity
from tests.unit.test_adapter import MODULES, write_adapter

GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Where does the river end?", "One two three four five six seven. " * 12, "x"]
NAMES = ("first", "second", None)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("adapters")
    write_adapter(room / "first", lora_alpha=40)
    others = (*(f"model.layers.{i}.mlp.{name}" for i in range(4) for name in ("gate_proj", "up_proj")), MODULES[0])
    write_adapter(room / "second", modules=others, rank=2, lora_alpha=40)
    return room


def places(room: Path) -> dict[str, Path]:
    return {"first": room / "first", "second": room / "second"}


def load(model: Path, **options: Any) -> LLM:
    return LLM(model, device="cpu", ctx=1024, **options)


def together(llm: LLM, sampling: Sampling = GREEDY) -> dict[tuple[str | None, int], list[int]]:
    """Answers to all prompts by all adapters and the model alone, in one batch."""
    from sala.engine.requests import Call

    keys = [(name, at) for at in range(len(PROMPTS)) for name in NAMES]
    calls = [Call((name, at), sampling, prompt=PROMPTS[at], adapter=name) for name, at in keys]
    return {key: found.token_ids for key, found in llm.many(calls)}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def merged(tiny: Path, room: Path) -> dict[tuple[str | None, int], list[int]]:
    found = {}
    for name in NAMES:
        with load(tiny, **({} if name is None else {"adapter": room / name})) as llm:
            for at, prompt in enumerate(PROMPTS):
                found[name, at] = llm.generate(prompt, GREEDY).token_ids
    assert len(set(map(tuple, found.values()))) == len(found)
    return found


@pytest.mark.parametrize("options", [{}, {"kernels": "off"}, {"speculate": "lookup"}, {"speculate": "layers"}], ids=str)
def test_they_answer_as_merged_models(tiny: Path, room: Path, merged: dict[Any, Any], options: dict[str, Any]) -> None:
    if options.get("speculate") == "layers":
        options = {**options, "draft_layers": 2}
    with load(tiny, adapters=places(room), **options) as llm:
        assert together(llm) == merged
        assert together(llm) == merged  # on cached prefixes
        assert integrity(llm.engine) == []


def test_logits(tiny: Path, room: Path) -> None:
    with load(tiny, adapters=places(room)) as llm, load(tiny, adapter=room / "first") as own:
        ids = llm.encode(PROMPTS[1])
        scoring = llm.scoring(ids, lambda logits, _: logits)
        scoring.adapter = llm.adapters["first"].fingerprint
        np.testing.assert_allclose(np.concatenate(llm.score_parts(scoring)), own.logits(ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", ["8"])
def test_on_a_quantized_model(tiny: Path, room: Path, tmp_path: Path, bits: str) -> None:
    assert run(["quantize", str(tiny), "--bits", bits, "-o", str(tmp_path / "few")]) == 0
    with load(tmp_path / "few", adapters=places(room)) as llm:
        found = together(llm)
    for name in ("first", "second"):
        with load(tmp_path / "few", adapter=room / name) as own:
            assert [found[name, at] for at in range(3)] == [own.generate(one, GREEDY).token_ids for one in PROMPTS]


def test_caches_are_apart(tiny: Path, room: Path, tmp_path: Path) -> None:
    """In memory and on disk, also of a server that starts anew; and sessions."""
    prompt = "All work and no play makes a long prompt. " * 10

    def ask(llm: LLM, name: str | None) -> int:
        return llm.generate(prompt, GREEDY, adapter=name).usage.cached_tokens

    with load(tiny, adapters=places(room), cache_dir=tmp_path / "cache") as llm:
        assert [ask(llm, name) for name in (None, "first", "second")] == [0, 0, 0]
        assert all(ask(llm, name) > 300 for name in (None, "first", "second"))
        whole = llm.generate(prompt, GREEDY, adapter="first").token_ids
        store = llm.open_store(tmp_path / "sessions")
        assert llm.save_session(store, "mine", prompt, adapter="first") == len(llm.encode(prompt))
    with load(tiny, adapters={"other-name": room / "first"}, cache_dir=tmp_path / "cache") as llm:
        assert ask(llm, "other-name") > 300
        assert llm.generate(prompt, GREEDY, adapter="other-name").token_ids == whole
    with load(tiny, adapters={"first": room / "first"}) as llm:
        ids = llm.load_session(llm.open_store(tmp_path / "sessions"), "mine")
        more = [*ids, *whole[:3]]
        assert llm.generate(more, GREEDY).usage.cached_tokens == 0
        done = llm.generate(more, GREEDY, adapter="first")
        assert done.usage.cached_tokens == len(ids)
        assert done.token_ids[:10] == whole[3:13]


def test_merged_and_named_ones(tiny: Path, room: Path) -> None:
    """Options of any form: one to merge, others by name."""
    assert Options(adapter="a").merged_adapter == Options(adapter=Path("a")).merged_adapter == Path("a")
    assert Options(adapter=["./x=1"]).merged_adapter == Path("./x=1")
    options = Options(adapter=("a", "b=~/c", "d=e=f"))
    assert (options.merged_adapter, options.named_adapters) == (
        Path("a"),
        {"b": Path("~/c").expanduser(), "d": Path("e=f")},
    )
    for wrong in (["a", "b"], ["a=b", "a=c"], [""], ["a="], 5):
        with pytest.raises(InputError):
            Options(adapter=wrong)
    with pytest.raises(InputError, match="without a name"):
        _ = options.only_adapter
    with load(tiny, adapter=room / "first", adapters={"second": room / "second"}) as llm:
        assert llm.adapter == room / "first"
        with pytest.raises(InputError, match="known: second"):
            llm.chat([{"role": "user", "content": "x"}], adapter="first")
        assert llm.chat([{"role": "user", "content": "x"}], GREEDY, adapter="second").token_ids
    with pytest.raises(InputError, match="mlx cannot use adapters by request"):
        LLM(tiny, backend="mlx", adapters={"a": room / "first"})
    with pytest.raises(InputError, match="adapters"):
        load(tiny, adapters={"no name": room / "first"})
    assert run(["generate", "x", "-m", str(tiny), "--adapter", f"a={room / 'first'}"]) == 2
    assert find_model(tiny) == tiny
