"""Entry points for commands and scripts: run a recipe on a model and write the trained checkpoint."""

import shutil
import time
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


def convert(
    source: Path, output: Path, recipe: Path, work: Path, device: str, note: Note, minutes: float | None = None
) -> None:
    """Run the recipe on a dense model; stages that are complete in `work` are skipped."""
    _run(work / "teacher", output, recipe, work, device, note, minutes, source, is_imported=True)


def train_model(
    model: Path,
    output: Path,
    recipe: Path,
    work: Path,
    device: str,
    note: Note,
    minutes: float | None = None,
    teacher: Path | None = None,
) -> None:
    """Run the recipe on a MiniCPM-SALA checkpoint. The teacher may be one as well, or a dense model."""
    if not (model / "config.json").is_file():
        raise ModelNotFound(f"{model} has no config.json", "give a checkpoint's directory")
    if not _is_sala(model):
        raise CheckpointError(f"{model} is not a MiniCPM-SALA checkpoint", "convert it first: sala convert")
    is_imported = teacher is not None and not _is_sala(teacher)
    _run(model, output, recipe, work, device, note, minutes, teacher, is_imported)


def _run(
    start: Path,
    output: Path,
    recipe: Path,
    work: Path,
    device: str,
    note: Note,
    minutes: float | None,
    teacher: Path | None,
    is_imported: bool,
) -> None:
    """Run the recipe from `start`; the teacher is imported as work/teacher if it is a dense model."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    check_new(output)
    stages = load_recipe(recipe)
    work.mkdir(parents=True, exist_ok=True)
    local_device = init_process(device)
    if not is_main_process():
        note = _silent
    if teacher is not None and is_imported:
        if is_main_process():
            import_dense(teacher, work / "teacher")
        teacher = work / "teacher"
    barrier()
    run = RecipeRun(stages, recipe.parent, work, teacher, local_device, note, deadline)
    final = run_recipe(run, start)
    if is_main_process():
        write_recipe_report(run, start, final)
        with new_directory(output) as draft:
            for file in final.iterdir():
                shutil.copy2(file, draft / file.name)
        run.note("recipe", f"wrote {output}")
    barrier()
    destroy_process()


def _is_sala(model: Path) -> bool:
    config = model / "config.json"
    return config.is_file() and read_json_object(config).get("model_type") == "minicpm_sala"


def _silent(stage: str, news: object) -> None:
    """Discard the notes of all processes but the main one."""
