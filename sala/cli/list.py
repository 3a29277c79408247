"""`sala list`: the models on this machine."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sala.cli import flags as s

if TYPE_CHECKING:
    from sala.models.catalog import Entry


def list(as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False) -> None:
    from sala.models.catalog import Entry, Library, embedded_folder
    from sala.models.embedded import EMBEDDED, models_dir

    library = Library(models_dir())
    entries = library.list()
    if not any(entry.id == EMBEDDED for entry in entries) and (folder := embedded_folder()) is not None:
        entries.insert(0, Entry(EMBEDDED, library.directory / folder, None, None, None, 0, None, True))
    if as_json:
        print(json.dumps([_facts(entry) for entry in entries], ensure_ascii=False))
        return
    if entries:
        _print(entries)
    if not any(entry.size_bytes for entry in entries):
        s.note("download a model: sala pull openbmb/MiniCPM-SALA")
    from sala.cli.show import size

    for partial in library.partials():
        s.note(
            f"{partial.id}: {size(partial.size_bytes)} of an unfinished download; resume: sala pull {partial.id}; "
            f"remove: sala rm {partial.id}"
        )


def _facts(entry: "Entry") -> dict[str, Any]:
    return {
        "id": entry.id,
        "path": str(entry.path) if entry.size_bytes else None,
        "repo_id": entry.repo_id,
        "revision": entry.revision,
        "quantization": entry.quantization,
        "size_bytes": entry.size_bytes,
        "downloaded_at": entry.downloaded_at,
        "is_assembled": entry.size_bytes > 0,
    }


def _print(entries: "Sequence[Entry]") -> None:
    from rich.table import Table
    from rich.text import Text

    from sala.cli.show import open_console, size

    console = open_console()
    is_short = max(len(entry.id) for entry in entries) <= console.width // 2
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("name", "size", "quantization", "downloaded", "from"):
        is_whole = name == "name" and is_short
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=is_whole, overflow="fold")
    for entry in entries:
        when = datetime.fromtimestamp(entry.downloaded_at).strftime("%Y-%m-%d %H:%M") if entry.downloaded_at else "–"
        origin = entry.repo_id or ("–" if entry.size_bytes else "not assembled yet: sala setup")
        weight = size(entry.size_bytes) if entry.size_bytes else "–"
        cells = (entry.id, weight, describe(entry.quantization), when, origin)
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)


def describe(quantization: dict[str, Any] | None) -> str:
    if not quantization:
        return "–"
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if isinstance(bits, int) and isinstance(group, int):
        return f"{bits} bits, groups of {group}" if group > 0 else f"{bits} bits, one group per row"
    method = str(quantization.get("quant_method") or quantization.get("method") or "yes")
    return "".join(char for char in method if char.isprintable())[:20]
