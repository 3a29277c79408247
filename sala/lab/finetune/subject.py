"""The model that is tuned: whole, with an adapter on plain weights, or with one on frozen weights of few bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.torch.loader import (
    pick_dtype,
    read_external,
    read_packed,
    read_tensor,
    read_weight,
    to_affine,
)
from sala.backends.torch.model import SalaModel
from sala.backends.torch.quantized_linear import AffineWeight
from sala.checkpoint.names import check_tensors, external_modules, quantized_modules
from sala.checkpoint.packing import quantize
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError, MissingExtra
from sala.lab.finetune.frozen import FrozenLinear
from sala.lab.finetune.options import FinetuneOptions
from sala.quantization_config import GROUP_SIZES, LINEARS

QK_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")


def load_subject(path: Path, options: FinetuneOptions, device: torch.device) -> Any:
    """The model of transformers, ready for its Trainer: what learns has gradients, what does not is frozen."""
    targets = find_targets(options.targets, SalaConfig.load(path)) if options.has_adapter else []
    model = load_base(path, options, device)
    return add_adapter(model, options, targets) if options.has_adapter else model


def load_base(path: Path, options: FinetuneOptions, device: torch.device) -> Any:
    """The model without an adapter."""
    from sala.plugins.transformers.loading import adopt

    config = SalaConfig.load(path)
    dtype = training_dtype(options, config, device)
    torch.manual_seed(options.seed)
    with Checkpoint(path) as checkpoint:
        put = packer(options, device) if options.method == "qlora" else None
        model = adopt(_fill(checkpoint, config, dtype, device, put), path, dtype)
    model.loss_rows = options.loss_rows
    model.config.use_cache = False
    return model


def training_dtype(options: FinetuneOptions, config: SalaConfig, device: torch.device) -> torch.dtype:
    """As asked; else fp32 for what learns whole and for CPUs, and the checkpoint's own under an adapter on a GPU."""
    if options.dtype != "auto":
        return pick_dtype(options.dtype, config)
    if options.method == "full":
        return torch.bfloat16 if options.optimizer == "adamw-bf16" else torch.float32
    return torch.float32 if device.type == "cpu" else pick_dtype("auto", config)


def find_targets(names: str, config: SalaConfig) -> list[str]:
    """The linears that get an adapter, by their last name."""
    from sala.quantization_config import LINEARS, matrix_modules

    present = {name.rpartition(".")[2] for name in matrix_modules(config.mixers)}
    known = [name for name in LINEARS if name in present]
    if not config.use_output_gate:
        known = [name for name in known if name != "z_proj"]
    if not config.attn_use_output_gate:
        known = [name for name in known if name != "o_gate"]
    if names == "all":
        return known
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    strange = [name for name in chosen if name not in known]
    if strange or not chosen:
        raise InputError(
            "targets", f"has {strange[0][:60]!r}" if strange else "is empty", "use all, or " + ", ".join(known)
        )
    return chosen


def add_adapter(model: Any, options: FinetuneOptions, targets: list[str]) -> Any:
    settings = adapter_settings(options, targets)
    from peft import get_peft_model

    return get_peft_model(model, settings)


def adapter_settings(options: FinetuneOptions, targets: list[str]) -> Any:
    """The adapter as peft describes it."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise MissingExtra("peft", "train") from None
    return LoraConfig(
        r=options.rank,
        lora_alpha=int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )


Pack = Callable[[Checkpoint, SalaConfig, str, nn.Parameter | None, torch.dtype], nn.Module]


def _fill(
    checkpoint: Checkpoint, config: SalaConfig, dtype: torch.dtype, device: torch.device, put: Pack | None
) -> SalaModel:
    """Our model with memory of its own; where there is a `put`, it makes the linears of the layers."""
    check_tensors(checkpoint, config)
    with torch.device("meta"):
        model = SalaModel(replace(config, quantization=None))
    for name, parameter in list(model.named_parameters()):
        place, _, leaf = name.rpartition(".")
        if put is not None and _is_packed(model, place) and leaf == "weight":
            continue
        tensor = _read(checkpoint, config, place, leaf, parameter, dtype, device)
        setattr(model.get_submodule(place), leaf, nn.Parameter(tensor.clone() if _is_mapped(tensor) else tensor))
    if put is not None:
        for name, module in list(model.named_modules()):
            if _is_packed(model, name) and isinstance(module, nn.Linear):
                model.set_submodule(name, put(checkpoint, config, name, module.bias, dtype))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _is_packed(model: SalaModel, name: str) -> bool:
    return name.startswith("model.layers.") and name.rpartition(".")[2] in LINEARS


def _is_mapped(tensor: Tensor) -> bool:
    """Whether its memory may be a file's."""
    return tensor.device.type == "cpu"


def _read(
    checkpoint: Checkpoint,
    config: SalaConfig,
    place: str,
    leaf: str,
    parameter: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    if leaf == "weight" and parameter.dim() == 2:
        return read_weight(checkpoint, config, place, dtype, device)
    return read_tensor(checkpoint, f"{place}.{leaf}", dtype, device)


def packer(options: FinetuneOptions, device: torch.device) -> Pack:
    """Makes the frozen linears of QLoRA. A base that is quantized already keeps its own codes."""
    wants_nf4 = options.format == "nf4" or (options.format == "auto" and device.type == "cuda" and _has_bitsandbytes())
    if wants_nf4 and device.type != "cuda":
        raise InputError("format", "is nf4, which needs an NVIDIA GPU", "use sala")
    if options.format == "nf4" and not _has_bitsandbytes():
        raise InputError("format", "is nf4, which needs bitsandbytes", "run: pip install bitsandbytes; or use sala")

    def put(
        checkpoint: Checkpoint, config: SalaConfig, name: str, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> nn.Module:
        affine, order = _stored(checkpoint, config, name)
        if affine is None and wants_nf4:
            return _nf4(read_weight(checkpoint, config, name, dtype, torch.device("cpu")), bias, dtype, device)
        if affine is None:
            affine = _rounded(read_weight(checkpoint, config, name, torch.float32, torch.device("cpu")), options.bits)
        parts = {part: getattr(affine, part).to(device, copy=True) for part in ("codes", "scales", "biases")}
        return FrozenLinear(replace(affine, **parts), bias, None if order is None else order.to(device))

    return put


def _stored(checkpoint: Checkpoint, config: SalaConfig, name: str) -> tuple[AffineWeight | None, Tensor | None]:
    """A matrix as the checkpoint has it in few bits; None if it is plain, or FP8."""
    layout = config.quantization.layout if config.quantization is not None else None
    shape = external_modules(checkpoint.tensors, config).get(name)
    if layout is not None and shape is not None:
        return (None, None) if layout.kind == "fp8" else read_external(checkpoint, name, shape, layout)
    groups = quantized_modules(checkpoint.tensors, config).get(name)
    return (None if groups is None else read_packed(checkpoint, name, groups)), None


def _rounded(weight: Tensor, bits: int) -> AffineWeight:
    """To the nearest codes, in the largest groups of at most 64 that fit."""
    size = max((size for size in GROUP_SIZES if size <= 64 and weight.shape[1] % size == 0), default=None)
    if size is None:
        raise InputError("method", f"is qlora, but {weight.shape[1]} inputs make no groups", "use lora")
    return to_affine(quantize(weight.numpy(), bits, size, "F16"))


def _has_bitsandbytes() -> bool:
    from importlib.util import find_spec

    return find_spec("bitsandbytes") is not None


def _nf4(weight: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A linear of bitsandbytes: four bits of a normal distribution, scales quantized again."""
    import bitsandbytes as bnb  # type: ignore[import-not-found,unused-ignore]

    linear = bnb.nn.Linear4bit(
        weight.shape[1], weight.shape[0], bias is not None, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    linear.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    linear.bias = bias
    moved: nn.Module = linear.to(device)
    return moved
