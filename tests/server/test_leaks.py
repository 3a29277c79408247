"""What must not get out: past the key, into errors and logs, from one request to another."""

import hmac
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from sala.server.app import create_app
from sala.server.settings import Settings
from tests.integrity import integrity
from tests.server.conftest import Puppet, Server, wait_for
from tests.server.live import Live, serving
from tests.server.test_serving import COMMAND, ask, is_ready

KEY, ADMIN_KEY = "key-of-the-user", "key-of-the-admin"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
HELLO = [{"role": "user", "content": "hello"}]
PUBLIC = {
    "/",
    "/web/{name:path}",
    "/docs",
    "/docs/page.js",
    "/docs/page.css",
    "/health",
    "/health/live",
    "/health/ready",
}


# Past the key.


def test_no_route_is_open_but_those_meant_to_be(tmp_path: Path) -> None:
    """Also those that no document lists, with and without /v1, by every method."""
    app = create_app(Settings(api_key=KEY, models_dir=tmp_path))
    caller = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    routes = [(path, method) for path, methods in find_routes(app.routes) for method in methods]
    assert len(routes) > 40
    assert {path for path, _ in routes} >= PUBLIC
    for path, method in routes:
        answer = caller.request(method, re.sub(r"{[^}]*}", "x", path), headers={"Content-Type": "application/json"})
        assert (answer.status_code == 401) == (path not in PUBLIC), (method, path, answer.status_code)


def find_routes(routes: Any, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield prefix + route.path, route.methods
        elif hasattr(route, "effective_candidates"):  # routers that were included as they are
            for one in route.effective_candidates():
                yield one.path, one.methods


def test_open_pages_say_nothing_about_the_interface(tmp_path: Path) -> None:
    """The pages can be opened without a key, since a browser cannot send one; what they show they must ask for."""
    app = create_app(Settings(api_key=KEY, models_dir=tmp_path))
    caller = TestClient(app, base_url="http://localhost")
    pages = "".join(caller.get(path).text for path in ("/docs", "/docs/page.js", "/docs/page.css"))
    assert "/openapi.json" in pages
    assert caller.get("/openapi.json").status_code == 401
    document = caller.get("/openapi.json", headers={"X-Api-Key": KEY}).json()
    assert len(document["paths"]) > 15
    assert [path for path in document["paths"] if path in pages] == ["/health"]
    assert not [name for name in document["components"]["schemas"] if name in pages]
    for page in (pages, caller.get("/").text):
        assert not any(word in page for word in (str(tmp_path), KEY, "smol-sala"))


@pytest.fixture(scope="module")
def keyed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The whole application behind its guards, with keys."""
    settings = Settings(
        port=0, model=str(tiny), models_dir=tmp_path_factory.mktemp("models"), device="cpu", ctx=512,
        api_key=KEY, admin_key=ADMIN_KEY, drain_s=1,
    )  # fmt: skip
    app = create_app(settings)
    with serving(settings, app) as live:
        wait_for(lambda: app.state.runtime.loaded, 20)
        yield live


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models", "/models", "//v1/models", "/v1//models", "/v1/../v1/models", "/health/../v1/models",
        "/v1/models/", "/V1/models", "/v1/MODELS", "/v1/models;x", "/v1/models%00", "/v1/%6dodels", "/v1%2fmodels",
        "/docs/../openapi.json", "/web/../metrics", "/health?/../v1/models", "/v1/models?x=/health",
        "/v1/models#/health", "/v1/models/tiny", "/v1/models/..%2f..%2fhealth", "/v1/models/download", "/openapi.json",
        "/metrics",
    ],
)  # fmt: skip
def test_odd_addresses_do_not_get_round_the_key(keyed: Live, path: str) -> None:
    for host in ("localhost", "localhost:1"):
        answer = keyed.ask("GET", path, host=host)
        assert answer.status in (401, 404) or path.startswith("/health?"), answer.status
        assert b"tiny" not in answer.body
    assert keyed.ask("GET", path, host="localhost/health?").status == 400


def test_keys_are_compared_in_constant_time(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes, it is compared with the key as a whole and by that function."""
    compared: list[tuple[bytes, bytes]] = []
    really = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return really(one, other)

    monkeypatch.setattr("sala.server.http.keys.hmac.compare_digest", compare)
    for key, status in ((KEY, 200), (KEY[:-1], 401), (KEY + "x", 401), ("k", 401), ("x" * 60_000, 401)):
        compared.clear()
        assert keyed.ask("GET", "/v1/tokenizer_info", x_api_key=key).status == status
        assert (key.encode(), KEY.encode()) in compared


# Into errors.

MARK = "xyzzy-of-somebody-else"


def provoke(server: Server, tmp_path: Path, puppet: Puppet) -> Iterator[tuple[str, Any]]:
    """Every kind of error that a client can get from a route."""
    long = [{"role": "user", "content": "long " * 3000}]
    with server.client() as client:
        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/tokenize", "/v1/models/load"):
            yield "json", client.post(path, content=b"{", headers={"Content-Type": "application/json"})
            yield "field", client.post(path, json={"nothing": 1})
            yield "type", client.post(path, content=b"x", headers={"Content-Type": "text/plain"})
        yield "length", client.post(CHAT, json={"messages": long})
        yield "model", client.post(CHAT, json={"messages": HELLO, "model": f"{tmp_path}/models"})
        yield "traversal", client.get("/v1/models/..%2f..%2fetc%2fpasswd")
        yield "broken model", client.post(CHAT, json={"messages": HELLO, "model": "broken"})
        yield "repository", client.post("/v1/models/download", json={"repo_id": "../../etc"})
        yield "nowhere", client.get("/v1/nowhere")
        yield "method", client.put(CHAT)
        puppet.error = RuntimeError(f"in {tmp_path} at 0x7f00deadbeef: {MARK}")
        yield "engine", client.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
        yield "engine, as a stream", client.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "stream": True})
        yield "engine, messages", client.post(MESSAGES, json={"messages": HELLO, "max_tokens": 2})
        puppet.error = None


def test_errors_give_nothing_away(
    make_server: Callable[..., Server], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_token-of-the-operator")
    server = make_server()
    shutil.copytree(tiny, tmp_path / "models" / "broken")
    (tmp_path / "models" / "broken" / "model.safetensors").write_bytes(b"x")
    server.post(CHAT, {"messages": [{"role": "user", "content": MARK}], "max_tokens": 2})
    engine = server.llm.engine
    engine._executor = Puppet(engine._executor)
    secrets = [str(tmp_path), str(tiny.parent), MARK, "hf_token", "Traceback", 'File "', "0x7f", "sala/server", ".py"]
    kinds = set()
    for kind, answer in provoke(server, tmp_path, engine._executor):
        kinds.add(kind)
        assert "error" in answer.text, kind
        shown = answer.text.replace(f"{tmp_path}/models", "") if kind == "model" else answer.text  # what was sent
        assert [secret for secret in secrets if secret in shown] == [], (kind, answer.text)
        assert len(answer.text) < 2000
    assert len(kinds) == 13


# Into logs.


def test_nothing_that_people_write_is_logged(tiny: Path, tmp_path: Path) -> None:
    """Not even by the most talkative server, nor if a request fails."""
    program = COMMAND.replace(
        "sys.exit(",
        "from sala.backends.torch.executor import TorchExecutor\nstep = TorchExecutor.run\n"
        "def fail(self, plan):\n    if any(row.sampling and row.sampling.seed == 13 for row in plan.rows):\n"
        "        raise RuntimeError('boom')\n    return step(self, plan)\nTorchExecutor.run = fail\nsys.exit(",
    )
    flags = ["-m", str(tiny), "--port", "0", "--cache-memory", "64M", "--log-level", "debug", "--api-key", KEY]
    with (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-c", program, *flags, "--models-dir", str(tmp_path / "models")]
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            wait_for(lambda: "sala listens at" in (tmp_path / "log").read_text() or process.poll() is not None, 60)
            port = int(re.search(r"127\.0\.0\.1:(\d+)/v1", (tmp_path / "log").read_text())[1])  # type: ignore[index]
            wait_for(is_ready(port), 60)
            write_everywhere(port)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        text = (tmp_path / "log").read_text()
    assert MARK not in text
    assert KEY not in text
    assert "\x1b" not in text
    assert "boom" in text
    assert text.count(f"POST {CHAT}") == 4


def write_everywhere(port: int) -> None:
    """The mark in every part of a request that is not an address."""
    import http.client

    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "X-Request-Id": f"{MARK} \x1b[31m"}
    messages = f'[{{"role": "user", "content": "{MARK}"}}]'
    bodies = [
        f'{{"messages": {messages}, "max_tokens": 2}}',
        f'{{"messages": {messages}, "max_tokens": 2, "seed": 13}}',
        f'{{"messages": {messages}, "{MARK}": 2}}',
        f'{{"messages": {messages}, {MARK}',
    ]
    for body in bodies:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", f"{CHAT}?note={MARK}", body, headers)
        connection.getresponse().read()
        connection.close()
    assert ask(port, "GET", f"/health?{MARK}")[0] == 200


# From one request to another.


def test_a_request_id_is_nobodys_key(server: Server, puppet: Puppet) -> None:
    """Two who name their requests alike get their own answers."""
    puppet.delay_s = 0.01
    prompts = [f"question number {number}" for number in range(6)]

    def ask_for(prompt: str, headers: dict[str, str]) -> tuple[str, str]:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = server.post(COMPLETIONS, body, headers=headers)
        return answer.json()["choices"][0]["text"], answer.headers["x-request-id"]

    alone = [ask_for(prompt, {})[0] for prompt in prompts]
    assert len(set(alone)) == len(prompts)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: ask_for(prompt, {"X-Request-Id": "same"}), prompts))
    assert together == [(text, "same") for text in alone]


def test_requests_that_begin_alike_do_not_mix(make_server: Callable[..., Server]) -> None:
    """Together, while others leave in the middle, each gets the very answer that it gets alone."""
    server = make_server()
    shared = "All that stands here is the same for everybody. " * 12
    prompts = [f"{shared}{number}" for number in range(8)]

    def ask_for(prompt: str) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 1}
        choice = server.post(COMPLETIONS, body).json()["choices"][0]
        return [choice["text"], choice["logprobs"]["token_logprobs"]]

    alone = []
    for prompt in prompts:
        server.service.execute(server.llm.engine.forget).result(10)
        alone.append(ask_for(prompt))
    server.service.execute(server.llm.engine.forget).result(10)
    stop = threading.Event()

    def leave() -> None:
        with server.client() as client:
            while not stop.is_set():
                body = {"prompt": f"{shared}and then", "max_tokens": 500, "stream": True}
                with client.stream("POST", COMPLETIONS, json=body) as response:
                    next(response.iter_bytes())

    leaver = threading.Thread(target=leave)
    leaver.start()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask_for, prompts * 2))
    stop.set()
    leaver.join(20)
    assert [text for text, _ in together] == [text for text, _ in alone] * 2
    for (_, found), (_, wanted) in zip(together, alone * 2, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    server.wait_idle()
    assert server.service.execute(integrity, server.llm.engine).result(10) == []  # on the engine's own thread
