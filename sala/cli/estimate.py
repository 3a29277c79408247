"""`sala estimate`: the memory of a context, and what fits into this machine or others."""

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from sala.backends import memory as mem
from sala.backends.memory import Estimate, Offload, Tuning, TuningEstimate
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.cli import costs
from sala.cli import flags as s
from sala.cli.generate import warn_if_untrained
from sala.cli.outputs import print_json, print_table, size
from sala.config import SalaConfig
from sala.errors import InputError, ModelNotFound, free_disk_bytes
from sala.models.embedded import RELEASED_REPO
from sala.options import ATTENTION_FIELDS, Options
from sala.quantization_config import GROUP_SIZES

WIDTHS = (None, 8, 4)  # bits of the table's rows; None: not quantized
SIZES = ("ctx", "snapshots", "cache_memory", "cache_ram", "cache_disk")  # options
KINDS = ("kv", "kv_home", "kv_home_size", "kv_hot", "cache_dir", "state", "dtype")
CONTEXTS = (32 << 10, 128 << 10, 512 << 10, 1 << 20)
HOMES = ("disk", "host")  # of keys and values outside the device's memory, by the option kv_home
TIERS = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
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
    engine: Annotated[
        str | None, s.flag("What vllm takes on each GPU: memory in its blocks, sequences at a time.")
    ] = None,
    pp: Annotated[int, s.flag("Groups of GPUs that share the layers, with --engine.", min=1)] = 1,
    nodes: Annotated[int, s.flag("Machines that run one model together, with --engine.", min=1)] = 1,
    finetune: Annotated[
        str | None, s.flag("What fine-tuning takes instead: full, lora or qlora, on rows of --ctx tokens.")
    ] = None,
    rank: Annotated[int, s.flag("Rank of the adapter, with --finetune.", min=1)] = 16,
    optimizer: Annotated[str, s.flag("adamw, adamw-bf16, adafactor or adamw-8bit, with --finetune.")] = "adamw",
    bandwidth: Annotated[
        str | None,
        s.flag(
            "GB/s of the tiers, as device=3350,host=50,disk=5, or measured: "
            "estimates what a step and moving a conversation cost."
        ),
    ] = None,
    table: Annotated[bool, s.flag("Memory by bits and context, and what fits into 8 to 32 GB.", "--table")] = False,
    macs: Annotated[bool, s.flag("What Macs of 8 to 128 GB hold, by bits.", "--macs")] = False,
    as_json: s.AsJson = False,
    options: Annotated[Options, s.Use(only=(*SIZES, *KINDS, *ATTENTION_FIELDS), defaults={"ctx": 131072})],
) -> None:
    is_one = not (table or macs or finetune is not None or engine is not None)
    _check(options, macs, bandwidth is not None and not is_one, bits, group_size)
    if engine is None and finetune is None and (pp > 1 or nodes > 1):
        raise InputError("pp" if pp > 1 else "nodes", "is for other engines", "add --engine vllm")
    own, parameters, stored = _find(model, shape)
    config = own.attending(options.attention_choice)
    ctx, free = options.ctx or config.max_position_embeddings, _free_memory() if memory is None else memory
    if finetune is not None:
        tuning = _tuning(finetune, optimizer, options.dtype, num_tokens=ctx, batch=batch, rank=rank, bits=bits or 4)
        _show_tuning(config, *tuning, free, as_json)
        return
    if config.num_attention_heads % tp or config.lightning_nh % tp:
        raise InputError("tp", f"is {tp}", f"it must divide {config.num_attention_heads} heads")
    settings = _settings(config, options, batch) | {
        "bits": bits, "group_size": group_size, "chunk": chunk, "stored_bytes": stored, "num_ranks": tp
    }  # fmt: skip
    if options.kv_home == "host":
        least = mem.least_hot_bytes(config, settings["element_bytes"], settings["kv_bytes"])
        settings["hot_bytes"] = least if options.kv_hot is None else options.kv_hot
    if engine is not None:
        s.one_of("engine", engine, ("vllm",))
        _show_vllm(config, parameters, settings, ctx, Gpus(tp, pp, nodes), memory, as_json)
        return
    offload = _offload(options)
    if table:
        _show_table(config, parameters, settings, offload.free, as_json)
    elif macs:
        _show_macs(config, parameters, settings, as_json)
    else:
        speeds = {} if bandwidth is None else costs.bandwidths(bandwidth, mem.page_directory(options))
        _show_one(own, config, parameters, settings, options, ctx, free, offload, speeds, as_json)


def _check(options: Options, macs: bool, is_wide: bool, bits: int | None, group_size: int) -> None:
    """Raise InputError for flags that do not go together; `is_wide`: a bandwidth is given for more than a context."""
    if macs and options.kv_home in HOMES:
        other = {"disk": "CPUs", "host": "NVIDIA GPUs"}[options.kv_home]
        raise InputError("kv_home", f"is {options.kv_home}, which is for {other}", "leave out --macs")
    if options.kv_hot is not None and options.kv_home != "host":
        raise InputError("kv_hot", "is for keys and values in host memory", "add --kv-home host")
    if is_wide:
        raise InputError("bandwidth", "is for one context", "leave out --table, --macs, --finetune and --engine")
    if bits is not None:
        s.one_of("bits", bits, (4, 8))
    s.one_of("group-size", group_size, GROUP_SIZES)


def _free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _settings(config: SalaConfig, options: Options, batch: int) -> dict[str, Any]:
    """Return arguments of `memory.estimate` for what is kept of sequences."""
    return {
        "batch": batch,
        "element_bytes": mem.ELEMENT_BYTES[config.dtype],
        "kv_bytes": 1 if options.kv == "fp8" else None,
        "state_element_bytes": mem.STATE_ELEMENT_BYTES[options.state],
        "num_snapshots": max(1 if options.snapshots is None else options.snapshots, mem.LEAST_SLOTS - batch),
        "is_offloaded": options.kv_home in HOMES,
        "hot_bytes": None,
    }


@dataclass(frozen=True)
class Gpus:
    """GPUs that run one model together: tp of them share a layer, pp groups share the layers."""

    tp: int
    pp: int
    nodes: int

    def describe(self, config: SalaConfig) -> str:
        """Raises InputError for numbers that do not fit the model or each other."""
        count, groups = self.tp * self.pp, config.num_key_value_heads
        if groups % self.tp and self.tp % groups:
            raise InputError("tp", f"is {self.tp}", f"it must share {groups} kv heads evenly")
        if count % self.nodes:
            raise InputError("nodes", f"is {self.nodes}", f"{count} GPUs cannot be spread evenly: change --tp or --pp")
        if self.pp > config.num_hidden_layers:
            raise InputError("pp", f"is {self.pp}", f"the model has {config.num_hidden_layers} layers")
        return f"{self.nodes} machine(s) with {count // self.nodes} GPU(s) each"


def _show_vllm(
    config: SalaConfig,
    parameters: int,
    settings: dict[str, Any],
    ctx: int,
    gpus: Gpus,
    memory: int | None,
    as_json: bool,
) -> None:
    """Show what each GPU holds under vLLM, and with its `memory` how many sequences fit."""
    from sala.plugins.vllm.sizing import UTILIZATION, plan_blocks

    where, batch, wide = gpus.describe(config), settings["batch"], settings["element_bytes"]
    is_expanded = config.quantization is not None and config.quantization.layout is None and settings["bits"] is None
    own = settings | ({"stored_bytes": None} if is_expanded else {})  # the plug-in expands MLX's layout
    needed = mem.estimate(config, parameters, ctx, **own)
    weights = -(-needed.weights // gpus.pp)
    blocks = plan_blocks(config, wide, gpus.tp, gpus.pp)
    one = blocks.bytes_of(ctx)
    facts = {
        "engine": "vllm", "tp": gpus.tp, "pp": gpus.pp, "nodes": gpus.nodes, "ctx": ctx, "batch": batch,
        "weights": weights, "activations": needed.activations, "block_tokens": blocks.block_tokens,
        "block_bytes": blocks.block_bytes, "sequence": one, "total": weights + needed.activations + batch * one,
    }  # fmt: skip
    if memory is not None:
        budget = max(0, int(memory * UTILIZATION) - weights - needed.activations)
        facts |= {"available": memory, "sequences": budget // one, "longest": blocks.longest(budget)}
    if as_json:
        print_json(facts)
        return
    s.write_out(f"vllm on {where}; each GPU holds")
    per_sequence = f"{blocks.blocks_of(ctx):,} blocks of {blocks.block_tokens:,} tokens or one state"
    rows = {"weights": (weights, ""), "activations": (needed.activations, ""), "sequences": (batch * one, per_sequence)}
    for name, (count, note) in (rows | {"total": (facts["total"], "")}).items():
        print(f"  {name:<12} {size(count):>12}" + (f"  {batch} x {note}" if note else ""))
    if memory is not None:
        room = f"room for {facts['sequences']:,} sequence(s) of {ctx:,} tokens"
        print(f"of {size(memory)}, vllm uses {UTILIZATION:.0%}: {room}, or one of {facts['longest']:,}")
    print("CUDA graphs and communication are not counted")


def _show_one(
    own: SalaConfig,
    config: SalaConfig,
    parameters: int,
    settings: dict[str, Any],
    options: Options,
    ctx: int,
    free: int,
    offload: Offload,
    speeds: dict[str, float],
    as_json: bool,
) -> None:
    """Show what one context takes. `own` is the checkpoint's configuration, `config` that of the chosen attention."""
    batch, tp = settings["batch"], settings["num_ranks"]
    most = mem.longest(config, parameters, free, offload.free, **settings)
    title = f"{batch} sequence(s) of {ctx:,} tokens" + (f", each of {tp} GPUs" if tp > 1 else "")
    more = f"; the longest context that does: {most:,} tokens"
    needed = mem.estimate(config, parameters, ctx, **settings)
    kept = _conversations(config, options, settings, free - needed.weights, offload) if tp == 1 else {}
    widths = (settings["element_bytes"], settings["kv_bytes"])
    read, own_read = (mem.step_bytes(one, ctx, *widths) for one in (config, own))
    facts = {"ctx": ctx, "batch": batch, "longest": most, "conversations": kept, "step_bytes": read}
    if speeds:
        facts |= _costs(config, ctx, settings, speeds, needed, options.kv_home)
    if needed.offloaded:
        facts |= {"offload": offload.place, "offload_available": offload.free}
    _show_parts(title, facts, needed, free, as_json, more)
    if not as_json:
        _show_conversations(kept, ctx, batch, offload.place if needed.offloaded else "")
        s.write_out(f"a token of the answer reads {size(read)} of the keys and values of {ctx:,} tokens")
        if changes := config.sparse_config.describe_changes(own.sparse_config):
            s.write_out(f"{changes}; it would read {size(own_read)}")
        if speeds:
            _show_costs(facts, ctx, batch)
        warn_if_untrained(config, ctx)


def _costs(
    config: SalaConfig, ctx: int, settings: dict[str, Any], speeds: dict[str, float], needed: Estimate, home: str
) -> dict[str, Any]:
    """Return the least seconds of a step, and of moving a conversation, on each of the devices.

    `home` is where keys and values lie, as the option says.
    """
    batch, tp = settings["batch"], settings["num_ranks"]
    widths, state = (settings["element_bytes"], settings["kv_bytes"]), settings["state_element_bytes"]
    pooled = ctx * mem.pooled_bytes(config, widths[0]) if ctx >= config.sparse_config.dense_len else 0
    selected = batch * (mem.step_bytes(config, ctx, *widths) - pooled) // tp
    read = needed.weights + 2 * needed.states + batch * pooled // tp  # states are written too
    moved = (mem.cache_bytes(config, ctx, *widths) + mem.state_bytes(config, state)) // tp
    return {
        "bandwidths": speeds,
        "home": home if home in HOMES else "device",
        "step_s": costs.step_seconds(speeds, read, selected, home if home in HOMES else None),
        "moving_s": costs.moving_seconds(speeds, moved),
    }


def _show_costs(facts: dict[str, Any], ctx: int, batch: int) -> None:
    """Print the costs, as what they are: bytes by bandwidths."""
    given = ", ".join(
        f"{tier} {speed / 1e9:{',.0f' if speed >= 1e11 else '.3g'}} GB/s" for tier, speed in facts["bandwidths"].items()
    )
    print(f"estimated from bandwidths alone ({given}), so at least; computation and launches come on top:")
    if facts["step_s"]:
        best, worst = (f"{1000 * seconds:.3g} ms" for seconds in facts["step_s"])
        place = {"host": "host memory"}.get(facts["home"], facts["home"])
        more = "" if best == worst else f"; {worst} if all of the selected blocks are read from {place}"
        print(f"  a token of {'the answer' if batch == 1 else f'{batch} answers'}: {best}{more}")
    for tier, seconds in facts["moving_s"].items():
        place = {"host": "host memory", "disk": "disk"}[tier]
        print(f"  a conversation of {ctx:,} tokens to {place}, or back: {seconds:.3g} s")


def _offload(options: Options) -> Offload:
    """Return where offloaded keys and values would lie, and how much room there is for them."""
    if options.kv_home != "host":
        return Offload(mem.ON_DISK, options.kv_home_size or free_disk_bytes(mem.page_directory(options)) or 0)
    return Offload(mem.IN_HOST_MEMORY, options.kv_home_size or _free_memory(), is_streamed=True)


def _conversations(
    config: SalaConfig, options: Options, settings: dict[str, Any], free: int, offload: Offload
) -> dict[str, int]:
    """Return how many conversations of `ctx` tokens each tier of the cache holds, besides `batch` that run."""
    widths = {name: settings[name] for name in ("element_bytes", "chunk", "kv_bytes")}
    ctx = options.ctx or config.max_position_embeddings
    try:
        where = offload if settings["is_offloaded"] else None
        options = replace(options, ctx=ctx)
        capacity = mem.share_memory(config, options, config.dtype, free=max(0, free), offload=where, **widths)
    except InputError:  # not even one fits
        return {}
    sizes = {"host": options.cache_ram, "disk": options.cache_disk}
    below = {tier: size // capacity.copy_bytes(ctx) for tier, size in sizes.items() if size is not None}
    return {"device": capacity.num_resting(ctx, settings["batch"]), **below}


def _show_conversations(kept: dict[str, int], ctx: int, batch: int, place: str) -> None:
    """`place` is where their keys and values lie, if not on the device."""
    if kept:
        names = TIERS | ({"device": f"on the device with keys and values {place}"} if place else {})
        tiers = ", ".join(f"{count:,} {names[tier]}" for tier, count in kept.items())
        print(f"conversations of {ctx:,} tokens that stay cached while {batch} run(s): {tiers}")


def _show_parts(
    title: str, facts: dict[str, Any], needed: Estimate | TuningEstimate, free: int, as_json: bool, more: str = ""
) -> None:
    """Print what is needed, part by part, and whether it fits."""
    parts = {name: count for name, count in asdict(needed).items() if name not in ("num_tokens", "offloaded")}
    parts = {name: count for name, count in parts.items() if count or name not in ("hot", "streamed")}
    parts["total"] = needed.total
    offloaded = needed.offloaded if isinstance(needed, Estimate) else 0
    if offloaded:
        parts["offloaded"] = offloaded
    fits = needed.total <= free and offloaded <= facts.get("offload_available", 0)
    if as_json:
        print_json({**facts, **parts, "available": free, "fits": fits})
        return
    s.write_out(title)
    for name, count in parts.items():
        print(f"  {name:<12} {size(count):>12}")
    room = size(free) + (f" and {size(facts['offload_available'])} {facts['offload']}" if offloaded else "")
    print(f"{'fits into' if fits else 'does NOT fit into'} the {room} available{more}")
    if not fits and isinstance(needed, Estimate):
        s.note(
            "less memory: --bits 4, --kv fp8, a smaller --ctx or --batch; --memory 24G estimates for another machine"
        )


def _tuning(method: str, optimizer: str, dtype: str, **settings: Any) -> tuple[Tuning, str]:
    """Return the settings of a fine-tuning run, and the precision of its weights."""
    from sala.lab.finetune.options import METHODS, OPTIMIZERS

    s.one_of("finetune", method, METHODS)
    s.one_of("optimizer", optimizer, OPTIMIZERS)
    if dtype == "auto":
        dtype = "float32" if method == "full" and optimizer != "adamw-bf16" else "bfloat16"
    return Tuning(method=method, optimizer=optimizer, element_bytes=mem.ELEMENT_BYTES[dtype], **settings), dtype


def _show_tuning(config: SalaConfig, tuning: Tuning, dtype: str, free: int, as_json: bool) -> None:
    ctx, batch = tuning.num_tokens, tuning.batch
    facts = {"finetune": tuning.method, "ctx": ctx, "batch": batch, "dtype": dtype}
    title = f"{tuning.method} fine-tuning with {tuning.optimizer}, weights in {dtype}, {batch} row(s) of {ctx:,} tokens"
    _show_parts(title, facts, mem.estimate_tuning(config, expected_tensors(config), tuning), free, as_json)


def _find(model: str | None, shape: str | None) -> tuple[SalaConfig, int, int | None]:
    """Return the configuration, the number of parameters, and the bytes of weights that are quantized already."""
    from sala.checkpoint.random import SHAPES
    from sala.checkpoint.reader import Checkpoint

    if shape is not None:
        s.one_of("shape", shape, SHAPES)
        return SHAPES[shape], count_parameters(expected_tensors(SHAPES[shape])), None
    try:
        path = s.find_model(model)
    except ModelNotFound:
        if model is None or model.lower() not in (RELEASED_REPO.lower(), RELEASED_REPO.partition("/")[2].lower()):
            raise
        s.note(f"{model} is not downloaded (sala pull {RELEASED_REPO}): its published shape is used, --shape 9b")
        return _find(None, "9b")
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


def _show_macs(config: SalaConfig, parameters: int, settings: dict[str, Any], as_json: bool) -> None:
    """Print a row per Mac: what its GPU may hold, by default and at most, and the longest context by width."""
    widths = _widths(config, settings | {"chunk": MAC_CHUNK, "tile_bytes": MAC_TILE})
    rows, lines = [], []
    for memory in MACS:
        row: dict[str, Any] = {"memory": memory}
        line = [f"{memory} GB"]
        for name, limit in (("limit", mem.gpu_limit(memory << 30)), ("raised", mem.raised_gpu_limit(memory << 30))):
            most = {width: mem.longest(config, parameters, limit, **own) for width, own in widths.items()}
            row |= {name: limit, f"{name}_longest": most}
            line += [_gib(limit), *map(_tokens, most.values())]
        rows.append(row)
        lines.append(line)
    if as_json:
        print_json({"macs": rows})
        return
    title = "the longest context of one sequence on a Mac, within what macOS lets its GPU hold: by default, and raised"
    print_table(title, ["Mac", "GPU", *widths, "raised", *widths], lines)
    print("to raise it until the next start, for a Mac of 16 GB:")
    print(f"  sudo sysctl iogpu.wired_limit_mb={mem.raised_gpu_limit(16 << 30) >> 20}")
    print("what other programs need is not counted: close them, or keep to the default")


def _show_table(config: SalaConfig, parameters: int, settings: dict[str, Any], offload: int, as_json: bool) -> None:
    """Print a row per width: bytes by context, the longest context by memory."""
    rows: list[dict[str, Any]] = []
    for width, own in _widths(config, settings).items():
        needed = {str(ctx): mem.estimate(config, parameters, ctx, **own) for ctx in CONTEXTS}
        longest = {
            str(memory): mem.longest(config, parameters, int(memory * mem.USABLE * (1 << 30)), offload, **own)
            for memory in MEMORIES
        }
        totals = {ctx: one.total for ctx, one in needed.items()}
        weights = needed[str(CONTEXTS[0])].weights
        rows.append({"weights": width, "weight_bytes": weights, "total": totals, "longest": longest})
    if as_json:
        print_json({"rows": rows, "usable": mem.USABLE})
        return
    lines = [[row["weights"], _gib(row["weight_bytes"]), *map(_gib, row["total"].values())] for row in rows]
    print_table(
        "memory in GiB, by tokens of context", ["weights", "alone", *map(_tokens, CONTEXTS)], lines, is_left=[True]
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
