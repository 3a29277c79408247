"""`sala eval official` and `sala eval ruler --official`: published long-context benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sala.cli import flags as s
from sala.cli.outputs import Run, output_file, plot_file, print_table
from sala.errors import InputError
from sala.options import Options

if TYPE_CHECKING:
    from sala.lab.eval.official.benchmarks import Benchmark
    from sala.lab.eval.official.case import Prepared
    from sala.lab.eval.official.models import AnsweringModel
    from sala.lab.eval.official.request import BenchmarkRequest
    from sala.lab.report.record import Log, ResultRow

MIN_LENGTH = 512
DataDirectory = Annotated[
    Path | None, s.flag("Directory with the benchmark's files; by default they are downloaded.", metavar="DIR")
]
Against = Annotated[str | None, s.flag("Dense model to ask the same through transformers.", metavar="DIR")]
Plain = Annotated[bool, s.flag("Continue the text instead of the model's chat format.", "--plain")]
JudgeDirectory = Annotated[
    str | None,
    s.flag("Model of entailment that judges citations (helmet), e.g. t5_xxl_true_nli_mixture.", metavar="DIR"),
]
EstimateOnly = Annotated[bool, s.flag("Only say how many tokens and how much time it takes.", "--estimate")]
Minutes = Annotated[float | None, s.flag("Start no new case after this many minutes per model.", "--minutes")]


@dataclass(frozen=True)
class OfficialFlags:
    """What the flags of both commands say."""

    benchmark: str
    tasks: str
    lengths: str | None
    limit: str
    seed: int
    haystack: str | None
    data: Path | None
    against: str | None
    is_plain: bool
    is_estimate: bool
    minutes: float | None
    output: Path | None
    plot: Path | None
    force: bool
    judge: str | None = None


@s.derived
def official(
    *,
    benchmark: Annotated[
        str, s.argument("ruler, longbench2, babilong, infinitebench, mrcr, graphwalks, nolima, helmet.")
    ],
    tasks: Annotated[str, s.flag("Names separated by commas, or all.")] = "all",
    lengths: Annotated[str | None, s.flag("Tokens of the texts, e.g. 4K,32K,1M.")] = None,
    limit: Annotated[str, s.flag("Cases of each task: one number, or one for each length.")] = "20",
    haystack: Annotated[str | None, s.flag("Text in place of RULER's essays.", metavar="prose|FILE|DIR")] = None,
    data: DataDirectory = None,
    against: Against = None,
    judge: JudgeDirectory = None,
    plain: Plain = False,
    estimate: EstimateOnly = False,
    minutes: Minutes = None,
    seed: s.Seed = 0,
    output: s.RecordFile = None,
    plot: s.PlotFile = None,
    force: s.Force = False,
    options: Annotated[Options, s.Use(defaults={"max_batch": 1})],
    verbose: s.Verbose = False,
) -> None:
    """Run a published long-context benchmark.

    Cases that begin alike are read once. An interrupted run continues.
    """
    asked = OfficialFlags(
        benchmark, tasks, lengths, limit, seed, haystack, data, against, plain, estimate, minutes, output, plot, force,
        judge,
    )  # fmt: skip
    run_official(asked, options, verbose)


def _find_dense(source: str) -> Path:
    from sala.lab.dense import find_dense, need_transformers

    path = find_dense(source, "against", "give the directory of a dense model")
    need_transformers()
    return path


def run_official(asked: OfficialFlags, options: Options, verbose: bool) -> None:
    """Make the cases, ask one model or two, and write the record."""
    from sala.lab.eval.official.benchmarks import find_benchmark
    from sala.text.tokenizer import Tokenizer

    benchmark = find_benchmark(asked.benchmark)
    path = s.find_model(options.model)
    dense = None if asked.against is None else _find_dense(asked.against)
    if dense is not None and dense.name == path.name:
        raise InputError("against", f"has the name of the model, {path.name}", "rename one of the directories")
    file = output_file(asked.output, f"{asked.benchmark}-{path.name}.json")
    request = _to_request(asked, benchmark, Tokenizer.load(path))
    settings = {
        "benchmark": asked.benchmark, "tasks": list(request.tasks), "lengths": list(request.lengths),
        "limit": list(request.limits.values()), "seed": asked.seed, "format": "plain" if asked.is_plain else "chat",
        "haystack": asked.haystack, "against": dense and dense.name,
        **({} if asked.judge is None else {"judge": Path(asked.judge).expanduser().resolve().name}),
    }  # fmt: skip
    run = Run("official", path.name, settings, file, plot_file(asked.plot, file), asked.force)
    session = _Session(asked, benchmark, request, run, options)
    session.make_questions()
    rows = session.ask_ours(path, verbose)
    if dense is not None:
        rows += session.ask_dense(dense)
    if not asked.is_estimate:
        session.save(rows, session.judge(rows))


def _to_request(asked: OfficialFlags, benchmark: "Benchmark", tokenizer: Any) -> "BenchmarkRequest":
    from sala.lab.eval.official.data import Data
    from sala.lab.eval.official.request import BenchmarkRequest

    names = benchmark.tasks if asked.tasks == "all" else [*dict.fromkeys(map(str.strip, asked.tasks.split(",")))]
    tasks = [s.one_of("tasks", name, (*benchmark.tasks, *benchmark.more)) for name in names]
    lengths = s.counts(asked.lengths or benchmark.lengths, "lengths", MIN_LENGTH)
    if asked.judge is not None and (asked.benchmark != "helmet" or not Path(asked.judge).expanduser().is_dir()):
        what = "is no directory" if asked.benchmark == "helmet" else f"does not apply to {asked.benchmark}"
        raise InputError("judge", what, "give the directory of a model of entailment for helmet, or leave it out")
    if asked.haystack is not None and asked.benchmark != "ruler":
        raise InputError("haystack", f"does not apply to {asked.benchmark}", "leave it out")
    data = Data(asked.data and asked.data.expanduser())
    limits, has_judge = _limits(asked.limit, lengths), asked.judge is not None
    return BenchmarkRequest(tasks, limits, tokenizer, data, asked.seed, asked.haystack, has_judge)


def _limits(text: str, lengths: Sequence[int]) -> dict[int, int]:
    """Return the number of cases for each length."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError("limit", f"is {text!r}", "give a number, or one for each length, e.g. 20,20,5") from None
    numbers = numbers * len(lengths) if len(numbers) == 1 else numbers
    if len(numbers) != len(lengths) or min(numbers) < 1:
        message = f"is {text!r}, and there are {len(lengths)} lengths"
        raise InputError("limit", message, "give one number from 1 on, or one for each length")
    return dict(zip(lengths, numbers, strict=True))


class _Session:
    """The questions of a run, and the models that answer them."""

    def __init__(
        self, asked: OfficialFlags, benchmark: "Benchmark", request: "BenchmarkRequest", run: Run, options: Options
    ) -> None:
        self.asked, self.benchmark, self.request, self.run, self.options = asked, benchmark, request, run, options
        self._notes = request.notes

    def make_questions(self) -> None:
        from sala.cli.progress import ProgressBar

        with ProgressBar(is_kept=False, is_quiet=True) as bar:
            total = len(self.request.tasks) * len(self.request.lengths)
            done = iter(range(total))
            self.questions = [
                *self.benchmark.make(self.request, lambda task, length: bar("making", next(done, total), total, task))
            ]
        if not self.questions:
            raise InputError("lengths", "match no case", "choose other lengths, or other data")
        self.run.learn(data=dict(self.request.data.used))

    def ask_ours(self, path: Path, verbose: bool) -> "list[ResultRow]":
        from sala.config import SalaConfig
        from sala.lab.eval.official.case import QuestionWriter
        from sala.lab.eval.official.models import EngineModel
        from sala.lab.eval.runner import facts_of

        writer = QuestionWriter(self.request.tokenizer, self.asked.is_plain)
        cases = self._fitting(
            [*map(writer.prepare, self.questions)], SalaConfig.load(path).max_position_embeddings, path.name
        )
        longest = max((case.num_tokens for case in cases), default=0)
        options = replace(self.options, ctx=self.options.ctx or -(-longest // 64) * 64)
        if options.ctx is not None and longest > options.ctx:
            raise InputError("ctx", f"is {options.ctx:,}, and a case has {longest:,}", "leave it out, or raise it")
        with s.load(options, verbose) as llm, self.run.resumable():
            fingerprint = " ".join([*facts_of(llm).values(), llm.capacity.dtype])
            self.run.learn(fingerprint=fingerprint)
            return self._ask(EngineModel(llm, path.name, fingerprint), cases)

    def ask_dense(self, path: Path) -> "list[ResultRow]":
        """Ask the same of the dense model; what is longer than its context is left out."""
        from sala.lab.eval.official.case import QuestionWriter
        from sala.lab.eval.official.models import TransformersModel

        model = TransformersModel(path, self.options.device)
        writer = QuestionWriter(model.tokenizer, self.asked.is_plain)
        known = [one for one in self.questions if not self.benchmark.has_lengths or one.length <= model.max_tokens]
        with self.run.resumable():
            return self._ask(model, self._fitting([*map(writer.prepare, known)], 0, path.name))

    def _fitting(self, cases: "list[Prepared]", max_tokens: int, name: str) -> "list[Prepared]":
        """Return the cases that fit into a context; of a dense model, that is, those of a length that it holds."""
        kept = [case for case in cases if not max_tokens or case.num_tokens <= max_tokens]
        left_out = len(self.questions) - len(kept)
        if left_out:
            self._notes.append(f"{name}: {left_out} of {len(self.questions)} cases are longer than its context")
            s.note(self._notes[-1])
        if not kept and max_tokens:
            raise InputError("lengths", f"are beyond the context of {name}, {max_tokens:,} tokens", "ask for less")
        return kept

    def _ask(self, model: "AnsweringModel", cases: "Sequence[Prepared]") -> "list[ResultRow]":
        from sala.cli.progress import EvaluationProgress
        from sala.lab.eval.official.run import keys_of, pending, run

        log, conditions = self.run.open_log(), self._conditions()
        keys = keys_of(cases, model)
        self._notes += self._resumed(model, log, keys, conditions)
        self._tell_estimate(model, pending(cases, keys, log), cases)
        if self.asked.is_estimate:
            return []
        with EvaluationProgress(_describe) as progress:
            rows = run(model, cases, log, conditions, progress, self.asked.minutes)
        if len(rows) < len(cases):
            self._notes.append(f"{model.name}: {len(rows)} of {len(cases)} cases were asked, short lengths first")
        return rows

    def _conditions(self) -> dict[str, Any]:
        """Return what speeds depend on."""
        import torch

        from sala import __version__

        return {"sala": __version__, "device": self.options.device, "threads": torch.get_num_threads()}

    def _resumed(self, model: "AnsweringModel", log: "Log", keys: Sequence[str], now: dict[str, Any]) -> list[str]:
        """Say how many answers are of earlier runs, and under which other conditions."""
        known = [row for row in map(log.find, keys) if row is not None]
        others = [row.get("conditions", {}) for row in known if row.get("conditions", {}) != now]
        if not others:
            return []
        changed = sorted(
            {
                f"{name} {one.get(name)} (now {now[name]})"
                for one in others
                for name in now
                if one.get(name) != now[name]
            }
        )
        return [f"{model.name}: {len(others)} of {len(keys)} cases were run under other settings: {', '.join(changed)}"]

    def _tell_estimate(self, model: "AnsweringModel", steps: Any, cases: "Sequence[Prepared]") -> None:
        from sala.cli.progress import duration
        from sala.lab.eval.official.plan import Volume, arrange

        volume, whole = Volume.of(steps), Volume.of(arrange(cases))
        share = f"{1 - whole.read / whole.asked:.0%} of it shared" if whole.asked else ""
        s.note(
            f"{model.name}: {whole.num_cases} cases ask for {whole.asked:,} tokens, "
            f"{whole.read:,} are to be read ({share})"
        )
        if steps:
            seconds = volume.seconds(*model.speeds())
            s.note(
                f"{len(steps)} to go: {volume.read:,} tokens to read, at most {volume.written:,} to write, "
                f"about {duration(seconds)}"
            )

    def judge(self, rows: "list[ResultRow]") -> "list[ResultRow]":
        """Return the scores of citations, if there is a model that judges them."""
        if self.asked.judge is None:
            return []
        from sala.lab.eval.official.citations import EntailmentModel, judge_citations, summarise_citations

        model = EntailmentModel(Path(self.asked.judge).expanduser(), self.options.device)
        return summarise_citations(judge_citations(self.questions, rows, model))

    def save(self, rows: "list[ResultRow]", more: "Sequence[ResultRow]" = ()) -> None:
        """Write the record with `more` cells, print the scores, and say how much was read."""
        from sala.lab.eval.official.run import summarise

        cells = [*summarise(rows, self.benchmark.metric, self.benchmark.whole), *more]
        record = self.run.to_record(cells)
        asked = sum(row["prompt_tokens"] for row in rows)
        read = asked - sum(row["cached_tokens"] for row in rows)
        record.notes = [*self._notes, f"{asked:,} tokens of prompts were asked for, {read:,} were read"]
        title = f"{self.benchmark.title}: {self.run.model}"
        _print_scores(cells, title, "" if self.asked.haystack else self.asked.benchmark)
        self.run.finish(record, title, is_shown=False)
        for note in record.notes:
            s.note(note)
        s.note(f"every answer is in {self.run.log}")


def _describe(row: "ResultRow") -> str:
    reused = f", {row['cached_tokens']:,} reused" if row["cached_tokens"] else ""
    tokens = f"{row['prompt_tokens']:,} tokens{reused}"
    return f"{row['model']}, {row['task']}, {row['length']:,}: {row['score']:.0%} ({tokens})"


def _score(cell: "ResultRow") -> str:
    from sala.lab.report.statistics import interval

    if not cell["trials"]:
        return f"{100 * cell['score']:.1f}"
    low, high = interval(cell["score"], cell["trials"])
    return f"{100 * cell['score']:.0f} [{100 * low:.0f}–{100 * high:.0f}] n={cell['trials']}"


def _print_scores(cells: "Sequence[ResultRow]", title: str, benchmark: str) -> None:
    """Print the scores by length, with those that others have published for the same tasks and lengths."""
    from sala.lab.report.official import published
    from sala.options.schema import length_label

    lengths, tasks = sorted({cell["length"] for cell in cells}), {cell["task"] for cell in cells}
    others = [row for row in published(benchmark)[0] if row["length"] in lengths and row["task"] in tasks]
    cells = [*cells, *({**row, "model": f"{row['model']} (published)"} for row in others)]
    found = {(cell["model"], cell["task"], cell["length"]): cell for cell in cells}
    rows = []
    for model, task in dict.fromkeys((cell["model"], cell["task"]) for cell in cells):
        line = [model, task]
        for length in lengths:
            cell = found.get((model, task, length))
            line.append("–" if cell is None else _score(cell))
        rows.append(line)
    print_table(
        f"{title}, percent with 95% interval and cases",
        ["model", "task", *map(length_label, lengths)],
        rows,
        [True, True],
    )
