"""Run cases through a model, one after another, log each as soon as it is done, and summarise the results.

Decoding is greedy, so the same case gives the same answer. The prefix that a case shares with the next one stays
cached, so that cases over one text prefill it once. Cases that are in the log already are not run again.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from sala.checkpoint.writer import write_atomically
from sala.engine.requests import Call
from sala.engine.stream import Completion
from sala.errors import InputError
from sala.lab.eval.tasks.case import Case, count_shared, score_value
from sala.lab.eval.tasks.needle import NeedleMaker, NeedleSpec
from sala.lab.eval.tasks.reasoning import ReasoningProblem, judge
from sala.lab.report.record import Log, ResultRow, key_of
from sala.llm import LLM
from sala.protocol import Sampling

MIN_SHARED = 256  # tokens of a shared prefix that are worth a snapshot
WARM_TOKENS = 32
NUM_ANSWERED = 32  # tokens of an answer in which the value of a needle must occur
LOOP_LIMIT = 256  # repeated tokens that end the answer to a problem
T = TypeVar("T")


@dataclass(frozen=True)
class Job(Generic[T]):
    """Something to ask: a case or a problem. `labels` identify it: task, length, depth, trial, budget."""

    labels: dict[str, Any]
    num_tokens: int  # what it counts for in the progress
    make: Callable[[], T]


class Callbacks(Protocol):
    """Receives the progress of a run."""

    def begin(self, num_cases: int, num_known: int, num_tokens: int) -> None: ...

    def advance(self, num_tokens: int) -> None:
        """`num_tokens` of the prompts of all cases are done."""

    def tell(self, row: ResultRow) -> None:
        """A case is done."""


def facts_of(llm: LLM) -> dict[str, str]:
    """Return what the answers of a model depend on: its weights, and how the options change its attention, if so."""
    changes = {"attention": llm.attention_changes} if llm.attention_changes else {}
    return {"fingerprint": llm.fingerprint()[:16], **changes}


def check_lengths(lengths: Sequence[int], max_tokens: int, name: str = "lengths") -> None:
    """Raise InputError if a length exceeds the context."""
    beyond = [length for length in lengths if length > max_tokens]
    if beyond:
        listed = ", ".join(f"{length:,}" for length in beyond)
        message = f"beyond the context: {listed}, and it holds {max_tokens:,} tokens"
        raise InputError(name, message, f"ask for less, or raise the context: --ctx {max(beyond)}")


def run_cases(
    llm: LLM, jobs: Sequence[Job[Case]], log: Log, settings: Mapping[str, Any], callbacks: Callbacks | None = None
) -> list[ResultRow]:
    """Return one row per job, in their order. Jobs that share their text should be adjacent."""
    check_lengths([job.num_tokens for job in jobs], llm.ctx)

    def answers(pending: Mapping[str, Job[Case]]) -> Iterator[tuple[str, ResultRow]]:
        if pending:
            _warm(llm)
        done = 0
        cases = (job.make() for job in pending.values())
        for (key, job), (case, following) in zip(pending.items(), pairwise(chain(cases, [None])), strict=True):
            assert case is not None
            shared = 0 if following is None else count_shared(case.token_ids, following.token_ids)

            def report(read: int, _: int, begin: int = done) -> None:
                if callbacks is not None:
                    callbacks.advance(begin + read)

            yield key, to_row(case, answer(llm, case, shared, report))
            done += job.num_tokens

    return _run(jobs, log, settings, callbacks, answers)


def run_problems(
    llm: LLM,
    jobs: Sequence[Job[ReasoningProblem]],
    max_tokens: int,
    log: Log,
    settings: Mapping[str, Any],
    callbacks: Callbacks | None = None,
) -> list[ResultRow]:
    """Return one row per problem, in their order; they run in batches. The label `budget` limits the reasoning."""

    def answers(pending: Mapping[str, Job[ReasoningProblem]]) -> Iterator[tuple[str, ResultRow]]:
        problems = {key: job.make() for key, job in pending.items()}
        plain = Sampling(temperature=0, max_tokens=max_tokens, loop_guard=LOOP_LIMIT)
        calls = (
            Call(
                key,
                replace(plain, think_budget=pending[key].labels["budget"]),
                messages=[{"role": "user", "content": problem.text}],
            )
            for key, problem in problems.items()
        )
        for key, completion in llm.many(calls, max_waiting=2 * llm.max_batch):
            if isinstance(completion, Exception):
                raise completion
            yield key, _verdict(problems[key], completion)

    return _run(jobs, log, settings, callbacks, answers)


def _run(
    jobs: Sequence[Job[T]],
    log: Log,
    settings: Mapping[str, Any],
    callbacks: Callbacks | None,
    answers: Callable[[Mapping[str, Job[T]]], Iterable[tuple[str, ResultRow]]],
) -> list[ResultRow]:
    """Answer the jobs that are not in the log, and log each result; return the rows of all jobs."""
    keys = [key_of(settings, job.labels) for job in jobs]
    pending = {key: job for key, job in zip(keys, jobs, strict=True) if log.find(key) is None}
    if callbacks is not None:
        callbacks.begin(len(jobs), len(jobs) - len(pending), sum(job.num_tokens for job in pending.values()))
    done = 0
    for key, result in answers(pending):
        row = {**pending[key].labels, **result}
        log.append(key, row)
        done += pending[key].num_tokens
        if callbacks is not None:
            callbacks.advance(done)
            callbacks.tell(row)
    return [row for row in map(log.find, keys) if row is not None]


def answer(llm: LLM, case: Case, shared: int = 0, on_progress: Callable[[int, int], None] | None = None) -> Completion:
    """Return the greedy answer; the state after `shared` tokens is kept for the next case."""
    sampling = Sampling(temperature=0, max_tokens=case.max_tokens)
    boundaries = (shared,) if shared >= MIN_SHARED else ()
    return llm.answer(Call(None, sampling, prompt=case.token_ids.tolist(), boundaries=boundaries), on_progress)


def find_needles(
    llm: LLM, maker: NeedleMaker, num_tokens: int, trials: int, on_trial: Callable[[], None] = lambda: None
) -> float:
    """Return the share of needles of the test split whose value is in the greedy answer; both fit into `num_tokens`."""
    found = 0
    for index in range(trials):
        case = maker.make(NeedleSpec(num_tokens - NUM_ANSWERED, split="test"), index)
        completion = llm.generate(list(case.token_ids), Sampling(temperature=0, max_tokens=NUM_ANSWERED))
        found += score_value(case.value, completion.text) == 1
        on_trial()
    return found / trials


def _warm(llm: LLM) -> None:
    """Run a short prompt, so that compilation and page faults do not count for the first case."""
    ids = llm.encode("The first words are slower than those that follow them.")[:WARM_TOKENS]
    llm.generate(ids, Sampling(temperature=0, max_tokens=2, ignore_eos=True))


def to_row(case: Case, completion: Completion) -> ResultRow:
    """Return the result of a case as plain values."""
    score = case.solution.score(completion.text)
    timings, usage = completion.timings, completion.usage
    return {
        "is_exact": score == 1,
        "score": score,
        "text": completion.text,
        "wanted": list(case.solution.wanted),
        **case.facts,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "prefill_n": timings.prompt_n,
        "prefill_s": timings.prompt_s,
        "decode_n": timings.predicted_n,
        "decode_s": timings.predicted_s,
    }


def _verdict(problem: ReasoningProblem, completion: Completion) -> ResultRow:
    return {
        **judge(problem, completion.text, completion.reasoning)._asdict(),
        "text": completion.text,
        "reasoning": completion.reasoning,
        "wanted": [problem.answer],
        "finish_reason": completion.finish_reason,
        "completion_tokens": completion.usage.completion_tokens,
    }


# Rows of single cases → rows of cells: found by length and depth, by task and length, by kind and budget.


def summarise(rows: Sequence[ResultRow], by: Sequence[str]) -> list[ResultRow]:
    """Return a row per cell: the share of exact answers, the mean score, and the speeds of all its cases together."""
    return [
        {
            **dict(zip(by, group, strict=True)),
            "trials": len(members),
            "exact": _mean(members, "is_exact"),
            "score": _mean(members, "score"),
            "prompt_tokens": round(_mean(members, "prompt_tokens")),
            "prefill_per_second": _speed(members, "prefill"),
            "decode_per_second": _speed(members, "decode"),
        }
        for group, members in _groups(rows, by)
    ]


def summarise_reasoning(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the shares answered, correct and stuck by kind and budget, and for all kinds together."""
    whole = [{**row, "task": "all"} for row in rows]
    return [
        {
            "task": task,
            "budget": budget,
            "cases": len(members),
            "answered": _mean(members, "is_answered"),
            "correct": _mean(members, "is_correct"),
            "stuck": _mean(members, "is_stuck"),
            "tokens": _mean(members, "completion_tokens"),
        }
        for (task, budget), members in _groups([*rows, *whole], ("task", "budget"))
    ]


def write_csv(rows: Sequence[ResultRow], path: Path) -> None:
    out = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_atomically(path, out.getvalue())


def _groups(rows: Sequence[ResultRow], by: Sequence[str]) -> list[tuple[tuple[Any, ...], list[ResultRow]]]:
    """Return the groups in order of first appearance."""
    groups: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return list(groups.items())


def _mean(rows: Sequence[ResultRow], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def _speed(rows: Sequence[ResultRow], part: str) -> float | None:
    """Return tokens per second; None if nothing was computed."""
    seconds = sum(row[f"{part}_s"] for row in rows)
    tokens = sum(row[f"{part}_n"] for row in rows)
    return round(tokens / seconds, 2) if seconds > 0 and tokens else None
