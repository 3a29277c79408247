"""What load measurements are made of: the client, timelines, lengths and arrivals."""

import asyncio
import itertools
import socket
import threading
from collections.abc import Sequence

import pytest

from sala.errors import InputError
from sala.lab.bench.client import Endpoint, Response
from sala.lab.bench.load import Lengths, Load, Target
from sala.lab.bench.meters import Timeline, percentile, summarize

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices": [{"text": "a"}]}\n\n',
    b": ping\n\n",
    b'data: {"choices": [{"text": ""}]}\n\n',
    b'data: {"choices": [{"text": "b"}]}\r\n\r\n',
    b'data:{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3,'
    b' "prompt_tokens_details": {"cached_tokens": 4}}}\n\n',
    b"data: [DONE]\n\n",
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def ask(pieces: Sequence[bytes], pause_s: float = 0.0) -> Response:
    """Send a request to a socket that answers with these pieces, then closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    pause = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(65536)
        for piece in pieces:
            connection.sendall(piece)
            pause.wait(pause_s)
        connection.close()
        listener.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}")
        return asyncio.run(endpoint.send("/completions", b"{}", timeout_s=20))
    finally:
        thread.join(20)


WHOLE = CHUNKED + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"
FORMS = {
    "an event a chunk": [CHUNKED, *map(chunk, EVENTS), b"0\r\n\r\n"],
    "all at once": [WHOLE],
    "byte by byte": [bytes([one]) for one in WHOLE],
    "chunks that cut events": [
        CHUNKED, *(chunk(b"".join(EVENTS)[at : at + 7]) for at in range(0, len(b"".join(EVENTS)), 7)), b"0\r\n\r\n"
    ],
    "until the connection closes": [HEAD + b"\r\n", *EVENTS],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_events_in_every_form(form: str) -> None:
    found = ask(FORMS[form]).timeline(1)
    assert found.error is None
    assert (found.num_input, found.num_output, found.num_cached) == (9, 3, 4)
    assert 1 <= len(found.events) <= 2  # the text of two events; together if they arrived together
    assert found.first_token_s > 0


def test_events_that_arrive_apart_have_times_of_their_own() -> None:
    found = ask(FORMS["an event a chunk"], pause_s=0.02).timeline(1)
    assert len(found.events) == 2
    assert found.gaps[0] >= 0.02
    assert found.token_gaps == pytest.approx([found.gaps[0] / 2])  # three tokens in two events


def test_a_stream_that_ends_early_is_an_error() -> None:
    assert ask([CHUNKED, *map(chunk, EVENTS[:4]), b"0\r\n\r\n"]).timeline(1).error == "the stream ended early"
    failed = [*EVENTS[:2], b'data: {"error": {"message": "out of memory"}}\n\n']
    assert "out of memory" in str(ask([CHUNKED, *map(chunk, failed), b"0\r\n\r\n"]).timeline(1).error)
    with pytest.raises(ConnectionError):
        ask([CHUNKED, chunk(EVENTS[0])[:-9]])
    with pytest.raises(ConnectionError):
        ask([b"SSH-2.0-OpenSSH\r\n\r\n"])


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "too  long"}}', b'{"detail": "too long"}', b'{"error": "too long"}', b"too long\n"]
)
def test_messages_of_errors(body: bytes) -> None:
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert ask([head, body]).timeline(1).error == "400: too long"


def test_the_path_of_the_api_may_be_left_out() -> None:
    assert Endpoint("http://h:1").url == Endpoint("http://h:1/v1/").url == "http://h:1/v1"
    assert Endpoint("https://h/openai/v1").url == "https://h/openai/v1"
    with pytest.raises(InputError):
        Endpoint("http://h:port")


def test_lengths() -> None:
    assert list(Lengths.parse("2K", "input").values) == [2048]
    assert list(Lengths.parse("512, 2048", "input").values) == [512, 2048]
    assert list(Lengths.parse("3-5", "input").values) == [3, 4, 5]
    for text in ("", "0", "5-3", "1-", "-1", "a"):
        with pytest.raises(InputError, match="write it as"):
            Lengths.parse(text, "input")


def test_arrivals_are_random_and_repeatable() -> None:
    load = Load(Lengths([1]), Lengths([1]), 10, 0, rate=4.0, seed=7)
    times = list(itertools.islice(load.arrivals(), 4001))
    assert times == list(itertools.islice(load.arrivals(), 4001))
    assert times[0] == 0
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert sum(gap > 1 / 4 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # exp(-1): Poisson
    sizes = Load(Lengths([1, 2]), Lengths(range(5, 9)), 10, 0, rate=4.0, seed=7).sizes()
    assert {number for pair in itertools.islice(sizes, 100) for number in pair} == {1, 2, 5, 6, 7, 8}


def test_a_server_that_is_gone_is_an_error_of_the_request() -> None:
    target = Target(Endpoint("http://127.0.0.1:9"), "m", vocabulary=256)
    found = asyncio.run(target.ask("/completions", b"{}", 3))
    assert found.error
    assert summarize([found], 1.0)["errors"] == 1


def test_summaries() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], percent) for percent in (50, 75, 99)] == [2.0, 3.0, 4.0]
    assert percentile([], 50) is None
    one = Timeline(10.0, [11.0, 11.5, 14.0], num_input=100, num_output=3)
    two = Timeline(10.0, [12.0], num_input=50, num_output=1)
    failed = Timeline(10.0, error="500: no")
    found = summarize([one, two, failed], 5.0)
    assert (found["answers"], found["errors"], found["answers_per_second"]) == (2, 1, 0.4)
    assert (found["input_per_second"], found["output_per_second"]) == (30, 0.8)
    assert (found["first_token_s_p50"], found["first_token_s_p99"]) == (1.0, 2.0)
    assert (found["between_tokens_s_p50"], found["longest_stall_s"]) == (0.5, 2.5)
