"""`sala bench`: speed and memory by context length or number of requests, against a dense model, and by kernel."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from sala.cli import flags as s
from sala.cli.outputs import relative, resumable
from sala.cli.tables import print_record
from sala.errors import InputError, SalaError
from sala.options import Options

if TYPE_CHECKING:
    import torch

    from sala.backends.torch.cases import KernelCase
    from sala.lab.bench.dense import DenseModel
    from sala.lab.bench.measure import Latency, Throughput
    from sala.lab.bench.roofline import KernelResult, Roofline
    from sala.lab.bench.target import BenchTarget
    from sala.lab.report.record import Record

T = TypeVar("T", "Latency", "Throughput")


class Benches(TyperGroup):
    """`sala bench --against MODEL` is `sala bench against MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flag, has_value, value = (args[0] if args else "").partition("=")
        if flag == "--against":
            args = ["against", *([value] if has_value else []), *args[1:]]
        return super().parse_args(ctx, args)


bench = typer.Typer(cls=Benches, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
Random = Annotated[
    str | None, typer.Option(metavar="SHAPE", help="Random weights instead of a model: tiny or released.")
]
NewTokens = Annotated[int, typer.Option("--new-tokens", "-n", help="Tokens of an answer.", min=2)]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Record of the results.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Picture: .png, .pdf or .svg.")]


# the measurements set these themselves
OneModel = Annotated[Options, s.Use(without=("ctx", "max_batch", "snapshots", "cache_dir", "cache_disk"))]


@bench.command()
@s.derived
def latency(
    *,
    random: Random = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, e.g. 4K,32K,128K,1M.")] = "1K,4K,16K",
    new_tokens: NewTokens = 64,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    options: OneModel,
) -> None:
    """Measure one request at a time, of several lengths: time to first token, speed, memory."""
    from sala.lab.bench.measure import measure_latency
    from sala.lab.report.charts import length_label

    counts = read_counts(lengths, "lengths")
    check_files(json_file, plot)
    target = _open(options, random, counts[0] + new_tokens)
    results = _measure_all(counts, lambda count: measure_latency(target, count, new_tokens), length_label)
    record = _record("latency", _facts(target, new_tokens), _with_ratios(results))
    _finish(record, _title(target), json_file, plot)


@bench.command()
@s.derived
def throughput(
    *,
    random: Random = None,
    batches: Annotated[str, typer.Option(help="Requests at a time, e.g. 1,2,4,8,16.")] = "1,2,4,8",
    length: Annotated[int, typer.Option(parser=s.count, metavar="COUNT", help="Tokens of every prompt.")] = 512,
    new_tokens: NewTokens = 64,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    options: OneModel,
) -> None:
    """Measure several requests at a time: tokens per second of all together."""
    from sala.lab.bench.measure import measure_throughput

    counts = read_counts(batches, "batches")
    if length < 1:
        raise InputError("length", f"is {length}", "it must be at least 1")
    check_files(json_file, plot)
    target = _open(options, random, length + new_tokens, counts[0])
    results = _measure_all(
        counts, lambda count: measure_throughput(target, count, length, new_tokens), lambda count: f"{count} at a time"
    )
    facts = {**_facts(target, new_tokens), "length": length}
    record = _record("throughput", facts, _with_ratios(results))
    _finish(record, f"{_title(target)}, prompts of {length:,} tokens", json_file, plot)


@bench.command()
@s.derived
def kernels(
    *,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, e.g. 8K,128K.")] = "8K,128K",
    json_file: JsonFile = None,
    plot: PlotFile = None,
    options: Annotated[Options, s.Use(only=("device",))],
) -> None:
    """Measure every Triton kernel alone, at the released shapes: time, share of the roofline, and against a peer."""
    counts = read_counts(lengths, "lengths")
    where = _gpu(options.device)
    check_files(json_file, plot)
    name, roofline, results = _measure_kernels(where, counts)
    products, moved = roofline.flops_per_s / 1e12, roofline.bytes_per_s / 1e12
    title = f"kernels, bfloat16, {name}: {products:,.0f} TFLOP/s and {moved:.2f} TB/s at best"
    facts = {
        "subject": title, "device": str(where), "dtype": "bfloat16", "lengths": counts,
        "tflops": products, "tb_per_s": moved,
    }  # fmt: skip
    _finish(_record("kernels", facts, [asdict(one) for one in results]), title, json_file, plot)
    if all(one.ms is None for one in results):
        raise SalaError(f"no kernel ran: {results[0].error}", "see what is wrong: sala doctor")


@bench.command()
@s.derived
def against(
    *,
    dense: Annotated[
        str, typer.Argument(help="A dense model for transformers: its directory, qwen3-8b-random or tiny-random.")
    ],
    random: Random = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, e.g. 4K,32K,128K.")] = "1K,4K,16K",
    new_tokens: NewTokens = 64,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    options: OneModel,
    force: Annotated[bool, typer.Option("--force", help="Replace the figures of another run.")] = False,
) -> None:
    """Compare with a dense model in transformers, in the same run: from which length on ours is faster."""
    from sala.lab.bench.dense import MEASURES, check_dense, compare, need_transformers, open_dense, verdict
    from sala.lab.bench.measure import measure_latency
    from sala.lab.bench.target import release
    from sala.lab.report.charts import length_label
    from sala.lab.report.record import Record

    counts = read_counts(lengths, "lengths")
    check_files(json_file, plot)
    need_transformers()
    check_dense(dense, options, counts[0] + new_tokens)
    target = _open(options, random, counts[0] + new_tokens)
    facts = {**_facts(target, new_tokens), "dense": dense, "lengths": counts}
    record = Record("against", target.name, facts)
    if json_file is not None and not force:
        record.check(json_file)
    log = None if json_file is None else json_file.with_suffix(".jsonl")
    resume = _Resume(log, facts)
    title, where, precision = _title(target), target.device, target.dtype
    with resumable(log):
        s.note(f"ours: {title}")
        measure = resume("ours", partial(measure_latency, target, new_tokens=new_tokens))
        ours = _measure_all(counts, measure, length_label)
        del target, measure  # one model in memory at a time
        release(where)
        s.note(f"theirs: {dense}")
        theirs = _measure_dense(lambda: open_dense(dense, where, precision), counts, new_tokens, resume)
    record.results = compare(ours, theirs)
    _show(record, f"{title}, against {dense}", plot)
    for name in MEASURES:
        s.note(f"{name.replace('_', ' ')}: {verdict(record.results, name)}")
    if json_file is not None:
        record.plots = [] if plot is None else [relative(plot, json_file.parent)]
        record.save(json_file, force)


def _measure_dense(
    load: Callable[[], "DenseModel"], counts: Sequence[int], new_tokens: int, resume: "_Resume"
) -> list["Latency"]:
    """Measure the dense model; it is loaded only if some length is not in the log."""
    from sala.lab.bench.dense import measure_dense
    from sala.lab.report.charts import length_label

    loaded = cache(load)
    measure = resume("dense", lambda count: measure_dense(loaded(), count, new_tokens))
    return _measure_all(counts, measure, length_label)


class _Resume:
    """The log of a comparison: figures of an interrupted run are reused, new ones are logged at once."""

    def __init__(self, file: Path | None, facts: dict[str, Any]) -> None:
        from sala.lab.report.record import Log

        self._log = None if file is None else Log(file)
        self._facts = {name: value for name, value in facts.items() if name != "lengths"}

    def __call__(self, who: str, measure: Callable[[int], "Latency"]) -> Callable[[int], "Latency"]:
        from sala.lab.bench.measure import Latency
        from sala.lab.report.record import key_of

        def find_or_measure(count: int) -> Latency:
            key = key_of(self._facts, {"who": who, "num_tokens": count})
            row = None if self._log is None else self._log.find(key)
            found = measure(count) if row is None else Latency(**row)
            if self._log is not None and row is None:
                self._log.append(key, asdict(found))
            return found

        return find_or_measure


def read_counts(text: str, name: str) -> list[int]:
    counts = sorted({s.count(part) for part in text.split(",")})
    if counts[0] < 1:
        raise InputError(name, f"hold {counts[0]}", "they must be at least 1")
    return counts


def check_files(json_file: Path | None, plot: Path | None) -> None:
    """Raise before anything is measured if the results could not be written."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise InputError("file", f"{json_file} cannot be written", "its directory does not exist")
    if plot is not None:
        from sala.lab.report.charts import check_plot

        check_plot(plot)


def _open(options: Options, random: str | None, num_tokens: int, batch: int = 1) -> "BenchTarget":
    """Load the model, if memory suffices for sequences of `num_tokens`, the shortest that will be measured."""
    from sala.lab.bench.target import open_checkpoint, open_random

    if random is not None:
        return open_random(random, options, num_tokens, batch)
    return open_checkpoint(s.find_model(options.model), options)


def _gpu(device: str) -> "torch.device":
    """Return the GPU; raise SalaError if the kernels do not run on it."""
    from sala.backends.torch.kernels.triton_kernels import why_not
    from sala.backends.torch.loader import pick_device

    where = pick_device(device)
    reason = why_not(where)
    if reason is not None:
        raise SalaError(
            f"the Triton kernels do not run on {where}: {reason}",
            "`sala doctor` says what this machine has; `sala bench latency` measures a model on any device",
        )
    return where


def _measure_kernels(where: "torch.device", lengths: Sequence[int]) -> tuple[str, "Roofline", list["KernelResult"]]:
    """Return the name of the GPU, its roofline, and the results of the kernels."""
    import torch

    from sala.backends.torch.cases import Shapes
    from sala.lab.bench.roofline import measure_roofline, timed_cases

    with torch.cuda.device(where):
        roofline = measure_roofline(where)
        results = _time_all(timed_cases(Shapes(where, tuple(lengths))), roofline)
    return torch.cuda.get_device_name(where), roofline, results


def _time_all(cases: Sequence["KernelCase"], roofline: "Roofline") -> list["KernelResult"]:
    """Measure one kernel after another; a failure is a result, and the rest goes on."""
    from sala.cli.progress import ProgressBar
    from sala.lab.bench.roofline import measure

    results = []
    with ProgressBar(is_kept=False, is_quiet=True) as bar:
        for index, one in enumerate(cases):
            name, turn = f"{one.name}, {one.size}", f"({index + 1} of {len(cases)})"
            bar("measuring", index, len(cases), name)
            found = measure(one, roofline)
            results.append(found)
            if found.ms is None:
                bar.print(f"{name}: failed: {found.error} {turn}")
            else:
                bar.print(f"{name}: {_ms(found.ms)} ms, {found.share:.0%} of the roofline {turn}")
    return results


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _measure_all(counts: Sequence[int], measure: Callable[[int], T], name: Callable[[int], str]) -> list[T]:
    """Measure the smallest first; where one does not fit into memory, larger ones are left out."""
    from sala.cli.progress import ProgressBar

    results: list[T] = []
    with ProgressBar(is_kept=False, is_quiet=True) as bar:
        for index, count in enumerate(counts):
            bar("measuring", index, len(counts), name(count))
            try:
                found = measure(count)
            except (SalaError, MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                    raise
                if not results:
                    raise SalaError(f"{name(count)}: {_reason(error)}") from None
                bar.print(f"{name(count)} and above left out: {_reason(error)}")
                break
            results.append(found)
            speeds = f"prefill {found.prefill_per_second:,.0f} tok/s, decode {found.decode_per_second:,.1f} tok/s"
            bar.print(f"{name(count)}: {speeds} ({index + 1} of {len(counts)})")
    return results


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, SalaError) else "out of memory"


def _title(target: "BenchTarget") -> str:
    import torch

    kind = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    where = kind or f"{target.device.type}, {torch.get_num_threads()} thread(s)"
    return f"{target.name}, {str(target.dtype).removeprefix('torch.')}, {where}"


def _facts(target: "BenchTarget", new_tokens: int) -> dict[str, Any]:
    return {
        "subject": _title(target), "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."), "new_tokens": new_tokens,
    }  # fmt: skip


def _with_ratios(results: Sequence[Any]) -> list[dict[str, Any]]:
    base = results[0].decode_per_second
    return [{**asdict(one), "decode_ratio": one.decode_per_second / base} for one in results]


def _record(kind: str, facts: dict[str, Any], results: list[dict[str, Any]]) -> "Record":
    from sala.lab.report.record import Record

    return Record(kind, facts["subject"], facts, results)


def _show(record: "Record", title: str, plot: Path | None) -> None:
    from sala.lab.report.kinds import plot_record

    print_record(record, title)
    if plot is not None:
        plot_record(record, plot, title)


def _finish(record: "Record", title: str, file: Path | None, plot: Path | None) -> None:
    """Print and plot the results, and write them with the facts of the run once more at the top."""
    from sala import __version__

    _show(record, title, plot)
    if file is not None:
        record.plots = [] if plot is None else [relative(plot, file.parent)]
        record.save(file, force=True, sala=__version__, **record.settings)
