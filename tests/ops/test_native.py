"""Steps of a few tokens by the native kernels, against the model that defines them, at ugly sizes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sala.backends.rows import cached_tensors
from sala.backends.torch.batch import pack
from sala.backends.torch.executor import TorchExecutor, open_executor
from sala.backends.torch.fast import cpu_decode
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.kernels import native
from sala.backends.torch.linears import DECODE_ROWS
from sala.backends.torch.ops.lightning import decay_slopes, lightning_step
from sala.backends.torch.ops.sparse import sparse_attention
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig, SparseConfig
from sala.llm import LLM
from sala.protocol import Options, Plan, Row, Sampling
from sala.quantization_config import Groups, QuantConfig
from tests.parity.test_quantized import write_pair

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C++ compiler")

SHAPES = {
    "tiny": TINY,
    "wide heads": replace(
        TINY, num_attention_heads=3, num_key_value_heads=1, head_dim=128, lightning_nh=3, lightning_nkv=3,
        lightning_head_dim=64, hidden_size=96,
    ),
    "shared heads, all options": replace(
        TINY, num_attention_heads=6, num_key_value_heads=3, head_dim=64, lightning_nh=6, lightning_nkv=2,
        lightning_head_dim=128, hidden_size=160, intermediate_size=208, attn_use_rope=True, attn_qk_norm=True,
        attn_log_base=64.0, attention_bias=True,
    ),
    "few options, small blocks": replace(
        TINY, qk_norm=False, use_output_norm=False, use_output_gate=False, attn_use_output_gate=False,
        lightning_use_rope=False,
        sparse_config=SparseConfig(
            kernel_size=8, kernel_stride=4, init_blocks=1, block_size=16, window_size=32, topk=4, dense_len=128
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models")
    for name, config in SHAPES.items():
        write_random(target / name, config)
    return target


def executor(path: Path, is_native: bool = True) -> TorchExecutor:
    made = open_executor(
        Checkpoint(path), SalaConfig.load(path), Options(ctx=2048, device="cpu", max_batch=3, snapshots=16)
    )
    assert made.fused is not None
    if not is_native:
        made.fused = None
    return made


def some_pages(made: TorchExecutor, seed: int = 0) -> tuple[int, ...]:
    """Pages for 2048 tokens, in no order."""
    count = 2048 // made.capacity.page_size
    return tuple(random.Random(seed).sample(range(count), count))


def some_tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(256), k=count))


def numbers(made: TorchExecutor, pages: tuple[int, ...], length: int, slot: int) -> dict[str, Tensor]:
    """All that the cache holds of a sequence, but for pooled rows whose window would begin before the text."""
    sparse, out = made.model.config.sparse_config, {}
    for name, entry in cached_tensors(made.model.config, length).items():
        pool = made.cache.pool_of(entry)
        first = sparse.kernel_size // sparse.kernel_stride - 1 if entry.pool in ("k1", "k2") else 0
        rows = slice(first, entry.shape[1])
        out[name] = pool[slot] if entry.pool == "state" else pool[:, torch.tensor(pages)].flatten(1, 2)[:, rows]
    return out


@torch.inference_mode()
def hidden(made: TorchExecutor, *rows: Row) -> Tensor:
    return made.forward(pack(Plan(rows), made.device, made.ops), made.cache)


def check_against_the_model(path: Path, length: int, sparse_from: int, sizes: tuple[int, ...]) -> None:
    """After a prompt, rows of these sizes: the same logits and the same past."""
    ways = [executor(path), executor(path, is_native=False)]
    pages, end = some_pages(ways[0]), length
    for way in ways:
        for pool in (pool for kv in way.cache.pages.values() for pool in (kv.k, kv.v, kv.k1, kv.k2)):
            pool.fill_(float("nan"))
        way.logits(Row(some_tokens(length, 1), 0, pages, 1, sparse_from))
    for size in sizes:
        row = Row(some_tokens(size, end), end, pages, 1, sparse_from)
        found, wanted = (way.logits(row) for way in ways)
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max(), f"{size} tokens at {end}"
        end += size
    found, wanted = (numbers(way, pages, end, 1) for way in ways)
    for name, value in wanted.items():
        bound = 1e-5 * float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=bound, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("length", "is_sparse"), [(1, False), (17, False), (700, False), (301, True), (1290, True)])
def test_the_step_is_the_model(models: Path, shape: str, length: int, is_sparse: bool) -> None:
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, DECODE_ROWS, 1, 1)
    check_against_the_model(models / shape, length, 0 if is_sparse else 4096, sizes)


def test_a_row_that_turns_sparse(models: Path) -> None:
    check_against_the_model(models / "few options, small blocks", 121, 128, (1, 5, 8, 1))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_width_of_codes(tmp_path: Path, bits: int) -> None:
    config = replace(TINY, hidden_size=160, intermediate_size=352, tie_word_embeddings=True)  # odd numbers of groups
    mixed = (("model.layers.1.self_attn.q_proj", Groups(8, 32)), ("model.layers.2.mlp.up_proj", None))
    packed, _ = write_pair(tmp_path, config, QuantConfig(bits, 32, mixed))
    check_against_the_model(packed, 70, 4096, (1, 3, 8, 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparse_from", [0, 4096])
@pytest.mark.parametrize("threads", [1, 3])
def test_drafts_get_the_bits_of_plain_decoding(models: Path, shape: str, sparse_from: int, threads: int) -> None:
    """Verified together or decoded one by one, among neighbours or alone, by any number of threads."""
    plain, drafted = executor(models / shape), executor(models / shape)
    pages, prompt, answer = some_pages(plain), some_tokens(260, 1), some_tokens(5, 2)
    for way in (plain, drafted):
        way.logits(Row(prompt, 0, pages, 1, sparse_from))
    before = torch.get_num_threads()
    one_by_one = [hidden(plain, Row((token,), 260 + i, pages, 1, sparse_from)) for i, token in enumerate(answer)]
    try:
        torch.set_num_threads(threads)
        row = Row(answer, 260, pages, 1, sparse_from, Sampling(temperature=0), num_drafts=4)
        batch = pack(Plan((row,)), drafted.device, drafted.ops)
        with torch.inference_mode():
            found = drafted.forward(batch, drafted.cache)
            batch.fold_accepted([5])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, torch.cat(one_by_one))
    wanted = numbers(plain, pages, 264, 1)
    for name, value in numbers(drafted, pages, 264, 1).items():
        assert torch.equal(value, wanted[name]), name


def test_neighbours_do_not_matter(models: Path) -> None:
    made = executor(models / "shared heads, all options")
    third = 2048 // made.capacity.page_size // 3
    pages = [some_pages(made)[i * third : (i + 1) * third] for i in range(3)]
    rows = [
        Row(some_tokens(n, n), 40 * i, pages[i], i, (4096, 0, 82)[i], Sampling(temperature=0))
        for i, n in enumerate((1, 4, 7))
    ]
    for i, row in enumerate(rows[1:], 1):
        made.logits(Row(some_tokens(40 * i, i), 0, row.pages, i, row.sparse_from))
    kept = {layer: states.clone() for layer, states in made.cache.states.items()}
    together = hidden(made, *rows).split([1, 4, 7])
    for layer, states in kept.items():
        made.cache.states[layer].copy_(states)
    for row, wanted in zip(rows, together, strict=True):
        assert torch.equal(hidden(made, row), wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_tokens_every_way(models: Path, shape: str) -> None:
    prompt = list(some_tokens(150, 3)) * 2  # repeats itself, so that drafts are found in it
    settings = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}

    def answer(is_native: bool = True, **options: object) -> list[int]:
        llm = LLM(models / shape, device="cpu", ctx=2048, **options)  # type: ignore[arg-type]
        if not is_native:
            llm._executor.fused = None  # type: ignore[attr-defined]
        return llm.generate(prompt, **settings).token_ids  # type: ignore[arg-type]

    wanted = answer(is_native=False)
    assert answer() == wanted
    assert answer(prefill_chunk=11) == wanted
    assert answer(speculate="lookup", num_draft=4) == wanted
    assert answer(speculate="layers", num_draft=3, draft_layers=2) == wanted


@pytest.mark.parametrize(("tokens", "dim"), [(1, 16), (5, 64), (3, 128)])
def test_the_fold_is_the_recurrence(tokens: int, dim: int) -> None:
    heads = 3
    k, v = torch.randn(2, tokens, heads, dim)
    state, slopes = torch.randn(heads, dim, dim), decay_slopes(heads)
    with torch.inference_mode():
        found = select_ops().lightning_fold(k, v, state, slopes)
    wanted = state[None]
    for i in range(tokens):
        _, wanted = lightning_step(k[i : i + 1], k[i : i + 1], v[i : i + 1], wanted, slopes, 1.0)
    torch.testing.assert_close(found, wanted[0], rtol=1e-6, atol=1e-6)


def test_what_the_kernels_leave_alone(models: Path, tmp_path: Path) -> None:
    write_random(tmp_path / "odd", replace(TINY, head_dim=8, num_attention_heads=8))
    made = open_executor(
        Checkpoint(tmp_path / "odd"), SalaConfig.load(tmp_path / "odd"), Options(ctx=512, device="cpu")
    )
    assert made.fused is None
    long = pack(Plan((Row(some_tokens(DECODE_ROWS + 1, 0), 0, (0,), 0, 4096),)), torch.device("cpu"))
    steps = executor(models / "tiny").fused
    assert steps is not None
    assert not steps.can_run(long)


@dataclass
class Chosen:
    """Queries, pages in no order and what was selected of them: what `sparse_attention` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    selected: Tensor
    positions: Tensor
    scale: float

    def arguments(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        q, selected, positions = self.q[rows], self.selected[rows], self.positions[rows]
        return q, self.k, self.v, self.table, selected, positions, self.scale

    def natively(self, rows: slice = slice(None)) -> Tensor:
        with torch.inference_mode():
            return select_ops().sparse_attention(*self.arguments(rows))

    def with_nan(self) -> "Chosen":
        """NaN in all that no query sees."""
        k, v = (torch.full_like(pages, float("nan")) for pages in (self.k, self.v))
        block_size = k.shape[2]
        for ids, position in zip(self.selected.tolist(), self.positions.tolist(), strict=True):
            for group, blocks in enumerate(ids):
                for block in (block for block in blocks if block >= 0):
                    page, seen = self.table[block], max(0, position + 1 - block * block_size)
                    for to, pages in ((k, self.k), (v, self.v)):
                        to[group, page, :seen] = pages[group, page, :seen]
        return replace(self, k=k, v=v)


def some_choices(
    n: int,
    heads: tuple[int, int] = (9, 3),
    dim: int = 64,
    block_size: int = 64,
    dtype: torch.dtype = torch.float32,
    start: int = 301,
    most: int = 5,
) -> Chosen:
    """Every query chooses its own block and up to `most` others before it, or none in their place."""
    generator = torch.Generator().manual_seed(n + dim)
    num_blocks, num_pages = (start + n - 1) // block_size + 1, (start + n - 1) // block_size + 4
    q = torch.randn(n, heads[0], dim, generator=generator)
    k, v = torch.randn(2, heads[1], num_pages, block_size, dim, generator=generator).to(dtype)
    positions = torch.arange(start, start + n)
    own = (positions // block_size)[:, None, None].expand(-1, heads[1], 1)
    liking = torch.rand(n, heads[1], num_blocks, generator=generator)
    others = liking.argsort(-1)[..., :most]
    others = others.masked_fill((others >= own) | (others % 5 == 3), -1)
    table = torch.randperm(num_pages, generator=generator)[:num_blocks]
    return Chosen(q, k, v, table, torch.cat((others, own), -1), positions, dim**-0.5)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 3, 65])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (32, 2), (5, 1)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_attention_over_chosen_blocks(n: int, heads: tuple[int, int], dim: int, block_size: int) -> None:
    for start in (0, 301):
        case = some_choices(n, heads, dim, block_size, start=start)
        wanted = sparse_attention(*case.arguments())
        torch.testing.assert_close(case.natively(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pages", [torch.bfloat16, torch.float16])
def test_attention_to_pages_of_16_bits(pages: torch.dtype) -> None:
    case = some_choices(65, dtype=pages)
    wanted = sparse_attention(*replace(case, k=case.k.float(), v=case.v.float()).arguments())
    torch.testing.assert_close(case.natively(), wanted, rtol=1e-5, atol=1e-5)
    narrow = replace(case, q=case.q.to(pages))
    torch.testing.assert_close(narrow.natively(), sparse_attention(*narrow.arguments()), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(9, 3), (32, 2)])
def test_attention_has_the_same_bits_however_it_is_cut(heads: tuple[int, int], dtype: torch.dtype) -> None:
    case = some_choices(150, heads, dtype=dtype)
    wanted = case.natively()
    for count in (1, 2, 3):
        for size in (1, 7, 64, 149, 150):
            with threads(count):
                pieces = [case.natively(slice(begin, begin + size)) for begin in range(0, 150, size)]
            assert torch.equal(torch.cat(pieces), wanted), f"{size} queries at a time, {count} threads"


@pytest.mark.parametrize("block_size", [16, 64])
def test_attention_sees_nothing_else(block_size: int) -> None:
    for n, start in ((1, 0), (1, 301), (40, 0), (40, 301)):
        case = some_choices(n, block_size=block_size, start=start)
        wanted, blind = case.natively(), case.with_nan()
        assert torch.equal(blind.natively(), wanted)
        block, row = divmod(start + n // 2 + 1, block_size)  # nor what its neighbours may see
        for pages in (blind.k, blind.v):
            pages[:, case.table[block], row:] = float("nan")
        found = blind.natively()
        assert torch.equal(found[: n // 2 + 1], wanted[: n // 2 + 1])
        assert n == 1 or found[n // 2 + 1].isnan().all()


def test_attention_to_nothing() -> None:
    case = some_choices(3)
    case.selected[1] = -1
    torch.testing.assert_close(case.natively(), sparse_attention(*case.arguments()), rtol=1e-5, atol=1e-5)
    assert case.natively(slice(0, 0)).shape == (0, 9, 64)


def test_attention_that_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(cpu_decode, "attend", fail)
    cases = {
        "odd heads": some_choices(3, dim=24),
        "narrow heads": some_choices(3, dim=8),
        "wide heads": some_choices(3, dim=272),
        "odd blocks": some_choices(3, block_size=24),
        "fp64": some_choices(3, dtype=torch.float64),
    }
    cases["fp64"].q = cases["fp64"].q.double()
    for name, case in cases.items():
        assert torch.equal(case.natively(), sparse_attention(*case.arguments())), name
    case = some_choices(3)
    case.q.requires_grad_()
    select_ops().sparse_attention(*case.arguments()).sum().backward()
    assert case.q.grad is not None
    monkeypatch.setattr(native, "load", lambda: None)
    assert torch.equal(case.natively(), sparse_attention(*case.arguments()))
