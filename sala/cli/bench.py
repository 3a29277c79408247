"""`sala bench`: how fast a model runs here, by context length or number of requests, and against a dense model; and its
kernels, one by one."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from sala.cli import flags as s
from sala.cli.outputs import going_on, relative
from sala.errors import InputError, SalaError
from sala.options import Options

if TYPE_CHECKING:
    import torch

    from sala.backends.torch.cases import KernelCase
    from sala.lab.bench.dense import Dense
    from sala.lab.bench.measure import Latency, Throughput
    from sala.lab.bench.roofline import Result, Roofline
    from sala.lab.bench.subject import Subject

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
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw them here.")]


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
    """One request at a time, of several lengths: time to first token, speed, memory."""
    from sala.lab.bench.measure import measure_latency
    from sala.lab.bench.plots import label, plot_latency

    counts = read_counts(lengths, "lengths")
    check_files(json_file, plot)
    subject = _open(options, random)
    results = _measure_all(counts, lambda count: measure_latency(subject, count, new_tokens), label)
    ratios = [one.decode_per_second / results[0].decode_per_second for one in results]
    columns = ["tokens", "first token", "prefill tok/s", "decode tok/s", f"against {label(counts[0])}", "memory"]
    rows = [
        [
            label(one.num_tokens), f"{one.first_token_s:.2f} s", f"{one.prefill_per_second:,.0f}",
            f"{one.decode_per_second:,.1f}", f"{ratio:.2f}", _gib(one.peak_bytes),
        ]
        for one, ratio in zip(results, ratios, strict=True)
    ]  # fmt: skip
    print_table(_title(subject), columns, rows)
    entries = [{**asdict(one), "decode_ratio": ratio} for one, ratio in zip(results, ratios, strict=True)]
    _write(json_file, "latency", _facts(subject, new_tokens), entries, plot)
    if plot is not None:
        plot_latency(results, plot, _title(subject))


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
    """Several requests at a time: tokens per second of all together."""
    from sala.lab.bench.measure import measure_throughput
    from sala.lab.bench.plots import plot_throughput

    counts = read_counts(batches, "batches")
    if length < 1:
        raise InputError("length", f"is {length}", "it must be at least 1")
    check_files(json_file, plot)
    subject = _open(options, random)
    results = _measure_all(
        counts, lambda count: measure_throughput(subject, count, length, new_tokens), lambda count: f"{count} at a time"
    )
    base = results[0].decode_per_second
    columns = ["requests", "first tokens", "prefill tok/s", "decode tok/s", f"against {counts[0]}", "memory"]
    rows = [
        [
            str(one.batch), f"{one.first_tokens_s:.2f} s", f"{one.prefill_per_second:,.0f}",
            f"{one.decode_per_second:,.1f}", f"{one.decode_per_second / base:.2f}", _gib(one.peak_bytes),
        ]
        for one in results
    ]  # fmt: skip
    print_table(f"{_title(subject)}, prompts of {length:,} tokens", columns, rows)
    facts = {**_facts(subject, new_tokens), "length": length}
    _write(json_file, "throughput", facts, [asdict(one) for one in results], plot)
    if plot is not None:
        plot_throughput(results, plot, _title(subject))


@bench.command()
@s.derived
def kernels(
    *,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, e.g. 8K,128K.")] = "8K,128K",
    json_file: JsonFile = None,
    plot: PlotFile = None,
    options: Annotated[Options, s.Use(only=("device",))],
) -> None:
    """Every Triton kernel alone, at the released shapes: time, share of what the GPU could do, and against a peer."""
    counts = read_counts(lengths, "lengths")
    where = _gpu(options.device)
    check_files(json_file, plot)
    from sala.lab.bench.plots import plot_kernels

    name, roofline, results = _measure_kernels(where, counts)
    products, moved = roofline.flops_per_s / 1e12, roofline.bytes_per_s / 1e12
    title = f"kernels, bfloat16, {name}: {products:,.0f} TFLOP/s and {moved:.2f} TB/s at best"
    columns = ["kernel", "ms", "share", "TFLOP/s", "times as fast as"]
    print_table(title, columns, map(_kernel_row, results), left=("kernel", "times as fast as"))
    facts = {
        "subject": title, "device": str(where), "dtype": "bfloat16", "lengths": counts,
        "tflops": products, "tb_per_s": moved,
    }  # fmt: skip
    _write(json_file, "kernels", facts, [asdict(one) for one in results], plot)
    if plot is not None:
        plot_kernels(results, plot, title)
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
    """Beside a dense model in transformers, in the same run: from which length on ours is faster."""
    from sala.lab.bench.dense import MEASURES, compare, need_transformers, open_dense, release, verdict
    from sala.lab.bench.measure import measure_latency
    from sala.lab.bench.plots import plot_against
    from sala.lab.eval.record import Record

    counts = read_counts(lengths, "lengths")
    check_files(json_file, plot)
    need_transformers()
    subject = _open(options, random)
    facts = {**_facts(subject, new_tokens), "dense": dense, "lengths": counts}
    record = Record("against", subject.name, facts)
    if json_file is not None and not force:
        record.check(json_file)
    log = None if json_file is None else json_file.with_suffix(".jsonl")
    keep = _Kept(log, facts)
    title, where, precision = _title(subject), subject.device, subject.dtype
    with going_on(log):
        s.note(f"ours: {title}")
        ours = _measure_all(counts, keep("ours", partial(measure_latency, subject, new_tokens=new_tokens)), label_of)
        del subject  # one model in memory at a time
        release(where)
        s.note(f"theirs: {dense}")
        theirs = _measure_dense(lambda: open_dense(dense, where, precision), counts, new_tokens, keep)
    record.results = compare(ours, theirs)
    title = f"{title}, against {dense}"
    columns = ["tokens", "first token", "dense", "times as fast", "decode tok/s", "dense ", "times as fast ", ""]
    print_table(title, columns, map(_against_row, record.results), left=("",))
    for name in MEASURES:
        s.note(f"{name.replace('_', ' ')}: {verdict(record.results, name)}")
    if plot is not None:
        plot_against(record.results, plot, title)
    if json_file is not None:
        record.plots = [] if plot is None else [relative(plot, json_file.parent)]
        record.save(json_file, force)


def _measure_dense(
    open_it: Callable[[], "Dense"], counts: Sequence[int], new_tokens: int, keep: "_Kept"
) -> list["Latency"]:
    """The model is loaded only if something is still to be measured."""
    from sala.lab.bench.dense import measure_dense

    opened = cache(open_it)
    return _measure_all(counts, keep("dense", lambda count: measure_dense(opened(), count, new_tokens)), label_of)


class _Kept:
    """Figures of a run that was cut off; every new one is kept as soon as it is there."""

    def __init__(self, file: Path | None, facts: dict[str, Any]) -> None:
        from sala.lab.eval.runner import Log

        self._log = None if file is None else Log(file)
        self._facts = {name: value for name, value in facts.items() if name != "lengths"}

    def __call__(self, who: str, measure: Callable[[int], "Latency"]) -> Callable[[int], "Latency"]:
        from sala.lab.bench.measure import Latency
        from sala.lab.eval.runner import key_of

        def look_or_measure(count: int) -> Latency:
            key = key_of(self._facts, {"who": who, "num_tokens": count})
            row = None if self._log is None else self._log.find(key)
            found = measure(count) if row is None else Latency(**row)
            if self._log is not None and row is None:
                self._log.append(key, asdict(found))
            return found

        return look_or_measure


def label_of(count: int) -> str:
    from sala.lab.bench.plots import label

    return label(count)


def _against_row(row: dict[str, Any]) -> list[str]:
    def show(name: str, form: str) -> str:
        return "–" if row[name] is None else format(row[name], form)

    marks = [f"{name.replace('_', ' ')} from {at:,} on" for name, at in row["crossover"].items()]
    return [
        label_of(row["num_tokens"]), show("first_token_s", ".3g") + " s", show("dense_first_token_s", ".3g") + " s",
        show("first_token_ratio", ".2f"), show("decode_per_second", ",.1f"), show("dense_decode_per_second", ",.1f"),
        show("decode_ratio", ".2f"), f"< faster: {', '.join(marks)}" if marks else "",
    ]  # fmt: skip


def read_counts(text: str, name: str) -> list[int]:
    counts = sorted({s.count(part) for part in text.split(",")})
    if counts[0] < 1:
        raise InputError(name, f"hold {counts[0]}", "they must be at least 1")
    return counts


def check_files(json_file: Path | None, plot: Path | None) -> None:
    """Whatever would go wrong at the end should go wrong before the measuring."""
    for file in (json_file, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise InputError("file", f"{file} cannot be written", "its directory does not exist")
    if plot is not None:
        from sala.lab.bench.plots import need_matplotlib

        need_matplotlib()


def _open(options: Options, random: str | None) -> "Subject":
    from sala.lab.bench.subject import open_checkpoint, open_random

    if random is not None:
        return open_random(random, options)
    return open_checkpoint(s.find_model(options.model), options)


def _gpu(device: str) -> "torch.device":
    """The GPU that is meant, if the kernels run there."""
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


def _measure_kernels(where: "torch.device", lengths: Sequence[int]) -> tuple[str, "Roofline", list["Result"]]:
    """The name of the GPU, what it does at best, and what the kernels do there."""
    import torch

    from sala.backends.torch.cases import Shapes
    from sala.lab.bench.roofline import measure_roofline, timed_cases

    with torch.cuda.device(where):
        roofline = measure_roofline(where)
        results = _time_all(timed_cases(Shapes(where, tuple(lengths))), roofline)
    return torch.cuda.get_device_name(where), roofline, results


def _time_all(cases: Sequence["KernelCase"], roofline: "Roofline") -> list["Result"]:
    """One after another; what fails says so, and the rest goes on."""
    from rich.console import Console

    from sala.lab.bench.roofline import measure

    console = Console(stderr=True)
    results = []
    for index, one in enumerate(cases):
        name, turn = f"{one.name}, {one.size}", f"({index + 1} of {len(cases)})"
        with console.status(f"{name} {turn}"):
            found = measure(one, roofline)
        results.append(found)
        if found.ms is None:
            s.note(f"{name}: failed: {found.error} {turn}")
        else:
            s.note(f"{name}: {_ms(found.ms)} ms, {found.share:.0%} of the roofline {turn}")
    return results


def _kernel_row(one: "Result") -> list[str]:
    name = f"{one.name}, {one.size}"
    if one.ms is None:
        return [name, "failed", "", "", one.error]
    tflops = "" if one.tflops is None else f"{one.tflops:,.0f}"
    against = one.error if one.ratio is None else f"{one.ratio:.3g} x {one.peer}"
    return [name, _ms(one.ms), f"{one.share:.0%}", tflops, against]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _measure_all(counts: Sequence[int], measure: Callable[[int], T], name: Callable[[int], str]) -> list[T]:
    """Smallest first; where one no longer fits, larger ones are not tried, and what is known is kept."""
    from rich.console import Console

    console = Console(stderr=True)
    results: list[T] = []
    for index, count in enumerate(counts):
        try:
            with console.status(f"{name(count)} ({index + 1} of {len(counts)})"):
                results.append(measure(count))
        except (SalaError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                raise
            if not results:
                raise SalaError(f"{name(count)}: {_reason(error)}") from None
            s.note(f"{name(count)} and above left out: {_reason(error)}")
            break
        prefill, decode = results[-1].prefill_per_second, results[-1].decode_per_second
        s.note(
            f"{name(count)}: prefill {prefill:,.0f} tok/s, decode {decode:,.1f} tok/s ({index + 1} of {len(counts)})"
        )
    return results


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, SalaError) else "out of memory"


def _title(subject: "Subject") -> str:
    import torch

    kind = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else ""
    where = kind or f"{subject.device.type}, {torch.get_num_threads()} thread(s)"
    return f"{subject.name}, {str(subject.dtype).removeprefix('torch.')}, {where}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def print_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def _facts(subject: "Subject", new_tokens: int) -> dict[str, Any]:
    return {
        "subject": _title(subject), "device": str(subject.device),
        "dtype": str(subject.dtype).removeprefix("torch."), "new_tokens": new_tokens,
    }  # fmt: skip


def _write(
    file: Path | None, kind: str, facts: dict[str, Any], results: list[dict[str, Any]], plot: Path | None
) -> None:
    """A record of a run, as the evaluations write it, with the facts once more at its top."""
    if file is None:
        return
    from sala import __version__
    from sala.lab.eval.record import commit, machine, today, versions, write_atomically

    whole = {
        "kind": kind, "sala": __version__, **facts, "model": facts["subject"], "settings": facts, "machine": machine(),
        "versions": versions(), "commit": commit(), "date": today(), "results": results,
        "plots": [] if plot is None else [relative(plot, file.parent)],
    }  # fmt: skip
    write_atomically(file, (json.dumps(whole, indent=2, ensure_ascii=False) + "\n").encode())
