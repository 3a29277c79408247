"""`sala estimate`: the memory of a context, and what fits into this machine or others."""

import json
from typing import Annotated, Any

import typer

from sala.backends.memory import (
    ELEMENT_BYTES,
    USABLE,
    Tuning,
    estimate_tuning,
    gpu_limit,
    longest,
    raised_gpu_limit,
)
from sala.backends.memory import estimate as compute
from sala.cli import flags as s
from sala.cli.generate import warn_if_untrained
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
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory.", envvar="SALA_MODEL")] = None,
    shape: Annotated[str | None, typer.Option(help="No checkpoint: the shapes of the released model, 9b.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    bits: Annotated[int | None, typer.Option(help="Weights quantized to 4 or 8 bits.")] = None,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = 64,
    chunk: Annotated[
        int, typer.Option(parser=s.count, metavar="COUNT", help="Tokens of a prompt at a time; 8192 on a GPU.")
    ] = 256,
    memory: Annotated[
        int | None, typer.Option(parser=s.count, metavar="COUNT", help="Bytes to fit into, e.g. 24G.")
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share every layer: what each of them holds.", min=1)] = 1,
    finetune: Annotated[
        str | None, typer.Option(help="What fine-tuning takes instead: full, lora or qlora, on rows of --ctx tokens.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Rank of the adapter, with --finetune.", min=1)] = 16,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw-bf16, adafactor or adamw-8bit, with --finetune.")
    ] = "adamw",
    table: Annotated[bool, typer.Option("--table", help="Bits by contexts, and what 8 to 32 GB hold.")] = False,
    macs: Annotated[bool, typer.Option("--macs", help="What Macs of 8 to 128 GB hold, by bits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    options: Annotated[
        Options, s.Use(only=("ctx", "kv", "snapshots", "dtype"), defaults={"ctx": 131072, "snapshots": 1})
    ],
) -> None:
    if bits not in (None, 4, 8):
        raise InputError("bits", f"is {bits}", "use 4 or 8")
    if group_size not in GROUP_SIZES:
        raise InputError("group-size", f"is {group_size}", "use " + ", ".join(map(str, GROUP_SIZES)))
    config, parameters, stored = _find(model, shape)
    ctx = options.ctx or config.max_position_embeddings
    if finetune is not None:
        _show_tuning(config, finetune, ctx, batch, rank, optimizer, options.dtype, bits, memory, as_json)
        return
    if config.num_attention_heads % tp or config.lightning_nh % tp:
        raise InputError("tp", f"is {tp}", f"it must divide {config.num_attention_heads} heads")
    settings: dict[str, Any] = {
        "batch": batch, "bits": bits, "num_snapshots": options.snapshots, "group_size": group_size, "chunk": chunk,
        "element_bytes": ELEMENT_BYTES[config.dtype], "stored_bytes": stored, "num_ranks": tp,
        "kv_bytes": 1 if options.kv == "fp8" else None,
    }  # fmt: skip
    if table:
        _show_table(_table(config, parameters, settings), as_json)
    elif macs:
        _show_macs(_macs(config, parameters, settings), as_json)
    else:
        _show_parts(config, parameters, ctx, memory, settings, as_json)


def _show_parts(
    config: SalaConfig, parameters: int, ctx: int, memory: int | None, settings: dict[str, Any], as_json: bool
) -> None:
    """Print what sequences of one length take, part by part, and whether it fits."""
    needed = compute(config, parameters, ctx, **settings)
    free = _free(memory)
    most = longest(config, parameters, free, **settings)
    batch, tp = settings["batch"], settings["num_ranks"]
    names = ("weights", "pages", "states", "snapshots", "activations", "runtime", "total")
    parts = {name: getattr(needed, name) for name in names}
    if as_json:
        fits = {"available": free, "fits": needed.total <= free, "longest": most}
        print(json.dumps({"ctx": ctx, "batch": batch, **parts, **fits}))
        return
    print(f"{batch} sequence(s) of {ctx:,} tokens" + (f", each of {tp} GPUs" if tp > 1 else ""))
    _print_parts(parts, free, f"; the longest context that does: {most:,} tokens")
    warn_if_untrained(config, ctx)


def _print_parts(parts: dict[str, int], free: int, more: str = "") -> None:
    from sala.cli.show import size

    for name, count in parts.items():
        print(f"  {name:<12} {size(count):>12}")
    print(f"{'fits into' if parts['total'] <= free else 'does NOT fit into'} the {size(free)} available{more}")


def _free(memory: int | None) -> int:
    import psutil

    return int(psutil.virtual_memory().available) if memory is None else memory


def _show_tuning(
    config: SalaConfig,
    method: str,
    ctx: int,
    batch: int,
    rank: int,
    optimizer: str,
    dtype: str,
    bits: int | None,
    memory: int | None,
    as_json: bool,
) -> None:
    """Print the memory of fine-tuning on a GPU that holds everything, with activations computed twice."""
    from sala.checkpoint.names import expected_tensors
    from sala.lab.finetune.options import METHODS, OPTIMIZERS

    for name, value, known in (("finetune", method, METHODS), ("optimizer", optimizer, OPTIMIZERS)):
        if value not in known:
            raise InputError(name, f"is {value!r}", "use " + ", ".join(known))
    if dtype == "auto":
        dtype = "float32" if method == "full" and optimizer != "adamw-bf16" else "bfloat16"
    tuning = Tuning(
        method=method,
        num_tokens=ctx,
        batch=batch,
        rank=rank,
        optimizer=optimizer,
        element_bytes=ELEMENT_BYTES[dtype],
        bits=bits or 4,
    )
    needed = estimate_tuning(config, expected_tensors(config), tuning)
    names = ("weights", "adapter", "gradients", "optimizer", "activations", "loss", "runtime", "total")
    parts = {name: getattr(needed, name) for name in names}
    free = _free(memory)
    if as_json:
        print(json.dumps({"finetune": method, "ctx": ctx, "batch": batch, "dtype": dtype, **parts, "available": free}))
        return
    print(f"{method} fine-tuning with {optimizer}, weights in {dtype}, {batch} row(s) of {ctx:,} tokens")
    _print_parts(parts, free)


def _find(model: str | None, shape: str | None) -> tuple[SalaConfig, int, int | None]:
    """Return the configuration, the number of parameters, and the bytes of weights that are quantized already."""
    from sala.checkpoint.names import count_parameters, expected_tensors
    from sala.checkpoint.random import SHAPES
    from sala.checkpoint.reader import Checkpoint

    if shape is not None:
        if shape not in SHAPES:
            raise InputError("shape", f"is {shape!r}", "use " + " or ".join(SHAPES))
        return SHAPES[shape], count_parameters(expected_tensors(SHAPES[shape])), None
    path = s.find_model(model)
    config = SalaConfig.load(path)
    stored, quantization = None, config.quantization
    is_widened = quantization is not None and quantization.layout is not None and quantization.layout.kind == "fp8"
    if quantization is not None and not is_widened:  # FP8 weights become plain ones when they are read
        with Checkpoint(path) as checkpoint:
            stored = checkpoint.nbytes
    return config, count_parameters(expected_tensors(config)), stored


def _table(config: SalaConfig, parameters: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per width (one if the model is quantized): bytes by context, the longest context by memory."""
    is_stored, wanted = settings["stored_bytes"] is not None, settings["bits"]
    widths = (wanted,) if wanted is not None or is_stored else WIDTHS
    rows = []
    for bits in widths:
        own = settings | {"bits": bits}
        usable = {memory: int(memory * USABLE * (1 << 30)) for memory in MEMORIES}
        most = {memory: longest(config, parameters, free, **own) for memory, free in usable.items()}
        needed = {ctx: compute(config, parameters, ctx, **own) for ctx in CONTEXTS}
        rows.append(
            {
                "weights": _width(bits, is_stored, config.dtype),
                "weight_bytes": needed[CONTEXTS[0]].weights,
                "total": {str(ctx): one.total for ctx, one in needed.items()},
                "longest": {str(memory): count for memory, count in most.items()},
            }
        )
    return rows


def _macs(config: SalaConfig, parameters: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per Mac: what its GPU may hold, by default and at most, and the longest context by width."""
    is_stored, wanted = settings["stored_bytes"] is not None, settings["bits"]
    widths = (wanted,) if wanted is not None or is_stored else WIDTHS
    own = settings | {"chunk": MAC_CHUNK, "tile_bytes": MAC_TILE}
    rows = []
    for memory in MACS:
        row: dict[str, Any] = {"memory": memory}
        for name, limit in (("limit", gpu_limit(memory << 30)), ("raised", raised_gpu_limit(memory << 30))):
            found = {bits: longest(config, parameters, limit, **(own | {"bits": bits})) for bits in widths}
            most = {_width(bits, is_stored, config.dtype): count for bits, count in found.items()}
            row |= {name: limit, f"{name}_longest": most}
        rows.append(row)
    return rows


def _width(bits: int | None, is_stored: bool, dtype: str) -> str:
    return f"{bits} bits" if bits else "as stored" if is_stored else dtype


def _show_macs(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"macs": rows}))
        return
    print("the longest context of one sequence on a Mac, within what macOS lets its GPU hold: by default, and raised")
    widths = list(rows[0]["limit_longest"])
    print(f"  {'Mac':<8}{'GPU':>6}" + "".join(f"{name:>10}" for name in widths) + f"{'raised':>10}", end="")
    print("".join(f"{name:>10}" for name in widths))
    for row in rows:
        memory, limit, raised = f"{row['memory']} GB", f"{row['limit'] / 2**30:.1f}", f"{row['raised'] / 2**30:.1f}"
        default, more = (
            "".join(f"{_tokens(count):>10}" for count in row[name].values())
            for name in ("limit_longest", "raised_longest")
        )
        print(f"  {memory:<8}{limit:>6}{default}{raised:>10}{more}")
    print("to raise it until the next start, for a Mac of 16 GB:")
    print(f"  sudo sysctl iogpu.wired_limit_mb={next(row['raised'] >> 20 for row in rows if row['memory'] == 16)}")
    print("what other programs need is not counted: close them, or keep to the default")


def _show_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": rows, "usable": USABLE}))
        return
    print("memory in GiB, by tokens of context")
    print(f"  {'weights':<12}{'alone':>8}" + "".join(f"{_tokens(ctx):>8}" for ctx in CONTEXTS))
    for row in rows:
        counts = (row["weight_bytes"], *row["total"].values())
        print(f"  {row['weights']:<12}" + "".join(f"{count / 2**30:>8.1f}" for count in counts))
    print(f"the longest context, if {USABLE:.0%} of the memory may be used")
    print(f"  {'weights':<12}" + "".join(f"{f'{memory} GB':>8}" for memory in MEMORIES))
    for row in rows:
        print(f"  {row['weights']:<12}" + "".join(f"{_tokens(count):>8}" for count in row["longest"].values()))


def _tokens(count: int) -> str:
    if not count:
        return "-"
    return f"{count / 2**20:.3g}M" if count >= 1 << 20 else f"{count >> 10}K"
