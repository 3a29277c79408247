"""Write the package tables of docs/concepts/life-of-a-token.md from the docstrings: python docs/make_architecture.py

Everything between the two markers is generated; the rest of the page is written by hand.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "concepts" / "life-of-a-token.md"
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
LAYERS = {
    "Command line": ("cli",),
    "Lab": ("lab",),
    "Plug-ins": ("plugins",),
    "Serving": ("server", "models", "documents"),
    "Core": ("", "options", "llm", "engine", "text", "backends", "checkpoint"),
}
INTRODUCTIONS = {
    "Command line": "Reads flags and files, prints results. Each command has a module and imports what it needs.",
    "Lab": "For researchers. Nothing below imports it.",
    "Plug-ins": "The model inside other engines and libraries.",
    "Serving": "The HTTP server, the models it offers, and the documents that people ask about.",
    "Core": "Everything that a token passes through.",
}


def summary(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`>])", first)[0].rstrip(":") if first else ""


def packages(name: str) -> list[Path]:
    """Return a top-level package and its subpackages; the empty name is the root alone."""
    top = ROOT / "sala" / name
    if not name:
        return [top]
    return [top, *sorted(path.parent for path in top.rglob("__init__.py") if path.parent != top)]


def tables() -> str:
    lines = [BEGIN, ""]
    for layer, names in LAYERS.items():
        lines += [f"### {layer}", "", INTRODUCTIONS[layer], "", "| module | purpose |", "|---|---|"]
        for name in names:
            for package in packages(name):
                lines += _rows(package)
        lines.append("")
    return "\n".join([*lines, END])


def _rows(package: Path) -> list[str]:
    folder = package.relative_to(ROOT).as_posix()
    rows = [f"| **`{folder}/`** | **{summary(package / '__init__.py')}** |"]
    for file in sorted(package.glob("*.py")):
        if file.stem not in ("__init__", "__main__"):
            rows.append(f"| `{file.stem}` | {summary(file)} |")
    return rows


def render(page: str) -> str:
    """Return the page with its generated part replaced."""
    before, rest = page.split(BEGIN)
    return before + tables() + rest.split(END)[1]


def undocumented() -> list[str]:
    """Return the modules and packages that have no docstring."""
    files = (ROOT / "sala").rglob("*.py")
    return sorted(file.relative_to(ROOT).as_posix() for file in files if not summary(file) and file.stem != "__main__")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
