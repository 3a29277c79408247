"""A small SALA checkpoint in SGLang itself, without a GPU: greedy tokens must be those of our own engine.

Every engine takes minutes to start: `SALA_TEST_ENGINES=1` asks for them. SGLang is that of the interpreter in
`SALA_TEST_SGLANG_PYTHON`, with this package installed beside it; without one an environment is made (2.4 GB). SGLang's
own installation needs a GPU: here it comes without what it depends on, and with stubs of what it only imports. All
attention is dense, for the sparse kernels are CUDA.
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import sala
from sala.checkpoint.random import TINY, write_random
from tests.clients.conftest import PIP, _try
from tests.integrations.test_model_card import SGLANG

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "sglang_generate.py"
NUM_TOKENS = 24
CHUNK = 64
SHAPE = replace(TINY, mup_denominator=TINY.num_hidden_layers)  # SGLang takes the number of layers for it
LIGHT = """
    transformers==5.19.0 tokenizers==0.23.2 orjson ipython gguf psutil requests aiohttp fastapi uvicorn uvloop pyzmq
    msgspec pybase64 setproctitle pydantic python-multipart partial_json_parser prometheus-client xxhash zstandard
    tiktoken sentencepiece==0.2.1 einops interegular watchfiles scipy pillow easydict openai==2.8.0 llguidance<2
    packaging python-dateutil<3 openai-harmony==0.0.4 apache-tvm-ffi==0.1.11 dill loguru jsonschema soundfile triton
    platformdirs prompt-toolkit rich typer hatchling editables
"""
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE / "stubs"),
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "SGLANG_MINICPM_FORCE_DENSE": "1",
}

pytestmark = [
    pytest.mark.skipif(os.environ.get("SALA_TEST_ENGINES", "0") in ("", "0"), reason="set SALA_TEST_ENGINES=1"),
    pytest.mark.timeout(1500),
]


def random_prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


PROMPTS = [random_prompt(length, length) for length in (2, 10, 63, 64, 100, 150, 300)]


@pytest.fixture(scope="session")
def sglang_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("SALA_TEST_SGLANG_PYTHON")
    if given:
        return given
    folder = tmp_path_factory.mktemp("sglang")
    _try([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    pip = [*PIP, "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    _try([*pip, "torch==2.13.0", *LIGHT.split()])
    alone = ["sglang==0.5.23", "xgrammar==0.2.7", "compressed-tensors==0.18.0", "outlines==0.1.11"]
    _try([*pip, "--no-deps", *alone])
    _try([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
    return str(folder / "bin" / "python")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    write_random(path, SHAPE)
    return path


@pytest.fixture(scope="session")
def wanted(model: Path) -> list[list[int]]:
    with sala.LLM(model, dtype="float32", ctx=2048) as llm:
        settings = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        return [llm.generate(prompt, **settings).token_ids for prompt in PROMPTS]


def environment() -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SALA_", "PYTHON"))}
    return {**inherited, **VARIABLES}


def run_sglang(python: str, model: Path, tp: int, **variables: str) -> list[list[int]]:
    task = {"model": str(model), "tp": tp, "context": 1000, "chunk": CHUNK}
    task |= {"num_tokens": NUM_TOKENS, "prompts": PROMPTS}
    ended = subprocess.run(
        [python, str(PROGRAM)], input=json.dumps(task), env=environment() | variables, capture_output=True, text=True
    )
    assert ended.stdout.strip(), ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_one_rank(sglang_python: str, model: Path, wanted: list[list[int]]) -> None:
    """In-tree model, our reference in the place of its kernel; prompts are read in chunks."""
    assert run_sglang(sglang_python, model, 1) == wanted


def test_two_ranks(sglang_python: str, model: Path, wanted: list[list[int]]) -> None:
    assert run_sglang(sglang_python, model, 2) == wanted


def test_two_ranks_without_the_repair(sglang_python: str, model: Path, wanted: list[list[int]]) -> None:
    """The reason why there is a hook. When this fails with SGLang as it is, SGLang has been repaired."""
    answers = run_sglang(sglang_python, model, 2, SGLANG_AS_IT_IS="1")
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(PROMPTS)
    assert sum(answer != ours for answer, ours in zip(answers, wanted, strict=True)) > len(PROMPTS) // 2


def test_the_plug_in_sees_the_fault_of_this_version(sglang_python: str) -> None:
    code = (
        "from sala.plugins.sglang import MODEL, Norm, _find_source, read_norm\n"
        "import sglang, sys\n"
        "print(sglang.__version__, read_norm(_find_source(MODEL)).name, MODEL in sys.modules)"
    )
    ended = subprocess.run([sglang_python, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-3:] == ["0.5.23", "PER_RANK", "False"]


def test_the_vendors_launch_line_is_parsed(sglang_python: str) -> None:
    words = SGLANG.replace("\\\n", "").replace("${MODEL_PATH}", "/models/mine").splitlines()[-1].split()
    code = (
        "import argparse, os, sys\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser()\n"
        "ServerArgs.add_cli_args(parser)\n"
        "found = parser.parse_args(sys.argv[1:])\n"
        "print(found.attention_backend, found.port, os.environ['SGLANG_MINICPM_DENSE_AS_SPARSE'])"
    )
    command = [sglang_python, "-c", code, *words[3:]]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-3:] == ["minicpm_flashinfer", "31111", "1"]
