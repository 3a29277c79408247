"""Which backend runs, what it refuses, what loading takes; and the command and the server with it."""

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import sala.backends
from sala.backends import name_device, pick_backend
from sala.backends.mlx.loader import load_model, pick_device, pick_dtype
from sala.checkpoint.random import TINY
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError, MissingExtra
from sala.llm import LLM
from tests.command import sala as command
from tests.mlx.place import DEVICE
from tests.server.conftest import start
from tests.unit.test_adapter import write_adapter

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.mark.parametrize(
    ("system", "machine", "has_mlx", "device", "wanted"),
    [
        ("Darwin", "arm64", True, "auto", "mlx"),
        ("Darwin", "arm64", True, "mps", "mlx"),
        ("Darwin", "arm64", True, "cpu", "torch"),
        ("Darwin", "arm64", True, "cuda", "torch"),
        ("Darwin", "arm64", False, "auto", "torch"),
        ("Darwin", "x86_64", True, "auto", "torch"),
        ("Linux", "x86_64", True, "auto", "torch"),
    ],
)
def test_auto(
    system: str, machine: str, has_mlx: bool, device: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = importlib.util.find_spec("mlx.core") if has_mlx else None
    monkeypatch.setattr(sala.backends, "find_spec", lambda name: found)
    assert pick_backend("auto", device) == wanted
    assert pick_backend("torch", device) == "torch"


def test_without_mlx(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sala.backends, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[mlx\]'"):
        LLM(tiny, backend="mlx")
    monkeypatch.undo()
    with pytest.raises(InputError, match="use auto, torch or mlx"):
        LLM(tiny, backend="jax")


@pytest.mark.skipif(DEVICE != "cpu", reason="a Mac has a GPU")
def test_devices_and_precisions() -> None:
    assert pick_device("cpu") == pick_device("auto") == mx.Device(mx.cpu)
    assert name_device("mlx", "auto") == "mlx cpu"
    for name in ("gpu", "mps"):
        with pytest.raises(InputError, match="Apple Silicon"):
            pick_device(name)
    with pytest.raises(InputError, match="knows auto, cpu and gpu"):
        pick_device("cuda:1")
    assert pick_dtype("auto", TINY) == mx.float32
    assert pick_dtype("bfloat16", TINY) == mx.bfloat16
    with pytest.raises(InputError, match="use auto"):
        pick_dtype("int8", TINY)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_one_tensor_twice_at_most(tiny: Path, dtype: str) -> None:
    config = SalaConfig.load(tiny)
    with Checkpoint(tiny) as checkpoint:
        largest = max(info.nbytes for info in checkpoint.tensors.values())
        whole = checkpoint.nbytes * (1 if dtype == "float32" else 0.5)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        model = load_model(checkpoint, config, pick_dtype(dtype, config))
        assert mx.get_peak_memory() - before < whole + 2 * largest
        assert mx.get_active_memory() - before < whole + (1 << 16)
        assert model.model.layers[0].mlp.up_proj.weight.dtype == pick_dtype(dtype, config)


def test_an_adapter_is_merged(tiny: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter")
    options = {"device": "cpu", "ctx": 256, "adapter": tmp_path / "adapter"}
    prompt = list(range(40))
    ours, theirs = (LLM(tiny, backend=name, **options) for name in ("mlx", "torch"))
    assert ours.generate(prompt, **GREEDY).token_ids == theirs.generate(prompt, **GREEDY).token_ids
    assert abs(ours.logits(prompt) - theirs.logits(prompt)).max() < 1e-4
    assert ours.fingerprint() == theirs.fingerprint() != LLM(tiny, device="cpu", ctx=256).fingerprint()


def test_the_command(tiny: Path) -> None:
    out = command(
        "generate", "hello", "-m", str(tiny), "-n", "12", "-t", "0.9", "--seed", "4", "--ctx", "512",
        "--backend", "mlx", "--device", "cpu",
    )  # fmt: skip
    assert out.returncode == 0
    assert "answer 12 tokens" in out.stderr
    torch = LLM(tiny, backend="torch", device="cpu", ctx=512)
    want = torch.chat([{"role": "user", "content": "hello"}], temperature=0.9, seed=4, max_tokens=12)
    assert out.stdout.strip() == want.text.strip() != ""


def test_the_server(tiny: Path, tmp_path: Path) -> None:
    """Loaded in one thread, run in another; several answers at once."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 1, "seed": 2, "n": 3}
    answers = []
    for backend in ("mlx", "torch"):
        server = start(tiny, tmp_path / backend, backend=backend)
        try:
            answer = server.post("/v1/chat/completions", body).json()
            answers.append([choice["message"]["content"] for choice in answer["choices"]])
        finally:
            server.stop()
    assert len(answers[0]) == 3
    assert answers[0] == answers[1]


def test_nothing_of_torch_is_needed(tiny: Path) -> None:
    """The backend alone runs a model where torch is not even installed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from sala.llm import LLM\n"
        f"print(LLM({str(tiny)!r}, backend='mlx', device='cpu', ctx=256).generate([1, 2], temperature=0).token_ids)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("[")
