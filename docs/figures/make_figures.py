"""Draws the figures of the documentation as SVG, from the package's own numbers: python docs/figures/make_figures.py"""

from pathlib import Path

from sala.backends.memory import cache_bytes, state_bytes
from sala.checkpoint.random import RELEASED

HERE = Path(__file__).parent
INK, SOFT = "#24292f", "#6e7781"
SPARSE, LIGHTNING, PAPER = "#e8a33d", "#4a90c2", "#ffffff"
FONT = 'font-family="ui-sans-serif, system-ui, sans-serif"'


def text(
    x: float, y: float, words: str, size: int = 13, colour: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}"'
    return f'<text {place} fill="{colour}" text-anchor="{anchor}"{weight}>{words}</text>'


def box(x: float, y: float, w: float, h: float, fill: str, radius: float = 3, extra: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius}" fill="{fill}" {extra}/>'


def save(file: Path, width: int, height: int, parts: list[str]) -> None:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>'
    body = [box(0, 0, width, height, PAPER, 6), *parts]
    file.write_text("\n".join([head, *body, "</svg>\n"]))


def layers(file: Path) -> None:
    """The order of the mixers, and what each kind keeps of the past."""
    parts = [text(24, 32, "32 layers of MiniCPM-SALA", 16, bold=True)]
    for index, mixer in enumerate(RELEASED.mixers):
        is_sparse = mixer == "sparse"
        x = 24 + index * 25.5
        height = 64 if is_sparse else 40
        parts.append(box(x, 118 - height, 21, height, SPARSE if is_sparse else LIGHTNING))
        if is_sparse or index in (1, 31):
            parts.append(text(x + 10.5, 134, str(index), 10, SOFT, "middle"))
    mib, gib = 1 << 20, 1 << 30
    million = cache_bytes(RELEASED, 1 << 20, 2) / gib
    parts += [
        box(24, 154, 14, 14, SPARSE),
        text(46, 166, "8 sparse (InfLLM-v2): every query picks 96 blocks of 64 tokens", 13),
        text(46, 184, f"keeps keys and values: 8.3 KiB per token, {million:.1f} GiB for a million", 12, SOFT),
        box(478, 154, 14, 14, LIGHTNING),
        text(500, 166, "24 lightning: a matrix per head that forgets slowly", 13),
        text(500, 184, f"keeps {state_bytes(RELEASED) // mib} MiB in all, however long the text is", 12, SOFT),
    ]
    save(file, 864, 204, parts)


def blocks(file: Path) -> None:
    """What one query sees: the first block, the recent ones, and the best of the rest."""
    count, chosen = 48, {4, 11, 12, 19, 25, 30}
    parts = [text(24, 32, "What a query sees in a sparse layer", 16, bold=True)]
    for index in range(count):
        is_local, is_first = index >= count - 9, index == 0
        fill = INK if is_first else SPARSE if is_local else "#8a6fc0" if index in chosen else "#e6e8eb"
        parts.append(box(24 + index * 16.6, 56, 14, 34, fill, 2))
    parts += [
        text(31, 108, "first", 11, SOFT, "middle"),
        text(330, 108, "the best 62 by pooled keys, anew for every token and kv head", 11, "#8a6fc0", "middle"),
        text(748, 108, "last 33 blocks", 11, "#b57a1c", "middle"),
        text(24, 140, "← past", 11, SOFT),
        text(820, 140, "query", 11, SOFT, "end"),
        text(
            432,
            140,
            "never more than 96 blocks = 6,144 tokens, at any length; below 8,192 tokens everything is seen",
            12,
            INK,
            "middle",
        ),
    ]
    save(file, 864, 158, parts)


def token(file: Path) -> None:
    """Life of a token: who hands what to whom."""
    steps = [
        ("cli", "prompt"),
        ("text/workers", "one line of text"),
        ("text/tokenizer", "token ids"),
        ("engine", "which tokens run next"),
        ("protocol", "Plan of Rows"),
        ("backends/torch", "executor → model → ops"),
        ("sampler", "one token"),
        ("text/answer", "characters, stops"),
    ]
    parts = [text(24, 32, "Life of a token", 16, bold=True)]
    for index, (room, what) in enumerate(steps):
        x, y = 24 + (index % 4) * 210, 56 + (index // 4) * 84
        fill = "#fdf3e1" if room in ("engine", "protocol") else "#e9f2f9"
        parts += [
            box(x, y, 180, 54, fill, 6, f'stroke="{SOFT}" stroke-width="0.6"'),
            text(x + 12, y + 23, room, 13, bold=True),
            text(x + 12, y + 42, what, 12, SOFT),
        ]
        if index % 4 < 3:
            parts.append(text(x + 195, y + 33, "→", 15, SOFT, "middle"))
    parts.append(text(864 / 2, 128, "↓ then back to the engine for the next token", 11, SOFT, "middle"))
    save(file, 864, 214, parts)


def arrow(x: float, y1: float, y2: float, colour: str) -> str:
    tip = 7 if y2 > y1 else -7
    head = (
        f'<path d="M{x - 5} {y2 - tip} L{x} {y2} L{x + 5} {y2 - tip}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )
    return f'<path d="M{x} {y1} V{y2}" stroke="{colour}" stroke-width="2"/>' + head


def tiers(file: Path) -> None:
    """Device, host memory and disk: what moves down, and what comes up."""
    state, page = state_bytes(RELEASED) >> 20, cache_bytes(RELEASED, 64, 2) >> 10
    rows = (
        (
            "Device",
            "--cache-memory",
            [f"slots: states of {state} MiB", f"pages: 64 tokens, {page} KiB, shared"],
            SPARSE,
        ),
        ("Host memory", "--cache-ram", ["a copy per snapshot:", "its pages and its state"], LIGHTNING),
        (
            "Disk",
            "--cache-dir, --cache-disk",
            ["a file per prefix of 256 tokens or more,", "found after a restart"],
            SOFT,
        ),
    )
    parts = [text(24, 32, "The tiers of the cache", 16, bold=True)]
    for index, (name, options, colour, *lines) in enumerate(rows):
        y = 52 + index * 112
        parts += [box(24, y, 330, 64, colour, 6, 'fill-opacity="0.18"'), box(24, y, 6, 64, colour)]
        parts += [text(44, y + 26, name, 14, bold=True), text(44, y + 46, options, 12, SOFT)]
        parts += [text(376, y + 26 + 19 * number, line, 12) for number, line in enumerate(lines)]
    for y, down, up in (
        (118, "evicted: tips and branching points", "admitted: restored into the request's pages and slot"),
        (230, "evicted; and each long prompt at its end", "read by a thread of its own; others go on"),
    ):
        parts += [arrow(60, y, y + 42, INK), text(74, y + 26, down, 12)]
        parts += [arrow(376, y + 42, y, INK), text(390, y + 26, up, 12)]
    save(file, 740, 360, parts)


DRAWN = {"layers.svg": layers, "blocks.svg": blocks, "life-of-a-token.svg": token, "tiers.svg": tiers}


if __name__ == "__main__":
    for name, draw in DRAWN.items():
        draw(HERE / name)
