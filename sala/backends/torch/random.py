"""Models with random weights, created on their device: for benchmarks and self-tests, without a checkpoint."""

import torch
from torch import Tensor, nn

from sala.backends.torch.model import SalaModel
from sala.checkpoint.random import spread
from sala.config import SalaConfig


def random_model(config: SalaConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> SalaModel:
    """Return a model with weights of the same distributions as those of `sala init`."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model = SalaModel(config)
    for name, parameter in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        _fill(tensor, name, config, generator)
        setattr(model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def _fill(tensor: Tensor, name: str, config: SalaConfig, generator: torch.Generator) -> None:
    if tensor.dim() > 1:
        tensor.normal_(std=spread(name, tuple(tensor.shape), config), generator=generator)
    elif name.endswith(".bias"):
        tensor.normal_(std=0.5, generator=generator)
    else:
        tensor.fill_(1)
