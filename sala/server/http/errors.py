"""Errors as clients see them: OpenAI's envelope, or Anthropic's on its routes.

A message never holds a path of the server, a stack trace or a memory address.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi import HTTPException as FastHTTPException
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from sala.errors import (
    CacheTooSmall,
    ContextTooLong,
    EngineClosed,
    EngineDead,
    InputError,
    MissingExtra,
    NoTokenizer,
    QueueFull,
    SalaError,
    TemplateError,
)
from sala.server.http.sse import dump

MAX_MESSAGE = 1000
METHODS = ("DELETE", "GET", "HEAD", "POST")
CLIENT_GONE = 499  # for the log only: the client has disconnected
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC = re.compile(r"(/v1)?/messages(/count_tokens)?")
_ANTHROPIC_TYPES = _TYPES | {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
_WORDS = {
    404: "there is no route at this path",
    405: "this path does not support that method",
    413: "the request is too large",
}
_log = logging.getLogger("sala.server")


class ApiError(FastHTTPException):
    """An unsuccessful response. `extra` adds keys to the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.message = message
        self.type = type or default_type(status)
        self.param = param
        self.code = code
        self.extra = dict(extra or {})

    def envelope(self, path: str = "") -> dict[str, Any]:
        """Return the body, in the form that clients of that path expect."""
        if _ANTHROPIC.fullmatch(path):
            return anthropic_envelope(self)
        error = {"message": self.message[:MAX_MESSAGE], "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.extra}}

    def response(self) -> Response:
        return ErrorResponse(self)


class ErrorResponse(Response):
    def __init__(self, error: ApiError) -> None:
        super().__init__(dump(error.envelope()), error.status_code, error.headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = dump(self._error.envelope(scope["path"]))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def anthropic_envelope(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    message = error.message
    if error.param is not None and not message.startswith(error.param):
        message = f"{error.param}: {message}"
    if error.code == "context_length_exceeded":  # clients that compact their prompts look for this
        message = f"prompt is too long: {error.extra['n_prompt_tokens']} tokens > {error.extra['n_ctx']} maximum"
    kind = _ANTHROPIC_TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message[:MAX_MESSAGE], **error.extra}}


class ErrorObject(BaseModel):
    model_config = ConfigDict(extra="allow")

    message: str = Field(description="What went wrong, and what to do about it.")
    type: str
    param: str | None = Field(description="The invalid field of the request, as a path.")
    code: str | None


class ErrorEnvelope(BaseModel):
    """The body of every error, except on Anthropic's routes."""

    error: ErrorObject


def describe(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the errors of a route, for its documentation."""
    return {status: {"model": ErrorEnvelope, "description": DESCRIPTIONS[status]} for status in statuses}


DESCRIPTIONS = {
    400: "The request is not valid; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "The key or the origin does not permit this.",
    404: "There is no such model.",
    408: "The request arrived too slowly.",
    409: "The state of the model does not permit this now.",
    413: "The request is too large.",
    415: "The body must be uncompressed application/json.",
    421: "The server does not answer to that host name.",
    429: "The queue is full; `Retry-After` says when to try again.",
    431: "The header is too large.",
    500: "Internal error.",
    503: "The model is not ready; `Retry-After` says when to try again.",
}
GUARDED = describe(400, 403, 408, 413, 415, 421, 431, 500, 503)  # what every route can return
ALWAYS = GUARDED | describe(401, 404, 429)


def default_type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def from_exception(error: BaseException) -> ApiError:
    """Return what a client may know about an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextTooLong):
        numbers = {"n_prompt_tokens": error.num_tokens, "n_ctx": error.max_tokens}
        return ApiError(400, str(error), code="context_length_exceeded", extra=numbers)
    if isinstance(error, NoTokenizer):
        return ApiError(400, "this model has no tokenizer; send token ids instead of text", code="no_tokenizer")
    if isinstance(error, InputError):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, TemplateError):
        return ApiError(400, str(error), param="messages", code="invalid_value")
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "2"})
    if isinstance(error, EngineClosed):
        return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "30"})
    if isinstance(error, EngineDead):
        return ApiError(500, "the engine has stopped; restart the server", code="engine_dead")
    if isinstance(error, CacheTooSmall):
        return ApiError(400, str(error), code="cache_too_small")
    if isinstance(error, MissingExtra):
        return ApiError(400, str(error), code="not_available")
    if is_out_of_memory(error):
        return ApiError(
            503,
            "there is not enough memory for this request; send a shorter one, or try again when others have finished",
            code="out_of_memory",
            headers={"Retry-After": "30"},
        )
    return ApiError(500, "the request failed with an internal error; the server's log says more", code="server_error")


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise MemoryError and, by their messages, the out-of-memory errors of frameworks, without importing those."""
    if isinstance(error, MemoryError):
        return True
    words = str(error).lower() if isinstance(error, RuntimeError) else ""
    return "out of memory" in words or "can't allocate memory" in words


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first of pydantic's validation errors."""
    error = errors[0] if errors else {}
    context = error.get("ctx") or {}
    path = [part for part in error.get("loc", ()) if not str(part).startswith("~")]
    where, path = (path[0], path[1:]) if path and path[0] in ("body", "query", "path", "header") else ("body", path)
    if "field" in context:
        path = [*path, context["field"]]
    param = join_path(path)
    message = str(error.get("msg", "the request is not valid"))
    if error.get("type") == "missing" and not path:
        message = "the request has no body; send a JSON object"
    elif error.get("type") in ("model_attributes_type", "model_type", "dict_type") and not path:
        message = f"the {where} must be a JSON object"
    elif error.get("type") == "none_required":
        message = "is not supported; leave it out"
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=_code(error.get("type")))


def _code(kind: object) -> str:
    return {"missing": "missing_required_parameter", "unknown_field": "unknown_parameter"}.get(
        str(kind), "invalid_value"
    )


def join_path(path: Sequence[str | int]) -> str | None:
    """Return a path as text: ("messages", 0, "role") becomes messages[0].role."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{str(part)[:200]}"
    return text.removeprefix(".") or None


def add_handlers(app: FastAPI) -> None:
    """Answer every exception with an error in our form."""
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(SalaError, _answer_sala)
    app.add_exception_handler(ClientDisconnect, _answer_disconnected)
    app.add_exception_handler(Exception, _answer_unexpected)


async def _answer_http(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    status = getattr(error, "status_code", 500)
    message = _WORDS.get(status) or str(getattr(error, "detail", "")) or "the request failed"
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    headers = {"Allow": ", ".join(_methods(request))} if status == 405 else getattr(error, "headers", None)
    return ApiError(status, message, code=code, headers=headers).response()


def _methods(request: Request) -> list[str]:
    """Return the methods that the routes of this path support."""
    matches = [route.matches for route in request.app.routes]
    return [each for each in METHODS if any(one({**request.scope, "method": each})[0] is Match.FULL for one in matches)]


async def _answer_invalid(request: Request, error: Exception) -> Response:
    return from_validation(error.errors() if isinstance(error, RequestValidationError) else ()).response()


async def _answer_sala(request: Request, error: Exception) -> Response:
    answer = from_exception(error)
    if answer.status_code >= 500:
        _log.error("%s: %s", type(error).__name__, error)
    return answer.response()


async def _answer_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    return from_exception(error).response()
