"""docs/reference/python.md: its examples run as they stand, and every name it gives can be imported."""

import re
from pathlib import Path
from typing import Any

import pytest

import sala

PAGE = Path(__file__).parents[2] / "docs/reference/python.md"


def test_the_examples_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"MODEL": str(tiny), "DEVICE": "cpu", "CTX": "2048"}.items():
        monkeypatch.setenv(f"SALA_{name}", value)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    space: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)  # noqa: S102 - our own page
    assert len(space["texts"]) == 4
    assert space["event"].completion.usage.cached_tokens > 0
    assert len(space["tokens"]) > 0
    assert "temperature | temperature is -1" in capsys.readouterr().out
    space["llm"].close()


def test_every_exported_name_is_there_and_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in sala.__all__:
        assert getattr(sala, name) is not None
    for name in re.findall(r"\b[A-Z]\w*(?:Error|TooLong|TooSmall|NotFound|Closed|Dead|Extra|NoTokenizer)\b", text):
        assert name == "ValueError" or issubclass(getattr(sala, name), sala.SalaError)
    for name in ("LLM", "AsyncLLM", "Call", "Completion", "Event", "Options", "Sampling", "SalaConfig", "sample"):
        assert name in text
