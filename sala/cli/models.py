"""`sala list`, `pull` and `rm`: the models on this machine."""

import re
import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sala.cli import flags as s
from sala.cli.outputs import print_json, print_table, size
from sala.cli.progress import ProgressBar
from sala.errors import InputError, SalaError
from sala.server.settings import Settings

if TYPE_CHECKING:
    from sala.models.catalog import Entry, Library

COMMIT = re.compile(r"[0-9a-f]{40,64}")


Place = Annotated[Settings, s.Use(only=("models_dir",))]
Source = Annotated[Settings, s.Use(only=("models_dir", "hub_url", "hub_hosts"), spellings={"hub_url": "--hub"})]


@s.derived
def list(*, where: Place, as_json: s.AsJson = False) -> None:
    from sala.models.catalog import Entry, Library, embedded_folder
    from sala.models.embedded import EMBEDDED

    library = Library(where.models_dir)
    entries = library.list()
    if not any(entry.id == EMBEDDED for entry in entries) and (folder := embedded_folder()) is not None:
        entries.insert(0, Entry(EMBEDDED, library.directory / folder, None, None, None, 0, None, True))
    if as_json:
        print_json([_facts(entry) for entry in entries])
        return
    if entries:
        headings = ("name", "size", "quantization", "downloaded", "from")
        print_table("", headings, [_cells(entry) for entry in entries], (True, False, True, True, True))
    if not any(entry.size_bytes for entry in entries):
        s.note("download a model: sala pull openbmb/MiniCPM-SALA")
    for partial in library.partials():
        s.note(
            f"{partial.id}: {size(partial.size_bytes)} of an unfinished download; resume: sala pull {partial.id}; "
            f"remove: sala rm {partial.id}"
        )


def _facts(entry: "Entry") -> dict[str, Any]:
    facts = asdict(entry) | {"path": str(entry.path) if entry.size_bytes else None}
    del facts["is_ours"]
    return facts | {"is_assembled": entry.size_bytes > 0}


def _cells(entry: "Entry") -> tuple[str, ...]:
    when = datetime.fromtimestamp(entry.downloaded_at).strftime("%Y-%m-%d %H:%M") if entry.downloaded_at else "–"
    origin = entry.repo_id or ("–" if entry.size_bytes else "not assembled yet: sala setup")
    return entry.id, size(entry.size_bytes) if entry.size_bytes else "–", describe(entry.quantization), when, origin


def describe(quantization: dict[str, Any] | None) -> str:
    if not quantization:
        return "–"
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if isinstance(bits, int) and isinstance(group, int):
        return f"{bits} bits, groups of {group}" if group > 0 else f"{bits} bits, one group per row"
    return str(quantization.get("quant_method") or quantization.get("method") or "yes")[:20]


@s.derived
def pull(
    *,
    repo: Annotated[str, s.argument("organisation/name, or organisation/name@revision.", metavar="REPO")],
    source: Source,
) -> None:
    from sala.models.catalog import Library
    from sala.models.download import pull as fetch
    from sala.models.hub import AlreadyThere, Hub, parse_repo

    repo_id, revision = parse_repo(repo)
    library, hub = Library(source.models_dir), Hub(source.hub_url, source.hub_hosts)
    try:
        with ProgressBar("B", is_kept=False, is_quiet=True) as bar:
            progress = DownloadProgress(repo_id, bar)
            path = fetch(library.directory, repo_id, revision, hub, progress, s.note)
    except AlreadyThere:
        entry = _find_there(library, repo_id, revision)
        s.note(f"{repo_id} is there already: {entry.path}")
        print(entry.id)
        return
    except KeyboardInterrupt:
        s.note(f"stopped; the same command resumes the download: sala pull {repo}")
        raise
    s.note(f"ready: {path}")
    print(path.name)


def _find_there(library: "Library", repo_id: str, revision: str | None) -> "Entry":
    """Return the model that is there; raise SalaError if it is not the revision that was asked for."""
    entry = library.find_exactly(repo_id)
    if entry is None:
        raise SalaError(f"the models directory has something else under the name of {repo_id}", "move it away")
    if revision is not None and entry.revision != revision:
        at = entry.revision[:12] if entry.revision else "an unknown revision"
        if COMMIT.fullmatch(revision):
            raise SalaError(f"{repo_id} is there already, at {at}", f"remove it first: sala rm {repo_id}")
        s.note(f"it is at {at}, which may be older than {revision} on the hub; to download it again: sala rm {repo_id}")
    return entry


class DownloadProgress:
    """All files as one bar on a terminal; elsewhere one line at the beginning."""

    def __init__(self, name: str, bar: ProgressBar) -> None:
        self._name, self._bar = name, bar
        self._files: dict[str, tuple[int, int]] = {}
        self._there = 0  # bytes that an earlier download left
        self._is_told = False

    def __call__(self, file: str, done: int, total: int) -> None:
        is_new = file not in self._files
        self._files[file] = (done, total)
        if is_new:
            self._there += done
            return
        num_bytes = sum(total for _, total in self._files.values())
        if not self._is_told:
            self._is_told = True
            # bytes that are there already do not count for the speed
            self._bar(self._name, self._there, num_bytes)
            there = f", {size(self._there)} of it there" if self._there else ""
            if not self._bar.is_shown:
                s.note(f"downloading {self._name}: {size(num_bytes)} in {len(self._files)} files{there}")
        self._bar(self._name, sum(done for done, _ in self._files.values()), num_bytes)
        self._bar.rename(self._name, file)


@s.derived
def rm(
    *,
    name: Annotated[str, s.argument("Name as in `sala list`, or organisation/name.", metavar="NAME")],
    where: Place,
    yes: Annotated[bool, s.flag("Do not ask.", "--yes", "-y")] = False,
) -> None:
    from sala.models.catalog import Library
    from sala.models.embedded import EMBEDDED

    library = Library(where.models_dir)
    entry = library.find(name)
    if entry is not None and not yes:
        if not sys.stdin.isatty():
            raise InputError("--yes", "is required when standard input is not a terminal")
        typer.confirm(f"remove {entry.id} ({size(entry.size_bytes)}) from {library.directory}?", abort=True, err=True)
    library.delete(name if entry is None else entry.id)
    s.note(f"{name if entry is None else entry.id} removed")
    if entry is not None and entry.id == EMBEDDED:
        s.note("it is assembled again when it is used")
