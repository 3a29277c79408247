"""Bodies that used to stop the server for everyone, sent by one user beside another who is answered.

The server has two keys: anna's requests, and those without a key, do harm; ben reads a stream. /health and ben must not
wait, and no callback of the event loop may take long: in CPU time of its thread, which does not depend on what else
the machine does. Of the waits is left out how long other programs kept the processors from the server and this process.
"""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from sala.server.http.keys import KeyFile
from tests.withheld import Withheld

Span = tuple[float, float]  # when something began and ended
HELLO = [{"role": "user", "content": "x"}]
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
HEALTH_S = 0.5  # within which /health answers meanwhile
GAP_S = 1.0  # the longest pause of the neighbour's stream
MOST_WITHHELD = 0.75  # of a wait that other programs may be to blame for
BACK_S = 10.0  # within which threads and memory are back
LOOP_S = 0.05  # CPU time that a callback of the event loop may take
SLACK = 64 << 20  # bytes of memory that may stay: caches, and what the allocator keeps
LONG_S = 5.0  # after which the client of an answer that goes on for hours leaves
SERVE = f"""
import asyncio.events, sys, time
from sala.cli import run

run_handle = asyncio.events.Handle._run

def timed(handle):
    began = time.thread_time()
    try:
        run_handle(handle)
    finally:
        spent = time.thread_time() - began
        if spent > {LOOP_S}:
            print(f"event loop: {{spent:.3f}} s in {{handle!r:.300}}", file=sys.stderr, flush=True)

asyncio.events.Handle._run = timed
sys.exit(run(sys.argv[1:]))
"""


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 1, **more}


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def with_schema(schema: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})


def pattern(text: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": text}}}


def many(count: int) -> dict[str, Any]:
    names = [f"other{index}" for index in range(count)]
    return {"type": "object", "properties": {f"p{index}": {} for index in range(count)}, "required": names}


def call(arguments: str) -> dict[str, Any]:
    asked = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "y"}
    return chat(messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": [asked]}, result])


CLASSES = "(?i)" + "[\u0100-\uffff]" * 1500
ENDLESS = {"allOf": [{"type": "string", "pattern": f".*a.{{{count}}}b.*"} for count in range(1, 39)]}
SCORED = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "temperature": 2}
NESTED: Any = {"type": "string"}
for _ in range(50):
    NESTED = {"type": "object", "properties": {"a": NESTED}}


CORPUS: dict[str, tuple[str, Callable[[], Any]]] = {
    "classes in a pattern": (CHAT, lambda: chat(tools=[tool(pattern(CLASSES))])),
    "classes, escaped": (CHAT, lambda: chat(tools=[tool(pattern("(?i)" + r"[\u0100-\uffff]" * 400))])),
    "classes, by messages": (
        MESSAGES,
        lambda: chat(model="x", tools=[{"name": "f", "input_schema": pattern(CLASSES)}]),
    ),
    "classes, by responses": (
        RESPONSES,
        lambda: {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": pattern(CLASSES)}]},
    ),
    "classes in a call that is demanded": (
        CHAT,
        lambda: chat(tools=[tool(pattern(CLASSES))], tool_choice="required"),
    ),
    "classes in a strict tool": (CHAT, lambda: chat(tools=[tool(pattern(CLASSES), strict=True)])),
    "a long pattern": (CHAT, lambda: chat(tools=[tool(pattern(r"\S" * 1_000_000))], tool_choice="required")),
    "many long patterns": (
        CHAT,
        lambda: chat(tools=[tool({"anyOf": [pattern("(^a|b$)?" * 2_000)] * 400})], tool_choice="required"),
    ),
    "patterns as long as they may be": (
        CHAT,
        lambda: chat(tools=[tool({"anyOf": [pattern("(^a|b$)?" * 2_000)] * 8})], tool_choice="required"),
    ),
    "classes, to be counted": ("/v1/tokenize", lambda: {"messages": HELLO, "tools": [tool(pattern(CLASSES))]}),
    "many patterns": (
        CHAT,
        lambda: chat(tools=[tool({"anyOf": [{"pattern": f"(a|b{index}){{2,9}}"} for index in range(9000)]})]),
    ),
    "required names without properties": (CHAT, lambda: chat(tools=[tool(many(20_000))], tool_choice="required")),
    "a grammar without end": (CHAT, lambda: with_schema(ENDLESS)),
    "the same again": (CHAT, lambda: with_schema(ENDLESS)),
    "one more grammar without end": (CHAT, lambda: with_schema({"allOf": ENDLESS["allOf"][1:]})),
    "a grammar without end in a strict tool": (
        CHAT,
        lambda: chat(tools=[tool({"properties": {"a": ENDLESS}}, strict=True)], tool_choice="required"),
    ),
    "a large repetition": (CHAT, lambda: with_schema({"type": "string", "pattern": "(a{1,3000}){1,3000}"})),
    "a large enumeration": (CHAT, lambda: with_schema({"enum": [f"value {index}" for index in range(12_000)]})),
    "a schema of many values": (CHAT, lambda: with_schema({"enum": list(range(200_000))})),
    "a deep schema": (CHAT, lambda: with_schema(NESTED)),
    "a schema that refers to itself": (CHAT, lambda: with_schema({"$ref": "#"})),
    "references that multiply": (
        CHAT,
        lambda: with_schema(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{min(index + 1, 30)}"}] * 2} for index in range(31)
                },
            }
        ),
    ),
    "a long name": (CHAT, lambda: chat(messages=[{**HELLO[0], "name": "n" * 20_000_000}], stream=True)),
    "a long description": (CHAT, lambda: chat(tools=[tool({"type": "object"}, description="d" * 10_000_000)])),
    "objects in arguments": (CHAT, lambda: call('{"a":[' + "{}," * 3_000_000 + "0]}")),
    "depth in arguments": (CHAT, lambda: call('{"a":' * 100_000)),
    "a text without spaces": (CHAT, lambda: chat(messages=[{"role": "user", "content": "a" * 8_000_000}])),
    "many messages": (CHAT, lambda: chat(messages=[{"role": "user", "content": "x"}] * 60_000)),
    "scores of a prompt, many times": (
        COMPLETIONS,
        lambda: {"prompt": ["x" * 1900] * 8, "max_tokens": 0, "echo": True, "logprobs": 5},
    ),
    "many sequences": (
        COMPLETIONS,
        lambda: {"prompt": ["x" * 50] * 32, "n": 4, "max_tokens": 30, "temperature": 5},
    ),
    "a large bias": (CHAT, lambda: chat(logit_bias={str(index): 1 for index in range(1024)})),
    "a million unknown keys": (CHAT, lambda: chat(**{f"k{index}": None for index in range(100_000)})),
    "a text of many megabytes": (COMPLETIONS, lambda: {"prompt": "a" * 60_000_000}),
    "two conversations of many megabytes": (
        CHAT,
        lambda: chat(messages=[{**HELLO[0], "content": "a b " * 15_000_000}]),
    ),
    "token ids": (COMPLETIONS, lambda: {"prompt": [1] * 2_000_000, "max_tokens": 1}),
    "log-probabilities of many answers": (CHAT, lambda: chat(**SCORED, n=16) | {"max_tokens": 200}),
    "the same as a stream": (CHAT, lambda: chat(**SCORED, n=16, stream=True) | {"max_tokens": 200}),
    "log-probabilities of a long answer": (CHAT, lambda: chat(**SCORED) | {"max_tokens": 1900}),
    "log-probabilities of many completions": (
        COMPLETIONS,
        lambda: {"prompt": ["x"] * 8, "n": 4, "max_tokens": 150, "ignore_eos": True, "logprobs": 5, "temperature": 5},
    ),
    "log-probabilities of items, as a stream": (
        RESPONSES,
        lambda: {"input": "x", "max_output_tokens": 1900, "top_logprobs": 20, "temperature": 5, "stream": True},
    ),
    "scores of many prompts": (
        COMPLETIONS,
        lambda: {"prompt": ["x" * 300] * 64, "max_tokens": 0, "echo": True, "logprobs": 5},
    ),
    "scores of a long prompt as a stream, for many answers": (
        COMPLETIONS,
        lambda: {"prompt": "x" * 1900, "n": 32, "max_tokens": 1, "echo": True, "logprobs": 5, "stream": True},
    ),
    "a thousand answers": (
        COMPLETIONS,
        lambda: {
            "prompt": ["x" * length for length in range(1, 129)],
            "n": 8,
            "max_tokens": 1900,
            "ignore_eos": True,
            "temperature": 5,
            "stream": True,
        },
    ),
    "token ids to be spelt": ("/v1/detokenize", lambda: {"tokens": [7] * 2_000_000}),
    "empty parts": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 60_000}]),
    ),
    "many tools": (
        CHAT,
        lambda: chat(
            tools=[
                {"type": "function", "function": {"name": f"f{number}", "parameters": many(80)}}
                for number in range(128)
            ],
            tool_choice="required",
        ),
    ),
    "a name of megabytes": (CHAT, lambda: chat(model="m" * 30_000_000)),
    "tools that are sent back": (
        RESPONSES,
        lambda: {
            "input": "x",
            "max_output_tokens": 1,
            "tools": [
                {"type": "function", "name": f"f{at}", "description": "d" * 90_000, "parameters": many(200)}
                for at in range(128)
            ],
        },
    ),
    "a conversation just below the size that is read in a thread": (CHAT, lambda: chat(messages=HELLO * 1_900)),
    "two large answers at once": (CHAT, lambda: chat(**SCORED, n=8) | {"max_tokens": 300}),
}


@dataclass
class Server:
    url: str
    process: psutil.Process
    keys: dict[str, str]
    slow: list[str] = field(default_factory=list)  # callbacks of the event loop that took long

    def client(self, name: str, seconds: float = 60) -> httpx2.Client:
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=seconds, trust_env=False)

    def read_log(self, log: Iterable[str]) -> None:
        self.slow.extend(line for line in log if line.startswith("event loop: "))


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a process of its own: what it does must not depend on the test's own work, nor on its asserts."""
    room = tmp_path_factory.mktemp("corpus")
    keys = {name: KeyFile(room / "keys.json").add(name) for name in ("anna", "ben")}
    command = [sys.executable, "-O", "-c", SERVE, "serve", "-m", str(tiny), "--port", "0", "--device", "cpu"]
    command += ["--ctx", "2048", "--models-dir", str(room / "models"), "--files-dir", str(room / "files")]
    command += ["--keys-file", str(room / "keys.json")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "listens at" in line)
        found = re.search(r"http://[^/]+", line)
        assert found is not None
        server = Server(found[0], psutil.Process(process.pid), keys)
        threading.Thread(target=server.read_log, args=(process.stderr,), daemon=True).start()
        with server.client("anna", 120) as client:
            for body in (chat(), with_schema({"type": "integer"}), chat(tools=[tool(pattern("(?i)a"))])):
                assert client.post(CHAT, json=body).status_code == 200  # processes are started, libraries are loaded
        yield server
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def neighbour(server: Server, gaps: list[Span]) -> Iterator[None]:
    """A stream that is read meanwhile; its pauses are added to `gaps`."""
    is_over = threading.Event()

    def read() -> None:
        body = chat(max_tokens=1500, stream=True, temperature=5, seed=1, ignore_eos=True)
        with server.client("ben") as client:
            while not is_over.is_set():
                with client.stream("POST", CHAT, json=body) as answer:
                    assert answer.status_code == 200
                    last = time.monotonic()
                    for _ in answer.iter_lines():
                        now = time.monotonic()
                        gaps.append((last, now))
                        last = now
                        if is_over.is_set():
                            break

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(60)


def send(server: Server, path: str, data: bytes | None, statuses: list[int], seconds: float = 60.0) -> None:
    """Send a body, or get a page, and read the answer; leave after so many seconds."""
    began, headers = time.monotonic(), {"content-type": "application/json"}
    with server.client("anna") as client:
        method = "GET" if data is None else "POST"
        with client.stream(method, path, content=data, headers=headers) as answer:
            statuses.append(answer.status_code)
            for _ in answer.iter_raw():
                if time.monotonic() - began > seconds:
                    break


def send_chunks(server: Server, name: str | None, count: int, statuses: list[int]) -> None:
    """Send a body in chunks of one byte, with or without a key, and read the status."""
    address = httpx2.URL(server.url)
    key = f"authorization: Bearer {server.keys[name]}\r\n" if name else ""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{key}"
    with socket.create_connection((address.host, address.port), timeout=60) as one:
        one.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + b"1\r\nx\r\n" * count + b"0\r\n\r\n")
        statuses.append(int(one.recv(65536).split()[1]))


def memory(process: psutil.Process) -> int:
    """Bytes of the server and of its workers."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.mark.parametrize("name", CORPUS)
def test_nobody_else_notices(server: Server, name: str) -> None:
    path, make = CORPUS[name]
    data = json.dumps(make(), ensure_ascii=False).encode()
    count = 2 if name.startswith("two ") else 1
    seconds = LONG_S if name == "a thousand answers" else 60.0
    check(server, [partial(send, server, path, data, seconds=seconds)] * count)


@pytest.mark.parametrize(("num_clients", "count"), [(1, 30_000), (8, 20_000)])
@pytest.mark.parametrize(("name", "status"), [("anna", 400), (None, 401)])
def test_nobody_notices_chunks(server: Server, name: str | None, status: int, num_clients: int, count: int) -> None:
    statuses = check(server, [partial(send_chunks, server, name, count)] * num_clients)
    assert statuses == [status] * num_clients


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_many_senders_at_once(server: Server, choice: str) -> None:
    """Eight grammars that never compile, as many patterns, and large answers, all at the same time.

    Patterns of calls that are demanded are compiled, too.
    """
    grammars = [with_schema({"allOf": ENDLESS["allOf"][number:]}) for number in range(2, 10)]
    patterns = [chat(tools=[tool(pattern(f"{CLASSES}{number}"))], tool_choice=choice) for number in range(8)]
    answers = [chat(**SCORED, n=4) | {"max_tokens": 100}] * 4
    bodies = [json.dumps(body).encode() for body in (*grammars, *patterns, *answers)]
    check(server, [partial(send, server, CHAT, data) for data in bodies])


def test_nobody_notices_many_large_bodies(server: Server) -> None:
    """Sixteen of 60 MB at once: some are read, one at a time, and the others are sent away before."""
    data = json.dumps({"prompt": "a" * 60_000_000}).encode()
    statuses = check(server, [partial(send, server, COMPLETIONS, data)] * 16, refusals={503})
    assert set(statuses) == {400, 503}


def test_no_route_holds_up_others(server: Server) -> None:
    """Every route that the server describes gets the bodies that harm without regard to their meaning."""
    changing = find_routes(server, {"post", "put", "patch", "delete"})
    assert {CHAT, MESSAGES, RESPONSES, COMPLETIONS} <= set(changing)
    bodies = [b"[" * 2_000_000, b'{"messages":[' + b"{}," * 700_000 + b"{}]}", b'{"input":"' + b"x" * 8_000_000 + b'"}']
    answers: dict[str, list[int]] = {path: [] for path in changing}

    def send_all(statuses: list[int]) -> None:
        for path in changing:
            for data in bodies:
                send(server, path, data, answers[path])
        statuses.append(0)

    check(server, [send_all])
    assert {path for path, found in answers.items() if max(found) >= 500} == set()


def test_no_page_holds_up_others(server: Server) -> None:
    """Every route that is read, with parameters as long as a header may be, by several at once."""
    pages = find_routes(server, {"get"})
    assert {"/health", "/metrics", "/v1/models", "/v1/responses/x"} <= set(pages)
    odd = "&".join(f"{name}={'9' * 5000}" for name in ("model", "limit", "after", "order", "starting_after", "stream"))
    answers: dict[str, list[int]] = {path: [] for path in pages}

    def get_all(statuses: list[int]) -> None:
        for path in pages:
            for query in ("", f"?{odd}"):
                send(server, path + query, None, answers[path], 1.0)
        statuses.append(0)

    check(server, [get_all] * 3)
    assert {path for path, found in answers.items() if max(found) >= 500} == set()


def find_routes(server: Server, methods: set[str]) -> list[str]:
    """The paths of the routes that the server describes, with x for each parameter."""
    with server.client("anna", 30) as client:
        schema = client.get("/openapi.json").json()
    return [re.sub(r"{[^}]*}", "x", path) for path, found in schema["paths"].items() if set(found) & methods]


def longest(spans: list[Span], withheld: Withheld) -> float:
    """Return the longest of them, without what other programs withheld: so much of it at most, lest it hide all."""
    lengths = ((end - begin, withheld.seconds(begin, end)) for begin, end in spans)
    return max(length - min(others, MOST_WITHHELD * length) for length, others in lengths)


def check(
    server: Server, sending: Sequence[Callable[[list[int]], None]], refusals: Set[int] = frozenset()
) -> list[int]:
    """Send at the same time; return the statuses: all are answers, nobody else waits, all is as before in the end.

    Of the statuses from 500 on, only those of `refusals` are answers.
    """
    process = server.process
    threads, before = process.num_threads(), memory(process)
    gaps: list[Span] = []
    waits: list[Span] = []
    withheld = Withheld(process.pid)
    statuses: list[int] = []
    server.slow.clear()
    with neighbour(server, gaps), httpx2.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        while len(gaps) < 5:
            time.sleep(0.01)
        senders = [threading.Thread(target=one, args=(statuses,)) for one in sending]
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders):
            withheld.look()
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            waits.append((began, time.monotonic()))
            time.sleep(0.02)
    withheld.look()
    assert len(statuses) == len(sending)
    assert max({*statuses} - refusals, default=0) < 500
    assert server.slow == []
    assert longest(waits, withheld) < HEALTH_S
    assert longest(gaps, withheld) < GAP_S
    deadline = time.monotonic() + BACK_S
    while process.num_threads() > threads + 4 or memory(process) > before + SLACK:
        assert time.monotonic() < deadline, (process.num_threads(), threads, memory(process) >> 20, before >> 20)
        time.sleep(0.05)
    return statuses
