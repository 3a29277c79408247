"""What all stages of a running recipe share: its directories, teacher, device and deadline."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sala.backends.torch.model import SalaModel
from sala.errors import InputError
from sala.lab.train.loop import Progress
from sala.lab.train.models import load_for_training
from sala.lab.train.recipe import Recipe, Stage
from sala.options import Kernels

Note = Callable[[str, Progress | str], None]  # (stage, its progress or a message)


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """A recipe with its directories: data paths are relative to `base`; stages write below `work`."""

    recipe: Recipe
    base: Path
    work: Path
    teacher: Path | None
    device: torch.device
    note: Note
    deadline: float | None = None
    kernels: Kernels = "auto"
    start: Path | None = None  # the checkpoint that the recipe starts from, once it runs

    def directory(self, stage: Stage) -> Path:
        """Return the directory that the stage writes to."""
        index = self.recipe.stages.index(stage)
        return self.work / f"{index + 1:02}-{stage.name}"

    def load_teacher(self) -> SalaModel:
        """Return the teacher in fp32; raise InputError if there is none."""
        if self.teacher is None:
            raise InputError("recipe", "has a stage that needs a teacher", "name one: --teacher DIR")
        return self.load(self.teacher)

    def load(self, directory: Path) -> SalaModel:
        """Return a model in fp32 that is computed as the run computes."""
        return load_for_training(directory, self.device, kernels=self.kernels)
