"""Which tensors a checkpoint of a given configuration must hold, and whether it does."""

from collections.abc import Mapping

from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import CheckpointError

FLOAT_DTYPES = ("BF16", "F16", "F32")


def expected_tensors(config: SalaConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor, in the order of the computation."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index, mixer in enumerate(config.mixers):
        layer = {"input_layernorm.weight": (hidden,), **_mixer(config, mixer), **_mlp(config)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _mixer(config: SalaConfig, mixer: str) -> dict[str, tuple[int, ...]]:
    is_sparse = mixer == "sparse"
    dim = config.head_dim if is_sparse else config.lightning_head_dim
    width = dim * (config.num_attention_heads if is_sparse else config.lightning_nh)
    kv_width = dim * (config.num_key_value_heads if is_sparse else config.lightning_nkv)
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (width, hidden),
        "k_proj": (kv_width, hidden),
        "v_proj": (kv_width, hidden),
        "o_proj": (hidden, width),
    }
    optional: dict[str, tuple[tuple[int, ...], bool]]
    if is_sparse:
        optional = {"o_gate": ((width, hidden), config.attn_use_output_gate)}
    else:
        optional = {
            "q_norm": ((dim,), config.qk_norm),
            "k_norm": ((dim,), config.qk_norm),
            "o_norm": ((width,), config.use_output_norm),
            "z_proj": ((width, hidden), config.use_output_gate),
        }
    shapes |= {name: shape for name, (shape, is_present) in optional.items() if is_present}
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _mlp(config: SalaConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def check_tensors(checkpoint: Checkpoint, config: SalaConfig) -> None:
    """Names, shapes and precisions against the configuration; the first difference is the error."""
    expected = expected_tensors(config)
    found = dict(checkpoint.tensors)
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # some writers store the shared matrix twice
    where = checkpoint.path
    _refuse(where, "lacks", [name for name in expected if name not in found], "download it again")
    _refuse(
        where,
        "has unexpected",
        [name for name in found if name not in expected],
        "config.json is of another model",
    )
    for name, shape in expected.items():
        info = found[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{where}: {name} is {list(info.shape)}, config.json says {list(shape)}",
                "they do not belong together",
            )
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{where}: {name} is stored as {info.dtype}", "weights must be " + ", ".join(FLOAT_DTYPES)
            )


def _refuse(where: object, verb: str, names: list[str], remedy: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(f"{where} {verb} tensor {names[0]}{more}", remedy)


def count_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    total = 0
    for shape in shapes.values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total
