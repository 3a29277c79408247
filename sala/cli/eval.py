"""`sala eval`: quality by context length: needles, long-context tasks, reasoning, lm-eval."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sala.cli import flags as s
from sala.cli.lm_eval import lm
from sala.cli.outputs import output_file, plot_file, relative
from sala.cli.tables import print_record, print_table
from sala.errors import InputError
from sala.options import Options

if TYPE_CHECKING:
    from sala.cli.progress import EvaluationProgress
    from sala.lab.eval.suite import Suite
    from sala.lab.report.record import Log, Record, ResultRow
    from sala.llm import LLM

eval = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
eval.command()(lm)

Lengths = Annotated[str, typer.Option(help="Tokens of prompt and answer, e.g. 4K,32K,128K,1M.")]
Trials = Annotated[int, typer.Option(help="Cases per cell.", min=1)]
Haystack = Annotated[
    Path | None, typer.Option(metavar="FILE|DIR", help="Text to hide needles in; by default made-up prose.")
]
Seed = Annotated[int, typer.Option(help="The same seed makes the same cases.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE.json", help="Record of the results; a log is kept beside it."),
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Picture: .png, .pdf or .svg.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the results of another run.")]
OneAtATime = Annotated[Options, s.Use(defaults={"max_batch": 1})]
MIN_LENGTH = 256
VALUES = ("number", "word", "uuid", "mixed")


@eval.command()
@s.derived
def needle(
    *,
    lengths: Lengths = "1K,2K,4K,8K",
    depths: Annotated[str, typer.Option(help="Positions of the needle, in percent of the text.")] = "0,25,50,75,100",
    trials: Trials = 2,
    preset: Annotated[str, typer.Option(help="varied (many wordings) or aurora (one sentence in filler).")] = "varied",
    keys: Annotated[int, typer.Option(help="Needles in the text that differ in key and value only.", min=1)] = 1,
    values: Annotated[str, typer.Option(help="What is hidden: number, word, uuid or mixed.")] = "mixed",
    haystack: Haystack = None,
    seed: Seed = 0,
    output: Output = None,
    plot: Plot = None,
    force: Force = False,
    options: OneAtATime,
    verbose: s.Verbose = False,
) -> None:
    """Hide a fact in texts of several lengths, at several depths, and ask for it."""
    from sala.lab.eval.suite import PRESETS
    from sala.lab.eval.summary import summarise

    _one_of("preset", preset, PRESETS)
    _one_of("values", values, VALUES)
    if preset == "aurora" and (keys > 1 or values != "mixed" or haystack is not None):
        raise InputError("preset", "aurora has its own needle and text", "leave out --keys, --values and --haystack")
    counts, places = _lengths(lengths), _depths(depths)
    run = _Run("needle", options, output, plot, force, counts)
    suite, facts = run.open(haystack, seed, verbose)
    facts |= {"preset": preset, "keys": keys, "values": values}
    jobs = suite.needle(counts, places, trials, preset, keys, _kinds(values))
    settings = {**facts, "lengths": counts, "depths": places, "trials": trials}
    cells = summarise(run.cases(jobs, settings, facts, _tell_needle), ("length", "depth"))
    title = f"needles found: {run.title(trials)}"
    run.save(cells, settings, title)
    _print_grid(cells, title)


@eval.command()
@s.derived
def ruler(
    *,
    tasks: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    lengths: Lengths = "4K,8K",
    trials: Trials = 4,
    per_text: Annotated[int, typer.Option(help="Trials that share a text, where a task allows it.", min=1)] = 1,
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Your own questions: text, question and answers per line.")
    ] = None,
    haystack: Haystack = None,
    seed: Seed = 0,
    output: Output = None,
    plot: Plot = None,
    force: Force = False,
    options: OneAtATime,
    verbose: s.Verbose = False,
) -> None:
    """Run tasks on long texts: single, multikey, multivalue, multiquery, chain, common, frequent, reading."""
    from sala.lab.eval.suite import QUESTIONS, RULER
    from sala.lab.eval.summary import summarise
    from sala.lab.eval.tasks.reading import read_passages

    own = (QUESTIONS,) if questions is not None else ()
    chosen = _names(tasks, (*RULER, *own), "tasks")
    counts = _lengths(lengths)
    passages = read_passages(questions) if questions is not None else []
    run = _Run("ruler", options, output, plot, force, counts)
    suite, facts = run.open(haystack, seed, verbose)
    facts |= {"questions": _digest(questions)}
    jobs = suite.ruler(chosen, counts, trials, per_text, passages)
    settings = {**facts, "tasks": chosen, "lengths": counts, "trials": trials, "per_text": per_text}
    cells = summarise(run.cases(jobs, settings, facts, _tell_ruler), ("task", "length"))
    run.save(cells, settings, f"long-context tasks: {run.title(trials)}")
    _print_tasks(cells, f"scores: {run.title(trials)}")


@eval.command()
@s.derived
def reasoning(
    *,
    tasks: Annotated[str, typer.Option(help="arithmetic, steps, constraints, or all.")] = "all",
    count: Annotated[int, typer.Option("--count", "-c", help="Problems of every kind.", min=1)] = 20,
    budget: Annotated[
        int | None, typer.Option(help="Run once more with at most so many reasoning tokens.", min=0)
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Tokens of reasoning and answer.", min=1)
    ] = 2048,
    seed: Seed = 0,
    output: Output = None,
    force: Force = False,
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    """Pose small problems with one right answer: how many are answered, correct, or stuck in reasoning."""
    from sala.lab.eval.suite import reasoning_tasks
    from sala.lab.eval.summary import summarise_reasoning
    from sala.lab.eval.tasks.reasoning import KINDS

    kinds = _names(tasks, tuple(KINDS), "tasks")
    budgets = [None] if budget is None else [None, budget]
    run = _Run("reasoning", options, output, None, force, [])
    facts = run.load(seed, verbose)
    facts |= {"max_tokens": max_tokens, "max_batch": options.max_batch}
    settings = {**facts, "tasks": kinds, "count": count, "budgets": budgets}
    rows = run.problems(reasoning_tasks(kinds, count, seed, budgets), max_tokens, settings, facts)
    record = run.save(summarise_reasoning(rows), settings)
    print_record(record, f"{run.name}, {count} problem(s) of every kind")


class _Run:
    """What every evaluation does before and after: from the flags to the files."""

    def __init__(
        self,
        kind: str,
        options: Options,
        output: Path | None,
        plot: Path | None,
        force: bool,
        lengths: Sequence[int],
    ) -> None:
        """Raise for everything that can be refused before the model is loaded."""
        from sala.config import SalaConfig
        from sala.lab.eval.runner import check_lengths

        self._path = s.find_model(options.model)
        self.name = self._path.name
        self._kind, self._force, self._options = kind, force, options
        self._output = output_file(output, f"{kind}-{self.name}.json", ".json")
        self._log = self._output.with_suffix(".jsonl")
        self._plot = plot_file(plot, self._output) if kind != "reasoning" else None
        if lengths:
            check_lengths(lengths, options.ctx or SalaConfig.load(self._path).max_position_embeddings)
            self._options = replace(options, ctx=options.ctx or max(lengths))
        self._longest = max(lengths, default=0)
        self._num_known = self._num_cases = 0

    def load(self, seed: int, verbose: bool) -> dict[str, Any]:
        """Load the model; return what the results depend on besides the cases."""
        from sala import __version__
        from sala.backends import name_device

        where = name_device(self._options.backend, self._options.device)
        self.llm: LLM = s.load(self._options, verbose)
        return {
            "sala": __version__,
            "fingerprint": self.llm.fingerprint()[:16],
            "device": where,
            "dtype": self.llm.capacity.dtype,
            "seed": seed,
        }

    def open(self, haystack: Path | None, seed: int, verbose: bool) -> tuple["Suite", dict[str, Any]]:
        """Load the model; return the suite of its cases, and the facts that identify them."""
        from sala.lab.eval.documents import read_source
        from sala.lab.eval.suite import Suite
        from sala.lab.eval.tasks.case import PromptWriter

        source = read_source(haystack) if haystack is not None else None
        facts = self.load(seed, verbose)
        if source is not None and source.num_chars < 8 * self._longest:
            count = sum(map(len, self.llm.tokenizer.encode_many(source.documents)))
            if count < self._longest:
                s.note(f"{haystack} has {count:,} tokens; longer texts repeat it")
        suite = Suite(PromptWriter.for_model(self.llm.tokenizer), lambda: source or read_source(None), seed)
        return suite, {**facts, "haystack": "prose" if source is None else source.name}

    def cases(
        self,
        jobs: Sequence[Any],
        settings: dict[str, Any],
        facts: dict[str, Any],
        describe: "Callable[[ResultRow], str]",
    ) -> "list[ResultRow]":
        from sala.lab.eval.runner import run_cases

        with self._logged(jobs, settings, facts, describe) as (log, progress):
            return run_cases(self.llm, jobs, log, facts, progress)

    def problems(
        self, tasks: Sequence[Any], max_tokens: int, settings: dict[str, Any], facts: dict[str, Any]
    ) -> "list[ResultRow]":
        from sala.lab.eval.runner import run_problems

        with self._logged(tasks, settings, facts, _tell_problem) as (log, progress):
            return run_problems(self.llm, tasks, max_tokens, log, facts, progress)

    @contextmanager
    def _logged(
        self,
        jobs: Sequence[Any],
        settings: dict[str, Any],
        facts: dict[str, Any],
        describe: "Callable[[ResultRow], str]",
    ) -> "Iterator[tuple[Log, EvaluationProgress]]":
        """Open the log of the run. After Ctrl-C say how many cases it has and how to continue."""
        from sala.cli.progress import EvaluationProgress
        from sala.lab.report.record import Log, key_of

        self._check(settings)
        log, keys = Log(self._log), [key_of(facts, job.labels) for job in jobs]

        def num_known() -> int:
            return sum(log.find(key) is not None for key in keys)

        self._num_known, self._num_cases = num_known(), len(keys)
        try:
            with EvaluationProgress(describe) as progress:
                yield log, progress
        except KeyboardInterrupt:
            s.note(f"stopped; {num_known()} of {len(keys)} cases are in {self._log}")
            s.note(f"the same command continues from there: {shlex.join(['sala', *sys.argv[1:]])}")
            raise

    def _check(self, settings: dict[str, Any]) -> None:
        from sala.lab.report.record import Record

        if self._force:
            return
        Record(self._kind, self.name, settings).check(self._output)
        others = [self._output.with_suffix(".csv"), self._plot]
        for file in others if not self._output.exists() else ():
            if file is not None and file.exists():
                raise InputError(
                    "output", f"{file} exists and belongs to something else", "choose another name, or --force"
                )

    def save(self, results: "list[ResultRow]", settings: dict[str, Any], title: str = "") -> "Record":
        """Write the record, the table and the picture."""
        from sala.lab.eval.summary import write_csv
        from sala.lab.report.kinds import plot_record
        from sala.lab.report.record import Record

        table = self._output.with_suffix(".csv")
        write_csv(results, table)
        written = [self._output, table]
        record = Record(self._kind, self.name, settings, results, notes=self._notes())
        if self._plot is not None:
            plot_record(record, self._plot, title)
            record.plots.append(relative(self._plot, self._output.parent))
            written.append(self._plot)
        record.save(self._output, self._force)
        s.note(f"wrote {', '.join(map(str, written))}; every answer is in {self._log}")
        return record

    def _notes(self) -> list[str]:
        """Return what a reader of the speeds must know: cases of an earlier run may have had other conditions."""
        from sala.lab.report.record import Record

        if self._num_known == self._num_cases and self._output.exists() and not self._force:
            return Record.load(self._output).notes
        if not self._num_known:
            return []
        text = "come from an earlier run, perhaps with other threads or load: speeds mix both"
        return [f"{self._num_known} of {self._num_cases} cases {text}"]

    def title(self, trials: int) -> str:
        return f"{self.name}, {trials} trial{'s' if trials > 1 else ''} per cell"


def _lengths(text: str) -> list[int]:
    counts = sorted({s.count(part) for part in text.split(",")})
    if counts[0] < MIN_LENGTH:
        raise InputError("lengths", f"hold {counts[0]}", f"they begin at {MIN_LENGTH}; 4k is 4,000, 4K is 4,096")
    return counts


def _depths(text: str) -> list[float]:
    try:
        depths = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise InputError("depths", f"are {text!r}", "give percentages, e.g. 0,50,100") from None
    if not all(0 <= depth <= 100 for depth in depths):
        raise InputError("depths", f"are {text!r}", "they go from 0 (start) to 100 (end)")
    return depths


def _names(text: str, known: Sequence[str], field: str) -> list[str]:
    names = list(known) if text == "all" else list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        _one_of(field, name, known)
    return names


def _one_of(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(field, f"holds {value!r}", f"choose from {', '.join(known)}")


def _kinds(values: str) -> Any:
    return ("number", "word", "uuid") if values == "mixed" else (values,)


def _digest(file: Path | None) -> str | None:
    import hashlib

    return None if file is None else f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def speeds(row: "ResultRow") -> str:
    """Return the prefill and decode speed of one case."""
    parts = []
    for name in ("prefill", "decode"):
        if row[f"{name}_n"] and row[f"{name}_s"] > 0:
            parts.append(f"{name} {row[f'{name}_n'] / row[f'{name}_s']:,.0f} tok/s")
    return ", ".join(parts)


def _tell_needle(row: "ResultRow") -> str:
    found = "found" if row["is_exact"] else f"missed ({row['score']:.0%} of it)"
    return f"{row['length']:,} tokens, depth {row['depth']:g} %: {found}, {speeds(row)}"


def _tell_ruler(row: "ResultRow") -> str:
    return f"{row['task']}, {row['length']:,} tokens: {row['score']:.0%}, {speeds(row)}"


def _tell_problem(row: "ResultRow") -> str:
    words = ("is_correct", "right"), ("is_answered", "wrong"), ("is_stuck", "stuck in reasoning")
    what = next((word for name, word in words if row[name]), "no answer")
    budget = "" if row["budget"] is None else f", budget {row['budget']}"
    return f"{row['task']} {row['number']}{budget}: {what}, {row['completion_tokens']} tokens"


def _print_grid(cells: "list[ResultRow]", title: str) -> None:
    from sala.lab.report.charts import length_label
    from sala.lab.report.kinds import ratio_text

    lengths, depths = (sorted({cell[name] for cell in cells}) for name in ("length", "depth"))
    found = {(cell["length"], cell["depth"]): cell for cell in cells}
    rows = []
    for length in lengths:
        line = [found[length, depth] for depth in depths]
        counts = [ratio_text(cell["exact"], cell["trials"]) for cell in line]
        rows.append([length_label(length), *counts, *_mean_speeds(line)])
    headings = ["tokens", *(f"{depth:g} %" for depth in depths), "prefill tok/s", "decode tok/s"]
    print_table(title, headings, rows, [False] * len(headings))


def _print_tasks(cells: "list[ResultRow]", title: str) -> None:
    from sala.lab.report.charts import length_label

    lengths = sorted({cell["length"] for cell in cells})
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    found = {(cell["task"], cell["length"]): cell for cell in cells}
    rows = [[task, *(f"{found[task, length]['score']:.0%}" for length in lengths)] for task in tasks]
    average = [sum(found[task, length]["score"] for task in tasks) / len(tasks) for length in lengths]
    rows.append(["all", *(f"{value:.0%}" for value in average)])
    print_table(title, ["task", *map(length_label, lengths)], rows, [True, *(False for _ in lengths)])


def _mean_speeds(cells: "list[ResultRow]") -> list[str]:
    out = []
    for name in ("prefill_per_second", "decode_per_second"):
        known = [cell[name] for cell in cells if cell[name] is not None]
        out.append(f"{sum(known) / len(known):,.1f}" if known else "–")
    return out
