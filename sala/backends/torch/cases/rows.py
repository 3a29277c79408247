# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Cases of lightning layers, products, norms and other passes over rows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch import kernels
from sala.backends.torch.cases.shapes import STATE_BYTES, Call, KernelCall, KernelCase, Shapes, row_count
from sala.backends.torch.fast.training import simple_gla
from sala.backends.torch.linears import AffineWeight
from sala.backends.torch.ops.dense import apply_rope, rms_norm, rope_angles
from sala.backends.torch.ops.lightning import lightning_prefill, lightning_step
from sala.options.schema import length_label

NUM_DRAFTS = 4  # tokens of a verified row
ROWS = 5  # of passes that are checked only


def lightning_cases(shapes: Shapes) -> Iterator[KernelCase]:
    yield from (_lightning_prefill(shapes, length) for length in shapes.lengths)
    yield from (_lightning_decode(shapes, rows) for rows in shapes.batches)
    size = f"2 x {NUM_DRAFTS} tokens"
    yield KernelCase("lightning verify", size, partial(_lightning_drafts, shapes, False))
    yield KernelCase("lightning fold", size, partial(_lightning_drafts, shapes, True))


def row_cases(shapes: Shapes) -> Iterator[KernelCase]:
    yield from (_residual_product(shapes, rows, is_mlp=False) for rows in shapes.batches)
    yield from (_residual_product(shapes, rows, is_mlp=True) for rows in shapes.batches)
    for bits in (4, 8):
        yield KernelCase(f"packed products, {bits} bits", row_count(ROWS), partial(_packed, shapes, bits))
    yield KernelCase("FP8 rows and product", "40 rows", partial(_fp8, shapes), measure=_rounded_error)
    yield from _passes(shapes)


def copying(num_bytes: int, device: torch.device) -> Call:
    """Return a copy that moves `num_bytes` bytes, read and written ones together."""
    source = torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


# lightning attention


def _recurrence(shapes: Shapes, num_tokens: int) -> int:
    """Return the FLOPs of the recurrence: per head, a token updates a state and reads it."""
    return 4 * num_tokens * shapes.config.lightning_nh * shapes.config.lightning_head_dim**2


def _lightning_prefill(shapes: Shapes, length: int) -> KernelCase:
    heads, dim = shapes.config.lightning_nh, shapes.config.lightning_head_dim
    library = simple_gla() if shapes.device.type == "cuda" else None

    def works() -> list[KernelCall]:
        q, k, v = shapes.lightning(length)
        states, rest = shapes.states(1), (shapes.slopes, dim**-0.5)
        spans = kernels.spans.table_of([kernels.spans.PackedSpan(0, length)], shapes.device)
        peer = None
        if library is not None:
            batch = (x.contiguous()[None] for x in (q, k, v))
            options = {"initial_state": states, "output_final_state": True}
            peer = partial(library, *batch, g_gamma=-rest[0], scale=rest[1], **options)
        kernel = partial(kernels.lightning.lightning_prefill, q, k, v, states, spans, *rest)
        reference = partial(lightning_prefill, q, k, v, states[0], *rest)
        return [KernelCall(kernel, reference, peer, also=partial(torch.clone, states[0]))]

    num_bytes = 4 * length * heads * dim * shapes.dtype.itemsize + 2 * heads * dim * dim * STATE_BYTES
    name = "reference" if library is None else "fla"
    return KernelCase("lightning prefill", length_label(length), works, _recurrence(shapes, length), num_bytes, name)


def _lightning_decode(shapes: Shapes, rows: int) -> KernelCase:
    heads, dim = shapes.config.lightning_nh, shapes.config.lightning_head_dim
    num_states = rows * heads * dim * dim * STATE_BYTES

    def works() -> Iterator[KernelCall]:
        q, k, v = shapes.lightning(rows)
        rest, slots = (shapes.slopes, dim**-0.5), shapes.arange(rows)
        while True:
            states = shapes.states(rows)
            kernel = partial(kernels.lightning.lightning_decode, q, k, v, states, slots, *rest)
            yield KernelCall(kernel, partial(lightning_step, q, k, v, states, *rest), also=partial(torch.clone, states))

    num_bytes = 2 * num_states + 4 * rows * heads * dim * shapes.dtype.itemsize
    flops = _recurrence(shapes, rows)
    sets = shapes.num_sets(num_states)
    return KernelCase("lightning decode", row_count(rows), works, flops, num_bytes, num_sets=sets)


def _lightning_drafts(shapes: Shapes, is_folded: bool) -> list[KernelCall]:
    """Take two rows of drafts, verified or folded into their states; the reference takes token after token."""
    q, k, v = (part.unflatten(0, (2, NUM_DRAFTS)) for part in shapes.lightning(2 * NUM_DRAFTS))
    states, slots = shapes.states(3), torch.tensor([2, 0], device=shapes.device)
    slopes, scale = shapes.slopes, shapes.config.lightning_head_dim**-0.5

    def kernel() -> Tensor:
        if not is_folded:
            return kernels.lightning.lightning_decode(q, k, v, states, slots, slopes, scale, keeps_states=True)
        counts = torch.full((2,), NUM_DRAFTS, device=shapes.device)
        kernels.lightning.lightning_fold(k, v, states, slots, counts, slopes)
        return states[slots]

    def twin() -> Tensor:
        outputs, after = step_by_step(q, k, v, states[slots], slopes, scale)
        return after if is_folded else outputs

    return [KernelCall(kernel, twin)]


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition of lightning attention, token after token: q, k, v [S, n, H, D] → outputs and states after it."""
    outputs = []
    for token in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        output, states = lightning_step(*token, states, slopes, scale)
        outputs.append(output)
    return torch.stack(outputs, 1), states


# products of decode rows


def _residual_product(shapes: Shapes, rows: int, is_mlp: bool) -> KernelCase:
    """The output projection or the MLP, and the norm behind it; the peer is the library's product and our norm."""
    config, hidden = shapes.config, shapes.config.hidden_size
    width = config.intermediate_size if is_mlp else config.num_attention_heads * config.head_dim
    num_weights = hidden * width * (3 if is_mlp else 1)

    def works() -> Iterator[KernelCall]:
        fused, linear = kernels.fused, kernels.linear
        x, inner = shapes.random(rows, hidden), shapes.random(rows, hidden if is_mlp else width)
        rest = (config.residual_scale, shapes.random(hidden), config.rms_norm_eps)

        def kernel(weight: Tensor, gate_up: Tensor | None) -> Any:
            wide = inner if gate_up is None else linear.linear_silu_mul(inner, gate_up)
            return linear.add_partials_rms_norm(x, linear.split_linear(wide, weight), *rest)

        def peer(weight: Tensor, gate_up: Tensor | None) -> Any:
            wide = inner if gate_up is None else fused.silu_mul(F.linear(inner, gate_up))
            return fused.add_rms_norm(x, F.linear(wide, weight), *rest)

        while True:
            gate_up = shapes.random(2 * width, hidden) * hidden**-0.5 if is_mlp else None
            yield KernelCall.of(kernel, peer, shapes.random(hidden, width) * width**-0.5, gate_up)

    name, num_bytes = "MLP and norm" if is_mlp else "output projection and norm", num_weights * shapes.dtype.itemsize
    flops, sets = 2 * rows * num_weights, shapes.num_sets(num_bytes)
    return KernelCase(name, row_count(rows), works, flops, num_bytes, "F.linear", sets)


def random_affine(bits: int, num_out: int, num_in: int, group_size: int, device: torch.device) -> AffineWeight:
    """Return a quantized matrix whose numbers are about 1 / sqrt(num_in)."""
    codes = torch.randint(-(1 << 31), 1 << 31, (num_out, num_in * bits // 32)).int()
    scales = torch.rand(num_out, num_in // group_size) * num_in**-0.5 * 4 / (1 << bits)
    biases = -scales * (1 << bits) * torch.rand(scales.shape)
    return AffineWeight(codes.to(device), scales.to(device), biases.to(device), bits, group_size)


def _packed(shapes: Shapes, bits: int) -> list[KernelCall]:
    """A matrix of codes times decode rows and prefill rows, and one of its rows expanded."""
    linear, expand = kernels.linear, kernels.packed.expand
    hidden, wide = -(-shapes.config.hidden_size // 32) * 32, 2 * shapes.config.intermediate_size
    weight = random_affine(bits, wide, hidden, 32, shapes.device)
    held, x = weight.for_gpu(shapes.dtype, shapes.device), shapes.random(linear.MAX_ROWS + 1, hidden)
    index, decode = torch.tensor([3], device=shapes.device), x[:ROWS]

    def kernel() -> list[Tensor]:
        products = [linear.linear(decode, held), linear.split_linear(decode, held).sum(0)]
        products += [linear.linear_silu_mul(decode, held), linear.product(x, held)]
        return [*products, expand(held, index)]

    def twin() -> list[Tensor]:
        wanted = F.linear(x.float(), weight.rows(slice(None)))
        decode = wanted[:ROWS]
        return [decode, decode, kernels.fused.silu_mul(decode), wanted, weight.rows(slice(3, 4))]

    return [KernelCall(kernel, twin)]


def _fp8(shapes: Shapes) -> list[KernelCall]:
    """Compare with the same rounded numbers in fp32; nothing is compared where the device has no FP8 tensor cores."""
    fp8, fused = kernels.fp8, kernels.fused
    if shapes.device.type == "cuda" and not fp8.can_run(shapes.device):
        return [KernelCall.of(torch.ones, torch.ones, 1)]
    width, eps = -(-shapes.config.hidden_size // 16) * 16, shapes.config.rms_norm_eps
    x, norm, matrix = shapes.random(40, 2 * width), shapes.random(width), shapes.random(width, width)
    weight = fp8.from_weight(matrix)

    def kernel() -> list[Tensor]:
        normed, active = fp8.rms_norm(x[:, :width], norm, eps), fp8.silu_mul(x)
        product = fp8.product(normed, weight, shapes.dtype)
        return [normed.scales, active.scales, normed.codes.float(), active.codes.float(), product]

    def twin() -> list[Tensor]:
        normed, active = fp8.quantize(fused.rms_norm(x[:, :width], norm, eps)), fp8.quantize(fused.silu_mul(x))
        product = (normed.codes.float() * normed.scales) @ (weight.codes.float() * weight.scales).T
        return [normed.scales, active.scales, normed.codes.float(), active.codes.float(), product]

    return [KernelCall(kernel, twin)]


def _rounded_error(found: Tensor, wanted: Tensor) -> float:
    """Return the distance of all numbers together, since single codes may be rounded differently."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# passes over prefill rows; the peer is a copy of as many bytes


def _passes(shapes: Shapes) -> Iterator[KernelCase]:
    """Return the kernels of `fused.py`: each with the bytes that it moves, its reference, and inputs for both."""
    config, rows, random = shapes.config, shapes.num_rows, shapes.random
    hidden, wide, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    heads, dim, size = config.lightning_nh, config.lightning_head_dim, shapes.dtype.itemsize
    width, fp32 = heads * dim, torch.float32.itemsize

    def heads_of_lightning() -> tuple[Any, ...]:
        q, k, _ = shapes.lightning(rows)
        angles = rope_angles(shapes.arange(rows), dim, config.rope_theta)
        return q, k, kernels.fused.Heads(random(dim), random(dim), eps, *angles)

    def case(name: str, kernel: str, twin: Callable[..., Any], num_bytes: int, inputs: Callable[[], Any]) -> KernelCase:
        def works() -> list[KernelCall]:
            peer = copying(num_bytes, shapes.device) if num_bytes else None
            return [KernelCall.of(getattr(kernels.fused, kernel), twin, *inputs(), peer=peer)]

        return KernelCase(name, row_count(rows if num_bytes else ROWS), works, 0, num_bytes, "copy")

    def sums() -> tuple[Any, ...]:
        return random(rows, hidden), random(rows, hidden), config.residual_scale, random(hidden), eps

    def gated() -> tuple[Any, ...]:
        return random(rows, width), random(width), random(rows, width), eps

    rope_bytes = (4 * rows * heads + 2) * dim * size + 2 * rows * dim * fp32
    yield case("norm", "rms_norm", rms_norm, 0, lambda: (random(ROWS, hidden), random(hidden), eps))
    yield case("add and norm", "add_rms_norm", _add_norm, (4 * rows + 1) * hidden * size, sums)
    yield case("norm and rope of q, k", "qk_norm_rope", _norm_rope, rope_bytes, heads_of_lightning)
    yield case("norm and gate", "norm_gate", _norm_gate, (3 * rows + 1) * width * size, gated)
    yield case("silu and product", "silu_mul", _silu_mul, 3 * rows * wide * size, lambda: (random(rows, 2 * wide),))


def _add_norm(x: Tensor, delta: Tensor, scale: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta * scale
    return total, rms_norm(total, weight, eps)


def _norm_rope(q: Tensor, k: Tensor, heads: Any) -> list[Tensor]:
    parts = ((q, heads.q_weight), (k, heads.k_weight))
    return [apply_rope(rms_norm(x, weight, heads.eps), heads.cos, heads.sin) for x, weight in parts]


def _norm_gate(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return rms_norm(o, weight, eps) * torch.sigmoid(gate)


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up
