"""`sala eval` and `perplexity`: quality by context length."""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sala.cli import flags as s
from sala.cli.eval_flags import MIN_LENGTH, Haystack, Lengths, OneAtATime
from sala.cli.eval_sources import sources
from sala.cli.official import Against, DataDirectory, EstimateOnly, Minutes, OfficialFlags, Plain, run_official
from sala.cli.official import official as official_command
from sala.cli.outputs import Run, output_file, plot_file, print_table
from sala.errors import InputError
from sala.options import Options

if TYPE_CHECKING:
    from sala.lab.eval.suite import Suite
    from sala.lab.report.record import ResultRow
    from sala.llm import LLM

eval = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Trials = Annotated[int, s.flag("Cases per cell.", min=1)]
SPARE_CTX = 512  # tokens of a chat format around a text of the longest length
MAX_NAME = 80  # characters of the task names in a file name
VALUES = ("number", "word", "uuid", "mixed")


@eval.command()
@s.derived
def needle(
    *,
    lengths: Lengths = "1K,2K,4K,8K",
    depths: Annotated[str, s.flag("Positions of the needle, in percent of the text.")] = "0,25,50,75,100",
    trials: Trials = 2,
    preset: Annotated[str, s.flag("varied (many wordings) or aurora (one sentence in filler).")] = "varied",
    keys: Annotated[int, s.flag("Needles in the text that differ in key and value only.", min=1)] = 1,
    values: Annotated[str, s.flag("What is hidden: number, word, uuid or mixed.")] = "mixed",
    haystack: Haystack = None,
    seed: s.Seed = 0,
    output: s.RecordFile = None,
    plot: s.PlotFile = None,
    force: s.Force = False,
    options: OneAtATime,
    verbose: s.Verbose = False,
) -> None:
    """Hide a fact in texts of several lengths and ask for it.

    At every length it is hidden at several depths.
    """
    from sala.lab.eval.runner import summarise
    from sala.lab.eval.suite import PRESETS

    s.one_of("preset", preset, PRESETS)
    s.one_of("values", values, VALUES)
    if preset == "aurora" and (keys > 1 or values != "mixed" or haystack is not None):
        raise InputError("preset", "aurora has its own needle and text", "leave out --keys, --values and --haystack")
    counts, places = s.counts(lengths, "lengths", MIN_LENGTH), _depths(depths)
    facts = {"seed": seed, "preset": preset, "keys": keys, "values": values}
    asked = {"lengths": counts, "depths": places, "trials": trials}
    run = _Evaluation("needle", options, output, plot, force, facts, asked)
    suite = run.open(haystack, verbose)
    kinds: Any = VALUES[:-1] if values == "mixed" else (values,)
    jobs = suite.needle(counts, places, trials, preset, keys, kinds)
    cells = summarise(run.measure(jobs, _tell_needle), ("length", "depth"))
    title = f"needles found: {run.model}, {_per_cell(trials)}"
    run.save(cells, title)
    _print_grid(cells, title)


@eval.command()
@s.derived
def ruler(
    *,
    tasks: Annotated[str, s.flag("Names separated by commas, or all.")] = "all",
    lengths: Lengths = "4K,8K",
    trials: Trials = 4,
    per_text: Annotated[int, s.flag("Trials that share a text, where a task allows it.", min=1)] = 1,
    questions: Annotated[
        Path | None, s.flag("Your own questions: text, question and answers per line.", metavar="FILE.jsonl")
    ] = None,
    haystack: Haystack = None,
    official: Annotated[bool, s.flag("The 13 tasks of the RULER paper, as lm-eval makes them.", "--official")] = False,
    data: DataDirectory = None,
    against: Against = None,
    plain: Plain = False,
    estimate: EstimateOnly = False,
    minutes: Minutes = None,
    seed: s.Seed = 0,
    output: s.RecordFile = None,
    plot: s.PlotFile = None,
    force: s.Force = False,
    options: OneAtATime,
    verbose: s.Verbose = False,
) -> None:
    """Run eight tasks on long texts, in the manner of RULER.

    single, multikey, multivalue, multiquery, chain, common, frequent, reading.
    """
    from sala.lab.eval.runner import summarise
    from sala.lab.eval.suite import QUESTIONS, RULER
    from sala.lab.eval.tasks.reading import read_passages

    if official:
        if questions is not None or per_text != 1:
            raise InputError("official", "has its own questions", "leave out --questions and --per-text")
        text = None if haystack is None else str(haystack)
        run_official(
            OfficialFlags(
                "ruler", tasks, lengths, str(trials), seed, text, data, against, plain, estimate, minutes, output, plot,
                force,
            ),
            options, verbose,
        )  # fmt: skip
        return
    of_official = {"data": data, "against": against, "plain": plain, "estimate": estimate, "minutes": minutes}
    for name in (name for name, value in of_official.items() if value):
        raise InputError(name, "is for the official tasks", "add --official")
    own = (QUESTIONS,) if questions is not None else ()
    chosen = _names(tasks, (*RULER, *own))
    counts = s.counts(lengths, "lengths", MIN_LENGTH)
    passages = read_passages(questions) if questions is not None else []
    digest = None if questions is None else hashlib.sha256(questions.read_bytes()).hexdigest()[:12]
    facts = {"seed": seed, "questions": questions and f"{questions.name} {digest}"}
    asked = {"tasks": chosen, "lengths": counts, "trials": trials, "per_text": per_text}
    run = _Evaluation("ruler", options, output, plot, force, facts, asked)
    jobs = run.open(haystack, verbose).ruler(chosen, counts, trials, per_text, passages)
    cells = summarise(run.measure(jobs, _tell_ruler), ("task", "length"))
    title = f"{run.model}, {_per_cell(trials)}"
    run.save(cells, f"long-context tasks: {title}")
    _print_tasks(cells, f"scores: {title}")


eval.command("official")(official_command)


@eval.command()
@s.derived
def reasoning(
    *,
    tasks: Annotated[str, s.flag("arithmetic, steps, constraints, or all.")] = "all",
    count: Annotated[int, s.flag("Problems of every kind.", "--count", "-c", min=1)] = 20,
    budget: Annotated[int | None, s.flag("Run once more with at most so many reasoning tokens.", min=0)] = None,
    max_tokens: Annotated[int, s.flag("Tokens of reasoning and answer.", "--max-tokens", "-n", min=1)] = 2048,
    seed: s.Seed = 0,
    output: s.RecordFile = None,
    force: s.Force = False,
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    """Pose small problems that have one right answer.

    Reports how many are answered, correct, or stuck in reasoning.
    """
    from sala.lab.eval.runner import summarise_reasoning
    from sala.lab.eval.suite import reasoning_tasks
    from sala.lab.eval.tasks.reasoning import KINDS

    kinds = _names(tasks, tuple(KINDS))
    budgets = [None] if budget is None else [None, budget]
    facts = {"seed": seed, "max_tokens": max_tokens, "max_batch": options.max_batch}
    asked = {"tasks": kinds, "count": count, "budgets": budgets}
    run = _Evaluation("reasoning", options, output, None, force, facts, asked)
    run.load(verbose)
    rows = run.measure(reasoning_tasks(kinds, count, seed, budgets), _tell_problem, max_tokens)
    run.save(summarise_reasoning(rows), f"{run.model}, {count} problem(s) of every kind", is_shown=True)


@eval.command()
@s.derived
def lm(
    *,
    tasks: Annotated[str, s.flag("Tasks of lm-eval, by name or YAML file, with commas between.")],
    include_path: Annotated[Path | None, s.flag("Directory with your own tasks.")] = None,
    shots: Annotated[int | None, s.flag("Examples before a question; by default as the task says.", min=0)] = None,
    limit: Annotated[float | None, s.flag("Questions per task, or below 1 their share.")] = None,
    chat: Annotated[bool, s.flag("Ask through the chat template.", "--chat")] = False,
    system: s.System = None,
    lengths: Annotated[str | None, s.flag("Tokens of texts that tasks make, as RULER's: 4K,128K.")] = None,
    max_length: Annotated[int | None, s.count_flag("Tokens of a question; by default the context.")] = None,
    max_tokens: Annotated[int, s.flag("Tokens of an answer, if the task does not say.", "--max-tokens", "-n")] = 256,
    gen_kwargs: Annotated[str | None, s.flag("Settings of answers, as JSON: '{\"temperature\": 0.6}'.")] = None,
    output: s.RecordFile = None,
    samples: Annotated[bool, s.flag("Write every question and answer to a file as well.", "--samples")] = False,
    force: s.Force = False,
    options: Annotated[Options, s.Use(spellings={"max_batch": "--batch"})],
) -> None:
    """Run tasks of lm-eval without a server.

    Prints a table and writes a record. An interrupted run is continued.
    """
    from importlib.metadata import version

    from sala.lab.eval.harness import adapter, evaluate, metadata_for, to_rows
    from sala.lab.eval.runner import facts_of

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if limit is not None and limit <= 0:
        raise InputError("limit", f"is {limit:g}", "it must be above 0")
    counts = [] if lengths is None else s.counts(lengths, "lengths", MIN_LENGTH)
    settings = None if gen_kwargs is None else _read_settings(gen_kwargs)
    wanted = {
        "tasks": names, "shots": shots, "limit": limit, "chat": chat, "system": system, "max_length": max_length,
        "max_tokens": max_tokens, "gen_kwargs": settings, "device": options.device, "dtype": options.dtype,
        "ctx": options.ctx, **({"lengths": counts} if counts else {}),
    }  # fmt: skip
    adapter()  # raises, before the model is loaded, if lm-eval is not installed
    path = s.find_model(options.model)
    metadata = metadata_for(names, path, counts)
    if counts:
        options = replace(options, ctx=options.ctx or counts[-1] + SPARE_CTX)
    file = output_file(output, default_name(names, path.name))
    sample_file = file.with_suffix(".samples.jsonl")
    run = Run("harness", path.name, wanted, file, None, force, *([sample_file] if samples else []))
    with s.load(options) as llm, run.resumable():
        run.learn(**facts_of(llm))
        results, target = evaluate(
            llm, names, {"max_length": max_length, "max_gen_toks": max_tokens, "log": run.open_log()}, include_path,
            metadata, num_fewshot=shots, limit=limit if limit is None or limit < 1 else int(limit),
            system_instruction=system, apply_chat_template=chat, fewshot_as_multiturn=chat,
            gen_kwargs=dict(settings or {}) or None, log_samples=samples,
        )  # fmt: skip
    if target.num_cut:
        s.note(f"{target.num_cut:,} requests were longer than {target.max_length:,} tokens: cut on the left")
    if samples:
        _write_samples(sample_file, results.get("samples") or {})
    record = run.to_record(to_rows(results))
    record.versions["lm-eval"] = version("lm-eval")
    run.finish(record, f"{path.name}, {', '.join(names)}")


def _read_settings(text: str) -> dict[str, Any]:
    """Read settings of answers; raise InputError for what is not a JSON object."""
    from sala.config import parse_object

    settings = parse_object(text)
    if settings is None:
        raise InputError("gen_kwargs", f"are {text[:80]!r}", 'give a JSON object, such as {"temperature": 0.6}')
    return settings


def _write_samples(file: Path, samples: dict[str, list[Any]]) -> None:
    """Write the questions and answers of every task, one per line."""
    from sala.checkpoint.writer import write_atomically

    kept = [{"task": task, **one} for task, many in samples.items() for one in many]
    write_atomically(file, "".join(json.dumps(one, ensure_ascii=False, default=str) + "\n" for one in kept))


eval.command("sources")(sources)


@s.derived
def perplexity(
    *,
    file: Annotated[Path, s.argument('A text, or .jsonl with a "text" per line.')],
    lengths: Annotated[str, s.flag("Tokens that the model sees, e.g. 1K,16K,128K.")] = "1K,4K,16K",
    stride: Annotated[int | None, s.count_flag("Tokens from window to window; by default a window's length.")] = None,
    tokens: Annotated[int | None, s.count_flag("Tokens of the text to use; by default all.")] = None,
    output: s.RecordFile = None,
    plot: s.PlotFile = None,
    force: s.Force = False,
    options: Annotated[Options, s.Use(without=("ctx",), defaults={"max_batch": 1, "snapshots": 0})],
) -> None:
    from sala.cli.progress import ProgressBar
    from sala.config import SalaConfig
    from sala.lab.eval import perplexity as work
    from sala.lab.eval.documents import read_documents
    from sala.lab.eval.runner import facts_of

    counts = s.counts(lengths, "lengths")
    for name, count in (("stride", stride), ("tokens", tokens)):
        if count is not None and count < 2:
            raise InputError(name, f"is {count}", "it must be at least 2")
    if stride is not None and stride > max(counts):
        raise InputError("stride", f"is {stride:,}", f"it must not be longer than a window, {max(counts):,}")
    documents = read_documents(file.expanduser())
    path = s.find_model(options.model)
    record_file = output_file(output, f"perplexity-{path.name}.json")
    if record_file.absolute() == file.absolute():
        raise InputError("output", f"{record_file} is the text itself", "choose another name")
    settings: dict[str, Any] = {"file": file.name, "stride": stride, "device": options.device}
    run = Run("perplexity", path.name, settings, record_file, plot_file(plot, record_file), force)
    ctx = min(max(counts), SalaConfig.load(path).max_position_embeddings)
    with s.load(options, ctx=ctx) as llm:
        text = work.to_text(llm, str(file), documents, tokens)
        chosen = work.choose_lengths(counts, len(text.ids), llm.ctx)
        for count in sorted(set(counts) - set(chosen)):
            s.note(f"{count:,} tokens left out: the text has {len(text.ids):,}, the context holds {llm.ctx:,}")
        run.learn(
            text=text.digest, tokens=len(text.ids), lengths=chosen, **facts_of(llm), dtype=llm.capacity.dtype
        )  # fmt: skip
        with run.resumable(), ProgressBar() as bar:
            results = list(work.measure(llm, text, chosen, stride, run.open_log(), bar))
    run.finish(run.to_record(results), f"{path.name} on {file.name}")


class _Evaluation(Run):
    """What every evaluation does before and after: from the flags to the files.

    `facts` are what the result of a case depends on, `asked` is what selects the cases; both identify the run.
    """

    llm: "LLM"

    def __init__(
        self,
        kind: str,
        options: Options,
        output: Path | None,
        plot: Path | None,
        force: bool,
        facts: dict[str, Any],
        asked: dict[str, Any],
    ) -> None:
        """Raise for everything that can be refused before the model is loaded."""
        from sala.config import SalaConfig
        from sala.lab.eval.runner import check_lengths

        path, lengths = s.find_model(options.model), asked.get("lengths", ())
        self._options, self._longest = options, max(lengths, default=0)
        if lengths:
            check_lengths(lengths, options.ctx or SalaConfig.load(path).max_position_embeddings)
            self._options = replace(options, ctx=options.ctx or self._longest)
        file = output_file(output, f"{kind}-{path.name}.json")
        picture = plot_file(plot, file) if kind != "reasoning" else None
        self.facts, self._table, self._notes = facts, file.with_suffix(".csv"), list[str]()
        super().__init__(kind, path.name, facts | asked, file, picture, force, self._table)

    def load(self, verbose: bool) -> None:
        """Load the model, unless the files belong to another run."""
        from sala import __version__
        from sala.backends import name_device
        from sala.lab.eval.runner import facts_of

        self.learn(sala=__version__, device=name_device(self._options.backend, self._options.device))
        self.llm = s.load(self._options, verbose)
        self.learn(**facts_of(self.llm), dtype=self.llm.capacity.dtype)

    def learn(self, **settings: Any) -> None:
        self.facts |= settings
        super().learn(**settings)

    def open(self, haystack: Path | None, verbose: bool) -> "Suite":
        """Load the model; return the suite of its cases."""
        from sala.lab.eval.documents import read_source
        from sala.lab.eval.suite import Suite
        from sala.lab.eval.tasks.case import PromptWriter

        source = read_source(haystack) if haystack is not None else None
        self.learn(haystack="prose" if source is None else source.name)
        self.load(verbose)
        if source is not None and sum(map(len, source.documents)) < 8 * self._longest:
            count = sum(map(len, self.llm.tokenizer.encode_many(source.documents)))
            if count < self._longest:
                s.note(f"{haystack} has {count:,} tokens; longer texts repeat it")
        return Suite(
            PromptWriter.for_model(self.llm.tokenizer), lambda: source or read_source(None), self.facts["seed"]
        )

    def measure(
        self, jobs: Sequence[Any], describe: "Callable[[ResultRow], str]", max_tokens: int | None = None
    ) -> "list[ResultRow]":
        """Run the cases, or with `max_tokens` the problems. After Ctrl-C say how many are done and how to continue."""
        from sala.cli.progress import EvaluationProgress
        from sala.lab.eval.runner import run_cases, run_problems
        from sala.lab.report.record import key_of

        log, keys = self.open_log(), [key_of(self.facts, job.labels) for job in jobs]

        def num_known() -> int:
            return sum(log.find(key) is not None for key in keys)

        self._notes = self._remark(num_known(), len(keys))
        try:
            with EvaluationProgress(describe) as progress:
                if max_tokens is None:
                    return run_cases(self.llm, jobs, log, self.facts, progress)
                return run_problems(self.llm, jobs, max_tokens, log, self.facts, progress)
        except KeyboardInterrupt:
            s.note(f"stopped; {num_known()} of {len(keys)} cases are in {self.log}")
            s.note(f"the same command continues from there: {shlex.join(['sala', *sys.argv[1:]])}")
            raise

    def save(self, results: "list[ResultRow]", title: str, is_shown: bool = False) -> None:
        """Write the record, the table and the picture."""
        from sala.lab.eval.runner import write_csv

        write_csv(results, self._table)
        record = self.to_record(results)
        record.notes = self._notes
        self.finish(record, title, is_shown)
        s.note(f"every answer is in {self.log}")

    def _remark(self, num_known: int, num_cases: int) -> list[str]:
        """Return what a reader of the speeds must know: cases of an earlier run may have had other conditions."""
        from sala.lab.report.record import Record

        if num_known == num_cases and self.record is not None and self.record.exists() and not self.force:
            return Record.load(self.record).notes
        if not num_known:
            return []
        text = "come from an earlier run, perhaps with other threads or load: speeds mix both"
        return [f"{num_known} of {num_cases} cases {text}"]


def _depths(text: str) -> list[float]:
    try:
        depths = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise InputError("depths", f"are {text!r}", "give percentages, e.g. 0,50,100") from None
    if not all(0 <= depth <= 100 for depth in depths):
        raise InputError("depths", f"are {text!r}", "they go from 0 (start) to 100 (end)")
    return depths


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = known if text == "all" else dict.fromkeys(part.strip() for part in text.split(","))
    return [s.one_of("tasks", name, known) for name in names]


def _per_cell(trials: int) -> str:
    return f"{trials} trial{'s' if trials > 1 else ''} per cell"


def default_name(tasks: list[str], model: str) -> str:
    """Return the file name of a run; many tasks are shortened to a hash, so that other tasks get another name."""
    joined = "+".join(re.sub(r"[^\w.-]", "-", Path(task).stem if "/" in task else task) for task in tasks)
    if len(joined) > MAX_NAME:
        joined = f"{joined[:MAX_NAME]}-{hashlib.sha256(joined.encode()).hexdigest()[:8]}"
    return f"lm-{joined}-{model}.json"


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
    from sala.lab.report.statistics import ratio_text
    from sala.options.schema import length_label

    depths = sorted({cell["depth"] for cell in cells})
    rows = []
    for length in sorted({cell["length"] for cell in cells}):
        line = sorted((cell for cell in cells if cell["length"] == length), key=lambda cell: cell["depth"])
        counts = [ratio_text(cell["exact"], cell["trials"]) for cell in line]
        means = [_mean(line, name) for name in ("prefill_per_second", "decode_per_second")]
        rows.append([length_label(length), *counts, *means])
    headings = ["tokens", *(f"{depth:g} %" for depth in depths), "prefill tok/s", "decode tok/s"]
    print_table(title, headings, rows)


def _print_tasks(cells: "list[ResultRow]", title: str) -> None:
    from sala.options.schema import length_label

    lengths = sorted({cell["length"] for cell in cells})
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    found = {(cell["task"], cell["length"]): cell for cell in cells}
    rows = [[task, *(f"{found[task, length]['score']:.0%}" for length in lengths)] for task in tasks]
    average = [sum(found[task, length]["score"] for task in tasks) / len(tasks) for length in lengths]
    rows.append(["all", *(f"{value:.0%}" for value in average)])
    print_table(title, ["task", *map(length_label, lengths)], rows, [True])


def _mean(cells: "list[ResultRow]", name: str) -> str:
    known = [cell[name] for cell in cells if cell[name] is not None]
    return f"{sum(known) / len(known):,.1f}" if known else "–"
