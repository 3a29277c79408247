"""RULER cases made by the code of lm-eval itself, to compare ours with.

`python -m tests.eval.lm_eval_ruler`, where lm-eval, datasets, nltk, wonderwords and scipy are installed, writes the
hashes that tests/eval/test_ruler.py checks. Its prompts are stand-ins, its essays our prose, its documents those below;
everything else, from random numbers to the fitting of lengths, is lm-eval's.
"""

import ast
import hashlib
import json
import random
import sys
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sala.lab.eval.official.prompts import lm_eval_tasks, ruler_prompts
from sala.lab.eval.tasks.prose import write_documents

DATA = Path(__file__).parents[1] / "data" / "official"
PROMPTS = DATA / "ruler_prompts.json"
EXPECTED = DATA / "ruler_cases.json"
TOKENIZER = DATA / "tokenizer"  # byte-level BPE, trained on our prose
NUM_CASES = 2
LENGTHS = {
    2048: "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multiquery "
    "niah_multivalue vt cwe fwe qa_1 qa_2",
    8192: "niah_single_1 niah_single_2 niah_multikey_3 niah_multivalue vt fwe qa_1",
}
CASES = [(task, length, 0) for length, tasks in LENGTHS.items() for task in tasks.split()]
# numbers of words that take more tokens as the list grows, and all documents at once
CASES += [("cwe", 3000, 0), ("cwe", 3500, 7), ("cwe", 16384, 1), ("vt", 4096, 3), ("niah_multikey_2", 4096, 5)]
CASES += [("qa_1", 32768, 2), ("qa_2", 16384, 0)]
FUNCTIONS = {
    "vt": "get_vt_dataset",
    "cwe": "get_cw_dataset",
    "fwe": "fwe_download",
    "qa_1": "get_squad",
    "qa_2": "get_hotpotqa",
}
MODULES = {"vt": "vt_utils", "cwe": "cwe_utils", "fwe": "fwe_utils", "qa_1": "qa_utils", "qa_2": "qa_utils"}


def squad() -> dict[str, Any]:
    """Return documents in the form of SQuAD 2.0; every third question has no answer."""
    documents = write_documents(120)

    def paragraph(number: int) -> dict[str, Any]:
        words = documents[number % 120].split()
        text = f"{documents[number % 120].split(chr(10))[0]} This is number {number}."
        answers = [{"text": words[0]}, {"text": words[1]}]
        question = f"Which word opens number {number}?"
        return {"context": text, "qas": [{"question": question, "is_impossible": number % 3 == 2, "answers": answers}]}

    return {"data": [{"paragraphs": [paragraph(3 * at + part) for part in range(3)]} for at in range(90)]}


def hotpotqa() -> list[dict[str, Any]]:
    """Return questions in the form of HotpotQA, each with three documents."""
    documents = write_documents(120)
    rows = []
    for at in range(90):
        context = [
            [f"Title {one}", documents[one].split(". ")[:3]] for one in (at, (7 * at + 1) % 120, (3 * at + 2) % 120)
        ]
        rows.append(
            {
                "question": f"Which is the third word of Title {at}?",
                "answer": documents[at].split()[2],
                "context": context,
            }
        )
    return rows


def digest(text: str, outputs: Sequence[str], opening: str, length: int) -> str:
    whole = json.dumps([text, [*outputs], opening, length], ensure_ascii=False)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


class _Prompts(ast.NodeTransformer):
    """Puts other prompts into a source file, and makes few cases of each task."""

    def __init__(self, official: Mapping[str, str], wanted: Mapping[str, str], num_cases: int) -> None:
        self.texts = {official[key]: wanted[key] for key in official} | {
            f"{official['noise']}\n": f"{wanted['noise']}\n"
        }
        self.official, self.wanted, self.num_cases = official, wanted, num_cases

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        begin = self.official["vt_opening"]
        if len(node.value) > 40 and begin.startswith(node.value):
            return ast.Constant(self.wanted["vt_opening"][: len(node.value)])
        return ast.Constant(self.texts.get(node.value, node.value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        gaps = [part for part in node.values if isinstance(part, ast.FormattedValue)]
        for key in ("niah_one", "niah_many"):
            last = node.values[-1]
            if isinstance(last, ast.Constant) and len(gaps) == 2 and self.official[key].endswith(f"}}{last.value}"):
                before, rest = self.wanted[key].split("{kind}")
                between, after = rest.split("{query}")
                values = [ast.Constant(before), gaps[0], ast.Constant(between), gaps[1], ast.Constant(after)]
                return ast.JoinedStr(values)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        is_count = node.arg == "num_samples" and isinstance(node.value, ast.Constant) and node.value.value == 500
        return ast.keyword(node.arg, ast.Constant(self.num_cases)) if is_count else node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        self.generic_visit(node)
        named = zip(node.kwonlyargs, node.kw_defaults, strict=True)
        node.kw_defaults = [ast.Constant(self.num_cases) if one.arg == "num_samples" else old for one, old in named]
        named = zip(node.args[len(node.args) - len(node.defaults) :], node.defaults, strict=True)
        node.defaults = [ast.Constant(self.num_cases) if one.arg == "num_samples" else old for one, old in named]
        return node


def lm_eval_cases(
    task: str, length: int, tokenizer: Path, prompts: Mapping[str, str], num_cases: int = NUM_CASES, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the first cases of a task as lm-eval makes them for a seed."""
    _stand_in_for_the_network()
    name = MODULES.get(task, "niah_utils")
    wording = tuple(prompts.items())
    for part in ("common_utils", *(["prepare_niah"] if name == "niah_utils" else [])):
        module = _needle_module(part, wording, num_cases)
        sys.modules[module.__name__] = module
    module = _module(name, wording, num_cases)  # a new one for every task: it has generators of its own
    random.seed(seed)
    np.random.seed(seed or 1234)
    made = getattr(module, FUNCTIONS.get(task, task))(max_seq_lengths=[length], tokenizer=str(tokenizer))
    return [dict(row) for row in made["test"]]


def _module(part: str, wording: tuple[tuple[str, str], ...], num_cases: int) -> types.ModuleType:
    """Return a module of lm-eval's RULER with other prompts."""
    file = lm_eval_tasks() / "ruler" / f"{part}.py"
    module = types.ModuleType(f"lm_eval.tasks.ruler.{part}")
    tree = _Prompts(ruler_prompts(), dict(wording), num_cases).visit(ast.parse(file.read_text("utf-8")))
    exec(compile(ast.fix_missing_locations(tree), part, "exec"), vars(module))  # noqa: S102
    return module


_needle_module = cache(_module)  # it lists six million words, which takes long


def _stand_in_for_the_network() -> None:
    import datasets
    import nltk
    import requests
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    splitter = PunktSentenceTokenizer()  # without a model of English; our prose has no abbreviations
    nltk.data.find = lambda *_, **__: True
    nltk.sent_tokenize = splitter.tokenize
    datasets.load_dataset = lambda *_, **__: {"text": write_documents()}

    def get(url: str, **_: Any) -> Any:
        data = squad() if "squad" in url.lower() else hotpotqa()
        return types.SimpleNamespace(raise_for_status=lambda: None, json=lambda: data)

    requests.get = get


def main() -> None:
    prompts, found = json.loads(PROMPTS.read_text("utf-8")), {}
    for task, length, seed in CASES:
        rows = lm_eval_cases(task, length, TOKENIZER, prompts, NUM_CASES, seed)[:NUM_CASES]
        digests = [digest(row["input"], row["outputs"], row["gen_prefix"], row["length"]) for row in rows]
        found[f"{task} {length} {seed}"] = digests
        print(task, length, seed, digests, flush=True)
    EXPECTED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
