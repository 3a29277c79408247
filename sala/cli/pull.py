"""`sala pull`: download a model from a hub into the models directory."""

import re
from typing import TYPE_CHECKING, Annotated

from sala.cli import flags as s
from sala.cli.outputs import size as show_size
from sala.cli.progress import ProgressBar

if TYPE_CHECKING:
    from sala.models.catalog import Entry, Library

COMMIT = re.compile(r"[0-9a-f]{40,64}")


def pull(
    repo: Annotated[str, s.argument("organisation/name, or organisation/name@revision.", metavar="REPO")],
    hub: Annotated[str | None, s.flag("Another hub: its address, or modelscope.", envvar="SALA_HUB_URL")] = None,
) -> None:
    from sala.models.catalog import Library
    from sala.models.download import pull as fetch
    from sala.models.embedded import models_dir
    from sala.models.hub import AlreadyThere, Hub, parse_repo

    repo_id, revision = parse_repo(repo)
    library = Library(models_dir())
    try:
        with ProgressBar("B", is_kept=False, is_quiet=True) as bar:
            progress = DownloadProgress(repo_id, bar)
            path = fetch(library.directory, repo_id, revision, Hub(hub), progress, s.note)
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
    from sala.errors import SalaError

    entry = library.find(repo_id)
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
        size = sum(total for _, total in self._files.values())
        if not self._is_told:
            self._is_told = True
            # bytes that are there already do not count for the speed
            self._bar(self._name, self._there, size)
            there = f", {show_size(self._there)} of it there" if self._there else ""
            if not self._bar.is_shown:
                s.note(f"downloading {self._name}: {show_size(size)} in {len(self._files)} files{there}")
        self._bar(self._name, sum(done for done, _ in self._files.values()), size)
        self._bar.rename(self._name, file)
