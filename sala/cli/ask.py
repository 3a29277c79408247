"""`sala ask`: a question about files, directories and repositories; and what other commands share with it."""

import glob
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sala.cli import flags as s
from sala.cli.generate import completion_as_json, read_schema, show_answer, statistics, warn_if_untrained
from sala.cli.outputs import print_json, table_lines
from sala.cli.progress import ProgressBar, prefill_bar
from sala.cli.sources import show_sources
from sala.errors import InputError
from sala.options import Options

if TYPE_CHECKING:
    from sala.documents.model import LeftOut
    from sala.documents.packing import EncodedDocument
    from sala.engine.requests import Attachment
    from sala.llm import LLM

MAX_SHOWN = 20  # files that a table lists, unless asked for all
MAX_LISTED = 3  # files that are left out for the same reason
PATIENCE = 1.0
SUFFIXES = {  # by which a file is told from a question of one word
    ".pdf", ".docx", ".pptx", ".xlsx", ".epub", ".html", ".htm", ".xhtml", ".eml", ".mbox", ".zip", ".doc", ".ppt",
    ".xls", ".odt", ".rtf", ".txt", ".md", ".rst", ".tex", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml",
    ".toml", ".ini", ".cfg", ".conf", ".log", ".sql", ".py", ".ipynb", ".js", ".ts", ".c", ".h", ".cpp", ".cc", ".cu",
    ".rs", ".go", ".java", ".sh",
}  # fmt: skip
Keep = Annotated[bool, s.flag("Do not keep what was read on disk; the next run reads it again.", "--no-keep")]


@s.derived
def ask(
    *,
    what: Annotated[
        list[str],
        s.argument("Files, directories, globs, - for stdin; the question comes last.", metavar="PATH… QUESTION"),
    ],
    dry_run: Annotated[bool, s.flag("Show the files and their tokens, and stop.", "--dry-run")] = False,
    no_keep: Keep = False,
    system: s.System = None,
    no_think: s.NoThink = False,
    as_json: s.AsJson = False,
    sampling: s.Answering,
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    sampling = read_schema(sampling)
    paths, question = _split(what, dry_run)
    entries, left_out = read_entries(paths, options, "; the question comes last")
    show_entries(entries, left_out, is_whole=verbose or dry_run)
    if dry_run:
        _show_parts(entries, options.ctx)
        return
    from sala.engine.stream import last_completion
    from sala.llm.documents import Documents

    llm = s.load(options if no_keep else with_cache(options), verbose)
    documents = Documents(llm, entries, left_out)
    if documents.num_tokens > documents.part_size:
        s.note(
            f"{documents.num_tokens:,} tokens are more than the {documents.part_size:,} that the context of {llm.ctx:,}"
            " takes: the documents are read in parts, and the answer comes from a summary of each"
        )
    began = time.perf_counter()
    with ProgressBar("tokens", PATIENCE, is_kept=False, is_quiet=True) as bar:
        show_part = partial(_show_part, bar)
        asked = documents.prepare(question, sampling, system, show_part, partial(bar, "reading"))
    with prefill_bar() as on_progress:
        events = llm.stream_answer(asked.call, on_progress)
        completion = last_completion(events) if as_json else show_answer(events, no_think)
    completion = None if completion is None else documents.traced(asked, completion)
    if as_json and completion is not None:
        files = [{"name": entry.name, "tokens": entry.num_tokens, "notes": entry.notes} for entry in entries]
        more = {"documents": files, "left_out": [asdict(one) for one in left_out], "summaries": asked.summaries}
        print_json(completion_as_json(completion, no_think) | more)
    else:
        print()
        show_sources(None if completion is None else completion.sources)
    if completion is not None:
        s.note(statistics(completion, time.perf_counter() - began))
        warn_if_untrained(llm.config, completion.usage.prompt_tokens)


def _split(what: list[str], dry_run: bool) -> tuple[list[str], str]:
    """Return paths and question. Raises InputError where one of them is missing, or the question is a misspelt path."""
    last = what[-1]
    if dry_run and (len(what) == 1 or _exists(last)):
        return what, ""
    if _exists(last):
        raise InputError("question", f"is missing: {last[:60]} is a file", "write the question last, in quotes")
    if _looks_like_path(last):
        remedy = "check the path; a question that looks like one needs a question mark at its end"
        raise InputError(last[:200], "does not exist", remedy)
    if len(what) == 1:
        if sys.stdin.isatty():
            raise InputError("paths", "are missing", 'sala ask FILE "question"; - reads stdin')
        return ["-"], what[0]
    return what[:-1], what[-1]


def _exists(text: str) -> bool:
    """Return whether there is a file of that name, or one that a pattern matches."""
    try:
        path = Path(text).expanduser()
        matches = glob.iglob(str(path), recursive=True) if glob.has_magic(text) else ()  # noqa: PTH207 - it may be absolute
        return text == "-" or path.exists() or any(matches)
    except (OSError, ValueError, RuntimeError):  # a question need not be a possible path
        return False


def _looks_like_path(text: str) -> bool:
    """Return whether a text is more likely the name of a file than a question."""
    if text.endswith(("?", "\uff1f")) or any(map(str.isspace, text)):
        return False
    has_suffix = Path(text).suffix.lower() in SUFFIXES or re.fullmatch(r"[\w.-]*\w\.[A-Za-z0-9]{1,5}", text)
    return bool(has_suffix) or (text.isascii() and ("/" in text or os.sep in text))


def read_entries(
    paths: Sequence[str | Path], options: Options, hint: str = ""
) -> "tuple[list[EncodedDocument], list[LeftOut]]":
    """Read files and count their tokens, before the model is loaded. Raises InputError if they hold no text.

    `hint` is added to the remedy for a path that does not exist.
    """
    from sala.documents.packing import encode_documents
    from sala.documents.reader import STDIN, expand, read_documents
    from sala.models.embedded import find_base
    from sala.text.tokenizer import Tokenizer

    expand([path for path in paths if path != STDIN], hint)  # a misspelt name is told before the model is looked for
    place, _ = find_base(s.find_model(options.model), options.merged_adapter)
    with ProgressBar(patience=PATIENCE, is_kept=False, is_quiet=True) as bar:
        found = read_documents(paths, lambda done, total, name: bar("files", done, total, name[-60:]))
        tokenizer = Tokenizer.load(place)
        entries = encode_documents(found.documents, tokenizer, lambda done, total: bar("counting", done, total))
    tokenizer.close()
    if not entries:
        show_entries(entries, found.left_out, is_whole=False)
        if list(paths) == [STDIN]:
            raise InputError("standard input", "holds no text", 'name files: sala ask FILE… "question"')
        raise InputError("documents", "hold no text", "name other files")
    return entries, found.left_out


def show_entries(entries: "Sequence[EncodedDocument]", left_out: "Sequence[LeftOut]", is_whole: bool) -> None:
    """Write the tokens of each file and what is left out, all or the most important."""
    if entries:
        large = sorted(entries, key=lambda entry: -entry.num_tokens)[: None if is_whole else MAX_SHOWN]
        shown = {id(entry) for entry in large}
        rows = [(f"{entry.num_tokens:,}", _describe(entry)) for entry in entries if id(entry) in shown]
        if len(shown) < len(entries):
            rest = sum(entry.num_tokens for entry in entries if id(entry) not in shown)
            rows.append((f"{rest:,}", f"in {len(entries) - len(shown):,} smaller files; --verbose lists them"))
        rows.append((f"{sum(entry.num_tokens for entry in entries):,}", "in all"))
        s.note("\n".join(table_lines(("tokens", "file"), rows, (False, True))))
    for line in map(str, left_out) if is_whole else _grouped(left_out):
        s.note(line)


def _grouped(left_out: "Sequence[LeftOut]") -> Iterator[str]:
    """Yield lines on what is left out; many files with the same reason have one."""
    names: dict[str, list[str]] = {}
    for one in left_out:
        names.setdefault(one.why, []).append(one.name)
    for number, (why, same) in enumerate(names.items()):
        if number == MAX_SHOWN:
            yield f"{sum(map(len, [*names.values()][number:])):,} more are left out; --verbose lists them"
            return
        if len(same) > MAX_LISTED:
            yield f"{same[0]} and {len(same) - 1:,} more: left out: {why}; --verbose lists them"
        else:
            yield from (f"{name}: left out: {why}" for name in same)


def _show_parts(entries: "list[EncodedDocument]", ctx: int | None) -> None:
    """Say in how many parts a context of a known length takes the documents."""
    from sala.documents.packing import split
    from sala.llm.documents import part_size

    if ctx is not None:
        number = len(split(entries, part_size(ctx)))
        s.note(f"a context of {ctx:,} tokens takes them {'at once' if number == 1 else f'in {number:,} parts'}")


def _describe(entry: "EncodedDocument") -> str:
    return f"{entry.name} ({'; '.join(entry.notes)})" if entry.notes else entry.name


def _show_part(bar: ProgressBar, number: int, total: int, summary: str) -> None:
    bar.print(s.escape_controls(f"part {number} of {total}: {summary}"))


def attach(llm: "LLM", entries: "list[EncodedDocument]", left_out: "list[LeftOut]") -> "Attachment":
    """Return documents for a conversation; raise InputError if they are longer than the context."""
    from sala.llm.documents import Documents

    return Documents(llm, entries, left_out).attachment


def with_cache(options: Options) -> Options:
    """Return options that keep documents on disk: in the user's cache directory, unless another is given."""
    from platformdirs import user_cache_path

    return options if options.cache_dir else replace(options, cache_dir=user_cache_path("sala") / "documents")
