"""Batch files, sessions and estimates from the command line."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sala.errors import InputError
from sala.llm import LLM
from sala.server.batch import run_batch
from tests.command import sala
from tests.integrity import integrity


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 5, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=256)


def test_good_and_bad_lines(llm: LLM, tmp_path: Path) -> None:
    lines: list[Any] = [request(f"q{i}") for i in range(12)]
    lines += [
        request("q3"),
        "not json",
        {"no": "id"},
        {**request("url"), "url": "/v1/images"},
        request("hot", temperature=99999),
        request("field", audio={}),
        request("long", messages=[{"role": "user", "content": "x" * 400}]),
        request("regex", regex=5),
        request("tools", tools=5),
        request("role", messages=[{"content": "x"}]),
        {"custom_id": "plain", "url": "/v1/completions", "body": {"prompt": "abc", "max_tokens": 3}},
        {"custom_id": "ids", "url": "/v1/completions", "body": {"prompt": [65, 66], "max_tokens": 3}},
        "",
    ]
    tally = run_batch(llm, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    out = read(tmp_path / "out.jsonl")
    assert (tally.done, tally.failed) == (14, 10)
    for i in range(12):
        body = out[f"q{i}"]["response"]["body"]
        alone = llm.chat([{"role": "user", "content": f"q{i}"}], temperature=0, max_tokens=5)
        assert body["choices"][0]["message"]["content"] == alone.text
        assert body["usage"]["completion_tokens"] == 5
    errors = {name: line["response"]["body"]["error"] for name, line in out.items() if line["error"]}
    lines_without_id = {f"sala:line-{number}" for number in (13, 14, 15)}
    assert set(errors) == {*lines_without_id, "url", "hot", "field", "long", "role", "regex", "tools"}
    assert out["plain"]["response"]["body"]["object"] == "text_completion"
    assert errors["long"]["code"] == "context_length_exceeded"
    assert errors["hot"]["param"] == "temperature"
    assert not (tmp_path / "out.jsonl.part").exists()
    assert integrity(llm.engine) == []


def test_lines_are_answered_as_the_server_answers(llm: LLM, tmp_path: Path) -> None:
    """With its schema, its errors and its logprobs, and with the parameters that only batches take."""
    lines = [
        request("regex", regex="[ab]{3}", max_tokens=20),
        request("logprobs", logprobs=True, top_logprobs=2),
        request("unknown", colour="red"),
        request("bias", logit_bias={"x": 1}),
        request("grammar", grammar=7),
    ]
    run_batch(llm, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    bodies = {name: line["response"]["body"] for name, line in read(tmp_path / "out.jsonl").items()}
    (choice,) = bodies["regex"]["choices"]
    assert re.fullmatch("[ab]{3}", choice["message"]["content"])
    (choice,) = bodies["logprobs"]["choices"]
    assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [2] * 5
    errors = {name: (body["error"]["param"], body["error"]["code"]) for name, body in bodies.items() if "error" in body}
    assert errors == {
        "unknown": ("colour", "unknown_parameter"),
        "bias": ("logit_bias", "invalid_value"),
        "grammar": ("grammar", "invalid_value"),
    }


def test_a_hundred_thousand_lines(llm: LLM, tmp_path: Path) -> None:
    lines = [f'{{"custom_id": "{i}", "url": "/nowhere", "body": {{}}}}' for i in range(100_000)]
    tally = run_batch(llm, write(tmp_path / "in.jsonl", [*lines, request("good")]), tmp_path / "out.jsonl")
    assert (tally.done, tally.failed) == (1, 100_000)


def test_nothing_is_overwritten(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a")])
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(InputError, match="exists already"):
        run_batch(llm, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    with pytest.raises(InputError, match="not a file"):
        run_batch(llm, tmp_path / "missing", tmp_path / "o")


def test_half_a_line_is_cut_off(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a"), request("b")])
    run_batch(llm, source, tmp_path / "first.jsonl")
    done = (tmp_path / "first.jsonl").read_text().splitlines()[0]
    (tmp_path / "out.jsonl.part").write_text(done + "\n" + '{"custom_id": "b", "resp')
    tally = run_batch(llm, source, tmp_path / "out.jsonl")
    assert (tally.skipped, tally.done) == (1, 1)
    assert set(read(tmp_path / "out.jsonl")) == {"a", "b"}
    assert (tmp_path / "out.jsonl").read_text().splitlines()[0] == done


def test_a_duplicate_does_not_hide_the_first_after_a_kill(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a"), request("a"), request("z")])
    run_batch(llm, source, tmp_path / "first.jsonl")
    kept = [
        line
        for line in (tmp_path / "first.jsonl").read_text().splitlines(keepends=True)
        if '"custom_id": "a"' not in line
    ]
    (tmp_path / "out.jsonl.part").write_text("".join(kept))
    run_batch(llm, source, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl")["a"]["response"]["status_code"] == 200


def test_a_whole_line_without_its_end_is_not_trusted(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a"), request("b")])
    (tmp_path / "out.jsonl.part").write_text('{"custom_id": "a"}')
    run_batch(llm, source, tmp_path / "out.jsonl")
    assert set(read(tmp_path / "out.jsonl")) == {"a", "b"}


def test_killed_and_resumed(tiny: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(f"q{i}", max_tokens=30) for i in range(60)])
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    command = [sys.executable, "-m", "sala", "batch", str(source), "-o", str(out), "-m", str(tiny)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if part.exists() and part.read_text().count("\n") >= 10:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [line for line in part.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert len(before) >= 10
    again = sala("batch", str(source), "-o", str(out), "-m", str(tiny))
    assert again.returncode == 0
    assert f"{len(before)} from an earlier run" in again.stderr
    lines = out.read_text().splitlines(keepends=True)
    assert lines[: len(before)] == before
    assert len(lines) == len(read(out)) == 60


def test_batch_errors(tiny: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a")])
    same = sala("batch", str(source), "-o", str(source), "-m", str(tiny))
    assert same.returncode == 2
    assert "is the input" in same.stderr
    assert source.read_text()


def test_sessions(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text("All work and no play. " * 40)
    where = ["--sessions-dir", str(tmp_path / "s")]
    saved = sala("session", "save", "novel", "-f", str(tmp_path / "doc.txt"), "-m", str(tiny), *where)
    assert saved.returncode == 0, saved.stderr
    assert "tokens kept" in saved.stderr
    assert "novel" in sala("session", "ls", *where).stdout
    asked = sala("session", "load", "novel", "who?", "-m", str(tiny), "-n", "10", "-t", "0", *where)
    assert asked.returncode == 0, asked.stderr
    cached = int(asked.stderr.split("(")[1].split(" cached")[0].replace(",", ""))
    assert cached > 880
    content = "All work and no play. " * 40 + "\n\n" + "who?"
    (tmp_path / "whole.txt").write_text(content)
    whole = sala("generate", "-f", str(tmp_path / "whole.txt"), "-m", str(tiny), "-n", "10", "-t", "0")
    assert asked.stdout == whole.stdout
    assert sala("session", "save", "novel", "-f", str(tmp_path / "doc.txt"), "-m", str(tiny), *where).returncode == 2
    assert sala("session", "rm", "novel", *where).returncode == 0
    assert sala("session", "ls", *where).stdout == ""
    assert sala("session", "rm", "../novel", *where).returncode == 2
    assert (tmp_path / "doc.txt").exists()


def test_generate_with_controls_and_drafts(tiny: Path, tmp_path: Path) -> None:
    base = ["-m", str(tiny), "-t", "0", "-n", "40"]
    plain = sala("generate", "hello hello", *base)
    drafted = sala("generate", "hello hello", *base, "--speculate", "lookup")
    assert drafted.stdout == plain.stdout
    assert "speculation (lookup)" in drafted.stderr
    layers = sala("generate", "hello hello", *base, "--speculate", "layers", "--draft-layers", "2", "--num-draft", "3")
    assert layers.stdout == plain.stdout
    shaped = sala("generate", "hello", *base, "--schema", '{"type": "boolean"}')
    assert json.loads(shaped.stdout) in (True, False)
    assert sala("generate", "x", *base, "--speculate", "magic").returncode == 2
    cache = ["--cache-dir", str(tmp_path / "cache")]
    (tmp_path / "long.txt").write_text("word " * 100)
    first = sala("generate", "-f", str(tmp_path / "long.txt"), *base, *cache)
    second = sala("generate", "-f", str(tmp_path / "long.txt"), *base, *cache)
    assert first.stdout == second.stdout
    assert "cached" in second.stderr
    assert "cached" not in first.stderr


def test_estimate(tiny: Path) -> None:
    out = sala("estimate", str(tiny), "--ctx", "128K", "--batch", "2")
    assert out.returncode == 0
    assert "longest context" in out.stdout
    data = json.loads(sala("estimate", str(tiny), "--ctx", "128K", "--batch", "2", "--json").stdout)
    assert data["pages"] == 2 * 131072 * 2 * (2 * 128 + 10)
    assert data["total"] == sum(
        data[name] for name in ("weights", "pages", "states", "snapshots", "activations", "runtime")
    )
    tight = json.loads(sala("estimate", str(tiny), "--memory", "500M", "--json").stdout)
    assert tight["fits"]
    assert 100_000 < tight["longest"] < 2_000_000
    assert sala("estimate", str(tiny), "--bits", "3").returncode == 2


def test_the_longest_context_is_the_longest() -> None:
    from sala.backends.memory import estimate, longest
    from sala.checkpoint.random import RELEASED

    free = 24 << 30
    most = longest(RELEASED, 9_477_203_968, free, batch=1, bits=4)
    assert estimate(RELEASED, 9_477_203_968, most, bits=4).total <= free
    assert estimate(RELEASED, 9_477_203_968, most + 64, bits=4).total > free
    assert most > 1 << 20  # a million tokens on a consumer GPU, in 4 bits
