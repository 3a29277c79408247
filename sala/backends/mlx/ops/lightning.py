"""Lightning attention: a linear recurrence with one constant decay per head, state in fp32.

The recurrence and the functions are those of `backends/torch/ops/lightning.py`.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from sala.backends.rows import decay_rates

CHUNK = 64
CHUNKS_AT_ONCE = 32  # the states of that many chunks are in memory together

Update = tuple[mx.array, mx.array]  # output, next state
Step = Callable[..., Update]


def decay_slopes(num_heads: int) -> mx.array:
    """Return the slopes s_h [H] in fp32."""
    return mx.array(decay_rates(num_heads), dtype=mx.float32)


def lightning_step(q: mx.array, k: mx.array, v: mx.array, state: mx.array, slopes: mx.array, scale: float) -> Update:
    """One token per sequence: q, k, v [S, H, D], state [S, H, D, D] fp32 → output [S, H, D] fp32, next state."""
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    decay = mx.exp(-slopes)[:, None, None]
    state = decay * state + k[..., :, None] * v[..., None, :]
    return ((q * scale)[..., None, :] @ state)[..., 0, :], state


def lightning_prefill(
    q: mx.array, k: mx.array, v: mx.array, state: mx.array, slopes: mx.array, scale: float, step: Step = lightning_step
) -> Update:
    """n tokens of one sequence: q, k, v [n, H, D], state [H, D, D] fp32 → output [n, H, D] fp32, next state."""
    if q.shape[0] == 1:
        output, state = step(q, k, v, state[None], slopes, scale)
        return output, state[0]
    outputs = []
    for begin in range(0, q.shape[0], CHUNK * CHUNKS_AT_ONCE):
        piece = slice(begin, begin + CHUNK * CHUNKS_AT_ONCE)
        output, state = _chunks(q[piece], k[piece], v[piece], state, slopes, scale)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs), state


def _chunks(q: mx.array, k: mx.array, v: mx.array, state: mx.array, slopes: mx.array, scale: float) -> Update:
    """Compute all chunks side by side. The first is padded with zeros on the left, so that every chunk ends at its last
    token and the state decays by the number of tokens.
    """
    n, heads, dim = q.shape
    pad = -n % CHUNK
    q, k, v = (_cut(x, pad) for x in (q, k, v))  # [H, N, C, D]
    num_chunks, s = q.shape[1], slopes[:, None]
    step = mx.arange(CHUNK, dtype=mx.float32)
    chunk = mx.arange(num_chunks + 1, dtype=mx.float32)
    inside = _decayed(slopes, step[:, None] - step)[:, None]  # [H, 1, C, C]
    until_end = mx.exp(-s * (CHUNK - 1 - step))[:, None, :, None]
    age = mx.maximum(step + 1 - mx.where(chunk[:-1, None] == 0, pad, 0), 0)  # tokens since the first token of the chunk
    since_start = mx.exp(-s[..., None] * age)[..., None]  # [H, N, C, 1]
    across = _decayed(slopes * CHUNK, chunk[:, None] - 1 - chunk[:-1])  # [H, N + 1, N]: end of one to start of another
    from_state = mx.exp(-s * mx.maximum(CHUNK * chunk - pad, 0))[..., None, None]
    updates = (k * until_end).swapaxes(-1, -2) @ v  # [H, N, D, D]
    states = (across @ updates.reshape(heads, num_chunks, dim * dim)).reshape(heads, num_chunks + 1, dim, dim)
    states = states + from_state * state[:, None]
    q = q * scale
    output = (q @ k.swapaxes(-1, -2) * inside) @ v + since_start * (q @ states[:, :-1])
    return output.reshape(heads, num_chunks * CHUNK, dim)[:, pad:].swapaxes(0, 1), states[:, -1]


def _cut(x: mx.array, pad: int) -> mx.array:
    """[n, H, D] → chunks [H, N, C, D] in fp32, zeros first."""
    x = mx.pad(x.astype(mx.float32).swapaxes(0, 1), [(0, 0), (pad, 0), (0, 0)])
    return x.reshape(x.shape[0], -1, CHUNK, x.shape[2])


def _decayed(slopes: mx.array, age: mx.array) -> mx.array:
    """exp(-slope * age) [H, …] where age is not negative, else 0."""
    return mx.where(age >= 0, mx.exp(-slopes[:, None, None] * mx.maximum(age, 0)), 0.0)


def lightning_ragged(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    states: mx.array,
    lengths: Sequence[int],
    slopes: mx.array,
    scale: float,
    step: Step = lightning_step,
) -> Update:
    """Packed sequences of any lengths: q, k, v [T, H, D], states [S, H, D, D] → output [T, H, D] fp32, next states.

    `step` computes sequences of one token.
    """
    if all(length == 1 for length in lengths):
        return step(q, k, v, states, slopes, scale)
    outputs, nexts, begin = [], [], 0
    for row, length in enumerate(lengths):
        piece = slice(begin, begin + length)
        output, state = lightning_prefill(q[piece], k[piece], v[piece], states[row], slopes, scale, step)
        outputs.append(output)
        nexts.append(state)
        begin += length
    return mx.concatenate(outputs), mx.stack(nexts)


def lightning_fold(k: mx.array, v: mx.array, state: mx.array, slopes: mx.array) -> mx.array:
    """Advance a state [H, D, D] by tokens whose outputs are known already: k, v [n, H, D] → next state."""
    n = k.shape[0]
    weight = mx.exp(-slopes[:, None] * mx.arange(n - 1, -1, -1, dtype=mx.float32))[..., None]  # [H, n, 1]
    k, v = (x.astype(mx.float32).swapaxes(0, 1) for x in (k, v))
    return mx.exp(-slopes * n)[:, None, None] * state + (k * weight).swapaxes(1, 2) @ v
