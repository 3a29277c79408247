"""Lightning attention: a linear recurrence with one constant decay per head, state in fp32.

    S_t = exp(-s_h) S_{t-1} + k_t^T v_t          o_t = scale * q_t S_t

`lightning_step` is that definition, one token for many sequences. `lightning_prefill` computes the same for
many tokens of one sequence: inside a chunk as masked attention, between chunks through the state.
"""

import math

import torch
from torch import Tensor

CHUNK = 64


def decay_slopes(num_heads: int, device: torch.device | str = "cpu") -> Tensor:
    """ALiBi slopes s_h [H] in fp32: powers of 2^(-8/H); interleaved with those of 2H when H is no power of two."""
    return torch.tensor(_slopes(num_heads), dtype=torch.float32, device=device)


def _slopes(num_heads: int) -> list[float]:
    if math.log2(num_heads).is_integer():
        return [2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)]
    below = 1 << int(math.log2(num_heads))
    return _slopes(below) + _slopes(2 * below)[0::2][: num_heads - below]


def lightning_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token per sequence: q, k, v [S, H, D], state [S, H, D, D] fp32 → output [S, H, D] fp32, next state."""
    decay = torch.exp(-slopes)[None, :, None, None]
    state = decay * state + k.float()[..., :, None] * v.float()[..., None, :]
    output = (q.float() * scale)[..., None, :] @ state
    return output[..., 0, :], state


def lightning_prefill(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """n tokens of one sequence: q, k, v [n, H, D], state [H, D, D] fp32 → output [n, H, D] fp32, next state."""
    if q.shape[0] == 1:
        output, state = lightning_step(q, k, v, state[None], slopes, scale)
        return output, state[0]
    outputs = []
    for begin in range(0, q.shape[0], CHUNK):
        piece = slice(begin, begin + CHUNK)
        output, state = _chunk(q[piece], k[piece], v[piece], state, slopes, scale)
        outputs.append(output)
    return torch.cat(outputs), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    n = q.shape[0]
    q = q.float().transpose(0, 1) * scale  # [H, n, D]
    k = k.float().transpose(0, 1)
    v = v.float().transpose(0, 1)
    steps = torch.arange(n, device=q.device, dtype=torch.float32)
    age = steps[:, None] - steps[None, :]  # how long before row i token j was
    weight = torch.where(age >= 0, torch.exp(-slopes[:, None, None] * age.clamp(min=0)), 0.0)
    since_start = torch.exp(-slopes[:, None] * (steps + 1))[..., None]  # the old state has decayed i + 1 times at row i
    until_end = torch.exp(-slopes[:, None] * (n - 1 - steps))[..., None]
    output = (q @ k.transpose(1, 2) * weight) @ v + since_start * (q @ state)
    state = torch.exp(-slopes * n)[:, None, None] * state + (k * until_end).transpose(1, 2) @ v
    return output.transpose(0, 1), state


def lightning_fold(k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> Tensor:
    """Advance a state [H, D, D] by tokens whose outputs are known already: k, v [n, H, D] → next state."""
    n = k.shape[0]
    age = torch.arange(n - 1, -1, -1, device=k.device, dtype=torch.float32)
    weight = torch.exp(-slopes[:, None] * age)[..., None]  # [H, n, 1]
    update = (k.float().transpose(0, 1) * weight).transpose(1, 2) @ v.float().transpose(0, 1)
    return torch.exp(-slopes * n)[:, None, None] * state + update


def lightning_ragged(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor, lengths: list[int], slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Packed sequences of any lengths: q, k, v [T, H, D], states [S, H, D, D] → output [T, H, D] fp32, next states."""
    if all(length == 1 for length in lengths):
        return lightning_step(q, k, v, states, slopes, scale)
    outputs, nexts = [], []
    pieces = zip(q.split(lengths), k.split(lengths), v.split(lengths), states, strict=True)
    for q_row, k_row, v_row, state in pieces:
        output, state = lightning_prefill(q_row, k_row, v_row, state, slopes, scale)
        outputs.append(output)
        nexts.append(state)
    return torch.cat(outputs), torch.stack(nexts)
