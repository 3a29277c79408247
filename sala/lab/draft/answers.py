"""The training data of a draft head: the model's own answers to prompts, and given texts.

A record of the data is {"messages": […]}, {"prompt": …} or {"text": …}. The model answers prompts and conversations; it
replaces an answer that a conversation ends with. A text is used unchanged. Answers are written to a file as they
complete, so that a resumed run only writes the missing ones.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sala.engine.requests import Call
from sala.errors import ContextTooLong, InputError, writing
from sala.lab.finetune.dialogues import BadData, Problem, read_records
from sala.lab.train.data import Array, TokenStream
from sala.llm import LLM
from sala.protocol import Sampling

OnAnswer = Callable[[int, int], None]  # (done, all)
TEMPERATURES = (0.0, 0.3, 0.7)  # used in turn, unless the user gives one


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The token ids of a record, and whether the model answers them."""

    ids: tuple[int, ...]
    is_answered: bool
    kind: str


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """Tokens of a prompt and its answer; the head has a loss from `start` on."""

    tokens: tuple[int, ...]
    start: int
    kind: str


def read_prompts(path: Path, llm: LLM, longest: int) -> list[PromptRecord]:
    """Return the records of a file as tokens, at most `longest` of each. Raise BadData with all bad records."""
    found: list[PromptRecord] = []
    problems: list[Problem] = []
    for line, record in read_records(path):
        try:
            found.append(_prompt(record, llm, longest))
        except InputError as error:
            problems.append(Problem(line, str(error)))
    if not found and not problems:
        problems.append(Problem(1, "the file is empty"))
    if problems:
        raise BadData(path, problems)
    return found


def _prompt(record: dict[str, Any] | Problem, llm: LLM, longest: int) -> PromptRecord:
    if isinstance(record, Problem):
        raise InputError("record", record.text)
    kind = str(record.get("kind", ""))
    if isinstance(record.get("text"), str):
        if not record["text"]:
            raise InputError("record", "has an empty text", "leave it out")
        return PromptRecord(tuple(llm.tokenizer.encode(record["text"])[:longest]), False, kind or "text")
    messages = record.get("messages")
    if isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise InputError("record", "has no messages, prompt or text", "see docs/guides/speculation.md")
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    try:
        ids = llm.encode_chat(messages, tools=record.get("tools"))
    except ContextTooLong as error:
        count = f"{error.num_tokens:,}" if error.is_whole else f"more than {error.num_tokens:,}"
        raise InputError("record", f"has {count} tokens", f"raise --row ({longest:,})") from None
    if len(ids) >= longest:
        raise InputError("record", f"has {len(ids):,} tokens", f"raise --row ({longest:,})")
    return PromptRecord(tuple(ids), True, kind or "chat")


def write_answers(
    llm: LLM, prompts: Sequence[PromptRecord], file: Path, sampling: Sampling, longest: int, on_answer: OnAnswer,
    temperatures: Sequence[float] = TEMPERATURES,
) -> list[AnsweredPrompt]:  # fmt: skip
    """Answer the prompts that the file does not answer yet, and return all answers in the order of the prompts."""
    known = dict(read_answers(file))
    missing = [number for number in range(len(prompts)) if number not in known]

    def calls() -> Iterator[Call]:
        for number in missing:
            prompt = prompts[number]
            if prompt.is_answered:
                room = min(sampling.max_tokens, longest - len(prompt.ids))
                own: dict[str, Any] = {
                    "temperature": temperatures[number % len(temperatures)],
                    "seed": number,
                    "max_tokens": room,
                }
                yield Call(number, replace(sampling, **own), list(prompt.ids))

    with writing(file), file.open("a", encoding="utf-8") as handle:

        def keep(number: int, one: AnsweredPrompt) -> None:
            known[number] = one
            handle.write(json.dumps([number, list(one.tokens), one.start, one.kind]) + "\n")
            handle.flush()
            on_answer(len(known), len(prompts))

        for number in missing:
            if not prompts[number].is_answered:
                keep(number, AnsweredPrompt(prompts[number].ids, 1, prompts[number].kind))
        for number, result in llm.many(calls()):
            if isinstance(result, Exception):
                raise result
            ids = prompts[number].ids
            keep(number, AnsweredPrompt((*ids, *result.token_ids), len(ids), prompts[number].kind))
    return [known[number] for number in range(len(prompts))]


def read_answers(file: Path) -> Iterator[tuple[int, AnsweredPrompt]]:
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8").split("\n")[:-1]:  # a killed run may leave an incomplete last line
        try:
            number, tokens, start, kind = json.loads(line)
        except ValueError:  # a later run has appended to an incomplete line
            continue
        yield number, AnsweredPrompt(tuple(tokens), start, kind)


def as_stream(rows: Sequence[AnsweredPrompt]) -> TokenStream:
    """Return the rows as one stream, with a loss on the tokens that the model wrote."""
    tokens: list[Array] = [np.asarray(row.tokens, np.int64) for row in rows]
    masks = [np.arange(len(row.tokens)) >= row.start for row in rows]
    return TokenStream(np.concatenate(tokens), np.concatenate(masks), np.cumsum([len(row.tokens) for row in rows]))


def frequent_tokens(rows: Sequence[AnsweredPrompt], vocab_size: int, count: int) -> Array:
    """Return the `count` most frequent tokens of the answers, ascending; of equally frequent ones the lowest."""
    counts = np.zeros(vocab_size, np.int64)
    for row in rows:
        counts += np.bincount(np.asarray(row.tokens[row.start :], np.int64), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:count])
