"""`sala perplexity`: how well a model predicts a text, by how much of it the model sees."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sala.cli import flags as s
from sala.errors import InputError
from sala.options import Options

if TYPE_CHECKING:
    from sala.lab.report.record import Record


@s.derived
def perplexity(
    *,
    file: Annotated[Path, typer.Argument(help='A text, or .jsonl with a "text" per line.')],
    lengths: Annotated[str, typer.Option(help="Tokens that the model sees, e.g. 1K,16K,128K.")] = "1K,4K,16K",
    stride: Annotated[
        int | None,
        typer.Option(
            parser=s.count, metavar="COUNT", help="Tokens from window to window; by default a window's length."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(parser=s.count, metavar="COUNT", help="Tokens of the text to use; by default all.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.json", help="Record of the results; a log and a picture are kept beside it."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Picture: .png, .pdf or .svg.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the results of another run.")] = False,
    options: Annotated[Options, s.Use(without=("ctx",), defaults={"max_batch": 1, "snapshots": 0})],
) -> None:
    from sala.cli.bench import read_counts
    from sala.cli.outputs import output_file, plot_file, resumable
    from sala.cli.progress import ProgressBar
    from sala.lab.eval import perplexity as work
    from sala.lab.eval.documents import read_documents
    from sala.lab.report.record import Log, Record

    counts = read_counts(lengths, "lengths")
    _check(stride, tokens, counts)
    documents = read_documents(file.expanduser())
    path = s.find_model(options.model)
    record_file = output_file(output, f"perplexity-{path.name}.json", ".json")
    if record_file.absolute() == file.absolute():
        raise InputError("output", f"{record_file} is the text itself", "choose another name")
    picture = plot_file(plot, record_file)
    with s.load(options, ctx=_ctx(path, counts)) as llm:
        text = work.to_text(llm, str(file), documents, tokens)
        chosen = work.choose_lengths(counts, len(text.ids), llm.ctx)
        for count in sorted(set(counts) - set(chosen)):
            s.note(f"{count:,} tokens left out: the text has {len(text.ids):,}, the context holds {llm.ctx:,}")
        settings = {
            "file": file.name, "text": text.digest, "tokens": len(text.ids), "lengths": chosen, "stride": stride,
            "fingerprint": llm.fingerprint()[:16], "device": options.device, "dtype": llm.capacity.dtype,
        }  # fmt: skip
        record = Record("perplexity", path.name, settings)
        if not force:
            record.check(record_file)
        log = record_file.with_suffix(".jsonl")
        with resumable(log), ProgressBar() as bar:
            record.results = list(work.measure(llm, text, chosen, stride, Log(log), bar))
    _save(record, f"{path.name} on {file.name}", record_file, picture, force)


def _save(record: "Record", title: str, file: Path, picture: Path | None, force: bool) -> None:
    """Print and plot the results, and write the record."""
    from sala.cli.outputs import relative
    from sala.cli.tables import print_record
    from sala.lab.report.kinds import plot_record

    print_record(record, title)
    if picture is not None:
        plot_record(record, picture, title)
        record.plots.append(relative(picture, file.parent))
    record.save(file, force)
    s.note(f"wrote {', '.join(str(one) for one in (file, picture) if one is not None)}")


def _check(stride: int | None, tokens: int | None, counts: list[int]) -> None:
    for name, count in (("stride", stride), ("tokens", tokens)):
        if count is not None and count < 2:
            raise InputError(name, f"is {count}", "it must be at least 2")
    if stride is not None and stride > max(counts):
        raise InputError("stride", f"is {stride:,}", f"it must not be longer than a window, {max(counts):,}")


def _ctx(path: Path, counts: list[int]) -> int:
    """Return the context that the lengths need, but no more than the model was trained for."""
    from sala.config import SalaConfig

    return min(max(counts), SalaConfig.load(path).max_position_embeddings)
