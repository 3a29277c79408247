"""What every objective of fine-tuning shares: callbacks, data, memory estimate, the Trainer's arguments, the result."""

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sala.backends.memory import Tuning, TuningEstimate, estimate_tuning
from sala.checkpoint.names import expected_tensors
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError, SalaError
from sala.lab.finetune.dialogues import Problem, ReaderOptions, load_examples, split_examples
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.train.loop import Progress
from sala.llm import read_stop_ids
from sala.text.tokenizer import Tokenizer

OPTIMIZERS = {"adafactor": "adafactor", "adamw-8bit": "adamw_bnb_8bit"}
_RECORD = "options.json"
_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class FinetuneCallbacks:
    """Called with status messages, with the training progress, and with the number of records read."""

    message: Callable[[str], None] = lambda text: None
    progress: Callable[[Progress], None] = lambda progress: None
    reading: Callable[[int], None] = lambda count: None


class Stopped(SalaError):
    """Raised when a run was interrupted; its state is saved."""


def is_main_process() -> bool:
    """Return whether this process reports and writes; launchers set RANK in the environment."""
    return int(os.environ.get("RANK", "0")) == 0


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_outputs(options: FinetuneOptions) -> None:
    """Record the options in the work directory.

    Raise CheckpointError if a file would be overwritten, InputError if a resumed run has other options.
    """
    if options.output.exists() or options.output.is_symlink():
        raise CheckpointError(f"{options.output} exists already", "choose another directory, or remove it yourself")
    record = options.work / _RECORD
    if options.resume:
        _check_resumed(options, record)
        return
    if last_checkpoint(options.work) is not None:
        raise CheckpointError(f"{options.work} holds an unfinished run", "add --resume, or remove it yourself")
    if options.work.exists() and not _is_ours(options.work):
        raise CheckpointError(f"{options.work} holds other files", "choose another output, or move them away")
    options.work.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(options.persistent(), indent=1) + "\n")


def _check_resumed(options: FinetuneOptions, record: Path) -> None:
    if not record.is_file():
        raise InputError("resume", f"finds no run in {options.work}", "start without --resume")
    before, now = json.loads(record.read_text()), json.loads(json.dumps(options.persistent()))
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        was = ", ".join(f"{name} was {before.get(name)}" for name in changed)
        raise InputError("resume", f"needs the options of the run: {was}", "repeat them, or start a new run")


def _is_ours(work: Path) -> bool:
    """Return whether all files there come from a run that was killed before its first checkpoint was complete."""
    return work.is_dir() and all(path.name == _RECORD or path.match("checkpoint-*") for path in work.iterdir())


def last_checkpoint(work: Path) -> Path | None:
    """Return the newest complete checkpoint: the Trainer writes its state file last."""
    found = []
    for path in work.glob("checkpoint-*"):
        try:
            json.loads((path / _STATE).read_text())
            found.append((int(path.name.rpartition("-")[2]), path))
        except (OSError, ValueError):
            continue
    return max(found)[1] if found else None


def read_data(
    options: FinetuneOptions, path: Path, config: SalaConfig, callbacks: FinetuneCallbacks, load: Any = load_examples
) -> tuple[list[Any], list[Any]]:
    """Return the examples to train on and to evaluate on; raise BadData if either file has bad lines."""
    stops = read_stop_ids(path, config)
    tokenizer = Tokenizer.load(path)
    try:
        reader = ReaderOptions(tokenizer, options.max_length, stops, _end_of_text(config, stops), options.cut_long)
        train, problems = load(options.train, reader, options.skip_bad, callbacks.reading)
        _report_skipped(options.train, problems, callbacks)
        held: list[Any] = []
        if options.eval is not None:
            held, problems = load(options.eval, reader, options.skip_bad, callbacks.reading)
            _report_skipped(options.eval, problems, callbacks)
        elif options.eval_share:
            train, held = split_examples(train, options.eval_share, options.seed)
    except SalaError:
        _remove_empty_work(options)
        raise
    finally:
        tokenizer.close()
    return train, held


def _remove_empty_work(options: FinetuneOptions) -> None:
    """Remove the work directory of a run that never started, unless it holds other files."""
    if is_main_process() and not options.resume:
        (options.work / _RECORD).unlink(missing_ok=True)
        with suppress(OSError):
            options.work.rmdir()  # fails unless it is empty


def _end_of_text(config: SalaConfig, stops: frozenset[int]) -> int:
    known = [*config.eos_token_id, *sorted(stops)]
    if not known:
        raise InputError("model", "has no end token", "set eos_token_id in its config.json")
    return known[0]


def _report_skipped(path: Path, problems: list[Problem], callbacks: FinetuneCallbacks) -> None:
    if problems:
        lines = ", ".join(str(problem.line) for problem in problems[:10]) + (" …" if len(problems) > 10 else "")
        callbacks.message(f"{path}: {len(problems):,} bad records left out (lines {lines})")


def estimate_for(options: FinetuneOptions, config: SalaConfig, device: torch.device) -> TuningEstimate:
    from sala.lab.finetune.target import find_targets, training_dtype

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
    """Return the estimate as lines, with a warning if it exceeds the free memory.

    Tied weights are counted as if they were not tied.
    """
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
        lines.append(f"this exceeds the {_size(free)} of free memory: see sala estimate --finetune")
    return lines


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def training_arguments(
    options: FinetuneOptions, device: torch.device, num_rows: int, has_eval: bool, kind: Any = None, **more: Any
) -> Any:
    """Return TrainingArguments, or a subclass `kind` of it with the arguments `more`."""
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
        arguments._n_gpu = min(1, arguments.n_gpu)  # DataParallel threads are slow; several GPUs need a launcher
    return arguments


def _is_mixed(options: FinetuneOptions, device: torch.device) -> bool:
    """Return whether to use bf16 autocast: weights that are all 16-bit need no casts."""
    if device.type != "cuda" or options.dtype == "float16" or not torch.cuda.is_bf16_supported():
        return False
    is_narrow = options.dtype == "bfloat16" or (options.dtype == "auto" and options.optimizer == "adamw-bf16")
    return options.has_adapter or not is_narrow


def count_steps(options: FinetuneOptions, num_rows: int) -> int:
    """Return the number of updates of the whole run."""
    if options.steps is not None:
        return options.steps
    batches = math.ceil(num_rows / (options.batch * num_processes()))
    return math.ceil(options.epochs * math.ceil(batches / options.accumulate))


def loading_device(arguments: Any, device: torch.device) -> torch.device:
    """Return the device to load the weights to; Accelerate moves sharded ones itself."""
    if arguments.parallel_mode.value == "distributed" and not _is_sharded(arguments):
        return arguments.device
    return device if num_processes() == 1 else torch.device("cpu")


def _is_sharded(arguments: Any) -> bool:
    plugin = getattr(arguments, "fsdp_config", None)
    is_fsdp = bool(arguments.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    is_deepspeed = bool(arguments.deepspeed) or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    return is_fsdp or is_deepspeed or bool(plugin and plugin.get("version") and arguments.fsdp)


def build_trainer(
    kind: Any,
    model: Any,
    arguments: Any,
    options: FinetuneOptions,
    callbacks: FinetuneCallbacks,
    *more: Any,
    **named: Any,
) -> Any:
    """Return a `kind` of FinetuneTrainer that reports its progress; `more` are further Trainer callbacks."""
    from transformers.trainer_callback import PrinterCallback

    from sala.lab.finetune.trainer import ProgressCallback

    trainer = kind(
        model=model,
        args=arguments,
        callbacks=[ProgressCallback(callbacks.progress), *more],
        has_bf16_state=options.optimizer == "adamw-bf16",
        remedy=f"the last good checkpoint is in {options.work}; try a lower --lr in another run",
        **named,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_to_end(trainer: Any, options: FinetuneOptions, interrupt: Any, callbacks: FinetuneCallbacks) -> None:
    """Train, from the last checkpoint if the run is resumed, and evaluate at the end.

    Raise Stopped if the run was interrupted.
    """
    last = last_checkpoint(options.work) if options.resume else None
    if last is not None:
        callbacks.message(f"resuming from {last.name}")
    trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    if interrupt.is_stopped:
        raise Stopped(f"stopped after update {trainer.state.global_step}", "repeat the command with --resume")
    if trainer.eval_dataset is not None and not _is_evaluated(trainer.state):
        trainer.evaluate()


def _is_evaluated(state: Any) -> bool:
    """Return whether the final step has an evaluation loss."""
    return any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)


def write_outputs(
    trainer: Any, options: FinetuneOptions, path: Path, num_train: int, num_held: int, callbacks: FinetuneCallbacks
) -> None:
    """Write the result and remove the work directory; every process must call this."""
    from sala.lab.finetune.result import adapter_tensors, read_log, write_result

    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    is_whole = num_processes() == 1 and not _is_sharded(trainer.args)
    state = None if is_whole else trainer.accelerator.get_state_dict(trainer.model_wrapped)  # a collective operation
    if is_main_process():
        log = read_log(trainer.state.log_history)
        settings = model.peft_config["default"] if options.has_adapter else None
        tensors = adapter_tensors(model, state) if options.has_adapter else (state or dict(model.named_parameters()))
        facts = {"updates": trainer.state.global_step, "examples": num_train, "held_out": num_held}
        write_result(tensors, settings, options, path, log, facts)
        shutil.rmtree(options.work, ignore_errors=True)
        callbacks.message(f"wrote {options.output}")
    trainer.accelerator.wait_for_everyone()
