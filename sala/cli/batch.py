"""`sala batch`: answer a file of requests in OpenAI's batch format."""

from functools import partial
from pathlib import Path
from typing import Annotated

from sala.cli import flags as s
from sala.errors import InputError


@s.derived
def batch(
    *,
    source: Annotated[Path, s.argument("JSONL file of requests.", metavar="IN.jsonl")],
    output: Annotated[Path, s.flag("File of the answers; must not exist.", "--output", "-o")],
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    from sala.cli.outputs import check_new
    from sala.cli.progress import ProgressBar
    from sala.server.batch import run_batch

    if source.resolve() == output.resolve():
        raise InputError("output", "is the input", "choose another file")
    try:
        source.open("rb").close()
    except OSError as error:
        raise InputError("file", f"{source} cannot be read: {error.strerror}", "check the path") from None
    check_new(output)
    llm = s.load(options, verbose)
    with ProgressBar(is_kept=False, is_quiet=True) as bar:
        tally = run_batch(llm, source, output, partial(bar, "answering"))
    resumed = f", {tally.skipped} from an earlier run" if tally.skipped else ""
    s.note(f"{output}: {tally.done} answered, {tally.failed} refused{resumed}")
