"""Answers validate against the document that OpenAI publishes of its interface; the fields of requests are all tried.

The document is not a part of this project. SALA_TEST_OPENAI_SCHEMA names a file with it, as YAML or JSON:

    curl -L https://raw.githubusercontent.com/openai/openai-openapi/HEAD/openapi.yaml -o openapi.yaml
    SALA_TEST_OPENAI_SCHEMA=openapi.yaml python -m pytest tests/clients/test_openai_schema.py
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match

from tests.server.openai_answers import ASKS, Answer, Ask, Kind, collect, fill
from tests.server.openai_fields import FIELDS

DOCUMENT = os.environ.get("SALA_TEST_OPENAI_SCHEMA", "")
HOW = "set SALA_TEST_OPENAI_SCHEMA to the openapi.yaml of github.com/openai/openai-openapi"
SCHEMAS = "#/components/schemas"
BROKEN = {"object": "nothing", "type": "nothing", "error": {"message": "of no type"}}
if not DOCUMENT:
    pytest.skip(HOW, allow_module_level=True)


@pytest.fixture(scope="module")
def document() -> Any:
    return yaml.load(Path(DOCUMENT).expanduser().read_bytes(), Loader=yaml.CSafeLoader)


@pytest.fixture(scope="module")
def answers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    return collect(tiny, tmp_path_factory.mktemp("room"))


@pytest.fixture(scope="module")
def schemas(document: Any) -> Any:
    """As JSON Schema of 2020-12, which has no `nullable`."""
    return translate(document["components"]["schemas"])


def translate(schema: Any) -> Any:
    if isinstance(schema, list):
        return [translate(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: translate(value) for name, value in schema.items()}
    return {"anyOf": [out, {"type": "null"}]} if out.pop("nullable", None) is True else out


def reference(document: Any, ask: Ask, kind: Kind) -> str:
    """The schema of an operation's answers; a stream has its own where it differs."""
    if kind == "error":
        return f"{SCHEMAS}/ErrorResponse"
    path = "/models/{model}" if ask.path.startswith("/models/") else ask.path
    content = document["paths"][path][ask.method]["responses"]["200"]["content"]
    form = "text/event-stream" if kind == "chunk" and "text/event-stream" in content else "application/json"
    return str(content[form]["schema"]["$ref"])


def find_problem(document: Any, schemas: Any, ask: Ask, kind: Kind, body: Any) -> ValidationError | None:
    schema = {"$ref": reference(document, ask, kind), "components": {"schemas": schemas}}
    return best_match(Draft202012Validator(schema).iter_errors(fill(kind, body)))


def find_properties(document: Any, schema: Any) -> set[str]:
    """The names of all properties that a schema describes at its top level."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].removeprefix(f"{SCHEMAS}/")]
    parts = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())]
    return set(schema.get("properties", ())).union(*(find_properties(document, part) for part in parts))


@pytest.mark.parametrize("path", FIELDS)
def test_every_documented_field_is_tried(path: str, document: Any) -> None:
    """By `tests/server/test_openai_fields.py`."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert find_properties(document, body) == set(FIELDS[path])


@pytest.mark.parametrize("name", ASKS)
def test_answers_fit_the_document(name: str, document: Any, schemas: Any, answers: dict[str, Answer]) -> None:
    for kind, body in answers[name]:
        problem = find_problem(document, schemas, answers[name].ask, kind, body)
        assert problem is None, f"{problem.json_path}: {problem.message}"


@pytest.mark.parametrize(
    "name",
    ["chat-cut", "chat-cut-stream", "text-cut", "response-cut", "response-cut-stream", "models", "model", "nowhere"],
)
def test_the_document_can_say_no(name: str, document: Any, schemas: Any, answers: dict[str, Answer]) -> None:
    """No answer fits for want of rules."""
    kind, body = next(iter(answers[name]))
    assert find_problem(document, schemas, answers[name].ask, kind, {**body, **BROKEN}) is not None
