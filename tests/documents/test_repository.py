"""Repositories are read as `git ls-files` lists them, whatever form their index has, and nothing in them is run."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from sala.documents import repository
from sala.documents.find import find_files
from sala.documents.reader import read_documents
from sala.documents.repository import read_index

FILES = ("a.txt", "keep.cfg", "lost.cfg", "build/kept.txt", "build/lost.txt", "build/deep/kept.txt", "vendor/x.txt",
    "vendor/é 1.txt", "sub/.hidden", "sub/a.cfg", f"sub/{'long' * 40}.txt")  # fmt: skip
TRACKED = ("keep.cfg", "build/kept.txt", "build/deep/kept.txt", "vendor/é 1.txt", f"sub/{'long' * 40}.txt")


def git(directory: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": "/nowhere"}
    more = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    command = ["git", "-C", str(directory), *more, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def make(root: Path, *options: str) -> Path:
    root.mkdir()
    git(root, "init", "-q", *options)
    for name in FILES:
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(f"text of {name}")
    (root / ".gitignore").write_text("*.cfg\n/build/\nvendor/\n")
    git(root, "add", "-f", *TRACKED)
    return root


def listed(root: Path) -> set[str]:
    names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return {f"{root.name}/{name}" for name in names if name and (root / name).is_file()}


def names_below(directory: Path) -> set[str]:
    return {name for name, _ in find_files(str(directory), directory.name).files}


@pytest.mark.parametrize(
    "form", ["version 2", "version 3", "version 4", "sha256", "after a commit", "without a checksum"]
)
def test_tracked_files_are_read_although_ignored(tmp_path: Path, form: str) -> None:
    root = make(tmp_path / "repo", *(["--object-format=sha256"] if form == "sha256" else []))
    if form == "version 3":
        git(root, "add", "--intent-to-add", "a.txt")
    elif form == "version 4":
        git(root, "update-index", "--index-version", "4")
    elif form == "after a commit":  # with extensions
        git(root, "commit", "-q", "-m", "x")
        git(root, "status", "--short")
    elif form == "without a checksum":
        index = root / ".git" / "index"
        index.write_bytes(index.read_bytes()[:-20] + bytes(20))
    version = {"version 3": 3, "version 4": 4}.get(form, 2)
    assert (root / ".git" / "index").read_bytes()[4:8] == bytes([0, 0, 0, version])
    assert names_below(root) == listed(root)
    assert {f"repo/{name}" for name in TRACKED} < listed(root)
    assert names_below(root / "build") == {"build/kept.txt", "build/deep/kept.txt"}


def test_one_line_says_how_many_files_are_ignored(tmp_path: Path) -> None:
    root = make(tmp_path / "repo")
    (root / "out").mkdir()
    (root / "out" / "x.txt").write_text("x")
    (root / ".git" / "info" / "exclude").write_text("out\n")
    left_out = [str(one) for one in read_documents([root]).left_out]
    assert left_out == ["4 files and 1 directory in repo: left out: Git ignores them"]
    git(root, "add", "-f", "lost.cfg", "build", "vendor", "out")
    assert [str(one) for one in read_documents([root]).left_out] == ["1 file in repo: left out: Git ignores them"]


def test_repositories_inside_have_rules_and_an_index_of_their_own(tmp_path: Path) -> None:
    inner, outer = make(tmp_path / "inner"), make(tmp_path / "outer")
    git(inner, "add", ".gitignore")
    git(inner, "commit", "-q", "-m", "x")
    git(outer, "submodule", "--quiet", "add", "-f", str(inner), "vendor/inner")  # where the outer one ignores all
    (outer / "vendor" / "inner" / "b.cfg").write_text("ignored")
    found = names_below(outer)
    assert {name for name in found if not name.startswith("outer/vendor/inner/")} == listed(outer)
    assert {f"outer/vendor/inner/{name}" for name in TRACKED} <= found
    assert "outer/vendor/inner/b.cfg" not in found
    plain = {name for name in names_below(tmp_path) if name.startswith(f"{tmp_path.name}/inner/")}
    assert plain == {f"{tmp_path.name}/{name}" for name in listed(inner)}
    tree = tmp_path / "tree"
    git(inner, "worktree", "add", "-q", str(tree))
    (inner / ".git" / "info" / "exclude").write_text("*.log\n")
    (tree / "a.log").write_text("x")
    assert names_below(tree) == listed(tree) == {f"tree/{name}" for name in (*TRACKED, ".gitignore")}


def test_an_index_that_cannot_be_parsed_is_said(tmp_path: Path) -> None:
    root = make(tmp_path / "repo")
    git(root, "update-index", "--split-index")
    found = find_files(str(root), "repo")
    assert "repo/keep.cfg" not in dict(found.files)
    assert "repo/a.txt" in dict(found.files)
    line = str(found.left_out[-1])
    assert line.startswith(
        "repo/.git/index: left out: it is split; `git update-index --no-split-index` joins it; what Git"
    )
    git(root, "update-index", "--no-split-index")
    assert names_below(root) == listed(root)
    (root / ".git" / "index").write_bytes(b"DIRC")
    assert ".git/index: left out: it is damaged" in str(find_files(str(root / "sub"), "sub").left_out[-1])


@pytest.mark.parametrize("version", [2, 4])
def test_a_damaged_index_is_an_error_and_nothing_else(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path / "repo")
    git(root, "update-index", "--index-version", str(version))
    data = (root / ".git" / "index").read_bytes()
    names = read_index(data)
    for end in range(len(data)):
        with pytest.raises(ValueError, match="damaged"):
            read_index(data[:end])
    chance = random.Random(0)
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(data))] = chance.randrange(256)
        try:
            assert len(read_index(bytes(changed))) == len(names)
        except ValueError:
            continue
    monkeypatch.setattr(repository, "MAX_NAME_BYTES", 30)
    with pytest.raises(ValueError, match="its names have more than"):
        read_index(data)


def test_nothing_that_a_repository_names_is_run_or_asked(tmp_path: Path) -> None:
    root = make(tmp_path / "repo")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'it-ran'}\n")
    program.chmod(0o755)
    for option in ("core.fsmonitor", "core.hooksPath", "core.pager", "core.sshCommand"):
        git(root, "config", option, str(program))
    (root / ".git" / "index").unlink()
    os.mkfifo(root / ".git" / "index")
    (root / "other").mkdir()
    (root / "other" / ".git").write_text("gitdir: //192.0.2.1/share\n")
    assert {f"repo/{name}" for name in ("a.txt", "sub/.hidden")} < {
        one.name for one in read_documents([root]).documents
    }
    assert not (tmp_path / "it-ran").exists()
