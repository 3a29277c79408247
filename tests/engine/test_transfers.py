"""Faults in the transfers of real executors: copies that break off half way, and memory that the system refuses."""

import errno
import gc
import importlib
import os
import random
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import sala.backends.torch.page_file as page_file
import sala.engine.sessions as sessions
import sala.engine.tiers as tiers
from sala.engine.sessions import DiskTier, SessionStore
from sala.engine.tiers import TieredHybrid
from sala.errors import InputError
from sala.llm import LLM
from tests.engine.fake import FakeExecutor
from tests.engine.test_engine import SPARSE
from tests.golden import checkpoint
from tests.integrity import integrity

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
NUM_TALKS, NUM_TURNS = 4, 5
RATE = 0.02  # of the tensors of a copy
RESTORES = {"torch": "_tensor", "mlx": "_array"}  # what takes each tensor of a copy, by backend


class Breaking:
    """Makes copies between the cache and memory outside it break off, at any tensor but the first too."""

    def __init__(self, patch: pytest.MonkeyPatch, backend: str) -> None:
        module = importlib.import_module(f"sala.backends.{backend}.executor")
        self._rng, self.failed = random.Random(1), Counter[str]()
        for kind, name in (("dump", "Blob"), ("restore", RESTORES[backend])):
            patch.setattr(module, name, self._wrapped(kind, getattr(module, name)))

    def _wrapped(self, kind: str, take: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if self._rng.random() < RATE:
                self.failed[kind] += 1
                raise RuntimeError(f"no luck: {kind}")
            return take(*arguments)

        return call


@pytest.mark.parametrize(
    ("backend", "tier", "home"),
    [("torch", "host", "device"), ("torch", "disk", "device"), ("torch", "disk", "disk"), ("mlx", "disk", "device")],
)
def test_copies_that_break_off(
    backend: str, tier: str, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a copy is never used: the same tokens as without a cache, nothing leaked, a warning for each fault."""
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    monkeypatch.setattr(sessions, "MIN_TOKENS", 1)
    rng, common = random.Random(6), {"device": "cpu", "backend": backend, "ctx": 512, "max_batch": 1}
    below: dict[str, Any] = {"cache_ram": "8M"} if tier == "host" else {"cache_dir": tmp_path}
    if home == "disk":
        below |= {"kv_home": "disk", "kv_home_size": "4M"}
    talks = [[rng.randrange(256) for _ in range(150)] for _ in range(NUM_TALKS)]
    with (
        LLM(checkpoint("block16"), snapshots=2, **common, **below) as small,
        LLM(checkpoint("block16"), snapshots=0, **common) as plain,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        breaking = Breaking(monkeypatch, backend)
        for _ in range(NUM_TURNS):
            for talk in talks:
                found = small.generate(talk, **GREEDY).token_ids
                assert found == plain.generate(talk, **GREEDY).token_ids
                talk += [*found, *(rng.randrange(256) for _ in range(20))]
                if small.tiers is not None and small.tiers.disk is not None:
                    small.tiers.disk.flush()
        assert small.service.status().prefix.hit[tier] > 1000
        assert integrity(small.engine) == []
        assert breaking.failed["dump"]
        assert breaking.failed["restore"]
    assert len([one for one in said if "no luck" in str(one.message)]) == breaking.failed.total()


def cache_threads() -> int:
    return sum(thread.name == "sala-cache" for thread in threading.enumerate())


def test_host_memory_that_the_system_refuses(tmp_path: Path) -> None:
    before = cache_threads()
    with pytest.raises(InputError, match=r"cache_ram cannot be allocated: .*; lower it"):
        LLM(checkpoint("block16"), device="cpu", ctx=512, cache_ram=1 << 50, cache_dir=tmp_path)
    gc.collect()
    assert cache_threads() == before  # that of the disk tier has ended


def test_a_later_block_of_host_memory_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cache with a part of what was asked for, and the blocks before are given back."""
    given: list[int] = []

    class Short(FakeExecutor):
        def host_memory(self, num_bytes: int) -> memoryview:
            if given:
                raise InputError("cache_ram", "cannot be allocated", "lower it")
            given.append(num_bytes)
            return super().host_memory(num_bytes)

    monkeypatch.setattr(tiers, "SMALLEST_BLOCK", 1 << 14)
    disk = DiskTier(SessionStore(tmp_path, "model", print), SPARSE, None)
    with pytest.raises(InputError, match="cache_ram"):
        TieredHybrid(Short(), SPARSE, None, 3 << 14, disk)
    assert given == [1 << 15]
    disk.close()


@pytest.mark.parametrize(
    ("module", "name"), [(os, "posix_fallocate"), (page_file.mmap, "mmap"), (page_file.tempfile, "TemporaryFile")]
)
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EIO, errno.ENODEV])
def test_a_page_file_that_cannot_be_made(
    module: Any, name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a failing disk, in a file system whose files cannot be mapped, or without addresses for it."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, name, fail, raising=False)
    remedy = f"can be mapped in {tmp_path}: {os.strerror(code)}; use another directory"
    with pytest.raises(InputError, match=remedy):
        page_file.PageFile(tmp_path, 1 << 20, 3)
    assert list(tmp_path.iterdir()) == []
