"""A dense teacher writes training text: thousands of rows in step, on a cache of its own.

Distilling on the teacher's own words keeps what plain text erodes, above all its way of answering.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sala.backends.torch.batch import Sequences
from sala.backends.torch.model import SalaModel
from sala.lab.train.data import Line
from sala.lab.train.recipe import Prompts

# cuDNN, the default on new GPUs, prepares itself anew for every length, which takes minutes for a growing cache.
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MIN_P = 0.05  # tokens less likely than this share of the likeliest are never drawn


@dataclass(frozen=True, slots=True)
class Opening:
    """How a row begins: the tokens given, and how freely the teacher goes on."""

    tokens: tuple[int, ...]
    temperature: float
    must_end: bool = False


def make_openings(
    prompts: Sequence[Prompts], topics: Sequence[str], count: int, encode: Callable[[str, bool], list[int]], seed: int
) -> list[Opening]:
    """`count` openings in the shares of the prompts; `encode` takes a text and whether it is a user's message."""
    rng = np.random.default_rng(seed)
    shares = np.array([prompt.weight for prompt in prompts])
    out = []
    for choice in rng.choice(len(prompts), size=count, p=shares / shares.sum()):
        prompt = prompts[choice]
        text = prompt.templates[rng.integers(len(prompt.templates))]
        if "{topic}" in text:
            text = text.replace("{topic}", topics[int(rng.integers(len(topics)))])
        out.append(Opening(tuple(encode(text, prompt.is_chat)), prompt.temperature, prompt.must_end))
    return out


@torch.inference_mode()
def write_rows(
    model: SalaModel, openings: Sequence[Opening], length: int, ends: Sequence[int], seed: int, dtype: torch.dtype
) -> list[list[int]]:
    """Every opening continued up to `length` tokens, or to the first end mark, which stays in.

    Rows that must end and do not are left out.
    """
    device = model.model.norm.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    given = torch.full((len(openings), length), -1, dtype=torch.long)
    for at, opening in enumerate(openings):
        size = min(len(opening.tokens), length)
        given[at, :size] = torch.tensor(opening.tokens[:size])
    given = given.to(device)
    heat = torch.tensor([opening.temperature for opening in openings], device=device)[:, None]
    marks = torch.tensor(list(ends), device=device)
    cache = _Cache(model, len(openings), length, dtype)
    tokens = given.clone()
    for position in range(length - 1):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            hidden = cache.step(tokens[:, position], position)
        drawn = _draw(model.logits(hidden), heat, generator)
        tokens[:, position + 1] = torch.where(given[:, position + 1] >= 0, given[:, position + 1], drawn)
        if position % 32 == 31 and bool(_is_over(tokens, given, marks, position + 2).all()):
            break
    rows = [(_cut(row, opening, ends), opening) for row, opening in zip(tokens.tolist(), openings, strict=True)]
    return [row for row, opening in rows if row[-1] in ends or not opening.must_end]


def _draw(logits: Tensor, heat: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.empty_like(logits).exponential_(generator=generator)
    pick = torch.compile(_pick, dynamic=False) if logits.is_cuda else _pick
    return pick(logits, heat, noise)


def _pick(logits: Tensor, heat: Tensor, noise: Tensor) -> Tensor:
    """The Gumbel trick: the largest of logits with noise is a draw from their distribution."""
    scaled = logits / heat
    floor = scaled.amax(-1, keepdim=True) + math.log(MIN_P)
    return (scaled - noise.log()).masked_fill(scaled < floor, float("-inf")).argmax(-1)


def _is_over(tokens: Tensor, given: Tensor, marks: Tensor, length: int) -> Tensor:
    is_end = torch.isin(tokens[:, :length], marks) & (given[:, :length] < 0)
    return is_end.any(-1)


def _cut(row: Sequence[int], opening: Opening, ends: Sequence[int]) -> list[int]:
    for at in range(min(len(opening.tokens), len(row)), len(row)):
        if row[at] in ends:
            return list(row[: at + 1])
        if row[at] < 0:
            return list(row[:at])
    return list(row)


class _Cache:
    """Keys and values of all rows, which are all at the same position: one token per row and step."""

    def __init__(self, model: SalaModel, num_rows: int, length: int, dtype: torch.dtype) -> None:
        config = model.config
        self.model = model
        shape = (num_rows, config.num_key_value_heads, length, config.head_dim)
        device = model.model.norm.weight.device
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in model.model.layers]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in model.model.layers]
        self.before: Callable[..., Any] = _before
        self.after: Callable[..., Any] = _after
        if device.type == "cuda":
            self.before, self.after = (torch.compile(part, dynamic=False) for part in (_before, _after))

    def step(self, tokens: Tensor, position: int) -> Tensor:
        """tokens [B] → normed hidden states [B, hidden]."""
        model = self.model
        positions, end = torch.full_like(tokens, position), position + 1
        x = model.model.embed_tokens(tokens) * model.config.scale_emb
        for layer, keys, values in zip(model.model.layers, self.keys, self.values, strict=True):
            q, k, v = self.before(layer, x, positions)
            keys[:, :, position], values[:, :, position] = k, v
            grouped = q.unflatten(1, (keys.shape[1], -1)).to(keys.dtype)  # the heads of a group as rows: [B, G, H/G, D]
            with sdpa_kernel(_ANY_LENGTH):
                o = F.scaled_dot_product_attention(grouped, keys[:, :, :end], values[:, :, :end])
            x = self.after(layer, x, o.flatten(1))
        return model.model.norm(x)


def _before(layer: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Up to where the rows look back."""
    return layer.self_attn.project(layer.input_layernorm(x), Sequences(positions, positions, ()))


def _after(layer: Any, x: Tensor, o: Tensor) -> Tensor:
    x = x + layer.self_attn.o_proj(o) * layer.residual_scale
    return x + layer.mlp(layer.post_attention_layernorm(x)) * layer.residual_scale


def to_line(rows: Sequence[Sequence[int]], eos: int) -> Line:
    """The rows as one line for training, an end mark after each."""
    pieces = [np.array([*row, eos] if not row or row[-1] != eos else row, np.uint32) for row in rows]
    ends = np.cumsum([len(piece) for piece in pieces])
    tokens = np.concatenate(pieces)
    return Line(tokens, np.ones(len(tokens), np.bool_), ends)
