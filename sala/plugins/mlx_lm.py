"""MiniCPM-SALA in mlx-lm: generate, server, chat, convert and LoRA load SALA checkpoints through sala's MLX model.

    python -m sala.plugins.mlx_lm generate --model DIR --prompt "…"

is `mlx_lm.generate` with the model registered; all other commands work the same way. Other programs call
`sala.register()` before `mlx_lm.load`.

The KV cache is one object for all layers: pages of keys and values, and one state for each lightning layer. A state
cannot be rolled back, so mlx-lm neither trims the cache nor batches sequences of different lengths.
"""

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx

from sala.backends.mlx.batch import Batch
from sala.backends.mlx.cache import HybridCache, Indices, Span
from sala.backends.mlx.dispatch import select_ops
from sala.backends.mlx.model import Layer, SalaModel
from sala.backends.mlx.ops import REFERENCE
from sala.backends.mlx.ops.sparse import pool_keys
from sala.backends.rows import POOLS
from sala.config import SalaConfig, SparseConfig
from sala.errors import InputError, SalaError

NAME = "mlx_lm.models.minicpm_sala"
_THEIRS = ("quantization", "quantization_config", "quantize_activations")  # of config.json: mlx-lm reads them itself


@dataclass
class ModelArgs:
    """The configuration as mlx-lm creates it from config.json."""

    config: SalaConfig
    model_type: str = "minicpm_sala"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelArgs":
        return cls(SalaConfig.from_dict({key: value for key, value in values.items() if key not in _THEIRS}))


class SalaCache:
    """The KV cache of one sequence, or of several of the same length, as mlx-lm passes it around."""

    def __init__(self, config: SalaConfig) -> None:
        self.config = config
        self.offset = 0  # tokens
        self.num = 0  # sequences; the first call says how many
        self.hybrid: HybridCache | None = None
        self._pages: tuple[tuple[int, ...], ...] = ()  # of each sequence

    def spans(self, num: int, length: int, dtype: mx.Dtype) -> tuple[Span, ...]:
        """The next tokens of every sequence, and room for them.

        mlx-lm does not say how long a prompt is when it gives the first part of it, so every call decides by itself,
        as the vendor's model does: it is sparse if the past is dense_len tokens or more when the call is done.
        """
        hybrid, end = self.opened(num, dtype), self.offset + length
        num_pages = -(-end // self.config.sparse_config.block_size)
        if not self._pages or num_pages > len(self._pages[0]):
            self._pages = tuple(tuple(range(row, num_pages * num, num)) for row in range(num))
        hybrid.max_pages = max(hybrid.max_pages, num_pages * num)
        hybrid.reach(page for pages in self._pages for page in pages[-1:])
        sparse_from = 0 if end >= self.config.sparse_config.dense_len else end
        return tuple(Span(self.offset, length, row, sparse_from, 0, pages) for row, pages in enumerate(self._pages))

    def opened(self, num: int, dtype: mx.Dtype) -> HybridCache:
        """Return the arrays of the cache; they are allocated with the first tokens."""
        if self.hybrid is None:
            most = -(-self.config.max_position_embeddings // self.config.sparse_config.block_size)
            self.hybrid, self.num = HybridCache(self.config, most * num, num, dtype), num
        if num != self.num:
            raise InputError("inputs", f"has {num} sequences", f"this cache was begun with {self.num}")
        return self.hybrid

    @property
    def state(self) -> list[Any]:
        """Arrays and plain values, as mlx-lm evaluates, counts and saves them."""
        words = json.dumps(self.config.to_dict())
        if self.hybrid is None:
            return [words, self.offset, self.num]
        pools = [[getattr(pages, name) for name in POOLS] for pages in self.hybrid.pages.values()]
        states = [list(states) for states in self.hybrid.states.values()]
        return [words, self.offset, self.num, pools, states]

    @state.setter
    def state(self, values: list[Any]) -> None:
        words, self.offset, self.num, *arrays = values
        self.config, self.hybrid, self._pages = SalaConfig.from_dict(json.loads(words)), None, ()
        if not arrays:
            return
        pools, states = arrays
        self.hybrid = HybridCache(self.config, 1, self.num, mx.float32)
        for pages, kept in zip(self.hybrid.pages.values(), pools, strict=True):
            for name, pool in zip(POOLS, kept, strict=True):
                setattr(pages, name, pool)
        if pools:
            self.hybrid.num_pages = self.hybrid.max_pages = pools[0][0].shape[1]
        for slots, kept in zip(self.hybrid.states.values(), states, strict=True):
            slots[:] = kept

    @classmethod
    def from_state(cls, state: list[Any]) -> "SalaCache":
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> "SalaCache":
        """Copy the lists only: arrays are immutable."""
        own = copy.copy(self)
        own.hybrid = None if self.hybrid is None else self.hybrid.fork()
        return own

    @property
    def nbytes(self) -> int:
        return 0 if self.hybrid is None else sum(array.nbytes for array in self.hybrid.arrays(range(self.num)))

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return False

    def trim(self, _: int) -> int:
        return 0


class WholePages:
    """Replaces the pages of a sparse layer for whole sequences; gradients flow through it."""

    def __init__(self, sparse: SparseConfig) -> None:
        self.sparse = sparse

    def append(self, spans: Sequence[Span], indices: Indices, k: mx.array, v: mx.array) -> None:
        """Store keys and values of sequences of one length; the last page of each is padded with zeros."""
        rows, block = len(spans), self.sparse.block_size
        pad = -spans[0].length % block

        def pages(x: mx.array) -> mx.array:
            x = mx.pad(x.reshape(rows, -1, *x.shape[1:]), [(0, 0), (0, pad), (0, 0), (0, 0)])
            return x.reshape(-1, block, *x.shape[2:]).transpose(2, 0, 1, 3)  # [G, P, B, D]

        self.k, self.v = pages(k), pages(v)

    def keys_values(self, span: Span, length: int) -> tuple[mx.array, mx.array]:
        return self._read(self.k, span, length), self._read(self.v, span, length)

    def pooled(self, span: Span, length: int) -> tuple[mx.array, mx.array]:
        keys = mx.stop_gradient(self._read(self.k, span, length))
        kernel, stride = self.sparse.kernel_size, self.sparse.kernel_stride
        return pool_keys(keys, kernel, stride), pool_keys(keys, 4 * kernel, 4 * stride)

    def _read(self, pool: mx.array, span: Span, length: int) -> mx.array:
        first = span.pages[0] * self.sparse.block_size
        return pool.reshape(pool.shape[0], -1, pool.shape[3])[:, first : first + length]


class Model(SalaModel):
    """Token ids [B, n] → logits [B, n, vocab], as mlx-lm calls it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args.config)
        self.args = args
        self.model_type = args.model_type

    @property
    def layers(self) -> list[Layer]:
        return self.model.layers

    def make_cache(self) -> list[SalaCache]:
        return [SalaCache(self.config)]

    def __call__(self, inputs: mx.array, cache: list[SalaCache] | None = None) -> mx.array:  # type: ignore[override]
        if cache is None:
            return self.whole(inputs)
        (kept,), (num, length) = cache, inputs.shape
        mx.synchronize()  # pages that are still being read would be copied instead of written
        dtype = self.model.norm.weight.dtype
        batch = Batch((), kept.spans(num, length, dtype), select_ops(), inputs.reshape(-1))  # inputs stay unevaluated
        hidden = super().__call__(batch, kept.opened(num, dtype))
        kept.offset += length
        return self.logits(hidden).reshape(num, length, -1)

    def whole(self, inputs: mx.array) -> mx.array:
        """Run sequences of one length without a cache, by the reference, which is differentiable."""
        num, length = inputs.shape
        block, dense_len = self.config.sparse_config.block_size, self.config.sparse_config.dense_len
        pages = -(-length // block)
        sparse_from = 0 if length >= dense_len else length
        spans = tuple(
            Span(0, length, row, sparse_from, 0, tuple(range(row * pages, (row + 1) * pages))) for row in range(num)
        )
        batch = Batch((), spans, REFERENCE, inputs.reshape(-1))
        config, dim = self.config, self.config.lightning_head_dim
        states = {layer: [mx.zeros((config.lightning_nh, dim, dim))] * num for layer in config.lightning_layers}
        held = {layer: WholePages(config.sparse_config) for layer in config.sparse_layers}
        cache: Any = SimpleNamespace(pages=held, states=states)
        hidden = super().__call__(batch, cache)
        return self.logits(hidden).reshape(num, length, -1)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Add the head, which is not in the file if it shares the embedding."""
        if self.config.tie_word_embeddings:
            shared = {name: value for name, value in weights.items() if name.startswith("model.embed_tokens.")}
            weights |= {f"lm_head.{name.rpartition('.')[2]}": value for name, value in shared.items()}
        return weights


def register() -> None:
    """Register the model with mlx-lm, and its cache with the reader of cache files."""
    from mlx_lm.models import cache as caches

    module = ModuleType(NAME)
    module.Model, module.ModelArgs = Model, ModelArgs  # type: ignore[attr-defined]
    sys.modules[NAME] = module
    caches.SalaCache = SalaCache  # type: ignore[attr-defined]


def main() -> None:
    try:
        from mlx_lm import cli
    except ImportError:
        raise SalaError("mlx-lm is not installed", "run: pip install mlx-lm") from None
    # This file may run as __main__: import it under its name, so that its classes exist only once.
    import_module("sala.plugins.mlx_lm").register()
    cli.main()


if __name__ == "__main__":
    main()
