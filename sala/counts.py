"""Counts as people write them: 4096, 128k, 1M."""

import re

UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


def read_count(text: str | int) -> int:
    """A whole number with an optional unit: 128k = 128,000, 128K = 131,072, 1m, 1M. ValueError says what is wrong."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(text).strip(), re.ASCII)
    if found is None or len(found[1]) > 18:
        raise ValueError(f"{str(text)[:40]!r} is no count; write 4096, 128k or 1M")
    return int(float(found[1]) * UNITS[found[2]])
