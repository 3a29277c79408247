"""Weight files from strangers: read lazily when good, refused in one line when not."""

import errno
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sala.checkpoint import dtypes
from sala.checkpoint.names import check_tensors
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_atomically, write_weights
from sala.config import SalaConfig
from sala.errors import (
    CheckpointError,
    DiskFull,
    ModelNotFound,
    NotWritable,
    SalaError,
    check_space,
    explain_write_error,
    writing,
)


def write_raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1, 2], np.float16),
        "e": np.zeros((0, 3), np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == {"a", "b", "e"}
        raw = checkpoint.read("a")
        assert (raw.dtype, raw.shape) == ("F32", (2, 3))
        np.testing.assert_array_equal(np.frombuffer(raw.data, np.float32).reshape(2, 3), tensors["a"])
        assert checkpoint.read("e").data.nbytes == 0
        checkpoint.forget("a")
        assert bytes(checkpoint.read("b").data) == tensors["b"].tobytes()


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    values = {f"t{i}": np.random.default_rng(i).standard_normal((i + 1, 4)).astype(np.float32) for i in range(5)}
    specs = {name: ("F32", value.shape) for name, value in values.items()}
    with new_directory(tmp_path / "out") as draft:
        write_weights(draft, specs, lambda name: values[name].data, shard_bytes=100)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    loaded = {name: value for file in files for name, value in load_file(file).items()}
    assert set(loaded) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name], value)
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {n: s for n, (_, s) in specs.items()}


BAD_FILES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda f: f.write_bytes(b"\x01"),
    "header does not fit": lambda f: write_raw(f, {"a": entry()}, b"", length=10**9),
    "a header of": lambda f: (f.write_bytes(struct.pack("<Q", 101 << 20)), f.open("ab").truncate(110 << 20)),
    "is not JSON": lambda f: write_raw(f, b"{nonsense"),
    "not a JSON object": lambda f: write_raw(f, [1]),
    "malformed": lambda f: write_raw(f, {"a": 3}),
    "unknown precision": lambda f: write_raw(f, {"a": entry("F7")}, b"\0" * 8),
    "impossible shape": lambda f: write_raw(f, {"a": entry(shape=[-2])}, b"\0" * 8),
    "impossible offsets": lambda f: write_raw(f, {"a": entry(offsets=[-8, 0])}, b"\0" * 8),
    "does not fill": lambda f: write_raw(f, {"a": entry(shape=[3])}, b"\0" * 8),
    "overlaps": lambda f: write_raw(f, {"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12),
    "bytes are missing": lambda f: write_raw(f, {"a": entry()}, b"\0" * 7),
    "after the last tensor": lambda f: write_raw(f, {"a": entry()}, b"\0" * 9),
    "belong to no tensor": lambda f: write_raw(f, {"a": entry(offsets=(4, 12))}, b"\0" * 12),
    "twice": lambda f: write_raw(f, b'{"a": 1, "a": 1}'),
}


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """Not what another process writes at the moment, nor what has another name."""
    from sala.checkpoint.writer import _locked

    left, busy = tmp_path / ".out.0123456789ab.part", tmp_path / ".out.ba9876543210.part"
    others = [tmp_path / name for name in (".out.old.part", ".outer.0123456789ab.part", "out.0123456789ab.part")]
    for path in (left, busy, *others):
        path.mkdir()
        (path / "model.safetensors").touch()
    with _locked(busy) as is_locked, new_directory(tmp_path / "out") as draft:
        assert is_locked
        (draft / "config.json").write_text("{}")
        with pytest.raises(RuntimeError), new_directory(tmp_path / "out"):  # two at once: the other draft stays
            assert draft.exists()
            raise RuntimeError
    assert {path.name for path in tmp_path.iterdir()} == {"out", busy.name, *(path.name for path in others)}


@pytest.mark.parametrize("problem", BAD_FILES)
def test_bad_files(tmp_path: Path, problem: str) -> None:
    BAD_FILES[problem](tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=problem) as caught:
        Checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def shard(tmp_path: Path, weight_map: Any, **files: dict[str, np.ndarray]) -> Path:
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


ONE = np.ones(2, np.float32)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "x\0y"])
def test_shards_stay_inside(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": ONE}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="leads out of the directory"):
        Checkpoint(shard(tmp_path / "model", {"a": name}))


def test_links_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": ONE}, tmp_path / "x.safetensors")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="link that leads out"):
        Checkpoint(tmp_path / "model")


def test_links_of_a_hub_cache_are_fine(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": ONE}, blobs / "f00")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/f00"))
    assert set(Checkpoint(snapshot)) == {"a"}


def test_bad_indices(tmp_path: Path) -> None:
    (tmp_path / "i").mkdir()
    cases = [
        ({"a": "one.safetensors", "b": "one.safetensors"}, "lacks b"),
        ({}, "does not place there"),
        ({"a": "two.safetensors"}, "is missing"),
        (3, "weight_map"),
        ({"a": 3}, "weight_map"),
    ]
    for weight_map, problem in cases[:1] + cases[2:]:
        with pytest.raises(CheckpointError, match=problem):
            Checkpoint(shard(tmp_path / "i", weight_map, one={"a": ONE}))
    with pytest.raises(CheckpointError, match="does not place there"):
        Checkpoint(shard(tmp_path / "i", {"a": "one.safetensors"}, one={"a": ONE, "c": ONE}))


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="can run code"):
        Checkpoint(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        Checkpoint(tmp_path)
    with pytest.raises(ModelNotFound):
        Checkpoint(tmp_path / "nowhere")


def rewrite(tiny: Path, target: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    target.mkdir()
    tensors = load_file(tiny / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


NORM = "model.norm.weight"
WRONG_TENSORS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    f"lacks tensor {NORM}": lambda t: t.pop(NORM),
    "has unexpected tensor extra.weight": lambda t: t.update({"extra.weight": ONE}),
    r"is \[3\], config.json says \[128\]": lambda t: t.update({NORM: np.ones(3, np.float32)}),
    "stored as I64": lambda t: t.update({NORM: np.ones(128, np.int64)}),
}


@pytest.mark.parametrize("problem", WRONG_TENSORS)
def test_tensors_against_the_config(tiny: Path, tmp_path: Path, problem: str) -> None:
    path = rewrite(tiny, tmp_path / "m", WRONG_TENSORS[problem])
    with Checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=problem) as caught:
        check_tensors(checkpoint, SalaConfig.load(tiny))
    assert "\n" not in str(caught.value)


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_directory(tmp_path / "out") as draft:
        (draft / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(SalaError, match="exists already"):
        write_random(tmp_path / "out", TINY)
    assert (tmp_path / "out" / "precious").read_text() == "x"


def test_a_mapped_tensor_is_not_the_file(tiny: Path) -> None:
    before = (tiny / "model.safetensors").read_bytes()
    with Checkpoint(tiny) as checkpoint:
        data = checkpoint.read(NORM).data
        data[:4] = b"\xff" * 4
        del data
    assert (tiny / "model.safetensors").read_bytes() == before


def test_the_table_of_precisions_agrees_with_torch_and_numpy() -> None:
    torch = pytest.importorskip("torch")
    for row in dtypes.PRECISIONS:
        assert getattr(torch, row.name).itemsize == np.dtype(row.numpy).itemsize == row.size
    assert dtypes.FILE_DTYPES == {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def test_a_full_disk_and_a_missing_permission_say_where_how_much_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(code: int) -> Callable[..., Any]:
        def fsync(_: int) -> None:
            raise OSError(code, os.strerror(code))

        return fsync

    specs = {"a": ("F32", (1000, 1000))}
    data = bytes(4_000_000)
    for code, kind, words in (
        (
            errno.ENOSPC,
            DiskFull,
            r"no space left on the disk for .*model\.safetensors \(needs 4\.0 MB, .* are free\); free",
        ),
        (errno.EDQUOT, DiskFull, "no space left"),
        (errno.EROFS, NotWritable, r"model\.safetensors cannot be accessed: Read-only file system; change"),
    ):
        monkeypatch.setattr(os, "fsync", fail(code))
        with pytest.raises(kind, match=words), new_directory(tmp_path / "new") as draft:
            write_weights(draft, specs, lambda _: data)
        assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    with pytest.raises(DiskFull, match=r"model needs 1000000\.0 GB"):
        check_space(tmp_path / "not" / "there", 10**15, "model")
    check_space(tmp_path / "not" / "there", 1)


def test_errors_of_other_files_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(PermissionError), writing(tmp_path / "target" / "x"):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/file")
    with pytest.raises(NotWritable, match="/elsewhere/file cannot be accessed"):
        raise explain_write_error(PermissionError(errno.EACCES, "Permission denied", "/elsewhere/file")) or ValueError
    assert explain_write_error(FileNotFoundError(errno.ENOENT, "none", "x")) is None


def test_several_writers_of_one_file(tmp_path: Path) -> None:
    """Every writer has a draft of its own: texts are never mixed, and no draft is left behind."""
    file = tmp_path / "record.json"
    texts = [f"{number}" * 100_000 for number in range(4)]

    def write(text: str) -> None:
        for _ in range(20):
            write_atomically(file, text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, texts))
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]
