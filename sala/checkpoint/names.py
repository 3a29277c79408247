"""The tensors that a checkpoint of a given configuration must hold, and a check that it does."""

import math
from collections.abc import Mapping

from sala.checkpoint.dtypes import FLOAT_DTYPES
from sala.checkpoint.external_formats import TensorRule, find_modules, groups_of, parts_of
from sala.checkpoint.reader import Checkpoint, TensorInfo
from sala.config import SalaConfig
from sala.errors import CheckpointError
from sala.quantization_config import QKV_LINEARS, Groups, matrix_modules

SCALES = ("scales", "biases")


def expected_tensors(config: SalaConfig, packed: Mapping[str, Groups] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name, in the order of the computation.

    Modules of `packed` have the shapes of their codes, scales and biases; all others those of their weights.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index, mixer in enumerate(config.mixers):
        layer = {
            "input_layernorm.weight": (hidden,),
            **_mixer(config, mixer),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return _pack_shapes(shapes, packed) if packed else shapes


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
    if config.attn_qk_norm if is_sparse else config.qk_norm:
        shapes |= {"q_norm": (dim,), "k_norm": (dim,)}
    if is_sparse and config.attn_use_output_gate:
        shapes["o_gate"] = (width, hidden)
    if not is_sparse and config.use_output_norm:
        shapes["o_norm"] = (width,)
    if not is_sparse and config.use_output_gate:
        shapes["z_proj"] = (width, hidden)
    named = {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}
    if config.attention_bias:
        named |= {f"self_attn.{name}.bias": shapes[name][:1] for name in QKV_LINEARS}
    return named


def check_tensors(checkpoint: Checkpoint, config: SalaConfig) -> None:
    """Compare names, shapes and precisions with the configuration; raise CheckpointError at the first difference."""
    found = dict(checkpoint.tensors)
    if config.tie_word_embeddings:
        for leaf in ("weight", *SCALES):
            found.pop(f"lm_head.{leaf}", None)  # some writers store the shared matrix twice
    packed = quantized_modules(found, config)
    expected = _expected_parts(found, config, packed)
    where = checkpoint.path
    missing = [name for name, part in expected.items() if part.is_required and name not in found]
    _refuse(where, "lacks", missing, "download it again")
    strange = [name for name in found if name not in expected]
    _refuse(where, "has unexpected", strange, "config.json belongs to another model")
    for name, part in expected.items():
        if name in found and found[name].shape not in part.shapes:
            wanted = " or ".join(str(list(shape)) for shape in part.shapes)
            message = f"{where}: {name} is {list(found[name].shape)}, config.json says {wanted}"
            raise CheckpointError(message, "the two do not belong together")
        if name in found and found[name].dtype not in part.dtypes:
            message = f"{where}: {name} is stored as {found[name].dtype}"
            raise CheckpointError(message, "weights must be " + ", ".join(part.dtypes))
    for module in packed:
        scales, biases = (found.get(f"{module}.{leaf}") for leaf in SCALES)
        if scales is not None and biases is not None and scales.dtype != biases.dtype:
            raise CheckpointError(f"{where}: scales and biases of {module} differ in precision", "quantize it again")


def _expected_parts(
    found: Mapping[str, TensorInfo], config: SalaConfig, packed: Mapping[str, Groups]
) -> dict[str, TensorRule]:
    """Return what every tensor must be in the layout that config.json states."""
    layout = config.layout
    if layout is None:
        codes = {f"{module}.weight" for module in packed}
        return {
            name: TensorRule((shape,), ("U32",) if name in codes else FLOAT_DTYPES)
            for name, shape in expected_tensors(config, packed).items()
        }
    parts = {name: TensorRule((shape,), FLOAT_DTYPES) for name, shape in expected_tensors(config).items()}
    for module, matrix in external_modules(found, config).items():
        del parts[f"{module}.weight"]
        parts |= parts_of(module, matrix, layout, found)
    return parts


def external_modules(tensors: Mapping[str, TensorInfo], config: SalaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of the matrix of every module in an external format."""
    layout, shapes = config.layout, expected_tensors(config)
    if layout is None:
        return {}
    names = find_modules(tensors, layout)
    if not names:
        message = f"config.json says {layout.describe()}, but no tensor has that format"
        raise CheckpointError(message, "they belong to different models")
    linears = matrix_modules(config.mixers) - {"model.embed_tokens"}
    strange = [name for name in names if name not in linears or f"{name}.weight" not in shapes]
    _refuse("the checkpoint", "is quantized in", strange, "only linear layers can be")
    spared = [name for name in names if layout.is_spared(name)]
    _refuse("the checkpoint", "is quantized in", spared, "config.json says that it is not")
    return {name: shapes[f"{name}.weight"] for name in names}


def quantized_modules(tensors: Mapping[str, TensorInfo], config: SalaConfig) -> dict[str, Groups]:
    """Return the groups of every quantized module; raise CheckpointError if config.json says otherwise.

    Modules in external formats have the groups that they are read in; FP8 is read as plain weights.
    """
    names = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    quant, layout = config.quantization, config.layout
    if layout is not None:
        modules = external_modules(tensors, config) if layout.kind != "fp8" else {}
        return {name: groups_of(name, shape, layout) for name, shape in modules.items()}
    if quant is None:
        _refuse("the checkpoint", "is quantized, but config.json does not mention", names, "add its quantization table")
        return {}
    if not names:
        message = f"config.json says {quant.bits} bits, but no tensor has scales"
        raise CheckpointError(message, "they belong to different models")
    wanted = [name for name, groups in quant.overrides if groups is not None and name not in names]
    _refuse("the checkpoint", "lacks scales of", wanted, "config.json says that it is quantized")
    packed = {name: quant.of(name) for name in names}
    spared = [name for name, groups in packed.items() if groups is None]
    _refuse("the checkpoint", "has scales of", spared, "config.json says that it is not quantized")
    return {name: groups for name, groups in packed.items() if groups is not None}


def _pack_shapes(shapes: dict[str, tuple[int, ...]], packed: Mapping[str, Groups]) -> dict[str, tuple[int, ...]]:
    """Return shapes as in the file: codes as words, then scales and biases."""
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        groups = packed.get(module) if leaf == "weight" and len(shape) == 2 else None
        if groups is None:
            out[name] = shape
            continue
        if shape[1] % groups.group_size:
            raise CheckpointError(f"{module} {list(shape)} has no groups of {groups.group_size}", "use smaller groups")
        out[name] = (shape[0], shape[1] * groups.bits // 32)
        out |= {f"{module}.{part}": (shape[0], shape[1] // groups.group_size) for part in SCALES}
    return out


def _refuse(where: object, verb: str, names: list[str], remedy: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(f"{where} {verb} tensor {names[0]}{more}", remedy)


def count_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))
