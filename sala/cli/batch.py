"""`sala batch`: a file of requests in OpenAI's batch format."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s


def batch(
    source: Annotated[Path, typer.Argument(help="JSONL file of requests.", metavar="IN.jsonl")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the answers go; must not exist.")],
    model: s.Model = None,
    adapter: s.Adapter = None,
    max_batch: Annotated[int, typer.Option(help="Requests that run at a time.")] = 8,
    backend: s.Backend = "auto",
    device: s.Device = "auto",
    dtype: s.Dtype = "auto",
    kv: s.KV = "auto",
    ctx: s.Ctx = None,
    cache_memory: s.CacheMemory = None,
    verbose: s.Verbose = False,
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from sala.errors import InputError
    from sala.server.batch import run_batch

    if source.resolve() == output.resolve():
        raise InputError("output", "is the input", "choose another file")
    options = {
        "device": device,
        "dtype": dtype,
        "kv": kv,
        "ctx": ctx,
        "cache_memory": cache_memory,
        "max_batch": max_batch,
    }
    llm = s.load(model, verbose, adapter=adapter, backend=backend, **options)
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answering", total=None)
        tally = run_batch(llm, source, output, lambda done, total: bar.update(task, completed=done, total=total))
    resumed = f", {tally.skipped} from an earlier run" if tally.skipped else ""
    s.note(f"{output}: {tally.done} answered, {tally.failed} refused{resumed}")
