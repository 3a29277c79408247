"""Results that a CPU measures, in minutes or hours: the commands behind them, and those that were measured in part.

A result is measured in part if its command asks for more than it holds: other tasks, lengths or numbers of cases.
`PARTIAL` lists these with the reason, and `remark` says it below their tables; `make figures` measures them again.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

from docs.figures.results import RESULTS, read
from sala.lab.train.recall import FACTS
from sala.options.schema import read_count

# The commands. One that was stopped goes on where it was if it is repeated in the same directory.
GPL = "/usr/share/common-licenses/GPL-3"
SCRIPT = "python {root}/benchmarks/"
RULER = "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,niah_multiquery,"
RULER += "niah_multivalue,vt,cwe,fwe"  # all but qa_1 and qa_2, whose documents are downloaded
TEACHER_TOKENS = 8192  # context of the teacher; it is asked nothing longer
MEASURED: dict[str, tuple[str, ...]] = {
    "finetune_recall.json": (SCRIPT + "finetune_recall.py -o {name}",),
    "needle_smol.json": ("sala eval needle -m smol-sala --lengths 1k,2k,4k,8k,16k,32k --trials 1 -o {name}",),
    "official_smol.json": (SCRIPT + "official_smol.py -o {name}",),
    "quant_recall.json": (
        "sh -c 'head -c 20000 " + GPL + " > gpl-3.txt; cat {root}/docs/guides/*.md | head -c 60000 > guides.txt'",
        SCRIPT + "quant_quality.py smol-sala gpl-3.txt -o {name} --calibration guides.txt --tokens 2048 --measured 2048"
        " --texts 1 --only '^(8 bits|4 bits|4 bits, --method rtn)$'",
    ),
    "ruler_smol.json": (
        "python {root}/models/smol-sala/teacher.py SmolLM2-135M-Instruct",
        "sala eval official ruler -m smol-sala --against SmolLM2-135M-Instruct --tasks " + RULER + " --haystack prose"
        " --lengths 4K,8K,16K,32K --limit 1,1,1,1 -o {name}",
    ),
}
PARTIAL: dict[str, str] = {}

Facts = Mapping[str, Any]  # settings by name; lists are sets of things that were to be measured


def _flags(name: str) -> dict[str, str]:
    """Return the flags of the last command, without dashes."""
    words = shlex.split(MEASURED[name][-1])
    return {word.lstrip("-"): value for word, value in pairwise(words) if word.startswith("-")}


def _counts(text: str) -> list[int]:
    return [read_count(one) for one in text.split(",")]


def _script(name: str) -> Any:
    """Return a script of `benchmarks/` as a module."""
    return import_module(f"benchmarks.{name}")


def _needle(data: Any) -> tuple[Facts, Facts]:
    flags, settings = _flags("needle_smol.json"), data["settings"]
    lengths, trials = _counts(flags["lengths"]), int(flags["trials"])
    cases = len(lengths) * trials * len(settings["depths"])
    return (
        {"lengths": settings["lengths"], "cases": sum(row["trials"] for row in data["results"])},
        {"lengths": lengths, "cases": cases},
    )


def _ruler(data: Any) -> tuple[Facts, Facts]:
    flags, settings = _flags("ruler_smol.json"), data["settings"]
    tasks, lengths, limit = flags["tasks"].split(","), _counts(flags["lengths"]), _counts(flags["limit"])
    of_teacher = [count for length, count in zip(lengths, limit, strict=True) if length <= TEACHER_TOKENS]
    cases = len(tasks) * (sum(limit) + sum(of_teacher))
    asked = sum(row["trials"] for row in data["results"] if row["task"] in tasks)
    names = ("against", "haystack")
    return (
        {name: settings.get(name) for name in ("tasks", "lengths", *names)} | {"cases": asked},
        {"tasks": tasks, "lengths": lengths, "cases": cases} | {name: flags[name] for name in names},
    )


def _quantization(data: Any) -> tuple[Facts, Facts]:
    flags, settings = _flags("quant_recall.json"), data["settings"]
    recipes = [one for one in _script("quant_quality").DEFAULTS if re.search(flags["only"], one)]
    return (
        {
            "tokens to calibrate": settings["calibrated"],
            "tokens to measure": settings["measured"],
            "texts": data["recall"][0]["asked"] // FACTS,
            "recipes": [one for one in recipes if "recall" in data.get(one, ())],
        },
        {
            "tokens to calibrate": int(flags["tokens"]),
            "tokens to measure": int(flags["measured"]),
            "texts": int(flags["texts"]),
            "recipes": recipes,
        },
    )


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return by length the facts found and asked for in all texts, the mean loss of their tokens, and the texts."""
    found: dict[int, dict[str, Any]] = {}
    for length in dict.fromkeys(row["length"] for row in rows):
        own = [row for row in rows if row["length"] == length]
        sums = {name: sum(row[name] for row in own) for name in ("found", "asked", "tokens")}
        loss = sum(row["loss"] * row["tokens"] for row in own) / sums["tokens"]
        found[length] = {**sums, "loss": loss, "texts": len(own)}
    return found


def _finetuning(data: Any) -> tuple[Facts, Facts]:
    script = _script("finetune_recall")
    texts = min(cell["texts"] for rows in data["recall"].values() for cell in totals(rows).values())
    return (
        {"options": data["options"], "texts": texts, "runs": [*data["runs"]], "results": [*data["recall"]]},
        {"options": script.TOLD, "texts": script.TEXTS, "runs": [*script.RUNS], "results": [*script.TITLES]},
    )


def _official(data: Any) -> tuple[Facts, Facts]:
    script = _script("official_smol")
    return (
        {"runs": [*data["runs"]], "lengths": [row["length"] for row in data["shared"]]},
        {"runs": [*script.RUNS], "lengths": script.LENGTHS},
    )


# by result: what it holds, and what its command asks for
FACTS_OF: dict[str, Callable[[Any], tuple[Facts, Facts]]] = {
    "finetune_recall.json": _finetuning,
    "needle_smol.json": _needle,
    "official_smol.json": _official,
    "quant_recall.json": _quantization,
    "ruler_smol.json": _ruler,
}


def differences(name: str, data: Any = None) -> list[str]:
    """Return what a result lacks of what its command asks for, e.g. "4 of 11 tasks"; nothing if there is no result."""
    if data is None and not (RESULTS / name).is_file():
        return []
    held, asked = FACTS_OF[name](read(name) if data is None else data)
    return [_difference(key, held[key], wanted) for key, wanted in asked.items() if held[key] != wanted]


def _difference(name: str, held: Any, wanted: Any) -> str:
    if isinstance(wanted, list) and isinstance(held, list):
        return f"{sum(one in held for one in wanted)} of {len(wanted)} {name}"
    if isinstance(wanted, int) and isinstance(held, int):
        return f"{held} of {wanted} {name}"
    return f"other {name}"


def remark(name: str) -> list[str]:
    """Return what is said below the table of a result that was measured in part, as lines of Markdown."""
    lacking = differences(name)
    if not lacking:
        return []
    return ["", f"Measured in part: {', '.join(lacking)} ({PARTIAL.get(name, 'the reason is not known')})."]
