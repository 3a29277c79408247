"""Modules that replace a model's linears during training: low-rank changes, and quantization-aware linears."""

import torch
from torch import Tensor, nn

from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops.affine import fit_range, to_codes
from sala.quantization_config import MIXER_LINEARS, MLP_LINEARS


class LowRank(nn.Module):
    """A frozen linear plus up(down(x)); only the two low-rank matrices are trained."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator, change: Tensor | None = None) -> None:
        """Start from the `rank` largest components of `change` [out, in], if given, else from zero."""
        super().__init__()
        self.base = base
        num_out, num_in = base.weight.shape
        start = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
        self.down = nn.Parameter(start.to(base.weight.device))
        self.up = nn.Parameter(torch.zeros(num_out, rank, device=base.weight.device))
        if change is not None and change.abs().max() > 0:
            left, sizes, right = torch.linalg.svd(change.double(), full_matrices=False)
            self.load_factors(left * sizes, right)

    @torch.no_grad()
    def load_factors(self, up: Tensor, down: Tensor) -> None:
        """Start from the change up [out, r] @ down [r, in]; components beyond r start at zero."""
        rank = min(down.shape[0], self.down.shape[0])
        # `down` keeps its initial norm and `up` holds the rest, so that both train at similar speeds
        sizes = down[:rank].norm(dim=1).clamp(min=1e-12)
        length = self.down.norm(dim=1).mean()
        self.down[:rank] = (down[:rank] / sizes[:, None] * length).to(self.down)
        self.up[:, :rank] = (up[:, :rank] * sizes / length).to(self.up)

    @property
    def weight(self) -> Tensor:
        return self.base.weight + self.up @ self.down

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class RoundedLinear(nn.Linear):
    """A linear that computes with its quantized weight and passes the gradient straight through."""

    bits: int
    group_size: int

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            error = round_to_codes(self.weight, self.bits, self.group_size) - self.weight
        return nn.functional.linear(x, self.weight + error, self.bias)


def round_to_codes(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """Return the weight quantized and dequantized by the rule of `checkpoint.packing`."""
    groups = weight.float().unflatten(1, (-1, group_size))
    scale, bias = fit_range(groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), bits)
    codes = to_codes(groups, scale, bias, bits)  # before the scale is rounded, as in `packing.quantize`
    scale, bias = scale.half().float(), bias.half().float()
    return (codes * scale + bias).flatten(1).to(weight.dtype)


def add_low_rank(model: SalaModel, origin: SalaModel, rank: int, seed: int) -> None:
    """Make the MLPs low-rank changes of the origin's MLPs, starting from their current difference."""
    generator = torch.Generator().manual_seed(seed)
    for layer, old in zip(model.model.layers, origin.model.layers, strict=True):
        for name in MLP_LINEARS:
            base, now = getattr(old.mlp, name), getattr(layer.mlp, name)
            change = None if now is base else (now.weight - base.weight).detach()
            setattr(layer.mlp, name, LowRank(base, rank, generator, change))


def merge_low_rank(model: SalaModel) -> None:
    """Replace the low-rank modules by plain linears with the changes added."""
    for layer in model.model.layers:
        for name in MLP_LINEARS:
            module = getattr(layer.mlp, name)
            if isinstance(module, LowRank):
                num_out, num_in = module.base.weight.shape
                merged = nn.Linear(num_in, num_out, bias=False, device="meta")
                merged.weight = nn.Parameter(module.weight.detach())
                setattr(layer.mlp, name, merged)


def add_rounding(model: SalaModel, bits: int, group_size: int) -> None:
    for linear in mixer_linears(model):
        linear.__class__ = RoundedLinear  # keeps the parameters, changes the forward pass
        linear.bits, linear.group_size = bits, group_size  # type: ignore[assignment]


def remove_rounding(model: SalaModel) -> None:
    for linear in mixer_linears(model):
        linear.__class__ = nn.Linear


def mixer_linears(model: SalaModel) -> list[nn.Linear]:
    mixers = [layer.self_attn for layer in model.model.layers]
    return [
        getattr(mixer, name) for mixer in mixers for name in MIXER_LINEARS if getattr(mixer, name, None) is not None
    ]
