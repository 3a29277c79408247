"""From a dense model and a recipe to a hybrid checkpoint: the way in for commands and scripts."""

import shutil
import time
from pathlib import Path

from sala.backends.torch.loader import pick_device
from sala.checkpoint.writer import new_directory
from sala.errors import CheckpointError
from sala.train.halo.source import import_dense
from sala.train.pipeline import Note, Run, run_recipe
from sala.train.recipe import load_recipe


def convert(
    source: Path, output: Path, recipe: Path, work: Path, device: str, note: Note, minutes: float | None = None
) -> None:
    """Run the recipe on a dense source. What is in `work` already is not done again."""
    began = time.monotonic()
    if output.exists():
        raise CheckpointError(f"{output} exists already", "choose another directory, or remove it yourself")
    stages = load_recipe(recipe)
    work.mkdir(parents=True, exist_ok=True)
    teacher = work / "teacher"
    import_dense(source, teacher)
    deadline = None if minutes is None else began + 60 * minutes
    final = run_recipe(Run(stages, recipe.parent, work, teacher, pick_device(device), note, deadline), teacher)
    with new_directory(output) as draft:
        for file in final.iterdir():
            shutil.copy2(file, draft / file.name)
