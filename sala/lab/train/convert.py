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
    teacher = work / "teacher"
    run = _begin(output, recipe, work, teacher, device, note, minutes)
    if is_main_process():
        import_dense(source, teacher)
    barrier()
    _run(run, teacher, output)


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
    _check_sala(model)
    is_external = teacher is not None and not _is_sala(teacher)
    run = _begin(output, recipe, work, work / "teacher" if is_external else teacher, device, note, minutes)
    if teacher is not None and is_external and is_main_process():
        import_dense(teacher, work / "teacher")
    barrier()
    _run(run, model, output)


def _begin(
    output: Path, recipe: Path, work: Path, teacher: Path | None, device: str, note: Note, minutes: float | None
) -> RecipeRun:
    began = time.monotonic()
    check_new(output)
    stages = load_recipe(recipe)
    work.mkdir(parents=True, exist_ok=True)
    deadline = None if minutes is None else began + 60 * minutes
    local_device = init_process(device)
    return RecipeRun(
        stages, recipe.parent, work, teacher, local_device, note if is_main_process() else _silent, deadline
    )


def _run(run: RecipeRun, start: Path, output: Path) -> None:
    final = run_recipe(run, start)
    if is_main_process():
        write_recipe_report(run, start, final)
        with new_directory(output) as draft:
            for file in final.iterdir():
                shutil.copy2(file, draft / file.name)
        run.note("recipe", f"wrote {output}")
    barrier()
    destroy_process()


def _check_sala(model: Path) -> None:
    if not (model / "config.json").is_file():
        raise ModelNotFound(f"{model} has no config.json", "give a checkpoint's directory")
    if not _is_sala(model):
        raise CheckpointError(f"{model} is not a MiniCPM-SALA checkpoint", "convert it first: sala convert")


def _is_sala(model: Path) -> bool:
    config = model / "config.json"
    return config.is_file() and read_json_object(config).get("model_type") == "minicpm_sala"


def _silent(stage: str, news: object) -> None:
    """Discard the notes of all processes but the main one."""
