"""The architecture page lists every package as its docstrings describe it."""

import re
from pathlib import Path

from docs.make_architecture import LAYERS, PAGE, ROOT, render, undocumented


def test_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page, "run python docs/make_architecture.py"


def test_every_module_has_a_docstring() -> None:
    assert undocumented() == []


def test_every_package_belongs_to_a_layer() -> None:
    found = {path.name for path in (ROOT / "sala").iterdir() if (path / "__init__.py").is_file()}
    assert found == {name for names in LAYERS.values() for name in names if name}


def test_the_tree_names_every_package_and_nothing_else() -> None:
    """A name is a package or module of the package that its line begins with, or of the root; # begins a comment."""
    named: set[str] = set()
    parent = ""
    for line in PAGE.read_text(encoding="utf-8").split("```\n")[1].splitlines():
        words = re.findall(r"[a-z_]+(?:/[a-z_]+)*", "" if line.startswith("--") else line.partition("#")[0])
        if words and not line.startswith(" "):
            parent = f"{words[0]}/" if (ROOT / "sala" / words[0]).is_dir() else ""
            words = [words[0], *(parent + word for word in words[1:])]
        else:
            words = [parent + word for word in words]
        for word in words:
            assert (ROOT / "sala" / word).is_dir() or (ROOT / "sala" / f"{word}.py").is_file(), word
            named.update(word.rsplit("/", depth)[0] for depth in range(word.count("/") + 1))
    packages = {file.parent.relative_to(ROOT / "sala").as_posix() for file in (ROOT / "sala").rglob("__init__.py")}
    modules = {file.stem for file in (ROOT / "sala").glob("*.py") if not file.stem.startswith("__")}
    assert (packages - {"."}) | modules <= named


def test_tables_are_not_broken() -> None:
    """Every row follows another row of its table or the line under its headings."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        lines = ["", *text.splitlines(), ""]
        rows = [at for at, line in enumerate(lines) if line.startswith("|")]
        for at in rows:
            is_first = not lines[at - 1].startswith("|")
            assert not is_first or re.fullmatch(r"(\|-+:?)+\|", lines[at + 1]), f"{page}: {lines[at][:80]}"


def test_glossary_and_contributing_name_existing_files() -> None:
    for page in ("docs/glossary.md", "CONTRIBUTING.md", "docs/concepts/life-of-a-token.md"):
        for name in re.findall(r"`(sala/[\w/]+(?:\.py|/))`", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page} names {name}"


def test_glossary_code_column_exists() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([\w*/]+(?:\.py|/))`", text):
        assert _exists(name), f"docs/glossary.md names {name}"


def _exists(name: str) -> bool:
    if name.startswith("sala/"):
        return any(ROOT.glob(name.rstrip("/")))
    package = ROOT / "sala"
    starts = [package, package / "backends" / "torch"]
    return any(any(start.glob(name.rstrip("/"))) for start in starts if isinstance(start, Path))
