"""`sala serve --engine vllm|sglang` with the engines themselves, without a GPU: OpenAI's client gets our tokens.

On demand, as tests/integrations/test_vllm_engine.py and test_sglang_engine.py are: `SALA_TEST_ENGINES=1`, with the
interpreters in `SALA_VLLM_PYTHON` and `SALA_SGLANG_PYTHON`.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import openai
import pytest

import sala
from sala.checkpoint.random import TINY, write_random
from tests.integrations import test_sglang_engine, test_vllm_engine
from tests.integrations.test_sglang_engine import sglang_python  # noqa: F401
from tests.integrations.test_vllm_engine import end_group, free_port, python, random_prompt, wait_for  # noqa: F401

KEY = "hush"
NUM_TOKENS = 16
PROMPTS = [random_prompt(length, length) for length in (10, 70, 150, 300)]
HELLO = {"messages": [{"role": "user", "content": "hello"}], "model": "small", "max_tokens": 8, "temperature": 0}

pytestmark = [
    pytest.mark.skipif(os.environ.get("SALA_TEST_ENGINES", "0") in ("", "0"), reason="set SALA_TEST_ENGINES=1"),
    pytest.mark.timeout(1500),
]


@dataclass(frozen=True)
class Subject:
    path: Path
    answers: list[list[int]]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Sparse from 128 tokens."""
    return _make(tmp_path_factory.mktemp("models") / "small", test_vllm_engine.SHAPE)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return _make(tmp_path_factory.mktemp("models") / "small", test_sglang_engine.SHAPE)


def _make(path: Path, config: sala.SalaConfig) -> Subject:
    write_random(path, replace(config, vocab_size=TINY.vocab_size), seed=3)
    with sala.LLM(path, dtype="float32", ctx=2048) as llm:
        settings = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        return Subject(path, [llm.generate(prompt, **settings).token_ids for prompt in PROMPTS])


@contextmanager
def serving(interpreter: str, folder: Path, variables: dict[str, str], *commands: list[str]) -> Iterator[str]:
    """`sala serve`, once per command; the first one answers at the address."""
    port = free_port()
    running = []
    (folder / "key").write_text(KEY)
    common = ["--port", str(port), "--api-key-file", str(folder / "key"), "--dtype", "float32", "--max-batch", "4"]
    try:
        for index, options in enumerate(commands):
            command = [interpreter, "-m", "sala", "serve", *common, *options]
            log = (folder / f"server{index}.log").open("w")
            here = variables | {"TMPDIR": str(folder)}  # where the file with the keys goes
            running.append(subprocess.Popen(command, env=here, stdout=log, stderr=log, start_new_session=True))
        wait_for(f"http://127.0.0.1:{port}", running, folder)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for one in running:
            end_group(one)


def check(address: str, wanted: list[list[int]]) -> None:
    """What OpenAI's client sees: models, tokens, a chat and its stream, and that the key is asked for."""
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    assert [one.id for one in client.models.list()] == ["small"]
    greedy = {"model": "small", "max_tokens": NUM_TOKENS, "temperature": 0}
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        asked = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(prompt=prompt, **greedy, extra_body=asked)
        assert answer.choices[0].model_dump()["token_ids"] == tokens
        assert answer.usage.prompt_tokens == len(prompt)
    whole = client.chat.completions.create(**HELLO).choices[0].message.content
    pieces = list(client.chat.completions.create(**HELLO, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == whole
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="wrong", max_retries=0).chat.completions.create(**HELLO)


def test_vllm(python: str, sparse: Subject, tmp_path: Path) -> None:  # noqa: F811
    options = ["--engine", "vllm", "-m", str(sparse.path), "--ctx", "1024", "--", "--enforce-eager"]
    with serving(python, tmp_path, test_vllm_engine.environment(), options) as address:
        check(address, sparse.answers)


def test_vllm_on_two_nodes(python: str, sparse: Subject, tmp_path: Path) -> None:  # noqa: F811
    common = ["--engine", "vllm", "-m", str(sparse.path), "--ctx", "1024", "--tp", "2", "--nodes", "2"]
    common += ["--master", f"127.0.0.1:{free_port()}"]
    nodes = ([*common, "--node-rank", rank, "--", "--enforce-eager"] for rank in ("0", "1"))
    with serving(python, tmp_path, test_vllm_engine.environment(), *nodes) as address:
        check(address, sparse.answers)


def test_sglang(sglang_python: str, dense: Subject, tmp_path: Path) -> None:  # noqa: F811
    more = ["--max-total-tokens", "4096", "--chunked-prefill-size", "64", "--disable-overlap-schedule"]
    options = ["--engine", "sglang", "-m", str(dense.path), "--device", "cpu", "--tp", "2", "--", *more]
    with serving(sglang_python, tmp_path, test_sglang_engine.environment(), options) as address:
        check(address, dense.answers)
