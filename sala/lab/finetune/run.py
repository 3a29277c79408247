"""A fine-tuning run from its options to its result: data, model, Trainer, checkpoint.

Errors in the options or the data are raised before the model is loaded. The Trainer's checkpoints lie in OUTPUT.run
until the result is written; a stopped run resumes from them with the same numbers.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sala.backends.torch.loader import pick_device
from sala.config import SalaConfig
from sala.errors import InputError, MissingExtra
from sala.lab.finetune.dialogues import Example, pack
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.preference import train_preferences
from sala.lab.finetune.rows import ExampleRows, collate
from sala.lab.finetune.training import (
    FinetuneCallbacks,
    build_trainer,
    check_outputs,
    describe_memory,
    estimate_for,
    is_main_process,
    loading_device,
    read_data,
    train_to_end,
    training_arguments,
    write_outputs,
)
from sala.models.embedded import find_model


def finetune(options: FinetuneOptions, callbacks: FinetuneCallbacks | None = None) -> Path:
    """Run to the end, and return the directory of the result."""
    callbacks = (callbacks or FinetuneCallbacks()) if is_main_process() else FinetuneCallbacks()
    need_libraries(options)
    path = find_model(options.model, callbacks.message)
    config = SalaConfig.load(path)
    if is_main_process():
        check_outputs(options)
    if options.objective != "sft":
        return train_preferences(options, path, config, callbacks)
    train, held = read_data(options, path, config, callbacks)
    device = pick_device(options.device)
    callbacks.message(describe_data(train, held, options))
    for line in describe_memory(estimate_for(options, config, device), device):
        callbacks.message(line)
    return _train_examples(options, path, train, held, device, callbacks)


def need_libraries(options: FinetuneOptions) -> None:
    """Raise MissingExtra or InputError if a library that the options need is not installed."""
    extras: tuple[str, ...] = ("peft",) if options.has_adapter else ()
    extras += ("trl", "datasets") if options.objective != "sft" else ()
    for name in ("transformers", "accelerate", *extras):
        if find_spec(name) is None:
            raise MissingExtra(name, "train")
    if options.deepspeed is not None and find_spec("deepspeed") is None:
        raise InputError("deepspeed", "is not installed", "run: pip install deepspeed")
    if options.optimizer == "adamw-8bit" and find_spec("bitsandbytes") is None:
        raise InputError("optimizer", "is adamw-8bit, which needs bitsandbytes", "run: pip install bitsandbytes")


def rows_of(examples: list[Example], options: FinetuneOptions) -> ExampleRows:
    return ExampleRows(pack(examples, options.max_length) if options.packing else [(example,) for example in examples])


def describe_data(train: list[Example], held: list[Example], options: FinetuneOptions) -> str:
    rows = rows_of(train, options)
    text = f"{len(train):,} examples in {len(rows):,} rows, {rows.num_tokens:,} tokens, {rows.num_learned:,} learned"
    return f"{text}; {len(held):,} held out" if held else text


def _train_examples(
    options: FinetuneOptions,
    path: Path,
    train: list[Example],
    held: list[Example],
    device: torch.device,
    callbacks: FinetuneCallbacks,
) -> Path:
    from sala.lab.finetune.target import load_target
    from sala.lab.finetune.trainer import InterruptCallback

    rows, held_rows = rows_of(train, options), rows_of(held, options) if held else None
    arguments = training_arguments(options, device, len(rows), held_rows is not None)
    model = load_target(path, options, loading_device(arguments, device))
    with InterruptCallback(arguments.device, callbacks.message) as interrupt:
        trainer = make_trainer(model, arguments, rows, held_rows, options, callbacks, interrupt)
        train_to_end(trainer, options, interrupt, callbacks)
    write_outputs(trainer, options, path, len(train), len(held), callbacks)
    return options.output


def make_trainer(
    model: Any,
    arguments: Any,
    rows: ExampleRows,
    held: ExampleRows | None,
    options: FinetuneOptions,
    callbacks: FinetuneCallbacks,
    *more: Any,
) -> Any:
    """Return a Trainer of examples; `more` are further Trainer callbacks."""
    from sala.lab.finetune.trainer import FinetuneTrainer

    data = {"train_dataset": rows, "eval_dataset": held, "data_collator": collate}
    return build_trainer(FinetuneTrainer, model, arguments, options, callbacks, *more, **data)
