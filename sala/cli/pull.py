"""`sala pull`: fetch a model from the hub into the models directory."""

import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from sala.cli import flags as s

if TYPE_CHECKING:
    from sala.models.catalog import Entry, Library

COMMIT = re.compile(r"[0-9a-f]{40,64}")


def pull(
    repo: Annotated[str, typer.Argument(help="organisation/name, or organisation/name@revision.", metavar="REPO")],
    hub: Annotated[str | None, typer.Option(help="Address of another hub.", envvar="SALA_HUB_URL")] = None,
) -> None:
    from sala.models.catalog import Library
    from sala.models.embedded import models_dir
    from sala.models.hub import AlreadyThere, Hub, parse_repo
    from sala.models.hub import pull as fetch

    repo_id, revision = parse_repo(repo)
    library = Library(models_dir())
    bar = DownloadBar(repo_id)
    try:
        with bar:
            path = fetch(library.directory, repo_id, revision, Hub(hub), bar, s.note)
    except AlreadyThere:
        entry = _find_there(library, repo_id, revision)
        s.note(f"{repo_id} is there already: {entry.path}")
        print(entry.path.name)
        return
    except KeyboardInterrupt:
        s.note(f"stopped; the same command goes on where it stopped: sala pull {repo}")
        raise
    s.note(f"ready: {path}")
    print(path.name)


def _find_there(library: "Library", repo_id: str, revision: str | None) -> "Entry":
    """What has the model's place; an error if it is another commit than the one asked for."""
    from sala.errors import SalaError

    entry = library.find(repo_id)
    if entry is None:
        raise SalaError(f"something else has the place of {repo_id} in the models directory", "move it away")
    if revision is not None and entry.revision != revision:
        at = entry.revision[:12] if entry.revision else "an unknown revision"
        if COMMIT.fullmatch(revision):
            raise SalaError(f"{repo_id} is there already, at {at}", f"remove it first: sala rm {repo_id}")
        s.note(f"it is at {at}; what {revision} is now was not asked; to fetch it anew: sala rm {repo_id}")
    return entry


class DownloadBar:
    """All files as one bar on a terminal; elsewhere a line at the beginning. It hears of every file once at first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._files: dict[str, tuple[int, int]] = {}
        self._there = 0  # bytes of an earlier download
        self._has_bar = sys.stderr.isatty()
        self._is_told = False

    def __enter__(self) -> "DownloadBar":
        if self._has_bar:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.progress import TransferSpeedColumn as Speed

            columns = (TextColumn("{task.fields[file]}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("pull", total=None, file=self._name)
            self._progress.start()
        return self

    def __call__(self, file: str, done: int, total: int) -> None:
        is_new = file not in self._files
        self._files[file] = (done, total)
        if is_new:
            self._there += done
            return
        if not self._is_told:
            self._is_told = True
            self._tell(sum(total for _, total in self._files.values()))
        if self._has_bar:
            self._progress.update(self._task, completed=sum(done for done, _ in self._files.values()), file=file)

    def _tell(self, size: int) -> None:
        """What there is to do. What is there already is no part of the speed."""
        if self._has_bar:
            self._progress.update(self._task, completed=self._there, total=size)
            return
        from sala.cli.show import size as show_size

        there = f", {show_size(self._there)} of it there" if self._there else ""
        s.note(f"fetching {self._name}: {show_size(size)} in {len(self._files)} files{there}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_bar:
            self._progress.stop()
