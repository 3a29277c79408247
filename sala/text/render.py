"""The process that renders chat templates: requests on stdin, replies on stdout.

After one byte that reports it is ready, each message is a length of 8 bytes, then JSON. The process holds no secrets of
the user and can be killed at any time.
"""

import json
import signal
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30


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
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return the rendered text, or the error: a failing template must not end the process."""
    try:
        return {"text": render(request["source"], request["variables"], request["limit"])}
    except MemoryError:
        return {"error": "it ran out of memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    replies.write(b"+")
    replies.flush()
    while len(head := requests.read(8)) == 8:
        request = json.loads(requests.read(int.from_bytes(head, "little")).decode("utf-8", "surrogatepass"))
        _die_after(request["seconds"] + 1)
        reply = json.dumps(answer(request)).encode()
        _die_after(0)
        replies.write(len(reply).to_bytes(8, "little") + reply)
        replies.flush()


def _limit_memory() -> None:
    """Limit memory where the system allows it; the time limit holds everywhere."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, ValueError, OSError):  # Windows has no such module, macOS no such limit
        return


def _die_after(seconds: float) -> None:
    """End the process after `seconds`, also if the parent has been killed in the meantime; 0 cancels."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    _limit_memory()
    serve(sys.stdin.buffer, sys.stdout.buffer)
