"""Preferences: which of two answers is better (DPO), or whether an answer is good (KTO). TRL trains, on our model.

A file is read as `dialogues` reads it. Its records have the fields of TRL or of LLaMA-Factory:

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
from sala.errors import InputError, SalaError
from sala.lab.finetune.dialogues import BadData, Problem, Reading, check_dialogue, read_records
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.run import (
    Ears,
    describe_memory,
    estimate_for,
    find_home,
    finish,
    read_data,
    train_to_end,
    training_arguments,
)

Message = dict[str, Any]
Row = dict[str, Any]
_NOTE_EVERY = 100
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # as LLaMA-Factory's data may call them


@dataclass(frozen=True, slots=True)
class Preference:
    """`row` is what TRL takes: lists of messages, and a label if it is one answer."""

    row: Row
    line: int


def load_preferences(
    path: Path,
    reading: Reading,
    skips_bad: bool = False,
    note: Callable[[int], None] = lambda count: None,
    *,
    objective: str,
) -> tuple[list[Preference], list[Problem]]:
    """All preferences of a file, and what is wrong with the others: an error unless they may be skipped."""
    found: list[Preference] = []
    problems: list[Problem] = []
    for number, (line, record) in enumerate(read_records(path)):
        if number % _NOTE_EVERY == 0:
            note(number)
        if isinstance(record, Problem):
            problems.append(record)
            continue
        try:
            found.append(Preference(_read(record, objective, reading), line))
        except SalaError as error:
            problems.append(Problem(line, str(error)))
    if not found and not problems:
        problems.append(Problem(1, "the file is empty"))
    if problems and not (skips_bad and found):
        raise BadData(path, problems)
    return found, problems


def _read(record: Mapping[str, Any], objective: str, reading: Reading) -> Row:
    prompt, answers, rest = _SHAPES[objective](record)
    tools = record.get("tools")
    if not prompt:
        raise InputError("prompt", "is missing", f"give {_EXAMPLES[objective]}")
    for name, answer in answers.items():
        if not answer or answer[0].get("role") != "assistant":
            raise InputError(name, "is no answer of the assistant", f"give {_EXAMPLES[objective]}")
        check_dialogue([*prompt, *answer], tools)
        _check_text([*prompt, *answer], tools, reading)
    return {"prompt": prompt, **answers, **rest, **({} if tools is None else {"tools": json.dumps(tools)})}


def _read_pair(record: Mapping[str, Any]) -> tuple[list[Message], dict[str, list[Message]], Row]:
    prompt = _turns(_first(record, "messages", "conversations", "prompt"), "user")
    chosen, rejected = (_turns(record.get(name), "assistant") for name in ("chosen", "rejected"))
    if not prompt:
        count = _count_same(chosen, rejected)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    if chosen == rejected:
        raise InputError("chosen", "and rejected are the same", "there is nothing to prefer")
    return prompt, {"chosen": chosen, "rejected": rejected}, {}


def _read_mark(record: Mapping[str, Any]) -> tuple[list[Message], dict[str, list[Message]], Row]:
    label = _first(record, "label", "kto_tag")
    if not isinstance(label, bool):
        raise InputError("label", "is missing" if label is None else f"is {label!r}", "give true (good) or false (bad)")
    prompt = _turns(_first(record, "messages", "conversations", "prompt"), "user")
    answer = _turns(record.get("completion"), "assistant")
    if not answer:
        prompt, answer = prompt[:-1], prompt[-1:]
    return prompt, {"completion": answer}, {"label": label}


_SHAPES: dict[str, Callable[[Mapping[str, Any]], tuple[list[Message], dict[str, list[Message]], Row]]]
_SHAPES = {"dpo": _read_pair, "kto": _read_mark}
_EXAMPLES = {
    "dpo": '{"messages": […], "chosen": {…}, "rejected": {…}}',
    "kto": '{"messages": […, the answer], "label": true}',
}


def _first(record: Mapping[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _turns(value: Any, role: str) -> list[Message]:
    """A text, a message or a list of messages → messages; a text is `role`'s."""
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


def _check_text(messages: Sequence[Message], tools: Any, reading: Reading) -> None:
    """TRL encodes these messages itself: it must find them short enough, and no control token where text is meant."""
    tokenizer = reading.tokenizer
    options = {} if tools is None else {"tools": tools}
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, **options)
    if len(ids) > reading.max_length and not reading.may_cut:
        raise InputError(
            "conversation", f"has {len(ids):,} tokens", f"raise --max-length ({reading.max_length:,}), or --cut-long"
        )
    text = tokenizer.render_chat(messages, add_generation_prompt=False, **options)
    if tokenizer.encode(text, bos=False, parse_special=True) != ids:
        raise InputError("conversation", "spells a control token of the model", "write it differently")


def learn_preferences(options: FinetuneOptions, path: Path, config: SalaConfig, ears: Ears) -> Path:
    """Run to the end, and return the directory of the result."""
    from sala.lab.finetune.subject import load_base
    from sala.lab.finetune.trainer import Interruption

    if options.objective == "kto" and options.batch < 2:
        ears.say("kto compares the answers of a batch: it takes 2 at a time")
        options = replace(options, batch=2)
    train, held = read_data(options, path, config, ears, partial(load_preferences, objective=options.objective))
    device = pick_device(options.device)
    ears.say(f"{len(train):,} preferences" + (f"; {len(held):,} held out" if held else ""))
    twofold = replace(options, batch=2 * options.batch)  # both answers, or one and the estimate of a KL divergence
    for line in describe_memory(estimate_for(twofold, config, device), device):
        ears.say(line)
    arguments = _arguments(options, device, train, bool(held))
    with Interruption(arguments.device, ears.say) as interruption:
        model = load_base(path, options, find_home(arguments, device))
        trainer = _make_trainer(model, arguments, train, held, options, path, ears, interruption)
        train_to_end(trainer, options, interruption, ears)
    finish(trainer, options, path, len(train), len(held), ears)
    return options.output


def _arguments(options: FinetuneOptions, device: torch.device, train: list[Preference], has_eval: bool) -> Any:
    """The reference is the model with its adapter off. Where all weights learn it says what it has to say before
    they do, so that there is never a second model in memory."""
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
        **(_weigh(train) if options.objective == "kto" else {}),
    )


def _make_trainer(
    model: Any,
    arguments: Any,
    train: list[Preference],
    held: list[Preference],
    options: FinetuneOptions,
    path: Path,
    ears: Ears,
    *callbacks: Any,
) -> Any:
    import trl
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    from sala.lab.finetune.subject import adapter_settings, find_targets
    from sala.lab.finetune.trainer import Bulletin
    from sala.plugins.transformers import register

    register()
    targets = find_targets(options.targets, SalaConfig.load(path)) if options.has_adapter else []
    trainer = _watched(getattr(trl, _TRAINERS[options.objective][1]))(
        model=model,
        args=arguments,
        train_dataset=_table(train),
        eval_dataset=_table(held) if held else None,
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=adapter_settings(options, targets) if options.has_adapter else None,
        callbacks=[Bulletin(ears.progress), *callbacks],
        has_narrow_memory=options.optimizer == "adamw-bf16",
        remedy=f"the last good checkpoint is in {options.work}; try a lower --lr in another run",
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


_TRAINERS = {"dpo": ("DPOConfig", "DPOTrainer"), "kto": ("KTOConfig", "KTOTrainer")}


def _watched(kind: Any) -> Any:
    """TRL's trainer with the manners of ours."""
    from sala.lab.finetune.trainer import FinetuneTrainer

    class PreferenceTrainer(FinetuneTrainer, kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.model_accepts_loss_kwargs = False  # these losses are means over answers, not over tokens

    return PreferenceTrainer


def _weigh(train: Sequence[Preference]) -> dict[str, float]:
    """kto: the rarer kind of answer counts for more, so that both kinds count the same."""
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
