"""Batch inference in OpenAI's batch format: one JSON object per line in, one per line out.

Answers are written to `OUT.part` as they complete; the file gets its name when all of them are there. After a kill, the
same command resumes: lines that are answered already are not computed again.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sala.checkpoint.writer import publish
from sala.engine.requests import Call
from sala.engine.stream import Completion
from sala.errors import ContextTooLong, InputError, SalaError
from sala.llm import LLM
from sala.protocol import Sampling

URLS = ("/v1/chat/completions", "/v1/completions")
RENAMED = {"max_completion_tokens": "max_tokens"}
SETTINGS = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "max_tokens", "min_tokens", "ignore_eos", "think_budget", "loop_guard", "regex", "grammar",
}  # fmt: skip
IGNORED = {"model", "user", "store", "metadata", "service_tier", "messages", "prompt", "tools", "stream"}
DEFAULTS = {"temperature": 1.0, "max_tokens": 1024}
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Tally:
    """Counts of a batch."""

    done: int = 0
    failed: int = 0
    skipped: int = 0
    seen: set[str] = field(default_factory=set)


def run_batch(llm: LLM, source: Path, target: Path, on_progress: Progress | None = None) -> Tally:
    """Answer every line of `source` and write the answers to `target`. Return the counts."""
    if target.exists() or target.is_symlink():
        raise InputError("output", f"{target} exists already", "choose another file")
    if not source.is_file():
        raise InputError("input", f"{source} is not a file", "give a JSONL file")
    part = target.with_name(f"{target.name}.part")
    answered = _resume(part)
    total = sum(1 for _ in _lines(source))
    tally = Tally(skipped=len(answered))
    with part.open("a", encoding="utf-8") as out:
        calls = _calls(source, answered, tally, out)
        for (custom_id, url), result in llm.many(calls):
            _write(out, _answer(custom_id, result, url, llm.path.name))
            tally.done += isinstance(result, Completion)
            tally.failed += not isinstance(result, Completion)
            if on_progress is not None:
                on_progress(tally.done + tally.failed + tally.skipped, total)
        out.flush()
        os.fsync(out.fileno())
    publish(part, target)
    return tally


def _resume(part: Path) -> set[str]:
    """Return the ids in an unfinished output; half a line at its end is cut off."""
    if not part.is_file():
        return set()
    answered, good = set(), 0
    with part.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                answered.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                break
            good += len(line)
    with part.open("r+b") as file:
        file.truncate(good)
    return answered


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    try:
        with source.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("input", f"{source} cannot be read: {error}", "give a JSONL file in UTF-8") from None


def _calls(source: Path, answered: set[str], tally: Tally, out: Any) -> Iterator[Call]:
    for number, line in _lines(source):
        custom_id = f"sala:line-{number}"  # for a line without an id of its own
        try:
            request = _parse(line)
            if request["custom_id"] in tally.seen:
                raise InputError("custom_id", f"{request['custom_id']!r} was used before", "give every line its own")
            custom_id = request["custom_id"]
            tally.seen.add(custom_id)
            if custom_id in answered:
                continue
            call = _call(custom_id, request)
        except SalaError as error:
            if custom_id not in answered:
                _write(out, _answer(custom_id, error))
                tally.failed += 1
            continue
        yield call


def _parse(line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("line", f"is not JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
        raise InputError("custom_id", "is missing", "every line needs a string of its own")
    return request


def _call(custom_id: str, request: dict[str, Any]) -> Call:
    url, body = request.get("url"), request.get("body")
    if request.get("method", "POST") != "POST" or url not in URLS:
        raise InputError("url", f"is {url!r}", "known: POST " + ", ".join(URLS))
    if not isinstance(body, dict):
        raise InputError("body", "is missing", "it holds the request")
    sampling = _sampling(body)
    if url == "/v1/completions":
        return Call((custom_id, url), sampling, prompt=body.get("prompt", ()))
    return Call((custom_id, url), sampling, messages=body.get("messages") or [], tools=body.get("tools"))


def _sampling(body: dict[str, Any]) -> Sampling:
    settings: dict[str, Any] = dict(DEFAULTS)
    for name, value in body.items():
        known = RENAMED.get(name, name)
        if known in SETTINGS:
            if value is not None:
                settings[known] = tuple(value) if isinstance(value, list) else value
        elif name == "logprobs" and not value:
            continue
        elif name == "logit_bias":
            settings["logit_bias"] = _bias(value)
        elif name == "response_format":
            settings |= _format(value)
        elif name == "n" and value == 1:
            continue
        elif name not in IGNORED:
            raise InputError(name, "is not supported here", "leave it out")
    try:
        return Sampling(**settings)
    except TypeError as error:
        raise InputError("body", str(error)) from None


def _bias(value: Any) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (value or {}).items()}
    except (ValueError, AttributeError):
        raise InputError("logit_bias", f"is {value!r}", "it maps token ids to numbers") from None


def _format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema" and isinstance(value.get("json_schema"), dict) and "schema" in value["json_schema"]:
        return {"json_schema": json.dumps(value["json_schema"]["schema"])}
    raise InputError("response_format", f"is {value!r}"[:200], "use text, json_object or json_schema with a schema")


def _answer(custom_id: str, result: Completion | Exception, url: str = URLS[0], model: str = "") -> dict[str, Any]:
    line: dict[str, Any] = {"id": f"batch_req_{secrets.token_hex(8)}", "custom_id": custom_id}
    if isinstance(result, Completion):
        line["response"] = {
            "status_code": 200,
            "request_id": f"req_{secrets.token_hex(8)}",
            "body": _body(result, url, model),
        }
        line["error"] = None
        return line
    is_client_error = isinstance(result, InputError | ContextTooLong)
    code = "context_length_exceeded" if isinstance(result, ContextTooLong) else "invalid_request_error"
    error = {
        "message": str(result) or type(result).__name__,
        "type": "invalid_request_error" if is_client_error else "server_error",
        "param": getattr(result, "field", None),
        "code": code if is_client_error else "server_error",
    }
    line["response"] = {"status_code": 400 if is_client_error else 500, "request_id": None, "body": {"error": error}}
    line["error"] = {"code": error["code"], "message": error["message"]}
    return line


def _body(result: Completion, url: str, model: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if result.tool_calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in result.tool_calls
        ]
    is_chat = url == URLS[0]
    content = {"message": message} if is_chat else {"text": result.text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": result.finish_reason}
    usage = result.usage
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }


def _write(out: Any, line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()
