"""Server tests of other projects, unchanged, from a checkout of theirs, against `sala serve` with smol-sala.

A run that passes writes its counts to `benchmarks/foreign_suites.json`, from which the documentation takes them.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Environment
from tests.clients.results import commit_of, record
from tests.smol_sala import DIRECTORY

SUITES = Path(__file__).parent / "suites"
LIMIT_S = 3600
CONTEXT = 1536  # a prompt of llama.cpp's tests, of 1,604 tokens, must be too long
pytestmark = pytest.mark.timeout(LIMIT_S)
LEAST = {"llama.cpp": 115, "vLLM": 58}  # cases that pass; fewer: too much is left out
KEY = "sk-this-is-the-secret-key"  # of llama.cpp's tests
OF_VLLM = (
    "anthropic/test_messages.py", "openai/chat_completion/test_chat.py", "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py", "openai/completion/test_completion.py",
    "openai/responses/test_basic.py", "openai/responses/test_function_call.py", "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py", "openai/responses/test_structured_output.py",
)  # fmt: skip


@pytest.mark.skipif("SALA_TEST_LLAMA_CPP" not in os.environ, reason="SALA_TEST_LLAMA_CPP names no checkout")
def test_llama_cpp(install: Callable[..., Environment], serve: Callable[..., str], tmp_path: Path) -> None:
    checkout = Path(os.environ["SALA_TEST_LLAMA_CPP"]).expanduser().resolve()
    flags = ("--ctx", str(CONTEXT), "--max-tokens", "64", "--temperature", "0", "--any-model")
    variables = {
        "SALA_ADDRESS": serve(*flags),
        "SALA_CONTEXT": str(CONTEXT),
        "SALA_KEYED": serve(*flags, "--api-key", KEY),
        "SALA_MODEL": "smol-sala",
        "SALA_REPORT": str(tmp_path / "report"),
    }
    environment = install("openai", "pytest", "requests", "wget")
    run(environment, "llama_cpp", checkout / "tools" / "server" / "tests", ["unit"], variables)
    assert write_down("llama.cpp: server tests", checkout, tmp_path / "report") >= LEAST["llama.cpp"]


@pytest.mark.skipif("SALA_TEST_VLLM" not in os.environ, reason="SALA_TEST_VLLM names no checkout")
def test_vllm(install: Callable[..., Environment], serve: Callable[..., str], tmp_path: Path) -> None:
    checkout = Path(os.environ["SALA_TEST_VLLM"]).expanduser().resolve()
    size = json.loads((DIRECTORY / "config.json").read_text())["vocab_size"]
    address = serve("--ctx", "4096", "--max-tokens", "256", "--temperature", "0", "--any-model")
    environment = install("anthropic", "jsonschema", "openai", "pytest", "pytest-asyncio", "regex", "requests")
    files = [f"tests/entrypoints/{name}" for name in OF_VLLM]
    only = ["--confcutdir", "tests/entrypoints", "-c", os.devnull, "--rootdir", str(checkout)]
    variables = {"SALA_ADDRESS": address, "SALA_REPORT": str(tmp_path / "report"), "SALA_VOCABULARY": str(size)}
    run(environment, "vllm_server", checkout, [*only, *files], variables)
    assert write_down("vLLM: entrypoint tests", checkout, tmp_path / "report") >= LEAST["vLLM"]


def run(environment: Environment, plugin: str, folder: Path, arguments: list[str], variables: dict[str, str]) -> None:
    """Run the cases that are not left out; one that does not pass fails the test."""
    environment.run(
        "python", "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-q", "--tb=short", *arguments, folder=folder,
        limit_s=LIMIT_S, PYTHONPATH=f"{SUITES}{os.pathsep}{folder}", PYTHONDONTWRITEBYTECODE="1", **variables,
    )  # fmt: skip


def write_down(suite: str, checkout: Path, report: Path) -> int:
    """Return how many cases passed, after all of them are written down."""
    found = json.loads(report.read_text())
    assert found["passed"] == found["run"]
    record("suites", suite, {"commit": commit_of(checkout), **found})
    return int(found["passed"])
