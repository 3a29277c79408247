"""Bad manners against the whole server, model and all: what a small application stands the real one must stand too."""

import contextlib
import json
import re
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import h11
import psutil
import pytest

from sala.server.app import create_app
from sala.server.http.connection import NUM_EVENTS, Parser
from sala.server.http.security import MAX_HEADER_BYTES
from sala.server.settings import Settings
from tests.server.live import Live, is_closed, read_answer, request, serving, wait_until

CHAT = "/v1/chat/completions"
JSON = {"content_type": "application/json"}
SHORT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1}
KEY = "a-secret"
KIB = 1024


def whole_server(tiny: Path, room: Path, **settings: Any) -> Settings:
    values = {"model": str(tiny), "models_dir": room, "device": "cpu", "ctx": 2048, "drain_s": 1.0, "port": 0}
    return Settings(**{**values, **settings})


@pytest.fixture(scope="module")
def live(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = whole_server(tiny, tmp_path_factory.mktemp("room"), max_body="1M", max_connections=40)
    with serving(settings, create_app(settings)) as one:
        wait_until(lambda: one.app.state.runtime.loaded, 30)
        yield one


@pytest.fixture(scope="module")
def keyed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = whole_server(tiny, tmp_path_factory.mktemp("room"), api_key=KEY)
    with serving(settings, create_app(settings)) as one:
        yield one


def worker(live: Live) -> Any:
    (model,) = live.app.state.runtime.loaded.values()
    return model.service


def answers(live: Live) -> bool:
    return live.ask("POST", CHAT, json.dumps(SHORT).encode(), **JSON).status == 200


def head(path: str, *lines: str) -> bytes:
    first = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join([*first, *lines, "", ""]).encode()


def single_bytes(body: bytes) -> bytes:
    """The body in chunks of one byte, without the end."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body)


def read_all(one: socket.socket, within: float = 20.0) -> bytes:
    one.settimeout(within)
    data = b""
    while piece := one.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/tokenize", "/v1/models/download"])
def test_a_large_body_without_length_is_refused_by_every_route(live: Live, path: str) -> None:
    before = psutil.Process().memory_info().rss
    with live.connect() as one:
        one.sendall(head(path, "transfer-encoding: chunked"))
        try:
            for _ in range(400):
                one.sendall(b"10000\r\n" + b" " * 64 * KIB + b"\r\n")
        except OSError:
            pass
        answer = read_answer(one)
    assert answer.status == 413
    assert json.loads(answer.body)["error"]["type"] in ("invalid_request_error", "request_too_large")
    assert psutil.Process().memory_info().rss - before < 20 * KIB * KIB
    assert answers(live)


def test_a_body_that_breaks_off_leaves_nothing_behind(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    for way in ("close", "reset", "half"):
        with live.connect() as one:
            one.sendall(head(CHAT, "content-length: 500") + b'{"messages": [')
            time.sleep(0.05)
            if way == "reset":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if way == "half":
                one.shutdown(socket.SHUT_WR)
                assert is_closed(one, 5)
    wait_until(lambda: live.server.front.num_running == 0)
    assert worker(live).num_requests == 0
    assert answers(live)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nhost: loc"])
def test_connections_that_hold_a_place_make_room(live: Live, start: bytes) -> None:
    """No deadline has passed yet: the oldest of those that do nothing has to go."""
    held = [socket.create_connection(("127.0.0.1", live.port), timeout=10) for _ in range(60)]
    try:
        for one in held:
            try:
                one.sendall(start)
            except OSError:  # it has made room already
                continue
        began = time.monotonic()
        assert all(answers(live) for _ in range(3))
        assert time.monotonic() - began < live.server.settings.header_deadline_s
        assert len(live.server.server_state.connections) <= 41
    finally:
        for one in held:
            one.close()


def test_a_client_with_a_key_is_answered_among_stalled_ones(tiny: Path, tmp_path: Path) -> None:
    """As many as may connect ask for pages that they do not read, or send a body a byte at a time, without a key."""
    key = "k" * 20
    settings = whole_server(tiny, tmp_path, api_key=key, max_connections=64)
    begun = head(CHAT, "content-length: 100000")
    with serving(settings, create_app(settings)) as live, ExitStack() as stack:
        wait_until(lambda: live.app.state.runtime.loaded, 30)
        connections = live.server.server_state.connections
        held = [stack.enter_context(socket.socket()) for _ in range(64)]
        for number, one in enumerate(held):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.settimeout(10)
            one.connect(("127.0.0.1", live.port))
            one.sendall(begun if number % 2 else request("GET", "/web/style.css") * 400)
        wait_until(lambda: sum(each.flow.write_paused for each in connections) >= 32, 20)
        for _ in range(5):
            for one in held[1::2]:
                with suppress(OSError):  # it has been disconnected
                    one.sendall(b"x")
            assert live.ask("GET", "/health").status == 200
            answer = live.ask("POST", CHAT, json.dumps(SHORT).encode(), **JSON, authorization=f"Bearer {key}")
            assert answer.status == 200
            assert json.loads(answer.body)["choices"][0]["finish_reason"]
        assert sum(each.flow.write_paused for each in connections) >= 16  # they still hold their places


def test_a_reader_of_single_bytes_is_dropped(tiny: Path, tmp_path: Path) -> None:
    """That it reads at all does not help it: it is the others who must not wait."""
    settings = whole_server(tiny, tmp_path, body_deadline_s=1.0)
    wordy = {"n": 8, "stream": True, "logprobs": True, "top_logprobs": 20, "ignore_eos": True, "max_tokens": 1900}
    with serving(settings, create_app(settings)) as live, socket.socket() as one:
        wait_until(lambda: live.app.state.runtime.loaded, 30)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.connect(("127.0.0.1", live.port))
        one.sendall(request("POST", CHAT, json.dumps({**SHORT, **wordy}).encode(), **JSON))
        wait_until(lambda: worker(live).status().running)
        assert answers(live)
        one.settimeout(5)
        deadline = time.monotonic() + 30
        while worker(live).num_requests:
            assert time.monotonic() < deadline, "it was not dropped"
            one.recv(1)
            time.sleep(0.02)
        assert b'sala_requests_total{reason="cancelled"} 1.0' in live.ask("GET", "/metrics").body
        assert answers(live)


def test_a_stream_for_an_old_client_ends_with_the_connection(live: Live) -> None:
    body = json.dumps({**SHORT, "stream": True}).encode()
    first = f"POST {CHAT} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with live.connect() as one:
        one.sendall(f"{first}content-length: {len(body)}\r\n\r\n".encode() + body)
        data = read_all(one)
    assert b" 200 " in data.splitlines()[0]
    assert b"transfer-encoding" not in data.lower()
    assert data.endswith(b"data: [DONE]\n\n")


def test_requests_in_a_row_are_answered_in_their_order(live: Live) -> None:
    bodies = [json.dumps({**SHORT, "max_tokens": count}).encode() for count in (30, 1, 7)]
    with live.connect() as one:
        one.sendall(b"".join(request("POST", CHAT, body, **JSON) for body in bodies))
        one.settimeout(20)
        data = b""
        while data.count(b'"completion_tokens":') < 3:
            piece = one.recv(65536)
            assert piece, data
            data += piece
    places = [data.index(b'"completion_tokens":%d,' % count) for count in (30, 1, 7)]
    assert places == sorted(places)


def test_single_bytes_as_chunks_are_a_body(live: Live) -> None:
    body = json.dumps(SHORT).ljust(3000).encode()
    with live.connect() as one:
        one.sendall(head(CHAT, "transfer-encoding: chunked"))
        one.sendall(single_bytes(body) + b"0\r\n\r\n")
        assert read_answer(one).status == 200


def test_what_follows_a_body_in_small_chunks_is_answered(live: Live) -> None:
    body = json.dumps(SHORT).ljust(3000).encode()
    whole = head(CHAT, "transfer-encoding: chunked") + single_bytes(body) + b"0\r\nx: y\r\n\r\n"
    with live.connect() as one:
        one.sendall(whole + whole + request("GET", "/health/live", connection="close"))
        assert read_all(one).count(b"HTTP/1.1 200 ") == 3


def test_the_rest_of_a_refused_body_is_not_parsed(keyed: Live) -> None:
    """What follows the many chunks is no chunk: whoever parsed it would answer it."""
    with keyed.connect() as one:
        one.sendall(head(CHAT, "transfer-encoding: chunked") + single_bytes(b"x" * 5000) + b"broken\r\n")
        data = read_all(one)
    assert data.startswith(b"HTTP/1.1 401 ")
    assert data.count(b"HTTP/1.1 ") == 1


def test_after_large_chunks_that_are_refused_the_connection_is_kept(live: Live) -> None:
    with live.connect() as one:
        for _ in range(2):
            one.sendall(head("/nowhere", "transfer-encoding: chunked"))
            one.sendall((b"4000\r\n" + b"x" * 16 * KIB + b"\r\n") * 40 + b"0\r\n\r\n")
            assert read_answer(one).status == 404
        one.sendall(request("GET", "/health/live"))
        assert read_answer(one).status == 200


def test_few_events_are_parsed_at_a_time() -> None:
    parser = Parser(MAX_HEADER_BYTES)
    parser.receive_data(head(CHAT, "transfer-encoding: chunked") + single_bytes(b"x" * 5000) + b"0\r\n\r\n")
    counts: list[int] = []
    while parser.is_cut or not counts:
        parser.allow()
        counts.append(sum(1 for _ in iter(parser.next_event, h11.NEED_DATA)))
    assert max(counts) <= NUM_EVENTS
    assert sum(counts) == 1 + 5000 + 1


def test_a_body_with_a_length_is_one_event_for_each_read() -> None:
    parser = Parser(MAX_HEADER_BYTES)
    parser.receive_data(head(CHAT, f"content-length: {900 * KIB}") + b"x" * 200 * KIB)
    events = list(iter(parser.next_event, h11.NEED_DATA))
    for _ in range(3):
        parser.receive_data(b"x" * 200 * KIB)
        events += iter(parser.next_event, h11.NEED_DATA)
    assert [type(event) for event in events] == [h11.Request] + [h11.Data] * 5
    parser.receive_data(b"x" * 100 * KIB + request("GET", "/"))
    assert [type(event) for event in iter(parser.next_event, h11.PAUSED)] == [h11.Data, h11.EndOfMessage]
    assert parser.has_more


@pytest.mark.parametrize("count", [100, 102, 10_000])
def test_lines_of_a_header_are_counted_before_they_are_parsed(count: int) -> None:
    lines = b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * (count - 1)
    parser = Parser(MAX_HEADER_BYTES)
    for piece in (lines, b"\r\n" + b"\n" * 1000):
        parser.receive_data(piece)
        if count > 100:
            with pytest.raises(h11.RemoteProtocolError, match="too many lines in a header"):
                parser.next_event()
            return
        event = parser.next_event()
    assert isinstance(event, h11.Request)
    assert len(event.headers) == count


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: identity, chunked\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding : chunked\r\n",
        b"transfer-encoding:\x0bchunked\r\n",
        b"content-length: 5\r\ncontent-length: 0\r\n",
        b"content-length: +5\r\n",
        b"content-length: 5_0\r\n",
        b"content-length: 0x5\r\n",
        b"content-length: -5\r\n",
        b"x: y\r\n\x00z: 1\r\n",
    ],
)
def test_where_a_body_ends_is_never_in_doubt(live: Live, lines: bytes) -> None:
    """A second request that hides in the body of a first is not answered."""
    hidden = b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with live.connect() as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + lines + b"\r\n" + hidden)
        data = read_all(one)
    assert data.count(b"HTTP/1.1 ") == 1
    assert data.split()[1] in (b"400", b"501")
    assert answers(live)


@pytest.mark.parametrize("line", [b"x: y\r\n", b"x" * 1000 + b": y\r\n"])
def test_lines_without_end_after_a_body_are_refused(live: Live, line: bytes) -> None:
    with live.connect() as one:
        one.sendall(head(CHAT, "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n")
        try:
            for _ in range(100):
                one.sendall(line * (20_000 // len(line)))
        except OSError:
            pass
        assert is_closed(one, 5)
    assert answers(live)


def test_many_lines_after_a_body_are_refused(live: Live) -> None:
    with live.connect() as one:
        one.sendall(head(CHAT, "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n" + b"a:\r\n" * 8000 + b"\r\n")
        assert read_answer(one).status == 400
        assert is_closed(one, 5)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize", "/v1/models/load", "/v1/models/download"])
def test_without_a_key_the_body_is_not_waited_for(keyed: Live, path: str) -> None:
    with keyed.connect() as one:
        one.sendall(head(path, "content-length: 1000000"))
        assert read_answer(one).status == 401
    with keyed.connect() as one:
        one.sendall(head(path, "content-length: 1000000", "expect: 100-continue"))
        answer = read_answer(one)
        assert (answer.status, answer.headers["connection"]) == (401, "close")


def test_with_a_key_the_body_is_asked_for(keyed: Live) -> None:
    with keyed.connect() as one:
        one.sendall(head("/v1/models/load", f"x-api-key: {KEY}", "content-length: 2", "expect: 100-continue"))
        assert one.recv(65536).startswith(b"HTTP/1.1 100")
        one.sendall(b"{}")
        assert read_answer(one).status == 400


@pytest.mark.parametrize("path", ["/", "/web/app.js", "/docs", "/docs/page.js"])
def test_ten_thousand_ranges_are_no_work(live: Live, path: str) -> None:
    whole = live.ask("GET", path)
    began = time.monotonic()
    answer = live.ask("GET", path, range="bytes=" + "0-1," * 10_000 + "2-3")
    assert answer.status in (200, 206, 400, 416)
    assert len(answer.body) <= len(whole.body) + KIB
    assert time.monotonic() - began < 3


def test_every_test_that_the_reference_names_is_there() -> None:
    root = Path(__file__).parents[2]
    page = root / "docs" / "reference" / "hostile-input.md"
    named = re.findall(r"\[([\w.]+)::(\w+)\]\(([^)]+)\)", page.read_text())
    assert len(named) > 50
    for file, name, address in named:
        path = (page.parent / address).resolve()
        assert path.name == file
        assert path.is_relative_to(root / "tests")
        assert f"\ndef {name}(" in path.read_text(), name


def test_no_case_is_missing_in_the_reference() -> None:
    """Every case has a row that names a test; what is left untested has a row that says why."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "hostile-input.md"
    tested, _, untested = page.read_text().partition("## Not tested")
    numbers = set[int]()
    for line in re.findall(r"^\| .* \|$", tested, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] != "case":
            assert "::test_" in cells[-1], line
            numbers |= {int(number) for number in cells[0].split(",") if number}
    assert numbers == set(range(1, 160))
    for line in re.findall(r"^\| .* \|$", untested.partition("\n## ")[0], re.MULTILINE):
        case, what, why = (cell.strip() for cell in line.strip("|").split(" | "))
        assert case == "case" or (int(case) in numbers and what and why), line


def test_many_large_bodies_at_a_time_do_not_fill_the_memory(live: Live) -> None:
    """Each is within the limit and nearly complete; the one that would be too much is sent away, then all is well."""
    begun = head(CHAT, f"content-length: {1000 * KIB}") + b" " * 999 * KIB
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(live.connect()) for _ in range(5)]
        for one in clients:
            with contextlib.suppress(OSError):
                one.sendall(begun)
        refused, _, _ = select.select(clients, [], [], 20)
        answer = read_answer(refused[0])
        assert answer.status == 503
        assert json.loads(answer.body)["error"]["code"] == "bodies_too_large"
        assert answer.headers["retry-after"] == "1"
        assert len(refused) == 1
    wait_until(lambda: answers(live), 10)
