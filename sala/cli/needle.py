"""`sala needle`: one fact hidden in one long text. The answer goes to stdout, everything else to stderr."""

from pathlib import Path
from typing import Annotated

from sala.cli import flags as s
from sala.cli.eval import speeds
from sala.cli.outputs import print_json
from sala.errors import InputError
from sala.options import Options


@s.derived
def needle(
    *,
    place: s.ModelFirst = None,
    context_len: Annotated[int, s.count_flag("Tokens of prompt and answer.")] = 32000,
    depth: Annotated[float, s.flag("Position of the needle: 0 is the start of the text, 1 its end.")] = 0.25,
    preset: Annotated[str, s.flag("aurora (one sentence in filler) or varied (many wordings).")] = "aurora",
    haystack: Annotated[Path | None, s.flag("Text to hide it in, with --preset varied.", metavar="FILE|DIR")] = None,
    seed: s.Seed = 0,
    as_json: s.AsJson = False,
    options: Annotated[Options, s.Use(defaults={"max_batch": 1, "snapshots": 0})],
    verbose: s.Verbose = False,
) -> None:
    from sala.cli.progress import prefill_bar
    from sala.config import SalaConfig
    from sala.lab.eval.documents import read_source
    from sala.lab.eval.runner import answer, check_lengths, to_row
    from sala.lab.eval.suite import Suite
    from sala.lab.eval.tasks.case import PromptWriter

    if not 0 <= depth <= 1:
        raise InputError("depth", f"is {depth:g}", "give a number from 0 (start) to 1 (end)")
    if haystack is not None and preset == "aurora":
        raise InputError("haystack", "cannot be used with the preset aurora", "add --preset varied")
    source = read_source(haystack) if haystack is not None else None
    most = options.ctx or SalaConfig.load(s.find_model(options.model)).max_position_embeddings
    check_lengths([context_len], most, "context-len")
    llm = s.load(options, verbose, ctx=options.ctx or context_len)
    suite = Suite(PromptWriter.for_model(llm.tokenizer), lambda: source or read_source(None), seed)
    case = suite.needle([context_len], [100 * depth], 1, preset)[0].make()
    with prefill_bar() as on_progress:
        completion = answer(llm, case, on_progress=on_progress)
    row = {"length": context_len, "depth": depth, "preset": preset, **to_row(case, completion)}
    if as_json:
        print_json(row)
    else:
        s.write_out(completion.text.strip())
        s.note("found" if row["is_exact"] else f"not found: the text says {row['wanted'][0]}")
    s.note(f"[prompt {row['prompt_tokens']:,} tokens, depth {row['depth_found']:.0%} | {speeds(row)}]")
