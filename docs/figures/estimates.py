"""Tables that are computed, not measured: memory of the 9B model, and the cost of a conversion.

The memory is what `sala estimate` and `sala show` print.
"""

from docs.figures.results import lines
from sala.backends import memory as mem
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.random import RELEASED
from sala.cli.estimate import CONTEXTS, MAC_CHUNK, MAC_TILE, MACS, MEMORIES
from sala.options.schema import length_label

GIB = 1 << 30
SHAPES = expected_tensors(RELEASED)
PARAMETERS = count_parameters(SHAPES)
WIDTHS = {"bf16": None, "8 bits": 8, "4 bits": 4}
BF16 = 2  # bytes of an element
CARDS, CARD_CHUNK = (8, 12, 16, 24), 2048  # GB; tokens of a prefill step
HOST = 64  # GiB of host memory for keys and values
TOKENS = 2.3e9  # of a conversion
SPEED = 0.4 * 990e12  # FLOP/s
GROWTH = 1.1  # parameters of the student, by those of its source


def cache() -> list[str]:
    """Keys and values with pooled keys, and the state, by tokens."""
    state = f"{mem.state_bytes(RELEASED) / (1 << 20):.0f} MiB"
    rows = []
    for count in (1 << 10, 128 << 10, 1 << 20):
        size = mem.cache_bytes(RELEASED, count, BF16)
        kept = f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"
        rows.append([f"{count:,}", kept, state])
    return lines(["tokens", "KV cache with pooled keys", "state"], rows)


def macs() -> list[str]:
    """The longest context on Macs, within what macOS lets its GPU hold."""
    rows = []
    for memory in MACS:
        cells = [f"{memory} GB"]
        for limit in (mem.gpu_limit(memory << 30), mem.raised_gpu_limit(memory << 30)):
            most = [
                mem.longest(RELEASED, PARAMETERS, limit, bits=bits, chunk=MAC_CHUNK, tile_bytes=MAC_TILE)
                for bits in WIDTHS.values()
            ]
            cells += [f"{limit / GIB:.1f}", *map(_longest, most), ""]
        rows.append(cells[:-1])
    return lines(["Mac", "GPU limit, GiB", *WIDTHS, "", "limit raised to", *WIDTHS], rows)


def weights() -> list[str]:
    """GiB on a CPU by weights and context."""
    rows = []
    for name, bits in WIDTHS.items():
        needed = [mem.estimate(RELEASED, PARAMETERS, ctx, bits=bits) for ctx in CONTEXTS]
        rows.append([name, *(f"{size / GIB:.1f}" for size in (needed[0].weights, *(one.total for one in needed)))])
    return lines(["weights", "alone", *map(length_label, CONTEXTS)], rows)


def small_cards() -> list[str]:
    """The longest context of one sequence on small GPUs, with weights in 4 bits and short prefill chunks."""
    rows = []
    for memory in CARDS:
        room = int(memory * mem.USABLE * GIB)
        kinds = (None, 1)  # bytes of an element of keys and values: as computed, FP8
        common = {"bits": 4, "chunk": CARD_CHUNK}
        most = [mem.longest(RELEASED, PARAMETERS, room, **common, kv_bytes=kind) for kind in kinds]
        for kind in kinds:
            host = {"kv_bytes": kind, "is_offloaded": True, "hot_bytes": mem.least_hot_bytes(RELEASED, BF16, kind)}
            most.append(mem.longest(RELEASED, PARAMETERS, room, HOST * GIB, **common, **host))
        rows.append([f"{memory} GB", f"{room / GIB:.1f}", *(_longest(tokens) for tokens in most)])
    homes = ["in host memory (`--kv-home host`)", "in host memory, FP8"]
    return lines(["card", "usable, GiB", "keys and values in bf16", "in FP8 (`--kv fp8`)", *homes], rows)


def contexts() -> list[str]:
    """The longest context by weights and memory."""
    room = {f"{memory} GB": int(memory * mem.USABLE * GIB) for memory in MEMORIES}
    rows = [
        [name, *(_longest(mem.longest(RELEASED, PARAMETERS, free, bits=bits)) for free in room.values())]
        for name, bits in WIDTHS.items()
    ]
    return lines(["", *room], rows)


def tuning() -> list[str]:
    """GiB of fine-tuning on one GPU, by method and length."""
    lengths = (4 << 10, 16 << 10, 64 << 10)
    methods = {"full, `--optimizer adamw-bf16`": ("full", "adamw-bf16"), "lora": ("lora", "adamw"),
               "qlora": ("qlora", "adamw")}  # fmt: skip
    rows = []
    for name, (method, optimizer) in methods.items():
        plans = [
            mem.Tuning(method=method, optimizer=optimizer, element_bytes=BF16, num_tokens=length) for length in lengths
        ]
        rows.append([name, *(f"{mem.estimate_tuning(RELEASED, SHAPES, plan).total / GIB:.0f}" for plan in plans)])
    return lines(["9B on one GPU, estimated, in GiB", *map(length_label, lengths)], rows)


def conversion() -> list[str]:
    """The cost of a conversion by the size of its source: arithmetic."""
    rows = []
    for size in (1, 8, 30):
        flops = (2 + 6) * size * 1e9 * TOKENS
        hours = flops / SPEED / 3600
        rows.append([
            f"{size}B", f"{flops:.1e}".replace("e+", "e"), f"{hours:.0f}", f"{16 * GROWTH * size:.0f} GB",
            f"{2 * size} GB",
        ])  # fmt: skip
    return lines(["source", "FLOPs", "GPU hours", "student", "teacher"], rows)


def _longest(count: int) -> str:
    if not count:
        return "–"
    return f"{count / (1 << 20):.3g}M" if count >= 1 << 20 else f"{count >> 10}K"


TABLES = {
    "cache-bytes": cache,
    "conversion-cost": conversion,
    "longest-contexts": contexts,
    "macs": macs,
    "small-cards": small_cards,
    "tuning-memory": tuning,
    "weights-memory": weights,
}
