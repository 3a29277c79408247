"""What the server says about itself: the document is sound, and whatever fits it or nearly fits it gets an answer."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import Server

EVERYWHERE = {"400", "403", "408", "413", "415", "421", "431", "500", "503"}
PUBLIC = ("/health",)
TO_MODELS = re.compile(r"\{|/load$|/unload$|completions|responses|messages|tokeni")  # what may name what is not there
MAX_DEPTH = 6
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
HELLO = [{"role": "user", "content": "hello"}]
LIMITS = ("max_tokens", "max_output_tokens")


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    with server.client() as client:
        return client.get("/openapi.json").json()


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_document_is_sound(document: Any) -> None:
    assert document["openapi"].startswith("3.1")
    names = set(document["components"]["schemas"])
    used = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert used <= names, "a reference leads nowhere"
    assert not {"HTTPValidationError", "ValidationError"} & names
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(ids)) == len(ids)
    for _, path, operation in operations(document):
        assert operation["summary"], path
        declared = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
        assert declared == set(re.findall(r"\{(\w+)\}", path))


def test_every_status_is_documented(document: Any) -> None:
    for method, path, operation in operations(document):
        statuses = set(operation["responses"])
        expected = EVERYWHERE | (set() if path.startswith(PUBLIC) else {"401"})
        expected |= {"404"} if TO_MODELS.search(path) else set()
        assert expected <= statuses, (method, path, expected - statuses)
        assert "422" not in statuses, path
        assert statuses & {"200", "202"}, path


def test_errors_have_one_shape(document: Any) -> None:
    for method, path, operation in operations(document):
        for status, answer in operation["responses"].items():
            if status >= "400" and not path.startswith(PUBLIC):
                kinds = [one["schema"]["$ref"] for one in answer["content"].values()]
                assert len(kinds) == 1, (method, path, status)
                assert kinds[0].endswith(("/ErrorEnvelope", "/MessagesError")), (method, path, status)


def test_methods_that_are_not_there(server: Server, document: Any) -> None:
    with server.client() as client:
        for path, methods in document["paths"].items():
            answer = client.put(re.sub(r"\{\w+\}", "x", path))
            assert answer.status_code == 405, path
            assert set(answer.headers["allow"].lower().split(", ")) >= set(methods), path


def build(schema: Any, schemas: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that fit a schema of ours, mostly; the odd one does not."""
    if "$ref" in schema:
        return st.deferred(lambda: build(schemas[schema["$ref"].rpartition("/")[2]], schemas, depth + 1))
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return st.one_of([build(one, schemas, depth) for one in options])
    return _build_plain(schema, schemas, depth)


def _build_plain(schema: Any, schemas: Any, depth: int) -> st.SearchStrategy[Any]:
    kind = schema.get("type")
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if kind == "string":
        return st.text(max_size=12)
    if kind == "integer":
        return st.integers(low, high)
    if kind == "number":
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if kind == "array" and depth < MAX_DEPTH:
        return st.lists(build(schema.get("items", {}), schemas, depth + 1), max_size=3)
    if kind == "object" and "properties" in schema and depth < MAX_DEPTH:
        needed = set(schema.get("required", ()))
        fields = {name: build(one, schemas, depth + 1) for name, one in schema["properties"].items()}
        always = {name: one for name, one in fields.items() if name in needed}
        return st.fixed_dictionaries(always, optional={name: fields[name] for name in fields if name not in needed})
    simple = {"boolean": st.booleans(), "null": st.none(), "array": st.just([]), "object": st.just({})}
    return simple.get(kind, JSON)


@st.composite
def bodies(draw: st.DrawFn, schema: Any, schemas: Any) -> Any:
    """A body by the schema with few fields, of which one may be replaced by anything. Answers are short."""
    own = schemas[schema["$ref"].rpartition("/")[2]]
    body = draw(build(schema, schemas))
    kept = draw(st.sets(st.sampled_from(sorted(own["properties"])), max_size=4)) | set(own.get("required", ()))
    body = {name: value for name, value in body.items() if name in kept and name != "max_completion_tokens"}
    body |= draw(st.just({}) | spoiled(sorted(own["properties"])))
    short = {name: 2 for name in LIMITS if name in own["properties"] and isinstance(body.get(name), int | None)}
    return {**body, **short, "model": body.get("model") if draw(st.booleans()) else ""}


def spoiled(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([*names, "no_such_field"]), JSON, max_size=1)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/tokenize", "/v1/detokenize", "/v1/models/load", "/v1/models/unload",
    ],
)  # fmt: skip
def test_bodies_from_the_schema(path: str, server: Server, document: Any) -> None:
    """No body, fitting or not, makes the server fail or gives a status that is not documented."""
    schemas = document["components"]["schemas"]
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    seen: set[int] = set()

    @settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(body=bodies(schema, schemas))
    def ask(body: Any) -> None:
        response = client.post(path, json=body)
        seen.add(response.status_code)
        assert response.status_code < 500, (body, response.text)
        assert str(response.status_code) in operation["responses"], (body, response.status_code)
        check_kind(response, operation)

    with server.client() as client:
        ask()
    assert seen & {200, 400, 404}


def check_kind(response: httpx2.Response, operation: Any) -> None:
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in operation["responses"][str(response.status_code)]["content"]
    if kind == "application/json":
        response.json()


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 1}, "ChatCompletion"),
        ("/v1/completions", {"prompt": "hello", "logprobs": 1, "echo": True}, "TextCompletion"),
        ("/v1/responses", {"input": "hello"}, "ResponseObject"),
        ("/v1/messages", {"messages": HELLO}, "MessageObject"),
        ("/v1/messages/count_tokens", {"messages": HELLO}, "TokenCount"),
        ("/v1/messages", {"messages": []}, "MessagesError"),
        ("/v1/completions", {}, "ErrorEnvelope"),
        ("/v1/tokenize", {"prompt": "hello"}, "Tokens"),
        ("/v1/detokenize", {"tokens": [65]}, "DetokenizedText"),
        ("/v1/tokenizer_info", None, "TokenizerInfo"),
        ("/v1/models", None, "ModelList"),
        ("/v1/models/download", None, "JobList"),
    ],
)
def test_answers_are_as_the_document_describes_them(
    server: Server, document: Any, path: str, body: Any, name: str
) -> None:
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    limits = {limit: 3} if path.endswith(("completions", "responses", "messages")) else {}
    with server.client() as client:
        answer = client.get(path) if body is None else client.post(path, json={**body, **limits})
    schemas = document["components"]["schemas"]
    described = {**schemas[name], "components": document["components"]}
    jsonschema.validate(answer.json(), described)
    assert answer.json().keys() >= set(schemas[name]["required"])


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ({}, True),
        ({"messages": [{"role": "user"}]}, False),
        ({"messages": [{"role": "user", "content": None}]}, False),
        ({"messages": [*HELLO, {"role": "assistant"}, *HELLO]}, True),
        ({"messages": [{**HELLO[0], "colour": "red"}]}, True),
        ({"messages": [{**HELLO[0], "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, False),
        ({"colour": None}, True),
        ({"colour": "red"}, False),
        ({"top_logprobs": 1}, False),
        ({"top_logprobs": 1, "logprobs": True}, True),
        ({"return_progress": True}, False),
        ({"return_progress": False}, True),
        ({"stream_options": {"include_usage": True}}, False),
        ({"stream_options": {"include_usage": True}, "stream": True}, True),
        ({"response_format": {"type": "json_schema"}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, True),
    ],
)  # fmt: skip
def test_the_document_says_what_fits_together(
    server: Server, document: Any, fields: dict[str, Any], is_valid: bool
) -> None:
    body = {"messages": HELLO, "max_tokens": 1, **fields}
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == is_valid
    assert server.post("/v1/chat/completions", body).status_code == (200 if is_valid else 400)
