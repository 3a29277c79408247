"""What a figure was drawn from, stored in the figure: a test finds those whose results or script have changed."""

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).parents[2]
KEY = "drawn-from"
COLOURS = 128  # of the palette
DPI = 150  # for a page on a screen; `--plot` of `sala eval` writes 300 for print


def digest(files: Iterable[str], values: str = "") -> str:
    """Return a digest of committed files, given relative to the repository, and of computed `values`."""
    whole = hashlib.sha256(values.encode())
    for name in sorted(files):
        whole.update(f"{name}\0".encode() + (ROOT / name).read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return whole.hexdigest()[:24]


def save_png(drawn: Figure | bytes, file: Path, source: str) -> None:
    """Write a figure, or the PNG of one, with a palette, and with the digest of what it was drawn from."""
    if isinstance(drawn, Figure):
        out = io.BytesIO()
        drawn.savefig(out, format="png", dpi=DPI)
        drawn = out.getvalue()
    picture = Image.open(io.BytesIO(drawn)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    info = PngInfo()
    info.add_text(KEY, source)
    picture.save(file, "PNG", optimize=True, pnginfo=info)


def read_digest(file: Path) -> str | None:
    """Return the digest in a PNG or an SVG; None if it has none."""
    if file.suffix == ".svg":
        _, found, rest = file.read_text(encoding="utf-8").partition(f"<!-- {KEY} ")
        return rest.partition(" -->")[0] if found else None
    with Image.open(file) as picture:
        value = picture.info.get(KEY)
    return None if value is None else str(value)


def mark_svg(text: str, source: str) -> str:
    """Return an SVG with the digest of what it was drawn from behind its first tag."""
    head, end, rest = text.partition(">")
    return f"{head}{end}\n<!-- {KEY} {source} -->{rest}"
