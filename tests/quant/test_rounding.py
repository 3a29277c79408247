"""Rounding on small cases whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sala.backends.torch.batch import whole
from sala.backends.torch.model import Layer
from sala.checkpoint.packing import Packed, dequantize, quantize
from sala.checkpoint.random import TINY
from sala.errors import CheckpointError
from sala.lab.quantize.awq import fold_scales, summarise_site
from sala.lab.quantize.gptq import BLOCK, InputStatistics, inverse_factor, order_columns, round_columns, sum_hessian
from sala.lab.quantize.layers import Chunks, Site, sites_of, walk, weight_of
from sala.lab.quantize.ranges import expand, fit_range, round_matrix, round_within_ranges
from sala.quantization_config import Groups

FOUR = Groups(4, 32)


def same(one: Packed, other: Packed) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("codes", "scales", "biases"))


def correlated(num_rows: int, num_in: int, seed: int = 0) -> Tensor:
    """Inputs that live near a few directions, some of them large: what activations look like."""
    rng = torch.Generator().manual_seed(seed)
    few = torch.randn(num_rows, num_in // 8, generator=rng) @ torch.randn(num_in // 8, num_in, generator=rng)
    sizes = torch.rand(num_in, generator=rng).exp() * torch.where(torch.rand(num_in, generator=rng) > 0.95, 8, 1)
    return (few + 0.3 * torch.randn(num_rows, num_in, generator=rng)) * sizes


def output_error(weight: Tensor, packed: Packed, x: Tensor) -> float:
    return float(((weight - expand(packed)) @ x.T).square().sum())


def inputs_of(hessian: Tensor, is_ordered: bool) -> InputStatistics:
    """Those of a site in groups of 32, or with the columns in their own order."""
    if is_ordered:
        return InputStatistics.of(hessian, 32)
    return InputStatistics(torch.arange(len(hessian)), inverse_factor(hessian.clone()))


def keep_ranges_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges by the rule of the layout, which never clips."""

    def find(weight: Tensor, importance: Tensor, bits: int, dtype: str) -> tuple[Tensor, Tensor]:
        return fit_range(weight.amin(-1), weight.amax(-1), bits, dtype)

    monkeypatch.setattr("sala.lab.quantize.gptq.search_range", find)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_rtn_is_the_rule_of_the_layout(bits: int, dtype: str) -> None:
    weight = torch.randn(7, 192)
    assert same(round_matrix(weight, Groups(bits, 64), dtype), quantize(weight.numpy(), bits, 64, dtype))


def test_rtn_in_pieces_is_rtn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 128)
    at_once = round_matrix(weight, FOUR, "F16")
    monkeypatch.setattr("sala.lab.quantize.ranges._PIECE", 7 * 128)
    assert same(round_matrix(weight, FOUR, "F16"), at_once)


@pytest.mark.parametrize("num_in", [32, 192, 2 * BLOCK + 64])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_with_identity_is_rtn(num_in: int, is_ordered: bool, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(9, num_in)
    weight[0] = 0
    keep_ranges_whole(monkeypatch)
    packed = round_columns(weight, inputs_of(torch.eye(num_in), is_ordered), Groups(bits, 32), "F32")
    assert same(packed, round_matrix(weight, Groups(bits, 32), "F32"))


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_gptq_errs_less_than_rtn_where_inputs_are_correlated(
    is_ordered: bool, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(48, 256), correlated(1024, 256)
    if not is_cut:
        keep_ranges_whole(monkeypatch)
    packed = round_columns(weight, inputs_of(sum_hessian(iter([x])), is_ordered), FOUR, "F16")
    fresh = correlated(1024, 256)[512:]
    assert output_error(weight, packed, fresh) < 0.4 * output_error(weight, round_matrix(weight, FOUR, "F16"), fresh)


def test_gptq_takes_dead_and_identical_inputs() -> None:
    x = correlated(64, 96)  # fewer rows than would make it regular, and some inputs that are always zero or equal
    x[:, 40:50] = 0
    x[:, 51] = x[:, 50]
    weight = torch.randn(5, 96)
    packed = round_columns(weight, InputStatistics.of(sum_hessian(iter([x])), 32), FOUR, "F16")
    assert np.isfinite(dequantize(packed)).all()
    assert output_error(weight, packed, x) <= output_error(weight, round_matrix(weight, FOUR, "F16"), x)


def test_gptq_refuses_activations_that_are_no_numbers() -> None:
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        inverse_factor(torch.full((32, 32), torch.nan), 0.01)


def test_an_order_keeps_groups_whole() -> None:
    order = order_columns(torch.rand(256), 64)
    assert sorted(order.tolist()) == list(range(256))
    assert all(len(set((order[at : at + 64] // 64).tolist())) == 1 for at in range(0, 256, 64))


def test_a_sum_of_pieces() -> None:
    x = torch.randn(100, 16)
    torch.testing.assert_close(sum_hessian(iter(x.split(33))), x.T @ x / 100)
    seen = summarise_site(iter(x.split(33)), 100)
    torch.testing.assert_close(seen.mean, x.abs().mean(0))
    torch.testing.assert_close(seen.square, x.square().mean(0))
    assert torch.equal(seen.rows, x)


def test_kept_rows_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sala.lab.quantize.awq.MAX_ROWS", 10)
    rows = summarise_site(iter(torch.arange(100.0)[:, None].split(7)), 100).rows
    assert rows.flatten().tolist() == list(range(0, 100, 10))


def test_cutting_the_range_errs_less() -> None:
    weight = torch.randn(64, 128)
    weight[:, ::32] *= 4  # an outlier in each group, at inputs that hardly matter
    importance = torch.ones(128)
    importance[::32] = 0.01
    errors = [
        float(((expand(packed) - weight).square() * importance).sum())
        for packed in (round_matrix(weight, FOUR, "F16"), round_within_ranges(weight, importance, FOUR, "F16"))
    ]
    assert errors[1] < 0.9 * errors[0]


def make_layer(mixer: str, has_norm: bool = True, bias: bool = False, seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    config = replace(TINY, use_output_norm=has_norm, lightning_nkv=4, attention_bias=bias)
    layer = Layer(config, mixer)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(False)
        spread = 0.2 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        parameter.normal_(0, spread).add_(1 if name.endswith("norm.weight") else 0)
    return layer.eval()


def look_at(layer: Layer, x: Tensor) -> dict[str, object]:
    seen = {}

    def visit(site: Site, chunks: Chunks) -> None:
        seen[site.name] = summarise_site(chunks, x.shape[0] * x.shape[1])

    walk(layer, x.clone(), visit)
    return seen


CASES = [("lightning", True, False), ("lightning", False, False), ("sparse", True, False), ("sparse", True, True)]


@pytest.mark.parametrize(("mixer", "has_norm", "bias"), CASES)
@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_folding_changes_no_output(mixer: str, has_norm: bool, bias: bool, stored: str) -> None:
    layer = make_layer(mixer, has_norm, bias)
    norms = [name for name, value in layer.named_parameters() if value.dim() == 1 and name.endswith("norm.weight")]
    if stored == "BF16":
        for name in norms:
            layer.get_parameter(name).copy_(layer.get_parameter(name).bfloat16())
    x = correlated(60, TINY.hidden_size).view(2, 30, -1)
    batch = whole(torch.zeros(2, 30, dtype=torch.long))
    before = layer(x.flatten(0, 1), batch)
    old = {name: value.clone() for name, value in layer.named_parameters()}
    plan = {name: FOUR for site in sites_of(layer) for name in site.consumers}
    seen = look_at(layer, x)
    after = fold_scales(layer, seen, plan, dict.fromkeys((n.removesuffix(".weight") for n in norms), stored), "F16")
    assert (layer(x.flatten(0, 1), batch) - before).abs().max() <= 1e-5 * before.abs().max()
    changed = {name for name, value in layer.named_parameters() if not torch.equal(value, old[name])}
    folded = "self_attn.o_norm.weight" if mixer == "lightning" and has_norm else "self_attn.v_proj.weight"
    assert {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.down_proj.weight"} <= changed
    assert folded in changed
    assert ("self_attn.o_proj.weight" in changed) == (not bias)  # rows of v cannot be divided where it has a bias
    if stored == "BF16":  # what is stored is what is computed with
        assert all(torch.equal(layer.get_parameter(n), layer.get_parameter(n).bfloat16().float()) for n in norms)
    for name, value in look_at(layer, x).items():
        torch.testing.assert_close(after[name].mean, value.mean, rtol=1e-4, atol=1e-5)


def test_a_site_with_a_whole_matrix_is_left_alone() -> None:
    layer = make_layer("sparse")
    plan = {name: FOUR for site in sites_of(layer) for name in site.consumers}
    plan["mlp.up_proj"] = None
    old = {name: value.clone() for name, value in layer.named_parameters()}
    x = correlated(30, TINY.hidden_size)[None]
    fold_scales(layer, look_at(layer, x), plan, {"input_layernorm": "F32", "post_attention_layernorm": "F32"}, "F16")
    for name in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        assert torch.equal(weight_of(layer, name), old[f"{name}.weight"])
    assert not torch.equal(weight_of(layer, "input_layernorm"), old["input_layernorm.weight"])


def test_awq_errs_less_than_rtn() -> None:
    layer = make_layer("sparse")
    x = correlated(512, TINY.hidden_size).view(4, 128, -1)
    batch = whole(torch.zeros(4, 128, dtype=torch.long))
    wanted = layer(x.flatten(0, 1), batch)
    plan = {name: FOUR for site in sites_of(layer) for name in site.consumers}
    errors = []
    for is_folded in (False, True):
        layer = make_layer("sparse")
        if is_folded:
            dtypes = {"input_layernorm": "F32", "post_attention_layernorm": "F32"}
            fold_scales(layer, look_at(layer, x), plan, dtypes, "F16")
        for name in plan:
            weight_of(layer, name).copy_(expand(round_matrix(weight_of(layer, name), FOUR, "F16")))
        errors.append(float((layer(x.flatten(0, 1), batch) - wanted).square().sum()))
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("mixer", ["sparse", "lightning"])
def test_walking_is_the_layer(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(mixer)
    x = correlated(90, TINY.hidden_size).view(3, 30, -1)
    wanted = layer(x.flatten(0, 1), whole(torch.zeros(3, 30, dtype=torch.long)))
    monkeypatch.setattr("sala.lab.quantize.layers.TOKENS_AT_ONCE", 60)  # two sequences at a time
    walk(layer, x)
    torch.testing.assert_close(x.flatten(0, 1), wanted, rtol=1e-5, atol=1e-5)


def test_what_is_changed_at_a_site_is_seen_after_it() -> None:
    layer, x = make_layer("lightning"), correlated(30, TINY.hidden_size)[None]
    seen = {}

    def visit(site: Site, chunks: Chunks) -> None:
        seen[site.name] = torch.cat(list(chunks))
        for name in site.consumers:
            weight_of(layer, name).zero_()

    walk(layer, x.clone(), visit)
    assert seen["mixer"].abs().max() > 0
    assert seen["output"].abs().max() == 0
    assert seen["down"].abs().max() == 0
    torch.testing.assert_close(seen["mlp"], layer.post_attention_layernorm(x[0]))
