"""Run cases through a model, one after another, and log each as soon as it is done.

Decoding is greedy, so the same case gives the same answer. The prefix that a case shares with the next one stays
cached, so that cases over one text prefill it once. Cases that are in the log already are not run again.
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
from sala.lab.eval.tasks.reasoning import ReasoningProblem, judge
from sala.lab.report.record import Log, ResultRow, key_of
from sala.llm import LLM
from sala.protocol import Sampling

MIN_SHARED = 256  # tokens of a shared prefix that are worth a snapshot
WARM_TOKENS = 32
LOOP_LIMIT = 256  # repeated tokens that end the answer to a problem


@dataclass(frozen=True)
class CaseJob:
    """A case to make. `labels` identify it: task, length, depth, trial."""

    labels: dict[str, Any]
    num_tokens: int
    make: Callable[[], Case]


@dataclass(frozen=True)
class ProblemJob:
    """A problem to pose, with a budget of reasoning tokens."""

    labels: dict[str, Any]
    problem: ReasoningProblem
    budget: int | None


class Callbacks(Protocol):
    """Receives the progress of a run."""

    def begin(self, num_cases: int, num_known: int, num_tokens: int) -> None: ...

    def advance(self, num_tokens: int) -> None:
        """`num_tokens` of the prompts of all cases are done."""

    def tell(self, row: ResultRow) -> None:
        """A case is done."""


def check_lengths(lengths: Sequence[int], max_tokens: int, name: str = "lengths") -> None:
    """Raise InputError if a length exceeds the context."""
    beyond = [length for length in lengths if length > max_tokens]
    if beyond:
        listed = ", ".join(f"{length:,}" for length in beyond)
        message = f"beyond the context: {listed}, and it holds {max_tokens:,} tokens"
        raise InputError(name, message, f"ask for less, or raise the context: --ctx {max(beyond)}")


def run_cases(
    llm: LLM, jobs: Sequence[CaseJob], log: Log, settings: Mapping[str, Any], callbacks: Callbacks | None = None
) -> list[ResultRow]:
    """Return one row per job, in their order. Jobs that share their text should be adjacent."""
    check_lengths([job.num_tokens for job in jobs], llm.ctx)
    keys = [key_of(settings, job.labels) for job in jobs]
    pending = [(key, job) for key, job in zip(keys, jobs, strict=True) if log.find(key) is None]
    done = 0
    if callbacks is not None:
        callbacks.begin(len(jobs), len(jobs) - len(pending), sum(job.num_tokens for _, job in pending))
    if pending:
        _warm(llm)
    for (key, job), case, shared in _with_shared(pending):
        begin = done

        def report(read: int, _: int, begin: int = begin) -> None:
            if callbacks is not None:
                callbacks.advance(begin + read)

        completion = answer(llm, case, shared, report)
        done += job.num_tokens
        row = {**job.labels, **to_row(case, completion)}
        log.append(key, row)
        if callbacks is not None:
            callbacks.advance(done)
            callbacks.tell(row)
    return [row for row in map(log.find, keys) if row is not None]


def _with_shared(pending: Sequence[tuple[str, CaseJob]]) -> Iterator[tuple[tuple[str, CaseJob], Case, int]]:
    """Yield each case with the number of tokens that it shares with the next one."""
    case = pending[0][1].make() if pending else None
    for index, (key, job) in enumerate(pending):
        following = pending[index + 1][1].make() if index + 1 < len(pending) else None
        assert case is not None
        shared = 0 if following is None else count_shared(case.token_ids, following.token_ids)
        yield (key, job), case, shared
        case = following


def count_shared(one: Ids, other: Ids) -> int:
    """Return the length of the common prefix."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def answer(llm: LLM, case: Case, shared: int = 0, on_progress: Callable[[int, int], None] | None = None) -> Completion:
    """Return the greedy answer; the state after `shared` tokens is kept for the next case."""
    sampling = Sampling(temperature=0, max_tokens=case.max_tokens)
    boundaries = (shared,) if shared >= MIN_SHARED else ()
    return llm.answer(Call(None, sampling, prompt=case.token_ids.tolist(), boundaries=boundaries), on_progress)


def _warm(llm: LLM) -> None:
    """Run a short prompt, so that compilation and page faults do not count for the first case."""
    ids = llm.encode("The first words are slower than those that follow them.")[:WARM_TOKENS]
    llm.generate(ids, temperature=0, max_tokens=2, ignore_eos=True)


def to_row(case: Case, completion: Completion) -> ResultRow:
    """Return the result of a case as plain values."""
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
    llm: LLM,
    tasks: Sequence[ProblemJob],
    max_tokens: int,
    log: Log,
    settings: Mapping[str, Any],
    callbacks: Callbacks | None = None,
) -> list[ResultRow]:
    """Return one row per problem, in their order; problems run in batches."""
    keys = [key_of(settings, task.labels) for task in tasks]
    pending = {key: task for key, task in zip(keys, tasks, strict=True) if log.find(key) is None}
    if callbacks is not None:
        callbacks.begin(len(tasks), len(tasks) - len(pending), len(pending))
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
        if callbacks is not None:
            callbacks.advance(done)
            callbacks.tell(row)
    return [row for row in map(log.find, keys) if row is not None]


def _verdict(problem: ReasoningProblem, completion: Completion) -> ResultRow:
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
