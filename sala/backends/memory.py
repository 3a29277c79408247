"""The bytes that a run needs, and how backends divide memory into pages and slots."""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import platformdirs

from sala.checkpoint.dtypes import ELEMENT_BYTES as ELEMENT_BYTES
from sala.config import SalaConfig
from sala.errors import InputError
from sala.protocol import Capacity, Options
from sala.quantization_config import LINEARS

RUNTIME_BYTES = 21 << 20  # workspaces of the libraries, measured on a CPU, and what the first slots take besides states
TILE_BYTES = 8 << 20  # bytes of a tile of queries that select blocks
EDGE_BITS = 8  # least bits of embedding and head
USABLE = 0.9  # share of a machine's memory; the rest is left to the system
STATE_ELEMENT_BYTES = {"auto": 4, "bf16": 2}  # by the option `state`
LEAST_SLOTS = 2  # one sequence, and the snapshot that it leaves
MAX_SLOTS = 4096  # by default: a bound for the tables with a row per slot, which only tiny models reach
ON_DISK, IN_HOST_MEMORY = "on disk", "in host memory"  # `Offload.place`
STREAMED_LAYERS = 2  # sparse layers whose part of a context is on the device while a prompt is read from host memory
_HOT_SHARE = 8  # the hot pool gets one part in so many of the budget, unless the options say how much
_INDEX_BYTES = 4  # of a page number or a frame number
_CACHE_SHARE = 0.5  # share of the free memory, if no budget is given
_STATE_SHARE = 4  # states get at most one part in so many of the budget, pages the rest


def token_bytes(config: SalaConfig, element_bytes: int, kv_bytes: int | None = None) -> int:
    """Return the bytes of keys, values and pooled keys of one token in all sparse layers (rounded up).

    `kv_bytes` is the size of an element of keys and values, if it differs from `element_bytes`; with 1, which is FP8,
    every token and head has an exponent too.
    """
    width = config.num_key_value_heads * config.head_dim
    exponents = 2 * config.num_key_value_heads if kv_bytes == 1 else 0
    keys_values = len(config.sparse_layers) * (2 * width * (kv_bytes or element_bytes) + exponents)
    return keys_values + pooled_bytes(config, element_bytes)


def pooled_bytes(config: SalaConfig, element_bytes: int) -> int:
    """Return the bytes of the pooled keys of one token in all sparse layers (rounded up)."""
    width = config.num_key_value_heads * config.head_dim
    pooled = -(-width * element_bytes * 5 // (4 * config.sparse_config.kernel_stride))  # every stride, every fourth
    return len(config.sparse_layers) * pooled


def index_bytes(config: SalaConfig) -> int:
    """Return the bytes that tell which block of a page is in the hot pool, and which is about to get there."""
    return _INDEX_BYTES * config.num_key_value_heads * (len(config.sparse_layers) + 1)


def streamed_bytes(config: SalaConfig, num_tokens: int, element_bytes: int, kv_bytes: int | None = None) -> int:
    """Return the bytes through which a context comes to the device layer by layer, in whole blocks."""
    layers, block = len(config.sparse_layers), config.sparse_config.block_size
    keys_values = token_bytes(config, element_bytes, kv_bytes) - pooled_bytes(config, element_bytes)
    return -(-num_tokens // block) * block * keys_values * min(STREAMED_LAYERS, layers) // max(1, layers)


def least_hot_bytes(config: SalaConfig, element_bytes: int, kv_bytes: int | None = None) -> int:
    """Return the bytes of the blocks that a token of one sequence attends to: the least that a hot pool holds."""
    sparse = config.sparse_config
    num_blocks = max(sparse.num_selected, -(-sparse.dense_len // sparse.block_size))
    keys_values = token_bytes(config, element_bytes, kv_bytes) - pooled_bytes(config, element_bytes)
    return num_blocks * sparse.block_size * keys_values


def cache_bytes(config: SalaConfig, num_tokens: int, element_bytes: int, kv_bytes: int | None = None) -> int:
    """Return the bytes of the pages for so many tokens."""
    block = config.sparse_config.block_size
    return -(-num_tokens // block) * block * token_bytes(config, element_bytes, kv_bytes)


def step_bytes(config: SalaConfig, num_tokens: int, element_bytes: int, kv_bytes: int | None = None) -> int:
    """Return the bytes of the pages that a token of the answer reads, in a request whose prompt has so many tokens.

    Where it selects blocks, it reads these, and all pooled keys to select them.
    """
    pooled = num_tokens * pooled_bytes(config, element_bytes)
    keys_values = token_bytes(config, element_bytes, kv_bytes) - pooled_bytes(config, element_bytes)
    sparse = config.sparse_config
    if num_tokens < sparse.dense_len:
        return num_tokens * keys_values
    return min(num_tokens, sparse.agreement_len) * keys_values + pooled


def state_bytes(config: SalaConfig, element_bytes: int = 4) -> int:
    """Return the bytes of the recurrent state of one sequence, whatever its length; its elements are fp32 or bf16."""
    return len(config.lightning_layers) * config.lightning_nh * config.lightning_head_dim**2 * element_bytes


def weight_bytes(config: SalaConfig, num_parameters: int, bits: int | None, element_bytes: int, group: int = 64) -> int:
    """Return the bytes of the weights as stored or, with `bits`, as `sala quantize` writes them."""
    if bits is None:
        return num_parameters * element_bytes
    edges = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    parts = ((edges, max(bits, EDGE_BITS)), (num_parameters - edges, bits))
    return sum(count * width // 8 + count // group * 2 * element_bytes for count, width in parts)


def activation_bytes(config: SalaConfig, chunk: int, num_tokens: int, element_bytes: int, tile_bytes: int) -> int:
    """Return the peak of temporary memory in a step of `chunk` tokens."""
    width = config.lightning_nh * config.lightning_head_dim
    mlp = chunk * 3 * config.intermediate_size * element_bytes
    lightning = chunk * width * (6 * element_bytes + 4 * 6)  # projections, then q, k, v, output and temporaries in fp32
    windows = num_tokens * 5 // (4 * config.sparse_config.kernel_stride)
    scores = min(
        chunk * config.num_attention_heads * windows * 4, max(tile_bytes, config.num_attention_heads * windows * 4)
    )
    selected = config.sparse_config.num_selected * config.sparse_config.block_size
    gathered = 2 * config.num_key_value_heads * selected * config.head_dim * element_bytes
    sparse = max(3 * scores, min(chunk * gathered, max(tile_bytes, gathered)))
    is_sparse = bool(config.sparse_layers) and num_tokens >= config.sparse_config.dense_len
    residual = 4 * chunk * config.hidden_size * element_bytes
    return residual + max(mlp, lightning, sparse if is_sparse else 0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes by purpose, for sequences of `num_tokens` tokens each."""

    num_tokens: int
    weights: int
    pages: int
    states: int
    snapshots: int
    activations: int
    runtime: int = RUNTIME_BYTES
    hot: int = 0  # copies of blocks whose keys and values lie in host memory
    streamed: int = 0  # a part of the context, while a prompt is read
    offloaded: int = 0  # keys and values outside the device's memory

    @property
    def total(self) -> int:
        """The bytes of the device's memory."""
        parts: tuple[int, ...] = astuple(self)
        return sum(parts[1:]) - self.offloaded


def estimate(
    config: SalaConfig,
    num_parameters: int,
    num_tokens: int,
    batch: int = 1,
    bits: int | None = None,
    num_snapshots: int = 1,
    chunk: int = 256,
    element_bytes: int = 2,
    tile_bytes: int = TILE_BYTES,
    stored_bytes: int | None = None,
    group_size: int = 64,
    num_ranks: int = 1,
    kv_bytes: int | None = None,
    state_element_bytes: int = 4,
    is_offloaded: bool = False,
    hot_bytes: int | None = None,
) -> Estimate:
    """Estimate the memory of a run; offloaded keys and values are not in the device's memory.

    With `hot_bytes` they lie in host memory, and the device has a hot pool of that size. `stored_bytes` are the weights
    of a checkpoint that is already quantized; `kv_bytes` the size of an element of keys and values, if they are
    rounded; `state_element_bytes` that of the states. With `num_ranks` devices (tensor parallelism) the result is per
    device: heads are divided, a kv head is never cut, and activations count as if they were whole. `share_memory` gives
    a context whatever fits here, with one sequence and as many snapshots.
    """
    weights = weight_bytes(config, num_parameters, bits, element_bytes, group_size)
    weights = stored_bytes if stored_bytes is not None and bits is None else weights
    groups = config.num_key_value_heads
    own_groups = max(1, groups // num_ranks)
    pages = batch * cache_bytes(config, num_tokens, element_bytes, kv_bytes) * own_groups // groups
    block = config.sparse_config.block_size
    pooled = batch * -(-num_tokens // block) * block * pooled_bytes(config, element_bytes) * own_groups // groups
    kept, streamed = pooled, 0
    if hot_bytes is not None:
        kept += batch * -(-num_tokens // block) * index_bytes(config)
        streamed = streamed_bytes(config, num_tokens, element_bytes, kv_bytes)
    return Estimate(
        num_tokens=num_tokens,
        weights=-(-weights // num_ranks),
        pages=kept if is_offloaded else pages,
        states=batch * state_bytes(config, state_element_bytes) // num_ranks,
        snapshots=num_snapshots * state_bytes(config, state_element_bytes) // num_ranks,
        activations=activation_bytes(config, chunk, num_tokens, element_bytes, tile_bytes),
        hot=hot_bytes or 0,
        streamed=streamed,
        offloaded=pages - pooled if is_offloaded else 0,
    )


def longest(config: SalaConfig, num_parameters: int, free: int, offload: int = 0, **settings: int | None) -> int:
    """Return the longest context whose estimate fits into `free` bytes, in whole blocks; 0 if none does.

    With the setting `is_offloaded`, its keys and values must fit into `offload` bytes.
    """
    block = config.sparse_config.block_size
    low, high = 0, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        needed = estimate(config, num_parameters, middle * block, **settings)  # type: ignore[arg-type]
        low, high = (middle, high) if needed.total <= free and needed.offloaded <= offload else (low, middle)
    return low * block


def gpu_limit(memory: int) -> int:
    """Return how much memory macOS lets the GPU use by default: about 2/3, or 3/4 of more than 32 GB."""
    return memory * 2 // 3 if memory <= 32 << 30 else memory * 3 // 4


def raised_gpu_limit(memory: int) -> int:
    """Return how far the limit can safely be raised: all but 3 GB, on large Macs all but an eighth."""
    return max(gpu_limit(memory), memory - max(3 << 30, memory // 8))


@dataclass(frozen=True, slots=True)
class Offload:
    """Keep keys and values outside the device's memory: where, and how many bytes are free there."""

    place: str
    free: int
    is_streamed: bool = False  # the device cannot compute there: it keeps a hot pool, and room for parts of a context


def page_directory(options: Options) -> Path:
    """Return the directory for keys and values on disk."""
    return options.cache_dir or platformdirs.user_cache_path("sala")


def share_memory(
    config: SalaConfig,
    options: Options,
    dtype: str,
    element_bytes: int,
    chunk: int,
    free: int,
    kv_bytes: int | None = None,
    most_batch: int = 8,
    overheads: tuple[int, int] = (0, 0),
    offload: Offload | None = None,
    tile_bytes: int = TILE_BYTES,
) -> Capacity:
    """Return the capacity within the budget, at least for one sequence; `dtype` and `kv_bytes` are of keys and values.

    What a step needs besides the cache is left free, as `estimate` counts it. `most_batch` sequences run at a time if
    the options do not say how many, or fewer if their states do not fit. All other states that fit are for snapshots,
    unless the options say how many; there are fewer if the context that the options ask for leaves no more room. A slot
    and a token take `overheads` bytes besides the state, and the keys and values. Raises InputError if the budget or
    the context does not fit.
    """
    page_size = config.sparse_config.block_size
    of_slot, of_token = overheads
    page_bytes = page_size * max(1, token_bytes(config, element_bytes, kv_bytes) + of_token)
    own_bytes = page_bytes if offload is None else page_size * max(1, pooled_bytes(config, element_bytes) + of_token)
    away_bytes, streamed = page_bytes - own_bytes, 0
    if offload is not None and offload.is_streamed:
        own_bytes += index_bytes(config)
        streamed = streamed_bytes(config, page_size, element_bytes, kv_bytes)
    slot_bytes = max(1, state_bytes(config, STATE_ELEMENT_BYTES[options.state]) + of_slot)
    chunk = options.prefill_chunk or chunk
    longest = options.ctx or config.max_position_embeddings
    least_slots = max(LEAST_SLOTS, 1 + (options.snapshots or 0))
    step = activation_bytes(config, chunk, longest, element_bytes, tile_bytes)
    step += max(0, RUNTIME_BYTES - least_slots * of_slot)
    room = max(0, free - step)
    least_hot = _least_hot(config, options, (element_bytes, kv_bytes), offload)
    budget = _cache_budget(options, free, step, LEAST_SLOTS * slot_bytes + own_bytes + streamed + least_hot)
    hot_sizes: tuple[int, ...] = (least_hot,)
    if options.kv_hot is None and least_hot:
        hot_sizes = (max(least_hot, budget // _HOT_SHARE), least_hot)
    most = MAX_SLOTS if options.snapshots is None else (options.max_batch or most_batch) + options.snapshots
    num_slots = max(LEAST_SLOTS, min(most, budget // _STATE_SHARE // slot_bytes))
    for hot in hot_sizes:
        try:
            shared = _share_pages(
                config,
                options,
                (own_bytes, away_bytes, streamed),
                (budget - hot, (room if options.cache_memory is None else budget) - hot),
                (num_slots, min(num_slots, least_slots), slot_bytes),
                offload,
            )
            if shared[1]:
                break
        except InputError:
            if hot == hot_sizes[-1]:
                raise
    ctx, num_pages, num_slots = shared
    for_snapshots = num_slots // 2 if options.snapshots is None else min(options.snapshots, num_slots // 2)
    max_batch = options.max_batch or max(1, min(most_batch, num_slots - for_snapshots))
    ctx_pages = -(-ctx // page_size)
    num_pages = min(num_pages, ctx_pages * (num_slots if options.snapshots is None else max_batch + options.snapshots))
    return Capacity(
        num_pages,
        page_size,
        num_slots,
        chunk,
        ctx,
        dtype,
        max_batch,
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        offload="" if offload is None else offload.place,
        hot_bytes=hot,
    )


def _cache_budget(options: Options, free: int, step: int, least: int) -> int:
    """Return the bytes for pages and slots. Raises InputError if they do not hold one sequence, or are not free."""
    room = max(0, free - step)
    budget = min(int(free * _CACHE_SHARE), room) if options.cache_memory is None else options.cache_memory
    if budget < least or budget > room:
        raise InputError(
            "cache_memory",
            f"is {budget / 2**20:,.0f} MiB",
            f"it must hold one sequence ({least / 2**20:,.1f} MiB) and fit in the {room / 2**30:.1f} GiB that are free "
            f"besides what a step needs ({step / 2**20:,.0f} MiB)",
        )
    return budget


def _least_hot(config: SalaConfig, options: Options, widths: tuple[int, int | None], offload: Offload | None) -> int:
    """Return the least bytes of the hot pool, which are all if the options say how many. Raises InputError."""
    if offload is None or not offload.is_streamed:
        return 0
    least = least_hot_bytes(config, *widths)
    if options.kv_hot is None:
        return least
    if 0 < options.kv_hot < least:
        problem = f"is {options.kv_hot / 2**20:,.1f} MiB"
        remedy = f"a token of one sequence takes {least / 2**20:,.1f} MiB; 0 switches the pool off"
        raise InputError("kv_hot", problem, remedy)
    return options.kv_hot


def _share_pages(
    config: SalaConfig, options: Options, sizes: tuple[int, int, int], memory: tuple[int, int],
    slots: tuple[int, int, int], offload: Offload | None,
) -> tuple[int, int, int]:  # fmt: skip
    """Return the longest sequence, the number of pages, and that of slots.

    `sizes` are the bytes of a page on the device, offloaded, and to stream it, which is done with one sequence at a
    time. `memory` is the budget, and what may be used if a context asks for it. `slots` is how many there are to be,
    how many there must be, and the bytes of each.
    """
    (own, away, streamed), (budget, most), (num_slots, least, slot) = sizes, memory, slots
    page_size = config.sparse_config.block_size
    beyond = 0 if offload is None else _offload_budget(options, offload)
    longest = -(-(options.ctx or config.max_position_embeddings) // page_size)
    num_pages = _pages_in(budget - num_slots * slot, own, streamed, longest)
    if offload is not None:
        num_pages = min(num_pages, beyond // away)
    if options.ctx is None:
        return min(config.max_position_embeddings, num_pages * page_size), num_pages, num_slots
    if options.ctx < 1:
        raise InputError("ctx", f"is {options.ctx}", "it must be at least 1")
    pages = longest
    if pages <= num_pages:
        return options.ctx, num_pages, num_slots
    # Requested explicitly: half of what is free, and a quarter of it for states, are only defaults.
    fitting = max(0, most - least * slot) // (own + streamed)
    place = ""
    if offload is not None:
        limit = offload.free if options.kv_home_size is None else beyond
        fitting = min(fitting, limit // away)
        place = f" and the {limit / 2**30:.2f} GiB {offload.place}"
    if pages <= fitting:
        return options.ctx, pages, min(num_slots, (most - pages * (own + streamed)) // slot)
    raise InputError(
        "ctx",
        f"is {options.ctx:,}, which needs {pages * (own + (away if offload else 0)) / 2**30:.2f} GiB of pages",
        f"{fitting * page_size:,} tokens fit in the budget of {most / 2**30:.2f} GiB{place}",
    )


def _pages_in(memory: int, own: int, streamed: int, longest: int) -> int:
    """Return how many pages fit, if one sequence of up to `longest` pages is streamed too."""
    beside = (memory - longest * streamed) // own
    return max(0, beside if beside >= longest else memory // (own + streamed))


def _offload_budget(options: Options, offload: Offload) -> int:
    """Return the bytes for offloaded keys and values. Raises InputError if there are not as many."""
    if options.kv_home_size is None:
        return int(offload.free * _CACHE_SHARE)
    if options.kv_home_size > offload.free:
        problem = f"is {options.kv_home_size / 2**30:,.1f} GiB"
        raise InputError("kv_home_size", problem, f"{offload.free / 2**30:,.1f} GiB are free {offload.place}")
    return options.kv_home_size


OPTIMIZER_BYTES = {"adamw-8bit": 2.0, "adafactor": 0.01}  # of a weight; AdamW keeps two numbers in its precision


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings of a fine-tuning run that decide its memory. `element_bytes` is of weights, `compute_bytes` of
    activations; `targets` are the names of the linears with an adapter."""

    method: str = "lora"
    num_tokens: int = 4096
    batch: int = 1
    rank: int = 16
    targets: tuple[str, ...] = LINEARS
    optimizer: str = "adamw"
    bits: int = 4
    element_bytes: int = 2
    compute_bytes: int = 2
    has_checkpointing: bool = True
    loss_rows: int = 1024


@dataclass(frozen=True, slots=True)
class TuningEstimate:
    """Bytes by purpose, on one device that holds everything."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        return sum(astuple(self))


def estimate_tuning(config: SalaConfig, shapes: Mapping[str, tuple[int, ...]], tuning: Tuning) -> TuningEstimate:
    """`shapes` are those of all tensors of the model."""
    count = sum(math.prod(shape) for shape in shapes.values())
    linears = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name.split(".")[-2] in LINEARS}
    weights = count * tuning.element_bytes
    if tuning.method == "qlora":
        packed = sum(math.prod(shape) for shape in linears.values())
        weights = (count - packed) * tuning.element_bytes + packed * tuning.bits // 8 + packed // 64 * 4
    learning, size = count, tuning.element_bytes
    adapter = 0
    if tuning.method != "full":
        selected = (shape for name, shape in linears.items() if name.split(".")[-2] in tuning.targets)
        learning, size = tuning.rank * sum(sum(shape) for shape in selected), 4
        adapter = learning * size
    states = OPTIMIZER_BYTES.get(tuning.optimizer, 2.0 * size)
    return TuningEstimate(
        weights=weights,
        adapter=adapter,
        gradients=learning * size,
        optimizer=int(learning * states),
        activations=_tuning_activations(config, tuning),
        loss=_loss_bytes(config, tuning),
    )


def _tuning_activations(config: SalaConfig, tuning: Tuning) -> int:
    """Return what layers keep for the backward pass: inputs and all of one layer, or all layers without checkpointing.

    Of one layer: projections, gates and norms of the mixer, its fp32 values, the MLP and its gradients.
    """
    hidden, inner, size = config.hidden_size, config.intermediate_size, tuning.compute_bytes
    width = max(config.lightning_nh * config.lightning_head_dim, config.num_attention_heads * config.head_dim)
    layer = size * (6 * hidden + 11 * width + 7 * inner) + 24 * width
    if tuning.method != "full":
        layer += 2 * size * (6 * hidden + inner)  # inputs of the adapters, with dropout
    tokens, layers = tuning.num_tokens * tuning.batch, config.num_hidden_layers
    if not tuning.has_checkpointing:
        return tokens * layer * layers
    return tokens * (layer + layers * hidden * size)


def _loss_bytes(config: SalaConfig, tuning: Tuning) -> int:
    """Return the bytes of logits and their gradients for a chunk of tokens, and of all hidden states and theirs."""
    tokens = tuning.num_tokens * tuning.batch
    rows = min(tuning.loss_rows, tokens)
    return rows * config.vocab_size * (8 + 2 * tuning.compute_bytes) + 2 * tokens * config.hidden_size * 4
