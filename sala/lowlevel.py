"""The low-level API: load the torch model, keep its caches, run tokens, sample. For code that runs the loop itself.

>>> model = load_model("path/to/MiniCPM-SALA")
>>> caches = create_layer_caches(model)
>>> logits = forward(model, [1, 2, 3], caches)
>>> token = sample(logits, temperature=0.7)
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sala.config import SalaConfig
from sala.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from sala.backends.torch.cache import HybridCache
    from sala.backends.torch.model import SalaModel


@dataclass(slots=True)
class LayerCaches:
    """The KV cache and recurrent states of one sequence, all layers; `length` tokens so far."""

    hybrid: "HybridCache"
    max_tokens: int
    length: int = 0
    sparse_from: int = 0


get_model_args = SalaConfig.load  # the configuration of a checkpoint
load_tokenizer = Tokenizer.load  # the tokenizer of a checkpoint


def load_model(model_dir: str | Path, device: str = "auto", dtype: str = "auto") -> "SalaModel":
    """Return the torch model with its weights."""
    from sala.backends.torch import loader
    from sala.backends.torch.fast.dispatch import linear_kernels
    from sala.checkpoint.reader import Checkpoint

    model_dir = Path(model_dir).expanduser()
    config = SalaConfig.load(model_dir)
    where, precision = loader.pick_device(device), loader.pick_dtype(dtype, config)
    return loader.load_model(Checkpoint(model_dir), config, precision, where, linear_kernels(where, precision))


def create_layer_caches(model: "SalaModel", max_tokens: int = 8192) -> LayerCaches:
    """Return empty caches for one sequence of at most `max_tokens` tokens."""
    from sala.backends.torch.cache import HybridCache

    weight = model.model.norm.weight
    num_pages = -(-max_tokens // model.config.sparse_config.block_size)
    hybrid = HybridCache(model.config, num_pages, 1, weight.dtype, weight.device)
    hybrid.clear_state(0)
    return LayerCaches(hybrid, max_tokens)


def forward(model: "SalaModel", tokens: Sequence[int], caches: LayerCaches) -> "Tensor":
    """Run tokens on top of the caches. Return the logits after each of them, [len(tokens), vocab] in float32.

    The first call is the prompt: its length decides between dense and sparse attention, as it does in `LLM`.
    """
    import torch

    from sala.backends.torch.batch import pack
    from sala.backends.torch.fast.dispatch import select_ops
    from sala.errors import ContextTooLong
    from sala.protocol import Plan, Row

    if caches.length + len(tokens) > caches.max_tokens:
        raise ContextTooLong(caches.length + len(tokens), caches.max_tokens)
    if caches.length == 0:
        caches.sparse_from = model.config.sparse_config.sparse_from(len(tokens))
    num_pages = -(-caches.max_tokens // model.config.sparse_config.block_size)
    row = Row(tuple(tokens), caches.length, tuple(range(num_pages)), 0, caches.sparse_from)
    with torch.inference_mode():
        batch = pack(Plan((row,)), model.model.norm.weight.device, select_ops())
        logits = model.logits(model(batch, caches.hybrid))
    caches.length += len(tokens)
    return logits


def sample(logits: "Tensor", temperature: float = 0.7, seed: int | None = None, position: int = 0) -> int:
    """Sample a token from logits [vocab]; of logits [T, vocab] the last row counts. Temperature 0 is greedy.

    With a seed the result is repeatable: it depends on the seed and on `position`, which should differ between steps.
    """
    import secrets

    from sala.backends.torch.sampler import sample as sample_token
    from sala.protocol import Row, Sampling

    sampling = Sampling(temperature=temperature, seed=secrets.randbits(63) if seed is None else seed)
    return sample_token(logits if logits.ndim == 1 else logits[-1], Row((), position, (), 0, 0, sampling)).token


def is_stop_token(token: int, stop: SalaConfig | Collection[int]) -> bool:
    """Return whether a token ends the answer, by the configuration or by a collection of stop ids."""
    return token in (stop.eos_token_id if isinstance(stop, SalaConfig) else stop)


def format_chat_prompt(system: str, user: str) -> str:
    """Return one question in the model's chat format; an empty system prompt is left out.

    The result is text: encode it with `parse_special=True` and no BOS. Prefer `Tokenizer.encode_chat`, in which special
    tokens spelt out in `user` have no effect.
    """
    opening = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{opening}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
