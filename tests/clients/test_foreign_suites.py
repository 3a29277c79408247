"""Server tests of other projects, unchanged, from a checkout of theirs, against `sala serve` with smol-sala."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Environment
from tests.smol_sala import DIRECTORY

SUITES = Path(__file__).parent / "suites"
LIMIT_S = 3600
pytestmark = pytest.mark.timeout(LIMIT_S)
KEY = "sk-this-is-the-secret-key"  # of llama.cpp's tests
OF_VLLM = (
    "anthropic/test_messages.py", "openai/chat_completion/test_chat.py", "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py", "openai/completion/test_completion.py",
    "openai/responses/test_basic.py", "openai/responses/test_function_call.py", "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py", "openai/responses/test_structured_output.py",
)  # fmt: skip


@pytest.mark.skipif("SALA_TEST_LLAMA_CPP" not in os.environ, reason="SALA_TEST_LLAMA_CPP names no checkout")
def test_llama_cpp(install: Callable[..., Environment], serve: Callable[..., str]) -> None:
    tests = Path(os.environ["SALA_TEST_LLAMA_CPP"]).expanduser().resolve() / "tools" / "server" / "tests"
    flags = ("--ctx", "2048", "--max-tokens", "64", "--temperature", "0", "--any-model")
    variables = {
        "SALA_ADDRESS": serve(*flags),
        "SALA_KEYED": serve(*flags, "--api-key", KEY),
        "SALA_MODEL": "smol-sala",
    }
    environment = install("openai", "pytest", "requests", "wget")
    assert run(environment, "llama_cpp", tests, ["unit"], variables) >= 90


@pytest.mark.skipif("SALA_TEST_VLLM" not in os.environ, reason="SALA_TEST_VLLM names no checkout")
def test_vllm(install: Callable[..., Environment], serve: Callable[..., str]) -> None:
    checkout = Path(os.environ["SALA_TEST_VLLM"]).expanduser().resolve()
    size = json.loads((DIRECTORY / "config.json").read_text())["vocab_size"]
    address = serve("--ctx", "4096", "--max-tokens", "256", "--temperature", "0", "--any-model")
    environment = install("anthropic", "jsonschema", "openai", "pytest", "pytest-asyncio", "regex", "requests")
    files = [f"tests/entrypoints/{name}" for name in OF_VLLM]
    only = ["--confcutdir", "tests/entrypoints", "-c", os.devnull, "--rootdir", str(checkout)]
    variables = {"SALA_ADDRESS": address, "SALA_VOCABULARY": str(size)}
    assert run(environment, "vllm_server", checkout, [*only, *files], variables) >= 44


def run(environment: Environment, plugin: str, folder: Path, arguments: list[str], variables: dict[str, str]) -> int:
    """How many cases pass, which is shown with `-s`; one that does not fails the test."""
    words = environment.run(
        "python", "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-q", "--tb=short", *arguments, folder=folder,
        limit_s=LIMIT_S, PYTHONPATH=f"{SUITES}{os.pathsep}{folder}", PYTHONDONTWRITEBYTECODE="1", **variables,
    )  # fmt: skip
    counts = re.search(r"(\d+) passed.*", words)
    print(f"{plugin}: {counts[0]}")
    return int(counts[1])
