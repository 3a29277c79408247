"""`sala session`: read a long text once, keep its past on disk, ask about it any time."""

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s
from sala.cli.generate import show_answer, statistics
from sala.cli.progress import PrefillBar
from sala.errors import InputError

session = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(help="Name of the session.")]
Where = Annotated[Path | None, typer.Option("--sessions-dir", help="Where sessions lie.", envvar="SALA_SESSIONS_DIR")]


def _directory(where: Path | None) -> Path:
    from platformdirs import user_cache_path

    return where or user_cache_path("sala") / "sessions"


@session.command()
def save(
    name: Name,
    file: Annotated[list[str], typer.Option("--file", "-f", help="Text to read; - is stdin. Repeatable.")],
    model: s.Model = None,
    adapter: s.Adapter = None,
    system: s.System = None,
    where: Where = None,
    backend: s.Backend = "auto",
    device: s.Device = "auto",
    dtype: s.Dtype = "auto",
    ctx: s.Ctx = None,
) -> None:
    """Read text with the model and keep what it has understood."""
    text = "\n\n".join(s.read_text(one) for one in file)
    if not text.strip():
        raise InputError("file", "is empty", "give some text to read")
    llm = s.load(model, False, device=device, dtype=dtype, ctx=ctx, adapter=adapter, backend=backend)
    messages = [{"role": "system", "content": system}] if system else []
    head, _ = llm.tokenizer.encode_around([*messages, {"role": "user", "content": f"{text}\n\n"}])
    with PrefillBar() as bar:
        count = llm.save_session(llm.open_store(_directory(where)), name, head, bar)
    s.note(f"{name}: {count:,} tokens kept")


@session.command()
def load(
    name: Name,
    prompt: Annotated[str, typer.Argument(help="What to ask about the text.")],
    model: s.Model = None,
    adapter: s.Adapter = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Length of the answer at most.")] = 256,
    temperature: s.Temperature = 0.7,
    seed: s.Seed = None,
    no_think: s.NoThink = False,
    where: Where = None,
    backend: s.Backend = "auto",
    device: s.Device = "auto",
    dtype: s.Dtype = "auto",
    ctx: s.Ctx = None,
) -> None:
    """Ask about a text that was read before: only the question is computed."""
    llm = s.load(model, False, device=device, dtype=dtype, ctx=ctx, adapter=adapter, backend=backend)
    began = time.perf_counter()
    tokens = llm.load_session(llm.open_store(_directory(where)), name)
    _, tail = llm.tokenizer.encode_around([{"role": "user", "content": ""}])
    question = llm.tokenizer.encode(prompt, bos=False)
    with PrefillBar() as bar:
        events = llm.stream(
            [*tokens, *question, *tail],
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            is_chat=True,
            on_progress=bar,
        )
        completion = show_answer(events, no_think)
    print()
    if completion is not None:
        s.note(statistics(completion, time.perf_counter() - began))


@session.command()
def ls(where: Where = None) -> None:
    """List the sessions."""
    from sala.cli.show import size
    from sala.engine.store.sessions import SessionStore

    for entry in SessionStore(_directory(where), "", warn=s.note).entries():
        when = datetime.fromtimestamp(entry.modified).strftime("%Y-%m-%d %H:%M")
        print(f"{entry.name:<32} {entry.num_tokens:>12,} tokens {size(entry.nbytes):>12}  {when}")


@session.command()
def rm(name: Name, where: Where = None) -> None:
    """Remove a session."""
    from sala.engine.store.sessions import SessionStore

    SessionStore(_directory(where), "", warn=s.note).remove(name)
    print(f"{name} removed", file=sys.stderr)
