"""How vLLM would divide the memory of its GPUs for a SALA model: blocks of many tokens, the same size for all layers.

A block of a sparse layer holds keys, values and pooled keys of its tokens; a block of a lightning layer one state.
vLLM makes blocks so long that a state fits into one, and divides the layers into groups of the same number of layers,
each with its own blocks.
"""

from dataclasses import dataclass

from sala.backends import memory as mem
from sala.config import SalaConfig
from sala.plugins.vllm.memory import BlockLayout

UTILIZATION = 0.92  # of a GPU's memory, the default of vLLM's --gpu-memory-utilization
STATES = 2  # per lightning layer and sequence: the running one, and that of the last whole block


@dataclass(frozen=True)
class BlockPlan:
    """Sizes on each GPU; `groups` are those of sparse and of lightning layers."""

    block_tokens: int
    block_bytes: int
    groups: tuple[int, int]

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks a sequence takes."""
        sparse, lightning = self.groups
        return sparse * -(-num_tokens // self.block_tokens) + lightning * STATES

    def bytes_of(self, num_tokens: int) -> int:
        return self.blocks_of(num_tokens) * self.block_bytes

    def longest(self, budget: int) -> int:
        """Return the tokens of the longest sequence within so many bytes."""
        sparse, lightning = self.groups
        return max(0, budget // self.block_bytes - lightning * STATES) // max(1, sparse) * self.block_tokens


def plan_blocks(config: SalaConfig, element_bytes: int, num_ranks: int = 1, num_stages: int = 1) -> BlockPlan:
    """`num_ranks` GPUs share each layer, `num_stages` groups of GPUs share the layers."""
    layout = BlockLayout(config.sparse_config, max(1, config.num_key_value_heads // num_ranks), config.head_dim)
    num_sparse = len(config.sparse_layers)
    num_lightning = config.num_hidden_layers - num_sparse
    least, most = sorted((num_sparse or num_lightning, num_lightning or num_sparse))
    per_group = most if most < 1.5 * least else least
    groups = -(-num_sparse // per_group), -(-num_lightning // per_group)
    token = layout.token_bytes(element_bytes)
    state = mem.state_bytes(config) // max(1, num_lightning) // num_ranks if num_lightning else 0
    step = layout.block_tokens
    tokens = step * max(1, -(-state // (step * token)))
    return BlockPlan(tokens, -(-per_group // num_stages) * tokens * token, groups)
