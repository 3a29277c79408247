"""`sala train`, `convert`, `finetune` and `llamafactory`: everything that trains a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sala.cli import flags as s
from sala.lab.finetune.options import FinetuneOptions
from sala.options import Options

if TYPE_CHECKING:
    from sala.lab.train.convert import TrainingJob
    from sala.lab.train.recipe_run import Note

Minutes = Annotated[float | None, s.flag("Stop after so many minutes, to resume another time.", min=0)]
Output = Annotated[Path, s.flag("Directory of the result; must not exist.", "--output", "-o")]
Work = Annotated[Path | None, s.flag("Working directory; by default OUTPUT.run.")]


@s.derived
def train(
    *,
    recipe: Annotated[Path, s.argument("Recipe of the stages, in TOML.")],
    output: Output,
    teacher: Annotated[Path | None, s.flag("Teacher of stages of kind distil: a checkpoint or a dense model.")] = None,
    work: Work = None,
    options: Annotated[Options, s.Use(only=("model", "device", "threads", "kernels"))],
    minutes: Minutes = None,
) -> None:
    from sala.cli.progress import training_bar

    start = s.find_model(options.model)
    with training_bar() as bar:
        _job(recipe, output, work, options, bar, minutes).train(start, teacher)


@s.derived
def convert(
    *,
    source: Annotated[Path, s.argument("A Llama- or Qwen-style model: a directory, or a .gguf file.")],
    output: Output,
    recipe: Annotated[Path, s.flag("Recipe of the stages, in TOML.", "--recipe", "-r")],
    work: Work = None,
    options: Annotated[Options, s.Use(only=("device", "threads", "kernels"))],
    minutes: Minutes = None,
) -> None:
    from sala.cli.progress import training_bar

    with training_bar() as bar:
        _job(recipe, output, work, options, bar, minutes).convert(source)


def _job(
    recipe: Path, output: Path, work: Path | None, options: Options, bar: "Note", minutes: float | None
) -> "TrainingJob":
    from sala.lab.train.convert import TrainingJob

    work = work or output.with_name(output.name + ".run")
    return TrainingJob(recipe, output, work, options.device, bar, minutes, options.kernels)


@s.derived
def finetune(*, options: Annotated[FinetuneOptions, s.Use(arguments=("model",))]) -> None:
    from sala.cli.progress import training_bar
    from sala.errors import InputError
    from sala.lab.finetune.dialogues import BadData
    from sala.lab.finetune.run import finetune
    from sala.lab.finetune.training import FinetuneCallbacks
    from sala.lab.train.processes import is_main_process

    note = s.note if is_main_process() else lambda _: None
    try:
        with training_bar() as on_news:
            finetune(options, FinetuneCallbacks(message=note, progress=lambda news: on_news("finetune", news)))
    except BadData as error:
        note(error.message)
        raise InputError("data", f"has {len(error.problems):,} bad records", error.remedy) from None
    result = f"{options.model} --adapter {options.output}" if options.has_adapter else options.output
    note(f"try it: sala chat -m {result}")


def llamafactory(
    command: Annotated[str, s.argument("train, export, chat or api.")],
    arguments: Annotated[list[str] | None, s.argument("A YAML file, then KEY=VALUE for changes to it.")] = None,
) -> int:
    from sala.plugins.llamafactory import launch

    def callbacks() -> list[Any]:
        from sala.lab.finetune.recall import RecallCallback

        return [
            RecallCallback(note=s.note, remedy="mix long rows into the data, or train with sala finetune --keep-long")
        ]

    return launch(command, arguments or [], callbacks)
