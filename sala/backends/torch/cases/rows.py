# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Cases of lightning layers, products, norms and other passes over rows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.cases.shapes import STATE_BYTES, Call, KernelCase, Shapes, Work, label, row_count
from sala.backends.torch.linears import AffineWeight
from sala.backends.torch.ops.dense import apply_rope, rms_norm, rope_angles
from sala.backends.torch.ops.lightning import lightning_prefill, lightning_step

NUM_DRAFTS = 4  # tokens of a verified row
ROWS = 5  # of passes that are checked only


def lightning_cases(shapes: Shapes) -> Iterator[KernelCase]:
    yield from (_lightning_prefill(shapes, length) for length in shapes.lengths)
    yield from (_lightning_decode(shapes, rows) for rows in shapes.batches)
    yield _lightning_verify(shapes)
    yield _lightning_fold(shapes)


def row_cases(shapes: Shapes) -> Iterator[KernelCase]:
    yield from (_output(shapes, rows) for rows in shapes.batches)
    yield from (_mlp(shapes, rows) for rows in shapes.batches)
    yield from (_packed(shapes, bits) for bits in (4, 8))
    yield _fp8(shapes)
    yield _norm(shapes)
    yield _add_norm(shapes)
    yield _norm_rope(shapes)
    yield _norm_gate(shapes)
    yield _silu_mul(shapes)


def copying(num_bytes: int, device: torch.device) -> Call:
    """Return a copy that reads and writes so many bytes together."""
    source = torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


# lightning attention


def _recurrence(shapes: Shapes, num_tokens: int) -> int:
    """A token adds to a state and reads it: two products of its size per head."""
    return 4 * num_tokens * shapes.config.lightning_nh * shapes.config.lightning_head_dim**2


def _lightning_prefill(shapes: Shapes, length: int) -> KernelCase:
    heads, dim = shapes.config.lightning_nh, shapes.config.lightning_head_dim
    library = simple_gla() if shapes.device.type == "cuda" else None

    def build(_: int) -> list[Work]:
        from sala.backends.torch.kernels import lightning

        q, k, v = shapes.lightning(length)
        state = shapes.states(1)[0]
        rest = (state, shapes.slopes, dim**-0.5)
        peer = None
        if library is not None:
            batch = (x.contiguous()[None] for x in (q, k, v))
            peer = partial(
                library, *batch, g_gamma=-rest[1], scale=rest[2], initial_state=state[None], output_final_state=True
            )
        return [
            Work(partial(lightning.lightning_prefill, q, k, v, *rest), partial(lightning_prefill, q, k, v, *rest), peer)
        ]

    num_bytes = 4 * length * heads * dim * shapes.dtype.itemsize + 2 * heads * dim * dim * STATE_BYTES
    name = "reference" if library is None else "fla"
    return KernelCase("lightning prefill", label(length), build, _recurrence(shapes, length), num_bytes, name)


def simple_gla() -> Callable[..., Any] | None:
    """Return flash-linear-attention's kernel for the same recurrence, where it is installed and fits this torch."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception:
        return None
    return chunk_simple_gla


def _lightning_decode(shapes: Shapes, rows: int) -> KernelCase:
    heads, dim = shapes.config.lightning_nh, shapes.config.lightning_head_dim
    num_states = rows * heads * dim * dim * STATE_BYTES

    def build(count: int) -> list[Work]:
        from sala.backends.torch.kernels import lightning

        q, k, v = shapes.lightning(rows)
        rest, slots = (shapes.slopes, dim**-0.5), shapes.arange(rows)
        return [
            Work(
                partial(lightning.lightning_decode, q, k, v, states, slots, *rest),
                partial(lightning_step, q, k, v, states, *rest),
                also=partial(torch.clone, states),
            )
            for states in (shapes.states(rows) for _ in range(count))
        ]

    num_bytes = 2 * num_states + 4 * rows * heads * dim * shapes.dtype.itemsize
    flops = _recurrence(shapes, rows)
    sets = shapes.num_sets(num_states)
    return KernelCase("lightning decode", row_count(rows), build, flops, num_bytes, num_sets=sets)


def _recur(shapes: Shapes, q: Tensor, k: Tensor, v: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Token after token: q, k, v [S, n, H, D] → outputs [S, n, H, D], next states."""
    outputs, scale = [], shapes.config.lightning_head_dim**-0.5
    for i in range(q.shape[1]):
        output, states = lightning_step(q[:, i], k[:, i], v[:, i], states, shapes.slopes, scale)
        outputs.append(output)
    return torch.stack(outputs, 1), states


def _drafts(shapes: Shapes) -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys and values of two rows of drafts, [2, n, H, D] each, states, and the rows' slots."""
    parts = [part.unflatten(0, (2, NUM_DRAFTS)) for part in shapes.lightning(2 * NUM_DRAFTS)]
    return parts, shapes.states(3), torch.tensor([2, 0], device=shapes.device)


def _lightning_verify(shapes: Shapes) -> KernelCase:
    def build(_: int) -> list[Work]:
        from sala.backends.torch.kernels import lightning

        (q, k, v), states, slots = _drafts(shapes)
        rest = (states, slots, shapes.slopes, shapes.config.lightning_head_dim**-0.5)
        kernel = partial(lightning.lightning_verify, q, k, v, *rest)
        return [Work(kernel, lambda: _recur(shapes, q, k, v, states[slots])[0])]

    return KernelCase("lightning verify", f"2 x {NUM_DRAFTS} tokens", build)


def _lightning_fold(shapes: Shapes) -> KernelCase:
    def build(_: int) -> list[Work]:
        from sala.backends.torch.kernels import lightning

        (_q, k, v), states, slots = _drafts(shapes)
        counts = torch.full((2,), NUM_DRAFTS, device=shapes.device)

        def kernel() -> Tensor:
            lightning.lightning_fold(k, v, states, slots, counts, shapes.slopes)
            return states[slots]

        return [Work(kernel, lambda: _recur(shapes, k, k, v, states[slots])[1])]

    return KernelCase("lightning fold", f"2 x {NUM_DRAFTS} tokens", build)


# products of decode rows


def _output(shapes: Shapes, rows: int) -> KernelCase:
    """The output projection and the norm behind it; the peer is the library's product and our norm."""
    config, hidden = shapes.config, shapes.config.hidden_size
    width = config.num_attention_heads * config.head_dim
    num_bytes = hidden * width * shapes.dtype.itemsize

    def build(count: int) -> list[Work]:
        from sala.backends.torch.kernels import fused, linear

        x, o, norm = shapes.random(rows, hidden), shapes.random(rows, width), shapes.random(hidden)
        rest = (config.residual_scale, norm, config.rms_norm_eps)

        def kernel(weight: Tensor) -> Any:
            return linear.add_partials_rms_norm(x, linear.split_linear(o, weight), *rest)

        def peer(weight: Tensor) -> Any:
            return fused.add_rms_norm(x, F.linear(o, weight), *rest)

        weights = [shapes.random(hidden, width) * width**-0.5 for _ in range(count)]
        return [Work(partial(kernel, weight), partial(peer, weight)) for weight in weights]

    return KernelCase(
        "output projection and norm",
        row_count(rows),
        build,
        2 * rows * hidden * width,
        num_bytes,
        "F.linear",
        shapes.num_sets(num_bytes),
    )


def _mlp(shapes: Shapes, rows: int) -> KernelCase:
    config, hidden, wide = shapes.config, shapes.config.hidden_size, shapes.config.intermediate_size
    num_bytes = 3 * hidden * wide * shapes.dtype.itemsize

    def build(count: int) -> list[Work]:
        from sala.backends.torch.kernels import fused, linear

        x, normed, norm = shapes.random(rows, hidden), shapes.random(rows, hidden), shapes.random(hidden)
        rest = (config.residual_scale, norm, config.rms_norm_eps)

        def kernel(gate_up: Tensor, down: Tensor) -> Any:
            partials = linear.split_linear(linear.linear_silu_mul(normed, gate_up), down)
            return linear.add_partials_rms_norm(x, partials, *rest)

        def peer(gate_up: Tensor, down: Tensor) -> Any:
            return fused.add_rms_norm(x, F.linear(fused.silu_mul(F.linear(normed, gate_up)), down), *rest)

        sets = [
            (shapes.random(2 * wide, hidden) * hidden**-0.5, shapes.random(hidden, wide) * wide**-0.5)
            for _ in range(count)
        ]
        return [Work(partial(kernel, *one), partial(peer, *one)) for one in sets]

    flops, sets = 6 * rows * hidden * wide, shapes.num_sets(num_bytes)
    return KernelCase("MLP and norm", row_count(rows), build, flops, num_bytes, "F.linear", sets)


def random_affine(bits: int, num_out: int, num_in: int, group_size: int, device: torch.device) -> AffineWeight:
    """A quantized matrix whose numbers are about 1 / sqrt(num_in)."""
    codes = torch.randint(-(1 << 31), 1 << 31, (num_out, num_in * bits // 32)).int()
    scales = torch.rand(num_out, num_in // group_size) * num_in**-0.5 * 4 / (1 << bits)
    biases = -scales * (1 << bits) * torch.rand(scales.shape)
    return AffineWeight(codes.to(device), scales.to(device), biases.to(device), bits, group_size)


def _packed(shapes: Shapes, bits: int) -> KernelCase:
    """A matrix of codes times decode rows and prefill rows, and one of its rows expanded."""

    def build(_: int) -> list[Work]:
        from sala.backends.torch.kernels import fused, linear, packed

        hidden, wide = -(-shapes.config.hidden_size // 32) * 32, 2 * shapes.config.intermediate_size
        weight = random_affine(bits, wide, hidden, 32, shapes.device)
        held, x = weight.for_gpu(shapes.dtype, shapes.device), shapes.random(linear.MAX_ROWS + 1, hidden)
        index, decode = torch.tensor([3], device=shapes.device), x[:ROWS]

        def kernel() -> list[Tensor]:
            products = [packed.linear(decode, held), packed.split_linear(decode, held).sum(0)]
            products += [packed.linear_silu_mul(decode, held), packed.product(x, held)]
            return [*products, packed.expand(held, index)]

        def twin() -> list[Tensor]:
            wanted = F.linear(x.float(), weight.rows(slice(None)))
            decode = wanted[:ROWS]
            return [decode, decode, fused.silu_mul(decode), wanted, weight.rows(slice(3, 4))]

        return [Work(kernel, twin)]

    return KernelCase(f"packed products, {bits} bits", row_count(ROWS), build)


def _fp8(shapes: Shapes) -> KernelCase:
    """Against the same rounded numbers in fp32; nothing is compared where the device has no FP8 tensor cores."""

    def build(_: int) -> list[Work]:
        from sala.backends.torch.kernels import fp8, fused

        if shapes.device.type == "cuda" and not fp8.can_run(shapes.device):
            one = torch.ones(1)
            return [Work(lambda: one, lambda: one)]
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

        return [Work(kernel, twin)]

    return KernelCase("FP8 rows and product", "40 rows", build, measure=_rounded_error)


def _rounded_error(found: Tensor, wanted: Tensor) -> float:
    """The distance of all numbers together: single codes may round the other way."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# passes over prefill rows; the peer is a copy of as many bytes


def _pass(
    shapes: Shapes, name: str, num_bytes: int, build: Callable[[], tuple[Call, Call]], size: str | None = None
) -> KernelCase:
    def work(_: int) -> list[Work]:
        kernel, twin = build()
        return [Work(kernel, twin, copying(num_bytes, shapes.device) if num_bytes else None)]

    return KernelCase(name, size or row_count(shapes.num_rows), work, 0, num_bytes, "copy")


def _norm(shapes: Shapes) -> KernelCase:
    def build() -> tuple[Call, Call]:
        from sala.backends.torch.kernels import fused

        x, weight = shapes.random(ROWS, shapes.config.hidden_size), shapes.random(shapes.config.hidden_size)
        case = (x, weight, shapes.config.rms_norm_eps)
        return partial(fused.rms_norm, *case), partial(rms_norm, *case)

    return _pass(shapes, "norm", 0, build, row_count(ROWS))


def _add_norm(shapes: Shapes) -> KernelCase:
    rows, width = shapes.num_rows, shapes.config.hidden_size

    def build() -> tuple[Call, Call]:
        from sala.backends.torch.kernels import fused

        x, delta, weight = shapes.random(rows, width), shapes.random(rows, width), shapes.random(width)
        scale, eps = shapes.config.residual_scale, shapes.config.rms_norm_eps

        def twin() -> tuple[Tensor, Tensor]:
            total = x + delta * scale
            return total, rms_norm(total, weight, eps)

        return partial(fused.add_rms_norm, x, delta, scale, weight, eps), twin

    return _pass(shapes, "add and norm", (4 * rows + 1) * width * shapes.dtype.itemsize, build)


def _norm_rope(shapes: Shapes) -> KernelCase:
    """Queries and keys of a lightning layer."""
    config, rows = shapes.config, shapes.num_rows
    heads, dim = config.lightning_nh, config.lightning_head_dim

    def build() -> tuple[Call, Call]:
        from sala.backends.torch.kernels import fused

        q, k, _ = shapes.lightning(rows)
        angles = rope_angles(shapes.arange(rows), dim, config.rope_theta)
        weights, eps = (shapes.random(dim), shapes.random(dim)), config.rms_norm_eps

        def twin() -> list[Tensor]:
            return [apply_rope(rms_norm(x, w, eps), *angles) for x, w in zip((q, k), weights, strict=True)]

        return partial(fused.qk_norm_rope, q, k, *weights, eps, *angles, None), twin

    num_bytes = (4 * rows * heads + 2) * dim * shapes.dtype.itemsize + 2 * rows * dim * torch.float32.itemsize
    return _pass(shapes, "norm and rope of q, k", num_bytes, build)


def _norm_gate(shapes: Shapes) -> KernelCase:
    """The output of a lightning layer."""
    rows, width = shapes.num_rows, shapes.config.lightning_nh * shapes.config.lightning_head_dim

    def build() -> tuple[Call, Call]:
        from sala.backends.torch.kernels import fused

        o, weight, gate = shapes.random(rows, width), shapes.random(width), shapes.random(rows, width)
        eps = shapes.config.rms_norm_eps
        twin = partial(lambda: rms_norm(o, weight, eps) * torch.sigmoid(gate))
        return partial(fused.norm_gate, o, weight, gate, eps), twin

    return _pass(shapes, "norm and gate", (3 * rows + 1) * width * shapes.dtype.itemsize, build)


def _silu_mul(shapes: Shapes) -> KernelCase:
    rows, width = shapes.num_rows, shapes.config.intermediate_size

    def build() -> tuple[Call, Call]:
        from sala.backends.torch.kernels import fused

        x = shapes.random(rows, 2 * width)
        gate, up = x.chunk(2, 1)
        return partial(fused.silu_mul, x), lambda: F.silu(gate) * up

    return _pass(shapes, "silu and product", 3 * rows * width * shapes.dtype.itemsize, build)
