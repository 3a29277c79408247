"""`sala batch`: answer a file of requests in OpenAI's batch format."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s
from sala.cli.outputs import check_new, check_readable
from sala.errors import InputError


@s.derived
def batch(
    *,
    source: Annotated[Path, typer.Argument(help="JSONL file of requests.", metavar="IN.jsonl")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File of the answers; must not exist.")],
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    from sala.cli.progress import ProgressBar
    from sala.server.batch import run_batch

    if source.resolve() == output.resolve():
        raise InputError("output", "is the input", "choose another file")
    check_readable(source)
    check_new(output)
    llm = s.load(options, verbose)
    with ProgressBar(is_kept=False, is_quiet=True) as bar:
        tally = run_batch(llm, source, output, partial(bar, "answering"))
    resumed = f", {tally.skipped} from an earlier run" if tally.skipped else ""
    s.note(f"{output}: {tally.done} answered, {tally.failed} refused{resumed}")
