"""`sala finetune`: fine-tune a model on examples. Every option is a flag and a key of a TOML file."""

from typing import Annotated

from sala.cli.flags import Use, derived, note
from sala.lab.finetune.options import FinetuneOptions


@derived
def finetune(*, options: Annotated[FinetuneOptions, Use(arguments=("model",))]) -> None:
    from sala.cli.progress import training_bar
    from sala.errors import InputError
    from sala.lab.finetune.dialogues import BadData
    from sala.lab.finetune.run import finetune
    from sala.lab.finetune.training import FinetuneCallbacks, is_main_process

    try:
        with training_bar() as on_news:
            callbacks = FinetuneCallbacks(message=note, progress=lambda news: on_news("finetune", news))
            finetune(options, callbacks if is_main_process() else FinetuneCallbacks())
    except BadData as error:
        if is_main_process():
            note(error.message)
        raise InputError("data", f"has {len(error.problems):,} bad records", error.remedy) from None
    if is_main_process():
        note(_next(options))


def _next(options: FinetuneOptions) -> str:
    if options.has_adapter:
        return f"try it: sala chat -m {options.model} --adapter {options.output}"
    return f"try it: sala chat -m {options.output}"
