"""Pasts on disk: found again after a restart; refused if anything about them is wrong."""

import os
import shutil
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from sala.checkpoint import fingerprint
from sala.checkpoint.reader import Checkpoint, TensorInfo
from sala.config import Regime, SalaConfig
from sala.engine.sessions import SessionStore
from sala.engine.stream import Completion
from sala.errors import CheckpointError, InputError
from sala.llm import LLM
from sala.protocol import Blob
from tests.golden import DATA
from tests.integrity import integrity

MODEL = DATA / "block16"
GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
PROMPT = [(7 * i * i + 3) % 256 for i in range(400)]


def open_llm(cache_dir: Path | None = None, model: Path = MODEL, **options: object) -> LLM:
    return LLM(model, device="cpu", ctx=1024, cache_dir=cache_dir, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def want() -> list[int]:
    return open_llm().generate(PROMPT, **GREEDY).token_ids


def run(llm: LLM, prompt: list[int] = PROMPT) -> Completion:
    """Answer a prompt, and wait until what is saved of it is on disk."""
    out = llm.generate(prompt, **GREEDY)
    flush(llm)
    return out


def flush(llm: LLM) -> None:
    assert llm.tiers is not None
    assert llm.tiers.disk is not None
    llm.tiers.disk.flush()


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def test_a_restart_goes_on_from_disk(tmp_path: Path, want: list[int]) -> None:
    cache = tmp_path / "cache"
    first = run(open_llm(cache))
    assert first.usage.cached_tokens == 0
    assert len(files(cache)) == 1
    again = open_llm(cache)
    second = again.generate(PROMPT, **GREEDY)
    assert second.usage.cached_tokens == len(PROMPT) - 1
    assert first.token_ids == second.token_ids == want
    longer = PROMPT + want + [5, 6, 7]
    assert again.generate(longer, **GREEDY).token_ids == open_llm().generate(longer, **GREEDY).token_ids
    assert integrity(again.engine) == []


def test_regimes_on_disk(tmp_path: Path) -> None:
    """A dense past from disk serves a sparse request no further than both agree, which here is not at all."""
    short = PROMPT[:120]  # dense
    cache = tmp_path / "cache"
    llm = open_llm(cache)
    from sala.engine.sessions import MIN_TOKENS

    assert MIN_TOKENS > 120  # so short a past is not written by itself
    store = llm.open_store(cache)
    llm.save_session(store, "short", short)
    longer = PROMPT[:300]
    fresh = open_llm(cache).generate(longer, **GREEDY)
    assert fresh.usage.cached_tokens == 0
    assert fresh.token_ids == open_llm().generate(longer, **GREEDY).token_ids


def test_named_sessions(tmp_path: Path, want: list[int]) -> None:
    llm = open_llm()
    store = llm.open_store(tmp_path / "s")
    assert llm.save_session(store, "doc", PROMPT[:-1]) == len(PROMPT) - 1
    assert [entry.name for entry in store.entries()] == ["doc"]
    with pytest.raises(InputError, match="exists already"):
        llm.save_session(store, "doc", PROMPT[:-1])
    other = open_llm()
    tokens = other.load_session(other.open_store(tmp_path / "s"), "doc")
    assert tokens == PROMPT[:-1]
    out = other.generate([*tokens, PROMPT[-1]], **GREEDY)
    assert out.usage.cached_tokens == len(PROMPT) - 1
    assert out.token_ids == want
    store.remove("doc")
    with pytest.raises(InputError, match="does not exist"):
        store.remove("doc")
    with pytest.raises(InputError, match="does not exist"):
        store.find("doc")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process of this state cannot be made here")
@pytest.mark.parametrize("moment", ["fsync", "link", "unlink"])
def test_a_killed_save_is_there_as_a_whole_or_not_at_all(tmp_path: Path, moment: str) -> None:
    store = SessionStore(tmp_path, "model")
    blobs, tokens = {"state": Blob("U8", (1000,), memoryview(bytes(1000)))}, bytes(40)
    child = os.fork()
    if not child:
        setattr(os, moment, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            store.write(store.path("doc"), tokens, Regime(0, 0), blobs)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    again = SessionStore(tmp_path, "model")
    assert len(again.entries()) == (moment == "unlink")
    if moment != "unlink":
        again.write(again.path("doc"), tokens, Regime(0, 0), blobs)
    (entry,) = again.entries()
    assert again.read(entry)[0] == tokens


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "x" * 200, "a\0b", "doc.sala", "~"])
def test_names_stay_in_their_directory(tmp_path: Path, name: str) -> None:
    store = open_llm().open_store(tmp_path)
    for call in (store.find, store.remove):
        with pytest.raises(InputError, match="not a valid name"):
            call(name)


def damage(kind: str, file: Path) -> None:
    data = bytearray(file.read_bytes())
    if kind == "truncated":
        file.write_bytes(data[:-100])
    elif kind == "bit flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif kind == "flipped header":
        at = data.find(b'"sparse_from":"')
        data[at + 15] ^= 1
        file.write_bytes(data)
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "other":
        file.write_text("hello")
    elif kind == "link":
        moved = file.with_suffix(".elsewhere")
        file.rename(moved)
        file.symlink_to(moved)


@pytest.mark.parametrize("kind", ["truncated", "bit flip", "flipped header", "empty", "other", "link"])
def test_bad_files_are_refused_and_the_prompt_is_read_instead(tmp_path: Path, kind: str, want: list[int]) -> None:
    cache = tmp_path / "cache"
    run(open_llm(cache))
    damage(kind, files(cache)[0])
    llm = open_llm(cache)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = llm.generate(PROMPT, **GREEDY)
    assert out.usage.cached_tokens == 0
    assert out.token_ids == want
    assert len(caught) <= 2
    assert integrity(llm.engine) == []


def test_another_model_does_not_use_it(tmp_path: Path) -> None:
    """The same shapes with other weights, another precision: another fingerprint."""
    cache = tmp_path / "cache"
    llm = open_llm(cache)
    run(llm)
    changed = tmp_path / "model"
    shutil.copytree(MODEL, changed)
    data = bytearray((changed / "model.safetensors").read_bytes())
    data[-3] ^= 1  # in the last tensor
    (changed / "model.safetensors").write_bytes(data)
    prints = {llm.fingerprint(), open_llm(model=changed).fingerprint(), open_llm(dtype="bfloat16").fingerprint()}
    assert len(prints) == 3
    out = run(open_llm(cache, dtype="bfloat16"))
    assert out.usage.cached_tokens == 0
    entries = open_llm(dtype="bfloat16").open_store(cache).entries()
    assert sorted(entry.fits for entry in entries) == [False, True]  # the one of bf16 has just been written
    entry = next(entry for entry in entries if not entry.fits)
    with pytest.raises(CheckpointError, match="another model"):
        other = open_llm(dtype="bfloat16")
        other.open_store(cache).load(entry, other.engine.hybrid, other._executor)


def test_an_edit_in_one_row_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte between the samples, the size kept and the time of the last write restored: nothing old is reused."""
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(fingerprint.platformdirs, "user_cache_dir", lambda _: str(tmp_path / "user"))
    model, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(MODEL, model)
    before = open_llm(cache, model=model)
    fingerprint_before = before.fingerprint()
    before.generate(PROMPT, **GREEDY)
    assert open_llm(cache, model=model).generate(PROMPT, **GREEDY).usage.cached_tokens == len(PROMPT) - 1
    file = model / "model.safetensors"
    info, stat = Checkpoint(model).tensors["model.layers.1.mlp.up_proj.weight"], file.stat()
    assert info.nbytes > 4 * 4096
    with file.open("r+b") as handle:
        handle.seek(info.start + 2 * 4096)
        byte = handle.read(1)[0]
        handle.seek(info.start + 2 * 4096)
        handle.write(bytes([byte ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    after = open_llm(cache, model=model)
    assert after.fingerprint() != fingerprint_before
    assert after.generate(PROMPT, **GREEDY).usage.cached_tokens == 0


def test_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known model is not read again; one that has just been written, or whose samples differ, is."""
    calls: list[int] = []

    def counted(tensors: Mapping[str, TensorInfo]) -> str:
        calls.append(len(tensors))
        return hash_all(tensors)

    hash_all = fingerprint.hash_all
    monkeypatch.setattr(fingerprint, "hash_all", counted)
    monkeypatch.setattr(fingerprint.platformdirs, "user_cache_dir", lambda _: str(tmp_path / "user"))
    shutil.copytree(MODEL, tmp_path / "model")
    model = Checkpoint(tmp_path / "model")
    prints = {model.fingerprint() for _ in range(2)}
    assert len(calls) == 2  # the file is too young
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", -1.0)
    prints |= {model.fingerprint() for _ in range(3)}
    assert len(calls) == 3
    memory = tmp_path / "user" / "fingerprints.json"
    memory.write_text(memory.read_text().replace('"samples": "', '"samples": "0'))
    prints.add(model.fingerprint())
    assert len(calls) == 4
    memory.write_text("damaged")
    prints.add(model.fingerprint())
    assert len(calls) == 5
    shutil.copytree(MODEL, tmp_path / "copy")
    prints.add(Checkpoint(tmp_path / "copy").fingerprint())
    assert len(prints) == 1  # whatever was remembered, and wherever the files lie


def test_another_version_does_not_use_it(tmp_path: Path, want: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr("sala.engine.sessions.FORMAT", "sala-session-0")
        run(open_llm(cache))
    assert len(files(cache)) == 1
    out = open_llm(cache).generate(PROMPT, **GREEDY)
    assert (out.usage.cached_tokens, out.token_ids) == (0, want)


def test_a_past_longer_than_the_context(tmp_path: Path) -> None:
    llm = open_llm()
    store = llm.open_store(tmp_path)
    llm.save_session(store, "long", PROMPT)
    small = LLM(MODEL, device="cpu", ctx=200)
    with pytest.raises(CheckpointError, match="context"):
        small.load_session(small.open_store(tmp_path), "long")


def test_the_disk_has_a_limit(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    unlimited = open_llm(cache)
    run(unlimited)
    assert unlimited.tiers is not None
    assert unlimited.tiers.disk is not None
    assert unlimited.tiers.disk.use.size < shutil.disk_usage(cache).free // 5  # nobody has set a limit
    size = files(cache)[0].stat().st_size
    llm = open_llm(cache, cache_disk=3 * size)
    precious = cache / "precious.txt"
    precious.write_text("not ours")
    llm.save_session(llm.open_store(cache), "mine", PROMPT)  # kept until it is removed by its owner
    for start in range(6):
        run(llm, [start, *PROMPT[1:]])
    kept = list(cache.glob("auto-*.sala"))
    assert 1 <= len(kept) <= 3
    assert sum(file.stat().st_size for file in kept) <= 3 * size
    assert precious.read_text() == "not ours"
    assert [entry.num_tokens for entry in llm.open_store(cache).entries() if entry.name == "mine"] == [len(PROMPT)]
    again = open_llm(cache)
    found = [again.generate([start, *PROMPT[1:]], **GREEDY).usage.cached_tokens for start in (5, 4, 0)]
    assert found == [len(PROMPT) - 1, len(PROMPT) - 1, 0]  # the oldest have gone


def test_an_unwritable_disk_is_one_warning(tmp_path: Path, want: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    import sala.engine.sessions as module

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    llm = open_llm(tmp_path / "cache")
    with pytest.warns(UserWarning, match="disk cache is not written"):
        assert run(llm).token_ids == want
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(llm, PROMPT[:-1])
    assert files(tmp_path / "cache") == []


def test_a_directory_for_everybody_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InputError, match="by every user"):
        open_llm(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not a directory"):
        open_llm(tmp_path / "file")


def test_geometry_of_the_test() -> None:
    assert SalaConfig.load(MODEL).sparse_config.agreement_len < 120 < 128


def test_a_damaged_file_is_written_anew(tmp_path: Path, want: list[int]) -> None:
    cache = tmp_path / "cache"
    run(open_llm(cache))
    damage("bit flip", files(cache)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(open_llm(cache)).usage.cached_tokens == 0
    mended = open_llm(cache).generate(PROMPT, **GREEDY)
    assert mended.usage.cached_tokens == len(PROMPT) - 1
    assert mended.token_ids == want


def test_an_answer_that_ends_early_leaves_its_past_too(tiny: Path, tmp_path: Path) -> None:
    """A stop string or a reader who leaves ends the request from outside; the prompt was read all the same."""
    text = "some words " * 40
    llm = LLM(tiny, device="cpu", ctx=1024, cache_dir=tmp_path / "stop")
    stop = llm.generate(text, temperature=0, max_tokens=20).text[4:6]
    for name in ("stop", "leave"):
        llm = LLM(tiny, device="cpu", ctx=1024, cache_dir=tmp_path / f"{name}-cache")
        stream = llm.stream(text, temperature=0, max_tokens=20, stop=(stop,) if name == "stop" else ())
        next(stream)
        if name == "leave":
            stream.close()
        list(stream)
        llm.close()
        assert len(files(tmp_path / f"{name}-cache")) == 1


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_short_sessions(tiny: Path, tmp_path: Path, length: int) -> None:
    """Fewer tokens than one row of pooled keys stands for leave empty tensors in the file."""
    text = [1 + (5 * i) % 200 for i in range(length)]
    first = LLM(tiny, device="cpu", ctx=256)
    assert first.save_session(first.open_store(str(tmp_path)), "note", text) == length
    second = LLM(tiny, device="cpu", ctx=256)
    assert second.load_session(second.open_store(str(tmp_path)), "note") == text
    out = second.generate([*text, 4, 5], **GREEDY)
    assert out.usage.cached_tokens == length
    assert out.token_ids == LLM(tiny, device="cpu", ctx=256).generate([*text, 4, 5], **GREEDY).token_ids
