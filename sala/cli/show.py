"""`sala show`: describe a checkpoint from its headers alone; no weight is read."""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from sala.cli import flags as s
from sala.cli.outputs import print_facts, print_json, size
from sala.config import ALWAYS_DENSE, SalaConfig
from sala.options import ATTENTION_FIELDS, Options

if TYPE_CHECKING:
    from sala.checkpoint.reader import Checkpoint
    from sala.quantization_config import Groups

LENGTHS = {"1K": 1 << 10, "8K": 1 << 13, "128K": 1 << 17, "1M": 1 << 20}


@s.derived
def show(
    *,
    model: Annotated[str | None, s.argument("Checkpoint directory.", envvar="SALA_MODEL")] = None,
    as_json: s.AsJson = False,
    options: Annotated[Options, s.Use(only=ATTENTION_FIELDS)],
) -> None:
    from sala.checkpoint.names import check_tensors
    from sala.checkpoint.reader import Checkpoint
    from sala.generation_config import recommended_sampling

    path = s.find_model(model)
    own = SalaConfig.load(path)
    config = own.attending(options.attention_choice)
    with Checkpoint(path) as checkpoint:
        check_tensors(checkpoint, config)
        facts = {**describe(config, checkpoint), "sampling": recommended_sampling(path, config)}
    if as_json:
        print_json(facts)
    else:
        _print(str(path), facts, config)
        changes = config.sparse_config.describe_changes(own.sparse_config)
        if changes:
            s.write_out(changes)


def describe(config: "SalaConfig", checkpoint: "Checkpoint") -> dict[str, Any]:
    from sala.backends.memory import ELEMENT_BYTES, cache_bytes, state_bytes, step_bytes
    from sala.checkpoint.names import count_parameters, expected_tensors, external_modules, quantized_modules

    element = ELEMENT_BYTES[config.dtype]
    sparse, packed = config.sparse_config, quantized_modules(checkpoint.tensors, config)
    state = state_bytes(config)
    layout = config.layout
    return {
        "parameters": count_parameters(expected_tensors(config)),
        "weight_bytes": checkpoint.nbytes,
        "files": len({info.file for info in checkpoint.tensors.values()}),
        "dtype": config.dtype,
        "quantization": _bits(packed.values()) if layout is None else layout.describe(),
        "quantized_modules": len(packed or external_modules(checkpoint.tensors, config)),
        "layers": config.num_hidden_layers,
        "sparse_layers": list(config.sparse_layers),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "sparse_heads": [config.num_attention_heads, config.num_key_value_heads, config.head_dim],
        "lightning_heads": [config.lightning_nh, config.lightning_nkv, config.lightning_head_dim],
        "blocks_per_query": sparse.num_selected,
        "block_size": sparse.block_size,
        "dense_below": sparse.dense_len if sparse.dense_len < ALWAYS_DENSE else None,
        "max_position_embeddings": config.max_position_embeddings,
        "trained_length": config.trained_length,
        "state_bytes": state,
        "cache_bytes": {name: cache_bytes(config, length, element) + state for name, length in LENGTHS.items()},
        "step_bytes": {name: step_bytes(config, length, element) + state for name, length in LENGTHS.items()},
    }


def _sight(blocks: str, dense_below: int | None) -> str:
    if dense_below is None:
        return "everything, at any length"
    return blocks + (f"; everything while there are fewer than {dense_below:,} tokens" if dense_below else "")


def _bits(groups: Iterable["Groups"]) -> str | None:
    """What is most frequent first."""
    kinds = Counter(f"{one.bits} bits, groups of {one.group_size}" for one in groups)
    return "; ".join(kind for kind, _ in kinds.most_common()) or None


def _print(path: str, facts: dict[str, Any], config: "SalaConfig") -> None:
    yellow, cyan, plain = ("\033[1;33m", "\033[36m", "\033[0m") if s.uses_colour(sys.stdout) else ("", "", "")
    marks = {"sparse": f"{yellow}S{plain}", "lightning": f"{cyan}·{plain}"}
    q, kv, dim = facts["sparse_heads"]
    lq, lkv, ldim = facts["lightning_heads"]
    weights = size(facts["weight_bytes"])
    blocks = f"{facts['blocks_per_query']} blocks of {facts['block_size']} tokens"
    rows = {
        "parameters": f"{facts['parameters']:,}",
        "weights": f"{weights} in {facts['files']} file(s), {facts['quantization'] or facts['dtype']}",
        "layers": "".join(marks[mixer] for mixer in config.mixers),
        "": f"{len(config.sparse_layers)} sparse (S), {len(config.lightning_layers)} lightning (·)",
        "hidden, MLP": f"{facts['hidden_size']:,}, {facts['intermediate_size']:,}",
        "vocabulary": f"{facts['vocab_size']:,}",
        "sparse heads": f"{q} query, {kv} key/value, of {dim}",
        "lightning heads": f"{lq} query, {lkv} key/value, of {ldim}",
        "a query sees": _sight(blocks, facts["dense_below"]),
        "trained context": f"{facts['trained_length'] or facts['max_position_embeddings']:,} tokens",
    }
    if facts["sampling"]:
        rows["sampling"] = ", ".join(f"{name} {value:g}" for name, value in facts["sampling"].items())
    for name, count in facts["cache_bytes"].items():
        read = size(facts["step_bytes"][name])
        rows[f"memory at {name}"] = f"{size(count)} cache + {weights} weights; a token reads {read} of the cache"
    print_facts(path, rows)
