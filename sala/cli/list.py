"""`sala list`: the models on this machine."""

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sala.cli import flags as s
from sala.cli.outputs import print_json, print_table, size

if TYPE_CHECKING:
    from sala.models.catalog import Entry


def list(as_json: s.AsJson = False) -> None:
    from sala.models.catalog import Entry, Library, embedded_folder
    from sala.models.embedded import EMBEDDED, models_dir

    library = Library(models_dir())
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
