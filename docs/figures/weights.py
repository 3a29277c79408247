"""The weights of the embedded model that committed results are of.

A result is of older weights if the version that it names is earlier than `SINCE`. Later versions have the same weights
and other defaults of sampling, which greedy measurements do not use.
"""

import hashlib
import json
import lzma
import re
from pathlib import Path

from docs.figures.results import ROOT
from sala.checkpoint.overlay import overlay_files

MODEL = ROOT / "models" / "smol-sala"
SINCE = "0.5"  # the first version with the weights of today
DIGEST = "634ae916977cd4a6e635af71"  # of them: whoever changes the weights sets both
NAMED = re.compile(r"smol-sala-(\d+(?:\.\d+)+)")


def digest() -> str:
    """Return a digest of all that the weights are made of, and of the configuration."""
    origin = json.loads((MODEL / "base.json").read_text(encoding="utf-8"))
    whole = hashlib.sha256(origin["member_sha256"].encode())
    for file in overlay_files(MODEL):
        whole.update(lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes())
    whole.update((MODEL / "config.json").read_bytes().replace(b"\r\n", b"\n"))
    return whole.hexdigest()[:24]


def versions_in(results: Path) -> list[str]:
    """Return the versions of the embedded model that results name."""
    return sorted(set(NAMED.findall(results.read_text(encoding="utf-8"))), key=_order)


def is_of_older_weights(results: Path) -> bool:
    """Return whether there are no results, or results that are not of the weights of today."""
    versions = versions_in(results) if results.is_file() else []
    return not versions or any(_order(version) < _order(SINCE) for version in versions)


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
