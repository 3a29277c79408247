"""Settings: how the server runs. They extend the options of loading a model by those of serving it.

A flag beats its variable (`SALA_PORT`), which beats the file's key (`port`).
"""

import ipaddress
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sala.errors import InputError, SalaError
from sala.options import MaxTokens, Options, Temperature, ThinkBudget, TopK, TopP, schema, sources
from sala.options.schema import is_ip, option, options, read_secret, spelling, table
from sala.options.sources import Given, read_text

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_KEY_FILE = 64 * 1024
KEY_FIELDS = frozenset({"api_key", "api_key_file"})

_where = partial(option, scope="address and engine")
_keys = partial(option, scope="keys")
_requests = partial(option, scope="requests")
_life = partial(option, scope="life cycle")
_limits = partial(option, scope="limits")
_access = partial(option, scope="access")

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
        None, "Key that every request must bring; a file or the environment hides it.", repr=False
    )
    admin_key: schema.Secret | None = _keys(
        None, "Key to download, load, unload and delete models.", shown="the API key", repr=False
    )
    api_key_file: schema.File | None = _keys(None, "File that holds the API key.")

    max_queue: int = _requests(64, "Requests that may wait; one more gets 429.", ge=0, le=1 << 20)
    max_tokens: MaxTokens = _requests(2048, "Length of an answer whose request does not say.", flags=("-n",))
    temperature: Temperature = _requests(
        0.7, "For requests that do not say; 0 takes the most probable token.", flags=("-t",)
    )
    top_p: TopP = _requests(1.0, "For requests that do not say.")
    top_k: TopK = _requests(0, "For requests that do not say; 0: no limit.")
    no_think: bool = _requests(False, "Leave the reasoning out of the answers.", off="--think")
    think_budget: ThinkBudget | None = _requests(None, "Tokens of reasoning at most, then the answer.")
    loop_guard: schema.LoopGuard = _requests(512, "End an answer that repeats itself for so many tokens; 0: never.")

    idle_unload_s: float = _life(0.0, "Unload a model after so many idle seconds; 0: never.", ge=0.0, le=1e7)
    drain_s: float = _life(30.0, "Seconds that running requests get to end at shutdown.", ge=0.0, le=86_400.0)

    max_body: schema.Count = _limits(64 << 20, "Bytes of a request at most; more gets 413.", ge=1024, le=1 << 40)
    header_deadline_s: Deadline = _limits(10.0, "Seconds in which the header of a request must arrive.")
    body_deadline_s: Deadline = _limits(60.0, "Seconds that a body may pause before it gets 408.")
    max_connections: int = _limits(256, "Connections at a time; one more gets 503.", ge=1, le=1 << 16)
    ping_s: Deadline = _limits(15.0, "Seconds between signs of life in a silent stream.")

    cors_origins: schema.Origins = _access((), "Origins of web pages that may call this server.")
    allowed_hosts: schema.Hosts = _access((), "Names by which clients may call this server.")
    allow_remote_without_key: bool = _access(
        False,
        "Listen beyond this machine without a key: anyone there can use it.",
        off="--refuse-remote-without-key",
    )
    hub_url: schema.HubUrl = _access(
        "https://huggingface.co", "Hub that models are downloaded from: an address, or modelscope."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], spelling()] = _access(
        "info", "Level of messages on stderr."
    )

    def __post_init__(self) -> None:
        if self.api_key_file is None:
            return
        if self.api_key is not None:
            raise InputError("api_key", "is given, and api_key_file too", "keep one of them")
        object.__setattr__(self, "api_key", _read_key(self.api_key_file))

    @property
    def loading(self) -> Options:
        """The options of loading a model among the settings."""
        return Options(**{name: getattr(self, name) for name in table(Options)})

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
    if not settings.is_local and settings.api_key is None and not settings.allow_remote_without_key:
        remedy = "set SALA_API_KEY or --api-key-file, or say --allow-remote-without-key"
        raise SalaError(f"{settings.host} can be reached by others, and there is no key", remedy)


def is_loopback(host: str) -> bool:
    return host in LOCAL_HOSTS or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _read_key(file: Path) -> str:
    text = read_text(file, MAX_KEY_FILE)
    try:
        return read_secret(text)
    except ValueError:
        rule = table(Settings)["api_key"].rule
        raise InputError(f"api_key_file: {file}", "does not hold a valid key", rule) from None
