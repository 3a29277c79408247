"""The draft head: one small layer that guesses tokens from hidden states of the model (as in EAGLE-3).

The entry of position p is made of token p and the fused hidden states of position p - 1. A layer of attention and MLP
turns it into a hidden state that predicts token p + 1. The next draft takes this state in place of the model's, so a
chain of drafts needs no pass of the model.

Keys and values of an entry depend on the tokens up to its own and on nothing else. They lie in the pages of the
sequence, like those of a sparse layer, and the fused state of the last token lies in its slot: prefixes, snapshots and
preemption work as without a head. Queries attend to a window and the first tokens only, so neither cost nor acceptance
depend on the length of the context. Drafts are verified by the model: whatever the head computes, the answer is exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.rows import DRAFT_PREFIX, GREEDY_BELOW, is_adjusted, point_of, sampling_of
from sala.backends.torch.batch import Batch, Features
from sala.backends.torch.cache import Span
from sala.backends.torch.linears import AffineLinear, HalfLinear
from sala.backends.torch.loader import read_tensor
from sala.backends.torch.model import RMSNorm, SalaModel, linear
from sala.backends.torch.ops.dense import apply_rope, rope_angles
from sala.backends.torch.sampler import adjust, sample_at
from sala.checkpoint.draft_head import NUM_FEATURES, TOKENS, DraftHeadConfig, open_draft_head
from sala.protocol import Plan, Row

_CANDIDATES = 64  # most probable tokens among which a draft is sampled


class DraftHead(nn.Module):
    """The layer. Keys and values are apart from queries, because most entries are never asked for a draft."""

    tokens: Tensor  # [draft_vocab_size]: the tokens that can be drafted

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, wide, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.num_heads, self.num_groups, self.dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )  # fmt: skip
        self.fuse = linear(NUM_FEATURES * hidden, hidden)
        self.embed_norm, self.feature_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.q_proj = linear(2 * hidden, self.num_heads * self.dim)
        self.k_proj = linear(2 * hidden, self.num_groups * self.dim)
        self.v_proj = linear(2 * hidden, self.num_groups * self.dim)
        self.o_proj = linear(self.num_heads * self.dim, hidden)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.gate_proj, self.up_proj = linear(hidden, wide), linear(hidden, wide)
        self.down_proj = linear(wide, hidden)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = None if config.shares_head else linear(hidden, config.draft_vocab_size)
        self.register_buffer(TOKENS, torch.zeros(config.draft_vocab_size, dtype=torch.int32))

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """Fuse hidden states of the model, [T, hidden] each → one state [T, hidden]."""
        normed = [F.rms_norm(x.to(self.dtype), (x.shape[-1],), eps=self.config.rms_norm_eps) for x in states]
        return self.fuse(torch.cat(normed, -1))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of activations; matrices may be narrower."""
        return self.norm.weight.dtype

    def entry(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Embeddings of tokens and the states before them, [T, hidden] → [T, 2 hidden]."""
        return torch.cat((self.embed_norm(embedded.to(state.dtype)), self.feature_norm(state)), -1)

    def keys_values(self, entry: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """entry [T, 2 hidden] → rotated keys and values, [T, G, D] each."""
        k = self.k_proj(entry).view(-1, self.num_groups, self.dim)
        v = self.v_proj(entry).view(-1, self.num_groups, self.dim)
        return self.rotated(k, positions), v

    def queries(self, entry: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """entry [T, 2 hidden] → queries [T, H, D] for the window, and those for the first tokens.

        Seen from a query, the first tokens are never farther away than the window reaches.
        """
        q = self.q_proj(entry).view(-1, self.num_heads, self.dim)
        reach = self.config.window + self.config.num_first
        return self.rotated(q, positions), self.rotated(q, positions.clamp(max=reach))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return apply_rope(x, *rope_angles(positions, self.dim, self.config.rope_theta))

    def output(self, state: Tensor, attended: Tensor) -> Tensor:
        """Add to the entry's state what its query attended to [T, H, D], then the MLP → hidden state [T, hidden]."""
        x = state + self.o_proj(attended.flatten(1))
        normed = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def scores(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] → scores of the reduced vocabulary [T, V], unless the head shares that of the model."""
        assert self.lm_head is not None
        return self.lm_head(self.norm(hidden))


def load_draft_head(
    path: Path, model: SalaModel, dtype: torch.dtype, device: torch.device, has_half_linears: bool = False
) -> DraftHead:
    """Read a draft head and check that it belongs to this model; for `HalfLinear`, matrices are read in 16 bits."""
    config, checkpoint = open_draft_head(path, model.config)
    with torch.device("meta"):
        head = DraftHead(config)
    with checkpoint:
        for name, _ in list(head.named_parameters()):
            module, _, leaf = name.rpartition(".")
            is_half = has_half_linears and leaf == "weight" and not module.endswith("norm")
            own = torch.bfloat16 if is_half and dtype == torch.float32 else dtype
            tensor = read_tensor(checkpoint, name, own, device)
            setattr(head.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
        tokens = torch.frombuffer(bytearray(checkpoint.read(TOKENS).data), dtype=torch.int32)
    tokens = tokens.clamp(0, config.vocab_size - 1)
    setattr(head, TOKENS, tokens.to(device))
    return head.eval()


def shared_rows(model: SalaModel, tokens: Tensor) -> nn.Module:
    """Return the rows of the model's head for some tokens, in the format of that head."""
    source: nn.Module = model.lm_head
    if isinstance(source, AffineLinear):
        return AffineLinear(source.packed.map(lambda part: part[tokens].contiguous()), kernels=source.kernels)
    assert isinstance(source, nn.Linear)
    rows = nn.Linear(source.in_features, len(tokens), bias=False, device="meta")
    rows.weight = nn.Parameter(source.weight[tokens], requires_grad=False)
    kernel = source.kernel if isinstance(source, HalfLinear) else None
    return rows if kernel is None else HalfLinear(rows, kernel)


class HeadCache:
    """Keys and values of the head by page, [G, P, B, D], and the fused state of the last token by slot."""

    def __init__(
        self, config: DraftHeadConfig, num_pages: int, num_slots: int, page_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        shape = (config.num_key_value_heads, num_pages, page_size, config.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.last = torch.zeros(num_slots, config.hidden_size, dtype=dtype, device=device)

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        for pool in (self.k, self.v):
            pool[:, target, :num_rows] = pool[:, source, :num_rows]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.last[target] = self.last[source]

    def tensors(self, table: Tensor, num_tokens: int, slot: int) -> dict[str, Tensor]:
        """Return what a sequence has here, by name."""
        pools = {DRAFT_PREFIX + "k": self.k, DRAFT_PREFIX + "v": self.v}
        found = {name: pool[:, table].flatten(1, 2)[:, :num_tokens] for name, pool in pools.items()}
        return found | {DRAFT_PREFIX + "last": self.last[slot]}

    def restore(self, tensors: Mapping[str, Tensor], table: Tensor, num_tokens: int, slot: int) -> None:
        """Reverse `tensors`; what is not there becomes zero, and only makes the next drafts worse."""
        size = self.k.shape[2]
        index = torch.arange(num_tokens, device=self.k.device)
        rows = table[index // size] * size + index % size
        for name, pool in (("k", self.k), ("v", self.v)):
            value, shape = tensors.get(DRAFT_PREFIX + name), (pool.shape[0], num_tokens, pool.shape[3])
            pool.flatten(1, 2)[:, rows] = 0 if value is None or value.shape != shape else value.to(pool)
        last = tensors.get(DRAFT_PREFIX + "last")
        self.last[slot] = 0 if last is None or last.shape != self.last.shape[1:] else last.to(self.last)


class Drafter:
    """A draft head on top of a loaded model: follows what the model computes, and drafts."""

    def __init__(self, head: DraftHead, model: SalaModel, cache: HeadCache) -> None:
        self.head = head
        self.model = model
        self.cache = cache
        self.tokens = head.tokens.long()
        self.rows = shared_rows(model, self.tokens) if head.lm_head is None else None

    def features(self) -> Features:
        """Return what a forward pass is to fill."""
        return Features(self.head.config.feature_layers)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.model.embed_tokens(tokens) * self.model.config.scale_emb

    def follow(self, batch: Batch, features: Features, num_kept: Sequence[int]) -> None:
        """Extend the cache by the first `num_kept` tokens of each span, which the model has computed."""
        fused = self.head.fused(features.states)
        embedded, at = self.embed(batch.tokens), 0
        for span, count in zip(batch.spans, num_kept, strict=True):
            states = fused[at : at + count]
            before = torch.cat((self.cache.last[span.slot][None], states[:-1]))
            entry = self.head.entry(embedded[at : at + count], before)
            self._write(span, *self.head.keys_values(entry, batch.positions[at : at + count]))
            for length, slot in span.snapshots:
                self.cache.last[slot] = states[length - span.start - 1]
            self.cache.last[span.slot] = states[-1]
            at += span.length

    def _write(self, span: Span, k: Tensor, v: Tensor) -> None:
        rows = _rows(self.cache.k, span, span.start, span.start + len(k))
        self.cache.k.flatten(1, 2)[:, rows] = k.transpose(0, 1).to(self.cache.k.dtype)
        self.cache.v.flatten(1, 2)[:, rows] = v.transpose(0, 1).to(self.cache.v.dtype)

    def draft(self, plan: Plan, count: int, pack: Callable[[Plan], Batch]) -> tuple[tuple[int, ...], ...]:
        """Draft `count` tokens after the last token of each row, which the model has not computed yet."""
        states = self.cache.last[[row.slot for row in plan.rows]]
        rows = [replace(row, tokens=row.tokens[-1:], start=row.start + len(row.tokens) - 1) for row in plan.rows]
        drafts: list[list[int]] = [[] for _ in rows]
        for _ in range(count):
            batch = pack(Plan(tuple(rows)))
            entry = self.head.entry(self.embed(batch.tokens), states)
            k, v = self.head.keys_values(entry, batch.positions)
            for index, span in enumerate(batch.spans):
                self._write(span, k[index : index + 1], v[index : index + 1])
            states = self.head.output(states, self._attend(batch, *self.head.queries(entry, batch.positions)))
            for index, token in enumerate(self._sample(self._scores(states), rows)):
                drafts[index].append(token)
                row = rows[index]
                history = (*row.history, token) if row.history else ()
                last = (
                    len(row.pages) * self.cache.k.shape[2] - 1
                )  # a row that needs fewer drafts may have no more pages
                rows[index] = replace(row, tokens=(token,), start=min(row.start + 1, last), history=history)
        return tuple(map(tuple, drafts))

    def _scores(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] → scores of the reduced vocabulary [n, V] in fp32."""
        if self.rows is None:
            return self.head.scores(hidden).float()
        normed = self.head.norm(hidden) / self.model.config.logit_divisor
        scores: Tensor = self.rows(normed.to(self.rows.weight.dtype) if type(self.rows) is nn.Linear else normed)
        return scores.float()

    def _attend(self, batch: Batch, near: Tensor, far: Tensor) -> Tensor:
        """Attend with queries [n, H, D], one of each span, for the window and for the first tokens → [n, H, D]."""
        config, outputs = self.head.config, []
        for span, q, q_far in zip(batch.spans, near, far, strict=True):
            begin = max(0, span.end - config.window)
            num_far = min(begin, config.num_first)
            pieces = [(q, begin, span.end)] + ([(q_far, 0, num_far)] if num_far else [])
            scores, values = [], []
            for query, first, end in pieces:
                rows = _rows(self.cache.k, span, first, end)
                keys = self.cache.k.flatten(1, 2)[:, rows]
                folded = query.unflatten(0, (self.head.num_groups, -1))  # [G, H/G, D]
                scores.append(folded.to(keys.dtype) @ keys.transpose(1, 2))
                values.append(self.cache.v.flatten(1, 2)[:, rows])
            weights = (torch.cat(scores, -1).float() * config.head_dim**-0.5).softmax(-1)
            outputs.append((weights.to(near.dtype) @ torch.cat(values, 1).to(near.dtype)).flatten(0, 1))
        return torch.stack(outputs)

    def _sample(self, scores: Tensor, rows: Sequence[Row]) -> list[int]:
        """scores [n, V] → tokens, sampled as the model's will be: at the same point of the distribution."""
        samplings = [sampling_of(row) for row in rows]
        picked = []
        for index, (row, sampling) in enumerate(zip(rows, samplings, strict=True)):
            own = self._adjusted(scores[index], row) if is_adjusted(row) else scores[index]
            if sampling.temperature < GREEDY_BELOW:
                picked.append(own.argmax())
                continue
            values, ids = own.topk(min(_CANDIDATES, len(own)))
            point = point_of(row, 0)
            picked.append(ids[sample_at(values[None], [sampling], [point])[0]])
        return [int(token) for token in self.tokens[torch.stack(picked)].tolist()]

    def _adjusted(self, scores: Tensor, row: Row) -> Tensor:
        """Return scores with bias and penalties, which are by tokens of the whole vocabulary."""
        whole = torch.full((self.head.config.vocab_size,), float("-inf"), device=scores.device)
        whole[self.tokens] = scores
        return adjust(whole, sampling_of(row), replace(row, mask=None, banned=()))[self.tokens]


def _rows(pool: Tensor, span: Span, start: int, end: int) -> Tensor | slice:
    """Return where positions start…end lie in the flattened pool [G, P * B, D]."""
    size = pool.shape[2]
    if span.first_page is not None:
        base = span.first_page * size
        return slice(base + start, base + end)
    rows = np.arange(start, end)
    pages = np.asarray(span.pages)[rows // size]
    return torch.from_numpy(pages * size + rows % size).to(pool.device)
