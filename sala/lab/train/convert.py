"""Entry points for commands and scripts: run a recipe on a model and write the trained checkpoint."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from sala.checkpoint.writer import check_new, new_directory
from sala.config import read_json_object
from sala.errors import CheckpointError, ModelNotFound
from sala.lab.train.halo.source import import_dense
from sala.lab.train.pipeline import run_recipe
from sala.lab.train.processes import barrier, destroy_process, init_process, is_main_process
from sala.lab.train.recipe import load_recipe
from sala.lab.train.recipe_run import Note, RecipeRun
from sala.lab.train.report import write_recipe_report
from sala.options import Kernels


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A recipe to run, and where: stages that are complete in `work` are skipped."""

    recipe: Path
    output: Path
    work: Path
    device: str
    note: Note
    minutes: float | None = None
    kernels: Kernels = "auto"

    def convert(self, source: Path) -> None:
        """Run the recipe on a dense model."""
        self._run(self.work / "teacher", source, is_imported=True)

    def train(self, model: Path, teacher: Path | None = None) -> None:
        """Run the recipe on a MiniCPM-SALA checkpoint. The teacher may be one as well, or a dense model."""
        if not (model / "config.json").is_file():
            raise ModelNotFound(f"{model} has no config.json", "give a checkpoint's directory")
        if not _is_sala(model):
            raise CheckpointError(f"{model} is not a MiniCPM-SALA checkpoint", "convert it first: sala convert")
        self._run(model, teacher, is_imported=teacher is not None and not _is_sala(teacher))

    def _run(self, start: Path, teacher: Path | None, is_imported: bool) -> None:
        """Run the recipe from `start`; the teacher is imported as work/teacher if it is a dense model."""
        deadline = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        check_new(self.output)
        recipe = load_recipe(self.recipe)
        self.work.mkdir(parents=True, exist_ok=True)
        device = init_process(self.device)
        note = self.note if is_main_process() else lambda *_: None
        if teacher is not None and is_imported:
            if is_main_process():
                import_dense(teacher, self.work / "teacher")
            teacher = self.work / "teacher"
        barrier()
        run = RecipeRun(recipe, self.recipe.parent, self.work, teacher, device, note, deadline, self.kernels)
        final = run_recipe(run, start)
        if is_main_process():
            write_recipe_report(run, start, final)
            with new_directory(self.output) as draft:
                shutil.copytree(final, draft, dirs_exist_ok=True)
            run.note("recipe", f"wrote {self.output}")
        barrier()
        destroy_process()


def _is_sala(model: Path) -> bool:
    config = model / "config.json"
    return config.is_file() and read_json_object(config).get("model_type") == "minicpm_sala"
