"""Keys and values outside the memory of the device: the same tokens in every way that a text can come."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sala.backends.memory import RUNTIME_BYTES, TILE_BYTES, activation_bytes, pooled_bytes, state_bytes, token_bytes
from sala.backends.torch.page_file import PageFile
from sala.errors import DiskFull, InputError
from sala.llm import LLM
from tests.golden import checkpoint
from tests.integrity import integrity

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(420)]  # dense, then sparse


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened: list[LLM] = []

    def open_llm(**options: Any) -> LLM:
        settings = {"device": "cpu", "ctx": 1024, "kv_home": "disk", "kv_home_size": "2M"}
        opened.append(LLM(checkpoint("block16"), **(settings | options)))
        return opened[-1]

    yield open_llm
    for llm in opened:
        llm.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    found = {}
    for kv in ("auto", "fp8"):
        with LLM(checkpoint("block16"), device="cpu", ctx=1024, max_batch=1, snapshots=0, kv=kv) as llm:
            found[kv] = llm.generate(PROMPT, **GREEDY).token_ids
    return found


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_chunks_neighbours_prefixes_and_drafts(on_disk: Any, expected: dict[str, list[int]], kv: str) -> None:
    llm = on_disk(kv=kv, prefill_chunk=100, speculate="lookup")
    assert llm.capacity.offload == "on disk"
    answers = llm.generate([PROMPT, PROMPT[:300], PROMPT[:50]], **GREEDY)
    assert answers[0].token_ids == expected[kv]
    assert llm.generate(PROMPT, **GREEDY).token_ids == expected[kv]  # most of it from the cache
    assert integrity(llm.engine) == []


def test_preemption_and_tiers(on_disk: Any, expected: dict[str, list[int]]) -> None:
    """Pages that are taken away and restored, from host memory and from files."""
    llm = on_disk(snapshots=1, max_batch=2, cache_ram="4M", ctx=512)
    prompts = [PROMPT, [*PROMPT[:200], *PROMPT[:220]], PROMPT[20:]]
    for _ in range(2):
        assert llm.generate(prompts, **GREEDY)[0].token_ids == expected["auto"]
        assert llm.generate(PROMPT, **GREEDY).token_ids == expected["auto"]
    assert integrity(llm.engine) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at Linux's /proc")
def test_the_file_has_no_name_and_no_readers(on_disk: Any, tmp_path: Path) -> None:
    """Nothing stays behind, not even after a crash; the space is reserved, so that no write can fail later."""
    directory = tmp_path / "here"
    before = os.statvfs(tmp_path).f_bfree
    llm = on_disk(cache_dir=directory, kv_home_size="40M", ctx=1 << 16)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]
    assert len(mapped) == 1
    assert mapped[0].endswith("(deleted)")
    assert [path for path in directory.iterdir() if path.is_file()] == []
    size = llm.capacity.num_pages * 16 * (token_bytes(llm.config, 4) - pooled_bytes(llm.config, 4))
    assert size > 30 << 20
    assert (before - os.statvfs(tmp_path).f_bfree) * os.statvfs(tmp_path).f_frsize > size // 2
    del llm


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: Any) -> None:
    with pytest.raises(DiskFull, match="the KV cache needs"):
        PageFile(tmp_path, 1 << 60, 1)
    with pytest.raises(InputError, match=r"kv_home_size is .* are free on disk"):
        on_disk(kv_home_size=1 << 49)
    with pytest.raises(InputError, match=r"ctx is 1,048,576, which needs .* tokens fit in the budget of .* on disk"):
        on_disk(ctx="1M")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match="no space left"):
        on_disk()


def test_files_without_reserved_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS: zeros are written instead
    file = PageFile(tmp_path, 5 * 40, 2)
    ones, twos = (file.empty((5, 10), torch.int16).fill_(number) for number in (1, 2))
    assert int(ones.sum()) == 50
    assert int(twos.sum()) == 100


def test_a_context_beyond_the_memory_goes_to_disk(monkeypatch: pytest.MonkeyPatch, on_disk: Any) -> None:
    config, chunk = on_disk().config, on_disk().capacity.prefill_chunk
    step = RUNTIME_BYTES + activation_bytes(config, chunk, 1 << 16, 4, TILE_BYTES)
    own = state_bytes(config) * 40 + 2 * pooled_bytes(config, 4) * (1 << 16)
    monkeypatch.setattr("sala.backends.torch.executor.free_bytes", lambda _: own + step)
    auto = {"kv_home": "auto", "ctx": 1 << 16, "max_batch": 1, "snapshots": 1, "kv_home_size": None}
    assert on_disk(**auto).capacity.offload == "on disk"
    assert on_disk(**auto | {"ctx": 512}).capacity.offload == ""
    for refused in ({"kv_home": "device"}, {"cache_memory": own // 2}):
        with pytest.raises(InputError, match="ctx is 65,536"):
            on_disk(**auto | refused)


def test_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    from sala import cli

    def parts(*words: str) -> dict[str, Any]:
        assert cli.run(["estimate", "--shape", "9b", "--ctx", "4M", "--memory", "16G", "--bits", "4", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    resident = parts("--json")
    disk = parts("--kv-home", "disk", "--kv-home-size", "40G", "--json")
    assert (resident["fits"], disk["fits"]) == (False, True)
    assert disk["offloaded"] == 4 << 30 << 3  # 8 KiB of a token in 8 layers
    assert disk["pages"] + disk["offloaded"] == resident["pages"]
    assert resident["total"] - disk["total"] == disk["offloaded"]
    assert disk["longest"] == 40 << 30 >> 13
    assert not parts("--kv-home", "disk", "--kv-home-size", "30G", "--json")["fits"]


def test_mlx_has_no_need_of_it() -> None:
    pytest.importorskip("mlx.core")
    with pytest.raises(InputError, match="all memory is the GPU's too"):
        LLM(checkpoint("block16"), backend="mlx", device="cpu", kv_home="disk")
