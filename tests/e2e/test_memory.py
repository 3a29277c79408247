"""Loading a checkpoint of the released shapes costs its weights once, and nothing is read before it is needed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sala.checkpoint.names import check_tensors, expected_tensors
from sala.checkpoint.random import RELEASED, cut_layers, write_random
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_weights
from sala.config import SalaConfig

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with Linux's /proc")

SCRIPT = """
import json, sys
import torch
from sala.llm import LLM
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
torch.ones(256, 256).bfloat16() @ torch.ones(256, 256).bfloat16()
before = peak()
llm = LLM(sys.argv[1], device="cpu", dtype=sys.argv[2], ctx=4096)
loaded = peak() - before
llm.generate([1, 2, 3, 4], temperature=0, max_tokens=2, ignore_eos=True)
print(json.dumps({"loaded": loaded, "used": peak() - before}))
"""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sparse and one lightning layer of the real size, the real vocabulary: 2.3 GB of the same few numbers."""
    path = tmp_path_factory.mktemp("big") / "model"
    config = cut_layers(RELEASED, 2)
    specs = {name: ("BF16", shape) for name, shape in expected_tensors(config).items()}
    small = np.float32(np.random.default_rng(0).normal(size=1 << 20) * 0.02)
    few = (small.view(np.uint32) >> 16).astype(np.uint16)  # the upper halves: bfloat16
    with new_directory(path) as draft:
        write_weights(draft, specs, lambda name: np.resize(few, specs[name][1]).data.cast("B"))
        (draft / "config.json").write_text(json.dumps(config.to_dict()))
    return path


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float32", 2)])
def test_peak_memory(released: Path, dtype: str, factor: int) -> None:
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(released), dtype], capture_output=True, text=True, check=True
    )
    measured = json.loads(out.stdout)
    weights = Checkpoint(released).nbytes * factor
    assert weights > 2.2e9
    if factor == 1:
        assert measured["loaded"] < 0.1 * weights  # nothing is read at load
    assert measured["used"] < 1.1 * weights


def test_nothing_is_allocated_for_a_lie(tmp_path: Path) -> None:
    """A header that promises terabytes, and weights of another model, are refused before memory is asked for."""
    (tmp_path / "m").mkdir()
    config = RELEASED.to_dict()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    (tmp_path / "m" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    from sala.errors import CheckpointError

    with pytest.raises(CheckpointError, match="truncated"):
        check_tensors(Checkpoint(tmp_path / "m"), SalaConfig.load(tmp_path / "m"))


ESTIMATE = """
import json, sys
import torch
import sala.backends.torch.executor
from sala.llm import LLM
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
torch.ones(512, 512) @ torch.ones(512, 512)
before = peak()
length = int(sys.argv[2])
llm = LLM(sys.argv[1], device="cpu", ctx=length, snapshots=1, max_batch=1)
llm.generate([i * i % 251 for i in range(length - 4)], temperature=0, max_tokens=4, ignore_eos=True)
print(peak() - before)
"""


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dataclasses import replace

    from sala.config import SparseConfig

    config = replace(
        RELEASED, vocab_size=256, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        mixer_types=("minicpm4", "lightning-attn", "lightning-attn", "lightning-attn"), num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, lightning_nh=8, lightning_nkv=8, lightning_head_dim=64,
        sparse_config=SparseConfig(window_size=512, topk=16, dense_len=2048), eos_token_id=(2,), dtype="float32",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("middling") / "model"
    write_random(path, config)
    return path


@pytest.mark.parametrize("length", [1024, 4096, 8192])
def test_the_estimate_is_what_is_used(middling: Path, length: int) -> None:
    """Dense, sparse, long: within 10% of the measured peak."""
    from sala.backends.memory import estimate
    from sala.checkpoint.names import count_parameters, expected_tensors

    config = SalaConfig.load(middling)
    command = [sys.executable, "-c", ESTIMATE, str(middling), str(length)]
    measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    parameters = count_parameters(expected_tensors(config))
    expected = estimate(config, parameters, length, element_bytes=4, chunk=256, num_snapshots=1).total
    assert expected == pytest.approx(measured, rel=0.10)
