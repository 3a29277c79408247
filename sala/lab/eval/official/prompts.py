"""The sentences that benchmarks define: read from the installed lm-eval, or from prompts.json in a data directory.

They are data of the benchmarks, so none of them is in this package. The source files of lm-eval are parsed, not run:
importing its RULER tasks would download models of nltk.
"""

import ast
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

from sala.errors import InputError, MissingExtra, SalaError

FILE = "prompts.json"
RULER_KEYS = (
    "niah", "needle", "noise", "niah_one", "niah_many", "vt", "vt_opening", "cwe", "cwe_opening", "fwe", "fwe_opening",
    "qa", "qa_document", "qa_opening",
)  # fmt: skip
LM_EVAL = "0.4.13"  # the version whose files were read last


def ruler_prompts(directory: Path | None = None) -> dict[str, str]:
    """Return RULER's prompts by `RULER_KEYS`; raise MissingExtra if neither a data directory nor lm-eval has them."""
    if directory is not None and (directory / FILE).is_file():
        found = read_object(directory / FILE)
        lacking = [key for key in RULER_KEYS if not isinstance(found.get(key), str)]
        if lacking:
            raise InputError("data", f"{directory / FILE} lacks {', '.join(lacking)}", "add them, or remove the file")
        return {key: found[key] for key in RULER_KEYS}
    try:
        return _from_lm_eval()
    except (KeyError, StopIteration, SyntaxError, OSError) as error:
        message = f"this version of lm-eval words RULER's prompts in a way that is not understood: {error!r}"[:200]
        raise SalaError(message, f"pip install lm-eval=={LM_EVAL}, or give a {FILE} with --data") from None


@cache
def lm_eval_tasks() -> Path:
    """Return the directory of lm-eval's tasks; raise MissingExtra if it is not installed."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise MissingExtra("lm-eval", "eval")
    return Path(found.origin).parent / "tasks"


def read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("data", f"{file} cannot be read: {error}"[:200], "give a JSON object") from None
    if not isinstance(found, dict):
        raise InputError("data", f"{file} is not a JSON object", "give an object of texts")
    return found


@cache
def _from_lm_eval() -> dict[str, str]:
    directory = lm_eval_tasks() / "ruler"
    needles, tracking, common, frequent, reading = (
        _Source(directory / name)
        for name in ("prepare_niah.py", "vt_utils.py", "cwe_utils.py", "fwe_utils.py", "qa_utils.py")
    )
    one, many = needles.f_strings("query")
    tracking_texts = tracking.literal("CONFIG")["variable_tracking"]
    return {
        "niah": _Source(directory / "niah_utils.py").literal("TEMPLATE"),
        "needle": needles.literal("NEEDLE"),
        "noise": next(text for text in needles.literals("haystack") if isinstance(text, str)),
        "niah_one": one,
        "niah_many": many,
        "vt": tracking_texts["template"],
        "vt_opening": tracking_texts["answer_prefix"],
        "cwe": common.literal("CONFIG")["template"],
        "cwe_opening": common.literal("CONFIG")["answer_prefix"],
        "fwe": frequent.literal("CONFIG")["template"],
        "fwe_opening": frequent.literal("CONFIG")["answer_prefix"],
        "qa": reading.literal("CONFIG")["template"],
        "qa_document": reading.literal("DOCUMENT_PROMPT"),
        "qa_opening": reading.literal("CONFIG")["answer_prefix"],
    }


class _Source:
    """The constants of a Python file."""

    def __init__(self, file: Path) -> None:
        self._nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]

    def literals(self, name: str) -> list[Any]:
        """Return all plain values that are assigned to a name anywhere."""
        found = []
        for node in self._nodes:
            if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
                try:
                    found.append(ast.literal_eval(node.value))
                except ValueError:
                    continue
        return found

    def literal(self, name: str) -> Any:
        return next(iter(self.literals(name)))

    def f_strings(self, variable: str) -> list[str]:
        """Return the f-strings that use a variable, with {kind} for their first gap and {query} for their second."""
        found = []
        for node in self._nodes:
            if not isinstance(node, ast.JoinedStr):
                continue
            gaps = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            if len(gaps) == 2 and isinstance(gaps[1], ast.Name) and gaps[1].id == variable:
                names = iter(("{kind}", "{query}"))
                parts = [str(part.value) if isinstance(part, ast.Constant) else next(names) for part in node.values]
                found.append("".join(parts))
        return found
