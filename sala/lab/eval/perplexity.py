"""Perplexity by context length: how well a model predicts a text when it sees so much of it.

Every length looks at the same text, cut into windows of that many tokens; a window begins with BOS where the model
wants it. With a stride below the length windows overlap, and only what is new in each is scored.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sala.engine.cache import as_bytes
from sala.errors import InputError
from sala.lab.eval.likelihood import read_scores
from sala.lab.report.record import Log, key_of

if TYPE_CHECKING:
    from sala.llm import LLM

MAX_BYTES = 1 << 30
Note = Callable[[str, int, int], None]  # what is measured, tokens done, tokens in all


@dataclass(frozen=True, slots=True)
class Span:
    """A window [start, end) of the text, of which the tokens from `first` on are scored."""

    start: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Text:
    """A file as tokens, without BOS, an end mark after each document; and what tells it from other files."""

    name: str
    ids: list[int]

    @property
    def digest(self) -> str:
        return hashlib.sha256(as_bytes(self.ids)).hexdigest()[:16]


def read_documents(file: Path) -> list[str]:
    """A text file, or the "text" of every line of a .jsonl file; a line that is wrong is named."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise InputError("file", f"{file} is larger than {MAX_BYTES >> 20} MiB", "give a part of it")
        content = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError("file", f"{file} cannot be read: {error.strerror}", "give a text or a .jsonl file") from None
    except UnicodeDecodeError as error:
        raise InputError("file", f"{file} is not UTF-8 text (byte {error.start})", "convert it to text first") from None
    if file.suffix not in (".jsonl", ".ndjson"):
        return [content]
    lines = enumerate(content.split("\n"), 1)
    return [_text_of(line, f"{file}, line {number},") for number, line in lines if line.strip()]


def _text_of(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError("file", f"{where} has no text", 'each line must be an object with a "text"')
    return text


def to_text(llm: "LLM", name: str, documents: Sequence[str], max_tokens: int | None = None) -> Text:
    ends = list(llm.config.eos_token_id[:1]) if len(documents) > 1 else []
    ids = [token for one in llm.tokenizer.encode_many(documents) for token in [*one, *ends]]
    if len(ids) < 2:
        raise InputError("file", f"{name} has {len(ids)} token(s)", "perplexity needs at least two")
    return Text(name, ids[:max_tokens])


def choose_lengths(lengths: Sequence[int], num_tokens: int, max_tokens: int) -> list[int]:
    """Those that text and model have; the whole text if it is shorter than all of them."""
    wanted = sorted(set(lengths))
    if wanted[0] < 2:
        raise InputError("lengths", f"hold {wanted[0]}", "they must be at least 2")
    if wanted[0] > max_tokens:
        raise InputError("lengths", f"begin with {wanted[0]:,}", f"the model's context holds {max_tokens:,}")
    most = min(num_tokens, max_tokens)
    return [length for length in wanted if length <= most] or [most]


def cut(num_tokens: int, length: int, stride: int | None, has_bos: bool) -> list[Span]:
    """Whole windows of `length` tokens, BOS included; what is left of the text at its end is not looked at."""
    size = length - has_bos
    step = size if stride is None else min(stride, size)
    begin = 0 if has_bos else 1  # the first token follows nothing
    spans = []
    for start in range(0, num_tokens - size + 1, step):
        overlap = size - step if start else 0
        spans.append(Span(start, start + max(overlap, begin), start + size))
    return spans


def measure(
    llm: "LLM",
    text: Text,
    lengths: Sequence[int],
    stride: int | None = None,
    log: Log | None = None,
    note: Note = lambda *_: None,
) -> Iterator[dict[str, Any]]:
    """A row of results for each length, shortest first. Windows that are in the log are not read again."""
    facts = {"fingerprint": llm.fingerprint()[:16], "text": text.digest}
    bos = llm.tokenizer.encode("")[:1]
    longest = max(lengths) - len(bos)
    num_tokens = len(text.ids) // longest * longest  # the same for all lengths
    for length in sorted(lengths):
        spans = cut(num_tokens, length, stride, bool(bos))
        total = sum(span.end - span.first for span in spans)
        done = 0
        parts = []
        for span in spans:
            key = key_of(facts, asdict(span))
            part = None if log is None else log.find(key)
            if part is None:
                tell = partial(_tell, note, f"{length:,} tokens", done, span.end - span.first, total)
                part = _score(llm, text.ids, bos, span, tell)
                if log is not None:
                    log.append(key, part)
            parts.append(part)
            done += span.end - span.first
            note(f"{length:,} tokens", done, total)
        yield _row(length, parts)


def _tell(note: Note, stage: str, done: int, count: int, total: int, read: int, of: int) -> None:
    """A part of a window is read."""
    if read < of:
        note(stage, done + count * read // of, total)


def _score(llm: "LLM", ids: list[int], bos: list[int], span: Span, tell: Callable[[int, int], None]) -> dict[str, Any]:
    began = time.perf_counter()
    window = [*bos, *ids[span.start : span.end]]
    first = len(bos) + span.first - span.start
    loss = squares = 0.0
    for logprobs, _ in read_scores(llm, window, first, tell):
        loss -= float(logprobs.sum())
        squares += float((logprobs**2).sum())
    scored = ids[span.first : span.end]
    return {
        "tokens": len(scored),
        "bytes": len(llm.tokenizer.decode(scored).encode()),
        "loss": loss,
        "squares": squares,
        "read": len(window),
        "seconds": time.perf_counter() - began,
    }


def _row(length: int, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens, size, loss, squares, read, seconds = (
        sum(part[name] for part in parts) for name in ("tokens", "bytes", "loss", "squares", "read", "seconds")
    )
    mean = loss / tokens
    spread = max(0.0, squares / tokens - mean * mean)
    perplexity = math.exp(min(mean, 700.0))
    return {
        "length": length,
        "windows": len(parts),
        "tokens": tokens,
        "bytes": size,
        "loss": mean,
        "perplexity": perplexity,
        "stderr": perplexity * math.sqrt(spread / tokens),
        "bits_per_byte": loss / math.log(2) / size if size else None,
        "seconds": seconds,
        "tokens_per_second": read / seconds,
    }
