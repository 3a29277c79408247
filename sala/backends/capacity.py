"""How a backend divides the memory of its device into pages and slots, and the longest sequence that fits."""

from sala.backends.memory import state_bytes, token_bytes
from sala.config import SalaConfig
from sala.errors import InputError
from sala.protocol import Capacity, Options

_CACHE_SHARE = 0.5  # of the free memory, when no budget is given


def share_memory(
    config: SalaConfig,
    options: Options,
    dtype: str,
    element_bytes: int,
    chunk: int,
    free: int,
    kv_bytes: int | None = None,
) -> Capacity:
    """Return the capacity within the budget, at least for one sequence; `dtype` and `kv_bytes` are of keys and values.

    Raises InputError if the budget or the context do not fit.
    """
    page_size = config.sparse_config.block_size
    page_bytes = page_size * max(1, token_bytes(config, element_bytes, kv_bytes))
    slot_bytes = max(1, state_bytes(config))
    budget = int(free * _CACHE_SHARE) if options.cache_memory is None else options.cache_memory
    least = 2 * slot_bytes + page_bytes
    if budget < least or budget > free:
        raise InputError(
            "cache_memory",
            f"is {budget / 2**20:,.0f} MiB",
            f"it must hold one sequence ({least / 2**20:,.1f} MiB) and fit in the {free / 2**30:.1f} GiB that are free",
        )
    wanted_slots = options.max_batch + options.snapshots
    num_slots = max(2, min(wanted_slots, budget // 4 // slot_bytes))  # a quarter for states, pages get the rest
    num_pages = (budget - num_slots * slot_bytes) // page_bytes
    if options.ctx is not None and options.ctx < 1:
        raise InputError("ctx", f"is {options.ctx}", "it must be at least 1")
    ctx = options.ctx if options.ctx is not None else min(config.max_position_embeddings, num_pages * page_size)
    ctx_pages = -(-ctx // page_size)
    if options.ctx is not None and ctx_pages > num_pages:
        if options.cache_memory is None and num_slots * slot_bytes + ctx_pages * page_bytes <= free:
            num_pages = ctx_pages  # requested explicitly: half of the memory is only a default
        else:
            raise InputError(
                "ctx",
                f"is {ctx:,}, which needs {ctx_pages * page_bytes / 2**30:.2f} GiB of pages",
                f"{num_pages * page_size:,} tokens fit in the budget of {budget / 2**30:.2f} GiB",
            )
    most_pages = ctx_pages * (options.max_batch + options.snapshots)
    return Capacity(min(num_pages, most_pages), page_size, num_slots, options.prefill_chunk or chunk, ctx, dtype)
