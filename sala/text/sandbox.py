"""The process for work on untrusted input that may not end: renders chat templates, tries grammars.

Requests on stdin, replies on stdout; the first line reports that it is ready, each message is one line of JSON. The
process holds no secrets of the user and can be killed at any time.
"""

import functools
import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
OUT_OF_MEMORY = "it ran out of memory"


class _TooLong(Exception):
    """The output exceeds its limit."""


def render(source: str, variables: dict[str, Any], limit: int) -> str:
    """Render under the sandbox; output beyond `limit` bytes is an error."""
    pieces, size = [], 0
    for piece in environment().from_string(source).generate(**variables):
        size += len(piece)
        if size > limit:
            raise _TooLong(f"more than {limit >> 20} MiB of output")
        pieces.append(piece)
    return "".join(pieces)


def environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
    return env


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def try_grammar(grammar: str, tokenizer: str, vocab_size: int, stop_ids: list[int]) -> str:
    """Compile a grammar up to its first mask."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_load_tokenizer(tokenizer, vocab_size, tuple(stop_ids)), grammar)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return ""


def load_tokenizer(tokenizer: str, vocab_size: int, stop_ids: list[int]) -> str:
    """Load what all grammars for a tokenizer need."""
    _load_tokenizer(tokenizer, vocab_size, tuple(stop_ids))
    return ""


@functools.cache
def _load_tokenizer(file: str, vocab_size: int, stop_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(file, n_vocab=vocab_size, eos_token=list(stop_ids) or None)


Tasks = dict[str, Callable[..., Any]]
TASKS: Tasks = {"render": render, "tokenizer": load_tokenizer, "grammar": try_grammar}


def answer(request: dict[str, Any], tasks: Tasks = TASKS) -> dict[str, Any]:
    """Return what a task makes, or the error: a failing template must not end the process."""
    try:
        return {"text": tasks[request["task"]](**request["arguments"])}
    except MemoryError:
        return {"error": OUT_OF_MEMORY}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def serve(requests: BinaryIO, replies: BinaryIO, tasks: Tasks = TASKS) -> None:
    replies.write(b"\n")
    replies.flush()
    for line in requests:
        request = json.loads(line)
        _die_after(request["seconds"] + 1)
        reply = json.dumps(answer(request, tasks)).encode()
        _die_after(0)
        replies.write(reply + b"\n")
        replies.flush()


def limit_resources(memory_bytes: int, **others: int) -> None:
    """Limit memory and other resources, for good, where the system allows it; time is limited anyway."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    for name, wanted in {"RLIMIT_AS": memory_bytes, **others}.items():
        try:
            kind = getattr(resource, name)
            _, hard = resource.getrlimit(kind)
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (limit, limit))
        except (AttributeError, ValueError, OSError):  # macOS does not limit memory
            continue


def _die_after(seconds: float) -> None:
    """End the process after `seconds`, also if the parent has been killed in the meantime; 0 cancels."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    limit_resources(MEMORY_BYTES)
    serve(sys.stdin.buffer, sys.stdout.buffer)
