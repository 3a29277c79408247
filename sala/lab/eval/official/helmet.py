"""HELMET: recall, and answers with citations.

Its data are one archive on the Hub, which has files for texts of 8K to 128K tokens. It is read as a stream, and the
files that a run needs are kept.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from sala.errors import InputError
from sala.lab.eval.official import scores
from sala.lab.eval.official.case import Question, Score
from sala.lab.eval.official.citations import CitedAnswer, document
from sala.lab.eval.official.data import need
from sala.lab.eval.official.reading import Row, collect
from sala.lab.eval.official.request import BenchmarkRequest, Progress
from sala.lab.eval.official.templates import TaskPrompt, find_prompt, first, template

CITED = ("asqa", "qampari")
TASKS = ("json_kv", "niah_mk_2", "niah_mk_3", "niah_mv", *CITED)
LACKING = (
    "nq", "triviaqa", "hotpotqa", "popqa", "msmarco", "narrativeqa", "infbench_qa", "infbench_choice", "infbench_sum",
    "multi_lexsum", "trec_coarse", "trec_fine", "banking77", "clinc150", "nlu",
)  # fmt: skip
ARCHIVE = "data.tar.gz"
URL = f"https://huggingface.co/datasets/princeton-nlp/HELMET/resolve/main/{ARCHIVE}"
RULER = {"niah_mk_2": "niah_multikey_2", "niah_mk_3": "niah_multikey_3", "niah_mv": "niah_multivalue"}
# by tokens of a text: pairs of json_kv, and documents of a question with citations
SIZES = {8192: (105, 30), 16384: (220, 75), 32768: (440, 165), 65536: (900, 345), 131072: (1800, 700)}
_RECALL = TaskPrompt(template("{{ input or context ~ '\n\nQuestion: ' ~ question ~ '\nAnswer:' }}"), max_tokens=100)
_CITED = TaskPrompt(
    template(
        "Answer the question from the documents below, and name the documents behind each statement, as in [1][2].\n\n"
        "{% for one in docs %}[{{ loop.index }}] {{ one.title }}: {{ one.text }}\n\n{% endfor %}"
        "Question: {{ question }}\nAnswer:"
    ),
    max_tokens=300,
)


def helmet(request: BenchmarkRequest, progress: Progress) -> Iterator[Question]:
    """Yield questions whose answers are checked for the right values; their citations need a judge."""
    own = {task: file for task in request.tasks if (file := request.data.find(f"helmet_{task}")) is not None}
    lacking = [task for task in request.tasks if task not in own]
    sizes = [size for size in SIZES if size <= request.lengths[-1]]
    if lacking and not sizes:
        message = f"end at {request.lengths[-1]:,}, and HELMET's texts begin at {min(SIZES):,} tokens"
        raise InputError("lengths", message, "ask for --lengths 8K or more, or lay texts beside: --data DIR")
    members = {(task, size): _member(task, size) for task in lacking for size in sizes}
    request.data.unpack(ARCHIVE, URL, members.values())
    for task in request.tasks:
        is_cited = task in CITED
        rows = request.data.read(f"helmet_{task}", own[task]) if task in own else _sized(request, task, members)
        prompt = find_prompt(request.data.directory, f"helmet_{task}", None, _CITED if is_cited else _RECALL)
        if prompt in (_CITED, _RECALL):
            request.remark("HELMET's prompts are not part of its rows: the questions are worded by us")
        if is_cited and not request.has_judge:
            request.remark(
                "citations are not scored: --judge DIR gives a model of entailment, HELMET's has 11B parameters"
            )
        make = _cited if is_cited else _recalled
        yield from collect(
            request, progress, partial(make, rows=rows, prompt=prompt), prompt.max_tokens, (task,), prompt.stops
        )


def _member(task: str, size: int) -> str:
    """Return the name of a file in the archive."""
    if task in CITED:
        return f"data/alce/{task}_eval_gtr_top2000.json"
    if task in RULER:
        return f"data/ruler/{RULER[task]}/validation_{size}.jsonl"
    return f"data/json_kv/test_k{SIZES[size][0]}_dep6.jsonl"


def _sized(request: BenchmarkRequest, task: str, members: dict[tuple[str, int], str]) -> list[Row]:
    """Return the rows of the archive for each size, the smallest first, not more than can be asked."""
    most, rows = sum(request.limits.values()), list[Row]()
    for size in (size for own, size in members if own == task):
        found = request.data.unpacked(members[task, size])[:most]
        documents = SIZES[size][1]
        rows += [{**row, "docs": row["docs"][:documents]} if "docs" in row else row for row in found]
    return rows


def _recalled(task: str, rows: list[Row], prompt: TaskPrompt) -> Iterator[tuple[str, Sequence[str], Score, Row]]:
    for row in rows:
        answers = row.get("outputs") or row.get("answers") or row.get("answer")
        if answers is None:
            raise InputError("data", f"has a row of {task} without outputs or answer", "see docs/guides/evaluate.md")
        filled = {"input": None, "context": "", "question": row.get("query", ""), **row}
        yield prompt.text(filled), first(answers), partial(scores.contains_all, first(answers)), {}


def _cited(task: str, rows: list[Row], prompt: TaskPrompt) -> Iterator[tuple[str, Sequence[str], Score, Row]]:
    """Yield ASQA's questions, which have several parts, and QAMPARI's, which ask for a list."""
    for row in rows:
        need(row, "question", "docs")
        if task == "asqa":
            parts = [first(pair["short_answers"]) for pair in need(row, "qa_pairs")[0]]
            score: Score = partial(scores.long_answer, parts)
        else:
            parts = [first(one) for one in need(row, "answers")[0]]
            score = partial(scores.listed, parts)
        documents = tuple(document(one) for one in row["docs"])
        cited = CitedAnswer(score, str(row["question"]), documents, task != "asqa")
        yield prompt.text(row), [part[0] for part in parts], cited, {}
