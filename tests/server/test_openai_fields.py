"""One request for every field that OpenAI documents: accepted, or refused with an error that names it."""

import json
from typing import Any

import pytest

from tests.server.conftest import Server
from tests.server.openai_fields import BASES, FIELDS

CASES = [(path, name) for path, fields in FIELDS.items() for name in fields]


def requests_of(path: str, name: str, values: list[Any]) -> list[dict[str, Any]]:
    base = {key: value for key, value in BASES[path].items() if not (name.startswith("max_") and "tokens" in key)}
    return [{**base, **FIELDS[path][name].beside, name: value} for value in values]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_every_field_is_accepted(path: str, name: str, server: Server) -> None:
    for body in requests_of(path, name, FIELDS[path][name].values):
        response = server.post(f"/v1{path}", body)
        assert response.status_code == 200, f"{json.dumps(body)[:500]}: {response.text[:500]}"
        if body.get("stream"):
            assert '"error":{' not in response.text
            assert len(response.text.split("data: ")) > 2
        else:
            answer = response.json()
            assert answer["object"] in ("chat.completion", "text_completion", "response")
            assert answer.get("error") is None


@pytest.mark.parametrize(("path", "name"), [case for case in CASES if FIELDS[case[0]][case[1]].refused])
def test_what_is_refused_is_named(path: str, name: str, server: Server) -> None:
    for body in requests_of(path, name, FIELDS[path][name].refused):
        response = server.post(f"/v1{path}", body)
        assert response.status_code == 400, f"{json.dumps(body)[:500]}: {response.text[:500]}"
        error = response.json()["error"]
        assert error["param"].startswith(name)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
