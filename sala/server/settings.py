"""Settings: how the server runs. They extend the options of loading a model by those of serving it.

A flag beats its variable (`SALA_PORT`), which beats the file's key (`port`).
"""

import ipaddress
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sala.errors import InputError, SalaError
from sala.options import (
    LOOP_GUARD,
    MOST,
    MaxTokens,
    Options,
    Sampling,
    Temperature,
    ThinkBudget,
    TopK,
    TopP,
    schema,
    sources,
)
from sala.options.schema import is_ip, option, option_of, options, read_secret, spelling, table
from sala.options.sources import Given, read_text

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_KEY_FILE = 64 * 1024
MIN_KEY = 16  # characters, where others can reach the server
MAX_SHARED_S = 3600.0
KEY_FIELDS = frozenset({"api_key", "api_key_file"})

_where = partial(option, scope="address and engine")
_keys = partial(option, scope="keys")
_requests = partial(option, scope="requests")
_life = partial(option, scope="life cycle")
_limits = partial(option, scope="limits")
_files = partial(option, scope="files and batches")
_access = partial(option, scope="access")


def _default(name: str, default: Any, **changes: Any) -> Any:
    """Declare what holds for requests that do not set this option of sampling."""
    help = f"{table(Sampling)[name].help} Requests may set another."
    return option_of(Sampling, name, default, scope="requests", help=help, **changes)


Group = Annotated[int, Field(ge=1, le=1 << 10)]
Deadline = Annotated[float, Field(gt=0.0, le=3600.0)]


@options
class Settings(Options):
    """How the server runs. Keys are never shown."""

    host: schema.Address = _where("127.0.0.1", "Address to listen on; 0.0.0.0 is every network, and needs a key.")
    port: int = _where(8080, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    models_dir: schema.File = _where(
        sources.models_dir, "Directory of downloaded models.", shown="the user's data directory"
    )
    engine: Annotated[Literal["sala", "vllm", "sglang"], spelling()] = _where("sala", "Engine that runs the model.")
    tp: Group = _where(1, "GPUs that share every layer; for vllm and sglang.")
    pp: Group = _where(1, "Groups of GPUs that share the layers; for vllm.")
    nodes: Group = _where(1, "Machines that run one model together; for vllm and sglang.")
    node_rank: int = _where(0, "Number of this machine among them; 0 answers the clients.", ge=0, le=1 << 10)
    master: schema.Endpoint | None = _where(None, "HOST:PORT of machine 0, where the machines meet.")

    api_key: schema.Secret | None = _keys(
        None,
        "Key that every request must send; a file or a variable hides it.",
        repr=False,
    )
    admin_key: schema.Secret | None = _keys(
        None, "Key to download, load, unload and delete models.", shown="the API key", repr=False
    )
    api_key_file: schema.File | None = _keys(None, "File that holds the API key.")
    users_load: bool = _keys(
        False, "Let keys that are not admin keys load models by naming them.", off="--only-admins-load"
    )
    keys_file: schema.File | None = _keys(None, "File of named keys, one for each user; see `sala key`.")

    alias: schema.Names = _requests(
        (), "Additional names of the model, separated by commas.", flags=("--served-model-name", "--served-names")
    )
    any_model: bool = _requests(False, "Use the default model for unknown model names.", off="--no-any-model")
    response_store: schema.File | None = _requests(
        None, "Keep responses of the Responses API here, across restarts; by default in memory."
    )
    attention_per_request: bool = _requests(
        False,
        "Let requests choose attention, dense_below and topk; wider attention is slower.",
        off="--no-attention-per-request",
    )
    max_queue: int = _requests(1024, "Maximum queued answers per key; further requests get 429.", ge=0, le=1 << 20)
    max_sequences: int = _requests(1024, "Maximum answers per request (n times prompts).", ge=1, le=1 << 20)
    max_key_sequences: int = _requests(
        0, "Maximum unfinished answers per key; further requests get 429. 0: no limit.", ge=0, le=1 << 20
    )
    max_key_tokens_per_minute: schema.Count = _requests(
        0,
        "Prompt and answer tokens per key and minute; further requests get 429. 0: no limit.",
        ge=0,
        le=MOST,
    )
    max_key_requests_per_minute: int = _requests(
        0, "Requests for answers per key and minute; further ones get 429. 0: no limit.", ge=0, le=1 << 30
    )
    max_request_tokens: schema.Count = _requests(
        0, "Maximum tokens of a request, prompts and answers together; answers are cut. 0: no limit.", ge=0, le=MOST
    )
    max_request_s: float | None = _requests(
        None,
        "Seconds after which the answers of a request are cut; 0: never.",
        shown="3600 with keys_file, else 0",
        ge=0.0,
        le=1e7,
    )
    max_tokens: MaxTokens = _default("max_tokens", 2048)
    temperature: Temperature | None = _default("temperature", None)
    top_p: TopP | None = _default("top_p", None)
    top_k: TopK | None = _default("top_k", None)
    no_think: bool = _requests(False, "Leave the reasoning out of the answers.", off="--think")
    think_budget: ThinkBudget | None = _default("think_budget", None)
    loop_guard: schema.LoopGuard | None = _default("loop_guard", None, shown=f"the model's, or {LOOP_GUARD}")

    warm_up: bool = _life(
        True, "On a GPU, compile kernels and capture the usual graphs before the first request.", off="--no-warm-up"
    )
    idle_unload_s: float = _life(0.0, "Unload a model after this many idle seconds; 0: never.", ge=0.0, le=1e7)
    drain_s: float = _life(30.0, "Seconds that running requests have to finish at shutdown.", ge=0.0, le=86_400.0)

    max_body: schema.Count = _limits(
        64 << 20, "Maximum bytes of a request body; larger ones get 413.", ge=1024, le=1 << 40
    )
    max_responses: int = _limits(1000, "Maximum stored responses; the oldest go first. 0: none.", ge=0, le=1 << 20)
    max_response_bytes: schema.Count = _limits(256 << 20, "Maximum bytes of stored responses.", ge=0, le=1 << 50)
    header_deadline_s: Deadline = _limits(10.0, "Seconds in which the header of a request must arrive.")
    body_deadline_s: Deadline = _limits(60.0, "Seconds that a body may pause before it gets 408.")
    max_connections: int = _limits(256, "Maximum open connections; further ones get 503.", ge=1, le=1 << 16)
    max_per_address: int = _limits(
        0,
        "Maximum connections without a key per address; 0: half of max_connections; this machine: no limit.",
        ge=0,
        le=1 << 16,
    )
    ping_s: Deadline = _limits(15.0, "Seconds between keep-alive comments in a silent stream.")

    files_dir: schema.File = _files(
        sources.files_dir, "Directory of uploaded files and batches.", shown="in the user's data directory"
    )
    max_files: int = _files(1000, "Maximum files per key; 0: no files and no batches.", ge=0, le=1 << 20)
    files_disk: schema.Count = _files(4 << 30, "Maximum bytes of files per key.", ge=0, le=1 << 50)
    file_days: float = _files(30.0, "Default lifetime of an uploaded file in days.", gt=0.0, le=3650.0)
    max_batches: int = _files(16, "Maximum unfinished batches per key; further ones get 429.", ge=1, le=1 << 16)
    batch_lines: schema.Count = _files(50_000, "Maximum requests in a batch.", ge=1, le=1 << 30)
    batch_answers: int | None = _files(
        None, "Batch answers generated at the same time.", shown="half of max_batch", ge=1, le=1 << 16
    )

    cors_origins: schema.Origins = _access((), "Origins of web pages that may call this server.")
    allowed_hosts: schema.Hosts = _access((), "Host names by which clients may call this server.")
    allow_remote_without_key: bool = _access(
        False,
        "Listen beyond this machine without a key; anyone who reaches it can use it.",
        off="--refuse-remote-without-key",
    )
    mcp: schema.File | None = _access(None, "Offer the tools of the MCP servers in this JSON file.")
    mcp_timeout: float = _access(120.0, "Seconds that a tool of an MCP server may take.", gt=0.0, le=86_400.0)
    hub_url: schema.HubUrl = _access(
        "https://huggingface.co", "Hub that models are downloaded from: a URL, or modelscope."
    )
    hub_hosts: schema.Hosts = _access((), "Further hosts that the hub may redirect downloads to.")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], spelling()] = _access(
        "info", "Level of messages on stderr."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        taken = sorted({*self.named_adapters} & {*self.alias})
        if taken:
            raise InputError("adapter", f"names {taken[0]}, which is an alias too", "choose another name")
        if self.api_key_file is None:
            return
        if self.api_key is not None:
            raise InputError("api_key", "cannot be combined with api_key_file", "keep one of them")
        object.__setattr__(self, "api_key", _read_key(self.api_key_file))

    @property
    def loading(self) -> Options:
        """The options of loading a model among the settings."""
        return Options(**{name: getattr(self, name) for name in table(Options)})

    @property
    def needs_key(self) -> bool:
        """Whether requests must bring a key."""
        return self.api_key is not None or self.keys_file is not None

    @property
    def answer_seconds(self) -> float:
        """Seconds after which an answer is cut; 0: never. Where users share a server, none of them has it for ever."""
        if self.max_request_s is not None:
            return self.max_request_s
        return MAX_SHARED_S if self.keys_file is not None else 0.0

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def one_key(layers: Iterable[list[Given]]) -> list[list[Given]]:
    """Let a key replace the key file of a weaker source, and the other way round."""
    kept: list[list[Given]] = []
    for layer in layers:
        if any(given.name in KEY_FIELDS for given in layer):
            kept = [[given for given in weaker if given.name not in KEY_FIELDS] for weaker in kept]
        kept.append(layer)
    return kept


def check_listening(settings: Settings) -> None:
    """Refuse to listen beyond this machine without a key, unless the operator allows it."""
    if settings.is_local:
        return
    if not settings.needs_key and not settings.allow_remote_without_key:
        remedy = "set SALA_API_KEY or --api-key-file, or say --allow-remote-without-key"
        raise SalaError(f"{settings.host} can be reached by others, and there is no key", remedy)
    for name in ("api_key", "admin_key"):
        if 0 < len(getattr(settings, name) or "") < MIN_KEY:
            raise InputError(
                name, f"has fewer than {MIN_KEY} characters and could be guessed", "run: openssl rand -hex 32"
            )


def is_loopback(host: str) -> bool:
    return host in LOCAL_HOSTS or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _read_key(file: Path) -> str:
    text = read_text(file, MAX_KEY_FILE)
    try:
        return read_secret(text)
    except ValueError:
        rule = table(Settings)["api_key"].rule
        raise InputError(f"api_key_file: {file}", "does not hold a valid key", rule) from None
