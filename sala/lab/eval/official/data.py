"""The data of benchmarks: copies in a directory, or downloaded by the datasets library."""

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sala.errors import InputError, MissingExtra, SalaError
from sala.lab.eval.documents import read_source

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class HubDataset:
    """Where a data set is on the Hub: arguments of datasets.load_dataset, or the address of a JSON file."""

    repo: str
    split: str = "train"
    config: str | None = None
    files: str | tuple[str, ...] | None = None
    is_text: bool = False  # each file is one text, whose lines are not rows


@dataclass
class Data:
    """Rows by name, from `directory` or the Hub; `used` says for the record what was read."""

    directory: Path | None = None
    used: dict[str, str] = field(default_factory=dict)
    _members: dict[str, Path] = field(default_factory=dict)  # of archives

    def rows(self, name: str, hub: HubDataset) -> list[dict[str, Any]]:
        """Return the rows of NAME.jsonl, .json or .parquet in the directory, or of the data set.

        Raise InputError or SalaError with both ways to get them if there is neither.
        """
        file = self.find(name)
        return self._download(name, hub) if file is None else self.read(name, file)

    def read(self, name: str, file: Path) -> list[dict[str, Any]]:
        """Return the rows of a file."""
        self._note(name, file)
        return [*_read_rows(file)]

    def find(self, name: str) -> Path | None:
        if self.directory is None:
            return None
        if not self.directory.is_dir():
            raise InputError(
                "data", f"{self.directory} is not a directory", "give one that holds the benchmark's files"
            )
        places = (self.directory / f"{name}{suffix}" for suffix in SUFFIXES)
        return next((place for place in places if place.is_file()), None)

    def object(self, name: str, url: str) -> Any:
        """Return the content of NAME.json in the directory, or of an address."""
        file = self.find(name)
        if file is None:
            try:
                file = Path(str(_datasets().DownloadManager().download(url)))
            except MissingExtra:
                raise
            except Exception as error:  # of the network
                raise self._missing(f"{name}.json", url, error) from None
        self._note(name, file)
        try:
            return json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("data", f"{file} is not JSON: {error}"[:200], "download it again") from None

    def unpack(self, name: str, url: str, wanted: Iterable[str]) -> None:
        """Find files of a TAR archive NAME in the directory, or at an address, of which only these files are kept."""
        own = None if self.directory is None else self.directory / name
        is_own = own is not None and own.is_file()
        source = str(own) if is_own else url
        lacking = set(wanted)
        if not lacking:
            return
        room = Path(f"{source}.files") if is_own else Path(_datasets().config.DOWNLOADED_DATASETS_PATH) / _key(url)
        self._members |= {one: room / one.replace("/", "--") for one in lacking}
        since = Path(source).stat().st_mtime if is_own else 0.0
        lacking -= {one for one in lacking if (file := self._members[one]).is_file() and file.stat().st_mtime >= since}
        try:
            for one, content in _read_archive(source, is_own) if lacking else ():
                if one in lacking:
                    _keep(content, self._members[one])
                    lacking.remove(one)
                if not lacking:
                    break
        except MissingExtra:
            raise
        except Exception as error:  # of the network, or of a broken archive
            if is_own:
                raise InputError("data", f"{own} cannot be read: {error}"[:200], "download it again") from None
            raise self._missing(name, url, error) from None
        if lacking:
            message = f"{source} has no {', '.join(sorted(lacking))}"
            raise InputError("data", message, "ask for fewer --tasks or --lengths")
        self.used[name] = source

    def unpacked(self, member: str) -> list[dict[str, Any]]:
        """Return the rows of a file of an archive."""
        return self.read(member, self._members[member])

    def texts(self, name: str, hub: HubDataset, column: str = "text") -> list[str]:
        """Return the texts of a directory or file NAME of the directory, or a column of a data set."""
        place = None if self.directory is None else self.directory / name
        if place is not None and place.is_dir():
            source = read_source(place)
            self.used[name] = source.name
            return source.documents
        return [str(row[column]) for row in self.rows(name, hub)]

    def _download(self, name: str, hub: HubDataset) -> list[dict[str, Any]]:
        files = list(hub.files) if isinstance(hub.files, tuple) else hub.files
        more = {"sample_by": "document"} if hub.is_text else {}
        try:
            found = _datasets().load_dataset(hub.repo, hub.config, split=hub.split, data_files=files, **more)
        except MissingExtra:
            raise
        except Exception as error:  # the library raises errors of many kinds for a network that is not there
            raise self._missing(f"{name}.jsonl (or .json, .parquet)", hub.repo, error) from None
        self.used[name] = f"{hub.repo} {getattr(found, '_fingerprint', '')}".strip()
        return [dict(row) for row in found]

    def _missing(self, file: str, source: str, error: Exception) -> SalaError:
        line = " ".join(str(error).split())[:160]
        remedy = f"go online, or put {file} into a directory: --data DIR"
        return SalaError(f"{source} cannot be downloaded: {line}", remedy)

    def _note(self, name: str, file: Path) -> None:
        with file.open("rb") as handle:
            self.used[name] = f"{file.name} {hashlib.file_digest(handle, 'sha256').hexdigest()[:12]}"


def _key(url: str) -> str:
    return f"sala-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _read_archive(source: str, is_file: bool) -> Iterator[tuple[str, Any]]:
    """Yield the names of the files in a TAR archive and the open files."""
    if not is_file:
        yield from _datasets().StreamingDownloadManager().iter_archive(source)
        return
    with tarfile.open(source, "r|*") as archive:
        for member in archive:
            if member.isfile():
                yield member.name, archive.extractfile(member)


def _keep(content: Any, file: Path) -> None:
    """Copy an open file; the copy is whole, or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    with draft.open("wb") as copy:
        shutil.copyfileobj(content, copy, 1 << 20)
    draft.replace(file)


def _read_rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        found = _datasets().load_dataset("parquet", data_files=str(file), split="train")
        yield from (dict(row) for row in found)
        return
    try:
        text = file.read_text("utf-8")
        rows = (
            [json.loads(line) for line in text.split("\n") if line.strip()]
            if file.suffix == ".jsonl"
            else json.loads(text)
        )
    except (OSError, ValueError) as error:
        raise InputError("data", f"{file} cannot be read: {error}"[:200], "give JSON, one object per line") from None
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, dict):
            raise InputError("data", f"{file} has a row that is not an object", "give a list of JSON objects")
        yield row


def need(row: dict[str, Any], *names: str) -> list[Any]:
    """Return values of a row; raise InputError if one is not there."""
    lacking = [name for name in names if row.get(name) is None]
    if lacking:
        message = f"has a row without {', '.join(lacking)}"
        raise InputError("data", message, f"rows of this benchmark have {', '.join(names)}")
    return [row[name] for name in names]


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "eval") from None
    return datasets
