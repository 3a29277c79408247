"""Preference training: which of two answers is better (DPO), or whether an answer is good (KTO), trained by TRL.

Files are read as in `dialogues`. Records have the fields of TRL or of LLaMA-Factory:

DPO  {"messages": […], "chosen": {…}, "rejected": {…}} or {"prompt": …, "chosen": …, "rejected": …}; without a prompt,
     `chosen` and `rejected` are whole conversations that are the same up to the answer
KTO  {"messages": […, the answer], "label": true} or {"prompt": …, "completion": …, "label": false}

A prompt or an answer is a text, a message or a list of messages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sala.backends.torch.loader import pick_device
from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.finetune.dialogues import Problem, ReaderOptions, check_dialogue, load_records
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.training import (
    FinetuneCallbacks,
    build_trainer,
    describe_memory,
    estimate_for,
    loading_device,
    read_data,
    train_to_end,
    training_arguments,
    write_outputs,
)

Message = dict[str, Any]
Record = dict[str, Any]
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # LLaMA-Factory's names


@dataclass(frozen=True, slots=True)
class Preference:
    """A record in TRL's format (`row`): lists of messages and, for a single answer, a label."""

    row: Record
    line: int


def load_preferences(
    path: Path,
    reader: ReaderOptions,
    skip_bad: bool = False,
    note: Callable[[int], None] = lambda count: None,
    *,
    objective: str,
) -> tuple[list[Preference], list[Problem]]:
    """Return the preferences of a file and its bad records; raise BadData if there are any, unless `skip_bad`."""

    def parse(record: Record, line: int) -> list[Preference]:
        return [Preference(_read(record, objective, reader), line)]

    return load_records(path, parse, skip_bad, note)


def _read(record: Mapping[str, Any], objective: str, reader: ReaderOptions) -> Record:
    prompt, answers, rest = _SHAPES[objective](record)
    tools = record.get("tools")
    if not prompt:
        raise InputError("prompt", "is missing", f"give {_EXAMPLES[objective]}")
    for name, answer in answers.items():
        if not answer or answer[0].get("role") != "assistant":
            raise InputError(name, "is not an assistant's answer", f"give {_EXAMPLES[objective]}")
        check_dialogue([*prompt, *answer], tools)
        _check_text([*prompt, *answer], tools, reader)
    return {"prompt": prompt, **answers, **rest, **({} if tools is None else {"tools": json.dumps(tools)})}


def _read_pair(record: Mapping[str, Any]) -> tuple[list[Message], dict[str, list[Message]], Record]:
    prompt = _turns(_first(record, "messages", "conversations", "prompt"), "user")
    chosen, rejected = (_turns(record.get(name), "assistant") for name in ("chosen", "rejected"))
    if not prompt:
        count = _count_same(chosen, rejected)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    if chosen == rejected:
        raise InputError("chosen", "and rejected are the same", "give two different answers")
    return prompt, {"chosen": chosen, "rejected": rejected}, {}


def _read_mark(record: Mapping[str, Any]) -> tuple[list[Message], dict[str, list[Message]], Record]:
    label = _first(record, "label", "kto_tag")
    if not isinstance(label, bool):
        raise InputError("label", "is missing" if label is None else f"is {label!r}", "give true (good) or false (bad)")
    prompt = _turns(_first(record, "messages", "conversations", "prompt"), "user")
    answer = _turns(record.get("completion"), "assistant")
    if not answer:
        prompt, answer = prompt[:-1], prompt[-1:]
    return prompt, {"completion": answer}, {"label": label}


_SHAPES: dict[str, Callable[[Mapping[str, Any]], tuple[list[Message], dict[str, list[Message]], Record]]]
_SHAPES = {"dpo": _read_pair, "kto": _read_mark}
_EXAMPLES = {
    "dpo": '{"messages": […], "chosen": {…}, "rejected": {…}}',
    "kto": '{"messages": […, the answer], "label": true}',
}


def _first(record: Mapping[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _turns(value: Any, role: str) -> list[Message]:
    """Return a text (as a message of `role`), a message or a list of messages as a list of messages."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, Sequence) or not all(isinstance(turn, Mapping) for turn in turns):
        raise InputError(
            "messages", "must be a text, a message or a list of messages", 'e.g. [{"role": "user", "content": "Hello"}]'
        )
    return [_message(turn) for turn in turns]


def _message(turn: Mapping[str, Any]) -> Message:
    if "from" not in turn:
        return dict(turn)
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}


def _count_same(one: Sequence[Message], other: Sequence[Message]) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _check_text(messages: Sequence[Message], tools: Any, reader: ReaderOptions) -> None:
    """Raise InputError if TRL, which encodes the messages itself, would cut them or read text as control tokens."""
    tokenizer = reader.tokenizer
    options = {} if tools is None else {"tools": tools}
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, **options)
    if len(ids) > reader.max_length and not reader.cut_long:
        raise InputError(
            "conversation", f"has {len(ids):,} tokens", f"raise --max-length ({reader.max_length:,}), or --cut-long"
        )
    text = tokenizer.render_chat(messages, add_generation_prompt=False, **options)
    if tokenizer.encode(text, bos=False, parse_special=True) != ids:
        raise InputError("conversation", "contains the text of a control token", "write it differently")


def train_preferences(options: FinetuneOptions, path: Path, config: SalaConfig, callbacks: FinetuneCallbacks) -> Path:
    """Run to the end, and return the directory of the result."""
    from sala.lab.finetune.target import load_base
    from sala.lab.finetune.trainer import InterruptCallback

    if options.objective == "kto" and options.batch < 2:
        callbacks.message("kto compares the answers of a batch: using --batch 2")
        options = replace(options, batch=2)
    train, held = read_data(options, path, config, callbacks, partial(load_preferences, objective=options.objective))
    device = pick_device(options.device)
    callbacks.message(f"{len(train):,} preferences" + (f"; {len(held):,} held out" if held else ""))
    doubled = replace(options, batch=2 * options.batch)  # two answers, or an answer and its KL estimate
    for line in describe_memory(estimate_for(doubled, config, device), device):
        callbacks.message(line)
    arguments = _arguments(options, device, train, bool(held))
    with InterruptCallback(arguments.device, callbacks.message) as interrupt:
        model = load_base(path, options, loading_device(arguments, device))
        trainer = _make_trainer(model, arguments, train, held, options, path, callbacks, interrupt)
        train_to_end(trainer, options, interrupt, callbacks)
    write_outputs(trainer, options, path, len(train), len(held), callbacks)
    return options.output


def _arguments(options: FinetuneOptions, device: torch.device, train: list[Preference], has_eval: bool) -> Any:
    """Return TRL's arguments.

    The reference model is the model without its adapter. In full fine-tuning its log-probabilities are computed before
    the training, so that there is never a second model in memory.
    """
    import trl

    return training_arguments(
        options,
        device,
        len(train),
        has_eval,
        getattr(trl, _TRAINERS[options.objective][0]),
        beta=options.beta,
        max_length=options.max_length,
        precompute_ref_log_probs=not options.has_adapter,
        **(_class_weights(train) if options.objective == "kto" else {}),
    )


def _make_trainer(
    model: Any,
    arguments: Any,
    train: list[Preference],
    held: list[Preference],
    options: FinetuneOptions,
    path: Path,
    callbacks: FinetuneCallbacks,
    *more: Any,
) -> Any:
    import trl
    from transformers import AutoTokenizer

    from sala.lab.finetune.target import adapter_settings, find_targets
    from sala.plugins.transformers import register

    register()
    targets = find_targets(options.targets, SalaConfig.load(path)) if options.has_adapter else []
    kind = _trainer_class(getattr(trl, _TRAINERS[options.objective][1]))
    settings = {
        "train_dataset": _table(train),
        "eval_dataset": _table(held) if held else None,
        "processing_class": AutoTokenizer.from_pretrained(path),
        "peft_config": adapter_settings(options, targets) if options.has_adapter else None,
    }
    return build_trainer(kind, model, arguments, options, callbacks, *more, **settings)


_TRAINERS = {"dpo": ("DPOConfig", "DPOTrainer"), "kto": ("KTOConfig", "KTOTrainer")}


def _trainer_class(kind: Any) -> Any:
    """Return a subclass of TRL's trainer that also behaves as FinetuneTrainer."""
    from sala.lab.finetune.trainer import FinetuneTrainer

    class PreferenceTrainer(FinetuneTrainer, kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.model_accepts_loss_kwargs = False  # these losses average over answers, not over tokens

    return PreferenceTrainer


def _class_weights(train: Sequence[Preference]) -> dict[str, float]:
    """Return weights for KTO that balance good and bad answers."""
    good = sum(one.row["label"] for one in train)
    bad = len(train) - good
    if not good or not bad or good == bad:
        return {}
    return {"desirable_weight": round(bad / good, 2)} if good < bad else {"undesirable_weight": round(good / bad, 2)}


def _table(preferences: Sequence[Preference]) -> Any:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    names = {name: None for one in preferences for name in one.row}  # not every row has tools
    return Dataset.from_list([names | one.row for one in preferences])
