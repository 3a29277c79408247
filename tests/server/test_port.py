"""The command lines and calls that the documents of the MLX port print work here: only the program's name is ours.

Those of the model's card are in tests/integrations/test_model_card.py, the functions in docs/reference/python.md.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sala.cli import run
from tests.server.conftest import Server, wait_for
from tests.server.fake_hub import FakeHub, serve

PROGRAM = re.compile(r"cargo run --release (-p minicpm-sala-mlx )?--example ")
DOWNLOADS = r"""
huggingface-cli download moxin-org/MiniCPM4-SALA-9B-8bit-mlx \
    --local-dir ./models/MiniCPM-SALA-8bit

huggingface-cli download \
  moxin-org/MiniCPM4-SALA-9B-8bit-mlx \
  --local-dir ./models/MiniCPM-SALA-8bit
"""
CHATS = """
cargo run --release -p minicpm-sala-mlx --example generate -- \
    ./models/MiniCPM-SALA-8bit "Explain quantum entanglement in simple terms."

cargo run --release -p minicpm-sala-mlx --example generate -- \
    ./models/MiniCPM-SALA-8bit "Explain quantum entanglement in simple terms." \
    --max-tokens 8 --temperature 0 --system "..." --no-think

cargo run --release -p minicpm-sala-mlx --example generate -- \
    ./models/MiniCPM-SALA-8bit "Explain quantum entanglement in simple terms." --raw

cargo run --release --example generate -- ./model --no-think

cargo run --release --example generate -- ./model

cargo run --release -p minicpm-sala-mlx --example chat -- \
    ./models/MiniCPM-SALA-8bit --no-think

cargo run --release -p minicpm-sala-mlx --example batch_generate -- \
    ./models/MiniCPM-SALA-8bit

cargo run --release -p minicpm-sala-mlx --example speculative_generate -- \
    ./models/MiniCPM-SALA-8bit

cargo run --release -p minicpm-sala-mlx --example speculative_generate -- \
    ./models/MiniCPM-SALA-8bit --draft-layers 1 --num-draft 4
"""
SERVER = """
cargo run --release -p minicpm-sala-mlx --example server -- \
    --model ./models/MiniCPM-SALA-8bit --port 8080 --no-think
"""
QUANTIZE = """
cargo run --release -p minicpm-sala-mlx --example save_quantized -- \
    ./models/MiniCPM-SALA --bits 8 --output ./models/MiniCPM-SALA-8bit
"""
NEEDLE = """
cargo run --release -p minicpm-sala-mlx --example needle_test -- \
    ./models/MiniCPM-SALA-8bit --context-len 32000 --depth 0.5
"""
CURL_CHAT = """
curl http://localhost:8080/v1/chat/completions \
  -H "Content-Type: application/json" \
  -d '{
    "model": "minicpm-sala-9b",
    "messages": [
      {"role": "system", "content": "You are a helpful assistant."},
      {"role": "user", "content": "What is the capital of France?"}
    ],
    "temperature": 0.7,
    "max_tokens": 256
  }'
"""
CURL_LIST = "curl http://localhost:8080/v1/models"
CURL_DOWNLOAD = """
curl -X POST http://localhost:8080/v1/models/download \
  -H "Content-Type: application/json" \
  -d '{"repo_id": "moxin-org/MiniCPM4-SALA-9B-8bit-mlx"}'
"""
CURL_DELETE = "curl -X DELETE http://localhost:8080/v1/models/MiniCPM4-SALA-9B-8bit-mlx"


def words(line: str) -> list[str]:
    """A printed command line as arguments of `sala`."""
    name, _, rest = PROGRAM.sub("", line.strip()).partition(" -- ")
    return [name, *shlex.split(rest)]


@pytest.fixture
def place(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in ("models/MiniCPM-SALA-8bit", "models/MiniCPM-SALA", "model"):
        shutil.copytree(tiny, tmp_path / path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SALA_DEVICE", "cpu")
    monkeypatch.setenv("SALA_CTX", "4096")
    return tmp_path


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("line", CHATS.strip().split("\n\n"), ids=lambda line: words(line)[0])
def test_answers(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    type_in(monkeypatch, "hello\nclear\nhello again\nquit\n")
    assert run(words(line)) == 0
    out, errors = capsys.readouterr()
    assert len(out.strip()) > 5
    assert "tok/s" in errors
    assert ("draft" in errors) == ("speculative" in line)
    assert out.count("> ") >= 4 or "batch" not in line


@pytest.mark.usefixtures("place")
def test_positions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "./model", "hello", "-m", "./model"]) == 2
    assert "is given twice" in capsys.readouterr().err
    assert run(["generate", "a", "few", "words"]) == 2
    assert "put it in quotes" in capsys.readouterr().err
    assert run(["generate", "x" * 5000, "hello"]) == 1


@pytest.mark.usefixtures("place")
def test_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "hello\nexit\nhello again\n")
    assert run(["chat", "./model", "--no-think"]) == 0
    assert sys.stdin.read() == "hello again\n"


def test_quantized_models(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quantized here, downloaded with Hugging Face's command, and read by the line that is printed next."""
    target = place / "models" / "MiniCPM-SALA-8bit"
    shutil.rmtree(target)
    assert run(words(QUANTIZE)) == 0
    assert json.loads((target / "config.json").read_text())["quantization"]["bits"] == 8
    assert "ready" in capsys.readouterr().err
    files = {file.name: file.read_bytes() for file in target.iterdir()}
    for line in DOWNLOADS.strip().split("\n\n"):
        shutil.rmtree(target)
        download(line, files, place)
        assert {file.name for file in target.iterdir()} == {*files, ".cache"}
    assert run(words(CHATS.strip().partition("\n\n")[0])) == 0
    assert len(capsys.readouterr().out.strip()) > 5


def download(line: str, files: dict[str, bytes], place: Path) -> None:
    """Run the printed line; since huggingface_hub 1.0 the command is called hf."""
    command = place / "bin" / "huggingface-cli"
    command.parent.mkdir(exist_ok=True)
    command.write_text('#!/bin/sh\nexec hf "$@"\n')
    command.chmod(0o755)
    with serve(FakeHub(files, repo_id="moxin-org/MiniCPM4-SALA-9B-8bit-mlx")) as hub:
        path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "HF_ENDPOINT": hub.url, "HF_HOME": str(place / "hf")}
        ended = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.usefixtures("place")
def test_the_needle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SALA_CTX")
    assert run(words(NEEDLE)) == 0
    assert "depth 50%" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_server_flags(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0.7", "--max-tokens", "2048", "--models-dir", "models", "--show-config"]
    assert run([*words(SERVER), *options]) == 0
    shown = capsys.readouterr().out.splitlines()
    for line in ('model = "./models/MiniCPM-SALA-8bit"', "port = 8080", "no_think = true", "max_tokens = 2048"):
        assert line in shown


def curl(server: Server, line: str) -> Any:
    """Do what a printed call of curl does."""
    method, body, url = None, None, ""
    given = iter(shlex.split(line)[1:])
    for word in given:
        if word == "-X":
            method = next(given)
        elif word == "-d":
            body = next(given)
        elif word == "-H":
            assert next(given) == "Content-Type: application/json"
        else:
            url = word.replace("http://localhost:8080", server.url)
    headers = {"Content-Type": "application/json"} if body else {}
    with httpx2.Client(trust_env=False, timeout=30) as client:
        response = client.request(method or ("POST" if body else "GET"), url, content=body, headers=headers)
    assert response.status_code in (200, 202), response.text
    return response.json()


@pytest.mark.parametrize("path", ["models/MiniCPM-SALA-8bit", "model", "weights/checkpoint-20"])
def test_calls(make_server: Callable[..., Server], place: Path, tiny: Path, path: str) -> None:
    """The name that the documents print means the model that is served, wherever it lies."""
    shutil.copytree(tiny, place / path, dirs_exist_ok=True)
    files = {file.name: file.read_bytes() for file in tiny.iterdir()}
    with serve(FakeHub(files, repo_id="moxin-org/MiniCPM4-SALA-9B-8bit-mlx")) as hub:
        server = make_server(place / path, no_think=True, hub_url=hub.url)
        answer = curl(server, CURL_CHAT)
        assert (answer["object"], answer["model"]) == ("chat.completion", "minicpm-sala-9b")
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert answer["usage"]["total_tokens"] > 32
        assert curl(server, CURL_DOWNLOAD)["job"]["repo_id"] == "moxin-org/MiniCPM4-SALA-9B-8bit-mlx"
        wait_for(lambda: curl(server, f"{CURL_LIST}/download")["data"][0]["status"] == "done")
        assert len(curl(server, CURL_LIST)["data"]) >= 2
        assert curl(server, CURL_DELETE)["deleted"] is True
        assert "moxin" not in json.dumps(curl(server, CURL_LIST))
