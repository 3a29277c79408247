"""Sampling on the GPU, in launches that a CUDA graph captures, by the rule of `backends/rows.py` and `sampler.py`.

With x the largest logit, a token weighs e = exp((logit - x) / T) in fp32, which is its probability times a constant.
Tokens are ordered by weight, ties by id. The filters keep a prefix of that order, and the sampled token is the first
whose cumulative mass exceeds u times the mass of the kept tokens. The weight's bits and the id form one integer, a key,
which is different for every token and has that order.

Masses are integers, e * 2^40 rounded down. Their sums do not depend on the order of summation, so that a token does not
depend on the batch or on tiles. `sampler.py` sums in fp64 (filters: fp32), and its exp may differ in the last bits. Its
tokens differ from these only where u lies within about 1e-6 of the border between two tokens.

Four launches avoid sorting the vocabulary: adjust the logits and find the largest; compute weights, their total and
how many lie in each bin of a quarter of an octave; collect the keys of the heaviest bins, as many as fit; sort these.
Where the token lies below them, as in flat distributions without filters, the last launch bisects over the keys of the
whole row until few remain, which is right but slow.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

import struct
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.rows import GREEDY_BELOW, allowed_tokens, sampling_of
from sala.backends.torch.kernels.pdl import pdl_options, pdl_wait
from sala.protocol import Row, Sampling

# Of a row: integers (top_p in units of 2^-64), and the bits of an fp32 for temperature, min_p and the penalties.
FIELDS = (
    "slot", "position", "seed", "temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency",
    "flags", "is_on",
)  # fmt: skip
NUM_FIELDS = len(FIELDS)
HAS_PENALTY, HAS_BIAS, HAS_MASK = 1, 2, 4
MAX_VOCAB = 1 << 18

TILE = 2048  # tokens of a program of the first three launches; results do not depend on it
SCAN = 8192  # tokens loaded at a time by the search of a whole row
CANDIDATES = 2048  # tokens that the last launch holds in registers

SLOT, POSITION, SEED, TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, FLAGS, IS_ON = (
    tl.constexpr(index) for index in range(NUM_FIELDS)
)
WIDTH = tl.constexpr(NUM_FIELDS)
ID_BITS = tl.constexpr(18)
ID_MASK = tl.constexpr(MAX_VOCAB - 1)
ONE_BITS = tl.constexpr(0x3F800000)  # the largest weight, 1.0
LEAST_BITS = tl.constexpr(0x2B800000)  # 2^-40, the least weight with a mass
MASS_UNIT = tl.constexpr(float(1 << 40))
MAX_TILES = tl.constexpr(MAX_VOCAB // TILE)
BINS = tl.constexpr(64)  # 16 octaves; the last bin takes everything below
BIN_BITS = tl.constexpr(21)  # of the weight's bits below a bin: a quarter of an octave


class SamplingBuffers:
    """What sampling knows of the sequence in each slot; the executor allocates it once."""

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_slots, vocab, dtype=torch.int32, device=device)  # occurrences in the answer
        self.in_prompt = torch.zeros(num_slots, vocab, dtype=torch.uint8, device=device)
        self.bias = torch.zeros(num_slots, vocab, dtype=torch.float32, device=device)
        self.last = torch.zeros(num_slots, dtype=torch.int64, device=device)  # the token sampled last

    def load(self, row: Row) -> None:
        """Set what the penalties and the bias of a row need in its slot; a sequence needs it once, at its start."""
        sampling, vocab = sampling_of(row), self.counts.shape[1]
        if sampling.has_penalty:
            history = np.asarray(row.history[: len(row.history) - row.num_drafts], np.int64)
            prompt, answer = history[: row.prompt_len], history[row.prompt_len :]
            self.counts[row.slot] = torch.from_numpy(np.bincount(answer, minlength=vocab).astype(np.int32))
            self.in_prompt[row.slot] = torch.from_numpy((np.bincount(prompt, minlength=vocab) > 0).astype(np.uint8))
        if sampling.logit_bias:
            bias = np.zeros(vocab, np.float32)
            bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
            self.bias[row.slot] = torch.from_numpy(bias)


_constants: dict[int, tuple[Sampling, list[int], int]] = {}  # by id; the Sampling is kept so that ids stay unique


def parameters_of(row: Row, num_accepted: int = 0) -> list[int]:
    """Return the FIELDS of a row, whose first `num_accepted` drafts count as accepted."""
    sampling = sampling_of(row)
    found = _constants.get(id(sampling))
    if found is None:
        if len(_constants) >= 4096:
            _constants.clear()
        found = _constants[id(sampling)] = (sampling, *_constants_of(sampling))
    _, constants, flags = found
    position = row.start + len(row.tokens) - row.num_drafts + num_accepted
    has_mask = row.mask is not None or row.banned
    return [row.slot, position, *constants, flags | HAS_MASK if has_mask else flags, 1]


def _constants_of(sampling: Sampling) -> tuple[list[int], int]:
    """Return the fields from the seed to the frequency penalty, and the flags without that of the mask."""
    is_greedy = sampling.temperature < GREEDY_BELOW
    share = min(int(float(np.float32(sampling.top_p)) * 2.0**64), (1 << 64) - 1)
    values = [
        _as_int64(sampling.seed or 0),
        _bits(0.0 if is_greedy else sampling.temperature),
        sampling.top_k or (1 << 31) - 1,
        _as_int64(share),
        _bits(sampling.min_p),
        _bits(sampling.repetition_penalty),
        _bits(sampling.presence_penalty),
        _bits(sampling.frequency_penalty),
    ]
    return values, HAS_PENALTY * sampling.has_penalty + HAS_BIAS * bool(sampling.logit_bias)


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _as_int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def packed_mask(row: Row, vocab: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return a row of `masks`: the tokens that mask and bans allow, one bit each, little-endian, [ceil(vocab / 8)]."""
    return np.packbits(allowed_tokens(row, vocab), bitorder="little")


def sample_rows(logits: Tensor, parameters: Tensor, buffers: SamplingBuffers, masks: Tensor, out: Tensor) -> None:
    """logits [R, V] → out [R] int64, the sampled tokens; also updates `last` and, with a penalty, `counts`.

    Where a logit is not a number, the token t that would have been sampled is written as ~t, which is negative.

    logits are bf16, fp16 or fp32, parameters [R, NUM_FIELDS] int64, masks [R, ceil(V / 8)] uint8, read only where the
    flags say so. Rows that are not on write nothing. No two rows that are on may have the same slot.
    """
    rows, vocab = logits.shape
    assert vocab <= MAX_VOCAB, vocab
    assert logits.stride(1) == masks.stride(1) == 1
    assert parameters.is_contiguous()
    assert parameters.shape == (rows, NUM_FIELDS), parameters.shape
    if not rows:
        return
    tiles, device = triton.cdiv(vocab, TILE), logits.device
    weights = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    keys = torch.empty(rows, 2, CANDIDATES, dtype=torch.int64, device=device)
    partial = torch.empty(rows, 2, tiles, dtype=torch.int64, device=device)  # best key and total mass of each tile
    bins = torch.empty(rows, BINS.value + 1, dtype=torch.int32, device=device)  # counts, then that of the candidates
    shared = {"VOCAB": vocab, "TILES": tiles, **pdl_options(device, rows, True)}
    tile = shared | {"TILE": TILE, "num_warps": 4}
    _adjust_kernel[(rows, tiles)](
        logits, parameters, buffers.counts, buffers.in_prompt, buffers.bias, masks, weights, partial, bins,
        **tile, STRIDE=logits.stride(0), MASK_STRIDE=masks.stride(0), enable_fp_fusion=False,
    )  # fmt: skip
    _weigh_kernel[(rows, tiles)](parameters, weights, partial, bins, **tile)
    _collect_kernel[(rows, tiles)](parameters, weights, partial, bins, keys, **tile, CANDIDATES=CANDIDATES)
    _choose_kernel[(rows,)](
        parameters, buffers.counts, buffers.last, weights, partial, bins, keys, out,
        **shared, LOG=CANDIDATES.bit_length() - 1, SCAN=SCAN, num_warps=16,
    )  # fmt: skip


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V], tokens [n] → log-probabilities of the tokens [n], and those of the best [n, count] with their ids.

    It does not synchronize with the host.
    """
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0], values, ids


@triton.jit
def _float(pointer):
    """Load a field that holds the bits of an fp32."""
    return tl.load(pointer).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _adjust_kernel(
    logits, parameters, counts, in_prompt, bias, masks, weights, partial, bins,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, STRIDE: tl.constexpr, MASK_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of logits → adjusted logits in `weights`, and the largest with the lowest id. Clears the bins."""
    pdl_wait(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    fields = parameters + row * WIDTH
    if tl.load(fields + IS_ON) == 0:
        return
    if tile == 0:
        tl.store(bins + row * (BINS + 1) + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(bins + row * (BINS + 1) + BINS, 0)
    flags = tl.load(fields + FLAGS)
    slot = tl.load(fields + SLOT)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < VOCAB
    x = tl.load(logits + row * STRIDE + ids, mask=inside, other=0.0).to(tl.float32)
    if flags & 1:
        count = tl.load(counts + slot * VOCAB + ids, mask=inside, other=0)
        is_seen = (count > 0) | (tl.load(in_prompt + slot * VOCAB + ids, mask=inside, other=0) != 0)
        penalty = _float(fields + REPETITION)
        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, penalty + tl.zeros_like(x)), x * penalty), x)
        x -= _float(fields + FREQUENCY) * count.to(tl.float32) + tl.where(count > 0, _float(fields + PRESENCE), 0.0)
    if flags & 2:
        x += tl.load(bias + slot * VOCAB + ids, mask=inside, other=0.0)
    if flags & 4:
        byte = tl.load(masks + row * MASK_STRIDE + ids // 8, mask=inside, other=0).to(tl.int32)
        x = tl.where(((byte >> (ids % 8)) & 1) != 0, x, float("-inf"))
    x = tl.where(x == 0, 0.0, x)  # -0.0 equals 0.0, but its bits do not
    x = tl.where(x == x, x, float("nan"))  # of either sign: it must be the largest
    tl.store(weights + row * VOCAB + ids, x, mask=inside)
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(1 << 31))
    best = tl.max((ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64), 0)
    tl.store(partial + row * 2 * TILES + tile, best)


@triton.jit
def _best_of(partial, row, TILES: tl.constexpr):
    """Return the largest adjusted logit of a row and its id."""
    tiles = tl.arange(0, MAX_TILES)
    best = tl.max(tl.load(partial + row * 2 * TILES + tiles, mask=tiles < TILES, other=-(1 << 63)), 0)
    ordered = (best >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (best & 0x7FFFFFFF)


@triton.jit
def _is_sampled(fields, largest):
    """Return whether a row is on and not greedy; one whose largest logit is not finite is greedy."""
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    return (tl.load(fields + IS_ON) != 0) & (_float(fields + TEMPERATURE) > 0) & is_finite


@triton.jit
def _mass(weight):
    return (weight * MASS_UNIT).to(tl.int64)


@triton.jit
def _weigh_kernel(
    parameters, weights, partial, bins,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of adjusted logits → weights in their place, their mass, and how many lie in each bin."""
    pdl_wait(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    fields = parameters + row * WIDTH
    largest = _best_of(partial, row, TILES)[0]
    if _is_sampled(fields, largest):
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(weights + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
        scaled = tl.div_rn(x - largest, _float(fields + TEMPERATURE) + tl.zeros_like(x))
        weight = tl.where(scaled <= 0, tl.minimum(tl.exp(scaled), 1.0), 0.0)
        tl.store(weights + row * VOCAB + ids, weight, mask=ids < VOCAB)
        tl.store(partial + row * 2 * TILES + TILES + tile, tl.sum(_mass(weight), 0))
        depth = -(weight.to(tl.int32, bitcast=True) - ONE_BITS) >> BIN_BITS
        found = tl.histogram(tl.minimum(depth, BINS - 1), BINS)
        bin = tl.arange(0, BINS)
        tl.atomic_add(bins + row * (BINS + 1) + bin, found, mask=found > 0, sem="relaxed")


@triton.jit
def _cut(bins, row, CANDIDATES: tl.constexpr):
    """Return the least bits of a candidate's weight and the number of candidates, from the heaviest bins that fit."""
    bin = tl.arange(0, BINS)
    count = tl.load(bins + row * (BINS + 1) + bin)
    fits = (tl.cumsum(count, 0) <= CANDIDATES) & (bin < BINS - 1)
    return -(tl.sum(fits.to(tl.int32), 0) << BIN_BITS) + (ONE_BITS + 1), tl.sum(tl.where(fits, count, 0), 0)


@triton.jit
def _key(weight, ids):
    """Return integers in the order of sampling: heavier tokens are larger, then lower ids."""
    return (weight.to(tl.int32, bitcast=True).to(tl.int64) << ID_BITS) | (ids ^ ID_MASK)


@triton.jit
def _collect_kernel(
    parameters, weights, partial, bins, keys,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Append the candidates of a tile to `keys`; their order does not matter."""
    pdl_wait(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = _best_of(partial, row, TILES)[0]
    if _is_sampled(parameters + row * WIDTH, largest):
        ids = tile * TILE + tl.arange(0, TILE)
        weight = tl.load(weights + row * VOCAB + ids, mask=ids < VOCAB, other=0.0)
        least = _cut(bins, row, CANDIDATES)[0]
        is_candidate = weight.to(tl.int32, bitcast=True) >= least
        count = tl.sum(is_candidate.to(tl.int32), 0)
        if count > 0:
            first = tl.atomic_add(bins + row * (BINS + 1) + BINS, count, sem="relaxed")
            place = first + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            tl.store(keys + row * 2 * CANDIDATES + place, _key(weight, ids), mask=is_candidate)


@triton.jit
def _bit(LOG: tl.constexpr, INDEX: tl.constexpr):
    """Return a bit of the numbers 0 … 2^LOG - 1, for a tensor of shape [2] * LOG."""
    return tl.reshape(tl.arange(0, 2), [1] * (LOG - 1 - INDEX) + [2] + [1] * INDEX)


@triton.jit
def _descending(keys, count, LOG: tl.constexpr):
    """Load `count` keys, zeros behind them, and sort them (a bitonic network): [2^LOG]."""
    place = tl.arange(0, 1 << LOG)
    x = tl.reshape(tl.load(keys + place, mask=place < count, other=0), [2] * LOG)
    for stage in tl.static_range(1, LOG + 1):
        for step in tl.static_range(stage):
            other = tl.sum(x, LOG - stage + step, keep_dims=True) - x
            is_upper = _bit(LOG, stage - 1 - step)
            is_descending = _bit(LOG, stage) if stage < LOG else 1
            x = tl.where((x > other) != ((is_upper ^ is_descending) != 0), other, x)
    return tl.reshape(x, [1 << LOG])


@triton.jit
def _prefix(key, low, count, mass, max_count, max_mass, LOG: tl.constexpr):
    """Find which of the sorted keys are kept, after `count` tokens that weigh `mass`; see `_search`.

    Returns their number, the mass up to the last of them, and its key.
    """
    weight = (key >> ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)
    own = _mass(weight)
    total = mass + tl.cumsum(own, 0)
    rank = count + tl.arange(0, 1 << LOG)
    fits = ((rank < max_count) & (total - own < max_mass)) | (rank == 0)
    fits = fits & (key > low)
    last = tl.min(tl.where(fits, key, ONE_BITS << (ID_BITS + 1)), 0)
    return tl.sum(fits.to(tl.int32), 0), tl.max(tl.where(fits, total, mass), 0), last


@triton.jit
def _scan(weights, low, VOCAB: tl.constexpr, SCAN: tl.constexpr):
    """Count the keys of a row that are above `low`, and add up their mass."""
    ids = tl.arange(0, SCAN)
    counts = tl.zeros([SCAN], tl.int32)
    masses = tl.zeros([SCAN], tl.int64)
    for base in range(0, VOCAB, SCAN):
        weight = tl.load(weights + base + ids, mask=base + ids < VOCAB, other=0.0)
        is_above = _key(weight, base + ids) > low
        counts += is_above.to(tl.int32)
        masses += tl.where(is_above, _mass(weight), 0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _collect(weights, low, high, spare, VOCAB: tl.constexpr, SCAN: tl.constexpr):
    """Write the keys of a row above `low` and up to `high` to `spare`."""
    ids = tl.arange(0, SCAN)
    num_written = 0
    for base in range(0, VOCAB, SCAN):
        key = _key(tl.load(weights + base + ids, mask=base + ids < VOCAB, other=0.0), base + ids)
        inside = (key > low) & (key <= high)
        place = num_written + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(spare + place, key, mask=inside)
        num_written += tl.sum(inside.to(tl.int32), 0)


@triton.jit
def _search(
    key, spare, weights, num_held, least, low, max_count, max_mass,
    VOCAB: tl.constexpr, LOG: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Find the longest prefix of the order in which every token has fewer than `max_count` tokens and less mass than
    `max_mass` before it. The first token always belongs to it, none with a key up to `low` does.

    Returns the bound above which its keys lie, its mass, and its last key (unless all keys above `low` belong to it).
    `key` are the `num_held` keys from `least` on; the whole row is scanned where the prefix goes on below them.
    """  # fmt: skip
    count, mass, last = _prefix(key, low, 0, max_mass * 0, max_count, max_mass, LOG)
    bound = last - 1
    if (count == num_held) & (count < max_count) & (mass < max_mass) & (least - 1 > low):
        high, bound = least - 1, low
        num_above, mass_above = count, mass  # of the keys above `high`; a token at `high` belongs to the prefix
        count, mass = _scan(weights, low, VOCAB, SCAN)  # of the keys above `bound`
        is_whole = (count < max_count) & (mass < max_mass)
        while (count - num_above > 1 << LOG) & (is_whole == 0):
            middle = bound + (high - bound) // 2
            more, more_mass = _scan(weights, middle, VOCAB, SCAN)
            fits = (more < max_count) & (more_mass < max_mass)
            high, bound = tl.where(fits, middle, high), tl.where(fits, bound, middle)
            num_above, mass_above = tl.where(fits, more, num_above), tl.where(fits, more_mass, mass_above)
            count, mass = tl.where(fits, count, more), tl.where(fits, mass, more_mass)
        if is_whole == 0:
            _collect(weights, bound, high, spare, VOCAB, SCAN)
            tl.debug_barrier()
            more_keys = _descending(spare, count - num_above, LOG)
            count, mass, last = _prefix(more_keys, bound, num_above, mass_above, max_count, max_mass, LOG)
            bound = last - 1
            tl.debug_barrier()
    return bound, mass, last


@triton.jit
def _random_bits(seed, position):
    """Return the 53 bits of `rows.uniform`, as the upper ones of 64."""
    state = seed.to(tl.uint64) * 0x9E3779B97F4A7C15 + position.to(tl.uint64) * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state ^= state >> 31
    return (state >> 11) << 11


@triton.jit
def _choose_kernel(
    parameters, counts, last, weights, partial, bins, keys, out,
    VOCAB: tl.constexpr, TILES: tl.constexpr, LOG: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sample the token of a row, from its candidates where they suffice."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    fields = parameters + row * WIDTH
    if tl.load(fields + IS_ON) == 0:
        return
    largest, token = _best_of(partial, row, TILES)
    if _is_sampled(fields, largest):
        tiles = tl.arange(0, MAX_TILES)
        total = tl.sum(tl.load(partial + row * 2 * TILES + TILES + tiles, mask=tiles < TILES, other=0), 0)
        least, num_held = _cut(bins, row, 1 << LOG)
        least_key = least.to(tl.int64) << ID_BITS
        keys += row * (2 << LOG)
        candidates = _descending(keys, num_held, LOG)
        min_p = tl.load(fields + MIN_P)
        low = (tl.maximum(min_p, LEAST_BITS) << ID_BITS) - 1
        share, whole = tl.load(fields + TOP_P).to(tl.uint64), total.to(tl.uint64)
        max_mass = (tl.umulhi(share, whole) + (share * whole != 0).to(tl.uint64)).to(tl.int64)  # rounded up
        max_count = tl.load(fields + TOP_K).to(tl.int32)
        is_filtered = (min_p > LEAST_BITS) | (max_mass < total) | (max_count < VOCAB)
        point = _random_bits(tl.load(fields + SEED), tl.load(fields + POSITION))
        mass, key = total, total
        for phase in range(1 - is_filtered.to(tl.int32), 2):  # what the filters keep; the token among it
            if phase == 1:
                max_count = max_count * 0 + 0x7FFFFFFF
                max_mass = tl.umulhi(point, mass.to(tl.uint64)).to(tl.int64) + 1
            low, mass, key = _search(
                candidates, keys + (1 << LOG), weights + row * VOCAB, num_held, least_key, low, max_count, max_mass,
                VOCAB, LOG, SCAN,
            )  # fmt: skip
        token = (key & ID_MASK) ^ ID_MASK
    slot = tl.load(fields + SLOT)
    tl.store(out + row, tl.where(largest == largest, token, ~token))
    tl.store(last + slot, token)
    if tl.load(fields + FLAGS) & 1:
        place = counts + slot * VOCAB + token
        tl.store(place, tl.load(place) + 1)
