"""AWQ: inputs that are large on average get finer steps, without changing what the layer computes.

Column i of every matrix of a site is multiplied by s_i, and the producer of the site's inputs is divided by it: a
norm's weights, or the rows of the matrix before. s = (mean |x|)^alpha, where a grid search over alpha minimizes the
error of the rounded matrices' outputs on calibration activations.

The function stays exactly the same in the file's precision: a norm's new weights are rounded first, and s follows from
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.model import Layer
from sala.backends.torch.ops.affine import to_codes
from sala.errors import CheckpointError
from sala.lab.quantize.layers import Chunks, Site, sites_of, weight_of
from sala.lab.quantize.ranges import TORCH_DTYPES, fit_range, row_pieces
from sala.lab.train.models import set_tensor
from sala.quantization_config import Groups

ALPHAS = tuple(step / 20 for step in range(20))
MAX_ROWS = 2048  # rows of activations that are kept


@dataclass(frozen=True, slots=True)
class SiteStatistics:
    """Activations of a site: mean magnitude [in] and mean square [in] of each input, and some rows [n, in]."""

    mean: Tensor
    square: Tensor
    rows: Tensor

    def divided(self, scales: Tensor) -> "SiteStatistics":
        return SiteStatistics(self.mean / scales, self.square / scales.square(), self.rows / scales)


@torch.inference_mode()
def summarise_site(chunks: Chunks, num_rows: int) -> SiteStatistics:
    """Return magnitudes and squares of the inputs, and rows spread evenly over all `num_rows`."""
    step = max(1, num_rows // MAX_ROWS)
    sizes: list[Tensor] = []
    squares: list[Tensor] = []
    rows: list[Tensor] = []
    count = 0
    for x in chunks:
        sizes.append(x.abs().sum(0))
        squares.append(x.square().sum(0))
        rows.append(x[-count % step :: step].clone())
        count += len(x)
    mean, square = torch.stack(sizes).sum(0), torch.stack(squares).sum(0)
    if not torch.isfinite(square).all():
        raise CheckpointError("activations are infinite or NaN", "the model is damaged")
    return SiteStatistics(mean / count, square / count, torch.cat(rows)[:MAX_ROWS])


def fold_scales(
    layer: Layer,
    seen: Mapping[str, SiteStatistics],
    groups: Mapping[str, Groups | None],
    dtypes: Mapping[str, str],
    dtype: str,
) -> dict[str, SiteStatistics]:
    """Rescale the layer's sites where that is exact; return the statistics after it, by site.

    groups   how each matrix of the layer will be rounded; None: it stays whole, and its site is skipped
    dtypes   dtype in which each norm is stored
    dtype    dtype of scales and biases
    """
    out = dict(seen)
    for site in sites_of(layer):
        producer = _producer(layer, site.name)
        if producer is None or any(groups.get(name) is None for name in site.consumers):
            continue
        is_norm = weight_of(layer, producer).dim() == 1
        if not is_norm and groups.get(producer) is None:
            continue
        mixer: Any = layer.self_attn
        shared = 1, 1  # heads that read each row of the producer, and the head dimension
        if producer == "self_attn.v_proj":
            shared = mixer.num_heads // mixer.num_kv_heads, mixer.head_dim
        scales = _search(layer, site, seen[site.name], groups, dtype, shared)
        if is_norm:
            norm, scales = _divide_norm(weight_of(layer, producer), scales, TORCH_DTYPES[dtypes[producer]])
            set_tensor(layer, f"{producer}.weight", norm)
        else:
            rows = scales.view(-1, *shared)[:, 0].flatten()  # heads that share values share scales
            set_tensor(layer, f"{producer}.weight", weight_of(layer, producer) / rows[:, None])
        for name in site.consumers:
            set_tensor(layer, f"{name}.weight", weight_of(layer, name) * scales)
        out[site.name] = seen[site.name].divided(scales)
    return out


def _producer(layer: Layer, site: str) -> str | None:
    """Return the producer of a site's inputs, a norm or a matrix whose rows map to them one to one; else None."""
    mixer: Any = layer.self_attn
    if site == "output":
        if getattr(mixer, "o_norm", None) is not None:
            return "self_attn.o_norm"
        return None if mixer.v_proj.bias is not None else "self_attn.v_proj"
    return {"mixer": "input_layernorm", "mlp": "post_attention_layernorm", "down": "mlp.up_proj"}[site]


def _search(
    layer: Layer,
    site: Site,
    seen: SiteStatistics,
    groups: Mapping[str, Groups | None],
    dtype: str,
    shared: tuple[int, int],
) -> Tensor:
    """Return the scales [in] with the least output error; heads that share values share scales."""
    count, dim = shared
    size = seen.mean.view(-1, count, dim).mean(1, keepdim=True).expand(-1, count, -1).flatten()
    size = (size / size.mean()).clamp(min=1e-4)
    rounded = {name: of for name in site.consumers if (of := groups[name]) is not None}
    weights = {name: weight_of(layer, name) for name in rounded}
    wanted = {name: float((seen.rows @ weight.T).square().sum()) or 1.0 for name, weight in weights.items()}
    best, least = torch.ones_like(size), float("inf")
    for alpha in ALPHAS:
        scales = size**alpha
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = 0.0
        for name, weight in weights.items():
            error += _error(weight, scales, seen.rows / scales, rounded[name], dtype) / wanted[name]
        if error < least:
            best, least = scales, error
    return best


def _error(weight: Tensor, scales: Tensor, rows: Tensor, groups: Groups, dtype: str) -> float:
    """Return the squared error of the outputs when weight * scales is rounded."""
    total = 0.0
    for piece in row_pieces(weight):
        grouped = (piece * scales).view(len(piece), -1, groups.group_size)
        scale, bias = (part[..., None] for part in fit_range(grouped.amin(-1), grouped.amax(-1), groups.bits, dtype))
        wrong = to_codes(grouped, scale, bias, groups.bits) * scale + bias - grouped
        total += float((rows @ wrong.view(piece.shape).T).square().sum())
    return total


def _divide_norm(norm: Tensor, scales: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the norm's new weights, rounded to `stored`, and the scales by which they are really divided."""
    divided = (norm / scales).to(stored).float()
    found = norm / divided
    is_good = (divided != 0) & torch.isfinite(found) & (found != 0)
    return torch.where(is_good, divided, norm), torch.where(is_good, found, 1)
