"""Who may do what: every route is decided here, for clients without a key, for users and for administrators."""

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sala.server.app import create_app
from sala.server.http.keys import KeyFile
from sala.server.settings import Settings
from tests.server.test_leaks import find_routes

# Routes without the prefix /v1, which most of them have as well.
PUBLIC = {
    "GET /",
    "GET /docs",
    "GET /docs/page.css",
    "GET /docs/page.js",
    "GET /health",
    "GET /health/live",
    "GET /health/ready",
    "GET /web/{name:path}",
}
USER = {
    "DELETE /documents/{document_id}",
    "DELETE /files/{file_id}",
    "DELETE /responses/{response_id}",
    "GET /metrics",
    "GET /openapi.json",
    "GET /batches",
    "GET /batches/{batch_id}",
    "GET /documents",
    "GET /documents/{document_id}",
    "GET /files",
    "GET /files/{file_id}",
    "GET /files/{file_id}/content",
    "GET /models",
    "GET /models/{model_id:path}",
    "GET /responses/{response_id}",
    "GET /responses/{response_id}/input_items",
    "GET /tokenizer_info",
    "POST /batches",
    "POST /batches/{batch_id}/cancel",
    "POST /chat/completions",
    "POST /chat/completions/input_tokens",
    "POST /completions",
    "POST /detokenize",
    "POST /documents",
    "POST /documents/state",
    "POST /documents/{document_id}/state",
    "POST /files",
    "POST /messages",
    "POST /messages/count_tokens",
    "POST /responses",
    "POST /responses/input_tokens",
    "POST /responses/{response_id}/cancel",
    "POST /tokenize",
}
ADMIN: dict[str, Any] = {  # with bodies that are valid, so that nothing but the key can be the reason of a refusal
    "DELETE /models/download/{job_id}": None,
    "DELETE /models/{model_id:path}": None,
    "GET /models/download": None,
    "GET /models/download/{job_id}": None,
    "GET /models/download/{job_id}/events": None,
    "GET /mcp/tools": None,
    "POST /models/download": {"repo_id": "../../none"},
    "POST /models/load": {"model": "none"},
    "POST /models/unload": {"model": "none"},
    "POST /mcp/call": {"name": "none"},
}


class Callers:
    def __init__(self, room: Path) -> None:
        file = KeyFile(room / "keys.json")
        self.keys = {"user": file.add("anna"), "admin": file.add("boss", "admin"), "revoked": file.add("ben")}
        file.revoke("ben")
        self.app = create_app(Settings(keys_file=file.path, models_dir=room / "models", files_dir=room / "files"))
        self.caller = TestClient(self.app, base_url="http://localhost", raise_server_exceptions=False)

    def ask(self, who: str, operation: str, body: Any = None) -> tuple[int, str | None]:
        method, path = operation.split()
        headers = {"Content-Type": "application/json"}
        if who in self.keys:
            headers["Authorization"] = f"Bearer {self.keys[who]}"
        more = {"json": body} if body is not None else {"content": b"{}" if method == "POST" else b""}
        answer = self.caller.request(method, re.sub(r"{[^}]*}", "none", path), headers=headers, **more)
        error = answer.json().get("error") if "json" in answer.headers.get("content-type", "") else None
        return answer.status_code, error.get("code") if isinstance(error, dict) else None


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Callers:
    return Callers(tmp_path_factory.mktemp("room"))


def test_every_route_is_decided(callers: Callers) -> None:
    """A new route belongs into one of the tables above, and whoever may not use it is refused, with and without /v1."""
    found = {f"{method} {path}" for path, methods in find_routes(callers.app.routes) for method in methods}
    found -= {one for one in found if one.startswith("HEAD ")}
    assert {one.replace(" /v1/", " /") for one in found} == PUBLIC | USER | set(ADMIN)
    documented = callers.app.openapi()["paths"]
    assert len(documented) > 20
    assert set(documented) <= {re.sub(r":path}", "}", one.split()[1]) for one in found}
    for operation in sorted(found):
        check(callers, operation, operation.replace(" /v1/", " /"))


def check(callers: Callers, operation: str, known: str) -> None:
    body = ADMIN.get(known)
    for who in ("nobody", "revoked"):
        assert (callers.ask(who, operation, body)[0] == 401) == (known not in PUBLIC), (who, operation)
    status, code = callers.ask("user", operation, body)
    assert ((status, code) == (403, "admin_key_needed")) == (known in ADMIN), operation
    assert status not in (401, 403) or known in ADMIN, operation
    status, code = callers.ask("admin", operation, body)
    assert (status == 401, code == "admin_key_needed") == (False, False), operation
