"""The golden checkpoints with wider heads, for kernels whose tensor cores want 16 numbers: the same model.

The heads are widened with zeros, and what divides by their width is scaled.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.numpy import load_file, save_file

from sala.config import SalaConfig


def widen(model: Path, target: Path) -> SalaConfig:
    """The checkpoint with heads of 16: number i of a half comes to 2 * i, where RoPE turns it as fast as before."""
    config = SalaConfig.load(model)
    dim = config.head_dim
    place = torch.arange(dim // 2).repeat(2) * 2 + torch.arange(2).repeat_interleave(dim // 2) * dim
    wide = replace(config, head_dim=2 * dim, lightning_head_dim=2 * dim)
    weights = {}
    for name, values in load_file(model / "model.safetensors").items():
        weight, kind = torch.from_numpy(values), name.split(".")[-2]
        is_lightning = name.startswith("model.layers") and config.mixer_types[int(name.split(".")[2])].startswith("l")
        if kind in ("q_proj", "k_proj", "v_proj", "z_proj", "o_gate"):
            scale = 2**0.5 if kind == "q_proj" and not is_lightning else 1.0  # attention divides by the root of 16
            weight = spread(weight.T, place, dim).T * scale
        elif kind == "o_proj":
            weight = spread(weight, place, dim)
        elif kind == "o_norm":  # half of the numbers that it averages are zero now
            weight = spread(weight, place, dim) * 0.5**0.5
        elif kind == "q_norm":  # the same, and lightning divides by the root of 16
            weight = spread(weight, place, dim)
        elif kind == "k_norm":
            weight = spread(weight, place, dim) * 0.5**0.5
        weights[name] = weight.contiguous().numpy()
    target.mkdir(parents=True)
    save_file(weights, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(wide.to_dict()))
    return wide


def spread(weight: torch.Tensor, place: torch.Tensor, dim: int) -> torch.Tensor:
    """[…, heads * 8] → […, heads * 16]."""
    heads = weight.unflatten(-1, (-1, dim))
    wide = heads.new_zeros(*heads.shape[:-1], 2 * dim)
    wide[..., place] = heads
    return wide.flatten(-2)
