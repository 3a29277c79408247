"""Restore the queries and keys of a trained model, on which recall depends, from the model before training.

plain       the projections (and their norms) from before
orthogonal  the trained projections, each head rotated by the orthogonal map that brings it closest to the head from
            before (Procrustes): distances within a head stay as trained, its directions are again those from before
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from sala.config import SalaConfig

EXACT = 0.02  # largest relative error of a rotated change in low rank
Layers = Literal["all", "attention"]
QK_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")


def is_qk(name: str) -> bool:
    """Return whether a tensor belongs to the queries or keys of a mixer."""
    return any(part in QK_PARTS for part in name.split("."))


def qk_modules(config: SalaConfig, layers: Layers = "all") -> Iterator[tuple[str, int]]:
    """Yield the query and key projections of all layers, or of the attention layers, with the size of their heads."""
    for index, mixer in enumerate(config.mixers):
        is_sparse = mixer == "sparse"
        if is_sparse or layers == "all":
            for name in ("q_proj", "k_proj"):
                yield (
                    f"model.layers.{index}.self_attn.{name}",
                    config.head_dim if is_sparse else config.lightning_head_dim,
                )


def bring_back(
    tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], config: SalaConfig, how: str, layers: Layers = "all"
) -> None:
    """Restore the queries and keys among the parameters of a model, in place; `read` gives those from before."""
    heads = dict(qk_modules(config, layers))
    with torch.no_grad():
        for name, tensor in tensors.items():
            module, _, part = name.rpartition(".")
            owner = module.rpartition(".")[0]
            if how == "plain" and is_qk(name) and any(owner == one.rpartition(".")[0] for one in heads):
                tensor.copy_(read(name))
            elif how == "orthogonal" and module in heads and part == "weight":
                maps = turn(tensor, read(name).to(tensor.device), heads[module])
                tensor.copy_((maps @ tensor.float().view(*maps.shape[:2], -1)).view_as(tensor))
                if (bias := tensors.get(f"{module}.bias")) is not None:
                    bias.copy_((maps @ bias.float().view(*maps.shape[:2], 1)).view_as(bias))


def turn(trained: Tensor, before: Tensor, head_dim: int) -> Tensor:
    """Return the orthogonal maps [heads, head_dim, head_dim] that bring `trained` [heads * head_dim, in] closest to
    `before`, head by head, in the Frobenius norm.
    """
    old, new = (weight.detach().float().view(-1, head_dim, weight.shape[1]) for weight in (before, trained))
    u, _, vh = torch.linalg.svd(old @ new.mT)
    turned: Tensor = u @ vh
    return turned


def turned_change(
    change: tuple[Tensor, Tensor], before: Tensor, head_dim: int, scale: float, most: int
) -> tuple[Tensor, Tensor]:
    """Return low-rank factors (up, down) of the change that an adapter makes after the rotation.

    The rotation raises the rank of a change. The factors have the least rank that is exact to 2%, and at most `most`.
    """
    up, down = (part.detach().float() for part in change)
    base = before.detach().float().to(up.device)
    trained = base + scale * (up @ down)
    maps = turn(trained, base, head_dim)
    whole = ((maps @ trained.view(*maps.shape[:2], -1)).view_as(base) - base) / scale
    most = min(most, *whole.shape)
    if 4 * most < min(whole.shape):
        u, s, v = torch.svd_lowrank(whole, most, niter=4)
        vh = v.mT
    else:
        u, s, vh = torch.linalg.svd(whole, full_matrices=False)
    left = (whole.square().sum() - s[:most].square().cumsum(0)).clamp_min(0).sqrt()
    enough = (left <= EXACT * whole.norm()).nonzero()
    rank = int(enough[0]) + 1 if len(enough) else most
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).contiguous(), (root[:, None] * vh[:rank]).contiguous()
