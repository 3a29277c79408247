"""A fine-tuning run from its options to its result: data, model, Trainer, checkpoint.

Errors in the options or the data are raised before the model is loaded. The Trainer's checkpoints lie in OUTPUT.run
until the result is written; a stopped run resumes from them with the same numbers.
"""

import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sala.backends.torch.executor import free_bytes
from sala.backends.torch.loader import pick_device
from sala.config import SalaConfig
from sala.errors import InputError, MissingExtra, writing
from sala.generation_config import read_stop_ids
from sala.lab.finetune import training
from sala.lab.finetune.dialogues import Example
from sala.lab.finetune.options import FinetuneOptions, read_lengths
from sala.lab.finetune.preference import preference_arguments, preference_trainer
from sala.lab.finetune.replay import long_rows, row_length
from sala.lab.finetune.result import adapter_tensors, put_adapter, read_log, restore, write_result
from sala.lab.finetune.rows import collate, make_rows
from sala.lab.finetune.target import load_base, load_target
from sala.lab.finetune.training import FinetuneCallbacks, Stopped
from sala.lab.train.processes import is_main_process, num_processes
from sala.models.embedded import find_model


def finetune(options: FinetuneOptions, callbacks: FinetuneCallbacks | None = None) -> Path:
    """Run to the end, and return the directory of the result."""
    callbacks = (callbacks or FinetuneCallbacks()) if is_main_process() else FinetuneCallbacks()
    need_libraries(options)
    from sala.lab.finetune.trainer import InterruptCallback

    path = find_model(options.model, callbacks.message)
    config = SalaConfig.load(path)
    if is_main_process():
        training.check_outputs(options)
    if options.objective == "kto" and options.batch < 2:
        callbacks.message("kto compares the answers of a batch: using --batch 2")
        options = replace(options, batch=2)
    train, held = training.read_data(options, path, config, callbacks)
    device = pick_device(options.device)
    is_sft = options.objective == "sft"
    rows, held_rows = (make_rows(examples, options) if is_sft else examples for examples in (train, held))
    wants_long = bool(is_sft and options.long_share)
    kept = _long_rows(options, path, config, device, train) if wants_long else []
    lines = [_describe_data(options, train, rows, held), *([_describe_kept(kept, config)] if wants_long else [])]
    for line in (*lines, *training.describe_memory(options, config, device, max(map(len, kept), default=0))):
        callbacks.message(line)
    rows += [(row,) for row in kept]
    more = {} if is_sft else preference_arguments(options, train)
    arguments = training.training_arguments(options, device, len(rows), bool(held), **more)
    if is_sft:
        model = load_target(path, options, training.loading_device(arguments, device))
        data = {"train_dataset": rows, "eval_dataset": held_rows or None, "data_collator": collate}
    else:
        model = load_base(path, options, training.loading_device(arguments, device))
        data = preference_trainer(options, path, train, held)
    recall = _recall(options, callbacks)
    with InterruptCallback(arguments.device, callbacks.message) as interrupt:
        trainer = make_trainer(model, arguments, options, callbacks, interrupt, *recall, **data)
        _train_to_end(trainer, options, interrupt, callbacks)
    facts = {"examples": len(train), "held_out": len(held), "long_rows": len(kept)}
    _write_outputs(trainer, options, path, facts, recall, callbacks)
    return options.output


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


def _recall(options: FinetuneOptions, callbacks: FinetuneCallbacks) -> list[Any]:
    """Return the callback that measures recall, unless it is switched off."""
    lengths = read_lengths(options.recall_lengths)
    if not options.recall:
        return []
    from sala.lab.finetune.recall import RecallCallback

    record = options.work / training.RECALL
    return [RecallCallback(lengths, options.recall_texts, callbacks.message, record=record, measures_end=False)]


def _long_rows(
    options: FinetuneOptions, path: Path, config: SalaConfig, device: torch.device, train: list[Any]
) -> list[Example]:
    num_tokens, free = sum(map(len, train)), free_bytes(device)

    def fits(length: int) -> bool:
        return training.estimate_for(options, config, device, length).total / num_processes() <= free

    ends = [*config.eos_token_id, *sorted(read_stop_ids(path, config))]
    length = row_length(options, config, num_tokens, fits)
    return [] if length is None else long_rows(options, path, ends[0], num_tokens, length)


def _describe_kept(kept: list[Example], config: SalaConfig) -> str:
    dense = config.sparse_config.dense_len
    if not kept:
        return (
            f"no long rows: one of more than {dense:,} tokens, in which attention is sparse, is too much for this run "
            f"or for memory; --keep-long-length {2 * dense} adds it all the same"
        )
    longest = max(map(len, kept))
    note = "" if longest > dense else f"; attention is dense in them (sparse from {dense:,} tokens on)"
    return f"{len(kept):,} long rows of {longest:,} tokens to keep what is found in long texts{note}"


def _describe_data(options: FinetuneOptions, train: list[Any], rows: list[Any], held: list[Any]) -> str:
    text = f"{len(train):,} preferences"
    if options.objective == "sft":
        num_tokens, num_learned = sum(map(len, train)), sum(int(one.loss_mask.sum()) for one in train)
        text = f"{len(train):,} examples in {len(rows):,} rows, {num_tokens:,} tokens, {num_learned:,} learned"
    return f"{text}; {len(held):,} held out" if held else text


def make_trainer(
    model: Any, arguments: Any, options: FinetuneOptions, callbacks: FinetuneCallbacks, *more: Any, **named: Any
) -> Any:
    """Return a Trainer that reports its progress; `more` are further Trainer callbacks.

    `named` are its data and, optionally, the `kind` of Trainer.
    """
    from transformers.trainer_callback import PrinterCallback

    from sala.lab.finetune.trainer import FinetuneTrainer, ProgressCallback

    trainer = named.pop("kind", FinetuneTrainer)(
        model=model,
        args=arguments,
        callbacks=[ProgressCallback(callbacks.progress), *more],
        has_bf16_state=options.optimizer == "adamw-bf16",
        remedy=f"the last good checkpoint is in {options.work}; try a lower --lr in another run",
        **named,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _train_to_end(trainer: Any, options: FinetuneOptions, interrupt: Any, callbacks: FinetuneCallbacks) -> None:
    """Train, from the last checkpoint if the run is resumed, and evaluate at the end.

    Raise Stopped if the run was interrupted.
    """
    last = training.last_checkpoint(options.work) if options.resume else None
    if last is not None:
        callbacks.message(f"resuming from {last.name}")
    with writing(options.work):
        trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    state = trainer.state
    if interrupt.is_stopped:
        raise Stopped(f"stopped after update {state.global_step}", "repeat the command with --resume")
    is_evaluated = any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)
    if trainer.eval_dataset is not None and not is_evaluated:
        trainer.evaluate()


def _write_outputs(
    trainer: Any,
    options: FinetuneOptions,
    path: Path,
    facts: dict[str, Any],
    recall: list[Any],
    callbacks: FinetuneCallbacks,
) -> None:
    """Write the result and remove the work directory; every process must call this."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    is_whole = num_processes() == 1 and not training.is_sharded(trainer.args)
    if not is_whole:
        _measure_after(recall, trainer)
    state = None if is_whole else trainer.accelerator.get_state_dict(trainer.model_wrapped)  # a collective operation
    if is_main_process():
        settings = model.peft_config["default"] if options.has_adapter else None
        tensors = adapter_tensors(model, state) if options.has_adapter else (state or dict(model.named_parameters()))
        if options.restore_qk:
            tensors = restore(tensors, path, options)
            if is_whole and options.has_adapter:
                put_adapter(model, tensors)
        if is_whole:
            _measure_after(recall, trainer)
        facts = {"updates": trainer.state.global_step, **facts}
        for callback in recall:
            facts |= callback.results()
        write_result(tensors, settings, options, path, read_log(trainer.state.log_history), facts)
        shutil.rmtree(options.work, ignore_errors=True)
        callbacks.message(f"wrote {options.output}")
    trainer.accelerator.wait_for_everyone()


def _measure_after(recall: list[Any], trainer: Any) -> None:
    for callback in recall:
        callback.measure_after(trainer.args, trainer.model, is_main_process())
