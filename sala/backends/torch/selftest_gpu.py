"""The Triton kernels against ops/, in bf16 at the released shapes; then whole steps of a small model, also in fp32."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.batch import Span
from sala.backends.torch.cache import KVPages
from sala.backends.torch.ops.affine import pack
from sala.backends.torch.ops.attention import dense_attention
from sala.backends.torch.ops.lightning import decay_slopes, lightning_prefill, lightning_step
from sala.backends.torch.ops.norm import rms_norm
from sala.backends.torch.ops.rope import apply_rope, rope_angles
from sala.backends.torch.ops.sparse import select_blocks, sparse_attention
from sala.backends.torch.quantized_linear import AffineLinear, AffineWeight
from sala.backends.torch.random import random_model
from sala.backends.torch.selftest import ANSWER, PROMPT, SMALL, Pair, Trial, relative_error
from sala.checkpoint.random import RELEASED
from sala.config import SalaConfig

EPS = 1e-6
ROUNDING = 2e-2  # of bf16 results
NUM_QUERIES = 40
STEP_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def trials(device: torch.device) -> dict[str, Trial]:
    return {**kernel_trials(device, RELEASED, torch.bfloat16), **step_trials(device)}


def kernel_trials(device: torch.device, config: SalaConfig, dtype: torch.dtype) -> dict[str, Trial]:
    shapes = Shapes(config, dtype, device)
    measures: dict[str, Callable[[Shapes], float]] = {
        "lightning prefill": _lightning_prefill,
        "lightning decode": _lightning_decode,
        "lightning verify": _lightning_verify,
        "lightning fold": _lightning_fold,
        "norm": _norm,
        "add and norm": _add_norm,
        "norm and rope of q and k": _norm_rope,
        "norm and gate": _norm_gate,
        "silu": _silu,
        "products of few rows": _products,
        "MLP of few rows": _mlp,
        "packed products, 4 bits": partial(_packed, bits=4),
        "packed products, 8 bits": partial(_packed, bits=8),
        "FP8": _fp8,
        "pooling": _pooling,
        "choice, prefill": _select_prefill,
        "choice, decode": _select_decode,
        "sparse attention, prefill": _sparse_prefill,
        "dense attention, prefill": _dense_prefill,
        "attention, decode": _decode_attention,
    }
    return {f"Triton {name}": Trial(partial(measure, shapes), ROUNDING) for name, measure in measures.items()}


def step_trials(device: torch.device) -> dict[str, Trial]:
    return {
        f"GPU {kind}, {regime}, {str(dtype).removeprefix('torch.')}": Trial(
            partial(_step, device, dtype, kind, regime == "sparse"), tolerance
        )
        for dtype, tolerance in STEP_ERRORS.items()
        for kind in ("prefill", "decode")
        for regime in ("dense", "sparse")
    } | {
        f"GPU {kind}, {bits} bits": Trial(partial(_packed_step, device, kind, bits), STEP_ERRORS[torch.bfloat16])
        for kind in ("prefill", "decode")
        for bits in (4, 8)
    }


class Shapes:
    """Sizes of the tensors of a model, and random ones of them."""

    def __init__(self, config: SalaConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.sparse = config.sparse_config
        self.scale = config.head_dim**-0.5
        self.length = (self.sparse.num_selected + 8) * self.sparse.block_size + 5  # more than are selected
        self.start = self.length - NUM_QUERIES

    def random(self, *shape: int) -> Tensor:
        """SampledToken on the CPU: every device gets the same."""
        return torch.randn(shape).to(self.device, self.dtype)

    def lightning(self, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
        size = (*shape, self.config.lightning_nh, self.config.lightning_head_dim)
        return self.random(*size), self.random(*size), self.random(*size)

    def states(self, count: int) -> Tensor:
        dim = self.config.lightning_head_dim
        return torch.randn(count, self.config.lightning_nh, dim, dim).to(self.device)

    @property
    def slopes(self) -> Tensor:
        return decay_slopes(self.config.lightning_nh, self.device)

    def queries(self, count: int) -> Tensor:
        return self.random(count, self.config.num_attention_heads, self.config.head_dim)

    def positions(self) -> Tensor:
        return torch.arange(self.start, self.length, device=self.device)


class Past:
    """A sequence in scattered pages, written by the reference."""

    def __init__(self, shapes: Shapes) -> None:
        config, length = shapes.config, shapes.length
        num_pages = -(-length // shapes.sparse.block_size)
        self.num_blocks = num_pages
        self.pages = KVPages(num_pages + 3, config, shapes.dtype, shapes.device)
        order = tuple(torch.randperm(num_pages + 3)[:num_pages].tolist())
        self.span = Span(0, length, 0, 0, 0, order, shapes.device)
        self.k, self.v = (shapes.random(length, config.num_key_value_heads, config.head_dim) for _ in range(2))
        for pool in (self.pages.k, self.pages.v, self.pages.k1, self.pages.k2):
            pool.zero_()
        self.pages.append(self.span, self.k, self.v)

    def select(self, shapes: Shapes, q: Tensor, positions: Tensor) -> Tensor:
        k1, k2 = self.pages.pooled(self.span, shapes.length)
        return select_blocks(q, k1, k2, positions, self.num_blocks, shapes.sparse, shapes.scale)


def _lightning_prefill(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import lightning

    q, k, v = shapes.lightning(200)
    state, scale = shapes.states(1)[0], shapes.config.lightning_head_dim**-0.5
    found = lightning.lightning_prefill(q, k, v, state, shapes.slopes, scale)
    wanted = lightning_prefill(q, k, v, state, shapes.slopes, scale)
    return max(map(relative_error, found, wanted))


def _lightning_decode(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import lightning

    q, k, v = shapes.lightning(3)
    states, slots = shapes.states(4), torch.tensor([2, 0, 3], device=shapes.device)
    wanted, after = lightning_step(q, k, v, states[slots], shapes.slopes, shapes.scale)
    found = lightning.lightning_decode(q, k, v, states, slots, shapes.slopes, shapes.scale)
    return max(relative_error(found, wanted), relative_error(states[slots], after))


def _lightning_verify(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import lightning

    q, k, v = shapes.lightning(2, 4)
    states, slots = shapes.states(3), torch.tensor([2, 0], device=shapes.device)
    found = lightning.lightning_verify(q, k, v, states, slots, shapes.slopes, shapes.scale)
    return relative_error(found, _recur(shapes, q, k, v, states[slots])[0])


def _lightning_fold(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import lightning

    _, k, v = shapes.lightning(2, 4)
    states, slots = shapes.states(3), torch.tensor([2, 0], device=shapes.device)
    wanted = _recur(shapes, k, k, v, states[slots])[1]
    counts = torch.tensor([4, 4], device=shapes.device)
    lightning.lightning_fold(k, v, states, slots, counts, shapes.slopes)
    return relative_error(states[slots], wanted)


def _recur(shapes: Shapes, q: Tensor, k: Tensor, v: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Token after token: q, k, v [S, n, H, D] → outputs [S, n, H, D], next states."""
    outputs = []
    for i in range(q.shape[1]):
        output, states = lightning_step(q[:, i], k[:, i], v[:, i], states, shapes.slopes, shapes.scale)
        outputs.append(output)
    return torch.stack(outputs, 1), states


def _norm(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import fused

    x, weight = shapes.random(5, shapes.config.hidden_size), shapes.random(shapes.config.hidden_size)
    return relative_error(fused.rms_norm(x, weight, EPS), rms_norm(x, weight, EPS))


def _add_norm(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import fused

    x, delta, weight = (shapes.random(*size, shapes.config.hidden_size) for size in ((5,), (5,), ()))
    total = x + delta * 0.25
    found = fused.add_rms_norm(x.clone(), delta, 0.25, weight, EPS)
    return max(map(relative_error, found, (total, rms_norm(total, weight, EPS))))


def _norm_rope(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import fused

    q, k, _ = shapes.lightning(5)
    q_weight, k_weight = (shapes.random(q.shape[2]) for _ in range(2))
    cos, sin = rope_angles(torch.arange(1000, 1005, device=shapes.device), q.shape[2], shapes.config.rope_theta)
    wanted = [apply_rope(rms_norm(x, weight, EPS), cos, sin) for x, weight in ((q, q_weight), (k, k_weight))]
    found = fused.qk_norm_rope(q.clone(), k.clone(), q_weight, k_weight, EPS, cos, sin, None)
    return max(map(relative_error, found, wanted))


def _norm_gate(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import fused

    x, gate, weight = (shapes.random(*size, shapes.config.hidden_size) for size in ((5,), (5,), ()))
    wanted = rms_norm(x, weight, EPS) * torch.sigmoid(gate)
    return relative_error(fused.norm_gate(x, weight, gate, EPS), wanted)


def _silu(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import fused

    x = shapes.random(5, 2 * shapes.config.intermediate_size)
    gate, up = x.chunk(2, 1)
    return relative_error(fused.silu_mul(x), F.silu(gate) * up)


def _products(shapes: Shapes) -> float:
    """Whole, and in parts that the norm behind adds up."""
    from sala.backends.torch.kernels import fused, linear

    width = shapes.config.hidden_size
    x, y, norm = shapes.random(5, width), shapes.random(5, width), shapes.random(width)
    weight = shapes.random(width, width) * width**-0.5
    wanted = fused.add_rms_norm(x, F.linear(y, weight), 0.25, norm, EPS)
    found = linear.add_partials_rms_norm(x, linear.split_linear(y, weight), 0.25, norm, EPS)
    return max(map(relative_error, (linear.linear(y, weight), *found), (F.linear(y, weight), *wanted)))


def _mlp(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import fused, linear

    hidden, wide = shapes.config.hidden_size, shapes.config.intermediate_size
    x, gate_up = shapes.random(5, hidden), shapes.random(2 * wide, hidden) * hidden**-0.5
    down = shapes.random(hidden, wide) * wide**-0.5
    found = linear.split_linear(linear.linear_silu_mul(x, gate_up), down).sum(0)
    return relative_error(found, F.linear(fused.silu_mul(F.linear(x, gate_up)), down))


def _packed(shapes: Shapes, bits: int) -> float:
    """A matrix of codes, multiplied with few rows and with many, and one of its rows."""
    from sala.backends.torch.kernels import fused, linear, packed

    hidden, wide = -(-shapes.config.hidden_size // 32) * 32, 2 * shapes.config.intermediate_size
    codes = torch.randint(-(1 << 31), 1 << 31, (wide, hidden * bits // 32)).int()
    scales = torch.rand(wide, hidden // 32) * hidden**-0.5 * 4 / (1 << bits)
    biases = -scales * (1 << bits) / 2 * torch.rand(scales.shape) * 2
    weight = AffineWeight(codes.to(shapes.device), scales.to(shapes.device), biases.to(shapes.device), bits, 32)
    held, x = weight.for_gpu(shapes.dtype, shapes.device), shapes.random(linear.MAX_ROWS + 1, hidden)
    wanted = F.linear(x.float(), weight.rows(slice(None)))
    few = x[:5]
    pairs = [
        (packed.linear(few, held), wanted[:5]),
        (packed.split_linear(few, held).sum(0), wanted[:5]),
        (packed.linear_silu_mul(few, held), fused.silu_mul(wanted[:5])),
        (packed.product(x, held), wanted),
        (packed.expand(held, torch.tensor([3], device=shapes.device)), weight.rows(slice(3, 4))),
    ]
    return max(relative_error(*pair) for pair in pairs)


def _fp8(shapes: Shapes) -> float:
    """Against the same rounded numbers in fp32; nothing, where there are no such tensor cores."""
    from sala.backends.torch.kernels import fp8, fused

    if shapes.device.type == "cuda" and not fp8.can_run(shapes.device):
        return 0.0
    width = -(-shapes.config.hidden_size // 16) * 16
    x, norm, matrix = shapes.random(40, 2 * width), shapes.random(width), shapes.random(width, width)
    weight = fp8.from_weight(matrix)
    wanted = [fp8.quantize(fused.rms_norm(x[:, :width], norm, EPS)), fp8.quantize(fused.silu_mul(x))]
    found = [fp8.rms_norm(x[:, :width], norm, EPS), fp8.silu_mul(x)]
    told = (wanted[0].codes.float() * wanted[0].scales) @ (weight.codes.float() * weight.scales).T
    scales = max(relative_error(a.scales, b.scales) for a, b in zip(found, wanted, strict=True))
    codes = max(float((a.codes.float() != b.codes.float()).float().mean()) for a, b in zip(found, wanted, strict=True))
    return max(scales, codes, relative_error(fp8.product(found[0], weight, shapes.dtype), told))


def _pooling(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import pooling

    past = Past(shapes)
    wanted = past.pages
    found = KVPages(wanted.k.shape[1], shapes.config, shapes.dtype, shapes.device)
    pools = [(getattr(found, name), getattr(wanted, name)) for name in ("k", "v", "k1", "k2")]
    for target, source in pools:
        target.copy_(source)
        target[:, past.span.pages[-2:]] = 0
    start = shapes.length - shapes.sparse.block_size  # the new tokens reach over two pages
    for target, source in pools[:2]:
        page, offset = past.span.pages[-2], start % shapes.sparse.block_size
        target[:, page, :offset] = source[:, page, :offset]
    for target, source in pools[2:]:
        page, rows = past.span.pages[-2], start % shapes.sparse.block_size * source.shape[2] // shapes.sparse.block_size
        target[:, page, :rows] = source[:, page, :rows]
    positions = torch.arange(start, shapes.length, device=shapes.device)
    pooling.append(
        past.k[start:], past.v[start:], found.k, found.v, found.k1, found.k2, past.span.table[None], positions[:1],
        torch.zeros_like(positions), positions, shapes.sparse,
    )  # fmt: skip
    return max(relative_error(target, source) for target, source in pools)


def _select_prefill(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import block_selection

    past, q, positions = Past(shapes), shapes.queries(NUM_QUERIES), shapes.positions()
    pages, table = past.pages, past.span.table
    found = block_selection.select_prefill(q, pages.k1, pages.k2, table, shapes.start, shapes.sparse, shapes.scale)
    return _share_of_others(found, past.select(shapes, q, positions))


def _select_decode(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import block_selection

    past, q, positions = Past(shapes), shapes.queries(NUM_QUERIES), shapes.positions()
    tables = past.span.table.int().repeat(NUM_QUERIES, 1)
    pages, lengths = past.pages, positions + 1
    found = block_selection.select_decode(
        q, pages.k1, pages.k2, tables, lengths, shapes.sparse, shapes.scale, past.num_blocks
    )  # fmt: skip
    return _share_of_others(found, past.select(shapes, q, positions))


def _share_of_others(found: Tensor, wanted: Tensor) -> float:
    """Of the selected blocks, how many are not those of the reference: ties may go either way."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    is_known = (found[..., :, None] == wanted[..., None, :]).any(-1)
    return float((~is_known).double().mean())


def _sparse_prefill(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import attention

    past, q, positions = Past(shapes), shapes.queries(NUM_QUERIES), shapes.positions()
    pages, table, selected = past.pages, past.span.table, past.select(shapes, q, positions)
    found = attention.sparse_prefill(q, pages.k, pages.v, table, selected.int(), shapes.start, shapes.scale)
    return relative_error(found, sparse_attention(q, pages.k, pages.v, table, selected, positions, shapes.scale))


def _dense_prefill(shapes: Shapes) -> float:
    from sala.backends.torch.kernels import attention

    past, q = Past(shapes), shapes.queries(NUM_QUERIES)
    keys, values = past.pages.keys_values(past.span, shapes.length)
    found = attention.dense_prefill(q, past.pages.k, past.pages.v, past.span.table, shapes.start, shapes.scale)
    return relative_error(found, dense_attention(q, keys, values, shapes.start, shapes.scale))


def _decode_attention(shapes: Shapes) -> float:
    """Rows by turns sparse and dense."""
    from sala.backends.torch.kernels import decode_attention

    past, q, positions = Past(shapes), shapes.queries(NUM_QUERIES), shapes.positions()
    pages, table, selected = past.pages, past.span.table, past.select(shapes, q, positions)
    is_sparse = positions % 2 == 0
    found = decode_attention.decode_attention(
        q, pages.k, pages.v, table.int().repeat(NUM_QUERIES, 1), positions + 1, is_sparse, selected.int(), shapes.scale,
        max_dense_blocks=past.num_blocks,
    )  # fmt: skip
    sparse = sparse_attention(q, pages.k, pages.v, table, selected, positions, shapes.scale)
    dense = dense_attention(q, *pages.keys_values(past.span, shapes.length), shapes.start, shapes.scale)
    return relative_error(found, torch.where(is_sparse[:, None, None], sparse, dense))


def _step(device: torch.device, dtype: torch.dtype, kind: str, is_sparse: bool) -> float:
    """A prompt in two chunks, or an answer after one, by all kernels together."""
    from sala.backends.torch.fast.gpu_forward import GpuForward

    model = random_model(SMALL, dtype, device)
    steps = GpuForward(model, device, PROMPT + 64, has_graphs=device.type == "cuda", prefill="auto")
    return _compare(Pair(steps, model, is_sparse), kind)


def _packed_step(device: torch.device, kind: str, bits: int) -> float:
    """As `_step`, with packed matrices against the same ones dequantized."""
    from sala.backends.torch.fast.gpu_forward import GpuForward

    model, twin = (random_model(SMALL, torch.bfloat16, device) for _ in range(2))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = _nearest(module.weight, bits)
            module.weight.copy_(weight.rows(slice(None)))
            twin.set_submodule(name, AffineLinear(weight, module.bias))
    steps = GpuForward(twin, device, PROMPT + 64, has_graphs=device.type == "cuda", prefill="auto")
    return _compare(Pair(steps, model, is_sparse=True), kind)


def _nearest(weight: Tensor, bits: int, group_size: int = 32) -> AffineWeight:
    """The codes between the smallest and the largest number of each group."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.aminmax(dim=-1)
    scales = (high - low) / ((1 << bits) - 1)
    codes = ((groups - low.unsqueeze(-1)) / scales.unsqueeze(-1)).round().int().flatten(1)
    return AffineWeight(pack(codes, bits), scales, low, bits, group_size)


def _compare(two: Pair, kind: str) -> float:
    if kind == "prefill":
        return two.compare((PROMPT - 300, 300))
    two.read(PROMPT)
    return two.compare(ANSWER)
