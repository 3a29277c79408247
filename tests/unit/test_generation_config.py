"""The defaults that a model brings along, wherever it is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sala.cli import run
from sala.config import SalaConfig
from sala.errors import ConfigError
from sala.generation_config import recommended_sampling
from sala.llm import LLM
from sala.options import Sampling
from sala.server.api.answers import build_sampling
from sala.server.settings import Settings

RELEASED = Path(__file__).parents[1] / "data" / "released"
OWN = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.25}


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({**OWN, "do_sample": True, "max_length": 9}))
    return tmp_path / "m"


def test_the_release_is_sampled_as_its_card_recommends(tiny: Path) -> None:
    assert recommended_sampling(RELEASED, SalaConfig.load(RELEASED)) == {"temperature": 0.9}
    assert recommended_sampling(tiny, SalaConfig.load(tiny)) == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [({"temperature": -1}, "temperature is -1"), ({"top_k": "many"}, "top_k"), ({"top_p": 7}, "top_p is 7")],
)
def test_bad_values_are_named(model: Path, values: dict[str, Any], words: str) -> None:
    (model / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"generation_config.json: {words}"):
        recommended_sampling(model, SalaConfig.load(model))


def test_odd_values_are_read(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"top_k": -1, "temperature": None, "top_p": 1}))
    assert recommended_sampling(model, SalaConfig.load(model)) == {"top_k": 0, "top_p": 1}


def test_in_python(model: Path) -> None:
    with LLM(model, device="cpu", ctx=256) as llm:
        assert llm.default_sampling == Sampling(**OWN)
        wanted = llm.generate("hello", Sampling(**OWN, seed=5, max_tokens=20)).token_ids
        assert llm.generate("hello", seed=5, max_tokens=20).token_ids == wanted
        assert llm.generate("hello", Sampling(seed=5, max_tokens=20)).token_ids != wanted


def test_at_the_command_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        assert run([*arguments]) == 0
        return capsys.readouterr().out

    shown = printed("generate", "-m", str(model), "--top-p", "0.8", "--show-config")
    for line in ("temperature = 0.3", "top_p = 0.8", "top_k = 7", "repetition_penalty = 1.25", "loop_guard = 512"):
        assert f"{line}\n" in shown
    assert "temperature 0.3, top_p 0.5, top_k 7, repetition_penalty 1.25" in printed("show", str(model))
    assert json.loads(printed("show", str(model), "--json"))["sampling"] == OWN


def test_the_models_penalty_does_not_count_in_enforced_answers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would punish the quotes that end a string. One that is asked for counts, in Python and at the command line."""
    llm = LLM(model, ctx=256)
    for enforced in ({"regex": "[ab]+"}, {"json_schema": "{}"}, {"grammar": 'start: "a"'}):
        assert llm.merge_sampling(None, enforced).repetition_penalty == 1
        assert llm.merge_sampling(None, {**enforced, "repetition_penalty": 1.5}).repetition_penalty == 1.5
    assert llm.merge_sampling(None, {"top_k": 3}).repetition_penalty == OWN["repetition_penalty"]
    same = {"regex": "[a-e]{30}", "temperature": 0}
    assert llm.generate("x", **same).text == llm.generate("x", **same, repetition_penalty=1).text
    for flags, penalty in (([], 1.0), (["--repetition-penalty", "1.5"], 1.5)):
        assert run(["generate", "-m", str(model), "--regex", "a+", *flags, "--show-config"]) == 0
        assert f"repetition_penalty = {penalty}\n" in capsys.readouterr().out


def test_the_loop_guard_of_a_model_on_the_server() -> None:
    """An operator's setting beats the model's; 512 tokens where neither says anything."""
    own, none = Sampling(loop_guard=48), Sampling()
    guards = [
        build_sampling(model, settings, {}).loop_guard
        for model in (own, none)
        for settings in (Settings(), Settings(loop_guard=0), Settings(loop_guard=64))
    ]
    assert guards == [48, 0, 64, 512, 0, 64]
