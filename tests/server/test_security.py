"""Keys, host names and origins: who gets in, who does not, and what they are told."""

import json
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from sala.errors import SalaError
from sala.server.app import create_app
from sala.server.http.security import is_same
from sala.server.settings import Settings, check_listening
from tests.server.live import make_app, serving

REMOTE = "0.0.0.0"  # noqa: S104
CLOSED = ["/metrics", "/openapi.json", "/slow/0"]
OPEN = ["/health", "/health/live", "/health/ready", "/docs", "/docs/page.js", "/docs/page.css"]


def client(settings: Settings, host: str = "localhost:8080") -> TestClient:
    return TestClient(make_app(settings), base_url=f"http://{host}", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def keyed() -> TestClient:
    return client(Settings(api_key="right", admin_key="boss"))


@pytest.mark.parametrize("path", CLOSED)
def test_every_route_needs_the_key(keyed: TestClient, path: str) -> None:
    answer = keyed.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_api_key"
    assert keyed.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert keyed.get(path, headers={"Authorization": "Bearer right"}).status_code == 200
    assert keyed.get(path, headers={"Authorization": "Bearer boss"}).status_code == 200


@pytest.mark.parametrize("path", OPEN)
def test_health_and_pages_need_none(keyed: TestClient, path: str) -> None:
    assert keyed.get(path).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "bearer right"}, 200),
        ({"authorization": "BEARER   right  "}, 200),
        ({"Authorization": "Bearer\tright"}, 200),
        ({"X-Api-Key": " right "}, 200),
        ({"X-Api-Key": "right", "Authorization": "Basic eDp5"}, 200),
        ({"X-Api-Key": "wrong", "Authorization": "Bearer right"}, 200),
        ({"Authorization": "right"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": ""}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": "Right"}, 401),
        ({"X-Api-Key": "right\u00e9".encode("latin-1")}, 401),
        ({"X-Api-Key": "x" * 50_000}, 401),
        ({"X-Api-Key": "x" * 1_000_000}, 431),
    ],
)
def test_forms_of_the_key(keyed: TestClient, headers: dict[str, str], status: int) -> None:
    assert keyed.get("/slow/0", headers=headers).status_code == status


def test_admin_key(keyed: TestClient) -> None:
    assert keyed.delete("/thing").status_code == 401
    answer = keyed.delete("/thing", headers={"X-Api-Key": "right"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "admin_key_needed"
    assert keyed.delete("/thing", headers={"X-Api-Key": "boss"}).status_code == 200
    one_key = client(Settings(api_key="right"))
    assert one_key.delete("/thing", headers={"X-Api-Key": "right"}).status_code == 200
    assert one_key.delete("/thing").status_code == 401


def test_without_keys_the_machine_itself_is_free() -> None:
    assert client(Settings()).delete("/thing").status_code == 200
    open_to_all = client(Settings(host=REMOTE, allow_remote_without_key=True))
    assert open_to_all.get("/slow/0").status_code == 200
    assert open_to_all.delete("/thing").status_code == 403
    only_admin = client(Settings(admin_key="boss"))
    assert only_admin.get("/slow/0").status_code == 200
    assert only_admin.delete("/thing").status_code == 401


def test_odd_paths_and_hosts_do_not_get_round_the_key() -> None:
    """As they are sent: a client would tidy them up."""
    with serving(Settings(port=0, api_key="right")) as live:
        for path in ("//metrics", "/x/../metrics", "/Metrics", "/metrics;x", "/metrics/", "/./metrics", "/%6detrics"):
            assert live.ask("GET", path).status in (401, 404, 307), path
        for target in ("http://localhost/metrics", "http://evil.com/metrics", "*", "metrics"):
            assert live.ask("GET", target).status in (400, 401, 404), target
        assert live.ask("GET", "/metrics", host="localhost/health?").status == 400
        assert live.ask("GET", "/metrics", x_api_key="right").status == 200


def test_listening_beyond_the_machine_needs_a_key() -> None:
    for host in (REMOTE, "::", "192.168.1.5", "example.org"):
        with pytest.raises(SalaError, match="no key"):
            check_listening(Settings(host=host))
        with pytest.raises(SalaError, match="no key"):
            check_listening(Settings(host=host, admin_key="boss"))
        check_listening(Settings(host=host, api_key="k" * 16))
        check_listening(Settings(host=host, allow_remote_without_key=True))
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.5"):
        check_listening(Settings(host=host))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("localhost.", 200),
        ("named.org:99", 200),
        ("evil.com", 421),
        ("localhost.evil.com", 421),
        ("evil.localhost", 421),
        ("10.0.0.1", 421),
        ("named.org.evil.com", 421),
        ("x/metrics?", 400),
        ("localhost:8080/x", 400),
        ("localhost:99999999", 400),
        ("localhost@evil.com", 400),
        ("", 400),
    ],
)
def test_host_on_this_machine(host: str, status: int) -> None:
    answer = client(Settings(allowed_hosts=("named.org",))).get("/slow/0", headers={"Host": host})
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]["code"] in ("unknown_host", "bad_request")


def test_host_beyond_this_machine() -> None:
    def status(settings: Settings, host: str) -> int:
        return client(settings).get("/health", headers={"Host": host}).status_code

    free = Settings(host=REMOTE, allow_remote_without_key=True)
    assert [status(free, host) for host in ("10.0.0.1", "localhost", "box.lan")] == [200, 200, 421]
    keyed = Settings(host=REMOTE, api_key="k")
    assert [status(keyed, host) for host in ("10.0.0.1", "box.lan", "a b")] == [200, 200, 400]
    named = Settings(host=REMOTE, api_key="k", allowed_hosts=("box.lan",))
    assert [status(named, host) for host in ("10.0.0.1", "box.lan", "other.lan")] == [200, 200, 421]


@pytest.mark.parametrize(
    ("origin", "is_fine"),
    [
        ("http://localhost:8080", True),
        ("HTTP://LocalHost:8080", True),
        ("https://app.org", True),
        ("http://localhost", False),
        ("http://localhost:8081", False),
        ("http://127.0.0.1:8080", False),
        ("http://localhost.evil.com:8080", False),
        ("http://localhost:8080.evil.com", False),
        ("http://localhost:8080@evil.com", False),
        ("http://evil.com", False),
        ("https://app.org.evil.com", False),
        ("https://app.org:8443", False),
        ("http://app.org", False),
        ("null", False),
        ("", False),
    ],
)
def test_origin(origin: str, is_fine: bool) -> None:
    caller = client(Settings(cors_origins=("https://app.org",)))
    post = caller.post("/deaf", headers={"Origin": origin})
    delete = caller.delete("/thing", headers={"Origin": origin})
    assert (post.status_code, delete.status_code) == ((200, 200) if is_fine else (403, 403))
    is_foreign = origin == "https://app.org"
    get = caller.get("/slow/0", headers={"Origin": origin})
    assert get.status_code == 200
    assert get.headers.get("access-control-allow-origin") == (origin if is_foreign else None)
    assert "access-control-allow-credentials" not in get.headers


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("cross-site", "no-cors", 403),
        ("cross-site", "navigate", 200),
        ("same-origin", "cors", 200),
        ("none", "cors", 200),
    ],
)
def test_an_image_of_another_site_fetches_nothing(site: str, mode: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
    assert client(Settings()).get("/slow/0", headers=headers).status_code == status


def test_behind_a_proxy_with_tls_the_own_page_may_call() -> None:
    assert is_same(b"https://llm.org", b"llm.org")
    assert is_same(b"https://llm.org", b"llm.org:443")
    assert not is_same(b"https://llm.org", b"llm.org:80")
    assert not is_same(b"ftp://llm.org", b"llm.org")


def test_preflight() -> None:
    ask = {"Origin": "https://app.org", "Access-Control-Request-Method": "POST"}
    asked = {**ask, "Access-Control-Request-Headers": "authorization, content-type"}
    allowed = client(Settings(api_key="k", cors_origins=("https://app.org",))).options("/echo", headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.org"
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    refused = client(Settings(cors_origins=("https://app.org",))).options("/echo", headers={**ask, "Origin": "null"})
    assert refused.status_code >= 400
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in client(Settings()).options("/echo", headers=ask).headers


def test_request_id_is_shown_if_it_is_harmless() -> None:
    caller = client(Settings())
    assert caller.get("/health", headers={"X-Request-Id": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"
    for given in ("a b", "x" * 65, "<b>", ""):
        answer = caller.get("/health", headers={"X-Request-Id": given})
        assert answer.headers["x-request-id"] != given
        assert len(answer.headers["x-request-id"]) == 24
    ids = {caller.get("/health").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


def test_errors_tell_nothing_private() -> None:
    caller = client(Settings(api_key="right"))
    for path in ("/broken", "/none"):
        answer = caller.get(path, headers={"X-Api-Key": "right"})
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert not any(word in answer.text for word in ("secret", "/etc", "0x7f", "Traceback", "right"))
    assert caller.get("/none").headers["x-content-type-options"] == "nosniff"
    assert json.loads(caller.put("/echo").text)["error"]["code"] == "method_not_allowed"


def test_every_route_of_the_real_application(tmp_path: Path) -> None:
    """Whatever is added later: without the key it is closed, under all its names."""
    app = create_app(Settings(api_key="right", admin_key="boss", models_dir=tmp_path))
    caller = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    static = ("/health", "/docs", "/web")
    schema = caller.get("/openapi.json", headers={"X-Api-Key": "right"}).json()
    operations = [(method, path) for path, item in schema["paths"].items() for method in item]
    assert len(operations) > 10
    for method, path in operations:
        if path.startswith(static) or path == "/":
            continue
        for name in {path, path.removeprefix("/v1")}:
            answer = caller.request(method, re.sub(r"{[^}]*}", "x", name), headers={"Content-Type": "application/json"})
            assert answer.status_code == 401, f"{method} {name}"
            assert "error" in answer.json()
    for path in ("/openapi.json", "/metrics", "/v1/models", "/models"):
        assert caller.get(path).status_code == 401
        assert caller.get(path, headers={"X-Api-Key": "right"}).status_code == 200
    for path in ("/", "/health/live", "/docs"):
        assert caller.get(path).status_code == 200
    assert caller.delete("/v1/models/x", headers={"X-Api-Key": "right"}).status_code == 403
    assert caller.delete("/v1/models/x", headers={"X-Api-Key": "boss"}).status_code == 404


def test_the_reference_lists_every_endpoint(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "server.md").read_text()
    listed = set(re.findall(r"(GET|POST|DELETE) (/[\w/{}.]*)", text))
    schema = create_app(Settings(models_dir=tmp_path)).openapi()
    found = {(method.upper(), path) for path, item in schema["paths"].items() for method in item}
    assert found <= listed
    assert {each for each in listed - found if each[1] not in ("/", "/docs", "/openapi.json")} == set()
