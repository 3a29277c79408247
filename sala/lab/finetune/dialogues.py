"""Training examples: conversations or plain texts in a file, checked line by line before the training starts.

A file is a JSON list or has a JSON object per line: {"messages": [{"role": …, "content": …}, …]}, optionally with
"tools", or {"text": …}. Any other file is one plain text. In a conversation the loss covers the assistant's messages,
including the end of each turn; in a text, every token.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sala.errors import InputError, SalaError
from sala.options.sources import read_text
from sala.text.tokenizer import Tokenizer, check_messages, check_tools

Array = np.ndarray[Any, np.dtype[Any]]
ROLES = ("system", "user", "assistant", "tool")
SHOWN = 20  # problems listed in an error message
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Tokens [n] and the mask of those with a loss; the first token, which nothing predicts, has none."""

    tokens: Array
    loss_mask: Array
    line: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Problem:
    line: int
    text: str


class BadData(SalaError):
    """Raised for a file with bad lines; lists all of them."""

    def __init__(self, path: Path, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        listed = [f"{path}, line {problem.line}: {problem.text}" for problem in problems[:SHOWN]]
        rest = f"\nand {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        super().__init__("\n".join(listed) + rest, "correct these lines, or leave them out: --skip-bad")


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How examples are encoded: `eos` ends a text, `stop_ids` end a turn; `cut_long` truncates long conversations."""

    tokenizer: Tokenizer
    max_length: int
    stop_ids: frozenset[int]
    eos: int
    cut_long: bool = False

    def check_length(self, count: int) -> None:
        """Raise InputError for a conversation of too many tokens that must not be truncated."""
        if count > self.max_length and not self.cut_long:
            remedy = f"raise --max-length ({self.max_length:,}), or --cut-long"
            raise InputError("conversation", f"has {count:,} tokens", remedy)


def load_examples(path: Path, reader: ReaderOptions, skip_bad: bool = False) -> tuple[list[Example], list[Problem]]:
    """Return the examples of a file and its bad records; raise BadData as `load_records` does."""
    return load_records(path, lambda record, line: _examples(record, line, reader), skip_bad)


def load_records(
    path: Path, parse: Callable[[dict[str, Any], int], list[_T]], skip_bad: bool
) -> tuple[list[_T], list[Problem]]:
    """Return what `parse` makes of the records of a file, and the bad records.

    Raise BadData if there are bad records, unless `skip_bad` and some records are good.
    """
    found: list[_T] = []
    problems: list[Problem] = []
    for line, record in read_records(path):
        if isinstance(record, Problem):
            problems.append(record)
            continue
        try:
            found += parse(record, line)
        except SalaError as error:
            problems.append(Problem(line, str(error)))
    if not found and not problems:
        problems.append(Problem(1, "the file is empty"))
    if problems and not (skip_bad and found):
        raise BadData(path, problems)
    return found, problems


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    """Yield (line, record) for every record of a file; one that cannot be parsed is yielded as a Problem."""
    text = read_text(path).removeprefix("\ufeff")
    start = text.lstrip()[:1]
    if path.suffix not in (".json", ".jsonl") and start not in ("{", "["):
        if text.strip():
            yield 1, {"text": text}
        return
    source = _read_list(text) if start == "[" and _is_list(text) else _read_lines(text)
    for line, value in source:
        if isinstance(value, Problem | dict):
            yield line, value
        else:
            yield line, Problem(line, f"is not a JSON object but {type(value).__name__}")


def _is_list(text: str) -> bool:
    """Return whether the file is a single list, not a list per line."""
    first = text.lstrip().split("\n", 1)[0].strip()
    try:
        return not isinstance(json.loads(first), list) or first == text.strip()
    except ValueError:
        return True


def _read_lines(text: str) -> Iterator[tuple[int, Any]]:
    for line, piece in enumerate(text.split("\n"), 1):
        if piece.strip():
            try:
                yield line, json.loads(piece)
            except (ValueError, RecursionError) as error:
                yield line, Problem(line, f"is not JSON: {_why(error)}")


def _read_list(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a list, each with its first line; stop at the first element that is not valid JSON."""
    decoder = json.JSONDecoder()
    at = _skip(text, text.index("[") + 1)
    line, counted = 1, 0
    while at < len(text) and text[at] != "]":
        line += text.count("\n", counted, at)
        counted = at
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            place = error.lineno if isinstance(error, json.JSONDecodeError) else line
            yield line, Problem(line, f"is not JSON: {_why(error)} (line {place}); the rest cannot be read")
            return
        yield line, value
        at = _skip(text, end)
        if at < len(text) and text[at] == ",":
            at = _skip(text, at + 1)
        elif at >= len(text) or text[at] != "]":
            line += text.count("\n", counted, at)
            yield line, Problem(line, "the list is not closed, or a comma is missing; the rest cannot be read")
            return
    if at >= len(text):
        yield line, Problem(line, "the list is not closed")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _why(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__


def _examples(record: Mapping[str, Any], line: int, reader: ReaderOptions) -> list[Example]:
    if ("messages" in record) == ("text" in record):
        names = ", ".join(str(name)[:40] for name in list(record)[:8]) or "nothing"
        known = "both messages and text" if "text" in record else f"neither messages nor text, but {names}"
        raise InputError("record", f"has {known}", 'give {"messages": […]} or {"text": "…"}')
    if "text" in record:
        return _text_examples(record["text"], line, reader)
    messages, tools = record["messages"], record.get("tools")
    check_dialogue(messages, tools)
    options = {} if tools is None else {"tools": tools}
    examples = []
    for ids, marks in reader.tokenizer.encode_answers(messages, reader.stop_ids, **options):
        reader.check_length(len(ids))
        if len(ids) > reader.max_length and not any(marks[1 : reader.max_length]):
            raise InputError("conversation", "has no answer left after truncation", "raise --max-length")
        examples.append(_example(ids[: reader.max_length], marks[: reader.max_length], line))
    return examples


def check_dialogue(messages: Any, tools: Any = None) -> None:
    """Raise InputError for a conversation that is malformed or has no answer to learn."""
    check_messages(messages)
    check_tools(tools)
    for index, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        field = f"messages[{index}].role"
        if role not in ROLES:
            raise InputError(field, f"is {role[:40]!r}", "use " + ", ".join(ROLES))
        has_calls = role == "assistant" and bool(message.get("tool_calls"))
        if not (content or "").strip() and not has_calls:
            raise InputError(f"messages[{index}].content", "is empty", "give text")
        if role == "system" and index:
            raise InputError(field, "is system", "a system message can only be the first")
        if role == "assistant" and index and messages[index - 1]["role"] == "assistant":
            raise InputError(field, "is assistant twice in a row", "join them, or put a user message between")
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError("messages", "contain no assistant message, so there is nothing to learn", "add an answer")


def _text_examples(text: Any, line: int, reader: ReaderOptions) -> list[Example]:
    """Split a text of any length into examples of at most `max_length` tokens."""
    if not isinstance(text, str) or not text.strip():
        what = "is empty" if isinstance(text, str) else f"is of type {type(text).__name__}"
        raise InputError("text", what, "give text")
    ids = [*reader.tokenizer.encode(text), reader.eos]
    pieces = [ids[at : at + reader.max_length] for at in range(0, len(ids), reader.max_length)]
    return [_example(piece, [True] * len(piece), line) for piece in pieces if len(piece) > 1]


def _example(ids: Sequence[int], marks: Sequence[bool], line: int) -> Example:
    loss_mask = np.array(marks, np.bool_)
    loss_mask[0] = False
    return Example(np.array(ids, np.int64), loss_mask, line)


def split_examples(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on and a random share to evaluate on; both are non-empty.

    Examples of the same line stay together. Raise InputError if there are fewer than two lines.
    """
    lines = sorted({example.line for example in examples})
    if len(lines) < 2:
        raise InputError("eval-share", "needs at least two examples", "give more data, or a file with --eval")
    count = min(max(1, round(share * len(lines))), len(lines) - 1)
    held = set(np.random.default_rng(seed).permutation(lines)[:count].tolist())
    return [one for one in examples if one.line not in held], [one for one in examples if one.line in held]
