"""How many bytes a context costs: the arithmetic that `show` prints and the backends plan with."""

from sala.config import SalaConfig


def token_bytes(config: SalaConfig, element_bytes: int) -> int:
    """Keys, values and pooled keys of one token, all sparse layers together (rounded up)."""
    row = config.num_key_value_heads * config.head_dim * element_bytes
    pooled = -(-row * 5 // (4 * config.sparse_config.kernel_stride))  # k1 every stride, k2 every four strides
    return len(config.sparse_layers) * (2 * row + pooled)


def cache_bytes(config: SalaConfig, num_tokens: int, element_bytes: int) -> int:
    """Pages for so many tokens, the last one whole."""
    block = config.sparse_config.block_size
    return -(-num_tokens // block) * block * token_bytes(config, element_bytes)


def state_bytes(config: SalaConfig) -> int:
    """Recurrent state of one sequence in fp32: constant, however long it is."""
    return len(config.lightning_layers) * config.lightning_nh * config.lightning_head_dim**2 * 4
