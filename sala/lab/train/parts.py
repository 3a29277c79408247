"""The parts of a model that a run can train: which of them a parameter or module belongs to."""

from typing import Literal, get_args

from sala.config import SalaConfig

Part = Literal["all", "mixers", "attention", "lightning", "mlps", "norms", "embeddings"]
PARTS: tuple[Part, ...] = get_args(Part)
_BY_NAME = {".self_attn.": "mixers", ".mlp.": "mlps", "norm": "norms"}  # what names contain; the first wins


def parts_of(name: str, config: SalaConfig) -> set[str]:
    """Return the parts that a parameter or module belongs to.

    The attention layers' mixers are `attention`, the others' `lightning`, and all together `mixers`.
    """
    part = next((part for words, part in _BY_NAME.items() if words in name), "embeddings")
    found = {"all", part}
    if part == "mixers":
        index = int(name.partition("model.layers.")[2].partition(".")[0])
        found.add("attention" if config.mixers[index] == "sparse" else "lightning")
    return found
