"""Values and gradients of every op that training goes through, in fp64, against definitions written down plainly."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.fast import training
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.ops import dense, lightning, sparse
from sala.backends.torch.ops.dense import apply_rope, grow_queries, rms_norm, rope_angles
from sala.checkpoint.packing import dequantize, quantize
from sala.config import SparseConfig
from sala.lab.train import losses
from sala.lab.train.adapters import LowRank, RoundedLinear, round_to_codes
from sala.lab.train.losses import LossWeights, head_loss

HEADS, DIM = 3, 6
SMALL = SparseConfig(kernel_size=4, kernel_stride=2, block_size=8, window_size=8, topk=2, dense_len=1, init_blocks=1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(True)


def same(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor], atol: float = 1e-10
) -> None:
    """Outputs and the gradients of a random weighting of them."""
    got, want = ours(*inputs), theirs(*inputs)
    torch.testing.assert_close(got, want, atol=atol, rtol=1e-9)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    for mine, right in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((want * weight).sum(), inputs),
        strict=True,
    ):
        assert right.abs().max() > 0
        torch.testing.assert_close(mine, right, atol=atol, rtol=1e-9)


def recurrence(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], slopes: Tensor, scale: float) -> Tensor:
    """S_t = exp(-s) S_{t-1} + k_t^T v_t, o_t = scale q_t S_t, token by token."""
    decay = torch.exp(-slopes.double())[:, None, None]
    outputs = []
    for row in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        state = torch.zeros(q.shape[1], q.shape[2], q.shape[2], dtype=q.dtype)
        for q_t, k_t, v_t in zip(*row, strict=True):
            state = decay * state + k_t[:, :, None] * v_t[:, None, :]
            outputs.append(scale * (q_t[:, None, :] @ state)[:, 0])
    return torch.stack(outputs)


LENGTHS = [[1], [63], [65], [130], [4097], [65, 65, 65], [1, 1], [5, 64, 1, 90, 63], [64, 63, 130, 1], [4090, 3, 100]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lightning_is_its_recurrence(lengths: list[int]) -> None:
    slopes = lightning.decay_slopes(HEADS)
    inputs = [draw(sum(lengths), HEADS, DIM, seed=i) for i in range(3)]
    same(
        lambda q, k, v: lightning.lightning_whole(q, k, v, lengths, slopes, 0.4),
        lambda q, k, v: recurrence(q, k, v, lengths, slopes, 0.4),
        inputs,
        atol=1e-9,
    )


def test_lightning_is_the_step_of_inference() -> None:
    slopes = lightning.decay_slopes(HEADS)
    q, k, v = (draw(130, HEADS, DIM, seed=i).detach().float() for i in range(3))
    state = torch.zeros(1, HEADS, DIM, DIM)
    steps = []
    for t in range(130):
        output, state = lightning.lightning_step(q[t : t + 1], k[t : t + 1], v[t : t + 1], state, slopes, 0.4)
        steps.append(output)
    got = lightning.lightning_whole(q, k, v, [130], slopes, 0.4)
    torch.testing.assert_close(got, torch.cat(steps), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[19], [5, 1, 9, 4], [8, 8], [4, 4, 12]], ids=str)
def test_lightning_in_many_small_chunks(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "CHUNK", 4)
    monkeypatch.setattr(lightning, "CHUNKS_AT_ONCE", 2)
    slopes = lightning.decay_slopes(2)
    inputs = [draw(sum(lengths), 2, 3, seed=i) for i in range(3)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lightning.lightning_whole(q, k, v, lengths, slopes, 0.4)

    same(ours, lambda q, k, v: recurrence(q, k, v, lengths, slopes, 0.4), inputs)
    assert torch.autograd.gradcheck(ours, inputs, fast_mode=True)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [T, H, D], k and v [T, G, D], mask [H, T, T] of what is seen."""
    shared = q.shape[1] // k.shape[1]
    k, v = (torch.stack([x[:, h // shared] for h in range(q.shape[1])], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def causal(lengths: Sequence[int]) -> Tensor:
    return torch.block_diag(*(torch.ones(n, n) for n in lengths)).tril().bool()


@pytest.mark.parametrize("lengths", [[1], [63], [65], [130], [65, 65], [5, 64, 1, 90, 63]], ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (6, 2)])
def test_attention_is_a_softmax(lengths: list[int], heads: int, groups: int) -> None:
    total = sum(lengths)
    inputs = [draw(total, heads, DIM), draw(total, groups, DIM, seed=1), draw(total, groups, DIM, seed=2)]
    mask = causal(lengths).expand(heads, -1, -1)
    if total == 1:
        inputs[:2] = [x.detach() for x in inputs[:2]]  # one token: softmax of one score, no gradient but the value's
        got = dense.whole_attention(*inputs, lengths, 0.3)
        torch.testing.assert_close(got, softmax_attention(*inputs, mask, 0.3))
        return
    same(
        lambda q, k, v: dense.whole_attention(q, k, v, lengths, 0.3),
        lambda q, k, v: softmax_attention(q, k, v, mask, 0.3),
        inputs,
    )


def chosen_mask(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[H, T, T], from the same choice of blocks."""
    keys = k.detach().transpose(0, 1)
    k1 = sparse.pool_keys(keys, SMALL.kernel_size, SMALL.kernel_stride)
    k2 = sparse.pool_keys(keys, 4 * SMALL.kernel_size, 4 * SMALL.kernel_stride)
    num_blocks = -(-len(q) // SMALL.block_size)
    chosen = sparse.select_blocks(q.detach(), k1, k2, torch.arange(len(q)), num_blocks, SMALL, scale)
    mask = torch.zeros(q.shape[1], len(q), len(q), dtype=torch.bool)
    shared = q.shape[1] // k.shape[1]
    for row, of_groups in enumerate(chosen.tolist()):
        for head in range(q.shape[1]):
            for block in of_groups[head // shared]:
                if block >= 0:
                    mask[head, row, block * SMALL.block_size : min(row + 1, (block + 1) * SMALL.block_size)] = True
    return mask


@pytest.mark.parametrize("length", [2, 63, 65, 130])
@pytest.mark.parametrize("tile_bytes", [1 << 13, 8 << 20])
def test_sparse_attention_is_masked_attention(length: int, tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sparse.TILE_BYTES, "cpu", tile_bytes)
    inputs = [draw(length, 6, DIM), draw(length, 2, DIM, seed=1), draw(length, 2, DIM, seed=2)]
    mask = chosen_mask(inputs[0], inputs[1], 0.3)
    if length == 130:
        assert not mask.all(0).tril().equal(causal([length]))  # something is left out
    same(
        lambda q, k, v: sparse.whole_sparse_attention(q, k, v, SMALL, 0.3),
        lambda q, k, v: softmax_attention(q, k, v, mask, 0.3),
        inputs,
    )


@pytest.mark.parametrize("length", [1, 2, 63, 65, 130])
@pytest.mark.parametrize("mask_bytes", [1, 1 << 13, 1 << 26])
def test_a_mask_is_the_same_as_gathering(length: int, mask_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MASK_BYTES", mask_bytes)
    inputs = [draw(length, 6, DIM), draw(length, 2, DIM, seed=1), draw(length, 2, DIM, seed=2)]
    mask = chosen_mask(inputs[0], inputs[1], 0.3)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return training.masked_attention(q, k, v, SMALL, 0.3, sparse.select_whole)

    if length > 1:
        same(masked, lambda q, k, v: softmax_attention(q, k, v, mask, 0.3), inputs)
    torch.testing.assert_close(masked(*inputs), sparse.whole_sparse_attention(*inputs, SMALL, 0.3))


def test_long_rows_are_gathered_and_shorter_ones_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for module, name in ((training, "masked_attention"), (sparse, "whole_sparse_attention")):
        monkeypatch.setattr(module, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(training, "MASKED", 2)
    limit = 2 * SMALL.num_selected * SMALL.block_size
    for length in (limit, limit + 1):
        select_ops().whole_sparse_attention(draw(length, 6, DIM), draw(length, 2, DIM), draw(length, 2, DIM), SMALL, 1)
    assert called == ["masked_attention", "whole_sparse_attention"]


def test_norm() -> None:
    x, weight = draw(5, 3, DIM), draw(DIM)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (DIM,), weight, 1e-3)

    same(lambda x, weight: rms_norm(x, weight, 1e-3), plain, (x, weight))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))


def test_rope_turns_pairs() -> None:
    positions = torch.tensor([0, 1, 5, 63])
    cos, sin = rope_angles(positions, DIM, 100.0)

    def plain(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :])
        angles = positions[:, None].double() * 100.0 ** (-torch.arange(DIM // 2) * 2 / DIM)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    same(lambda x: apply_rope(x, cos, sin), plain, (draw(4, HEADS, DIM),), atol=1e-4)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos.double(), sin.double()), (draw(4, HEADS, DIM),))


def test_growing_queries() -> None:
    positions = torch.tensor([0, 1, 500])
    factor = torch.log(positions + 64.0) / math.log(64.0)
    same(
        lambda q: grow_queries(q, positions, 64.0),
        lambda q: q * factor[:, None, None].double(),
        (draw(3, HEADS, DIM),),
        atol=1e-6,
    )


ROWS, VOCAB, HIDDEN = 23, 11, 7


def plain_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: LossWeights, teacher: tuple[Tensor, Tensor] | None
) -> Tensor:
    logits = hidden @ head.T
    entropy = F.cross_entropy(logits, labels, reduction="none")
    loss = entropy
    if teacher is not None:
        wanted = (teacher[0] @ teacher[1].T).log_softmax(-1)
        loss = F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
        share = torch.zeros_like(weights.main) if weights.truth is None else weights.truth
        loss = loss * (1 - share) + entropy * share
    return (loss * weights.main).sum() + (entropy * weights.answer).sum()


@pytest.mark.parametrize(("has_teacher", "has_truth"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("learns_head", [False, True])
@pytest.mark.parametrize("tile_rows", [5, 512])
def test_head_loss(
    has_teacher: bool, has_truth: bool, learns_head: bool, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(losses.TILE_ROWS, "cpu", tile_rows)
    hidden, head = draw(ROWS, HIDDEN), draw(VOCAB, HIDDEN).requires_grad_(learns_head)
    rng = torch.Generator().manual_seed(2)
    labels = torch.randint(VOCAB, (ROWS,), generator=rng)
    main = torch.rand(ROWS, generator=rng).double() * (torch.arange(ROWS) % 3 > 0)
    answer = torch.rand(ROWS, generator=rng).double() * (torch.arange(ROWS) % 4 == 0)
    weights = LossWeights(main, answer, torch.rand(ROWS, generator=rng).double() if has_truth else None)
    # a teacher of another width
    teacher = (draw(ROWS, 4, seed=3).detach(), draw(VOCAB, 4, seed=4).detach()) if has_teacher else None
    inputs = (hidden, head) if learns_head else (hidden,)

    def ours(hidden: Tensor, head: Tensor = head) -> Tensor:
        return 3 * head_loss(hidden, head, labels, weights, teacher)[0]

    def plain(hidden: Tensor, head: Tensor = head) -> Tensor:
        return 3 * plain_loss(hidden, head, labels, weights, teacher)

    same(ours, plain, inputs)
    assert torch.autograd.gradcheck(ours, inputs)
    sums = head_loss(hidden, head, labels, weights, teacher)[1]
    seen, told = (main != 0).double(), (answer != 0).double()
    only_main, only_answer = LossWeights(seen, 0 * told), LossWeights(0 * seen, told)
    torch.testing.assert_close(sums[0], plain_loss(hidden, head, labels, only_main, teacher).detach())
    torch.testing.assert_close(sums[1], plain_loss(hidden, head, labels, only_answer, teacher).detach())
    assert not sums.requires_grad


def test_low_rank_learns_its_two_halves_alone() -> None:
    base = nn.Linear(5, 4, bias=False).double().requires_grad_(False)
    module = LowRank(base, 2, torch.Generator().manual_seed(0)).double()
    x = draw(3, 5)
    torch.testing.assert_close(module(x), base(x))  # it begins as the base
    with torch.no_grad():
        module.up.copy_(draw(4, 2))
    same(
        lambda x, down, up: torch.func.functional_call(module, {"down": down, "up": up}, (x,)),
        lambda x, down, up: x @ (base.weight + up @ down).T,
        (x, module.down, module.up),
    )
    torch.testing.assert_close(module(x), x @ module.weight.T)
    assert [name for name, parameter in module.named_parameters() if parameter.requires_grad] == ["down", "up"]


def test_low_rank_takes_over_a_change() -> None:
    base, generator = nn.Linear(9, 8, bias=False), torch.Generator().manual_seed(0)
    thin = torch.randn(8, 2) @ torch.randn(2, 9)
    torch.testing.assert_close(LowRank(base, 2, generator, thin).weight, base.weight + thin)
    change = torch.randn(8, 9)
    left, sizes, right = torch.linalg.svd(change)
    best = left[:, :3] * sizes[:3] @ right[:3]
    torch.testing.assert_close(LowRank(base, 3, generator, change).weight, base.weight + best, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_rounding_is_that_of_the_stored_layout(bits: int, group_size: int) -> None:
    rng = np.random.default_rng(bits)
    weight = rng.standard_normal((7, 128)).astype(np.float32)
    weight[0], weight[1] = 0.0, np.abs(weight[1]) + 1
    weight[2, :64] = 0.25
    stored = dequantize(quantize(weight, bits, group_size, "F16"))
    rounded = round_to_codes(torch.from_numpy(weight), bits, group_size).numpy()
    np.testing.assert_array_equal(rounded, stored)


def test_rounding_passes_gradients_straight_through() -> None:
    plain = nn.Linear(32, 5)
    rounded = nn.Linear(32, 5)
    rounded.load_state_dict(plain.state_dict())
    rounded.__class__ = RoundedLinear
    rounded.bits, rounded.group_size = 3, 32
    x = torch.randn(4, 32, requires_grad=True)
    want = x @ round_to_codes(plain.weight.detach(), 3, 32).T + plain.bias
    torch.testing.assert_close(rounded(x), want)
    assert not torch.allclose(rounded(x), plain(x))
    weight = torch.randn(4, 5)
    of_plain = torch.autograd.grad((plain(x) * weight).sum(), (plain.weight, plain.bias))
    of_rounded = torch.autograd.grad((rounded(x) * weight).sum(), (rounded.weight, rounded.bias))
    for mine, right in zip(of_rounded, of_plain, strict=True):
        torch.testing.assert_close(mine, right)
