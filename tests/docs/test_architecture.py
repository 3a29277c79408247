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
