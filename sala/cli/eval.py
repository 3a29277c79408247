"""`sala eval`: what a model can do, at which length: needles, long-context tasks, reasoning."""

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
from sala.cli.outputs import picture, place, relative
from sala.errors import InputError
from sala.options import Options

if TYPE_CHECKING:
    from sala.cli.progress import EvaluationProgress
    from sala.lab.eval.record import Row
    from sala.lab.eval.runner import Log
    from sala.lab.eval.suite import Suite
    from sala.llm import LLM

eval = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
eval.command()(lm)

Lengths = Annotated[str, typer.Option(help="Tokens of prompt and answer, e.g. 4K,32K,128K,1M.")]
Trials = Annotated[int, typer.Option(help="Cases per cell.", min=1)]
Haystack = Annotated[
    Path | None, typer.Option(metavar="FILE|DIR", help="Text to hide things in; by default prose that is made up.")
]
Seed = Annotated[int, typer.Option(help="The same seed makes the same cases.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="Where the results go; a log lies beside it.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Where the picture goes.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the results of another run.")]
OneAtATime = Annotated[Options, s.Use(defaults={"max_batch": 1})]
MIN_LENGTH = 256
VALUES = ("number", "word", "uuid", "mixed")


@eval.command()
@s.derived
def needle(
    *,
    lengths: Lengths = "1K,2K,4K,8K",
    depths: Annotated[str, typer.Option(help="Where the needle lies, in percent of the text.")] = "0,25,50,75,100",
    trials: Trials = 2,
    preset: Annotated[str, typer.Option(help="varied (many wordings) or aurora (one sentence in filler).")] = "varied",
    keys: Annotated[int, typer.Option(help="Needles in the text, alike but for key and value.", min=1)] = 1,
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
    from sala.lab.eval.grid import draw_grid, summarise
    from sala.lab.eval.suite import PRESETS

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
    rows = run.cases(jobs, settings, facts, _tell_needle)
    cells = summarise(rows, ("length", "depth"))
    run.save(cells, settings, lambda file: draw_grid(cells, file, f"needles found: {run.title(trials)}"))
    _print_grid(cells, run.title(trials))


@eval.command()
@s.derived
def ruler(
    *,
    tasks: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    lengths: Lengths = "4K,8K",
    trials: Trials = 4,
    per_text: Annotated[int, typer.Option(help="Trials that share a text, where a task allows it.", min=1)] = 1,
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Your own: text, question and answers per line.")
    ] = None,
    haystack: Haystack = None,
    seed: Seed = 0,
    output: Output = None,
    plot: Plot = None,
    force: Force = False,
    options: OneAtATime,
    verbose: s.Verbose = False,
) -> None:
    """Long texts, and what can be asked about them: single, multikey, multivalue, multiquery, chain, common, frequent,
    reading."""
    from sala.lab.eval.grid import draw_tasks, summarise
    from sala.lab.eval.suite import QUESTIONS, RULER
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
    rows = run.cases(jobs, settings, facts, _tell_ruler)
    cells = summarise(rows, ("task", "length"))
    run.save(cells, settings, lambda file: draw_tasks(cells, file, f"long-context tasks: {run.title(trials)}"))
    _print_tasks(cells, run.title(trials))


@eval.command()
@s.derived
def reasoning(
    *,
    tasks: Annotated[str, typer.Option(help="arithmetic, steps, constraints, or all.")] = "all",
    count: Annotated[int, typer.Option("--count", "-c", help="Problems of every kind.", min=1)] = 20,
    budget: Annotated[int | None, typer.Option(help="Once more with so many tokens of thought at most.", min=0)] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Thoughts and answer at most.", min=1)] = 2048,
    seed: Seed = 0,
    output: Output = None,
    force: Force = False,
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    """Small problems with one right answer: how many are answered, how many rightly, and how many never leave the
    model's thoughts."""
    from sala.lab.eval.grid import summarise_reasoning
    from sala.lab.eval.suite import reasoning_tasks
    from sala.lab.eval.tasks.reasoning import KINDS

    kinds = _names(tasks, tuple(KINDS), "tasks")
    budgets = [None] if budget is None else [None, budget]
    run = _Run("reasoning", options, output, None, force, [])
    facts = run.load(seed, verbose)
    facts |= {"max_tokens": max_tokens, "max_batch": options.max_batch}
    settings = {**facts, "tasks": kinds, "count": count, "budgets": budgets}
    rows = run.problems(reasoning_tasks(kinds, count, seed, budgets), max_tokens, settings, facts)
    results = summarise_reasoning(rows)
    run.save(results, settings, None)
    _print_reasoning(results, f"{run.name}, {count} problem(s) of every kind")


class _Run:
    """From the flags to the files: what every evaluation does before and after."""

    def __init__(
        self,
        kind: str,
        options: Options,
        output: Path | None,
        plot: Path | None,
        force: bool,
        lengths: Sequence[int],
    ) -> None:
        """All that can be refused is refused here, before the model is loaded."""
        from sala.config import SalaConfig
        from sala.lab.eval.runner import check_lengths

        self._path = s.find_model(options.model)
        self.name = self._path.name
        self._kind, self._force, self._options = kind, force, options
        self._output = place(output, f"{kind}-{self.name}.json", ".json")
        self._log = self._output.with_suffix(".jsonl")
        self._plot = picture(plot, self._output) if kind != "reasoning" else None
        if lengths:
            check_lengths(lengths, options.ctx or SalaConfig.load(self._path).max_position_embeddings)
            self._options = replace(options, ctx=options.ctx or max(lengths))
        self._longest = max(lengths, default=0)

    def load(self, seed: int, verbose: bool) -> dict[str, Any]:
        """Load the model; what the results depend on besides the cases."""
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
        """The model, the cases for it, and the facts that tell them from others."""
        from sala.lab.eval.sources import read_source
        from sala.lab.eval.suite import Suite
        from sala.lab.eval.tasks.case import Writer

        source = read_source(haystack) if haystack is not None else None
        facts = self.load(seed, verbose)
        if source is not None and source.num_chars < 8 * self._longest:
            count = sum(map(len, self.llm.tokenizer.encode_many(source.documents)))
            if count < self._longest:
                s.note(f"{haystack} has {count:,} tokens: in longer texts it comes again and again")
        suite = Suite(Writer.for_model(self.llm.tokenizer), lambda: source or read_source(None), seed)
        return suite, {**facts, "haystack": "prose" if source is None else source.name}

    def cases(
        self,
        jobs: Sequence[Any],
        settings: dict[str, Any],
        facts: dict[str, Any],
        describe: "Callable[[Row], str]",
    ) -> "list[Row]":
        from sala.lab.eval.runner import Log, key_of, run_cases

        self._check(settings)
        log = Log(self._log)
        with self._watched(describe, log, [key_of(facts, job.labels) for job in jobs]) as watch:
            return run_cases(self.llm, jobs, log, facts, watch)

    def problems(
        self, tasks: Sequence[Any], max_tokens: int, settings: dict[str, Any], facts: dict[str, Any]
    ) -> "list[Row]":
        from sala.lab.eval.runner import Log, key_of, run_problems

        self._check(settings)
        log = Log(self._log)
        with self._watched(_tell_problem, log, [key_of(facts, task.labels) for task in tasks]) as watch:
            return run_problems(self.llm, tasks, max_tokens, log, facts, watch)

    def _check(self, settings: dict[str, Any]) -> None:
        from sala.lab.eval.record import Record

        if self._force:
            return
        Record(self._kind, self.name, settings).check(self._output)
        others = [self._output.with_suffix(".csv"), self._plot]
        for file in others if not self._output.exists() else ():
            if file is not None and file.exists():
                raise InputError(
                    "output", f"{file} exists and belongs to something else", "choose another name, or --force"
                )

    @contextmanager
    def _watched(
        self, describe: "Callable[[Row], str]", log: "Log", keys: Sequence[str]
    ) -> "Iterator[EvaluationProgress]":
        """Ctrl-C keeps what is measured and says how to go on."""
        from sala.cli.progress import EvaluationProgress

        try:
            with EvaluationProgress(describe) as progress:
                yield progress
        except KeyboardInterrupt:
            num_known = sum(log.find(key) is not None for key in keys)
            s.note(f"stopped; {num_known} of {len(keys)} cases are in {self._log}")
            s.note(f"the same command goes on from there: {shlex.join(['sala', *sys.argv[1:]])}")
            raise

    def save(self, results: "list[Row]", settings: dict[str, Any], draw: Callable[[Path], None] | None) -> None:
        from sala.lab.eval.grid import write_csv
        from sala.lab.eval.record import Record

        table = self._output.with_suffix(".csv")
        write_csv(results, table)
        written = [self._output, table]
        record = Record(self._kind, self.name, settings, results)
        if self._plot is not None and draw is not None:
            draw(self._plot)
            record.plots.append(relative(self._plot, self._output.parent))
            written.append(self._plot)
        record.save(self._output, self._force)
        s.note(f"wrote {', '.join(map(str, written))}; every answer is in {self._log}")

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


def speeds(row: "Row") -> str:
    """Prefill and decode of one case, in words."""
    parts = []
    for name in ("prefill", "decode"):
        if row[f"{name}_n"] and row[f"{name}_s"] > 0:
            parts.append(f"{name} {row[f'{name}_n'] / row[f'{name}_s']:,.0f} tok/s")
    return ", ".join(parts)


def _tell_needle(row: "Row") -> str:
    found = "found" if row["is_exact"] else f"missed ({row['score']:.0%} of it)"
    return f"{row['length']:,} tokens, depth {row['depth']:g} %: {found}, {speeds(row)}"


def _tell_ruler(row: "Row") -> str:
    return f"{row['task']}, {row['length']:,} tokens: {row['score']:.0%}, {speeds(row)}"


def _tell_problem(row: "Row") -> str:
    words = ("is_correct", "right"), ("is_answered", "wrong"), ("is_stuck", "stuck in thoughts")
    what = next((word for name, word in words if row[name]), "no answer")
    budget = "" if row["budget"] is None else f", budget {row['budget']}"
    return f"{row['task']} {row['number']}{budget}: {what}, {row['completion_tokens']} tokens"


def _print_grid(cells: "list[Row]", title: str) -> None:
    from sala.lab.bench.plots import label

    lengths, depths = (sorted({cell[name] for cell in cells}) for name in ("length", "depth"))
    found = {(cell["length"], cell["depth"]): cell for cell in cells}
    rows = []
    for length in lengths:
        line = [found[length, depth] for depth in depths]
        rows.append([label(length), *(f"{cell['exact']:.0%}" for cell in line), *_mean_speeds(line)])
    columns = ["tokens", *(f"{depth:g} %" for depth in depths), "prefill tok/s", "decode tok/s"]
    _print(f"needles found: {title}", columns, rows)


def _print_tasks(cells: "list[Row]", title: str) -> None:
    from sala.lab.bench.plots import label

    lengths = sorted({cell["length"] for cell in cells})
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    found = {(cell["task"], cell["length"]): cell for cell in cells}
    rows = [[task, *(f"{found[task, length]['score']:.0%}" for length in lengths)] for task in tasks]
    average = [sum(found[task, length]["score"] for task in tasks) / len(tasks) for length in lengths]
    rows.append(["all", *(f"{value:.0%}" for value in average)])
    _print(f"scores: {title}", ["task", *map(label, lengths)], rows)


def _print_reasoning(results: "list[Row]", title: str) -> None:
    rows = [
        [
            row["task"], "none" if row["budget"] is None else f"{row['budget']:,}", f"{row['answered']:.0%}",
            f"{row['correct']:.0%}", f"{row['stuck']:.0%}", f"{row['tokens']:,.0f}",
        ]
        for row in results
    ]  # fmt: skip
    _print(title, ["task", "budget", "answered", "correct", "stuck", "tokens"], rows)


def _mean_speeds(cells: "list[Row]") -> list[str]:
    out = []
    for name in ("prefill_per_second", "decode_per_second"):
        known = [cell[name] for cell in cells if cell[name] is not None]
        out.append(f"{sum(known) / len(known):,.1f}" if known else "–")
    return out


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
