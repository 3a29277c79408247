"""Errors that a user may see: each says what happened and what to do about it, in one line."""

import errno
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SalaError(Exception):
    """The root of all errors that are meant for a user. `remedy` is what to do next.

    An error whose words never vary has them as attributes of its class.
    """

    message = remedy = ""

    def __init__(self, message: str = "", remedy: str = "") -> None:
        self.message = message or self.message
        self.remedy = remedy or self.remedy
        super().__init__(f"{self.message}; {self.remedy}" if self.remedy else self.message)


class ConfigError(SalaError):
    """config.json describes a model that cannot exist or that we cannot run."""


class CheckpointError(SalaError):
    """The weight files are damaged, incomplete, or belong to another model."""


class ModelBroken(SalaError):
    """The model computes values that are not numbers, so there is nothing to sample."""

    message = "the model computed values that are not numbers"
    remedy = "its weights may be damaged, or too large for this precision: get them again, or try --dtype fp32"


class ModelNotFound(SalaError):
    """There is no model at this path or of this name."""


class MissingExtra(SalaError):
    """An optional dependency is needed; the remedy is its pip command."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed", f"run: {install_command(extra)}")


def describe_error(error: BaseException) -> str:
    """Return kind and message of any error in one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]' in the checkout of sala"
    # vLLM and SGLang pin other versions than constraints.txt does.
    pins = "" if extra in ("vllm", "sglang") else f"-c {shlex.quote(str(root / 'constraints.txt'))} "
    return f"pip install {pins}-e {shlex.quote(f'{root}[{extra}]')}"


class DiskFull(SalaError):
    """The disk has no room for a file."""


class NotWritable(SalaError):
    """A file or directory may not be written."""


def check_space(path: Path, needed: int, purpose: str = "") -> None:
    """Raise DiskFull unless the disk that holds `path` has `needed` free bytes."""
    free = free_disk_bytes(path)
    if free is not None and needed > free:
        raise _disk_full(path, purpose, needed, free)


# How libraries that do not raise OSError say that a disk is full: safetensors, and torch when it saves an archive.
_FULL = re.compile("No space left on device|PytorchStreamWriter failed writing")


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raise DiskFull or NotWritable, with the path and the sizes, where the block fails to write below `path`."""
    try:
        yield
    except OSError as error:
        explained = explain_write_error(error, path, needed)
        if explained is None:
            raise
        raise explained from None
    except Exception as error:
        if not _FULL.search(str(error)):
            raise
        raise _disk_full(path, "", needed, free_disk_bytes(path)) from None


def explain_write_error(error: OSError, path: Path | None = None, needed: int | None = None) -> SalaError | None:
    """Return an error with a remedy for a full disk or a missing permission; None for any other error."""
    named = None if error.filename is None else Path(str(error.filename))
    if path is not None and named is not None and not named.is_relative_to(path.parent):
        return None  # another file, for example one that is being read
    path = path or named
    if path is None:
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(path, "", needed, free_disk_bytes(path))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "change its permissions or use another directory"
        return NotWritable(f"{path} cannot be accessed: {error.strerror}", remedy)
    return None


def _disk_full(path: Path, purpose: str, needed: int | None, free: int | None) -> DiskFull:
    sizes = [] if needed is None else [f"{purpose}{' ' if purpose else ''}needs {_size(needed)}"]
    sizes += [] if free is None else [f"{_size(free)} are free"]
    detail = f" ({', '.join(sizes)})" if sizes else ""
    remedy = "free some space or use a directory on another disk"
    return DiskFull(f"no space left on the disk for {path}{detail}", remedy)


def free_disk_bytes(path: Path) -> int | None:
    """Return the free bytes of the disk that holds `path`, which may not exist yet; None if that is unknown."""
    for place in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def _size(count: int) -> str:
    unit, name = (1e9, "GB") if count >= 1e8 else (1e6, "MB") if count >= 1e5 else (1e3, "KB")
    return f"{count / unit:.1f} {name}"


class InputError(SalaError, ValueError):
    """A request asks for something impossible; `field` names what is wrong and `problem` says why."""

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field} {problem}", remedy)


class UnknownOption(SalaError, TypeError):
    """An argument that does not exist, with a suggestion."""

    def __init__(self, where: str, name: str, remedy: str) -> None:
        self.name = name
        super().__init__(f"{where} has no option {name[:100]!r}", remedy)


class ContextTooLong(SalaError):
    """The prompt does not fit; carries the numbers. One that is far too long is not counted to its end."""

    def __init__(self, num_tokens: int, max_tokens: int, is_whole: bool = True) -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.is_whole = is_whole
        count = f"{num_tokens:,}" if is_whole else f"more than {num_tokens:,}"
        super().__init__(
            f"the prompt has {count} tokens and the context holds {max_tokens:,}",
            f"shorten it or raise the context (ctx) to at least {num_tokens + 1}",
        )


class TemplateError(SalaError):
    """The chat template is invalid or hostile, or it rejects the messages."""


class NoTokenizer(SalaError):
    """The checkpoint has no tokenizer files, and text was asked for."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} has no tokenizer.json", "pass token ids, or copy the tokenizer files there")


class TokenizerFailed(SalaError):
    """The model's tokenizer fails on a text, as no sound one does."""

    message = "the model's tokenizer fails on this text"
    remedy = "its tokenizer.json may be damaged: download it again, or use another model"


class CacheTooSmall(SalaError):
    """The KV cache cannot hold a request, even with nothing else in it."""

    message = "the request does not fit into the KV cache"
    remedy = "give the cache more memory (cache_memory) or shorten it"


class QueueFull(SalaError):
    """Too many requests, or answers, wait already; carries their number."""

    def __init__(self, num_waiting: int, what: str = "requests") -> None:
        self.num_waiting = num_waiting
        super().__init__(f"{num_waiting} {what} wait already", "try again later")


class ShareFull(QueueFull):
    """A client waits for as many answers as it may."""

    def __init__(self, num_waiting: int, limit: int) -> None:
        self.num_waiting = num_waiting
        message = f"this key waits for {num_waiting} answers already, of {limit} at a time"
        SalaError.__init__(self, message, "send this when they have arrived")


class ScoringTooSlow(SalaError):
    """Prompts were not scored within the time that a request may take: a part of their scores is of no use."""

    def __init__(self, seconds: float) -> None:
        problem = f"the prompts were not scored within the {seconds:g} s that a request may take (max_request_s)"
        super().__init__(problem, "send fewer or shorter prompts at a time")


class SlowReader(SalaError):
    """A stream was not read fast enough: its request has been cancelled."""

    message = "the answer was not read fast enough and has been cancelled"
    remedy = "read the stream faster"


class EngineClosed(SalaError):
    """The model has been closed, or is being closed."""

    message, remedy = "the model has been closed", "load it again"


class EngineDead(SalaError):
    """The engine thread has ended after an error that no request can survive."""

    message = "the engine has stopped"
    remedy = "load the model again; after a fork, in the child process"
