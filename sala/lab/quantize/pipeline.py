"""From a checkpoint to a quantized one: embedding, layers one after another, head; then published atomically.

Memory holds one layer in fp32, the activations of the calibration text, and the Hessian of one site.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sala.backends.torch.loader import read_tensor, read_weight
from sala.backends.torch.model import Layer
from sala.checkpoint.arrays import as_array
from sala.checkpoint.dtypes import FILE_DTYPES
from sala.checkpoint.names import check_tensors, expected_tensors
from sala.checkpoint.packing import PACKED_PARTS, Packed, dequantize, packed_specs
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import Spec, copy_companions, new_directory, write_text, write_weights
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError
from sala.lab.quantize.awq import fold_scales
from sala.lab.quantize.calibrate import sum_hessian, summarise_site
from sala.lab.quantize.draft import WorkDirectory, open_draft, remove_draft
from sala.lab.quantize.gptq import InputStatistics, round_columns
from sala.lab.quantize.layers import (
    Chunks,
    Site,
    forget_module,
    read_layer,
    set_tensor,
    sites_of,
    walk,
    weight_of,
)
from sala.lab.quantize.plan import QuantizeSettings, plan_modules
from sala.lab.quantize.ranges import TORCH_DTYPES, expand
from sala.lab.quantize.rtn import round_matrix, round_within_ranges
from sala.lab.quantize.texts import CalibrationText
from sala.quantization_config import Groups, QuantConfig

_VERSION = 1  # of the computation; another version does not continue an old work directory
_SCALES = FILE_DTYPES | {"float32": "F16"}
_LARGEST = 6e4  # that F16 holds
_PIECE = 1 << 24

Note = Callable[[str, int, int], None]  # stage, done, total
Arrays = dict[str, tuple[Spec, Any]]  # tensor → dtype and shape, and its bytes


def quantize_model(
    source: Path,
    target: Path,
    settings: QuantizeSettings,
    text: CalibrationText | None = None,
    device: torch.device | None = None,
    may_requantize: bool = False,
    note: Note = lambda *_: None,
) -> None:
    """Write `target`. An interrupted run is continued; an existing target is never touched.

    text      what to calibrate with; not needed for rtn
    """
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already", "choose another directory, or remove it yourself")
    with Checkpoint(source) as checkpoint:
        job = _Job.of(checkpoint, settings, text, device or torch.device("cpu"), may_requantize, note)
        with open_draft(draft_of(target), job.fingerprint()) as (draft, is_old):
            if not is_old or not draft.has("embed"):
                _check_finite(checkpoint, note)
            job.run(draft)
            _publish(job, draft, target)
        remove_draft(draft.directory)


def draft_of(target: Path) -> Path:
    """Return the work directory of a target."""
    return target.parent / f".{target.name}.quantize"


def is_result(target: Path, config: SalaConfig, plan: Mapping[str, Groups | None]) -> bool:
    """Whether `target` is a complete model of this configuration, quantized by this plan."""
    if not (target / "config.json").is_file():
        return False
    found = SalaConfig.load(target)
    modules = {name: groups for name, groups in plan.items() if groups is not None}
    return found == replace(config, quantization=QuantConfig.of_modules(modules))


@dataclass(frozen=True, slots=True)
class _Job:
    checkpoint: Checkpoint
    source: SalaConfig  # of the checkpoint, which may be quantized already
    config: SalaConfig  # the same without quantization
    settings: QuantizeSettings
    text: CalibrationText | None
    plan: dict[str, Groups | None]
    device: torch.device
    note: Note

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        settings: QuantizeSettings,
        text: CalibrationText | None,
        device: torch.device,
        may_requantize: bool,
        note: Note,
    ) -> "_Job":
        config = SalaConfig.load(checkpoint.path)
        if config.quantization is not None and not may_requantize:
            raise CheckpointError(
                f"{checkpoint.path} is quantized already, and quantizing it again loses twice",
                "start from the original model, or expand this one first: --requantize",
            )
        check_tensors(checkpoint, config)
        plain = replace(config, quantization=None)
        if settings.chosen_method != "rtn" and text is None:
            raise InputError("calibration", "is missing", f"{settings.chosen_method} needs a text")
        return cls(checkpoint, config, plain, settings, text, plan_modules(plain, settings), device, note)

    @property
    def names(self) -> list[str]:
        """The names of the pieces, in order."""
        return ["embed", *(f"layer-{index:04}" for index in range(self.config.num_hidden_layers)), "head"]

    def fingerprint(self) -> str:
        text = self.text.key if self.text is not None and self.settings.chosen_method != "rtn" else ""
        wanted = asdict(self.settings) | {"method": self.settings.chosen_method, "keep": None}
        plan = {name: None if groups is None else groups.to_dict() for name, groups in self.plan.items()}
        source = self.checkpoint.fingerprint()
        for name in self.checkpoint:
            self.checkpoint.forget(name)
        facts = [_VERSION, source, self.config.to_dict(), wanted, plan, text]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def run(self, draft: WorkDirectory) -> None:
        is_blind = self.settings.chosen_method == "rtn"
        if not draft.has("embed"):
            self.save(draft, "embed", self.of_tensors(["model.embed_tokens.weight"]))
        if not draft.has("head"):
            own = [name for name in ("model.norm.weight", "lm_head.weight") if name in expected_tensors(self.config)]
            self.save(draft, "head", self.of_tensors(own))
        done, x = (0, None) if is_blind else self.activations(draft)
        for index in range(done, self.config.num_hidden_layers):
            self.note("quantizing", index, self.config.num_hidden_layers)
            name = self.names[1 + index]
            if is_blind and draft.has(name):
                continue
            layer = read_layer(self.checkpoint, self.source, index, self.device)
            try:
                packed = self.round_blindly(layer, index) if x is None else self.round_layer(layer, index, x)
            except CheckpointError as error:
                raise CheckpointError(f"layer {index}: {error.message}", error.remedy) from None
            self.save(draft, name, self.of_layer(layer, index, packed))
            del layer, packed  # before the next one is read
            if x is not None:
                draft.save_activations(index + 1, x)
        self.note("quantizing", self.config.num_hidden_layers, self.config.num_hidden_layers)

    def activations(self, draft: WorkDirectory) -> tuple[int, Tensor]:
        """Return the index of the next layer and its input."""
        found = draft.load_activations()
        if found is not None:
            return found[0], found[1].to(self.device)
        tokens = draft.load_tokens()
        if tokens is None:
            assert self.text is not None
            tokens = self.text.pieces(self.settings.num_tokens, self.settings.length)
            draft.save_tokens(tokens)
        return 0, (self.embed(tokens, draft) * self.config.scale_emb).to(self.device)

    def embed(self, tokens: Tensor, draft: WorkDirectory) -> Tensor:
        """Return the embeddings of the tokens, as quantized, in fp32."""
        unique, place = tokens.unique(return_inverse=True)
        groups = self.plan["model.embed_tokens"]
        if groups is None:
            return self.read("model.embed_tokens")[unique].float()[place]
        infos, parts = draft.tensors("embed"), {}
        for part, field in PACKED_PARTS.items():
            name = f"model.embed_tokens.{part}"
            raw = draft.read("embed", name, infos[name])
            parts[field] = as_array(raw)[unique.numpy()]
        kind = infos["model.embed_tokens.scales"].dtype
        few = Packed(**parts, bits=groups.bits, group_size=groups.group_size, dtype=kind)
        return torch.from_numpy(dequantize(few))[place]

    def read(self, module: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return read_weight(self.checkpoint, self.source, module, dtype, torch.device("cpu"))

    def scale_dtype(self, weight: Tensor) -> str:
        """Return the dtype of scales: the model's own; F16 for fp32 models unless a weight is too large for it."""
        is_large = float(weight.abs().max()) > _LARGEST
        return "F32" if is_large else _SCALES[self.config.dtype]

    def groups_within(self, index: int) -> dict[str, Groups | None]:
        prefix = f"model.layers.{index}."
        return {name.removeprefix(prefix): of for name, of in self.plan.items() if name.startswith(prefix)}

    def round_blindly(self, layer: Layer, index: int) -> dict[str, Packed]:
        out = {}
        for name, groups in self.groups_within(index).items():
            if groups is not None:
                weight = weight_of(layer, name)
                out[name] = round_matrix(weight, groups, self.scale_dtype(weight))
        return out

    def round_layer(self, layer: Layer, index: int, x: Tensor) -> dict[str, Packed]:
        """Round the layer's matrices, and run x through the rounded layer."""
        method = self.round_by_gptq if self.settings.chosen_method == "gptq" else self.round_by_awq
        return method(layer, self.groups_within(index), index, x)

    def round_by_gptq(
        self, layer: Layer, plan: Mapping[str, Groups | None], index: int, x: Tensor
    ) -> dict[str, Packed]:
        out: dict[str, Packed] = {}

        def visit(site: Site, chunks: Chunks) -> None:
            rounded = {name: groups for name in site.consumers if (groups := plan[name]) is not None}
            if not rounded:
                return
            inputs = InputStatistics.of(sum_hessian(chunks), self.settings.group_size)
            for name, groups in rounded.items():
                weight = weight_of(layer, name)
                out[name] = round_columns(weight, inputs, groups, self.scale_dtype(weight))
                set_tensor(layer, f"{name}.weight", expand(out[name]).to(self.device))

        walk(layer, x, visit)
        return out

    def round_by_awq(self, layer: Layer, plan: Mapping[str, Groups | None], index: int, x: Tensor) -> dict[str, Packed]:
        seen = {}

        def visit(site: Site, chunks: Chunks) -> None:
            seen[site.name] = summarise_site(chunks, x.shape[0] * x.shape[1])

        walk(layer, x.clone(), visit)
        dtypes = {
            name.removesuffix(".weight"): self.checkpoint.tensors[f"model.layers.{index}.{name}"].dtype
            for name, tensor in layer.named_parameters()
            if tensor.dim() == 1
        }
        seen = fold_scales(layer, seen, plan, dtypes, _SCALES[self.config.dtype])
        out: dict[str, Packed] = {}
        for site in sites_of(layer):
            for name in site.consumers:
                groups, weight = plan[name], weight_of(layer, name)
                if groups is not None:
                    out[name] = round_within_ranges(weight, seen[site.name].square, groups, self.scale_dtype(weight))
                    set_tensor(layer, f"{name}.weight", expand(out[name]).to(self.device))
        walk(layer, x)
        return out

    def of_layer(self, layer: Layer, index: int, packed: Mapping[str, Packed]) -> Arrays:
        """Return a layer's tensors as stored: rounded matrices, norms (which may be new), the rest unchanged."""
        out: Arrays = {}
        for name, tensor in layer.named_parameters():
            full = f"model.layers.{index}.{name}"
            module = name.removesuffix(".weight")
            if module in packed:
                out |= _packed_arrays(full.removesuffix(".weight"), packed[module])
            elif tensor.dim() == 1:
                dtype = self.checkpoint.tensors[full].dtype
                out[full] = ((dtype, tuple(tensor.shape)), _raw(tensor, dtype))
            else:
                out |= self.of_tensors([full])
        return out

    def of_tensors(self, names: Sequence[str]) -> Arrays:
        """Tensors outside of the layers, and those that stay whole; matrices are rounded to nearest."""
        out: Arrays = {}
        for name in names:
            module = name.removesuffix(".weight")
            groups = self.plan.get(module)
            if groups is not None:
                weight = self.read(module)
                out |= _packed_arrays(module, round_matrix(weight, groups, self.scale_dtype(weight)))
                forget_module(self.checkpoint, module)
            elif name not in self.checkpoint.tensors or self.checkpoint.tensors[name].dtype not in TORCH_DTYPES:
                dtype = FILE_DTYPES[self.config.dtype]
                weight = self.read(module, TORCH_DTYPES[dtype])
                out[name] = ((dtype, tuple(weight.shape)), _raw(weight, dtype))
            else:
                raw = self.checkpoint.read(name)
                out[name] = ((raw.dtype, raw.shape), raw.data)
        return out

    def save(self, draft: WorkDirectory, name: str, arrays: Arrays) -> None:
        specs = {tensor: spec for tensor, (spec, _) in arrays.items()}
        draft.save(name, specs, lambda tensor: arrays[tensor][1])


def _publish(job: _Job, draft: WorkDirectory, target: Path) -> None:
    """Write the target from all pieces."""
    infos = {tensor: (name, info) for name in job.names for tensor, info in draft.tensors(name).items()}
    modules = {name: groups for name, groups in job.plan.items() if groups is not None}
    wanted = expected_tensors(job.config, modules)
    specs = {tensor: (infos[tensor][1].dtype, infos[tensor][1].shape) for tensor in wanted}
    config = replace(job.config, quantization=QuantConfig.of_modules(modules))
    with new_directory(target) as new:
        write_weights(new, specs, lambda tensor: draft.read(infos[tensor][0], tensor, infos[tensor][1]).data)
        write_text(new / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")
        copy_companions(job.checkpoint.path, new)


def _check_finite(checkpoint: Checkpoint, note: Note) -> None:
    """Raise, before hours of work, if a weight is infinite or NaN."""
    total = len(checkpoint.tensors)
    for done, (name, info) in enumerate(checkpoint.tensors.items()):
        note("checking", done, total)
        if info.dtype in TORCH_DTYPES and not _is_finite(checkpoint, name, info.dtype):
            raise CheckpointError(f"{name} has a weight that is infinite or NaN", "the original model is damaged")
    note("checking", total, total)


def _is_finite(checkpoint: Checkpoint, name: str, dtype: str) -> bool:
    values = read_tensor(checkpoint, name, TORCH_DTYPES[dtype], torch.device("cpu")).view(-1)
    is_finite = all(bool(torch.isfinite(values[at : at + _PIECE]).all()) for at in range(0, len(values), _PIECE))
    checkpoint.forget(name)
    return is_finite


def _packed_arrays(module: str, packed: Packed) -> Arrays:
    return {
        name: (spec, _view(getattr(packed, PACKED_PARTS[name.removeprefix(f"{module}.")])))
        for name, spec in packed_specs(module, packed).items()
    }


def _view(values: Any) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _raw(tensor: Tensor, dtype: str) -> memoryview:
    held = tensor.detach().cpu().to(TORCH_DTYPES[dtype]).contiguous().view(-1)
    return held.view(torch.uint8).numpy().data if held.numel() else memoryview(b"")
