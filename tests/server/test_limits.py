"""Bad manners over real sockets: too much, too slow, too many, or not HTTP at all."""

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sala.server.http import connection
from sala.server.http.body import is_too_deep
from sala.server.http.keys import KeyFile
from sala.server.settings import Settings
from tests.server.live import Live, is_closed, read_answer, request, serving, wait_until

KIB = 1024


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(Settings(port=0, max_body="1M")) as one:
        yield one


@pytest.fixture(scope="module")
def hasty() -> Iterator[Live]:
    """A server without patience."""
    with serving(Settings(port=0, header_deadline_s=0.4, body_deadline_s=0.4, max_connections=8)) as one:
        yield one


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def works(live: Live) -> bool:
    return json.loads(live.ask("POST", "/echo", b"abc").body) == {"size": 3}


def test_body_at_the_limit(live: Live) -> None:
    assert json.loads(live.ask("POST", "/echo", b"x" * KIB * KIB).body) == {"size": KIB * KIB}
    answer = live.ask("POST", "/echo", b"x" * (KIB * KIB + 1))
    assert answer.status == 413
    assert answer.error["code"] == "body_too_large"


def test_a_large_body_is_refused_before_it_comes(live: Live) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 68157440\r\n\r\n"
    assert live.talk(head).status == 413
    huge = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9" + b"9" * 40 + b"\r\n\r\n"
    assert live.talk(huge).status in (400, 413)
    assert works(live)


@pytest.mark.parametrize("path", ["/echo", "/deaf", "/none"])
def test_a_large_body_without_length_is_refused_on_the_way(live: Live, path: str) -> None:
    before = psutil.Process().memory_info().rss
    piece = chunked(b"x" * 64 * KIB)
    with live.connect() as one:
        one.sendall(request("POST", path, transfer_encoding="chunked"))
        sent = 0
        try:
            while sent < 400:
                one.sendall(piece)
                sent += 1
        except OSError:
            pass
        status = read_answer(one).status if path == "/echo" else None
    assert status in (None, 413)
    assert psutil.Process().memory_info().rss - before < 20 * KIB * KIB
    assert works(live)


def test_a_body_that_nobody_reads_does_not_hold_the_connection(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.5)
    with live.connect() as one:
        one.sendall(b"POST /none HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
        assert read_answer(one).status == 404
        began = time.monotonic()
        try:
            while time.monotonic() - began < 8:
                one.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - began < 5


def test_a_body_shorter_than_promised_is_a_disconnect(
    live: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.log, "propagate", True)
    caplog.set_level("INFO", "sala.server")
    with live.connect() as one:
        one.sendall(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nabc")
        time.sleep(0.1)
    with live.connect() as one:
        one.sendall(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nabc")
        one.shutdown(socket.SHUT_WR)
        assert is_closed(one, 5)
    wait_until(lambda: caplog.text.count("POST /echo 499") == 2)
    assert works(live)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("form", ["one line", "one line, in pieces", "many lines", "long path"])
def test_large_headers(live: Live, form: str) -> None:
    if form == "one line":
        data = request("GET", "/health", x_large="x" * 100 * KIB)
    elif form == "one line, in pieces":
        data = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-large: " + b"x" * 400 * KIB
    elif form == "many lines":
        data = request("GET", "/health", **{f"x{number}": "y" for number in range(2000)})
    else:
        data = request("GET", "/" + "x" * 100 * KIB)
    with live.connect() as one:
        one.sendall(data)
        answer = read_answer(one)
    assert answer.status in (400, 431)
    assert answer.error["type"] == "invalid_request_error"
    assert works(live)


def test_header_at_the_limit(live: Live) -> None:
    assert live.ask("GET", "/health", x_large="x" * 60 * KIB).status == 200


def test_half_a_header_is_not_waited_for(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.5)
    with hasty.connect() as silent, hasty.connect() as half, hasty.connect() as dripping:
        half.sendall(b"GET /health HTTP/1.1\r\nhost: loc")
        began = time.monotonic()
        try:
            for byte in b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100:
                dripping.sendall(bytes([byte]))
                time.sleep(0.02)
        except OSError:
            pass
        assert read_answer(half).status == 408
        assert is_closed(half, 5)
        assert is_closed(silent, 5)
        assert is_closed(dripping, 5)
        assert time.monotonic() - began < 6


def test_a_kept_connection_gets_the_same_deadline_again(hasty: Live) -> None:
    with hasty.connect() as one:
        one.sendall(request("GET", "/health"))
        assert read_answer(one).status == 200
        one.sendall(b"GET /hea")
        assert read_answer(one).status == 408
        assert is_closed(one, 5)


def test_a_body_must_keep_coming(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.5)
    with hasty.connect() as one:
        one.sendall(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n")
        began = time.monotonic()
        try:
            while time.monotonic() - began < 6:
                one.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - began < 5
    with hasty.connect() as one:
        one.sendall(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n")
        answer = read_answer(one)
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert works(hasty)


def test_a_slow_body_that_moves_may_take_long(hasty: Live) -> None:
    with hasty.connect() as one:
        one.sendall(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20480\r\n\r\n")
        for _ in range(10):
            one.sendall(b"x" * 2048)
            time.sleep(0.12)
        assert json.loads(read_answer(one).body) == {"size": 20480}


def test_a_slow_answer_has_no_deadline(hasty: Live) -> None:
    assert json.loads(hasty.ask("GET", "/slow/1.2").body) == {"slept": 1.2}
    with hasty.connect() as one:
        one.sendall(request("POST", "/echo", b"x" * 70_000))
        assert read_answer(one).status == 200


def test_a_client_that_does_not_read_is_dropped(hasty: Live) -> None:
    with hasty.connect() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(request("GET", "/flood"))
        wait_until(lambda: hasty.app.state.num_streams == 1)
        assert works(hasty)
        wait_until(lambda: hasty.app.state.num_streams == 0, 6)


def test_idle_connections_make_room(hasty: Live) -> None:
    idle = [socket.create_connection(("127.0.0.1", hasty.port), timeout=10) for _ in range(30)]
    try:
        for _ in range(3):
            assert works(hasty)
        assert len(hasty.server.server_state.connections) <= 9
    finally:
        for one in idle:
            one.close()


def test_busy_connections_do_not(hasty: Live) -> None:
    busy = [socket.create_connection(("127.0.0.1", hasty.port), timeout=10) for _ in range(8)]
    try:
        for one in busy:
            one.sendall(request("GET", "/slow/1.5"))
        time.sleep(0.3)
        with hasty.connect() as late:
            answer = read_answer(late)
        assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        assert "retry-after" in answer.headers
        assert [read_answer(one).status for one in busy] == [200] * 8
    finally:
        for one in busy:
            one.close()
    assert works(hasty)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Live]:
    with serving(Settings(port=0, api_key="k" * 20, max_connections=8)) as one:
        yield one


def stall_body(live: Live) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", live.port), timeout=10)
    one.sendall(request("POST", "/echo", content_length="100000") + b"x")
    return one


def test_slow_bodies_make_room(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.1)
    slow = [stall_body(hasty) for _ in range(8)]
    try:
        time.sleep(0.2)
        assert works(hasty)
    finally:
        for one in slow:
            one.close()


def stop_reading(live: Live) -> socket.socket:
    """Ask for far more than fits into the buffers, and read nothing."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    one.settimeout(10)
    one.connect(("127.0.0.1", live.port))
    one.sendall(request("GET", "/") * 400)
    return one


def test_a_client_with_a_key_gets_in_and_so_does_health(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients without a key hold every place, and more of them try; a client may pause for a while."""
    monkeypatch.setattr(connection, "STALLED_S", 1e9)
    connections = keyed.server.server_state.connections
    held = [stop_reading(keyed) for _ in range(8)]
    wait_until(lambda: len(connections) == 8 and all(each.flow.write_paused for each in connections))
    idle = [socket.create_connection(("127.0.0.1", keyed.port), timeout=10) for _ in range(connection.NUM_EXTRA + 8)]
    try:
        assert keyed.ask("GET", "/health/none").status == 404
        assert json.loads(keyed.ask("POST", "/echo", b"abc", authorization="Bearer " + "k" * 20).body) == {"size": 3}
        refused = keyed.ask("GET", "/")
        assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
        assert len(connections) <= 8 + connection.NUM_EXTRA
        monkeypatch.setattr(connection, "STALLED_S", 0.0)
        assert keyed.ask("GET", "/").status == 200
    finally:
        for one in held + idle:
            one.close()


def test_one_key_leaves_connections_to_others(tmp_path: Path) -> None:
    """Its requests hold every place, and the next is refused; another key gets in, as long as it holds no half."""
    file = KeyFile(tmp_path / "keys.json")
    anna, ben = ({"authorization": f"Bearer {file.add(name)}"} for name in ("anna", "ben"))
    with serving(Settings(port=0, keys_file=file.path, max_connections=4)) as live:
        held = [socket.create_connection(("127.0.0.1", live.port), timeout=10) for _ in range(4)]
        try:
            for one in held:
                one.sendall(request("GET", "/slow/60", **anna))
            connections = live.server.server_state.connections
            wait_until(lambda: len(connections) == 4 and all(each.key is not None for each in connections))
            assert live.ask("POST", "/echo", b"abc", **anna).error["code"] == "too_many_connections"
            assert live.ask("POST", "/echo", b"abc", **ben).status == 200
            assert live.ask("GET", "/health/none").status == 404
        finally:
            for one in held:
                one.close()


def test_one_address_has_a_share_of_the_connections() -> None:
    with serving(Settings(port=0, api_key="k" * 20, max_per_address=2)) as live:
        held = [stop_reading(live) for _ in range(2)]
        try:
            wait_until(lambda: len(live.server.server_state.connections) >= 2)
            assert live.ask("GET", "/").status == 503
            assert live.ask("POST", "/echo", b"abc", x_api_key="k" * 20).status == 200
        finally:
            for one in held:
                one.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "identity, gzip"])
def test_compressed_bodies_are_not_unpacked(live: Live, encoding: str) -> None:
    answer = live.ask("POST", "/echo", b"\x1f\x8b", content_encoding=encoding)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
    assert live.ask("POST", "/echo", b"x", content_encoding="identity").status == 200


def test_length_and_chunks_exclude_each_other(live: Live) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n"
    assert live.talk(head + chunked(b"abc", b"")).status == 400
    twice = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd"
    assert live.talk(twice).status == 400
    odd = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: xchunked\r\n\r\n"
    assert live.talk(odd).status in (400, 501)


@pytest.mark.parametrize(
    "data", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00" * 20 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http_is_told_so(live: Live, data: bytes) -> None:
    assert live.talk(data).error["code"] == "bad_request"
    assert works(live)


def test_a_broken_chunk_ends_the_request(live: Live) -> None:
    answer = live.talk(request("POST", "/echo", transfer_encoding="chunked") + b"zz\r\nabc\r\n")
    assert answer.status == 400
    assert works(live)


def test_old_and_new_http(live: Live) -> None:
    assert live.talk(b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n").status == 200
    assert live.talk(b"GET /health HTTP/1.0\r\n\r\n").status == 400  # which name was meant cannot be known
    assert live.talk(b"GET /health HTTP/1.1\r\n\r\n").status == 400
    with live.connect() as one:
        one.sendall(request("GET", "/slow/0.1") + request("POST", "/echo", b"ab") + request("GET", "/health"))
        data = b""
        one.settimeout(5)
        while b'"status"' not in data:
            data += one.recv(65536)
        assert data.index(b"slept") < data.index(b'"size":2') < data.index(b'"status"')


def test_pipelined_requests_take_turns(live: Live) -> None:
    """Of clients that send many at once, only the first requests are answered in the same round of the event loop."""
    num_clients, num_requests = 32, 40
    state = live.server.server_state

    async def watch() -> list[int]:
        counts = [state.total_requests]
        while counts[-1] < counts[0] + num_clients * num_requests:
            await asyncio.sleep(0)
            counts.append(state.total_requests)
        return [after - before for before, after in itertools.pairwise(counts)]

    clients = [socket.create_connection(("127.0.0.1", live.port), timeout=10) for _ in range(num_clients)]
    try:
        wait_until(lambda: len(state.connections) >= num_clients)
        loop = next(iter(state.connections)).loop  # type: ignore[union-attr]
        found = asyncio.run_coroutine_threadsafe(watch(), loop)
        for one in clients:
            one.sendall(request("GET", "/health/live") * num_requests)
        assert sum(count - 1 for count in found.result(20) if count > 4) <= num_clients  # and one turn in each round
    finally:
        for one in clients:
            one.close()


def test_expect_100_continue(live: Live) -> None:
    with live.connect() as one:
        one.sendall(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
        assert one.recv(65536).startswith(b"HTTP/1.1 100")
        one.sendall(b"abc")
        assert json.loads(read_answer(one).body) == {"size": 3}
    with live.connect() as one:
        one.sendall(
            b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\nexpect: 100-continue\r\n\r\n"
        )
        answer = read_answer(one)
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert is_closed(one, 5)


def test_an_upgrade_is_passed_over(live: Live) -> None:
    assert live.ask("GET", "/health", connection="upgrade", upgrade="websocket").status == 200


def test_many_ranges_are_no_work(live: Live) -> None:
    ranges = "bytes=" + ",".join(f"{number}-{number}" for number in range(5000))
    began = time.monotonic()
    assert live.ask("GET", "/docs/page.js", range=ranges).status in (200, 206, 400, 416)
    assert time.monotonic() - began < 2


def test_errors_of_http_are_ours(live: Live) -> None:
    assert live.ask("GET", "/none").error["code"] == "not_found"
    assert live.ask("PUT", "/echo").error["code"] == "method_not_allowed"
    assert "server" not in live.ask("GET", "/health").headers


def test_depth_of_json() -> None:
    assert is_too_deep(b"[" * 65)
    assert not is_too_deep(b"[" * 64 + b"]" * 64)
    assert not is_too_deep(b'["' + b"[" * 100 + b'"]')
    assert not is_too_deep(rb'["a\"' + b"{" * 100 + b'"]')
    assert is_too_deep(rb'["a\\",' + b"{" * 100)
    assert not is_too_deep(b"[{}]" * 1000)
    assert is_too_deep(b'{"a":' * 10_000)
