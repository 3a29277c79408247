"""`sala draft`: train a draft head, or an exit, for speculative decoding, and measure it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sala.backends import wait_passively
from sala.cli import flags as s
from sala.cli.outputs import check_new, output_file, print_table
from sala.cli.training import Minutes, Output, Work
from sala.errors import InputError
from sala.options import Options

draft = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

# the training itself decides on the others
Loading = Annotated[Options, s.Use(without=("adapter", "ctx", "speculate", "draft_head", "num_draft", "draft_layers"))]


@draft.command("train")
@s.derived
def train(
    *,
    data: Annotated[Path, s.flag("Records with messages, prompt or text, one per line.", metavar="FILE.jsonl")],
    output: Output,
    work: Work = None,
    options: Loading,
    exit_layers: Annotated[
        int | None, s.flag("Train an exit after so many layers, for --speculate layers.", "--exit", min=1)
    ] = None,
    row: Annotated[int, s.flag("Tokens of a row, and of the longest text.", min=64)] = 1024,
    epochs: Annotated[float, s.flag("Passes over the data.", min=0)] = 2.0,
    batch: Annotated[int, s.flag("Rows of a step.", min=1)] = 4,
    lr: Annotated[float, s.flag("Learning rate.", min=0)] = 1e-3,
    chain: Annotated[int, s.flag("Drafts in a round that the head is trained for.", min=1, max=16)] = 4,
    max_tokens: Annotated[int, s.flag("Longest answer that the model writes.", "--max-tokens", "-n", min=1)] = 256,
    temperature: Annotated[
        float | None,
        s.flag("Of the answers; default: 0, 0.3 and 0.7 in turn.", "--temperature", "-t", min=0),
    ] = None,
    window: Annotated[
        int | None, s.flag("Tokens that the head looks back at, besides the first ones; by default 2,048.", min=16)
    ] = None,
    vocabulary: Annotated[int | None, s.flag("Tokens that can be drafted; by default 32K at most.", min=1)] = None,
    width: Annotated[int | None, s.flag("Width of the head's MLP; by default that of the model's.", min=1)] = None,
    seed: s.Seed = 0,
    minutes: Minutes = None,
) -> None:
    """Train a draft head, or an exit, on the model's own answers.

    The model answers the prompts of a file first.
    """
    from sala.cli.progress import training_bar
    from sala.lab.draft.train import DraftTraining
    from sala.lab.finetune.dialogues import BadData

    sizes = {"window": window, "draft_vocab_size": vocabulary, "intermediate_size": width}
    job = DraftTraining(
        s.find_model(options.model), data, output, work or output.with_name(output.name + ".run"), options.device,
        row, epochs, batch, lr, chain, max_tokens, temperature, seed, minutes,
        {name: value for name, value in sizes.items() if value is not None}, exit_layers, options,
    )  # fmt: skip
    wait_passively(options.threads)
    try:
        with training_bar() as bar:
            report = job.run(bar)
    except BadData as error:
        s.note(error.message)
        raise InputError("data", f"has {len(error.problems):,} bad records", error.remedy) from None
    if report:
        print_table(
            "how often each draft of a chain is the model's own choice, in texts that were not learned",
            ["kind", "up to", "tokens", "agreed, by position"],
            [
                [one.kind, f"{one.length:,}", f"{one.asked[0]:,}", " ".join(f"{rate:.0%}" for rate in one.rates)]
                for one in report
            ],
            (True,),
        )
    mode = "auto" if exit_layers is None else "layers"
    s.note(f"try it: sala chat -m {options.model or 'smol-sala'} --speculate {mode} --draft-head {output}")


@draft.command("eval")
@s.derived
def eval(
    *,
    options: Options,
    lengths: Annotated[str, s.flag("Lengths of the prompts, e.g. 1K,16K.")] = "256,1K",
    prompts: Annotated[int, s.flag("Prompts of each kind.", min=1)] = 6,
    max_tokens: Annotated[int, s.flag("Length of each answer.", "--max-tokens", "-n", min=8)] = 128,
    output: s.RecordFile = None,
    force: s.Force = False,
) -> None:
    """Count accepted drafts, and time decoding with and without.

    Drafts are counted by kind of text, length and position.
    """
    from sala.checkpoint.draft_head import find_draft_head
    from sala.checkpoint.writer import write_atomically
    from sala.cli.progress import ProgressBar
    from sala.lab.draft.evaluate import built_in_prompts, evaluate

    counts = s.counts(lengths, "lengths", 16)
    path = s.find_model(options.model)
    file = output_file(output, f"draft-{path.name}.json")
    if not force:
        check_new(file, "choose another name, or --force")
    mode = "head" if options.speculate == "off" else options.speculate
    options = replace(options, speculate=mode, ctx=options.ctx or max(counts) + max_tokens + 256)
    find_draft_head(path, options)  # a missing one is an error before anything is measured
    some = {kind: texts[:prompts] for kind, texts in built_in_prompts().items()}
    wait_passively(options.threads)
    with ProgressBar() as bar:
        record = evaluate(options, some, counts, max_tokens, lambda done, total: bar("draft", done, total))
    write_atomically(file, json.dumps(record, indent=1) + "\n")
    print_table(
        "",
        ["kind", "length", "tokens per round", "accepted by position", "times as fast"],
        [
            [row["kind"], f"{row['length']:,}", f"{row['tokens per round']:.2f}",
             " ".join("–" if one is None else f"{one:.0%}" for one in row["accepted by position"]),
             f"{row['times as fast']:.2f}"]
            for row in record["rows"]
        ],
        (True,),
    )  # fmt: skip
    if not record["equal answers"]:
        s.note("some answers differ from those of plain decoding")
    s.note(f"wrote {file}")
