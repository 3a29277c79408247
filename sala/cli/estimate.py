"""`sala estimate`: the memory of a context, and what fits into this machine or others."""

from dataclasses import asdict
from typing import Annotated, Any

from sala.backends import memory as mem
from sala.backends.memory import Estimate, Tuning, TuningEstimate
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.cli import flags as s
from sala.cli.generate import warn_if_untrained
from sala.cli.outputs import print_json, print_table, size
from sala.config import SalaConfig
from sala.errors import InputError
from sala.options import Options
from sala.quantization_config import GROUP_SIZES

WIDTHS = (None, 8, 4)  # bits of the table's rows; None: not quantized
CONTEXTS = (32 << 10, 128 << 10, 512 << 10, 1 << 20)
MEMORIES = (8, 16, 24, 32)  # GiB
MACS = (8, 16, 24, 32, 48, 64, 128)  # GiB
MAC_CHUNK, MAC_TILE = 2048, 256 << 20  # prefill chunk of the MLX backend, and its largest work buffer


@s.derived
def estimate(
    *,
    model: Annotated[str | None, s.argument("Checkpoint directory.", envvar="SALA_MODEL")] = None,
    shape: Annotated[str | None, s.flag("No checkpoint: the shapes of the released model, 9b.")] = None,
    batch: Annotated[int, s.flag("Sequences at a time.", min=1)] = 1,
    bits: Annotated[int | None, s.flag("Weights quantized to 4 or 8 bits.")] = None,
    group_size: Annotated[int, s.flag("Weights that share a scale: 32, 64 or 128.")] = 64,
    chunk: Annotated[int, s.count_flag("Tokens of a prompt at a time; 8192 on a GPU.")] = 256,
    memory: Annotated[int | None, s.count_flag("Bytes to fit into, e.g. 24G.")] = None,
    tp: Annotated[int, s.flag("GPUs that share every layer: what each of them holds.", min=1)] = 1,
    finetune: Annotated[
        str | None, s.flag("What fine-tuning takes instead: full, lora or qlora, on rows of --ctx tokens.")
    ] = None,
    rank: Annotated[int, s.flag("Rank of the adapter, with --finetune.", min=1)] = 16,
    optimizer: Annotated[str, s.flag("adamw, adamw-bf16, adafactor or adamw-8bit, with --finetune.")] = "adamw",
    table: Annotated[bool, s.flag("Bits by contexts, and what 8 to 32 GB hold.", "--table")] = False,
    macs: Annotated[bool, s.flag("What Macs of 8 to 128 GB hold, by bits.", "--macs")] = False,
    as_json: s.AsJson = False,
    options: Annotated[
        Options, s.Use(only=("ctx", "kv", "snapshots", "dtype"), defaults={"ctx": 131072, "snapshots": 1})
    ],
) -> None:
    import psutil

    if bits is not None:
        s.one_of("bits", bits, (4, 8))
    s.one_of("group-size", group_size, GROUP_SIZES)
    config, parameters, stored = _find(model, shape)
    ctx = options.ctx or config.max_position_embeddings
    free = psutil.virtual_memory().available if memory is None else memory
    if finetune is not None:
        tuning, dtype = _tuning(
            finetune, optimizer, options.dtype, num_tokens=ctx, batch=batch, rank=rank, bits=bits or 4
        )
        facts = {"finetune": finetune, "ctx": ctx, "batch": batch, "dtype": dtype}
        title = f"{finetune} fine-tuning with {optimizer}, weights in {dtype}, {batch} row(s) of {ctx:,} tokens"
        _show_parts(title, facts, mem.estimate_tuning(config, expected_tensors(config), tuning), free, as_json)
        return
    if config.num_attention_heads % tp or config.lightning_nh % tp:
        raise InputError("tp", f"is {tp}", f"it must divide {config.num_attention_heads} heads")
    settings: dict[str, Any] = {
        "batch": batch, "bits": bits, "num_snapshots": options.snapshots, "group_size": group_size, "chunk": chunk,
        "element_bytes": mem.ELEMENT_BYTES[config.dtype], "stored_bytes": stored, "num_ranks": tp,
        "kv_bytes": 1 if options.kv == "fp8" else None,
    }  # fmt: skip
    if table:
        _show_table(_table(config, parameters, settings), as_json)
    elif macs:
        _show_macs(_macs(config, parameters, settings), as_json)
    else:
        most = mem.longest(config, parameters, free, **settings)
        title = f"{batch} sequence(s) of {ctx:,} tokens" + (f", each of {tp} GPUs" if tp > 1 else "")
        more = f"; the longest context that does: {most:,} tokens"
        facts = {"ctx": ctx, "batch": batch, "longest": most}
        _show_parts(title, facts, mem.estimate(config, parameters, ctx, **settings), free, as_json, more)
        if not as_json:
            warn_if_untrained(config, ctx)


def _show_parts(
    title: str, facts: dict[str, Any], needed: Estimate | TuningEstimate, free: int, as_json: bool, more: str = ""
) -> None:
    """Print what is needed, part by part, and whether it fits."""
    parts = {name: count for name, count in asdict(needed).items() if name != "num_tokens"} | {"total": needed.total}
    fits = needed.total <= free
    if as_json:
        print_json({**facts, **parts, "available": free, "fits": fits})
        return
    print(title)
    for name, count in parts.items():
        print(f"  {name:<12} {size(count):>12}")
    print(f"{'fits into' if fits else 'does NOT fit into'} the {size(free)} available{more}")


def _tuning(method: str, optimizer: str, dtype: str, **settings: Any) -> tuple[Tuning, str]:
    """Return the settings of a fine-tuning run, and the precision of its weights."""
    from sala.lab.finetune.options import METHODS, OPTIMIZERS

    s.one_of("finetune", method, METHODS)
    s.one_of("optimizer", optimizer, OPTIMIZERS)
    if dtype == "auto":
        dtype = "float32" if method == "full" and optimizer != "adamw-bf16" else "bfloat16"
    return Tuning(method=method, optimizer=optimizer, element_bytes=mem.ELEMENT_BYTES[dtype], **settings), dtype


def _find(model: str | None, shape: str | None) -> tuple[SalaConfig, int, int | None]:
    """Return the configuration, the number of parameters, and the bytes of weights that are quantized already."""
    from sala.checkpoint.random import SHAPES
    from sala.checkpoint.reader import Checkpoint

    if shape is not None:
        s.one_of("shape", shape, SHAPES)
        return SHAPES[shape], count_parameters(expected_tensors(SHAPES[shape])), None
    path = s.find_model(model)
    config = SalaConfig.load(path)
    stored, quantization = None, config.quantization
    is_widened = quantization is not None and quantization.layout is not None and quantization.layout.kind == "fp8"
    if quantization is not None and not is_widened:  # FP8 weights become plain ones when they are read
        with Checkpoint(path) as checkpoint:
            stored = checkpoint.nbytes
    return config, count_parameters(expected_tensors(config)), stored


def _widths(config: SalaConfig, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings by the names of the widths to show: one if it is given or the model is quantized."""
    is_stored, wanted = settings["stored_bytes"] is not None, settings["bits"]
    plain = "as stored" if is_stored else config.dtype
    widths = (wanted,) if wanted is not None or is_stored else WIDTHS
    return {f"{bits} bits" if bits else plain: settings | {"bits": bits} for bits in widths}


def _table(config: SalaConfig, parameters: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per width: bytes by context, the longest context by memory."""
    rows = []
    for width, own in _widths(config, settings).items():
        usable = {memory: int(memory * mem.USABLE * (1 << 30)) for memory in MEMORIES}
        needed = {ctx: mem.estimate(config, parameters, ctx, **own) for ctx in CONTEXTS}
        rows.append(
            {
                "weights": width,
                "weight_bytes": needed[CONTEXTS[0]].weights,
                "total": {str(ctx): one.total for ctx, one in needed.items()},
                "longest": {
                    str(memory): mem.longest(config, parameters, free, **own) for memory, free in usable.items()
                },
            }
        )
    return rows


def _macs(config: SalaConfig, parameters: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per Mac: what its GPU may hold, by default and at most, and the longest context by width."""
    widths = _widths(config, settings | {"chunk": MAC_CHUNK, "tile_bytes": MAC_TILE})
    rows = []
    for memory in MACS:
        row: dict[str, Any] = {"memory": memory}
        for name, limit in (("limit", mem.gpu_limit(memory << 30)), ("raised", mem.raised_gpu_limit(memory << 30))):
            most = {width: mem.longest(config, parameters, limit, **own) for width, own in widths.items()}
            row |= {name: limit, f"{name}_longest": most}
        rows.append(row)
    return rows


def _show_macs(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"macs": rows})
        return
    lines = []
    for row in rows:
        default, more = ([*map(_tokens, row[name].values())] for name in ("limit_longest", "raised_longest"))
        lines.append([f"{row['memory']} GB", _gib(row["limit"]), *default, _gib(row["raised"]), *more])
    widths = [*rows[0]["limit_longest"]]
    title = "the longest context of one sequence on a Mac, within what macOS lets its GPU hold: by default, and raised"
    print_table(title, ["Mac", "GPU", *widths, "raised", *widths], lines)
    print("to raise it until the next start, for a Mac of 16 GB:")
    print(f"  sudo sysctl iogpu.wired_limit_mb={next(row['raised'] >> 20 for row in rows if row['memory'] == 16)}")
    print("what other programs need is not counted: close them, or keep to the default")


def _show_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"rows": rows, "usable": mem.USABLE})
        return
    needed = [[row["weights"], _gib(row["weight_bytes"]), *map(_gib, row["total"].values())] for row in rows]
    print_table(
        "memory in GiB, by tokens of context", ["weights", "alone", *map(_tokens, CONTEXTS)], needed, is_left=[True]
    )
    most = [[row["weights"], *map(_tokens, row["longest"].values())] for row in rows]
    title = f"the longest context, if {mem.USABLE:.0%} of the memory may be used"
    print_table(title, ["weights", *(f"{memory} GB" for memory in MEMORIES)], most, is_left=[True])


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"


def _tokens(count: int) -> str:
    if not count:
        return "-"
    return f"{count / 2**20:.3g}M" if count >= 1 << 20 else f"{count >> 10}K"
