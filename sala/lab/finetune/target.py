"""Load the model to fine-tune: all weights trainable, or frozen (plain or quantized) weights with an adapter."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.torch.loader import pick_dtype, read_parameter, to_affine
from sala.backends.torch.model import SalaModel
from sala.checkpoint.matrices import QuantizedMatrices
from sala.checkpoint.packing import Packed, quantize
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.finetune.frozen import FrozenLinear
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.train.models import load_for_training
from sala.lab.train.parts import PARTS, parts_of
from sala.quantization_config import GROUP_SIZES, LINEARS, matrix_modules


def load_target(path: Path, options: FinetuneOptions, device: torch.device) -> Any:
    """Return a transformers model ready for its Trainer; only the weights to train require gradients."""
    settings = adapter_settings(options, SalaConfig.load(path))
    model = load_base(path, options, device)
    if settings is None:
        return model
    from peft import get_peft_model

    return get_peft_model(model, settings)


def load_base(path: Path, options: FinetuneOptions, device: torch.device) -> Any:
    """Return the model without an adapter."""
    from sala.plugins.transformers.loading import adopt

    config = SalaConfig.load(path)
    dtype = training_dtype(options, config, device)
    torch.manual_seed(options.seed)
    if options.method == "qlora":
        source = _load_frozen(path, options, dtype, device)
    else:
        source = load_for_training(path, device, dtype, kernels=options.kernels)
    model = adopt(source, path, dtype)
    model.loss_rows = options.loss_rows
    model.config.use_cache = False
    if not options.has_adapter:
        parts = find_parts(options.learns)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not parts.isdisjoint(parts_of(name, config)))
    return model


def training_dtype(options: FinetuneOptions, config: SalaConfig, device: torch.device) -> torch.dtype:
    """Return the requested dtype; by default fp32 for full fine-tuning and on CPUs, else the checkpoint's dtype."""
    if options.dtype != "auto":
        return pick_dtype(options.dtype, config)
    if options.method == "full":
        return torch.bfloat16 if options.optimizer == "adamw-bf16" else torch.float32
    return torch.float32 if device.type == "cpu" else pick_dtype("auto", config)


def find_targets(names: str, config: SalaConfig) -> list[str]:
    """Return the names of the linears that get an adapter; raise InputError for a name that the model lacks."""
    present = {name.rpartition(".")[2] for name in matrix_modules(config.mixers)}
    absent = {"z_proj": not config.use_output_gate, "o_gate": not config.attn_use_output_gate}
    known = [name for name in LINEARS if name in present and not absent.get(name)]
    if names == "all":
        return known
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        what = f"has {unknown[0][:60]!r}" if unknown else "is empty"
        raise InputError("targets", what, "use all, or " + ", ".join(known))
    return chosen


def find_parts(names: str) -> set[str]:
    """Return the parts that learn; raise InputError for an unknown one."""
    chosen = {name.strip() for name in names.split(",") if name.strip()}
    unknown = sorted(chosen - set(PARTS))
    if unknown or not chosen:
        what = f"has {unknown[0][:60]!r}" if unknown else "is empty"
        raise InputError("learns", what, "use " + ", ".join(PARTS))
    return chosen


def find_modules(options: FinetuneOptions, config: SalaConfig) -> list[str]:
    """Return what peft calls its target modules: names of linears, or of single modules if only some parts learn."""
    targets, parts = find_targets(options.targets, config), find_parts(options.learns)
    if "all" in parts:
        return targets
    modules = sorted(
        name
        for name in matrix_modules(config.mixers)
        if name.rpartition(".")[2] in targets and not parts.isdisjoint(parts_of(name, config))
    )
    if not modules:
        raise InputError("learns", f"is {options.learns}, in which no linear gets an adapter", "use --method full")
    return modules


def adapter_settings(options: FinetuneOptions, config: SalaConfig) -> Any:
    """Return peft's configuration of the adapter; None without an adapter."""
    if not options.has_adapter:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=options.rank,
        lora_alpha=int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        target_modules=find_modules(options, config),
        bias="none",
        task_type="CAUSAL_LM",
    )


def _wants_nf4(options: FinetuneOptions, device: torch.device) -> bool:
    """Return whether QLoRA quantizes with bitsandbytes; raise InputError if NF4 is requested but not available."""
    has_bitsandbytes = find_spec("bitsandbytes") is not None
    wants_nf4 = options.format == "nf4" or (options.format == "auto" and device.type == "cuda" and has_bitsandbytes)
    if wants_nf4 and device.type != "cuda":
        raise InputError("format", "is nf4, which needs an NVIDIA GPU", "use sala")
    if wants_nf4 and not has_bitsandbytes:
        raise InputError("format", "is nf4, which needs bitsandbytes", "run: pip install bitsandbytes; or use sala")
    return wants_nf4


def _load_frozen(path: Path, options: FinetuneOptions, dtype: torch.dtype, device: torch.device) -> SalaModel:
    """Return a model with the frozen linears of QLoRA in its layers; a quantized base keeps its own codes."""
    wants_nf4, config, cpu = _wants_nf4(options, device), SalaConfig.load(path), torch.device("cpu")
    linears = {name for name in matrix_modules(config.mixers) if name.startswith("model.layers.")}

    def is_plain(name: str) -> bool:
        return name.removesuffix(".weight") not in linears

    model = load_for_training(path, device, dtype, is_plain, options.kernels)
    with Checkpoint(path) as checkpoint:
        matrices = QuantizedMatrices(checkpoint, config)
        for name, module in list(model.named_modules()):
            if name not in linears:
                continue
            bias: Any = module.bias
            packed = matrices.read(name) if name in matrices else None
            if not isinstance(packed, Packed):  # plain or FP8
                kind = dtype if wants_nf4 else torch.float32
                weight = read_parameter(checkpoint, config, f"{name}.weight", kind, cpu)
                if wants_nf4:
                    model.set_submodule(name, _nf4(weight, bias, dtype, device))
                    continue
                packed = _quantize(weight, options.bits)
            affine = to_affine(packed).map(lambda part: part.to(device, copy=True))
            order = None if packed.order is None else torch.from_numpy(packed.order).to(device)
            model.set_submodule(name, FrozenLinear(affine, bias, order))
    return model


def _quantize(weight: Tensor, bits: int) -> Packed:
    """Round to the nearest codes, in the largest groups of at most 64 that divide the columns."""
    size = max((size for size in GROUP_SIZES if size <= 64 and weight.shape[1] % size == 0), default=None)
    if size is None:
        raise InputError("method", f"is qlora, but {weight.shape[1]} columns cannot be grouped", "use lora")
    return quantize(weight.numpy(), bits, size, "F16")


def _nf4(weight: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return an NF4 linear of bitsandbytes with double quantization."""
    import bitsandbytes as bnb  # type: ignore[import-not-found,unused-ignore]

    linear = bnb.nn.Linear4bit(
        weight.shape[1], weight.shape[0], bias is not None, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    linear.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    linear.bias = bias
    moved: nn.Module = linear.to(device)
    return moved
