"""Measure how many drafts are accepted, by position, kind of text and length, and whether drafting is faster.

Every prompt is answered three times, greedily: without drafts; with as many drafts as possible, to count the accepted
ones; and with the user's settings, to compare the speed with the first.
"""

import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sala.engine.draft import open_speculation
from sala.lab.eval.documents import read_source
from sala.lab.eval.runner import facts_of
from sala.llm import LLM
from sala.options import Options

PROMPTS = Path(__file__).with_name("prompts.toml")
Note = Callable[[int, int], None]  # (done, all)


@dataclass(frozen=True, slots=True)
class DraftPrompt:
    kind: str
    length: int
    ids: tuple[int, ...]


def built_in_prompts() -> dict[str, list[str]]:
    """Return prompts by kind."""
    found: dict[str, list[str]] = tomllib.loads(PROMPTS.read_text(encoding="utf-8"))
    return found


def questions(llm: LLM, prompts: dict[str, list[str]], lengths: Sequence[int]) -> list[DraftPrompt]:
    """Return the prompts at each length: other text before them brings them to about so many tokens."""
    text = "\n\n".join(read_source(None).documents)
    filler = llm.encode(text[: 8 * max(lengths)])
    made = []
    for length in lengths:
        for kind, some in prompts.items():
            for prompt in some:
                count = max(0, length - len(llm.encode_chat([{"role": "user", "content": prompt}])) - 8)
                before = llm.tokenizer.decode(filler[:count]) + "\n\n" if count > 64 else ""
                ids = llm.encode_chat([{"role": "user", "content": before + prompt}])
                made.append(DraftPrompt(kind, length, tuple(ids)))
    return made


def evaluate(
    options: Options, prompts: dict[str, list[str]], lengths: Sequence[int], max_tokens: int, note: Note
) -> dict[str, Any]:
    """Return the record: rows by kind and length, and whether all answers were equal."""
    settings = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": max_tokens, "ignore_eos": True}
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    done = 0
    with LLM(options=replace(options, speculate="off", draft_head=None)) as plain:
        asked = questions(plain, prompts, lengths)
        answers = []
        for question in asked:
            answers.append(_timed(plain, question, settings))
            done += 1
            note(done, 3 * len(asked))
    is_equal = True
    with LLM(options=options) as llm:
        has_head = llm.engine.capacity.can_draft
        mode = options.speculate if options.speculate != "auto" else "head" if has_head else "lookup"
        drafting = options.num_draft, options.draft_layers
        as_used = open_speculation(options.speculate, *drafting, True, has_head)  # learns from all questions
        for question, (want, plain_s) in zip(asked, answers, strict=True):
            row = rows.setdefault((question.kind, question.length), _new_row(options.num_draft))
            llm.engine.speculation = open_speculation(mode, *drafting, False, has_head)
            got, _ = _timed(llm, question, settings)
            counted = llm.engine.speculation
            llm.engine.speculation = as_used
            timed, seconds = _timed(llm, question, settings)
            is_equal = is_equal and got == want == timed
            row["rounds"] += counted.rounds
            row["accepted"] += counted.accepted
            for position, (verified, accepted) in enumerate(counted.by_position):
                row["verified by position"][position] += verified
                row["accepted by position"][position] += accepted
            row["plain s"] += plain_s
            row["s"] += seconds
            done += 2
            note(done, 3 * len(asked))
        facts = facts_of(llm)
    rows_of = [_summary(*key, row) for key, row in rows.items()]
    return {
        "facts": facts,
        "speculate": options.speculate,
        "num_draft": options.num_draft,
        "rows": rows_of,
        "equal answers": is_equal,
    }


def _new_row(num_draft: int) -> dict[str, Any]:
    by_position = {f"{kind} by position": [0] * num_draft for kind in ("verified", "accepted")}
    return {"rounds": 0, "accepted": 0, "plain s": 0.0, "s": 0.0, **by_position}


def _timed(llm: LLM, question: DraftPrompt, settings: dict[str, Any]) -> tuple[list[int], float]:
    """Return the answer and the seconds from its first token to its last."""
    tokens: list[int] = []
    began = 0.0
    for event in llm.stream(list(question.ids), **settings):
        began = began or time.perf_counter()
        if event.completion is not None:
            tokens = event.completion.token_ids
    return tokens, time.perf_counter() - began


def _summary(kind: str, length: int, row: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(row["accepted by position"], row["verified by position"], strict=True)
    return {
        "kind": kind,
        "length": length,
        "tokens per round": round(1 + row["accepted"] / max(1, row["rounds"]), 3),
        "accepted by position": [round(accepted / verified, 3) if verified else None for accepted, verified in pairs],
        "times as fast": round(row["plain s"] / max(1e-9, row["s"]), 3),
    }
