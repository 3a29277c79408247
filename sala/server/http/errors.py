"""Errors as clients see them: OpenAI's envelope, or Anthropic's on its routes.

A message never holds a path of the server, a stack trace or a memory address.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sala import errors as causes
from sala.server.http.body import dump

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

MAX_MESSAGE = 1000
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC = re.compile(r"(/v1)?/messages(/count_tokens)?")
_ANTHROPIC_TYPES = _TYPES | {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """An unsuccessful response, as an exception and as an ASGI application that sends it."""

    status_code: int
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None
    retry_s: int | None = None  # when to try again
    extra: Mapping[str, Any] = field(default_factory=dict)  # further keys of the error object

    def __post_init__(self) -> None:
        super().__init__(self.message)
        other = "invalid_request_error" if self.status_code < 500 else "server_error"
        self.type = self.type or _TYPES.get(self.status_code, other)

    def envelope(self, path: str = "") -> dict[str, Any]:
        """Return the body, in the form that clients of that path expect."""
        if _ANTHROPIC.fullmatch(path):
            return anthropic_envelope(self)
        error = {"message": self.message[:MAX_MESSAGE], "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.extra}}

    def compose(self, path: str) -> tuple[dict[str, str], bytes]:
        """Return headers and body of the response."""
        body = dump(self.envelope(path))
        headers = {"content-length": str(len(body)), "content-type": "application/json", **(self.headers or {})}
        return headers | ({} if self.retry_s is None else {"retry-after": str(self.retry_s)}), body

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        headers, body = self.compose(scope["path"])
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status_code, "headers": raw})
        await send({"type": "http.response.body", "body": body})


def anthropic_envelope(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    message = error.message
    if error.param is not None and not message.startswith(error.param):
        message = f"{error.param}: {message}"
    if error.code == "context_length_exceeded":  # clients that compact their prompts look for this
        message = f"prompt is too long: {error.extra['n_prompt_tokens']} tokens > {error.extra['n_ctx']} maximum"
    kind = _ANTHROPIC_TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message[:MAX_MESSAGE], **error.extra}}


def refer(name: str) -> dict[str, Any]:
    """Return the content of a response that `reference/schemas.json` describes under this name."""
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}


def describe(*statuses: int, answer: str | None = None, success: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route, for its documentation: errors, and what is sent if there are none."""
    found: dict[int | str, dict[str, Any]] = {} if answer is None else {success: refer(answer)}
    return found | {status: {"description": DESCRIPTIONS[status], **refer("ErrorEnvelope")} for status in statuses}


DESCRIPTIONS = {
    400: "The request is not valid; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "The key or the origin does not permit this.",
    404: "There is no such model, file, document or batch.",
    408: "The request arrived too slowly.",
    409: "The state of the model, file or batch does not permit this now.",
    413: "The request is too large.",
    415: "The body must be uncompressed application/json.",
    421: "The server does not answer to that host name.",
    429: "The queue is full; `Retry-After` says when to try again.",
    431: "The header is too large.",
    500: "Internal error.",
    503: "The model is not ready; `Retry-After` says when to try again.",
    507: "The disk is full or read-only.",
}
GUARDED = describe(400, 403, 408, 413, 415, 421, 431, 500, 503)  # what every route can return
ALWAYS = GUARDED | describe(401, 404, 429)

# status, code, and where it differs from the exception's own text, the message; the first match counts
_KNOWN: dict[type[BaseException], tuple[int, str, str | None]] = {
    causes.ContextTooLong: (400, "context_length_exceeded", None),
    causes.NoTokenizer: (400, "no_tokenizer", "this model has no tokenizer; send token ids instead of text"),
    causes.InputError: (400, "invalid_value", None),
    causes.TemplateError: (400, "invalid_value", None),
    causes.QueueFull: (429, "queue_full", None),
    causes.EngineClosed: (503, "shutting_down", "the server is shutting down"),
    causes.EngineDead: (500, "engine_dead", "the engine has stopped; restart the server"),
    causes.CacheTooSmall: (400, "cache_too_small", None),
    causes.ScoringTooSlow: (400, "time_limit", None),
    causes.ModelBroken: (500, "model_broken", "the model computed values that are not numbers; it may be damaged"),
    causes.TokenizerFailed: (500, "tokenizer_failed", "the model's tokenizer fails on this text; it may be damaged"),
    causes.MissingExtra: (400, "not_available", None),
    causes.DiskFull: (507, "disk_full", "the server's disk is full; try again when there is space"),
    causes.NotWritable: (507, "not_writable", "the server may not write to its disk; its log names the directory"),
}
_OUT_OF_MEMORY = (
    "there is not enough memory for this request; send a shorter one, or try again when others have finished"
)
_UNEXPECTED = "the request failed with an internal error; the server's log says more"


def from_exception(error: BaseException) -> ApiError:
    """Return what a client may know about an error."""
    if isinstance(error, ApiError):
        return error
    known = next((found for kind, found in _KNOWN.items() if isinstance(error, kind)), None)
    if known is None:
        known = (
            (503, "out_of_memory", _OUT_OF_MEMORY) if is_out_of_memory(error) else (500, "server_error", _UNEXPECTED)
        )
    status, code, message = known
    param = "messages" if isinstance(error, causes.TemplateError) else getattr(error, "field", None)
    extra = {}
    if isinstance(error, causes.ContextTooLong):
        message = word_overflow(error)
        extra = {"n_prompt_tokens": error.num_tokens, "n_ctx": error.max_tokens}
    retry_s = {429: 2, 503: 30}.get(status)
    return ApiError(status, message or str(error), param=param, code=code, retry_s=retry_s, extra=extra)


def word_overflow(error: causes.ContextTooLong) -> str:
    """Return the message in the words by which libraries recognise that a conversation must be shortened.

    litellm and others look for OpenAI's first sentence, langchain for "prompt is too long".
    """
    least, most = error.num_tokens, error.max_tokens
    count = f"{least} tokens" if error.is_whole else f"more than {least} tokens"
    return (
        f"This model's maximum context length is {most} tokens. However, your messages resulted in {count}. "
        "The prompt is too long. Please reduce the length of the messages, or raise the context of the server (ctx) to "
        f"at least {least + 1}."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise MemoryError and, by their messages, the out-of-memory errors of frameworks, without importing those."""
    if isinstance(error, MemoryError):
        return True
    words = str(error).lower() if isinstance(error, RuntimeError) else ""
    return "out of memory" in words or "can't allocate memory" in words


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first of pydantic's validation errors."""
    error = errors[0] if errors else {}
    kind = error.get("type")
    context = error.get("ctx") or {}
    path = [part for part in error.get("loc", ()) if not str(part).startswith("~")]
    where, path = (path[0], path[1:]) if path and path[0] in ("body", "query", "path", "header") else ("body", path)
    if "field" in context:
        path = [*path, context["field"]]
    param = join_path(path)
    message = str(error.get("msg", "the request is not valid"))
    if kind == "missing" and not path:
        message = "the request has no body; send a JSON object"
    elif kind in ("model_attributes_type", "model_type", "dict_type") and not path:
        message = f"the {where} must be a JSON object"
    elif kind == "none_required":
        message = "is not supported; leave it out"
    codes = {"missing": "missing_required_parameter", "unknown_field": "unknown_parameter"}
    code = codes.get(str(kind), "invalid_value")
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def join_path(path: Sequence[str | int]) -> str | None:
    """Return a path as text: ("messages", 0, "role") becomes messages[0].role."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{str(part)[:200]}"
    return text.removeprefix(".") or None
