"""mlx-lm runs a small checkpoint through the plug-in: generation, server, caches in files, LoRA, quantized weights."""

import copy
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

import sala  # noqa: E402
from sala import LLM, Sampling  # noqa: E402
from sala.checkpoint.random import TINY, cut_layers, write_random  # noqa: E402
from sala.config import SparseConfig  # noqa: E402
from sala.errors import InputError  # noqa: E402

DENSE_LEN = 512
CONFIG = replace(cut_layers(TINY, 2), sparse_config=SparseConfig(window_size=128, topk=4, dense_len=DENSE_LEN))
PROMPT = "Once upon a time"


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("mlx-lm") / "tiny"
    write_random(target, CONFIG)
    sala.register()
    return target


@pytest.fixture(scope="module")
def loaded(directory: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(directory))


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, backend="torch") as found:
        yield found


def tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, 250, count).tolist()


def generate(model: Any, ids: list[int], count: int, **settings: Any) -> list[int]:
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=count, **settings)]


@pytest.mark.parametrize("count", [1, 5, 300, DENSE_LEN - 6, 700])
def test_greedy_tokens_are_those_of_the_engine(loaded: tuple[Any, Any], llm: LLM, count: int) -> None:
    """Dense, sparse, and from one to the other while it decodes."""
    wanted = llm.generate(tokens(count), Sampling(temperature=0, max_tokens=12, ignore_eos=True)).token_ids
    assert generate(loaded[0], tokens(count), 12) == list(wanted)


def test_text_is_that_of_the_engine(loaded: tuple[Any, Any], llm: LLM) -> None:
    model, tokenizer = loaded
    wanted = llm.generate(tokenizer.encode(PROMPT), Sampling(temperature=0, max_tokens=16))
    assert mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=16) == wanted.text


@pytest.mark.parametrize("step", [64, 100])
def test_prompt_in_parts(loaded: tuple[Any, Any], step: int) -> None:
    """Below the dense length, where it does not matter that mlx-lm does not say how much is to come."""
    ids = tokens(400)
    assert generate(loaded[0], ids, 8, prefill_step_size=step) == generate(loaded[0], ids, 8)


@pytest.mark.parametrize("count", [400, 511, 513, 641])
def test_parts_like_the_usual_ones(loaded: tuple[Any, Any], llm: LLM, count: int) -> None:
    """The dense length is four parts, and dense and sparse agree for three, as with the usual 2,048 tokens."""
    sparse = CONFIG.sparse_config
    part = sparse.dense_len // 4
    assert sparse.agreement_len == 3 * part
    wanted = llm.generate(tokens(count), Sampling(temperature=0, max_tokens=8, ignore_eos=True)).token_ids
    assert generate(loaded[0], tokens(count), 8, prefill_step_size=part) == list(wanted)


@pytest.mark.parametrize("count", [65, 700])
def test_whole_sequences_and_cache_agree(loaded: tuple[Any, Any], count: int) -> None:
    model, _ = loaded
    ids = mx.array([tokens(count)])
    assert mx.allclose(model(ids), model(ids, cache=model.make_cache()), atol=1e-5)


@pytest.mark.parametrize("count", [70, 520])
def test_gradients_are_those_of_torch(loaded: tuple[Any, Any], directory: Path, count: int) -> None:
    import torch
    from mlx import nn
    from mlx.utils import tree_flatten

    from sala.backends.torch.batch import whole
    from sala.backends.torch.loader import load_model
    from sala.checkpoint.reader import Checkpoint

    ids = np.array([tokens(count), tokens(count)[::-1]])
    with Checkpoint(directory) as checkpoint:
        theirs = load_model(checkpoint, CONFIG, torch.float32, torch.device("cpu"))
    theirs.requires_grad_(True)
    logits = theirs.logits(theirs(whole(torch.tensor(ids[:, :-1])))).unflatten(0, (2, -1))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(ids[:, 1:]).flatten()).backward()

    def loss(model: Any) -> Any:
        return nn.losses.cross_entropy(model(mx.array(ids[:, :-1])), mx.array(ids[:, 1:])).mean()

    _, grads = nn.value_and_grad(loaded[0], loss)(loaded[0])
    wanted = {name: value.grad for name, value in theirs.named_parameters()}
    found = dict(tree_flatten(grads))
    assert set(found) == set(wanted)
    for name, grad in found.items():
        scale = float(wanted[name].abs().max())
        assert scale > 0, name
        np.testing.assert_allclose(np.array(grad), wanted[name].numpy(), atol=1e-4 * scale, err_msg=name)


def test_copied_cache_goes_its_own_way(loaded: tuple[Any, Any]) -> None:
    """As mlx-lm's server keeps pasts: a copy that is continued leaves the first one as it was."""
    model, _ = loaded
    ids = tokens(100)
    cache = model.make_cache()
    model(mx.array([ids]), cache=cache)
    own = copy.deepcopy(cache)
    other = model(mx.array([tokens(7)]), cache=own)
    first = model(mx.array([[5, 6]]), cache=cache)
    assert own[0].offset == 107
    assert cache[0].offset == 102
    fresh = model.make_cache()
    assert mx.allclose(first, model(mx.array([[*ids, 5, 6]]), cache=fresh)[:, -2:], atol=1e-5)
    assert other.shape == (1, 7, CONFIG.vocab_size)


def test_cache_in_a_file(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    model, _ = loaded
    ids = tokens(530)
    cache = model.make_cache()
    model(mx.array([ids]), cache=cache)
    save_prompt_cache(str(tmp_path / "past.safetensors"), cache)
    back = load_prompt_cache(str(tmp_path / "past.safetensors"))
    assert back[0].offset == 530
    for more in ([1, 2, 3], tokens(200)):
        assert mx.array_equal(model(mx.array([more]), cache=back), model(mx.array([more]), cache=cache))


def test_cache_never_goes_back(loaded: tuple[Any, Any]) -> None:
    from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

    cache = make_prompt_cache(loaded[0])
    assert cache[0].empty()
    assert not can_trim_prompt_cache(cache)


def test_sequences_of_one_length(loaded: tuple[Any, Any]) -> None:
    """As mlx-lm's evaluation runs them, in parts; the second part is sparse."""
    model, _ = loaded
    ids = mx.array([tokens(560), tokens(560)[::-1], tokens(561)[1:]])
    together, alone = model.make_cache(), [model.make_cache() for _ in range(3)]
    for part in (ids[:, :130], ids[:, 130:559], ids[:, 559:]):
        found = model(part, cache=together)
        wanted = [model(row[None], cache=own) for row, own in zip(part, alone, strict=True)]
        assert mx.allclose(found, mx.concatenate(wanted), atol=1e-4)
    with pytest.raises(InputError, match="2 sequences"):
        model(ids[:2], cache=together)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_checkpoint(directory: Path, tmp_path: Path, bits: int) -> None:
    """As `sala quantize` writes it, the embedding and the head wider than the rest."""
    from sala.lab.quantize.pipeline import quantize_model
    from sala.lab.quantize.plan import QuantizeSettings

    target = tmp_path / "packed"
    quantize_model(directory, target, QuantizeSettings(bits, 32, method="rtn"))
    model, _ = mlx_lm.load(str(target))
    with LLM(target, backend="torch") as llm:
        wanted = llm.generate(tokens(40), Sampling(temperature=0, max_tokens=8, ignore_eos=True)).token_ids
    assert generate(model, tokens(40), 8) == list(wanted)


def test_checkpoint_that_mlx_lm_converts(directory: Path, tmp_path: Path) -> None:
    """And the other way: what its `convert` writes, our engine reads."""
    mlx_lm.convert(str(directory), mlx_path=str(tmp_path / "theirs"), quantize=True, q_bits=4, q_group_size=32)
    model, _ = mlx_lm.load(str(tmp_path / "theirs"))
    with LLM(tmp_path / "theirs", backend="torch") as llm:
        wanted = llm.generate(tokens(40), Sampling(temperature=0, max_tokens=8, ignore_eos=True)).token_ids
    assert generate(model, tokens(40), 8) == list(wanted)


@pytest.mark.skipif("SALA_TEST_MLX_LM" not in os.environ, reason="SALA_TEST_MLX_LM=1: minutes on a CPU")
@pytest.mark.parametrize("more", [[], ["--grad-checkpoint"]])
def test_lora(directory: Path, tmp_path: Path, more: list[str]) -> None:
    """mlx-lm's own training: the loss falls, and what it wrote changes the answer."""
    data, adapter = tmp_path / "data", tmp_path / "adapter"
    data.mkdir()
    for name in ("train", "valid"):
        line = json.dumps({"text": "the cat sat on the mat and the cat sat on the mat"})
        (data / f"{name}.jsonl").write_text(f"{line}\n" * 4)
    command = [sys.executable, "-m", "sala.plugins.mlx_lm", "lora", "--model", str(directory), "--train", *more]
    settings = {"data": data, "adapter-path": adapter, "iters": 20, "batch-size": 2, "num-layers": 2, "val-batches": 1}
    settings |= {"learning-rate": 1e-3, "steps-per-report": 5}
    command += [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    plain_text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    losses = [float(found) for found in re.findall(r"val (\d+\.\d+)", plain_text)]
    assert len(losses) == 2
    assert losses[1] < 0.9 * losses[0]
    tuned, _ = mlx_lm.load(str(directory), adapter_path=str(adapter))
    plain, _ = mlx_lm.load(str(directory))
    assert not mx.allclose(tuned(mx.array([tokens(9)])), plain(mx.array([tokens(9)])))


def test_server_answers(directory: Path, llm: LLM) -> None:
    """The command line as people type it, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sala.plugins.mlx_lm", "server", "--model", str(directory)]
    server = subprocess.Popen([*command, "--port", str(port)], env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
        answer = ask(port, body, server)
    finally:
        server.terminate()
        server.wait(20)
    wanted = llm.chat(body["messages"], Sampling(temperature=0, max_tokens=8))
    assert answer["choices"][0]["message"]["content"] == wanted.text
    assert answer["usage"]["completion_tokens"] == 8


def ask(port: int, body: dict[str, Any], server: "subprocess.Popen[bytes]") -> Any:
    """As soon as it listens."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for _ in range(600):
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
                return json.load(response)
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise AssertionError(error.read().decode()) from None
            time.sleep(0.1)
    raise AssertionError("the server does not listen")
