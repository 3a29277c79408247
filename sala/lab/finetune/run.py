"""A fine-tuning run from its options to its result: data, model, Trainer, checkpoint.

What is wrong with the options or the data is said before the model is loaded. The Trainer's own checkpoints lie in
OUTPUT.run until the result is written; from them a run that was stopped goes on with the same numbers.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sala.backends.memory import Tuning, TuningEstimate, estimate_tuning
from sala.backends.torch.loader import pick_device
from sala.checkpoint.names import expected_tensors
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError, MissingExtra, SalaError
from sala.lab.finetune.dialogues import Example, Problem, Reading, load_examples, pack, split_off
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.rows import Rows, collate
from sala.lab.train.loop import Progress
from sala.llm import read_stop_ids
from sala.models.embedded import find_model
from sala.text.tokenizer import Tokenizer

OPTIMIZERS = {"adafactor": "adafactor", "adamw-8bit": "adamw_bnb_8bit"}
_RECORD = "options.json"
_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Ears:
    """Who hears what a run has to say: lines, progress, and how far the data is read."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[Progress], None] = lambda progress: None
    reading: Callable[[int], None] = lambda count: None


class Stopped(SalaError):
    """Somebody asked the run to stop; it is saved."""


def finetune(options: FinetuneOptions, ears: Ears | None = None) -> Path:
    """Run to the end, and return the directory of the result."""
    ears = (ears or Ears()) if is_first_process() else Ears()
    need_libraries(options)
    path = find_model(options.model, ears.say)
    config = SalaConfig.load(path)
    if is_first_process():
        _check_places(options)
    if options.objective != "sft":
        from sala.lab.finetune.preference import learn_preferences

        return learn_preferences(options, path, config, ears)
    train, held = read_data(options, path, config, ears)
    device = pick_device(options.device)
    ears.say(describe_data(train, held, options))
    for line in describe_memory(estimate_for(options, config, device), device):
        ears.say(line)
    return _run(options, path, train, held, device, ears)


def is_first_process() -> bool:
    """Whether this one speaks and writes; launchers say so in the environment."""
    return int(os.environ.get("RANK", "0")) == 0


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def need_libraries(options: FinetuneOptions) -> None:
    extras: tuple[str, ...] = ("peft",) if options.has_adapter else ()
    extras += ("trl", "datasets") if options.objective != "sft" else ()
    for name in ("transformers", "accelerate", *extras):
        if find_spec(name) is None:
            raise MissingExtra(name, "train")
    if options.deepspeed is not None and find_spec("deepspeed") is None:
        raise InputError("deepspeed", "is not installed", "run: pip install deepspeed")
    if options.optimizer == "adamw-8bit" and find_spec("bitsandbytes") is None:
        raise InputError("optimizer", "is adamw-8bit, which needs bitsandbytes", "run: pip install bitsandbytes")


def _check_places(options: FinetuneOptions) -> None:
    """Nothing is overwritten, and a run goes on only as it began."""
    if options.output.exists() or options.output.is_symlink():
        raise CheckpointError(f"{options.output} exists already", "choose another directory, or remove it yourself")
    record = options.work / _RECORD
    if options.resume and not record.is_file():
        raise InputError("resume", f"finds no run in {options.work}", "begin without --resume")
    if options.resume:
        before, now = json.loads(record.read_text()), json.loads(json.dumps(options.lasting()))
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            was = ", ".join(f"{name} was {before.get(name)}" for name in changed)
            raise InputError("resume", f"goes on with the options of the run: {was}", "repeat them, or begin anew")
        return
    if last_checkpoint(options.work) is not None:
        raise CheckpointError(
            f"{options.work} holds a run that is not over", "go on with --resume, or remove it yourself"
        )
    if options.work.exists() and not _is_ours(options.work):
        raise CheckpointError(f"{options.work} holds other files", "choose another output, or move them away")
    options.work.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(options.lasting(), indent=1) + "\n")


def _is_ours(work: Path) -> bool:
    """Whether everything there was left by a run that was killed before its first checkpoint was complete."""
    return work.is_dir() and all(path.name == _RECORD or path.match("checkpoint-*") for path in work.iterdir())


def read_data(
    options: FinetuneOptions, path: Path, config: SalaConfig, ears: Ears, load: Any = load_examples
) -> tuple[list[Any], list[Any]]:
    """Examples to learn from and to measure on; bad lines of both files are told before anything else is done."""
    stops = read_stop_ids(path, config)
    tokenizer = Tokenizer.load(path)
    try:
        reading = Reading(tokenizer, options.max_length, stops, _end_of_text(config, stops), options.cut_long)
        train, problems = load(options.train, reading, options.skip_bad, ears.reading)
        _tell_skipped(options.train, problems, ears)
        held: list[Any] = []
        if options.eval is not None:
            held, problems = load(options.eval, reading, options.skip_bad, ears.reading)
            _tell_skipped(options.eval, problems, ears)
        elif options.eval_share:
            train, held = split_off(train, options.eval_share, options.seed)
    except SalaError:
        _forget_empty(options)
        raise
    finally:
        tokenizer.close()
    return train, held


def _forget_empty(options: FinetuneOptions) -> None:
    """A run that never began leaves nothing behind; what others put there stays."""
    if is_first_process() and not options.resume:
        (options.work / _RECORD).unlink(missing_ok=True)
        with suppress(OSError):
            options.work.rmdir()  # only if it is empty


def _end_of_text(config: SalaConfig, stops: frozenset[int]) -> int:
    known = [*config.eos_token_id, *sorted(stops)]
    if not known:
        raise InputError("model", "has no end token", "set eos_token_id in its config.json")
    return known[0]


def _tell_skipped(path: Path, problems: list[Problem], ears: Ears) -> None:
    if problems:
        lines = ", ".join(str(problem.line) for problem in problems[:10]) + (" …" if len(problems) > 10 else "")
        ears.say(f"{path}: {len(problems):,} bad records left out (lines {lines})")


def rows_of(examples: list[Example], options: FinetuneOptions) -> Rows:
    return Rows(pack(examples, options.max_length) if options.packing else [(example,) for example in examples])


def describe_data(train: list[Example], held: list[Example], options: FinetuneOptions) -> str:
    rows = rows_of(train, options)
    text = f"{len(train):,} examples in {len(rows):,} rows, {rows.num_tokens:,} tokens, {rows.num_learnt:,} learnt"
    return f"{text}; {len(held):,} held out" if held else text


def estimate_for(options: FinetuneOptions, config: SalaConfig, device: torch.device) -> TuningEstimate:
    from sala.lab.finetune.subject import find_targets, training_dtype

    dtype = training_dtype(options, config, device)
    tuning = Tuning(
        method=options.method,
        num_tokens=options.max_length,
        batch=options.batch,
        rank=options.rank,
        targets=tuple(find_targets(options.targets, config)) if options.has_adapter else (),
        optimizer=options.optimizer,
        bits=options.bits,
        element_bytes=dtype.itemsize,
        compute_bytes=4 if device.type == "cpu" else 2,
        has_checkpointing=options.checkpointing,
        loss_rows=options.loss_rows,
    )
    return estimate_tuning(config, expected_tensors(config), tuning)


def describe_memory(needed: TuningEstimate, device: torch.device) -> list[str]:
    """What will be needed, and a warning if it is more than there is. Shared weights are counted as if not shared."""
    from sala.backends.torch.executor import free_bytes

    free = free_bytes(device)
    parts = (
        ("weights", needed.weights + needed.adapter),
        ("gradients", needed.gradients),
        ("optimizer", needed.optimizer),
        ("activations", needed.activations + needed.loss),
    )
    lines = [f"memory {_size(needed.total)}: " + ", ".join(f"{name} {_size(count)}" for name, count in parts if count)]
    if needed.total / num_processes() > free:
        lines.append(f"that is more than the {_size(free)} that are free: see sala estimate --finetune")
    return lines


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def _run(
    options: FinetuneOptions, path: Path, train: list[Example], held: list[Example], device: torch.device, ears: Ears
) -> Path:
    from sala.lab.finetune.subject import load_subject
    from sala.lab.finetune.trainer import Interruption

    rows, held_rows = rows_of(train, options), rows_of(held, options) if held else None
    arguments = training_arguments(options, device, len(rows), held_rows is not None)
    model = load_subject(path, options, find_home(arguments, device))
    with Interruption(arguments.device, ears.say) as interruption:
        trainer = make_trainer(model, arguments, rows, held_rows, options, ears, interruption)
        train_to_end(trainer, options, interruption, ears)
    finish(trainer, options, path, len(train), len(held), ears)
    return options.output


def find_home(arguments: Any, device: torch.device) -> torch.device:
    """Where the weights are loaded to: sharded ones are put in place by Accelerate."""
    if arguments.parallel_mode.value == "distributed" and not _is_sharded(arguments):
        return arguments.device
    return device if num_processes() == 1 else torch.device("cpu")


def train_to_end(trainer: Any, options: FinetuneOptions, interruption: Any, ears: Ears) -> None:
    """From the last checkpoint if the run goes on; measured at the end if there is something to measure on."""
    last = last_checkpoint(options.work) if options.resume else None
    if last is not None:
        ears.say(f"going on from {last.name}")
    trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    if interruption.is_stopped:
        raise Stopped(f"stopped after update {trainer.state.global_step}", "the same command with --resume goes on")
    if trainer.eval_dataset is not None and not _is_measured(trainer.state):
        trainer.evaluate()


def _is_measured(state: Any) -> bool:
    """Whether the loss of what was held out is known at the end."""
    return any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)


def _is_sharded(arguments: Any) -> bool:
    plugin = getattr(arguments, "fsdp_config", None)
    is_fsdp = bool(arguments.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    is_deepspeed = bool(arguments.deepspeed) or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    return is_fsdp or is_deepspeed or bool(plugin and plugin.get("version") and arguments.fsdp)


def training_arguments(
    options: FinetuneOptions, device: torch.device, num_rows: int, has_eval: bool, kind: Any = None, **more: Any
) -> Any:
    """TrainingArguments, or a `kind` of them that knows `more`."""
    from transformers import TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    total = count_steps(options, num_rows)
    every = max(1, total // 10)
    optimizer = OPTIMIZERS.get(options.optimizer, "adamw_torch_fused" if device.type == "cuda" else "adamw_torch")
    arguments = (kind or TrainingArguments)(
        output_dir=str(options.work),
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        num_train_epochs=options.epochs,
        max_steps=options.steps or -1,
        learning_rate=options.rate,
        lr_scheduler_type=options.schedule if options.schedule != "constant" else "constant_with_warmup",
        warmup_steps=round(options.warmup * total),
        weight_decay=options.weight_decay,
        max_grad_norm=options.clip,
        optim=optimizer,
        seed=options.seed,
        data_seed=options.seed,
        bf16=_is_mixed(options, device),
        use_cpu=device.type == "cpu",
        gradient_checkpointing=options.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if options.checkpointing else None,
        eval_strategy="steps" if has_eval else "no",
        eval_steps=options.eval_every or every,
        eval_on_start=has_eval and not options.resume,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=options.save_every or every,
        save_total_limit=2,
        logging_steps=options.log_every,
        logging_nan_inf_filter=False,
        deepspeed=str(options.deepspeed) if options.deepspeed is not None else None,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        report_to="none",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device.type == "cuda",
        **more,
    )
    if num_processes() == 1:
        arguments._n_gpu = min(1, arguments.n_gpu)  # several GPUs take a launcher; threads in one process are slow
    return arguments


def _is_mixed(options: FinetuneOptions, device: torch.device) -> bool:
    """Whether products are computed in bf16 with weights of more bits: nothing is to be cast where all have 16."""
    if device.type != "cuda" or options.dtype == "float16" or not torch.cuda.is_bf16_supported():
        return False
    is_narrow = options.dtype == "bfloat16" or (options.dtype == "auto" and options.optimizer == "adamw-bf16")
    return options.has_adapter or not is_narrow


def count_steps(options: FinetuneOptions, num_rows: int) -> int:
    """Updates of the whole run."""
    if options.steps is not None:
        return options.steps
    batches = math.ceil(num_rows / (options.batch * num_processes()))
    return math.ceil(options.epochs * math.ceil(batches / options.accumulate))


def make_trainer(
    model: Any,
    arguments: Any,
    rows: Rows,
    held: Rows | None,
    options: FinetuneOptions,
    ears: Ears,
    *callbacks: Any,
) -> Any:
    from transformers.trainer_callback import PrinterCallback

    from sala.lab.finetune.trainer import Bulletin, FinetuneTrainer

    trainer = FinetuneTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=held,
        data_collator=collate,
        callbacks=[Bulletin(ears.progress), *callbacks],
        has_narrow_memory=options.optimizer == "adamw-bf16",
        remedy=f"the last good checkpoint is in {options.work}; try a lower --lr in another run",
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def last_checkpoint(work: Path) -> Path | None:
    """The newest one that is complete: its state is written last."""
    found = []
    for path in work.glob("checkpoint-*"):
        try:
            json.loads((path / _STATE).read_text())
            found.append((int(path.name.rpartition("-")[2]), path))
        except (OSError, ValueError):
            continue
    return max(found)[1] if found else None


def finish(trainer: Any, options: FinetuneOptions, path: Path, num_train: int, num_held: int, ears: Ears) -> None:
    from sala.lab.finetune.result import adapter_tensors, read_log, write_result

    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    is_whole = num_processes() == 1 and not _is_sharded(trainer.args)
    state = None if is_whole else trainer.accelerator.get_state_dict(trainer.model_wrapped)  # all processes take part
    if is_first_process():
        log = read_log(trainer.state.log_history)
        settings = model.peft_config["default"] if options.has_adapter else None
        tensors = adapter_tensors(model, state) if options.has_adapter else (state or dict(model.named_parameters()))
        facts = {"updates": trainer.state.global_step, "examples": num_train, "held_out": num_held}
        write_result(tensors, settings, options, path, log, facts)
        shutil.rmtree(options.work, ignore_errors=True)
        ears.say(f"ready: {options.output}")
    trainer.accelerator.wait_for_everyone()
