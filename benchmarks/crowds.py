"""One key asks for 1,024 answers, or clients without a key hold 256 connections, while others ask.

    python benchmarks/crowds.py [--model DIR] [--rounds 15] [--output crowds.json]

A server with its default settings and two keys, with a small random model. The first token of one key is timed on the
quiet server, then while the other key waits for the answers of one request with 1,024 sequences. Then 256 connections
without a key ask for pages and read nothing, and requests with a key and of /health are timed. Results go to
crowds.json beside this file; times are comparable within one run only.
"""

import argparse
import json
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from sala.checkpoint.random import TINY, write_random  # noqa: E402
from sala.server.http.keys import KeyFile  # noqa: E402

CHAT = "/v1/chat/completions"
NUM_STALLED = 256
WORDS = "the river runs under seven small stones beside a green garden "


@contextmanager
def serving(model: Path, keys: Path) -> Iterator[str]:
    """Yield the address of a server."""
    command = [sys.executable, "-m", "sala", "serve", "-m", str(model), "--device", "cpu", "--port", "0"]
    command += ["--keys-file", str(keys), "--ctx", "8192", "--models-dir", str(keys.parent / "models")]
    with subprocess.Popen(command, cwd=HERE.parent, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if "listens at" in line)
            threading.Thread(target=process.stderr.read, daemon=True).start()
            url = re.search(r"http://[^/]+", line)[0]  # type: ignore[index]
            while httpx2.get(f"{url}/health/ready", trust_env=False, timeout=60).status_code != 200:
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def open_client(url: str, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=300, trust_env=False)


def first_token_s(client: httpx2.Client, number: int, length: int) -> float:
    """Return after how many seconds a stream brings text; every prompt is another one."""
    text = f"{number} {WORDS * 99}"[:length]
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    with client.stream("POST", CHAT, json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.perf_counter() - began
    raise RuntimeError("an answer without text")


@contextmanager
def crowd(url: str, key: str) -> Iterator[Callable[[], int]]:
    """Let one request ask for 1,024 answers; yield a function that says how many of its events have arrived.

    They are read from a plain socket, so that reading them takes no time from the client that is timed.
    """
    count = 0
    is_over = threading.Event()
    prompts = [f"{number} {WORDS}" for number in range(128)]
    fields = {"prompt": prompts, "n": 8, "max_tokens": 4000, "stream": True, "ignore_eos": True, "temperature": 1.0}
    body = json.dumps(fields).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    def read() -> None:
        nonlocal count
        with socket.create_connection((host, int(port)), timeout=60) as one:
            one.sendall(head.encode() + body)
            assert one.recv(12) == b"HTTP/1.1 200"
            while not is_over.is_set():
                count += one.recv(1 << 20).count(b"data: ")
                time.sleep(0.005)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        while count < 64:
            time.sleep(0.05)
        yield lambda: count
    finally:
        is_over.set()
        thread.join()


def stall(url: str) -> socket.socket:
    """Return a connection that asks for pages for ever and reads nothing."""
    host, _, port = url.removeprefix("http://").partition(":")
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    one.settimeout(0.05)
    one.connect((host, int(port)))
    with suppress(OSError):  # the server stops reading, or refuses the connection
        one.sendall(b"GET /web/style.css HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400)
    return one


def summary(values: list[float]) -> dict[str, float]:
    return {"median_s": round(statistics.median(values), 4), "worst_s": round(max(values), 4), "count": len(values)}


def fairness(url: str, keys: dict[str, str], rounds: int, length: int) -> dict[str, Any]:
    """Time first tokens alternately on the quiet server and beside the crowd, so that other programs harm both."""
    quiet, beside, arrived = [], [], 0
    with open_client(url, keys["ben"]) as client:
        first_token_s(client, -1, length)
        for part in range(3):
            quiet += [first_token_s(client, 100 * part + one, length) for one in range(rounds)]
            with crowd(url, keys["anna"]) as count:
                before = count()
                beside += [first_token_s(client, 1000 + 100 * part + one, length) for one in range(rounds)]
                arrived += count() - before
    ratio = statistics.median(beside) / statistics.median(quiet)
    found = {"prompt_characters": length, "quiet": summary(quiet), "beside_1024_sequences": summary(beside)}
    return {**found, "ratio_of_medians": round(ratio, 2), "events_of_the_crowd_meanwhile": arrived}


def stalled(url: str, keys: dict[str, str], rounds: int) -> dict[str, Any]:
    health, keyed = [], []
    with ExitStack() as stack, open_client(url, keys["ben"]) as client:
        alive = [stack.enter_context(stall(url)) for _ in range(NUM_STALLED)]
        for _ in range(rounds):
            for values, path in ((health, "/health"), (keyed, "/v1/models")):
                began = time.perf_counter()
                with httpx2.Client(base_url=url, headers=client.headers if path != "/health" else None, timeout=60,
                                   trust_env=False) as fresh:  # fmt: skip
                    status = fresh.get(path).status_code
                if status != 200:
                    raise RuntimeError(f"{path}: {status}")
                values.append(time.perf_counter() - began)
            time.sleep(0.5)
    return {"stalled_connections": len(alive), "health": summary(health), "with_a_key": summary(keyed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a small random model by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=HERE / "crowds.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        room = Path(directory)
        if options.model is None:
            write_random(room / "tiny", TINY)
        file = KeyFile(room / "keys.json")
        keys = {name: file.add(name, "user") for name in ("anna", "ben")}
        with serving(options.model or room / "tiny", room / "keys.json") as url:
            results = {
                "machine": {"processor": platform.machine()},
                "first_tokens": [fairness(url, keys, options.rounds, length) for length in (40, 2000)],
                "stalled": stalled(url, keys, 2 * options.rounds),
            }
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
