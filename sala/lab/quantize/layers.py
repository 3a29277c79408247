"""One layer at a time: read from a checkpoint in fp32, then run on calibration activations.

A layer's matrices have four kinds of inputs. Matrices with the same input form a site; sites are visited in the order
of the computation, so that the activations at a site have passed through everything that is rounded already.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.batch import whole
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.loader import read_parameter
from sala.backends.torch.model import Layer
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.lab.train.models import set_tensor
from sala.quantization_config import QKV_LINEARS

TOKENS_AT_ONCE = 4096  # that pass through a layer together


@dataclass(frozen=True, slots=True)
class Site:
    """Matrices that read the same activations: names within the layer."""

    name: str
    consumers: tuple[str, ...]


Chunks = Iterator[Tensor]  # activations [n, in]
Visit = Callable[[Site, Chunks], None]


def sites_of(layer: Layer) -> tuple[Site, Site, Site, Site]:
    gates = [name for name in ("z_proj", "o_gate") if getattr(layer.self_attn, name, None) is not None]
    read = tuple(f"self_attn.{name}" for name in (*QKV_LINEARS, *gates))
    return (
        Site("mixer", read),
        Site("output", ("self_attn.o_proj",)),
        Site("mlp", ("mlp.gate_proj", "mlp.up_proj")),
        Site("down", ("mlp.down_proj",)),
    )


def read_layer(checkpoint: Checkpoint, config: SalaConfig, index: int, device: torch.device) -> Layer:
    """Return a layer in fp32, whatever the file has; its parameters are copies and may be written to."""
    with torch.device("meta"):
        layer = Layer(config, config.mixers[index])
    for name in dict(layer.named_parameters()):
        full = f"model.layers.{index}.{name}"
        tensor = read_parameter(checkpoint, config, full, torch.float32, device)
        is_file = full in checkpoint.tensors and checkpoint.tensors[full].dtype == "F32" and device.type == "cpu"
        set_tensor(layer, name, tensor.clone() if is_file else tensor)
        forget_module(checkpoint, full.removesuffix(".weight"))
    return layer.eval()


def forget_module(checkpoint: Checkpoint, module: str) -> None:
    """Drop what was read of the file from memory."""
    for name in checkpoint:
        if name == module or name.startswith(f"{module}."):
            checkpoint.forget(name)


def weight_of(layer: nn.Module, name: str) -> Tensor:
    return layer.get_parameter(f"{name}.weight")


@torch.inference_mode()
def walk(layer: Layer, x: Tensor, visit: Visit | None = None, kernels: str = "auto") -> None:
    """Run the layer on x [S, n, hidden], S whole sequences, in place.

    `visit` is called at every site with its activations and may change the site's matrices; later sites see the change.
    """
    sites, mixer = sites_of(layer), cast(Any, layer.self_attn)
    on_site = visit or (lambda site, chunks: None)
    on_site(sites[0], (layer.input_layernorm(part) for part, _ in _parts(x)))
    mixed = _mixer_outputs(layer, x, kernels)
    on_site(sites[1], (part for part, _ in _parts(mixed)))
    for (part, view), (inner, _) in zip(_parts(x), _parts(mixed), strict=True):
        view.copy_((part + layer.scaled(mixer.o_proj(inner))).view(view.shape))
    del mixed
    on_site(sites[2], (layer.post_attention_layernorm(part) for part, _ in _parts(x)))
    on_site(sites[3], (_mlp_inner(layer, part) for part, _ in _parts(x)))
    for part, view in _parts(x):
        view.copy_((part + layer.scaled(layer.mlp.down_proj(_mlp_inner(layer, part)))).view(view.shape))


def _mixer_outputs(layer: Layer, x: Tensor, kernels: str) -> Tensor:
    """Return the inputs of the mixer's output projection, [S, n, width]."""
    mixer: Any = layer.self_attn
    last = mixer.o_proj
    mixed = torch.empty(*x.shape[:2], last.in_features, device=x.device)
    mixer.o_proj = nn.Identity()  # run the mixer without its last matrix
    try:
        for (part, _), (_, view) in zip(_parts(x), _parts(mixed), strict=True):
            tokens = torch.zeros(view.shape[:2], dtype=torch.long, device=x.device)
            batch = whole(tokens, ops=select_ops(kernels))
            view.copy_(mixer(layer.input_layernorm(part), batch, None).view(view.shape))
    finally:
        mixer.o_proj = last
    return mixed


def _mlp_inner(layer: Layer, x: Tensor) -> Tensor:
    normed = layer.post_attention_layernorm(x)
    return F.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed)


def _parts(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some sequences at a time, flattened to [n, width] and as a view of x."""
    for view in x.split(max(1, TOKENS_AT_ONCE // x.shape[1])):
        yield view.flatten(0, 1), view
