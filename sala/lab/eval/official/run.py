"""Ask the questions of a benchmark, log every answer as soon as it is there, and summarise the scores."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sala.lab.eval.official.case import Prepared
from sala.lab.eval.official.models import AnsweringModel, TimedAnswer
from sala.lab.eval.official.plan import Step, arrange
from sala.lab.eval.runner import Callbacks
from sala.lab.report.official import ALL, MEAN
from sala.lab.report.record import Log, ResultRow, key_of


def keys_of(cases: Sequence[Prepared], model: AnsweringModel) -> list[str]:
    """Return the keys of cases in the log."""
    return [key_of({"model": model.fingerprint}, {"case": case.key}) for case in cases]


def pending(cases: Sequence[Prepared], keys: Sequence[str], log: Log) -> list[Step]:
    """Return what is left to ask, in the order in which it is asked."""
    return arrange([case for case, key in zip(cases, keys, strict=True) if log.find(key) is None])


def run(
    model: AnsweringModel,
    cases: Sequence[Prepared],
    log: Log,
    conditions: Mapping[str, Any],
    callbacks: Callbacks | None = None,
    minutes: float | None = None,
) -> list[ResultRow]:
    """Return a row for each case, in their order; cases that are in the log are not asked again.

    After `minutes` no other case is begun, and those that were not asked have no row. `conditions` are what speeds
    depend on; every row has those of its own run.
    """
    keys, until = keys_of(cases, model), None if minutes is None else time.monotonic() + 60 * minutes
    steps = pending(cases, keys, log)
    key_of_case = {id(case): key for case, key in zip(cases, keys, strict=True)}
    if callbacks is not None:
        callbacks.begin(len(cases), len(cases) - len(steps), sum(one.num_to_read for one in steps))
    done, rows = 0, dict[str, ResultRow]()
    for step in steps:
        if until is not None and time.monotonic() > until:
            break

        def report(read: int, _: int, begin: int = done, known: int = step.known) -> None:
            if callbacks is not None:
                callbacks.advance(begin + max(0, read - known))

        answer = model.answer(step.case, step.boundaries, report)
        row = to_row(model, step.case, answer) | {"conditions": dict(conditions)}
        key = key_of_case[id(step.case)]
        log.append(key, row)
        rows[key] = row
        done += step.num_to_read
        if callbacks is not None:
            callbacks.advance(done)
            callbacks.tell(row)
    found = (rows.get(key) or log.find(key) for key in keys)
    return [row for row in found if row is not None]


def to_row(model: AnsweringModel, case: Prepared, answer: TimedAnswer) -> ResultRow:
    """Return the result of a case as plain values."""
    question = case.question
    score = question.score(answer.text)
    return {
        "model": model.name,
        **question.labels,
        "is_exact": score == 1,
        "score": score,
        "text": answer.text,
        "wanted": [*question.answers],
        "is_cut": answer.is_cut,
        "prompt_tokens": answer.num_prompt,
        "cached_tokens": answer.num_cached,
        "completion_tokens": answer.num_written,
        "prefill_n": answer.num_prompt - answer.num_cached,
        "prefill_s": answer.read_s,
        "decode_n": answer.num_written,
        "decode_s": answer.written_s,
    }


def summarise(
    rows: Sequence[ResultRow], metric: Callable[[str], str] = lambda _: "", whole: Sequence[str] = ()
) -> list[ResultRow]:
    """Return a row for each model, task and length, and one for each model and length: the mean of its tasks.

    There is no mean where a model was not asked all tasks of the run. The mean is named "all" if these are the `whole`
    benchmark, as others publish it; otherwise its name says of how many tasks it is.
    """
    cells: dict[tuple[str, str, int], list[ResultRow]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["task"], row["length"]), []).append(row)
    found = [_cell(*key, members) | {"metric": metric(key[1])} for key, members in cells.items()]
    tasks = {task for _, task, _ in cells}
    for model, length in dict.fromkeys((model, length) for model, _, length in cells):
        several = [one for one in found if (one["model"], one["length"]) == (model, length)]
        if len(several) == len(tasks) > 1:
            found.append(_mean(model, length, several) | {"task": mean_name(tasks, whole)})
    return found


def mean_name(tasks: Collection[str], whole: Collection[str]) -> str:
    """Return the name of the mean of some tasks of a benchmark."""
    if set(tasks) == set(whole):
        return ALL
    return f"mean of {len(tasks)}" + (f" of {len(whole)}" if set(tasks) < set(whole) else "")


def _cell(model: str, task: str, length: int, rows: Sequence[ResultRow]) -> ResultRow:
    seconds, tokens = sum(row["prefill_s"] for row in rows), sum(row["prefill_n"] for row in rows)
    return {
        "model": model,
        "task": task,
        "length": length,
        "trials": len(rows),
        "score": sum(row["score"] for row in rows) / len(rows),
        "exact": sum(row["is_exact"] for row in rows) / len(rows),
        "asked": sum(row["prompt_tokens"] for row in rows),
        "read": sum(row["prompt_tokens"] - row["cached_tokens"] for row in rows),
        "prefill_per_second": round(tokens / seconds, 2) if seconds > 0 and tokens else None,
    }


def _mean(model: str, length: int, cells: Sequence[ResultRow]) -> ResultRow:
    """Return the mean over tasks, each with the same weight, as the benchmarks report it."""
    return {
        "model": model,
        "task": ALL,
        "length": length,
        "trials": sum(one["trials"] for one in cells),
        "score": sum(one["score"] for one in cells) / len(cells),
        "exact": sum(one["exact"] for one in cells) / len(cells),
        "asked": sum(one["asked"] for one in cells),
        "read": sum(one["read"] for one in cells),
        "prefill_per_second": None,
        "metric": MEAN,
    }
