"""Products with packed matrices: against their dequantized weights, alone and in a whole model."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.fast.gpu_weights import Projection
from sala.backends.torch.kernels import fused, linear, packed, packed_weight
from sala.backends.torch.kernels.launch import Config
from sala.backends.torch.linears import AffineEmbedding, AffineLinear, AffineWeight
from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops.affine import dequantize
from sala.checkpoint.packing import quantize
from sala.protocol import Plan, Row, Sampling
from tests.kernels.aot import Build, run
from tests.kernels.test_gpu_forward import MAX_TOKENS, SHAPE, make_model, tokens
from tests.kernels.test_linear import rows

FORMATS = [(bits, group_size) for bits in (4, 8) for group_size in (32, 64, 128)]
N, K = 72, 384  # no whole tiles, no whole blocks of 4 bits
LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # shared memory
CONFIGS = [None, Config({"COLUMNS": 32, "SPLITS": 4}, 4, 2)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN: whatever is not written shows."""
    empty = torch.empty

    def empty_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        found = empty(*args, **kwargs)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", empty_of_nan)


@pytest.fixture(autouse=True)
def brain_floats(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter holds bf16 as integers, which it cuts off and multiplies as they are: here it does not."""
    if device.type == "cuda":
        return
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_well(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.astype(np.uint32) << 16).view(np.float32)
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()
        return convert(data, source, target, mode)

    def dot_well(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(each, tl.float32) for each in (a, b))
        return dot(self, a, b, *others)

    monkeypatch.setattr(interpreter, "_convert_float", convert_well)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_well)


def affine(n: int, k: int, bits: int, group_size: int, dtype: torch.dtype, device: torch.device) -> AffineWeight:
    weight = np.random.default_rng(bits + group_size).standard_normal((n, k)).astype(np.float32) / k**0.5
    found = quantize(weight, bits, group_size)
    words, scales, biases = (torch.from_numpy(x) for x in (found.codes.view(np.int32), found.scales, found.biases))
    return AffineWeight(words.to(device), scales.to(device, dtype), biases.to(device, dtype), bits, group_size)


def dense(weight: AffineWeight) -> Tensor:
    return dequantize(weight.codes, weight.scales, weight.biases, weight.bits, weight.group_size)


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 2e-3) -> None:
    """As far as fp16 rounds the weights, which adds up over K; bf16 has three bits less."""
    tolerance *= 8 if found.dtype == torch.bfloat16 else 1
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
def test_expand(bits: int, group_size: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = affine(N, K, bits, group_size, torch.bfloat16, device)
    held = weight.for_gpu(dtype, device)
    assert (held.num_out, held.num_in) == (N, K)
    found, wanted = packed.expand(held), dense(weight)
    step = weight.scales.float().abs().max()
    rounding = {torch.float32: 2**-20, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(found.float(), wanted, rtol=rounding, atol=float(step) * 2**bits * rounding)
    if held.power:  # nothing but the weight was rounded
        assert torch.equal(found, wanted.to(dtype))
    index = torch.tensor([5, 0, N - 1, 5], device=device)
    assert torch.equal(packed.expand(held, index), found[index])
    assert torch.equal(packed.expand(held.rows(8, 40)), found[8:40])


@pytest.mark.parametrize("bits", [3, 5])
def test_widths_that_no_kernel_reads_are_widened(bits: int, device: torch.device) -> None:
    weight = affine(N, K, bits, 64, torch.float32, device)
    torch.testing.assert_close(
        packed.expand(weight.for_gpu(torch.float32, device)), dense(weight), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
def test_products(bits: int, group_size: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = affine(N, K, bits, group_size, dtype, device)
    held = weight.for_gpu(dtype, device)
    assert bool(held.power) == ((bits, dtype) == (4, torch.bfloat16))
    check_products(held, dense(weight))


def check_products(held: packed_weight.PackedWeight, weight: Tensor) -> None:
    dtype, device = held.dtype, weight.device
    x = rows(3, K, dtype, device)
    wanted = F.linear(x.float(), weight)
    for config in CONFIGS:
        partials = linear.split_linear(x, held, config)
        assert partials.dtype == torch.float32
        assert_near(partials.sum(0).to(dtype), wanted)
        if config is not None:
            assert partials.shape[0] == config.tile["SPLITS"]
        if config is None or config.tile["SPLITS"] == 1:
            found = linear.linear(x, held, config)
            assert found.dtype == dtype
            assert_near(found, wanted)
            pair = linear.linear_silu_mul(x, held, config)
            assert torch.equal(pair, fused.silu_mul(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_few_rows_and_many_see_the_same_weights(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    held = affine(N, K, bits, 64, torch.float32, device).for_gpu(dtype, device)
    found = [linear.linear(some, held) for some in torch.eye(K, dtype=dtype, device=device).split(linear.MAX_ROWS)]
    assert torch.equal(torch.cat(found), packed.expand(held).T)


def test_rounded_scales(device: torch.device) -> None:
    """So are offsets: all by 2^-8, as the weight itself; a scale counts for the half of the codes around the middle."""
    weight = affine(N, K, 4, 64, torch.float32, device)
    found, exact = packed.expand(weight.for_gpu(torch.bfloat16, device)).float(), dense(weight)
    parts = (weight.biases.abs() + 8 * weight.scales.abs()).repeat_interleave(64, 1)
    assert ((found - exact).abs() <= (exact.abs() + parts) * 1.01 * 2**-8).all()


@pytest.mark.parametrize("group_size", [64, 128])
def test_scales_too_large_to_be_made_larger(group_size: int, device: torch.device) -> None:
    """Their codes count from the middle, as in fp16, and they are no part of another matrix."""
    weight = affine(N, K, 4, group_size, torch.bfloat16, device)
    x, held = rows(3, K, torch.bfloat16, device), []
    for top in (packed_weight.LARGEST * (1 - 2**-8), packed_weight.LARGEST):
        scales, biases = weight.scales.clone(), weight.biases.clone()
        scales[1, 0], biases[1, 0] = top, -8 * top
        scales[5, 1], biases[5, 1] = -top, 8 * top
        one = replace(weight, scales=scales, biases=biases)
        held.append(one.for_gpu(torch.bfloat16, device))
        wanted = dense(one)
        torch.testing.assert_close(packed.expand(held[-1]).float(), wanted, rtol=2**-8, atol=2**-8)
        found, terms = linear.linear(x, held[-1]).float(), F.linear(x.float().abs(), wanted.abs())
        assert ((found - F.linear(x.float(), wanted)).abs() <= 2**-7 * terms).all()  # the large ones may cancel
    assert [one.power for one in held] == [packed_weight.POWER, 0]
    assert not packed_weight.are_alike(held)
    scales = scales.float() * (1 - 2**-20)  # bf16 knows nothing between the two
    assert replace(weight, scales=scales).for_gpu(torch.bfloat16, device).power == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_in_fp32(bits: int, device: torch.device) -> None:
    weight = affine(N, K, bits, 64, torch.float32, device)
    held, x = weight.for_gpu(torch.float32, device), rows(3, K, torch.float32, device)
    wanted = F.linear(x, dense(weight))
    assert_near(linear.linear(x, held), wanted, 1e-5)
    assert_near(linear.split_linear(x, held).sum(0), wanted, 1e-5)
    assert_near(linear.linear_silu_mul(x, held), fused.silu_mul(wanted), 1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the other rows are large, or no numbers
@pytest.mark.parametrize(("count", "bits"), [(33, 4), (66, 8)])
def test_rows_do_not_see_each_other(count: int, bits: int, device: torch.device) -> None:
    held = affine(N, K, bits, 64, torch.float32, device).for_gpu(torch.float16, device)
    x, others = rows(count, K, torch.float16, device), rows(count, K, torch.float16, device) * 100
    others[0], others[7] = x[0], float("nan")
    for call in (linear.linear, linear.linear_silu_mul, lambda *args: linear.split_linear(*args).transpose(0, 1)):
        together = call(x, held)
        assert torch.equal(call(others, held)[0], together[0])
        assert torch.equal(call(x[1:], held), together[1:])
        if device.type == "cuda":  # numpy sums up in an order that depends on the height of a tile, tensor cores do not
            assert torch.equal(call(x[:1], held), together[:1])
            assert torch.equal(call(x[count - 2 :], held), together[count - 2 :])
        assert_near(call(x[:1], held), together[:1])


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows(bits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = affine(N, K, bits, 64, torch.float32, device)
    x = rows(linear.MAX_ROWS + 1, K, torch.float16, device)
    whole = linear.product(x, weight.for_gpu(torch.float16, device))
    assert_near(whole, F.linear(x.float(), dense(weight)), 4e-3)
    monkeypatch.setattr(packed, "MAX_EXPANDED", 30 * K)
    assert_near(linear.product(x, weight.for_gpu(torch.float16, device)), whole)


def test_rows_of_any_layout(device: torch.device) -> None:
    held = affine(N, K, 4, 64, torch.float32, device).for_gpu(torch.float16, device)
    odd = rows(3, K, torch.float16, device, 3)
    assert torch.equal(linear.linear(odd, held), linear.linear(odd.contiguous(), held))
    assert linear.linear(odd[:0], held).shape == (0, N)
    assert packed.expand(held, torch.zeros(0, dtype=torch.long, device=device)).shape == (0, K)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [96, K])
def test_groups_that_are_no_part_of_a_block(bits: int, group_size: int, device: torch.device) -> None:
    weight = affine(N, K, bits, 32, torch.bfloat16, device)
    every = group_size // 32
    weight = replace(
        weight,
        scales=weight.scales[:, ::every].clone(),
        biases=weight.biases[:, ::every].clone(),
        group_size=group_size,
    )
    check_products(weight.for_gpu(torch.bfloat16, device), dense(weight))


def test_several_matrices_side_by_side(device: torch.device) -> None:
    """Also of other bits and groups, and where a row has no whole 16 bytes."""
    x = rows(5, K, torch.float16, device)
    shapes = [(40, 4, 64), (24, 8, 32), (9, 4, 32)]
    held = [affine(n, K, bits, size, torch.float16, device).for_gpu(torch.float16, device) for n, bits, size in shapes]
    assert torch.equal(linear.linears(x, held), torch.cat([linear.linear(x, each) for each in held], 1))
    wide = [affine(n, K, bits, size, torch.float32, device).for_gpu(torch.float32, device) for n, bits, size in shapes]
    x = x.float()
    assert torch.equal(linear.linears(x, wide), torch.cat([linear.linear(x, each) for each in wide], 1))


FORMAT_LISTS = [
    [(64, 4, 64), (40, 8, 64), (64, 4, 64)],  # q and k, v, z
    [(24, 8, 32), (9, 4, 64), (70, 8, 32), (3, 4, 64), (1, 8, 32)],
    [(40, 4, 64), (72, 4, 32)],
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("formats", FORMAT_LISTS)
def test_two_formats_are_one_launch(
    formats: list[tuple[int, int, int]], dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of separate launches; also for some of the outputs, and for rows that do not fill a tile."""
    linears = [AffineLinear(affine(n, K, bits, size, dtype, device)) for n, bits, size in formats]
    both = Projection.of(linears, dtype, device)
    assert [part.num_out for part in both.parts] == [n for n, _, _ in formats]
    for count in (1, 5, 70):
        x = rows(count, K, dtype, device)
        wanted = torch.cat([linear.linear(x, one.gpu) for one in linears], 1)
        with monkeypatch.context() as patch:
            patch.delattr(packed, "launch")
            assert torch.equal(both(x), wanted)
            assert torch.equal(both.rows(30, 75)(x), wanted[:, 30:75])


def test_formats_that_need_separate_launches(device: torch.device) -> None:
    """Three formats, matrices that lie apart, fp32."""
    for dtype in (torch.float16, torch.float32):
        x = rows(3, K, dtype, device)
        one, two, three, four = (
            affine(8, K, bits, size, dtype, device).for_gpu(dtype, device)
            for bits, size in ((4, 64), (8, 64), (8, 32), (4, 64))
        )
        for held in ([one, two, three], [one, two, four], [one, two]):
            assert (len(packed.interleave(held)) == 2) == (len(held) == 2)
            assert torch.equal(linear.linears(x, held), torch.cat([linear.linear(x, each) for each in held], 1))
        assert linear.linears(x[:0], [one, two]).shape == (0, 16)


def test_adjoin_takes_neighbours_in_order(device: torch.device) -> None:
    whole = affine(N, K, 4, 64, torch.float16, device).for_gpu(torch.float16, device)
    first, second, third = whole.rows(0, 8), whole.rows(8, 40), whole.rows(40, N)
    for held, begin in (([first, second, third], 0), ([second, third], 8)):
        found = packed_weight.adjoin(held)
        assert torch.equal(packed.expand(found), packed.expand(whole)[begin:])
        assert found.codes.data_ptr() == held[0].codes.data_ptr()
    assert packed_weight.adjoin([second, first]) is None
    assert packed_weight.adjoin([first, third]) is None
    assert packed_weight.adjoin([first, replace(second, power=1)]) is None


def test_one_matrix_of_several(device: torch.device) -> None:
    """Those of one kind are fused and share their memory; others stay apart."""
    kinds = [(4, 64), (4, 64), (8, 64), None, None]
    linears: list[Any] = []
    for index, kind in enumerate(kinds):
        weight = affine(32, K, *(kind or (8, 32)), torch.float32, device)
        bias = torch.randn(32, device=device) if index % 2 else None
        linears.append(AffineLinear(weight, bias) if kind else torch.nn.Linear(K, 32, device=device))
    x = rows(3, K, torch.float32, device)
    wanted = torch.cat([one.requires_grad_(False)(x) for one in linears], 1)
    both = Projection.of(linears, torch.float32, device)
    assert len(both.parts) == 3
    assert linears[1].gpu.codes.untyped_storage().data_ptr() == both.parts[0].codes.untyped_storage().data_ptr()
    assert_near(both(x), wanted, 1e-5)
    for begin, end in ((0, 160), (16, 48), (40, 130)):
        assert_near(both.rows(begin, end)(x), wanted[:, begin:end], 1e-5)


def quantized(model: SalaModel, bits: Callable[[str], int]) -> SalaModel:
    """The model with packed matrices; in the given one, the same are dequantized."""
    twin = make_model(model.config)
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or name == "lm_head":
            continue
        found = quantize(module.weight.numpy(), bits(name), 32)
        words, scales, biases = (torch.from_numpy(x) for x in (found.codes.view(np.int32), found.scales, found.biases))
        weight = AffineWeight(words, scales, biases, bits(name), 32)
        module.weight.copy_(dense(weight))
        if isinstance(module, torch.nn.Embedding):
            twin.model.embed_tokens = AffineEmbedding(weight, torch.float32)
            twin.lm_head = AffineLinear(weight)
        else:
            twin.set_submodule(name, AffineLinear(weight, getattr(twin.get_submodule(name), "bias", None)))
    return twin


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_packed_model(device: torch.device) -> None:
    """A prompt, then two rows together: hidden states and logits of the dequantized weights."""
    config = replace(SHAPE, tie_word_embeddings=True, attention_bias=True, num_hidden_layers=2)
    config = replace(config, mixer_types=config.mixer_types[:2])
    model = make_model(config)
    twin = quantized(model, lambda name: 8 if "k_proj" in name or "embed" in name else 4)
    steps = GpuForward(twin.to(device), device, MAX_TOKENS, has_graphs=device.type == "cuda")
    assert twin.model.embed_tokens.gpu is twin.lm_head.gpu
    caches = [HybridCache(config, 20, 4, torch.float32, device) for _ in range(2)]
    model = model.to(device)
    for plan in (
        Plan((Row(tokens(1, 18), 0, (7, 3), 0, 1 << 20, Sampling(temperature=0)),)),
        Plan(tuple(Row(tokens(2 + i, 1), 18 * (1 - i), ((7, 3), (5,))[i], i, 1 << 20) for i in range(2))),
    ):
        found = steps(pack(plan, device), caches[0])
        wanted = model(pack(plan, device), caches[1])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(steps.logits(found), model.logits(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", LIMITS.values())
def test_splits_are_of_the_shape_alone(limit: int) -> None:
    for n, k in ((4096, 4096), (4096, 16384), (576, 1536)):
        found = {packed._config(n, k, bits, limit, count).tile["SPLITS"] for bits in (4, 8) for count in (1, 32, 128)}
        assert len(found) == 1
    assert packed._config(64, 64, 4, limit, 1).tile["SPLITS"] == 1


def test_one_build_serves_all_numbers_of_rows_that_fit_a_tile() -> None:
    limit = LIMITS[90]
    for low, high in ((1, 16), (17, 32), (33, 64), (65, 128)):
        builds = []
        for count in range(low, high + 1):
            config = packed._config(4096, 4096, 4, limit, count)
            builds.append((packed.packed_constants(count, 4096, 4096, 4, config), config))
        assert all(build == builds[0] for build in builds)


def build(capability: int, n: int, k: int, bits: int, group_size: int, count: int, is_pair: bool = False) -> Build:
    config = packed._config(n, k, bits, LIMITS[capability], count, 1 if is_pair else packed.MAX_SPLITS)
    if capability >= 90:
        config = config._replace(uses_pdl=True)
    constants = packed.packed_constants(count, n, k, bits, config, is_pair)
    constants |= {"BITS": bits, "GROUPS": packed_weight.block_size(bits) // group_size}
    constants |= {"PITCH": 2 * n, "POWER": packed_weight.POWER if bits == 4 else 0, "HAS_ASM": True}
    pointers = {"x_ptr": "*bf16", "codes_ptr": "*i32", "groups_ptr": "*i32", "x_row": "i32", "out_row": "i32"}
    pointers["num_rows"] = "i32"
    pointers["out_ptr"] = "*bf16" if is_pair else "*fp32"
    signature = {name: pointers.get(name, "constexpr") for name in packed._packed_kernel.arg_names}
    return Build(packed._packed_kernel, signature, constants, config.options)


def mixed_build(capability: int, parts: list[tuple[int, int]], count: int) -> Build:
    """One launch for parts of so many outputs and bits, such as [q, k | v | z] of the default 4-bit file."""
    held = {}
    for bits in (4, 8):
        size = sum(n for n, own in parts if own == bits)
        codes, groups = (
            torch.empty(4096 * bits // 1024, size, width, dtype=torch.int32, device="meta")
            for width in (32, packed_weight.block_size(bits) // 64)
        )
        power = packed_weight.POWER if bits == 4 else 0
        held[bits] = packed_weight.PackedWeight(codes, groups, bits, 64, 4096, torch.bfloat16, power)
    first = dict.fromkeys(held, 0)
    weights = []
    for n, bits in parts:
        weights.append(held[bits].rows(first[bits], first[bits] + n))
        first[bits] += n
    config = packed._mixed_config(sum(n for n, _ in parts), 4, LIMITS[capability], count)
    config = config._replace(uses_pdl=capability >= 90)
    constants = packed.mixed_constants(count, packed.interleave(weights), config) | {"HAS_ASM": True}
    pointers = dict.fromkeys(("codes_ptr", "groups_ptr", "codes2_ptr", "groups2_ptr"), "*i32")
    pointers |= {"x_ptr": "*bf16", "out_ptr": "*bf16", "x_row": "i32", "out_row": "i32", "num_rows": "i32"}
    signature = {name: pointers.get(name, "constexpr") for name in packed._mixed_kernel.arg_names}
    return Build(packed._mixed_kernel, signature, constants, config.options)


def builds_for(capability: int) -> list[Build]:
    constants = {"K": 4096, "PITCH": 4096, "COLUMNS": 32, "BITS": 4, "GROUPS": 4}
    constants |= {"POWER": packed_weight.POWER, "HAS_INDEX": False, "HAS_ASM": True}
    pointers = {"codes_ptr": "*i32", "groups_ptr": "*i32", "index_ptr": "*i64", "out_ptr": "*bf16", "num_rows": "i32"}
    signature = {name: pointers.get(name, "constexpr") for name in packed._expand_kernel.arg_names}
    return [
        build(capability, 4096, 16384, 4, 64, 1),
        build(capability, 576, 1536, 8, 32, 64),
        build(capability, 16384, 4096, 4, 64, 64, is_pair=True),
        mixed_build(capability, [(8192, 4), (4096, 8), (4096, 4)], 1),
        mixed_build(capability, [(4352, 4), (256, 8), (4096, 4)], 8),
        mixed_build(capability, [(4352, 4), (256, 8), (4096, 4)], 128),
        Build(packed._expand_kernel, signature, constants, {"num_warps": 4}),
    ]


builds_80, builds_86, builds_89, builds_90, builds_100, builds_120 = (partial(builds_for, each) for each in LIMITS)


@pytest.mark.parametrize("capability", LIMITS)
def test_compiles(capability: int) -> None:
    done = run(capability, f"{__name__}:builds_{capability}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["shared"] <= LIMITS[capability], kernel
    if capability == 90:
        assert all(kernel["has_wgmma"] for kernel in found[:-1]), found
