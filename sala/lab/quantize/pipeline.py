"""From a checkpoint to a quantized one: embedding, layers one after another, head; then published atomically.

Memory holds one layer in fp32, the activations of the calibration text, and the Hessian of one site.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.loader import read_parameter, read_tensor
from sala.backends.torch.model import Layer
from sala.checkpoint.arrays import as_array, as_bytes
from sala.checkpoint.dtypes import FILE_DTYPES
from sala.checkpoint.names import check_tensors, expected_tensors
from sala.checkpoint.packing import PACKED_PARTS, Packed, packed_specs
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import Spec, check_new, copy_companions, new_directory, write_model
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError
from sala.lab.quantize.awq import SiteStatistics, fold_scales, summarise_site
from sala.lab.quantize.draft import Arrays, WorkDirectory, open_draft, remove, remove_published
from sala.lab.quantize.gptq import InputStatistics, round_columns, sum_hessian
from sala.lab.quantize.layers import Chunks, Site, forget_module, read_layer, sites_of, walk, weight_of
from sala.lab.quantize.plan import QuantizeSettings, plan_modules
from sala.lab.quantize.ranges import TORCH_DTYPES, expand, round_matrix, round_within_ranges
from sala.lab.quantize.texts import CalibrationText
from sala.lab.train.models import set_tensor, tensor_bytes
from sala.quantization_config import Groups, QuantConfig

_VERSION = 2  # of the computation; another version does not continue an old work directory
_SCALES = FILE_DTYPES | {"float32": "F16"}
_LARGEST = 6e4  # that F16 holds
_PIECE = 1 << 24

Note = Callable[[str, int, int], None]  # stage, done, total


def quantize_model(
    source: Path,
    target: Path,
    settings: QuantizeSettings,
    text: CalibrationText | None = None,
    device: torch.device | None = None,
    may_requantize: bool = False,
    note: Note = lambda *_: None,
    kernels: str = "auto",
) -> None:
    """Write `target`. An interrupted run is continued; an existing target is never touched.

    text      what to calibrate with; not needed for rtn
    """
    if target.is_dir():
        remove_published(draft_of(target))
    check_new(target)
    with Checkpoint(source) as checkpoint:
        job = _Job(checkpoint, settings, text, device or torch.device("cpu"), may_requantize, note, kernels)
        with open_draft(draft_of(target), job.fingerprint()) as (draft, is_old):
            if not is_old or not draft.has("embed"):
                _check_finite(checkpoint, note)
            job.run(draft)
            _publish(job, draft, target)
        remove(draft.directory)


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


@dataclass
class _Job:
    checkpoint: Checkpoint
    settings: QuantizeSettings
    text: CalibrationText | None
    device: torch.device
    may_requantize: bool
    note: Note
    kernels: str

    def __post_init__(self) -> None:
        self.source = SalaConfig.load(self.checkpoint.path)  # the checkpoint may be quantized already
        if self.source.quantization is not None and not self.may_requantize:
            message = f"{self.checkpoint.path} is quantized already, and quantizing it again loses twice"
            raise CheckpointError(message, "start from the original model, or expand this one first: --requantize")
        check_tensors(self.checkpoint, self.source)
        self.method = self.settings.chosen_method
        if self.method != "rtn" and self.text is None:
            raise InputError("calibration", "is missing", f"{self.method} needs a text")
        self.config = replace(self.source, quantization=None)
        self.plan = plan_modules(self.config, self.settings)

    @property
    def names(self) -> list[str]:
        """The names of the pieces, in order."""
        return ["embed", *(f"layer-{index:04}" for index in range(self.config.num_hidden_layers)), "head"]

    def fingerprint(self) -> str:
        text = self.text.key if self.text is not None and self.method != "rtn" else ""
        wanted = asdict(self.settings) | {"method": self.method, "keep": None}
        plan = {name: None if groups is None else groups.to_dict() for name, groups in self.plan.items()}
        source = self.checkpoint.fingerprint()
        for name in self.checkpoint:
            self.checkpoint.forget(name)
        facts = [_VERSION, source, self.config.to_dict(), wanted, plan, text]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def run(self, draft: WorkDirectory) -> None:
        is_blind = self.method == "rtn"
        if not draft.has("embed"):
            draft.save("embed", self.of_tensors(["model.embed_tokens.weight"]))
        if not draft.has("head"):
            own = [name for name in ("model.norm.weight", "lm_head.weight") if name in expected_tensors(self.config)]
            draft.save("head", self.of_tensors(own))
        done, x = (0, None) if is_blind else self.activations(draft)
        for index in range(done, self.config.num_hidden_layers):
            self.note("quantizing", index, self.config.num_hidden_layers)
            name = self.names[1 + index]
            if is_blind and draft.has(name):
                continue
            layer = read_layer(self.checkpoint, self.source, index, self.device)
            try:
                packed = self.round_layer(layer, index, x)
            except CheckpointError as error:
                raise CheckpointError(f"layer {index}: {error.message}", error.remedy) from None
            draft.save(name, self.of_layer(layer, index, packed))
            del layer, packed  # before the next one is read
            if x is not None:
                draft.save_tensor("activations", x, "F32", {"layer": str(index + 1)})
        self.note("quantizing", self.config.num_hidden_layers, self.config.num_hidden_layers)

    def activations(self, draft: WorkDirectory) -> tuple[int, Tensor]:
        """Return the index of the next layer and its input."""
        found = draft.load_tensor("activations")
        if found is not None:
            return int(found[1]["layer"]), found[0].to(self.device)
        found = draft.load_tensor("tokens")
        if found is not None:
            tokens = found[0]
        else:
            assert self.text is not None
            tokens = self.text.pieces(self.settings.num_tokens, self.settings.length)
            draft.save_tensor("tokens", tokens, "I64")
        return 0, (self.embed(tokens, draft) * self.config.scale_emb).to(self.device)

    def embed(self, tokens: Tensor, draft: WorkDirectory) -> Tensor:
        """Return the embeddings of the tokens, as quantized, in fp32."""
        unique, place = tokens.unique(return_inverse=True)
        groups = self.plan["model.embed_tokens"]
        if groups is None:
            return self.read("model.embed_tokens")[unique].float()[place]
        infos = draft.tensors("embed")
        names = {field: f"model.embed_tokens.{part}" for part, field in PACKED_PARTS.items()}
        parts = {field: as_array(draft.read("embed", name, infos[name])) for field, name in names.items()}
        rows = {field: values[unique.numpy()] for field, values in parts.items()}
        return expand(
            Packed(**rows, bits=groups.bits, group_size=groups.group_size, dtype=infos[names["scales"]].dtype)
        )[place]

    def read(self, module: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return read_parameter(self.checkpoint, self.source, f"{module}.weight", dtype, torch.device("cpu"))

    def scale_dtype(self, weight: Tensor) -> str:
        """Return the dtype of scales: the model's own; F16 for fp32 models unless a weight is too large for it."""
        is_large = float(weight.abs().max()) > _LARGEST
        return "F32" if is_large else _SCALES[self.config.dtype]

    def round_layer(self, layer: Layer, index: int, x: Tensor | None) -> dict[str, Packed]:
        """Round the layer's matrices; activations x, which rtn does not need, then pass through the rounded layer."""
        prefix = f"model.layers.{index}."
        plan = {name.removeprefix(prefix): of for name, of in self.plan.items() if name.startswith(prefix)}
        out: dict[str, Packed] = {}

        def put(name: str, round_weight: Callable[..., Packed], *inputs: Any) -> None:
            """Round a matrix of the layer, unless it stays whole."""
            groups, weight = plan[name], weight_of(layer, name)
            if groups is not None:
                out[name] = round_weight(weight, *inputs, groups, self.scale_dtype(weight))
                if x is not None:
                    set_tensor(layer, f"{name}.weight", expand(out[name]).to(self.device))

        def visit(site: Site, chunks: Chunks) -> None:
            if any(plan[name] is not None for name in site.consumers):
                inputs = InputStatistics.of(sum_hessian(chunks), self.settings.group_size)
                for name in site.consumers:
                    put(name, round_columns, inputs)

        if x is None:
            for name in plan:
                put(name, round_matrix)
        elif self.method == "gptq":
            walk(layer, x, visit, self.kernels)
        else:
            seen = self.fold_scales(layer, plan, index, x)
            for site in sites_of(layer):
                for name in site.consumers:
                    put(name, round_within_ranges, seen[site.name].square)
            walk(layer, x, kernels=self.kernels)
        return out

    def fold_scales(
        self, layer: Layer, plan: Mapping[str, Groups | None], index: int, x: Tensor
    ) -> dict[str, SiteStatistics]:
        """Rescale the layer by AWQ; return the statistics of the rescaled activations, by site."""
        seen = {}

        def visit(site: Site, chunks: Chunks) -> None:
            seen[site.name] = summarise_site(chunks, x.shape[0] * x.shape[1])

        walk(layer, x.clone(), visit, self.kernels)
        dtypes = {
            name.removesuffix(".weight"): self.checkpoint.tensors[f"model.layers.{index}.{name}"].dtype
            for name, tensor in layer.named_parameters()
            if tensor.dim() == 1
        }
        return fold_scales(layer, seen, plan, dtypes, _SCALES[self.config.dtype])

    def of_layer(self, layer: Layer, index: int, packed: Mapping[str, Packed]) -> Arrays:
        """Return a layer's tensors as stored: rounded matrices, norms (which may be new), the rest unchanged."""
        out: Arrays = {}
        for name, tensor in layer.named_parameters():
            full = f"model.layers.{index}.{name}"
            module = name.removesuffix(".weight")
            if module in packed:
                out |= _packed_arrays(full.removesuffix(".weight"), packed[module])
            elif tensor.dim() == 1:
                out[full] = _plain_array(tensor, self.checkpoint.tensors[full].dtype)
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
                out[name] = _plain_array(self.read(module, TORCH_DTYPES[dtype]), dtype)
            else:
                raw = self.checkpoint.read(name)
                out[name] = ((raw.dtype, raw.shape), raw.data)
        return out


def _publish(job: _Job, draft: WorkDirectory, target: Path) -> None:
    """Write the target from all pieces."""
    infos = {tensor: (name, info) for name in job.names for tensor, info in draft.tensors(name).items()}
    modules = {name: groups for name, groups in job.plan.items() if groups is not None}
    wanted = expected_tensors(job.config, modules)
    specs = {tensor: (infos[tensor][1].dtype, infos[tensor][1].shape) for tensor in wanted}
    config = replace(job.config, quantization=QuantConfig.of_modules(modules))
    with new_directory(target) as new:
        write_model(new, config, specs, lambda tensor: draft.read(infos[tensor][0], tensor, infos[tensor][1]).data)
        copy_companions(job.checkpoint.path, new)
        draft.expect_publication()


def _check_finite(checkpoint: Checkpoint, note: Note) -> None:
    """Raise, before hours of work, if a weight is infinite or NaN."""
    total = len(checkpoint.tensors)
    for done, (name, info) in enumerate(checkpoint.tensors.items()):
        note("checking", done, total)
        if info.dtype in TORCH_DTYPES:
            values = read_tensor(checkpoint, name, TORCH_DTYPES[info.dtype], torch.device("cpu")).view(-1)
            if not all(bool(torch.isfinite(piece).all()) for piece in values.split(_PIECE)):
                raise CheckpointError(f"{name} has a weight that is infinite or NaN", "the original model is damaged")
            checkpoint.forget(name)
    note("checking", total, total)


def _packed_arrays(module: str, packed: Packed) -> Arrays:
    return {
        name: (spec, as_bytes(getattr(packed, PACKED_PARTS[name.removeprefix(f"{module}.")])))
        for name, spec in packed_specs(module, packed).items()
    }


def _plain_array(tensor: Tensor, dtype: str) -> tuple[Spec, memoryview]:
    return (dtype, tuple(tensor.shape)), tensor_bytes(tensor, TORCH_DTYPES[dtype])
