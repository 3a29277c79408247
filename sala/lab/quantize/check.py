"""Perplexity, and facts found in long texts, before and after quantization: minutes of work, and no record."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sala.config import SalaConfig
from sala.lab.eval.tasks.prose import write_documents
from sala.lab.quantize.report import WHO, compare, read_hidden
from sala.lab.quantize.texts import cut
from sala.lab.train.recall import (
    SHORTEST,
    Recall,
    RecallCase,
    logits_of,
    measure_recall,
    recall_cases,
    sparse_length,
)
from sala.options.schema import length_label
from sala.text.tokenizer import Tokenizer

TEXTS = 2  # of each length, with eight facts each
ROW = 1024  # context length for perplexity
_PROSE = 64  # documents to measure on where there is no other text
Note = Callable[[str, int, int], None]


class Check(NamedTuple):
    """What both models make of the same texts, the original first."""

    perplexity: tuple[float, float]
    kl: float
    recall: tuple[list[Recall], list[Recall]]


def check(
    original: Path, quantized: Path, tokens: Tensor | None, device: torch.device, kernels: str, note: Note
) -> Check:
    """Return perplexity on tokens [S, n] (by default of built-in prose) and recall, of both models."""
    cases = check_cases(original)
    tokens = _prose(original) if tokens is None else tokens
    total, done = 2 * (len(tokens) + len(cases)), 0

    def step(*_: int) -> None:
        nonlocal done
        done += 1
        note("checking", done, total)

    hidden, heads, recall = {}, {}, []
    for who, path in zip(WHO, (original, quantized), strict=True):
        hidden[who], heads[who] = read_hidden(path, tokens, device, step, kernels)
        recall.append(facts_found(path, cases, device, step))
    found = compare(hidden, heads, tokens)
    first, second = (found[who]["perplexity"] for who in WHO)
    return Check((first, second), found["kl"], (recall[0], recall[1]))


def check_cases(path: Path, texts: int = TEXTS) -> list[RecallCase]:
    """Return texts of two lengths: in which attention is dense, and, where it fits, twice the length from which it
    is sparse. A checkpoint without a tokenizer has none.
    """
    if not (path / "tokenizer.json").is_file():
        return []
    config, tokenizer = SalaConfig.load(path), Tokenizer.load(path)
    sparse = sparse_length(config)
    lengths = sorted({min(SHORTEST, sparse), sparse})
    try:
        return recall_cases(tokenizer, next(iter(config.eos_token_id), None), lengths, texts)
    finally:
        tokenizer.close()


@torch.inference_mode()
def facts_found(
    path: Path,
    cases: Sequence[RecallCase],
    device: torch.device,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> list[Recall]:
    """Return the recall of a checkpoint; quantized matrices stay packed, and a long text is read in chunks."""
    if not cases:
        return []
    from sala.plugins.transformers.loading import load

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        return measure_recall(logits_of(load(path, dtype, device, packed=True)), cases, step)
    finally:
        gc.collect()


def _prose(path: Path) -> Tensor:
    if not (path / "tokenizer.json").is_file():
        count = SalaConfig.load(path).vocab_size
        return torch.randint(count, (4, ROW), generator=torch.Generator().manual_seed(0))
    tokenizer = Tokenizer.load(path)
    ids = [token for text in write_documents(_PROSE) for token in tokenizer.encode(text)]
    return cut(ids[: 8 * ROW], ROW)


def table_of(found: Check) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table."""
    before, after = found.perplexity
    rows = [["perplexity", f"{before:.2f}", f"{after:.2f}", f"{after / before:.3f}x"]]
    rows.append(["KL to the original, nats", "0", f"{found.kl:.4f}", ""])
    for was, now in zip(*found.recall, strict=True):
        change = f"{now.found - was.found:+d}" if now.found != was.found else "same"
        what = f"facts found at {length_label(was.length)}"
        rows.append([what, f"{was.found} of {was.asked}", f"{now.found} of {now.asked}", change])
    return ["", "before", "after", "change"], rows


def remedy(found: Check, settings: Any) -> str | None:
    """Return what to try if quantization costs more than a tenth of the facts or of the perplexity; else None."""
    before, after = found.perplexity
    lost = any(now.found < 0.9 * was.found for was, now in zip(*found.recall, strict=True))
    if after <= 1.1 * before and not lost:
        return None
    if settings.chosen_method == "rtn" and settings.bits == 4:
        return "try --method gptq with --calibration FILE"
    if settings.group_size > 32:
        return "try --group-size 32"
    return "try --keep down_proj, or --bits 8"
