"""The parts of a fine-tuning run: callbacks, work directory, data, memory estimate, the Trainer's arguments."""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sala.backends.memory import Tuning, TuningEstimate, estimate_tuning
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.writer import check_new
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError, SalaError
from sala.generation_config import read_stop_ids
from sala.lab.finetune.dialogues import ReaderOptions, load_examples, split_examples
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.preference import load_preferences
from sala.lab.finetune.target import find_targets, training_dtype
from sala.lab.train.loop import Progress
from sala.lab.train.processes import is_main_process, num_processes
from sala.text.tokenizer import Tokenizer

_OPTIMIZERS = {"adafactor": "adafactor", "adamw-8bit": "adamw_bnb_8bit"}
_RECORD = "options.json"
RECALL = "recall.json"


@dataclass(frozen=True, slots=True)
class FinetuneCallbacks:
    """Called with status messages and with the training progress."""

    message: Callable[[str], None] = lambda text: None
    progress: Callable[[Progress], None] = lambda progress: None


class Stopped(SalaError):
    """Raised when a run was interrupted; its state is saved."""


def check_outputs(options: FinetuneOptions) -> None:
    """Record the options in the work directory.

    Raise CheckpointError if a file would be overwritten, InputError if a resumed run has other options.
    """
    check_new(options.output)
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
    try:
        before = json.loads(record.read_text())
    except (OSError, ValueError):  # there is none, or the run was killed before it began
        raise InputError("resume", f"finds no run in {options.work}", "start without --resume") from None
    now = json.loads(json.dumps(options.persistent()))
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        was = ", ".join(f"{name} was {before.get(name)}" for name in changed)
        raise InputError("resume", f"needs the options of the run: {was}", "repeat them, or start a new run")


def _is_ours(work: Path) -> bool:
    """Return whether all files there come from a run that was killed before its first checkpoint was complete."""
    return work.is_dir() and all(
        path.name in (_RECORD, RECALL) or path.match("checkpoint-*") for path in work.iterdir()
    )


def last_checkpoint(work: Path) -> Path | None:
    """Return the newest complete checkpoint: the Trainer writes its state file last."""
    found = []
    for path in work.glob("checkpoint-*"):
        with suppress(OSError, ValueError):
            json.loads((path / "trainer_state.json").read_text())
            found.append((int(path.name.rpartition("-")[2]), path))
    return max(found)[1] if found else None


def read_data(
    options: FinetuneOptions, path: Path, config: SalaConfig, callbacks: FinetuneCallbacks
) -> tuple[list[Any], list[Any]]:
    """Return the examples or preferences to train on and to evaluate on; raise BadData if a file has bad lines."""
    stops = read_stop_ids(path, config)
    tokenizer = Tokenizer.load(path)
    load: Any = load_examples
    if options.objective != "sft":
        load = partial(load_preferences, objective=options.objective)

    def read(file: Path) -> list[Any]:
        found, problems = load(file, reader, options.skip_bad)
        if problems:
            lines = ", ".join(str(problem.line) for problem in problems[:10]) + (" …" if len(problems) > 10 else "")
            callbacks.message(f"{file}: {len(problems):,} bad records left out (lines {lines})")
        return found

    try:
        ends = [*config.eos_token_id, *sorted(stops)]
        if not ends:
            raise InputError("model", "has no end token", "set eos_token_id in its config.json")
        reader = ReaderOptions(tokenizer, options.max_length, stops, ends[0], options.cut_long)
        train = read(options.train)
        if options.eval_share:
            return split_examples(train, options.eval_share, options.seed)
        return train, [] if options.eval is None else read(options.eval)
    except SalaError:
        if is_main_process() and not options.resume:  # the run never started
            (options.work / _RECORD).unlink(missing_ok=True)
            with suppress(OSError):
                options.work.rmdir()  # fails unless it is empty
        raise
    finally:
        tokenizer.close()


def estimate_for(
    options: FinetuneOptions, config: SalaConfig, device: torch.device, longest: int = 0
) -> TuningEstimate:
    """Return the estimate for rows of `max_length` tokens, or of `longest` if that is more."""
    dtype = training_dtype(options, config, device)
    rows = 1 if options.objective == "sft" else 2  # a preference is two answers, or an answer and its KL estimate
    tuning = Tuning(
        method=options.method,
        num_tokens=max(options.max_length, longest),
        batch=rows * options.batch,
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


def describe_memory(options: FinetuneOptions, config: SalaConfig, device: torch.device, longest: int = 0) -> list[str]:
    """Return the estimate as lines, with a warning if it exceeds the free memory.

    Tied weights are counted as if they were not tied.
    """
    from sala.backends.torch.executor import free_bytes

    def size(count: int) -> str:
        return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"

    needed, free = estimate_for(options, config, device, longest), free_bytes(device)
    parts = {
        "weights": needed.weights + needed.adapter,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "activations": needed.activations + needed.loss,
    }
    lines = [
        f"memory {size(needed.total)}: " + ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    ]
    if needed.total / num_processes() > free:
        lines.append(f"this exceeds the {size(free)} of free memory: see sala estimate --finetune")
    return lines


def training_arguments(
    options: FinetuneOptions, device: torch.device, num_rows: int, has_eval: bool = False, kind: Any = None, **more: Any
) -> Any:
    """Return TrainingArguments, or a subclass `kind` of it with the arguments `more`."""
    from transformers import TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    batches = math.ceil(num_rows / (options.batch * num_processes()))
    total = options.steps or math.ceil(options.epochs * math.ceil(batches / options.accumulate))
    every = max(1, total // 10)
    optimizer = _OPTIMIZERS.get(options.optimizer, "adamw_torch_fused" if device.type == "cuda" else "adamw_torch")
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


def loading_device(arguments: Any, device: torch.device) -> torch.device:
    """Return the device to load the weights to; Accelerate moves sharded ones itself."""
    if arguments.parallel_mode.value == "distributed" and not is_sharded(arguments):
        return arguments.device
    return device if num_processes() == 1 else torch.device("cpu")


def is_sharded(arguments: Any) -> bool:
    is_fsdp = bool(arguments.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    is_deepspeed = bool(arguments.deepspeed) or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    return is_fsdp or is_deepspeed
