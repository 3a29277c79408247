"""HELMET's citations: the share of statements that the documents they cite support, and of citations that are needed.

Whether documents support a statement is for a model of entailment to say, as in ALCE (arXiv 2305.14627), whose rules
these are: three citations of a statement count, and one of a document that does not exist supports nothing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sala.errors import InputError
from sala.lab.eval.official.case import Question, Score
from sala.lab.eval.official.texts import to_sentences
from sala.lab.report.record import ResultRow

Judge = Callable[[str, str], bool]  # whether a premise entails a hypothesis
CITATION = re.compile(r"\[(\d+)")
MOST = 3  # citations of a statement that count
SHORTEST = 5  # characters of a sentence; what is shorter is the number of an item
RECALL, PRECISION = "citation recall", "citation precision"
METRICS = {RECALL: "statements that their documents support", PRECISION: "citations that are needed"}


@dataclass(frozen=True)
class CitedAnswer:
    """Scores an answer like `score`, and knows what its citations refer to.

    The statements of a list are its parts between commas, each an answer to the question.
    """

    score: Score
    question: str
    documents: tuple[str, ...]
    is_list: bool

    def __call__(self, text: str) -> float:
        return self.score(text)

    def statements(self, text: str) -> list[str]:
        text = re.sub(r"\n+", " ", text)
        if self.is_list:
            return [f"{self.question} {part.strip()}" for part in text.rstrip().rstrip(".").rstrip(",").split(",")]
        return [one for one in to_sentences(text) if len(one.strip()) >= SHORTEST]


def document(row: Mapping[str, Any]) -> str:
    """Return a document as it is judged."""
    return f"Title: {row['title']}\n{row['text']}"


def citation_scores(statements: Sequence[str], documents: Sequence[str], judge: Judge) -> dict[str, float]:
    """Return recall and precision of the citations of an answer; nothing for an answer without statements."""
    if not statements:
        return {}
    num_supported, num_needed, num_cited = 0, 0, 0
    for statement in statements:
        cited = [int(number) - 1 for number in CITATION.findall(statement)]
        if not cited or not all(0 <= at < len(documents) for at in cited):
            continue
        cited = cited[:MOST]
        num_cited += len(cited)
        claim = _without_citations(statement)
        if judge(_joined(documents, cited), claim):
            num_supported += 1
            num_needed += sum(_is_needed(documents, cited, place, claim, judge) for place in range(len(cited)))
    return {RECALL: num_supported / len(statements), PRECISION: num_needed / num_cited if num_cited else 0.0}


def _is_needed(documents: Sequence[str], cited: Sequence[int], place: int, claim: str, judge: Judge) -> bool:
    """Return whether a document supports the claim alone, or the others do not without it."""
    if len(cited) == 1 or judge(documents[cited[place]], claim):
        return True
    return not judge(_joined(documents, [*cited[:place], *cited[place + 1 :]]), claim)


def _joined(documents: Sequence[str], cited: Sequence[int]) -> str:
    return "\n".join(documents[at] for at in cited)


def _without_citations(statement: str) -> str:
    return re.sub(r" ?\[\d+", "", statement).replace(" |", "").replace("]", "").strip()


def judge_citations(questions: Sequence[Question], rows: Sequence[ResultRow], judge: Judge) -> list[ResultRow]:
    """Return the answers among `rows` that should cite, with the scores of their citations."""
    cited = {(one.task, one.length, one.number): one for one in questions if isinstance(one.score, CitedAnswer)}
    found = []
    for row in rows:
        question = cited.get((row["task"], row["length"], row["number"]))
        if question is not None and isinstance(question.score, CitedAnswer):
            rule = question.score
            found.append(row | citation_scores(rule.statements(row["text"]), rule.documents, judge))
    return found


def summarise_citations(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return a row for each model, task, length and score; answers without statements do not count."""
    cells: dict[tuple[str, str, int, str], list[ResultRow]] = {}
    for row in rows:
        for name in (name for name in METRICS if name in row):
            cells.setdefault((row["model"], row["task"], row["length"], name), []).append(row)
    return [
        {
            "model": model,
            "task": f"{task}, {name}",
            "length": length,
            "trials": len(members),
            "score": sum(row[name] for row in members) / len(members),
            "exact": sum(row[name] == 1 for row in members) / len(members),
            "asked": 0,
            "read": 0,
            "prefill_per_second": None,
            "metric": METRICS[name],
        }
        for (model, task, length, name), members in cells.items()
    ]


class EntailmentModel:
    """A sequence-to-sequence model of transformers that answers 1 if a premise entails a hypothesis, as TRUE's T5."""

    def __init__(self, path: Path, device: str = "auto") -> None:
        import torch

        from sala.backends.torch.loader import pick_device
        from sala.lab.dense import need_transformers

        transformers = need_transformers()
        where = pick_device(device)
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            line = " ".join(str(error).split())[:300]
            message = f"cannot be loaded from {path}: {line}"
            raise InputError(
                "judge", message, "give the directory of a model such as t5_xxl_true_nli_mixture"
            ) from None
        self._model, self._torch = model.to(where).eval(), torch

    def __call__(self, premise: str, hypothesis: str) -> bool:
        text = f"premise: {premise} hypothesis: {hypothesis}"
        ids = self._tokenizer(text, return_tensors="pt").input_ids.to(self._model.device)
        with self._torch.inference_mode():
            written = self._model.generate(ids, max_new_tokens=10)
        return bool(self._tokenizer.decode(written[0], skip_special_tokens=True) == "1")
