"""`sala session`: read a long text once, keep its cache on disk, ask about it any time."""

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sala.cli import flags as s
from sala.cli.generate import read_schema, show_answer, statistics
from sala.cli.progress import prefill_bar
from sala.errors import InputError
from sala.options import CommandOptions

if TYPE_CHECKING:
    from sala.engine.sessions import SessionStore

session = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
Name = Annotated[str, s.argument("Name of the session.")]
Where = Annotated[CommandOptions, s.Use(only=("sessions_dir",))]


def _directory(where: CommandOptions) -> Path:
    from platformdirs import user_cache_path

    return where.sessions_dir or user_cache_path("sala") / "sessions"


def _store(where: CommandOptions) -> "SessionStore":
    """Return the sessions of a directory, whatever model they belong to."""
    from sala.engine.sessions import SessionStore

    return SessionStore(_directory(where), "", warn=s.note)


@session.command()
@s.derived
def save(
    *,
    name: Name,
    file: Annotated[list[str], s.flag("Text to read; - is stdin. Repeatable.", "--file", "-f")],
    system: s.System = None,
    where: Where,
    options: s.Loading,
) -> None:
    """Read a text with the model and keep its cache."""
    _store(where).check_new(name)
    text = "\n\n".join(s.read_text(one) for one in file)
    if not text.strip():
        raise InputError("file", "is empty", "give some text to read")
    llm = s.load(options)
    messages = [{"role": "system", "content": system}] if system else []
    head, _ = llm.tokenizer.encode_around([*messages, {"role": "user", "content": f"{text}\n\n"}])
    with prefill_bar() as on_progress:
        count = llm.save_session(llm.open_store(_directory(where)), name, head, on_progress)
    s.note(f"{name}: {count:,} tokens kept")


@session.command()
@s.derived
def load(
    *,
    name: Name,
    prompt: Annotated[str, s.argument("What to ask about the text.")],
    no_think: s.NoThink = False,
    where: Where,
    sampling: s.Answering,
    options: s.Loading,
) -> None:
    """Ask about a text that was read before.

    Only the question is computed.
    """
    sampling = read_schema(sampling)
    _store(where).find(name)
    llm = s.load(options)
    began = time.perf_counter()
    tokens = llm.load_session(llm.open_store(_directory(where)), name)
    _, tail = llm.tokenizer.encode_around([{"role": "user", "content": ""}])
    question = llm.tokenizer.encode(prompt, bos=False)
    with prefill_bar() as on_progress:
        events = llm.stream([*tokens, *question, *tail], sampling, is_chat=True, on_progress=on_progress)
        completion = show_answer(events, no_think)
    print()
    if completion is not None:
        s.note(statistics(completion, time.perf_counter() - began))


@session.command()
@s.derived
def ls(*, where: Where) -> None:
    """List the sessions."""
    from sala.cli.outputs import size

    for entry in _store(where).entries():
        when = datetime.fromtimestamp(entry.modified).strftime("%Y-%m-%d %H:%M")
        print(f"{entry.name:<32} {entry.num_tokens:>12,} tokens {size(entry.nbytes):>12}  {when}")


@session.command()
@s.derived
def rm(*, name: Name, where: Where) -> None:
    """Remove a session."""
    _store(where).remove(name)
    s.note(f"{name} removed")
