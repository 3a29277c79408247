"""The KV cache of a batch: sala's pages and states behind the interface that `generate` expects."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from sala.backends.rows import POOLS
from sala.backends.torch.cache import HybridCache, KVPages, Span
from sala.backends.torch.fast.dispatch import select_ops
from sala.config import SalaConfig
from sala.errors import InputError
from sala.plugins.transformers.layout import CachedRows

_FIRST_PAGES = 4  # per row; doubled whenever they are full


class SalaCache(Cache):
    """Every row of the batch has its own run of pages and its own slot; runs double in length when one is full.

    `get_seq_length` counts columns of the batch, padding included, as transformers does; a row counts its tokens.
    Rows cannot be shortened: a recurrent state cannot be rolled back.
    """

    is_compileable = is_croppable = False

    def __init__(self, config: SalaConfig) -> None:
        super().__init__(layers=[])
        self.config = config
        self.prompt_lens: Sequence[int] | None = None  # tokens of each prompt, cached ones included, if known
        self.num_columns = 0
        self.row_pages = 0
        self.lengths: list[int] = []
        self.sparse_from: list[int] = []
        self.hybrid: HybridCache | None = None

    def advance(
        self, counts: Sequence[int], dtype: torch.dtype, devices: Sequence[torch.device], kernels: str = "auto"
    ) -> CachedRows:
        """Reserve space for this many new tokens per row and return the rows for the model."""
        if self.hybrid is None:
            self._start(len(counts), dtype, devices)
        if len(counts) != len(self.lengths):
            message = f"has {len(self.lengths)} rows, the input {len(counts)}"
            raise InputError("past_key_values", message, "give it the same batch")
        for row, count in enumerate(counts):
            self.sparse_from[row] = self._regime(row, count)
        self._grow(max(length + count for length, count in zip(self.lengths, counts, strict=True)))
        spans = []
        for row, count in enumerate(counts):
            if count:
                spans.append(self._span(row, self.lengths[row], count, devices[0]))
                self.lengths[row] += count
        return CachedRows((), tuple(spans), devices[0], select_ops(kernels))

    def _span(self, row: int, start: int, count: int, device: torch.device) -> Span:
        first, num_pages = row * self.row_pages, -(-(start + count) // self.config.sparse_config.block_size)
        pages = tuple(range(first, first + num_pages))
        return Span(start, count, row, self.sparse_from[row], 0, pages, device)

    def past_of(self, layer: int) -> KVPages | Tensor:
        """Return the cache of a layer; raise RuntimeError if it is empty."""
        if self.hybrid is None:
            raise RuntimeError("the cache is empty")
        return self.hybrid.pages[layer] if layer in self.hybrid.pages else self.hybrid.states[layer]

    def __getitem__(self, layer: int) -> tuple[Tensor, ...]:
        """Return keys and values [kv heads, tokens, D] of a sparse layer, row by row, or a lightning layer's states."""
        past = self.past_of(layer)
        if isinstance(past, Tensor):
            return (past,)
        spans = [self._span(row, 0, length, past.k.device) for row, length in enumerate(self.lengths)]
        keys, values = zip(*(past.keys_values(span, span.length) for span in spans), strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def _regime(self, row: int, count: int) -> int:
        """Return the first position with sparse attention, by the prompt's length as far as it is known.

        Rows that are already computed keep their regime; below the agreement bound both regimes agree.
        """
        sparse, length = self.config.sparse_config, self.lengths[row]
        known = self.prompt_lens[row] if self.prompt_lens is not None else 0
        if length == 0:
            return sparse.sparse_from(max(known, count))
        if count > 1 and length <= sparse.agreement_len and sparse.sparse_from(max(known, length + count)) == 0:
            return 0
        return self.sparse_from[row]

    def _start(self, num_rows: int, dtype: torch.dtype, devices: Sequence[torch.device]) -> None:
        self.lengths, self.sparse_from = [0] * num_rows, [0] * num_rows
        self.row_pages = _FIRST_PAGES
        self.hybrid = HybridCache(self.config, 0, num_rows, dtype, torch.device("meta"))
        for layer in self.hybrid.pages:
            self.hybrid.pages[layer] = KVPages(num_rows * self.row_pages, self.config, dtype, devices[layer])
        for layer, states in self.hybrid.states.items():
            self.hybrid.states[layer] = torch.zeros(states.shape, device=devices[layer])

    def _grow(self, num_tokens: int) -> None:
        needed = -(-num_tokens // self.config.sparse_config.block_size)
        if needed <= self.row_pages or self.hybrid is None:
            return
        wanted = max(needed, 2 * self.row_pages)
        rows = torch.arange(len(self.lengths))
        for pages in self.hybrid.pages.values():
            _copy_rows(pages, rows, self.row_pages, wanted)
        self.row_pages = wanted

    def select(self, rows: Tensor) -> None:
        """Replace the batch by these rows of it; a row may occur several times."""
        indices = rows.tolist()
        if self.hybrid is None:
            return
        if indices != list(range(len(self.lengths))):
            for pages in self.hybrid.pages.values():
                _copy_rows(pages, rows, self.row_pages, self.row_pages)
            for layer, states in self.hybrid.states.items():
                self.hybrid.states[layer] = states[rows.to(states.device)]
        self.lengths = [self.lengths[row] for row in indices]
        self.sparse_from = [self.sparse_from[row] for row in indices]
        if self.prompt_lens is not None:
            self.prompt_lens = [self.prompt_lens[row] for row in indices]

    reorder_cache = select  # type: ignore[assignment]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def crop(self, *_: Any, **__: Any) -> None:
        message = "cannot be shortened: states cannot be rolled back"
        raise InputError("past_key_values", message, "compute the prompt again")

    def reset(self) -> None:
        self.hybrid, self.prompt_lens = None, None
        self.num_columns, self.lengths, self.sparse_from = 0, [], []

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
        return self.num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        num_new = query if isinstance(query, int) else query.shape[0]
        return self.num_columns + num_new, 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self.num_columns > 0

    def __len__(self) -> int:
        return self.config.num_hidden_layers

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rows={self.lengths})"

    @property
    def batch_size(self) -> int:
        return len(self.lengths) or -1

    max_batch_size = batch_size  # its name in transformers 4

    @property
    def is_initialized(self) -> bool:
        return self.hybrid is not None

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return [mixer == "lightning" for mixer in self.config.mixers]


def _copy_rows(pages: KVPages, rows: Tensor, num_before: int, num_after: int) -> None:
    """Copy the runs of `rows`, in this order, from `num_before` to `num_after` pages each."""
    for name in POOLS:
        old = getattr(pages, name)
        num_heads, _, per_page, dim = old.shape
        new = old.new_empty(num_heads, len(rows), num_after, per_page, dim)
        new[:, :, :num_before] = old.view(num_heads, -1, num_before, per_page, dim)[:, rows.to(old.device)]
        setattr(pages, name, new.flatten(1, 2))
