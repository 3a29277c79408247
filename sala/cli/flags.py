"""Flags that several verbs share, and how their values are read."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sala.errors import InputError, SalaError
from sala.options.kinds import read_count

if TYPE_CHECKING:
    from sala.llm import LLM


def count(text: str | int) -> int:
    """A count given as a flag."""
    try:
        return read_count(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Checkpoint directory, or set SALA_MODEL; else smol-sala, embedded.", envvar="SALA_MODEL"
    ),
]
Adapter = Annotated[
    Path | None, typer.Option(metavar="DIR", help="LoRA adapter to merge into the model.", envvar="SALA_ADAPTER")
]
Backend = Annotated[str, typer.Option(help="auto, torch or mlx.", envvar="SALA_BACKEND")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
KV = Annotated[str, typer.Option(help="Keys and values: auto, as they are computed, or fp8.", envvar="SALA_KV")]
Ctx = Annotated[
    int | None, typer.Option(parser=count, metavar="COUNT", help="Longest sequence in tokens, e.g. 128k or 1M.")
]
CacheMemory = Annotated[
    int | None,
    typer.Option(parser=count, metavar="BYTES", help="Memory for the past, e.g. 8G; by default half of what is free."),
]
CacheDir = Annotated[Path | None, typer.Option(help="Keep long pasts here, across restarts.", envvar="SALA_CACHE_DIR")]
Speculate = Annotated[str, typer.Option(help="Drafts: off, lookup (from the text so far) or layers (from the model).")]
NumDraft = Annotated[int, typer.Option(help="Tokens guessed at a time.", min=1, max=16)]
DraftLayers = Annotated[int, typer.Option(help="Layers that guess, with --speculate layers.", min=1)]
ThinkBudget = Annotated[int | None, typer.Option(help="Tokens of reasoning at most, then the answer.", min=0)]
LoopLimit = Annotated[int, typer.Option(help="End an answer that repeats itself for so many tokens; 0: never.", min=0)]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 takes the most probable token.")]
TopP = Annotated[float, typer.Option(help="Draw from the most probable tokens that make up this share.")]
TopK = Annotated[int, typer.Option(help="Draw from this many tokens at most; 0: no limit.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens below this share of the most probable one.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text. Repeatable.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")]
NoThink = Annotated[bool, typer.Option("--no-think", "--hide-thinking", help="Do not show the model's reasoning.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say more about the run on stderr.")]


def find_model(model: str | None) -> Path:
    """The model that is meant; the embedded one if none is named."""
    from sala.models.embedded import find_model as find

    return find(model or None, note)


def load(model: str | None, verbose: bool, **options: Any) -> "LLM":
    """Load the model, and say so when it is worth saying."""
    import time

    path = find_model(model)
    began = time.perf_counter()
    from sala.llm import LLM

    try:
        llm = LLM(path, **options)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise SalaError(f"{path} does not fit into memory", f"see what would: sala estimate {path}") from None
    if verbose:
        seconds = time.perf_counter() - began
        note(f"{path}: {llm.config.num_hidden_layers} layers, context {llm.ctx:,}, loaded in {seconds:.1f} s")
    return llm


def note(text: str) -> None:
    """A line for the reader that is not part of the answer; what might steer a terminal is spelt out."""
    safe = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
    print(safe, file=sys.stderr)


def read_text(name: str) -> str:
    """A text file, or stdin for `-`."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    except OSError as error:
        raise InputError("file", f"{name} cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("file", f"{name} is not UTF-8 text (byte {error.start})", "convert it to text first") from None


def uses_colour(stream: object) -> bool:
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    return is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
