"""Names of models: aliases, bare names, any name, and what is listed of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sala.models.embedded import find_model
from sala.models.names import match_family, match_name
from sala.server.settings import Settings
from tests.server.conftest import Server

IDS = ["openbmb--MiniCPM-SALA", "moxin-org--MiniCPM4-SALA-9B-8bit-mlx", "mine--MiniCPM-SALA-4bit", "smol-sala"]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("MiniCPM-SALA", IDS[0]),
        ("minicpm-sala", IDS[0]),
        ("OpenBMB/minicpm-sala", IDS[0]),
        ("MiniCPM4-SALA-9B-8bit-mlx", IDS[1]),
        ("other/MiniCPM-SALA", None),
        ("MiniCPM-SALA-8bit", None),
        ("SMOL-SALA", IDS[3]),
        ("", None),
        ("--", None),
    ],
)
def test_bare_names(name: str, found: str | None) -> None:
    assert match_name(name, IDS) == found


def test_bare_names_must_mean_one_model() -> None:
    assert match_name("x", ["a--x", "b--x"]) is None
    assert match_name("x", ["a--x", "b--x"], "b--x") == "b--x"


def test_a_family_means_the_default_or_the_only_member() -> None:
    assert match_family("minicpm-sala-9b", IDS) is None
    assert match_family("minicpm-sala-9b", IDS, IDS[1]) == IDS[1]
    assert match_family("minicpm-sala-9b", IDS[2:]) == IDS[2]
    assert match_family("minicpm-sala-9b", [*IDS, "model"], "model") == "model"
    assert match_family("minicpm-sala-9b", ["smol-sala", "MiniCPM-SALAD"]) is None
    assert match_family("minicpm-sala-9b-4bit", IDS[2:]) is None


def test_commands_find_models_by_bare_names(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path))
    shutil.copytree(tiny, tmp_path / "openbmb--MiniCPM-SALA")
    assert find_model("minicpm-sala") == tmp_path / "openbmb--MiniCPM-SALA"


def test_settings() -> None:
    assert Settings(alias="gpt-4o, a/b").alias == ("gpt-4o", "a/b")
    assert Settings(alias=["gpt-4o,x", "y"]).alias == ("gpt-4o", "x", "y")
    with pytest.raises(Exception, match="give names without spaces"):
        Settings(alias=["a b"])


def ask(server: Server, model: str) -> Any:
    return server.post("/v1/chat/completions", {**CHAT, "model": model})


def test_aliases_answer_and_are_listed(make_server: Callable[..., Server], tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "models" / "moxin-org--MiniCPM4-SALA-9B-8bit-mlx")
    shutil.copytree(tiny, tmp_path / "MiniCPM-SALA-8bit")
    server = make_server(tmp_path / "MiniCPM-SALA-8bit", alias="gpt-4o,claude-sonnet-4-5")
    for name in ("gpt-4o", "GPT-4o", "minicpm-sala-8bit", "minicpm-sala-9b", "MiniCPM-SALA"):
        answer = ask(server, name)
        assert (answer.status_code, answer.json()["model"]) == (200, name), answer.text
    assert set(server.app.state.runtime.loaded) == {"MiniCPM-SALA-8bit"}
    assert ask(server, "gpt-4").json()["error"]["code"] == "model_not_found"
    with server.client() as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert list(cards) == [
            "moxin-org--MiniCPM4-SALA-9B-8bit-mlx", "MiniCPM-SALA-8bit", "gpt-4o", "claude-sonnet-4-5"
        ]  # fmt: skip
        assert cards["gpt-4o"] == {**cards["MiniCPM-SALA-8bit"], "id": "gpt-4o"}
        assert {card["root"] for card in cards.values()} == set(cards) - {"gpt-4o", "claude-sonnet-4-5"}
        assert client.get("/v1/models/gpt-4o").json() == cards["gpt-4o"]
        assert client.get("/v1/models/GPT-4O").json() == {**cards["gpt-4o"], "id": "GPT-4O"}
        assert client.delete("/v1/models/gpt-4o").json()["error"]["code"] == "model_loaded"
        assert client.delete("/v1/models/minicpm-sala-9b").status_code == 404  # says too little to delete by
        deleted = client.delete("/v1/models/MiniCPM4-SALA-9B-8bit-mlx").json()
    assert deleted["id"] == "moxin-org--MiniCPM4-SALA-9B-8bit-mlx"
    assert not (tmp_path / "models" / deleted["id"]).exists()


def test_any_name_can_mean_the_default(make_server: Callable[..., Server]) -> None:
    server = make_server(any_model=True)
    assert ask(server, "gpt-4o").json()["model"] == "gpt-4o"
    assert ask(server, "x" * 300).json()["model"] == "tiny"
