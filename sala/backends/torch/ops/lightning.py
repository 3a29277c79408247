"""Lightning attention: a linear recurrence with one constant decay per head.

    S_t = exp(-s_h) S_{t-1} + k_t^T v_t          o_t = scale * q_t S_t

`lightning_step` is that definition, one token for many sequences. `lightning_prefill` computes the same for
many tokens of one sequence: inside a chunk as masked attention, between chunks through the state.
`lightning_whole` does so for whole sequences at once, with gradients.

A state may also be kept in 16 bits: it is then rounded after every token of a step, of a fold and of a sequence with
drafts, and after every chunk of a prefill; all arithmetic is fp32.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.rows import decay_rates
from sala.backends.torch.ops.dense import upcast

CHUNK = 64
CHUNKS_AT_ONCE = 64  # of a whole sequence: the states of that many chunks are in memory together


_made: dict[tuple[int, torch.device | str], Tensor] = {}


def decay_slopes(num_heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the slopes s_h [H] in fp32."""
    key = (num_heads, device)
    if key not in _made:
        with torch.inference_mode(False):  # slopes may be used in training later
            _made[key] = torch.tensor(decay_rates(num_heads), dtype=torch.float32, device=device)
    return _made[key]


def lightning_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token per sequence: q, k, v [S, H, D], state [S, H, D, D] → output [S, H, D] fp32, next state."""
    decay = torch.exp(-slopes)[None, :, None, None]
    after = torch.addcmul(decay * state, k.float()[..., :, None], v.float()[..., None, :])
    output = (q.float() * scale)[..., None, :] @ after
    return output[..., 0, :], after.to(state.dtype)


def lightning_prefill(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """n tokens of one sequence: q, k, v [n, H, D], state [H, D, D] → output [n, H, D] fp32, next state."""
    if q.shape[0] == 1:
        output, state = lightning_step(q, k, v, state[None], slopes, scale)
        return output, state[0]
    outputs = []
    for begin in range(0, q.shape[0], chunk):
        piece = slice(begin, begin + chunk)
        output, state = _chunk(q[piece], k[piece], v[piece], state, slopes, scale)
        outputs.append(output)
    return torch.cat(outputs), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    n = q.shape[0]
    q = q.float().transpose(0, 1) * scale  # [H, n, D]
    k = k.float().transpose(0, 1)
    v = v.float().transpose(0, 1)
    steps = torch.arange(n, device=q.device, dtype=torch.float32)
    age = steps[:, None] - steps[None, :]  # distance of token j before row i
    weight = torch.where(age >= 0, torch.exp(-slopes[:, None, None] * age.clamp(min=0)), 0.0)
    since_start = torch.exp(-slopes[:, None] * (steps + 1))[..., None]  # the old state has decayed i + 1 times at row i
    until_end = torch.exp(-slopes[:, None] * (n - 1 - steps))[..., None]
    output = (q @ k.transpose(1, 2) * weight) @ v + since_start * (q @ state.float())
    after = torch.exp(-slopes * n)[:, None, None] * state + (k * until_end).transpose(1, 2) @ v
    return output.transpose(0, 1), after.to(state.dtype)


def lightning_fold(k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> Tensor:
    """Advance a state [H, D, D] by tokens whose outputs are known already: k, v [n, H, D] → next state."""
    n = k.shape[0]
    if state.dtype != torch.float32 and n > 1:
        for token in range(n):
            state = lightning_fold(k[token : token + 1], v[token : token + 1], state, slopes)
        return state
    age = torch.arange(n - 1, -1, -1, device=k.device, dtype=torch.float32)
    weight = torch.exp(-slopes[:, None] * age)[..., None]  # [H, n, 1]
    update = (k.float().transpose(0, 1) * weight).transpose(1, 2) @ v.float().transpose(0, 1)
    return (torch.exp(-slopes * n)[:, None, None] * state + update).to(state.dtype)


def lightning_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    lengths: list[int],
    slopes: Tensor,
    scale: float,
    num_drafts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Packed sequences of any lengths: q, k, v [T, H, D], states [S, H, D, D] → output [T, H, D] fp32, next states.

    Sequences with drafts advance token by token if states have 16 bits: rounded as often as in decoding.
    """
    if all(length == 1 for length in lengths):
        return lightning_step(q, k, v, states, slopes, scale)
    outputs, nexts = [], []
    has_drafts = [count > 0 and states.dtype != torch.float32 for count in num_drafts or [0] * len(lengths)]
    pieces = zip(q.split(lengths), k.split(lengths), v.split(lengths), states, has_drafts, strict=True)
    for q_row, k_row, v_row, state, is_stepped in pieces:
        output, state = lightning_prefill(q_row, k_row, v_row, state, slopes, scale, 1 if is_stepped else CHUNK)
        outputs.append(output)
        nexts.append(state)
    return torch.cat(outputs), torch.stack(nexts)


def lightning_whole(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], slopes: Tensor, scale: float) -> Tensor:
    """Compute whole sequences from an empty state, differentiable: q, k, v [T, H, D] packed → [T, H, D], at least fp32.

    Sequences of one length are computed side by side; others are packed into one row and masked against each other.
    """
    is_even = len(set(lengths)) == 1
    rows = len(lengths) if is_even else 1
    docs = None
    if not is_even:
        sizes = torch.tensor(lengths, device=q.device)
        docs = torch.arange(len(lengths), device=q.device).repeat_interleave(sizes)[None]
    q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))  # [B, H, n, D]
    output = _many_chunks(upcast(q) * scale, upcast(k), upcast(v), slopes.to(upcast(q).dtype), docs)
    return output.transpose(1, 2).flatten(0, 1)


def _many_chunks(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, docs: Tensor | None) -> Tensor:
    """q, k, v [B, H, n, D], docs [B, n] or None → [B, H, n, D], `CHUNKS_AT_ONCE` chunks after another."""
    num_rows, heads, length, dim = q.shape
    state = q.new_zeros(num_rows, heads, dim, dim)
    doc = None if docs is None else docs[:, :1]  # the document of the state
    outputs = []
    for begin in range(0, length, CHUNK * CHUNKS_AT_ONCE):
        piece = slice(begin, min(begin + CHUNK * CHUNKS_AT_ONCE, length))
        pad = -(piece.stop - begin) % CHUNK  # padding on the right does not change what is before it
        q_, k_, v_ = (F.pad(x[:, :, piece], (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
        docs_ = None
        if docs is not None:
            docs_ = F.pad(docs[:, piece], (0, pad), value=-1).unflatten(1, (-1, CHUNK))
        output, state, doc = _chunks_side_by_side(q_, k_, v_, state, doc, docs_, slopes)
        outputs.append(output.flatten(2, 3)[:, :, : piece.stop - begin])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _chunks_side_by_side(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, doc: Tensor | None, docs: Tensor | None, slopes: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """N chunks in parallel: q, k, v [B, H, N, C, D], state [B, H, D, D] before them → output, state after them.

    `docs` [B, N, C] is the document of each token, `doc` [B, 1] that of the state; None if there is only one.
    """
    num_chunks, size = q.shape[2:4]
    step = torch.arange(size, device=q.device, dtype=q.dtype)
    age = step[:, None] - step
    inside = torch.where(age >= 0, torch.exp(-slopes[:, None, None] * age.clamp(min=0)), 0.0)[:, None]  # [H, 1, C, C]
    until_end = torch.exp(-slopes[:, None] * (size - 1 - step))[:, None, :, None]  # [H, 1, C, 1]
    since_start = torch.exp(-slopes[:, None] * (step + 1))[:, None, :, None]
    chunk = torch.arange(num_chunks + 1, device=q.device, dtype=q.dtype)
    gap = chunk[:, None] - 1 - chunk[:-1]  # whole chunks between the end of chunk m and the start of chunk n
    across = torch.where(gap >= 0, torch.exp(-slopes[:, None, None] * size * gap.clamp(min=0)), 0.0)  # [H, N + 1, N]
    from_state = torch.exp(-slopes[:, None] * size * chunk)  # [H, N + 1]
    if docs is not None and doc is not None:
        ends = docs[:, :, -1]
        owner = torch.cat((doc, ends), 1)  # the document of the state that enters chunk n
        inside = inside * (docs[:, None, :, :, None] == docs[:, None, :, None, :])
        until_end = until_end * (docs == ends[..., None])[:, None, ..., None]
        since_start = since_start * (docs == owner[:, :-1, None])[:, None, ..., None]
        across = across * (owner[:, :, None] == ends[:, None])[:, None]
        from_state = from_state * (owner == doc)[:, None]
        doc = owner[:, -1:]
    updates = (k * until_end).transpose(-1, -2) @ v  # [B, H, N, D, D]
    old = from_state[..., None, None] * state[:, :, None]
    states = (across @ updates.flatten(3)).unflatten(3, state.shape[2:]) + old
    output = (q @ k.transpose(-1, -2) * inside) @ v + since_start * (q @ states[:, :, :-1])
    return output, states[:, :, -1], doc
