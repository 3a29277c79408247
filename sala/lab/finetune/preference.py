"""Preference training: which of two answers is better (DPO), or whether an answer is good (KTO), trained by TRL.

Files are read as in `dialogues`. Records have the fields of TRL or of LLaMA-Factory:

DPO  {"messages": […], "chosen": {…}, "rejected": {…}} or {"prompt": …, "chosen": …, "rejected": …}; without a prompt,
     `chosen` and `rejected` are whole conversations that are the same up to the answer
KTO  {"messages": […, the answer], "label": true} or {"prompt": …, "completion": …, "label": false}

A prompt or an answer is a text, a message or a list of messages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.finetune.dialogues import Problem, ReaderOptions, check_dialogue, load_records
from sala.lab.finetune.options import FinetuneOptions

Message = dict[str, Any]
Record = dict[str, Any]
Parts = tuple[list[Message], dict[str, list[Message]], Record]  # prompt, answers by name, and what else there is
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # LLaMA-Factory's names


@dataclass(frozen=True, slots=True)
class Preference:
    """A record in TRL's format (`row`): lists of messages and, for a single answer, a label."""

    row: Record
    line: int


def load_preferences(
    path: Path, reader: ReaderOptions, skip_bad: bool = False, *, objective: str
) -> tuple[list[Preference], list[Problem]]:
    """Return the preferences of a file and its bad records; raise BadData if there are any, unless `skip_bad`."""
    return load_records(path, lambda record, line: [Preference(_read(record, objective, reader), line)], skip_bad)


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


def _read_pair(record: Mapping[str, Any]) -> Parts:
    prompt = _turns(_first(record, "messages", "conversations", "prompt"), "user")
    chosen, rejected = (_turns(record.get(name), "assistant") for name in ("chosen", "rejected"))
    if not prompt:
        pairs = list(zip(chosen, rejected, strict=False))
        count = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    if chosen == rejected:
        raise InputError("chosen", "and rejected are the same", "give two different answers")
    return prompt, {"chosen": chosen, "rejected": rejected}, {}


def _read_mark(record: Mapping[str, Any]) -> Parts:
    label = _first(record, "label", "kto_tag")
    if not isinstance(label, bool):
        raise InputError("label", "is missing" if label is None else f"is {label!r}", "give true (good) or false (bad)")
    prompt = _turns(_first(record, "messages", "conversations", "prompt"), "user")
    answer = _turns(record.get("completion"), "assistant")
    if not answer:
        prompt, answer = prompt[:-1], prompt[-1:]
    return prompt, {"completion": answer}, {"label": label}


_SHAPES: dict[str, Callable[[Mapping[str, Any]], Parts]] = {"dpo": _read_pair, "kto": _read_mark}
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
        example = '[{"role": "user", "content": "Hello"}]'
        raise InputError("messages", "must be a text, a message or a list of messages", f"e.g. {example}")
    return [
        {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")} if "from" in turn else dict(turn)
        for turn in turns
    ]


def _check_text(messages: Sequence[Message], tools: Any, reader: ReaderOptions) -> None:
    """Raise InputError if TRL, which encodes the messages itself, would cut them or read text as control tokens."""
    tokenizer = reader.tokenizer
    options = {} if tools is None else {"tools": tools}
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, **options)
    reader.check_length(len(ids))
    text = tokenizer.render_chat(messages, add_generation_prompt=False, **options)
    if tokenizer.encode(text, bos=False, parse_special=True) != ids:
        raise InputError("conversation", "contains the text of a control token", "write it differently")


def preference_arguments(options: FinetuneOptions, train: Sequence[Preference]) -> dict[str, Any]:
    """Return TRL's class of arguments (`kind`) and what it takes beside those of every training.

    The reference model is the model without its adapter. In full fine-tuning its log-probabilities are computed before
    the training, so that there is never a second model in memory.
    """
    import trl

    return {
        "kind": getattr(trl, f"{options.objective.upper()}Config"),
        "beta": options.beta,
        "max_length": options.max_length,
        "precompute_ref_log_probs": not options.has_adapter,
        **(_class_weights(train) if options.objective == "kto" else {}),
    }


def preference_trainer(
    options: FinetuneOptions, path: Path, train: Sequence[Preference], held: Sequence[Preference]
) -> dict[str, Any]:
    """Return the class of trainer (`kind`) and its data, tokenizer and adapter, which it adds to the model itself."""
    import trl
    from transformers import AutoTokenizer

    from sala.lab.finetune.target import adapter_settings
    from sala.lab.finetune.trainer import FinetuneTrainer
    from sala.plugins.transformers import register

    register()
    bases = (FinetuneTrainer, getattr(trl, f"{options.objective.upper()}Trainer"))
    return {
        "kind": type("PreferenceTrainer", bases, {"averages_tokens": False}),
        "train_dataset": _table(train),
        "eval_dataset": _table(held) if held else None,
        "processing_class": AutoTokenizer.from_pretrained(path),
        "peft_config": adapter_settings(options, SalaConfig.load(path)),
    }


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
