"""Benchmarks whose texts are given: LongBench v2, BABILong, InfiniteBench, MRCR, and GraphWalks' own data.

Their texts are as long as they are. The length of a case is the smallest of the lengths asked for that holds it; cases
that are longer than all of them are left out.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sala.errors import MissingExtra
from sala.lab.eval.official import scores
from sala.lab.eval.official.case import Question, Score, transcript
from sala.lab.eval.official.data import HubDataset, need
from sala.lab.eval.official.request import BenchmarkRequest, Progress
from sala.lab.eval.official.templates import TaskPrompt, find_prompt, first

Row = dict[str, Any]

# LongBench v2

LONGBENCH = ("short", "medium", "long")
LONGBENCH_FILE = "longbench2/_longbench_common_yaml"


def longbench2(request: BenchmarkRequest, progress: Progress) -> Iterator[Question]:
    """Yield questions with four choices; a task is a class of lengths."""
    rows = request.data.rows("longbench2", HubDataset("THUDM/LongBench-v2"))
    prompt = find_prompt(request.data.directory, "longbench2", LONGBENCH_FILE)

    def questions(task: str) -> Iterator[tuple[str, Sequence[str], Score, Row]]:
        for row in rows:
            if row.get("length") == task:
                choices = row.get("choices") or need(row, *(f"choice_{one}" for one in "ABCD"))
                (answer,) = need(row, "answer")
                right = "ABCD"[answer] if isinstance(answer, int) else str(answer)
                text = prompt.text({**row, "choices": choices})
                facts = {"domain": row.get("domain"), "difficulty": row.get("difficulty")}
                yield text, (right,), partial(scores.choice, right), facts

    yield from collect(request, progress, questions, 32)


# BABILong

BABILONG = tuple(f"qa{number}" for number in range(1, 21))


def babilong(request: BenchmarkRequest, progress: Progress) -> Iterator[Question]:
    """Yield questions about facts in long texts; a length is a configuration of the data, such as 4k or 1M."""
    for length in request.lengths:
        config = _babilong_length(length)
        for task in request.tasks:
            progress(task, length)
            rows = request.data.rows(f"{task}_{config}", HubDataset("RMT-team/babilong", task, config))
            prompt = find_prompt(request.data.directory, task, f"babilong/babilong_{task}.yaml")
            labels = sorted({part for row in rows for part in _parts(str(need(row, "target")[0]))})
            for number, row in enumerate(rows[: request.limits[length]]):
                text, question, target = need(row, "input", "question", "target")
                score = partial(_names_only, str(target).lower(), str(question).lower(), labels)
                yield Question(
                    task, length, number, prompt.text({**row, "input": text}), (target,), score, prompt.max_tokens
                )


def _babilong_length(length: int) -> str:
    size = length // 1024
    return f"{size // 1024}M" if size >= 1024 else f"{size}k"


def _parts(target: str) -> list[str]:
    """Return the labels of a target: a list of things has several, and a two-step path such as "n,w" is one."""
    target = target.lower()
    return [part.strip() for part in target.split(",")] if len(target) > 3 else [target]


def _names_only(target: str, question: str, labels: Sequence[str], text: str) -> float:
    """Return 1 if the first sentence of an answer names the target, and no other label that the question lacks."""
    given = re.split(r"\.|<context>|<example>", text.lower())[0]
    named = {label for label in labels if label in given and label not in question}
    return float(named == set(_parts(target)))


# InfiniteBench


def _rouge(answers: Sequence[str], text: str) -> float:
    """Return ROUGE-Lsum against the best reference; it needs the package rouge-score."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise MissingExtra("rouge-score", "eval") from None
    scorer = RougeScorer(["rougeLsum"], use_stemmer=False)
    return max(float(scorer.score(answer, text)["rougeLsum"].fmeasure) for answer in answers)


def _choice(row: Row) -> tuple[str, str]:
    """Return the letter and the name of the right option; the data name the option, its letter, or both."""
    answers, options = first(row["answer"]), first(row.get("options") or [])
    if answers[0] in options:
        return chr(ord("A") + options.index(answers[0])), answers[0]
    return answers[-1], answers[0]


def _first(score: Callable[[str, str], float]) -> Callable[[Row], Score]:
    return lambda row: partial(score, first(row["answer"])[0].strip())


# by the name that the data have: the name in lm-eval, and how an answer is scored; math_calc is not in lm-eval
INFINITEBENCH: dict[str, tuple[str, Callable[[Row], Score]]] = {
    "passkey": ("passkey", _first(scores.first_number)),
    "kv_retrieval": ("kv_retrieval", _first(scores.has_word)),
    "number_string": ("number_string", _first(scores.first_number)),
    "code_run": ("code_run", _first(scores.last_number)),
    "code_debug": ("code_debug", lambda row: partial(scores.tells_choice, *_choice(row))),
    "math_find": ("math_find", _first(scores.first_value)),
    "longdialogue_qa_eng": ("longdialogue_qa_en", _first(scores.has_name)),
    "longbook_qa_eng": ("longbook_qa_en", lambda row: partial(scores.word_f1, first(row["answer"]))),
    "longbook_qa_chn": (
        "longbook_qa_chn",
        lambda row: partial(scores.word_f1, first(row["answer"]), is_chinese=True),
    ),
    "longbook_choice_eng": ("longbook_choice_en", lambda row: partial(scores.begins_with_choice, _choice(row))),
    "longbook_sum_eng": ("longbook_sum_en", lambda row: partial(_rouge, first(row["answer"]))),
}


def infinitebench(request: BenchmarkRequest, progress: Progress) -> Iterator[Question]:
    for task in request.tasks:
        name, score = INFINITEBENCH[task]
        rows = request.data.rows(task, HubDataset("xinrongzhang2022/InfiniteBench", files=f"{task}.jsonl"))
        prompt = find_prompt(request.data.directory, task, f"infinitebench/infinitebench_{name}.yaml")

        def questions(
            _: str, rows: list[Row] = rows, prompt: TaskPrompt = prompt, score: Callable[[Row], Score] = score
        ) -> Iterator[tuple[str, Sequence[str], Score, Row]]:
            for row in rows:
                (answer,) = need(row, "answer")
                yield prompt.text(row), first(answer), score(row), {}

        yield from collect(request, progress, questions, prompt.max_tokens, (task,), prompt.stops)


# MRCR and GraphWalks

MRCR = ("2needle", "4needle", "8needle")
SPARE = 64  # tokens that an answer may have beyond the right one


def mrcr(request: BenchmarkRequest, progress: Progress) -> Iterator[Question]:
    """Yield conversations in which one of several alike requests must be answered again."""
    for task in request.tasks:
        rows = request.data.rows(f"mrcr_{task}", HubDataset("openai/mrcr", files=f"{task}/*.parquet"))
        yield from _conversations(request, progress, task, rows)


def _conversations(request: BenchmarkRequest, progress: Progress, task: str, rows: list[Row]) -> Iterator[Question]:
    progress(task, request.lengths[-1])
    taken = dict.fromkeys(request.lengths, 0)
    for row in rows:
        prompt, answer, prefix = need(row, "prompt", "answer", "random_string_to_prepend")
        messages = json.loads(prompt) if isinstance(prompt, str) else prompt
        length = request.length_of(transcript(messages), str(answer))
        if length is None or taken[length] == request.limits[length]:
            continue
        score = partial(scores.continues, str(answer), str(prefix))
        most = request.count(str(answer)) + SPARE
        yield Question(task, length, taken[length], "", (answer,), score, most, messages=tuple(messages))
        taken[length] += 1


GRAPH_FILES = ("graphwalks_128k_and_shorter", "graphwalks_256k_to_1mil")


def given_graphs(request: BenchmarkRequest, progress: Progress, task: str) -> Iterator[Question]:
    """Yield the published questions about graphs; `task` is their problem_type."""
    rows = []
    for name, least in zip(GRAPH_FILES, (0, 131073), strict=True):
        if max(request.lengths) >= least:
            rows += request.data.rows(name, HubDataset("openai/graphwalks", files=f"{name}.parquet"))

    def questions(task: str) -> Iterator[tuple[str, Sequence[str], Score, Row]]:
        for row in rows:
            prompt, nodes, kind = need(row, "prompt", "answer_nodes", "problem_type")
            if kind == task:
                yield str(prompt), first(nodes), partial(scores.overlap, first(nodes)), {}

    yield from collect(request, progress, questions, 1024, (task,))


# What all of them share

Questions = Callable[[str], Iterator[tuple[str, Sequence[str], Score, Row]]]


def collect(
    request: BenchmarkRequest, progress: Progress, questions: Questions, max_tokens: int, tasks: Sequence[str] = (),
    stops: tuple[str, ...] = (),
) -> Iterator[Question]:  # fmt: skip
    """Yield as many cases of each task and length as are asked for, in the order of the data."""
    for task in tasks or request.tasks:
        progress(task, request.lengths[-1])
        taken = dict.fromkeys(request.lengths, 0)
        for text, answers, score, facts in questions(task):
            if all(taken[length] >= request.limits[length] for length in taken):
                break
            length = request.length_of(text)
            if length is None or taken[length] == request.limits[length]:
                continue
            yield Question(
                task, length, taken[length], text, tuple(answers), score, max_tokens, stops=stops, facts=dict(facts)
            )
            taken[length] += 1
