"""`sala eval sources`: whether the passages reported as sources are those that answer the question."""

import hashlib
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sala.cli import flags as s
from sala.cli.eval_flags import MIN_LENGTH, Haystack, Lengths, OneAtATime
from sala.cli.outputs import check_new, output_file, print_table
from sala.errors import InputError

if TYPE_CHECKING:
    from sala.lab.eval.tasks.sources import SourceText

Record = dict[str, Any]
Rows = list[Record]


@s.derived
def sources(
    *,
    lengths: Lengths = "4K,8K",
    texts: Annotated[int, s.flag("Texts of each length; each is read once.", min=1)] = 1,
    ones: Annotated[int, s.flag("Questions about a single fact, in each text.", min=1)] = 5,
    questions: Annotated[
        Path | None, s.flag("Your own questions: text, question and answers per line.", metavar="FILE.jsonl")
    ] = None,
    learn: Annotated[bool, s.flag("Learn the weights of heads and keep them beside the model.", "--learn")] = False,
    haystack: Haystack = None,
    seed: s.Seed = 0,
    output: s.RecordFile = None,
    force: s.Force = False,
    options: OneAtATime,
    verbose: s.Verbose = False,
) -> None:
    """Measure how often sources name the right passage.

    Asks for facts at known places: are these among the three heaviest passages?

    An interrupted run is continued, and one of fewer texts is extended.
    """
    from sala.checkpoint.writer import write_atomically
    from sala.lab.eval import sources as work
    from sala.lab.eval.documents import read_source
    from sala.lab.eval.runner import facts_of
    from sala.lab.eval.tasks.reading import read_passages

    counts = s.counts(lengths, "lengths", MIN_LENGTH)
    if learn and (questions is not None or output is not None):
        raise InputError("learn", "uses its own questions and writes sources.json", "leave out the other")
    path = s.find_model(options.model)
    file = None if learn else output_file(output, f"sources-{path.name}.json")
    known = read_passages(questions) if questions is not None else []
    llm = s.load(options, verbose, ctx=options.ctx or max(counts))
    source = read_source(haystack)
    make = _maker(llm.tokenizer, source.documents, known, seed, "train" if learn else "test")
    asked = {"ones": ones, "haystack": source.name, "questions": None if questions is None else questions.name}
    settings = {"seed": seed, **asked, "heads": _name_of_heads(path), **facts_of(llm)}
    record: Record = {"model": path.name, "settings": settings}
    rows = [] if file is None or force else _read_rows(file, record)
    done = {(row["length"], row["text"]) for row in rows}
    judged = []
    with work.keeping_heads(llm) as weights:
        for length, number in (place for place in product(counts, range(texts)) if place not in done):
            for one in (one for each in make(length, number, ones) for one in work.ask_all(llm, each)):
                judged.append(one)
                rows.append({"length": length, "text": number, **work.to_row(one, weights)})
                s.note(_tell(rows[-1]))
            if file is not None:  # after every text: a long run may be interrupted
                write_atomically(file, json.dumps({**record, "rows": rows}, indent=1) + "\n")
    if file is None:
        _learn(work, judged, llm, path, {"lengths": counts, "texts": texts, "seed": seed})
        return
    _print([row for row in rows if row["length"] in counts], path.name)
    s.note(f"wrote {file}")


def _maker(
    tokenizer: Any, documents: Any, known: Any, seed: int, split: Literal["train", "test"]
) -> "Callable[..., list[SourceText]]":
    """Return what makes the texts of a length and a number: with facts, and with the questions in `known`."""
    from sala.lab.eval.tasks.case import PromptWriter
    from sala.lab.eval.tasks.haystack import Haystack as Text
    from sala.lab.eval.tasks.sources import SourceMaker, passages

    writer = PromptWriter.for_model(tokenizer)
    text = Text(documents, writer.encode)
    maker = SourceMaker(writer, text, seed, split)

    def make(length: int, number: int, ones: int) -> "list[SourceText]":
        made = [maker.make(length, number, ones)]
        return [*made, passages(writer, known, text, length, number, seed)] if known else made

    return make


def _name_of_heads(path: Path) -> str:
    """Return what identifies the weights of the heads."""
    from sala.head_weights import NAME

    file = path / NAME
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "all alike"


def _read_rows(file: Path, record: Record) -> Rows:
    """Return the rows of the same run that was interrupted; raise InputError if the file is of another one."""
    if not file.exists():
        check_new(file)
        return []
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or {name: found.get(name) for name in record} != record:
        raise InputError("output", f"{file} exists already, of another run", "choose another name, or --force")
    rows: Rows = found["rows"]
    return rows


def _learn(work: Any, judged: Any, llm: Any, path: Path, facts: dict[str, Any]) -> None:
    from sala.checkpoint.writer import write_atomically
    from sala.head_weights import NAME, format_head_weights

    num_right = sum(one.is_right for one in judged)
    try:
        weights = work.learn(judged, len(llm.config.sparse_layers))
    except ValueError:
        raise InputError("lengths", "are too long: no question was answered rightly", "take shorter ones") from None
    write_atomically(path / NAME, format_head_weights(weights.tolist(), llm.config, questions=num_right, **facts))
    s.note(f"wrote {path / NAME}, from {num_right} questions that were answered rightly")


def _tell(row: dict[str, Any]) -> str:
    right = "right" if row["is_right"] else "wrong"
    rank = "not among the passages" if row["rank"] is None else f"in passage {row['rank']}"
    return f"{row['kind']}, {row['length']:,} tokens: {right}; the fact is {rank}"


def _print(rows: Rows, name: str) -> None:
    """Print the share of questions whose fact is among the top passages, for right and wrong answers apart."""
    from sala.options.schema import length_label

    groups = list(dict.fromkeys((row["kind"], row["length"]) for row in rows))
    lines = []
    for kind, length in groups:
        some = [row for row in rows if (row["kind"], row["length"]) == (kind, length)]
        lines.append([kind, length_label(length), *(_share(some, is_right) for is_right in (True, False))])
    lines.append(["all", "", *(_share(rows, is_right) for is_right in (True, False))])
    print_table(f"facts among the top 3 passages: {name}", ["kind", "tokens", "right", "wrong"], lines, [True])


def _share(rows: Rows, is_right: bool) -> str:
    some = [row for row in rows if row["is_right"] is is_right]
    return f"{sum(row['is_in_top'] for row in some)} of {len(some)}" if some else "–"
