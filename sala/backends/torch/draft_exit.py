"""A trained exit: the first layers of the model draft better with it (`--speculate layers`)."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.loader import read_tensor
from sala.backends.torch.model import RMSNorm, SalaModel, linear
from sala.checkpoint.draft_exit import DraftExitConfig, open_draft_exit


class DraftExit(nn.Module):
    """Normed hidden states after the first layers → those that the model's head takes, [T, hidden]."""

    def __init__(self, config: DraftExitConfig) -> None:
        super().__init__()
        self.config = config
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden + self.down_proj(F.silu(self.up_proj(hidden))))
        return normed


def load_draft_exit(path: Path, model: SalaModel, dtype: torch.dtype, device: torch.device) -> DraftExit:
    """Read an exit and check that it belongs to this model."""
    config, checkpoint = open_draft_exit(path, model.config)
    with torch.device("meta"):
        found = DraftExit(config)
    with checkpoint:
        for name in config.shapes:
            module, _, leaf = name.rpartition(".")
            tensor = read_tensor(checkpoint, name, dtype, device)
            setattr(found.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
    return found.eval()
