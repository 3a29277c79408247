"""Answers are what the types of the openai package say, strictly read; what they have beyond that is listed here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.pagination import SyncPage
from openai.types import Completion, Model, ModelDeleted
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.server.openai_answers import ASKS, Answer, collect, fill


class ErrorBody(BaseModel):
    error: ErrorObject


TYPES: dict[tuple[str, str], Any] = {
    ("/chat/completions", "answer"): ChatCompletion,
    ("/chat/completions", "chunk"): ChatCompletionChunk,
    ("/completions", "answer"): Completion,
    ("/completions", "chunk"): Completion,
    ("/responses", "answer"): Response,
    ("/responses", "chunk"): ResponseStreamEvent,
    ("/models", "answer"): SyncPage[Model],
    ("/models/tiny", "answer"): Model,
    ("/models/spare", "answer"): ModelDeleted,
}
OURS = {
    "ChatCompletion": {"timings"},
    "ChatCompletionChunk": {"timings", "prompt_progress"},
    "ChatCompletionMessage": {"reasoning_content"},
    "ChoiceDelta": {"reasoning_content"},
    "Choice": {"stop_reason"},
    "Completion": {"timings"},
    "Response": {"store"},  # the service sends it too
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},  # needed by the document that OpenAI publishes
    "Model": {
        "root", "path", "loaded", "repo_id", "revision", "quantization", "size_bytes", "downloaded_at",
        "context_length", "trained_length", "requests", "cache",
    },
    "ModelDeleted": {"note"},
    "ErrorObject": {"n_prompt_tokens", "n_ctx"},
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    return collect(tiny, tmp_path_factory.mktemp("room"))


def read(answer: Answer) -> Iterator[Any]:
    """The bodies of an answer as objects of the package."""
    for kind, body in answer:
        wanted = ErrorBody if kind == "error" else TYPES[answer.ask.path, kind]
        yield TypeAdapter(wanted).validate_python(fill(kind, body), strict=True)


def extras(value: Any) -> Iterator[tuple[str, str]]:
    """What an object carries that its type does not know, wherever in it."""
    if isinstance(value, BaseModel):
        name = type(value).__name__
        yield from ((name, extra) for extra in value.model_extra or ())
        known = [getattr(value, field) for field in type(value).model_fields]
        yield from (found for one in known for found in extras(one))
    elif isinstance(value, list):
        yield from (found for one in value for found in extras(one))


@pytest.mark.parametrize("name", ASKS)
def test_types(name: str, answers: dict[str, Answer]) -> None:
    for one in read(answers[name]):
        for kind, extra in extras(one):
            assert extra in OURS.get(kind, ()), f"{kind} does not know {extra}"


def test_what_is_listed_as_ours_is_sent(answers: dict[str, Answer]) -> None:
    found = {pair for answer in answers.values() for one in read(answer) for pair in extras(one)}
    assert found == {(kind, extra) for kind, names in OURS.items() for extra in names}


def test_every_way_to_end_is_among_the_answers(answers: dict[str, Answer]) -> None:
    bodies = [body for answer in answers.values() for body in answer.bodies]
    reasons = {choice["finish_reason"] for body in bodies for choice in body.get("choices", ())}
    assert reasons == {"stop", "length", "tool_calls", None}
    ended = {body["response"]["status"] for body in bodies if "response" in body}
    assert ended == {"in_progress", "completed", "incomplete", "failed"}
    items = {item["type"] for body in bodies for item in body.get("output", ())}
    assert items == {"reasoning", "message", "function_call"}


@pytest.mark.parametrize(("path", "kind"), TYPES)
def test_types_can_say_no(path: str, kind: str, answers: dict[str, Answer]) -> None:
    body = next(body for answer in answers.values() for one, body in answer if (answer.ask.path, one) == (path, kind))
    name = "data" if path == "/models" else "type" if "type" in body else "id"
    with pytest.raises(ValidationError):
        TypeAdapter(TYPES[path, kind]).validate_python({**body, name: 5}, strict=True)
