"""`sala bench`: how fast a model runs here, by context length or by number of requests."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sala.cli import settings as s
from sala.errors import InputError, SalaError

if TYPE_CHECKING:
    from sala.bench.measure import Latency, Throughput
    from sala.bench.subject import Subject

T = TypeVar("T", "Latency", "Throughput")
bench = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
Random = Annotated[
    str | None, typer.Option(metavar="SHAPE", help="Random weights instead of a model: tiny or released.")
]
NewTokens = Annotated[int, typer.Option("--new-tokens", "-n", help="Tokens of an answer.", min=2)]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw them here.")]


@bench.command()
def latency(
    model: s.Model = None,
    random: Random = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, e.g. 4K,32K,128K,1M.")] = "1K,4K,16K",
    new_tokens: NewTokens = 64,
    device: s.Device = "auto",
    dtype: s.Dtype = "auto",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """One request at a time, of several lengths: time to first token, speed, memory."""
    from sala.bench.measure import measure_latency
    from sala.bench.plots import label, plot_latency

    counts = _counts(lengths, "lengths")
    _check_files(json_file, plot)
    subject = _open(model, random, device, dtype)
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
    _print(_title(subject), columns, rows)
    entries = [{**asdict(one), "decode_ratio": ratio} for one, ratio in zip(results, ratios, strict=True)]
    _write(json_file, "latency", subject, new_tokens, entries)
    if plot is not None:
        plot_latency(results, plot, _title(subject))


@bench.command()
def throughput(
    model: s.Model = None,
    random: Random = None,
    batches: Annotated[str, typer.Option(help="Requests at a time, e.g. 1,2,4,8,16.")] = "1,2,4,8",
    length: Annotated[int, typer.Option(parser=s.count, metavar="COUNT", help="Tokens of every prompt.")] = 512,
    new_tokens: NewTokens = 64,
    device: s.Device = "auto",
    dtype: s.Dtype = "auto",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Several requests at a time: tokens per second of all together."""
    from sala.bench.measure import measure_throughput
    from sala.bench.plots import plot_throughput

    counts = _counts(batches, "batches")
    if length < 1:
        raise InputError("length", f"is {length}", "it must be at least 1")
    _check_files(json_file, plot)
    subject = _open(model, random, device, dtype)
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
    _print(f"{_title(subject)}, prompts of {length:,} tokens", columns, rows)
    _write(json_file, "throughput", subject, new_tokens, [asdict(one) for one in results])
    if plot is not None:
        plot_throughput(results, plot, _title(subject))


def _counts(text: str, name: str) -> list[int]:
    counts = sorted({s.count(part) for part in text.split(",")})
    if counts[0] < 1:
        raise InputError(name, f"hold {counts[0]}", "they must be at least 1")
    return counts


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    """Whatever would go wrong at the end should go wrong before the measuring."""
    for file in (json_file, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise InputError("file", f"{file} cannot be written", "its directory does not exist")
    if plot is not None:
        from sala.bench.plots import need_matplotlib

        need_matplotlib()


def _open(model: str | None, random: str | None, device: str, dtype: str) -> "Subject":
    from sala.bench.subject import open_checkpoint, open_random

    if random is not None:
        return open_random(random, device, dtype)
    return open_checkpoint(s.find_model(model), device, dtype)


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


def _print(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _write(file: Path | None, kind: str, subject: "Subject", new_tokens: int, results: list[dict[str, Any]]) -> None:
    if file is None:
        return
    from sala import __version__

    facts = {
        "kind": kind, "sala": __version__, "subject": _title(subject), "device": str(subject.device),
        "dtype": str(subject.dtype).removeprefix("torch."), "new_tokens": new_tokens, "results": results,
    }  # fmt: skip
    file.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
