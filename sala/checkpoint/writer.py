"""Write checkpoints: shards with an index, one tensor in memory at a time, visible only when complete."""

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sala.checkpoint.dtypes import ITEM_SIZES
from sala.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from sala.config import SalaConfig, own_file
from sala.errors import CheckpointError, NotWritable, writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SHARD_BYTES = 5 << 30
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template*.jinja", "chat_template.json",
)  # fmt: skip
COMPANION_FILES = (*TOKENIZER_FILES, "generation_config.json", "LICENSE*", "NOTICE*")  # beside the weights
Spec = tuple[str, tuple[int, ...]]  # dtype, shape
Read = Callable[[str], bytes | memoryview]


def check_new(target: Path) -> None:
    """Raise CheckpointError if a directory exists already, NotWritable if it could not be made."""
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already", "choose another directory, or remove it yourself")
    parent = next(path for path in target.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise NotWritable(f"{target} cannot be made in {parent}", "change its permissions or use another directory")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a directory that gets its name when the block succeeds; an existing one is never changed.

    What killed processes have left of the same target is removed.
    """
    check_new(target)
    _remove_drafts(target)
    draft = target.parent / f".{target.name}.{secrets.token_hex(6)}.part"
    try:
        with writing(target):
            draft.mkdir(parents=True)
            with _locked(draft):
                yield draft
                sync_directory(draft)
                draft.rename(target)
                sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock a directory until the block or the process ends; yield whether that worked. Not on Windows."""
    if fcntl is None:
        yield False
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except OSError:  # another process has it, or the file system has no locks
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _remove_drafts(target: Path) -> None:
    name = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{12}[.]part")
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(OSError), _locked(path) as is_locked:
                if is_locked:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def replacing(target: Path, tag: str = "") -> Iterator[Path]:
    """Yield a path beside `target`; the file that the block writes there takes its place when the block succeeds.

    Without a `tag`, only one writer may write the file at a time.
    """
    draft = target.with_name(f".{target.name}{tag}.part")
    with writing(target):
        draft.unlink(missing_ok=True)  # left by a process that was killed
        try:
            yield draft
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write the whole file, or leave it as it was; of several writers at a time the last one wins."""
    data = data.encode() if isinstance(data, str) else data
    with replacing(path, f".{secrets.token_hex(6)}") as draft, writing(path, needed=len(data)):
        _write_new(draft, data)


def write_weights(directory: Path, specs: Mapping[str, Spec], read: Read, shard_bytes: int = SHARD_BYTES) -> None:
    """Write every tensor of `specs` into `directory`; `read(name)` is called when its bytes are needed."""
    shards = plan_shards(specs, shard_bytes)
    if len(shards) == 1:
        write_file(directory / SINGLE_FILE, specs, read, {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(directory / file, {name: specs[name] for name in names}, read, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(spec_bytes(spec) for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / INDEX_FILE, index)


def write_model(directory: Path, config: SalaConfig, specs: Mapping[str, Spec], read: Read) -> None:
    """Write weights and config.json."""
    write_weights(directory, specs, read)
    write_json(directory / "config.json", config.to_dict())


def plan_shards(specs: Mapping[str, Spec], shard_bytes: int) -> list[list[str]]:
    """Return names in order, split so that no shard exceeds the limit; a larger tensor gets its own shard."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        size = spec_bytes(spec)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def spec_bytes(spec: Spec) -> int:
    dtype, shape = spec
    return ITEM_SIZES[dtype] * math.prod(shape)


def write_file(
    file: Path, specs: Mapping[str, Spec], read: Read, metadata: Mapping[str, str], is_private: bool = False
) -> None:
    """Write one safetensors file and sync it to disk; it must not exist. Others cannot read a private one."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in specs.items():
        size = spec_bytes(specs[name])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    mode = 0o600 if is_private else 0o666
    with (
        writing(file, needed=offset),
        open(file, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as handle,
    ):
        handle.write(len(text).to_bytes(8, "little") + text)
        for name in specs:
            data = memoryview(read(name)).cast("B")
            if data.nbytes != spec_bytes(specs[name]):
                raise CheckpointError(f"{name} has {data.nbytes} bytes instead of {spec_bytes(specs[name])}")
            handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def publish(draft: Path, target: Path) -> None:
    """Give a finished file its name; raise FileExistsError rather than replace a file."""
    try:
        os.link(draft, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if target.exists():
            raise FileExistsError(f"{target} exists already") from None
        draft.rename(target)
    draft.unlink(missing_ok=True)


def copy_companions(source: Path, target: Path, patterns: Sequence[str] = COMPANION_FILES) -> None:
    """Copy the tokenizer, chat template, generation defaults and licence; existing files are kept."""
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(own_file(file), target / file.name)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_text(file: Path, text: str | bytes) -> None:
    """Write a new file and sync it to disk; nothing is left of one that cannot be written to its end."""
    data = text.encode() if isinstance(text, str) else text
    with writing(file, needed=len(data)):
        _write_new(file, data)


def _write_new(file: Path, data: bytes) -> None:
    handle = file.open("xb")
    try:
        with handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Write the names of a directory's files to disk."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
