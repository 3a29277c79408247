"""Perplexity by context length: how well a model predicts a text, by how much of it the model sees.

Every length uses the same text, cut into windows of that many tokens; a window begins with BOS if the tokenizer adds
one. With a stride below the length windows overlap, and only the new tokens of each are scored.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sala.engine.scheduler import as_bytes
from sala.errors import InputError
from sala.lab.eval.likelihood import read_scores
from sala.lab.eval.runner import facts_of
from sala.lab.report.record import Log, key_of
from sala.llm import LLM

Note = Callable[[str, int, int], None]  # stage, tokens done, total


@dataclass(frozen=True, slots=True)
class Window:
    """A window [start, end) of the text; the tokens from `first` on are scored."""

    start: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A file as tokens: no BOS, EOS after each of several documents; and a digest that identifies it."""

    name: str
    ids: list[int]

    @property
    def digest(self) -> str:
        return hashlib.sha256(as_bytes(self.ids)).hexdigest()[:16]


def to_text(llm: LLM, name: str, documents: Sequence[str], max_tokens: int | None = None) -> TokenizedText:
    ends = list(llm.config.eos_token_id[:1]) if len(documents) > 1 else []
    ids = [token for one in llm.tokenizer.encode_many(documents) for token in [*one, *ends]]
    if len(ids) < 2:
        raise InputError("file", f"{name} has {len(ids)} token(s)", "perplexity needs at least two")
    return TokenizedText(name, ids[:max_tokens])


def choose_lengths(lengths: Sequence[int], num_tokens: int, max_tokens: int) -> list[int]:
    """Return the lengths that text and model allow; the whole text if it is shorter than all of them."""
    wanted = sorted(set(lengths))
    if wanted[0] < 2:
        raise InputError("lengths", f"hold {wanted[0]}", "they must be at least 2")
    if wanted[0] > max_tokens:
        raise InputError("lengths", f"begin with {wanted[0]:,}", f"the model's context holds {max_tokens:,}")
    most = min(num_tokens, max_tokens)
    return [length for length in wanted if length <= most] or [most]


def cut(num_tokens: int, length: int, stride: int | None, has_bos: bool) -> list[Window]:
    """Return whole windows of `length` tokens, BOS included; the rest of the text is ignored."""
    size = length - has_bos
    step = size if stride is None else min(stride, size)
    begin = 0 if has_bos else 1  # nothing predicts the first token
    windows = []
    for start in range(0, num_tokens - size + 1, step):
        overlap = size - step if start else 0
        windows.append(Window(start, start + max(overlap, begin), start + size))
    return windows


def measure(
    llm: LLM,
    text: TokenizedText,
    lengths: Sequence[int],
    stride: int | None = None,
    log: Log | None = None,
    note: Note = lambda *_: None,
) -> Iterator[dict[str, Any]]:
    """Yield a row of results for each length, shortest first. Windows in the log are not computed again."""
    log = log or Log()
    facts = {**facts_of(llm), "text": text.digest}
    bos = llm.tokenizer.encode("")[:1]
    longest = max(lengths) - len(bos)
    num_tokens = len(text.ids) // longest * longest  # the same for all lengths
    for length in sorted(lengths):
        windows = cut(num_tokens, length, stride, bool(bos))
        total = sum(window.end - window.first for window in windows)
        done = 0
        parts = []
        for window in windows:
            key = key_of(facts, asdict(window))
            part = log.find(key)
            if part is None:
                tell = partial(_tell, note, f"{length:,} tokens", done, window.end - window.first, total)
                part = _score(llm, text.ids, bos, window, tell)
                log.append(key, part)
            parts.append(part)
            done += window.end - window.first
            note(f"{length:,} tokens", done, total)
        yield _row(length, parts)


def _tell(note: Note, stage: str, done: int, count: int, total: int, read: int, of: int) -> None:
    """Report a part of a window."""
    if read < of:
        note(stage, done + count * read // of, total)


def _score(
    llm: LLM, ids: list[int], bos: list[int], window: Window, tell: Callable[[int, int], None]
) -> dict[str, Any]:
    began = time.perf_counter()
    prompt = [*bos, *ids[window.start : window.end]]
    first = len(bos) + window.first - window.start
    loss = squares = 0.0
    for logprobs, _ in read_scores(llm, prompt, first, tell):
        loss -= float(logprobs.sum())
        squares += float((logprobs**2).sum())
    scored = ids[window.first : window.end]
    return {
        "tokens": len(scored),
        "bytes": len(llm.tokenizer.decode(scored).encode()),
        "loss": loss,
        "squares": squares,
        "read": len(prompt),
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
