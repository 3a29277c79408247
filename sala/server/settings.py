"""Settings: one schema for the file, the environment and the flags of `sala serve`.

A flag beats its variable (`SALA_PORT`), which beats the file's key (`port`). Nothing unknown is passed over: a slip of
the pen is an error that says where it is.
"""

import difflib
import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from sala.errors import InputError, SalaError
from sala.options.kinds import read_count

PREFIX = "SALA_"
OTHER_VARIABLES = frozenset(
    {
        "SALA_CHROMIUM",
        "SALA_CONFIG",
        "SALA_KERNELS",
        "SALA_OPENAI_SCHEMA",
        "SALA_PACKED",
        "SALA_PREFILL",
        "SALA_SCREENSHOTS",
        "SALA_SESSIONS_DIR",
        "SALA_SGLANG_PYTHON",
        "SALA_TEST_CLIENTS",
        "SALA_TEST_DEVICE",
        "SALA_TEST_ENGINES",
        "SALA_TEST_FINETUNE",
        "SALA_VLLM_PYTHON",
    }
)
MASK = "***"
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_KEY_FILE = 64 * 1024
MAX_FILE = 1 << 20
KEY_FIELDS = frozenset({"api_key", "api_key_file"})


class Kind(Protocol):
    """How a value is read, and checked. ValueError says what is wrong with it; it must not repeat a secret."""

    def read(self, value: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Text:
    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"is {_short(value)}; give some text")
        if not value.isprintable():
            raise ValueError("holds characters that cannot be printed; give plain text")
        return value.strip()


@dataclass(frozen=True, slots=True)
class Secret:
    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("is empty; give a key, or leave the setting out")
        if not re.fullmatch(r"[\x21-\x7e]+", value.strip()):
            raise ValueError("holds spaces or characters beyond ASCII; use letters, digits and signs")
        return value.strip()


@dataclass(frozen=True, slots=True)
class Whole:
    low: int
    high: int

    def read(self, value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value.strip(), re.ASCII):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"is {_short(value)}; give a whole number")
        if not self.low <= value <= self.high:
            raise ValueError(f"is {value}; it goes from {self.low} to {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number that may be written 64M or 128k."""

    low: int = 1
    high: int = 1 << 50

    def read(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"is {_short(value)}; write 4096, 128k or 1M")
        try:
            value = read_count(value)
        except ValueError:
            raise ValueError(f"is {_short(value)}; write 4096, 128k or 1M") from None
        return Whole(self.low, self.high).read(value)


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    is_low_open: bool = False

    def read(self, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"is {_short(value)}; give a number")
        if not self.low <= number <= self.high or (self.is_low_open and number == self.low):
            least = "more than" if self.is_low_open else "at least"
            raise ValueError(f"is {number:g}; it is {least} {self.low:g} and at most {self.high:g}")
        return number


@dataclass(frozen=True, slots=True)
class Flag:
    off: str  # the flag that says no

    def read(self, value: Any) -> bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if isinstance(value, str) and value.strip().lower() in words:
            return words[value.strip().lower()]
        if not isinstance(value, bool):
            raise ValueError(f"is {_short(value)}; say true or false")
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    names: tuple[str, ...]

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in self.names:
            close = difflib.get_close_matches(str(value).lower(), self.names, 1)
            hint = f"did you mean {close[0]}?" if close else f"use {', '.join(self.names)}"
            raise ValueError(f"is {_short(value)}; {hint}")
        return value.strip().lower()


@dataclass(frozen=True, slots=True)
class Place:
    """A file or a directory; `~` is the user's home."""

    def read(self, value: Any) -> Path:
        if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
            raise ValueError(f"is {_short(value)}; give a path")
        try:
            return Path(value).expanduser()
        except RuntimeError:
            raise ValueError(f"is {_short(value)}; there is no such user") from None


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address, or a name without port and scheme."""

    def read(self, value: Any) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if not is_ip(bare) and not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?\.?", bare):
            raise ValueError(f"is {_short(value)}; give an address or a name such as 127.0.0.1, without port")
        return bare


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address or name, with a port."""

    def read(self, value: Any) -> str:
        host, _, port = value.strip().rpartition(":") if isinstance(value, str) else ("", "", "")
        if not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
            raise ValueError(f"is {_short(value)}; write it as HOST:PORT, such as 10.0.0.1:29500")
        name = Address().read(host)
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a browser sends as Origin: scheme, host and port, nothing more."""

    def read(self, value: Any) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        if not re.fullmatch(r"https?://[a-z0-9_.\-\[\]:]+", text) or not _has_host(text):
            raise ValueError(f"is {_short(value)}; write it as https://example.org or http://localhost:3000")
        return text


@dataclass(frozen=True, slots=True)
class Url:
    def read(self, value: Any) -> str:
        text = value.strip() if isinstance(value, str) else ""
        if not re.fullmatch(r"https?://[^\s@\\?#]+", text) or not _has_host(text):
            raise ValueError(f"is {_short(value)}; write it as https://example.org")
        return text.rstrip("/")


@dataclass(frozen=True, slots=True)
class Several:
    """A list; as text its parts stand between commas."""

    kind: Kind

    def read(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str):
            value = [part for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError(f"is {_short(value)}; give a list")
        return tuple(self.kind.read(part) for part in value)


def _default_models_dir() -> Path:
    from sala.models.embedded import models_dir

    return models_dir()


def setting(default: Any, kind: Kind, words: str, shown: str | None = None) -> Any:
    """A field of Settings. `shown` stands for the default where that is found only at run time."""
    metadata = {"kind": kind, "help": words, "shown": shown}
    is_secret = isinstance(kind, Secret)
    if callable(default):
        return field(default_factory=default, metadata=metadata, repr=not is_secret)
    return field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True)
class Settings:
    """How the server runs. Every value is checked, wherever it comes from; keys never show."""

    host: str = setting("127.0.0.1", Address(), "Address to listen on; 0.0.0.0 is every network, and needs a key.")
    port: int = setting(8080, Whole(0, 65535), "Port to listen on; 0 takes a free one.")
    model: str | None = setting(None, Text(), "Model that answers by default: a directory or a name.", "smol-sala")
    adapter: Path | None = setting(None, Place(), "LoRA adapter that is merged into that model.")  # noqa: RUF009
    models_dir: Path = setting(  # noqa: RUF009
        _default_models_dir, Place(), "Where downloaded models lie.", "the user's data directory"
    )
    engine: str = setting("sala", Choice(("sala", "vllm", "sglang")), "What computes: sala, vllm or sglang.")
    tp: int = setting(1, Whole(1, 1 << 10), "GPUs that share every layer; for vllm and sglang.")
    pp: int = setting(1, Whole(1, 1 << 10), "Groups of GPUs that share the layers; for vllm.")
    nodes: int = setting(1, Whole(1, 1 << 10), "Machines that run one model together; for vllm and sglang.")
    node_rank: int = setting(0, Whole(0, 1 << 10), "Which of them this one is; 0 answers the clients.")
    master: str | None = setting(None, Endpoint(), "Where the machines meet: HOST:PORT of machine 0.")

    api_key: str | None = setting(
        None, Secret(), "Key that every request must bring. A file or the environment hides it."
    )
    admin_key: str | None = setting(None, Secret(), "Key to download, load, unload and delete models.", "the API key")
    api_key_file: Path | None = setting(None, Place(), "File that holds the API key.")  # noqa: RUF009

    backend: str = setting("auto", Text(), "auto, torch or mlx.")
    device: str = setting("auto", Text(), "auto, cpu, cuda, cuda:N or mps.")
    dtype: str = setting("auto", Choice(("auto", "bfloat16", "float16", "float32")), "Precision of the weights.")
    kv: str = setting("auto", Choice(("auto", "fp8")), "Keys and values: as they are computed, or rounded to fp8.")
    ctx: int | None = setting(None, Count(), "Longest sequence in tokens, e.g. 128k or 1M.", "by free memory")
    cache_memory: int | None = setting(None, Count(), "Bytes for the past of all sequences.", "half of what is free")
    cache_dir: Path | None = setting(None, Place(), "Keep long pasts here, across restarts.")  # noqa: RUF009
    max_batch: int = setting(8, Whole(1, 1 << 16), "Sequences that run at a time.")
    speculate: str = setting("off", Choice(("off", "lookup", "layers")), "Where drafts come from.")
    num_draft: int = setting(4, Whole(1, 16), "Tokens guessed at a time.")
    draft_layers: int = setting(8, Whole(1, 1 << 10), "Layers that guess, with speculate = layers.")

    max_queue: int = setting(64, Whole(0, 1 << 20), "Requests that may wait; one more gets 429.")
    max_tokens: int = setting(2048, Count(high=1 << 31), "Length of an answer whose request does not say.")
    temperature: float = setting(0.7, Number(0, 100), "For requests that do not say; 0 takes the most probable token.")
    top_p: float = setting(1.0, Number(0, 1, is_low_open=True), "For requests that do not say.")
    top_k: int = setting(0, Whole(0, 1 << 31), "For requests that do not say; 0: no limit.")
    no_think: bool = setting(False, Flag("--think"), "Leave the reasoning out of the answers.")
    think_budget: int | None = setting(None, Count(low=0), "Tokens of reasoning at most, then the answer.")
    loop_guard: int = setting(
        512, Count(low=0, high=1 << 20), "End an answer that repeats itself for so many tokens; 0: never."
    )

    idle_unload_s: float = setting(0.0, Number(0, 1e7), "Unload a model after so many idle seconds; 0: never.")
    drain_s: float = setting(30.0, Number(0, 86_400), "Seconds that running requests get to end at shutdown.")

    max_body: int = setting(
        64 << 20, Count(low=1024, high=1 << 40), "Bytes of a request at most; more gets 413.", "64M"
    )
    header_deadline_s: float = setting(
        10.0, Number(0, 3600, is_low_open=True), "Seconds in which the header of a request must arrive."
    )
    body_deadline_s: float = setting(
        60.0, Number(0, 3600, is_low_open=True), "Seconds that a body may pause before it gets 408."
    )
    max_connections: int = setting(256, Whole(1, 1 << 16), "Connections at a time; one more gets 503.")
    ping_s: float = setting(
        15.0, Number(0, 3600, is_low_open=True), "Seconds between signs of life in a silent stream."
    )

    cors_origins: tuple[str, ...] = setting((), Several(Origin()), "Web pages of other origins that may call.")
    allowed_hosts: tuple[str, ...] = setting((), Several(Address()), "Names by which clients may call this server.")
    allow_remote_without_key: bool = setting(
        False, Flag("--refuse-remote-without-key"), "Listen beyond this machine without a key: anyone there can use it."
    )
    hub_url: str = setting("https://huggingface.co", Url(), "Hub that models are downloaded from.")
    log_level: str = setting("info", Choice(("debug", "info", "warning", "error")), "How much is told on stderr.")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            try:
                object.__setattr__(self, each.name, KINDS[each.name].read(value))
            except ValueError as error:
                raise _problem(each.name, error) from None
        if 0 < self.loop_guard < 32:
            raise InputError("loop_guard", f"is {self.loop_guard}", "it is 0 or at least 32")
        if self.api_key_file is not None:
            if self.api_key is not None:
                raise InputError("api_key", "is given, and api_key_file too", "keep one of them")
            object.__setattr__(self, "api_key", _read_key(self.api_key_file))

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> "Settings":
        return cls(**gather(file, environment, flags))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    def show(self) -> dict[str, Any]:
        """Every setting as it may be printed."""
        return {each.name: self._shown(each) for each in fields(self)}

    def _shown(self, each: "Field[Any]") -> Any:
        value = getattr(self, each.name)
        if isinstance(each.metadata["kind"], Secret) and value is not None:
            return MASK
        return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def gather(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What is set: flags beat the environment, which beats the file. `None` is a flag that was not given."""
    values: dict[str, Any] = {}
    for layer in (read_file(file), read_environment(environment), read_flags(flags)):
        if layer.keys() & KEY_FIELDS:  # a key replaces a key file, and the other way round
            values = {name: value for name, value in values.items() if name not in KEY_FIELDS}
        values |= layer
    return values


def check_listening(settings: Settings) -> None:
    """Beyond this machine only with a key, or with the operator's word that none is wanted."""
    if not settings.is_local and settings.api_key is None and not settings.allow_remote_without_key:
        raise SalaError(
            f"{settings.host} can be reached by others, and there is no key",
            "set SALA_API_KEY or --api-key-file, or say --allow-remote-without-key",
        )


def read_file(file: Path | None) -> dict[str, Any]:
    """The settings of a TOML file; the keys are the names of the fields."""
    if file is None:
        return {}
    text = _read_text(file, MAX_FILE)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SalaError(f"{file} is no TOML: {error}", "correct it there") from None
    values = {}
    for key, value in table.items():
        origin = f"{file}{_find_line(text, key)}: {_short(key)[1:-1]}"
        if key not in KINDS:
            raise SalaError(f"{origin} is no setting", _suggest(key))
        values[key] = _read(key, value, origin)
    return values


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings among the variables; an empty one counts as not set."""
    values = {}
    for variable, value in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in KINDS or variable != variable_name(name):
            raise SalaError(f"{variable} in the environment is no setting", _suggest(name, variable_name, "unset it"))
        if value.strip():
            values[name] = _read(name, value, variable)
    return values


def read_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in flags.items():
        if value is None or value == []:
            continue
        if name not in KINDS:
            raise SalaError(f"{flag_name(name)} is no setting", _suggest(name, flag_name))
        values[name] = _read(name, value, flag_name(name))
    return values


def show_default(each: "Field[Any]") -> str:
    """A field's default as people would write it; nothing if it is not set."""
    if each.metadata["shown"] is not None:
        return str(each.metadata["shown"])
    if isinstance(each.default, bool):
        return "true" if each.default else ""
    return (
        ""
        if each.default in (None, ())
        else f"{each.default:g}"
        if isinstance(each.default, float)
        else str(each.default)
    )


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return PREFIX + name.upper()


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host in LOCAL_HOSTS or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _read(name: str, value: Any, origin: str) -> Any:
    try:
        return KINDS[name].read(value)
    except ValueError as error:
        raise _problem(origin, error) from None


def _problem(origin: str, error: ValueError) -> InputError:
    message, _, remedy = str(error).partition("; ")
    return InputError(origin, message, remedy)


def _suggest(name: str, spell: Callable[[str], str] = str, otherwise: str = "remove it") -> str:
    close = difflib.get_close_matches(name, KINDS, 1)
    return f"did you mean {spell(close[0])}?" if close else f"{otherwise}; docs/reference/server.md lists all"


def _find_line(text: str, key: str) -> str:
    """Where a key stands in a TOML text."""
    wanted = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((f", line {number}" for number, line in enumerate(text.splitlines(), 1) if wanted.match(line)), "")


def _read_key(file: Path) -> str:
    text = _read_text(file, MAX_KEY_FILE)
    try:
        return Secret().read(text)
    except ValueError as error:
        raise _problem(f"api_key_file: {file}", error) from None


def _read_text(file: Path, max_bytes: int) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise SalaError(f"{file} cannot be read: {error.strerror}", "name a file that can be") from None
    if len(data) > max_bytes:
        raise SalaError(f"{file} has more than {max_bytes:,} bytes", "is it the right file?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SalaError(f"{file} is not UTF-8 text (byte {error.start})", "is it the right file?") from None


def _has_host(url: str) -> bool:
    """Whether the URL has a host, and a port that can be if it has one."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


KINDS: dict[str, Kind] = {each.name: each.metadata["kind"] for each in fields(Settings)}
