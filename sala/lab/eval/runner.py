"""Runs cases through a model, one after another, and logs each as soon as it is done.

Decoding is greedy: the same case gives the same answer. What a case has in common with the one after it is kept, so
that cases over one text read it once. A log that is there already is used: nothing is measured twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sala.engine.requests import Call
from sala.engine.stream import Completion
from sala.errors import InputError
from sala.lab.eval.tasks.case import Case
from sala.lab.eval.tasks.haystack import Ids
from sala.lab.eval.tasks.reasoning import Problem, judge
from sala.lab.report.record import Log, Row, key_of
from sala.llm import LLM
from sala.protocol import Sampling

MIN_SHARED = 256  # tokens in common that are worth keeping
WARM_TOKENS = 32
LOOP_LIMIT = 256  # tokens of repetition that end an answer to a problem


@dataclass(frozen=True)
class Job:
    """A case that is still to be made. `labels` say which it is: task, length, depth, trial."""

    labels: dict[str, Any]
    num_tokens: int
    make: Callable[[], Case]


@dataclass(frozen=True)
class Task:
    """A problem that is still to be posed, with so many tokens of thought at most."""

    labels: dict[str, Any]
    problem: Problem
    budget: int | None


class Watch(Protocol):
    """Whoever wants to know how a run goes on."""

    def begin(self, num_cases: int, num_known: int, num_tokens: int) -> None: ...

    def advance(self, num_tokens: int) -> None:
        """So many tokens of the prompts are behind us, all cases together."""

    def tell(self, row: Row) -> None:
        """A case is done."""


def check_lengths(lengths: Sequence[int], max_tokens: int, name: str = "lengths") -> None:
    """Refuse lengths that the context does not hold, with the numbers."""
    beyond = [length for length in lengths if length > max_tokens]
    if beyond:
        listed = ", ".join(f"{length:,}" for length in beyond)
        message = f"beyond the context: {listed}, and it holds {max_tokens:,} tokens"
        raise InputError(name, message, f"ask for less, or raise the context: --ctx {max(beyond)}")


def run_cases(
    llm: LLM, jobs: Sequence[Job], log: Log, settings: Mapping[str, Any], watch: Watch | None = None
) -> list[Row]:
    """One row per job, in their order. Jobs that share their text should stand together."""
    check_lengths([job.num_tokens for job in jobs], llm.ctx)
    keys = [key_of(settings, job.labels) for job in jobs]
    pending = [(key, job) for key, job in zip(keys, jobs, strict=True) if log.find(key) is None]
    done = 0
    if watch is not None:
        watch.begin(len(jobs), len(jobs) - len(pending), sum(job.num_tokens for _, job in pending))
    if pending:
        _warm(llm)
    for (key, job), case, shared in _with_shared(pending):
        begin = done

        def report(read: int, _: int, begin: int = begin) -> None:
            if watch is not None:
                watch.advance(begin + read)

        completion = answer(llm, case, shared, report)
        done += job.num_tokens
        row = {**job.labels, **to_row(case, completion)}
        log.append(key, row)
        if watch is not None:
            watch.advance(done)
            watch.tell(row)
    return [row for row in map(log.find, keys) if row is not None]


def _with_shared(pending: Sequence[tuple[str, Job]]) -> Iterator[tuple[tuple[str, Job], Case, int]]:
    """Every case with the number of tokens that the next one begins with, too."""
    case = pending[0][1].make() if pending else None
    for index, (key, job) in enumerate(pending):
        following = pending[index + 1][1].make() if index + 1 < len(pending) else None
        assert case is not None
        shared = 0 if following is None else count_shared(case.token_ids, following.token_ids)
        yield (key, job), case, shared
        case = following


def count_shared(one: Ids, other: Ids) -> int:
    """The length of the common beginning."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def answer(llm: LLM, case: Case, shared: int = 0, on_progress: Callable[[int, int], None] | None = None) -> Completion:
    """The greedy answer; the state after `shared` tokens is kept for the next case."""
    sampling = Sampling(temperature=0, max_tokens=case.max_tokens)
    boundaries = (shared,) if shared >= MIN_SHARED else ()
    return llm.answer(Call(None, sampling, prompt=case.token_ids.tolist(), boundaries=boundaries), on_progress)


def _warm(llm: LLM) -> None:
    """What is compiled or mapped at first use should not count for the first case."""
    ids = llm.encode("The first words are slower than those that follow them.")[:WARM_TOKENS]
    llm.generate(ids, temperature=0, max_tokens=2, ignore_eos=True)


def to_row(case: Case, completion: Completion) -> Row:
    """What became of a case, in plain values."""
    score = case.solution.score(completion.text)
    timings, usage = completion.timings, completion.usage
    return {
        "is_exact": score.is_exact,
        "score": score.partial,
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


def run_problems(
    llm: LLM, tasks: Sequence[Task], max_tokens: int, log: Log, settings: Mapping[str, Any], watch: Watch | None = None
) -> list[Row]:
    """One row per task, in their order; as many are answered at a time as the model takes."""
    keys = [key_of(settings, task.labels) for task in tasks]
    pending = {key: task for key, task in zip(keys, tasks, strict=True) if log.find(key) is None}
    if watch is not None:
        watch.begin(len(tasks), len(tasks) - len(pending), len(pending))
    calls = (
        Call(
            key,
            Sampling(temperature=0, max_tokens=max_tokens, think_budget=task.budget, loop_guard=LOOP_LIMIT),
            messages=[{"role": "user", "content": task.problem.text}],
        )
        for key, task in pending.items()
    )
    for done, (key, completion) in enumerate(llm.many(calls, max_waiting=2 * llm.max_batch), 1):
        if isinstance(completion, Exception):
            raise completion
        row = {**pending[key].labels, **_verdict(pending[key].problem, completion)}
        log.append(key, row)
        if watch is not None:
            watch.advance(done)
            watch.tell(row)
    return [row for row in map(log.find, keys) if row is not None]


def _verdict(problem: Problem, completion: Completion) -> Row:
    verdict = judge(problem, completion.text, completion.reasoning)
    return {
        "is_answered": verdict.is_answered,
        "is_correct": verdict.is_correct,
        "is_stuck": verdict.is_stuck,
        "text": completion.text,
        "reasoning": completion.reasoning,
        "wanted": [problem.answer],
        "finish_reason": completion.finish_reason,
        "completion_tokens": completion.usage.completion_tokens,
    }
