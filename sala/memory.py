"""How many bytes a run needs: the arithmetic that `show` and `estimate` print and the backends plan with."""

from dataclasses import dataclass

from sala.config import SalaConfig

RUNTIME_BYTES = 21 << 20  # work areas of the libraries, measured on a CPU: the same at every length
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
EDGE_BITS = 8  # of embedding and head, where the rest has fewer
USABLE = 0.9  # of a machine's memory: the rest is the system's


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


def weight_bytes(config: SalaConfig, num_parameters: int, bits: int | None, element_bytes: int, group: int = 64) -> int:
    """Weights as stored, or as `sala quantize` writes them: embedding and head never get less than 8 bits."""
    if bits is None:
        return num_parameters * element_bytes
    edges = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    parts = ((edges, max(bits, EDGE_BITS)), (num_parameters - edges, bits))
    return sum(count * width // 8 + count // group * 2 * element_bytes for count, width in parts)


def activation_bytes(config: SalaConfig, chunk: int, num_tokens: int, element_bytes: int, tile_bytes: int) -> int:
    """What a step of `chunk` tokens holds for a moment, at its widest place."""
    width = config.lightning_nh * config.lightning_head_dim
    mlp = chunk * 3 * config.intermediate_size * element_bytes
    lightning = chunk * width * (6 * element_bytes + 4 * 6)  # projections, then q, k, v, output and temporaries in fp32
    windows = num_tokens * 5 // (4 * config.sparse_config.kernel_stride)
    scores = min(
        chunk * config.num_attention_heads * windows * 4, max(tile_bytes, config.num_attention_heads * windows * 4)
    )
    chosen = config.sparse_config.num_chosen * config.sparse_config.block_size
    gathered = 2 * config.num_key_value_heads * chosen * config.head_dim * element_bytes
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

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.states + self.snapshots + self.activations + self.runtime


def estimate(
    config: SalaConfig,
    num_parameters: int,
    num_tokens: int,
    batch: int = 1,
    bits: int | None = None,
    num_snapshots: int = 1,
    chunk: int = 256,
    element_bytes: int = 2,
    tile_bytes: int = 8 << 20,
    stored_bytes: int | None = None,
    group_size: int = 64,
) -> Estimate:
    """`stored_bytes`: the weights of a checkpoint that is quantized already, as its files have them."""
    weights = weight_bytes(config, num_parameters, bits, element_bytes, group_size)
    return Estimate(
        num_tokens=num_tokens,
        weights=stored_bytes if stored_bytes is not None and bits is None else weights,
        pages=batch * cache_bytes(config, num_tokens, element_bytes),
        states=batch * state_bytes(config),
        snapshots=num_snapshots * state_bytes(config),
        activations=activation_bytes(config, chunk, num_tokens, element_bytes, tile_bytes),
    )


def longest(config: SalaConfig, num_parameters: int, free: int, **settings: int | None) -> int:
    """The longest context whose estimate fits into `free` bytes, in whole blocks; 0 if none does."""
    block = config.sparse_config.block_size
    low, high = 0, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        fits = estimate(config, num_parameters, middle * block, **settings).total <= free  # type: ignore[arg-type]
        low, high = (middle, high) if fits else (low, middle)
    return low * block
