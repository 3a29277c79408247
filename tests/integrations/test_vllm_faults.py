"""Our parsers in vLLM, and its faults that the plug-in works around: where one is gone, so can be the work-around.

On demand and with the interpreter of `test_vllm_engine.py`. docs/concepts/engines.md describes each.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.integrations import test_vllm_engine
from tests.integrations.test_vllm_engine import python  # noqa: F401

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "integrations" / "programs"
MENDED = {"states_ignore_the_page": (0, 28), "one_foreign_backend": (0, 32)}  # since when

pytestmark = test_vllm_engine.pytestmark
CALL = '<function name="f"><param name="city">Rome</param></function>'
CALLED = [["f", '{"city": "Rome"}']]
ANSWERS = {  # reasoning, content and calls
    "Paris.": (None, "Paris.", []),
    "<think>\nWhy?\n</think>\n\nBecause.": ("Why?", "Because.", []),
    "<think>never closed": ("never closed", None, []),
    "A <think> inside.</think>": (None, "A <think> inside.</think>", []),
    CALL: (None, None, CALLED),
    f"<think>x</think>Now:{CALL}": ("x", "Now:", CALLED),
    f"{CALL}\n{CALL}": (None, None, CALLED * 2),
    "a <function of x>": (None, "a <function of x>", []),
}


def run(python: str, name: str, task: Any = None) -> Any:  # noqa: F811
    variables = test_vllm_engine.environment()
    command = [python, str(PROGRAMS / name)]
    asked = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, env=variables)
    assert asked.returncode == 0, asked.stderr[-4000:]
    return json.loads(asked.stdout.strip().splitlines()[-1])


def test_parsers(python: str) -> None:  # noqa: F811
    """The same from a whole answer and from a stream of pieces that cut the tags, as in our own server."""
    for (text, wanted), (whole, streamed) in zip(
        ANSWERS.items(), run(python, "vllm_parsers.py", {"tool_parser": "sala", "answers": list(ANSWERS)}), strict=True
    ):
        assert tuple(whole) == wanted, text
        assert (streamed[0], (streamed[1] or "").strip() or None, streamed[2]) == wanted, text


def test_the_parser_that_ours_replaces(python: str) -> None:  # noqa: F811
    text = f"Now: {CALL}"
    ((whole, streamed),) = run(python, "vllm_parsers.py", {"tool_parser": "minicpm5", "answers": [text]})
    assert whole == [None, None, CALLED], "it keeps the text before a call"
    assert "<param" in streamed[1], "it no longer shows calls as text in a stream"


def test_the_faults_are_there(python: str) -> None:  # noqa: F811
    said = run(python, "vllm_faults.py")
    release = tuple(int(part) for part in said.pop("version").split(".")[:2])
    assert said == {name: release < MENDED.get(name, (99, 0)) for name in said}
    page = (ROOT / "docs" / "concepts" / "engines.md").read_text()
    assert [name for name in said if f"`{name}`" not in page] == []
