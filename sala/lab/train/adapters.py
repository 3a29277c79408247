"""What is put into a model's linears from outside while it trains: low-rank changes, and rounding to few bits."""

import torch
from torch import Tensor, nn

from sala.backends.torch.model import SalaModel
from sala.quantization_config import MIXER_LINEARS


class LowRank(nn.Module):
    """A frozen linear plus up(down(x)), of which only the two thin matrices learn."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator, change: Tensor | None = None) -> None:
        """`change` [out, in] is what was learnt before; its largest `rank` components are taken over."""
        super().__init__()
        self.base = base
        num_out, num_in = base.weight.shape
        start = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
        self.down = nn.Parameter(start.to(base.weight.device))
        self.up = nn.Parameter(torch.zeros(num_out, rank, device=base.weight.device))
        if change is not None and change.abs().max() > 0:
            self.load_change(change)

    @torch.no_grad()
    def load_change(self, change: Tensor) -> None:
        left, sizes, right = torch.linalg.svd(change.double(), full_matrices=False)
        rank = self.down.shape[0]
        # balanced so that both halves learn at like speeds: down keeps the size it begins with, up holds the rest
        length = self.down.norm(dim=1).mean().double()
        self.down.copy_(right[:rank] * length)
        self.up.copy_(left[:, :rank] * sizes[:rank] / length)

    @torch.no_grad()
    def load_factors(self, up: Tensor, down: Tensor) -> None:
        """Begin with a known change up [out, r] @ down [r, in]; components beyond r begin at zero."""
        rank = min(down.shape[0], self.down.shape[0])
        sizes = down[:rank].norm(dim=1).clamp(min=1e-12)  # balanced as in `load_change`
        length = self.down.norm(dim=1).mean()
        self.down[:rank] = (down[:rank] / sizes[:, None] * length).to(self.down)
        self.up[:, :rank] = (up[:, :rank] * sizes / length).to(self.up)

    @property
    def weight(self) -> Tensor:
        return self.base.weight + self.up @ self.down

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class RoundedLinear(nn.Linear):
    """A linear as it will be stored: its weight rounded to codes in groups, the gradient passed straight through."""

    bits: int
    group_size: int

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            error = round_to_codes(self.weight, self.bits, self.group_size) - self.weight
        return nn.functional.linear(x, self.weight + error, self.bias)


def round_to_codes(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """The weight after a way through the affine layout: packed and unpacked by the rule of `checkpoint.packing`."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    top = 2**bits - 1
    is_low = low.abs() > high.abs()
    scale = ((high - low) / top).clamp(min=1e-7)
    scale = torch.where(is_low, scale, -scale)
    edge = torch.where(is_low, low, high)
    zero = (edge / scale).round()
    scale = torch.where(zero != 0, edge / zero, scale)
    bias = torch.where(zero != 0, edge, 0.0)
    codes = ((groups - bias) / scale).round().clamp(0, top)  # before the scale is rounded, as the layout's writer does
    scale, bias = scale.half().float(), bias.half().float()
    return (codes * scale + bias).flatten(1).to(weight.dtype)


def add_low_rank(model: SalaModel, origin: SalaModel, rank: int, seed: int) -> None:
    """MLPs learn as low-rank changes of the origin's; what they differ by already is taken over."""
    generator = torch.Generator().manual_seed(seed)
    for layer, old in zip(model.model.layers, origin.model.layers, strict=True):
        for name in ("gate_proj", "up_proj", "down_proj"):
            base, now = getattr(old.mlp, name), getattr(layer.mlp, name)
            change = None if now is base else (now.weight - base.weight).detach()
            setattr(layer.mlp, name, LowRank(base, rank, generator, change))


def merge_low_rank(model: SalaModel) -> None:
    """Plain linears again, with the changes added."""
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            module = getattr(layer.mlp, name)
            if isinstance(module, LowRank):
                num_out, num_in = module.base.weight.shape
                merged = nn.Linear(num_in, num_out, bias=False, device="meta")
                merged.weight = nn.Parameter(module.weight.detach())
                setattr(layer.mlp, name, merged)


def add_rounding(model: SalaModel, bits: int, group_size: int) -> None:
    for linear in mixer_linears(model):
        linear.__class__ = RoundedLinear  # the same parameters, computed with differently
        linear.bits, linear.group_size = bits, group_size  # type: ignore[assignment]


def remove_rounding(model: SalaModel) -> None:
    for linear in mixer_linears(model):
        linear.__class__ = nn.Linear


def mixer_linears(model: SalaModel) -> list[nn.Linear]:
    mixers = [layer.self_attn for layer in model.model.layers]
    return [
        getattr(mixer, name) for mixer in mixers for name in MIXER_LINEARS if getattr(mixer, name, None) is not None
    ]
