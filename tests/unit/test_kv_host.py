"""Keys and values in host memory: what the GPU and the host must hold, when it is chosen, and when it is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sala.backends import memory as mem
from sala.backends.memory import IN_HOST_MEMORY, Offload, share_memory
from sala.backends.torch import executor
from sala.backends.torch.executor import plan_capacity
from sala.backends.torch.host_memory import HostMemory
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.random import RELEASED
from sala.cli import run
from sala.errors import InputError
from sala.protocol import Capacity, Options
from tests.golden import checkpoint

GIB = 1 << 30
PARAMETERS = count_parameters(expected_tensors(RELEASED))
GPU = torch.device("cuda")


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("hot", [None, 0, GIB])
def test_the_longest_context_is_admitted(kv: Any, hot: int | None) -> None:
    """And no longer one. A card of 24 GB with the 9B model in 4 bits, and a host with more than enough."""
    width = 1 if kv == "fp8" else 2
    least = mem.least_hot_bytes(RELEASED, 2, width)
    sizes: dict[str, Any] = {"kv_bytes": width, "is_offloaded": True, "hot_bytes": least if hot is None else hot}
    memory, away, chunk = int(21.6 * GIB), 1 << 40, 4096
    most = mem.longest(RELEASED, PARAMETERS, memory, away, bits=4, chunk=chunk, **sizes)
    needed = mem.estimate(RELEASED, PARAMETERS, most, bits=4, chunk=chunk, **sizes)
    free, overheads = memory - needed.weights, (9 * RELEASED.vocab_size, 0)

    def share(ctx: int) -> Capacity:
        options = Options(kv=kv, kv_hot=hot, ctx=ctx, kv_home="host")
        offload = Offload(IN_HOST_MEMORY, away, is_streamed=True)
        return share_memory(RELEASED, options, "bf16", 2, chunk, free, width, 128, overheads, offload)

    capacity = share(most)
    assert capacity.max_tokens == most > 4 << 20
    assert capacity.num_pages == most // 64
    on_device = capacity.num_pages * (64 * mem.pooled_bytes(RELEASED, 2) + mem.index_bytes(RELEASED))
    on_device += mem.streamed_bytes(RELEASED, most, 2, width) + capacity.hot_bytes
    states = capacity.num_slots * capacity.slot_bytes
    assert on_device == needed.pages + needed.streamed + needed.hot
    assert on_device + states + needed.activations + needed.runtime <= free + capacity.num_slots * overheads[0]
    assert needed.offloaded == most * (mem.token_bytes(RELEASED, 2, width) - mem.pooled_bytes(RELEASED, 2))
    with pytest.raises(InputError, match=f"{most:,} tokens fit in the budget of .* in host memory"):
        share(most + 64)
    smaller = share(1 << 20)
    assert smaller.num_pages >= 1 << 14
    assert smaller.hot_bytes == (hot if hot is not None else max(least, free // 2 // 8))


def test_without_a_context_one_sequence_can_be_as_long_as_all_pages() -> None:
    """Half of the free memory of a card, and half of that of the host."""
    config = replace(RELEASED, max_position_embeddings=1 << 24)
    options, offload = Options(kv_home="host"), Offload(IN_HOST_MEMORY, 256 * GIB, is_streamed=True)
    capacity = share_memory(config, options, "bf16", 2, 4096, 16 * GIB, None, 8, (0, 0), offload)
    own = 64 * mem.pooled_bytes(config, 2) + mem.index_bytes(config)
    taken = capacity.num_pages * own + mem.streamed_bytes(config, capacity.max_tokens, 2) + capacity.hot_bytes
    states = capacity.num_slots * capacity.slot_bytes
    assert 7 * GIB < taken + states <= 8 * GIB
    assert capacity.max_tokens == capacity.num_pages * 64 > 1 << 20
    few = share_memory(RELEASED, options, "bf16", 2, 4096, 16 * GIB, None, 8, (0, 0), replace(offload, free=2 * GIB))
    assert few.num_pages == GIB // (64 * 8192)


def plan(monkeypatch: pytest.MonkeyPatch, device: torch.device = GPU, **given: Any) -> Capacity:
    monkeypatch.setattr(executor, "prefill_chunk", lambda _: 4096)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    return plan_capacity(RELEASED, Options(**given), torch.bfloat16, device, 10 * GIB)


def test_host_memory_is_used_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, ctx=512 << 10).offload == ""
    with pytest.raises(InputError, match=r"ctx is 2,097,152.*kv_home host"):
        plan(monkeypatch, ctx=2 << 20)
    long = plan(monkeypatch, ctx=2 << 20, kv_home="host")
    assert (long.offload, long.max_tokens) == (IN_HOST_MEMORY, 2 << 20)
    assert long.hot_bytes >= mem.least_hot_bytes(RELEASED, 2)
    assert plan(monkeypatch, ctx=512 << 10, kv_home="host").offload == IN_HOST_MEMORY
    for refused in ({"kv_home": "device"}, {"cache_memory": 4 * GIB}):
        with pytest.raises(InputError, match="ctx is 2,097,152"):
            plan(monkeypatch, ctx=2 << 20, **refused)
    with pytest.raises(InputError, match=r"ctx is 16,777,216.* in host memory"):
        plan(monkeypatch, ctx=16 << 20, kv_home="host")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kv_home": "disk"}, "kv_home is disk, which cuda cannot read"),
        ({"kv_home": "host", "kv_hot": 1 << 20}, "kv_hot is 1.0 MiB; a token of one sequence takes 64.0 MiB"),
        ({"kv_home": "device", "kv_hot": GIB}, "kv_hot is for keys and values in host memory"),
        ({"kv_home": "host", "kv_home_size": 65 * GIB}, r"kv_home_size is 65.0 GiB; 64.0 GiB are free in host memory"),
    ],
)
def test_what_is_refused(given: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=problem):
        plan(monkeypatch, **given)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_only_an_nvidia_gpu_has_host_memory_besides_its_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=f"kv_home is host, .* the memory of {device} is the host's already"):
        plan(monkeypatch, torch.device(device), kv_home="host")
    if device == "cpu":
        with pytest.raises(InputError, match="kv_hot is for keys and values in host memory"):
            plan(monkeypatch, torch.device(device), kv_home="disk", kv_hot=GIB)


def test_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    def parts(*words: str) -> dict[str, Any]:
        assert run(["estimate", "--shape", "9b", "--ctx", "4M", "--memory", "21G", "--bits", "4", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    resident = parts("--json")
    host = parts("--kv-home", "host", "--kv-home-size", "40G", "--kv-hot", "1G", "--json")
    assert (resident["fits"], host["fits"]) == (False, True)
    assert "hot" not in resident
    assert (host["hot"], host["streamed"], host["offloaded"]) == (GIB, 8 * GIB, 32 * GIB)
    index = (4 << 20) // 64 * mem.index_bytes(RELEASED)
    assert host["pages"] - index + host["offloaded"] == resident["pages"]
    assert not parts("--kv-home", "host", "--kv-home-size", "30G", "--json")["fits"]
    words = ("--kv-home", "host", "--kv-home-size", "40G", "--bandwidth", "device=1000,host=50")
    best, worst = parts(*words, "--json")["step_s"]
    selected = 96 * 64 * (mem.token_bytes(RELEASED, 2) - mem.pooled_bytes(RELEASED, 2))
    assert worst - best == pytest.approx(selected * (1 / 50e9 - 1 / 1000e9))
    assert run(["estimate", "--shape", "9b", "--kv-hot", "1G"]) == 2
    assert "add --kv-home host" in capsys.readouterr().err


def test_memory_as_the_cache_takes_it() -> None:
    """Tensors side by side, aligned, and the same for bulk copies. Too much of it is refused."""
    memory = HostMemory(torch.device("cpu"), 3 * 5 * 40, 3)
    tensors = [memory.empty((5, 10), dtype).fill_(number) for number, dtype in enumerate((torch.int32, torch.float32))]
    assert [int(tensor.sum()) for tensor in tensors] == [0, 50]
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in tensors)
    assert memory.at_host(tensors[1]) is tensors[1]
    with pytest.raises(InputError, match="GiB of its memory cannot be allocated"):
        HostMemory(torch.device("cpu"), 1 << 60, 1)


def test_a_model_on_a_cpu_says_so() -> None:
    from sala.llm import LLM

    with pytest.raises(InputError, match="kv_home is host, which is for NVIDIA GPUs"):
        LLM(checkpoint("block16"), device="cpu", kv_home="host")
