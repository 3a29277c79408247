"""`sala perplexity`: how well a model predicts a text, by how much of it the model sees."""

from pathlib import Path
from typing import Annotated, Any

from sala.cli import flags as s
from sala.errors import InputError
from sala.options import Options


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
    from sala.cli.outputs import Run, output_file, plot_file
    from sala.cli.progress import ProgressBar
    from sala.config import SalaConfig
    from sala.lab.eval import perplexity as work
    from sala.lab.eval.documents import read_documents

    counts = s.counts(lengths, "lengths")
    _check(stride, tokens, counts)
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
            text=text.digest, tokens=len(text.ids), lengths=chosen,
            fingerprint=llm.fingerprint()[:16], dtype=llm.capacity.dtype,
        )  # fmt: skip
        with run.resumable(), ProgressBar() as bar:
            results = list(work.measure(llm, text, chosen, stride, run.open_log(), bar))
    run.finish(run.to_record(results), f"{path.name} on {file.name}")


def _check(stride: int | None, tokens: int | None, counts: list[int]) -> None:
    for name, count in (("stride", stride), ("tokens", tokens)):
        if count is not None and count < 2:
            raise InputError(name, f"is {count}", "it must be at least 2")
    if stride is not None and stride > max(counts):
        raise InputError("stride", f"is {stride:,}", f"it must not be longer than a window, {max(counts):,}")
