"""Recall before and after a fine-tuning run, as a callback for the trainers of transformers, TRL and LLaMA-Factory."""

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from sala.errors import InputError, SalaError
from sala.lab.train.recall import (
    SHORTEST,
    Recall,
    RecallCase,
    affordable,
    as_rows,
    describe,
    has_fallen,
    logits_of,
    measure_recall,
    recall_cases,
    sparse_length,
)
from sala.options.schema import length_label
from sala.text.tokenizer import Tokenizer

SHARE = 0.1  # of a run's time that measuring may take, unless lengths are given
LONGEST = 1 << 17
REMEDY = "mix in long rows (--keep-long 20%), restore queries and keys (--restore-qk), or lower --lr"


class RecallCallback(TrainerCallback):
    """Measure how many facts hidden in long texts the model finds, before the first update and after the last.

    lengths   tokens of the texts; without them one in which attention is sparse, and 2K and longer ones as long as
              measuring takes a tenth of the run at most
    texts     how many of each length; eight facts are hidden in each text
    note      receives the results, and a warning with its remedy if more than a tenth of the facts are lost
    record    a file that keeps the first measurement for a run that is resumed
    """

    def __init__(
        self,
        lengths: Sequence[int] = (),
        texts: int | None = None,
        note: Callable[[str], None] = print,
        remedy: str = REMEDY,
        record: Path | None = None,
        measures_end: bool = True,
    ) -> None:
        self.before: list[Recall] = []
        self.after: list[Recall] = []
        self._lengths, self._texts, self._note, self._remedy = tuple(lengths), texts, note, remedy
        self._record, self._measures_end = record, measures_end
        self._cases: list[RecallCase] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        say = self._note if state.is_world_process_zero else lambda _: None
        try:
            self._cases = self._make(args, state, model, more)
        except SalaError as error:
            say(f"recall is not measured: {error}")
            return
        kept = self._read_record()
        if kept and state.global_step:
            self.before = kept
            return
        self.before = self._measure(args, model)
        if self._record is not None and state.is_world_process_zero:
            self._record.write_text(json.dumps(as_rows(self.before), indent=1) + "\n")
        say(f"facts found in long texts before: {describe(self.before)}")

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._measures_end:
            self.measure_after(args, model, state.is_world_process_zero)

    def measure_after(self, args: Any, model: Any, is_main: bool = True) -> None:
        """Measure the model as it is now, and say what changed; every process must call this."""
        if not self._cases or not self.before:
            return
        say = self._note if is_main else lambda _: None
        self.after = self._measure(args, model)
        say(f"facts found in long texts, before → after: {describe(self.before, self.after)}")
        fallen = has_fallen(self.before, self.after)
        if fallen:
            at = ", ".join(map(length_label, fallen))
            say(f"WARNING: this run lost facts in long texts at {at} tokens: {self._remedy}")

    def results(self) -> dict[str, Any]:
        """Return the results as plain values; empty if nothing was measured."""
        return {"recall": {"before": as_rows(self.before), "after": as_rows(self.after)}} if self.before else {}

    def _make(self, args: Any, state: Any, model: Any, more: dict[str, Any]) -> list[RecallCase]:
        tokenizer = _tokenizer_of(model, more.get("processing_class") or more.get("tokenizer"))
        try:
            end = model.config.eos_token_id
            end = end[0] if isinstance(end, list | tuple) else end
            texts: Any = self._texts or 1
            if not self._lengths:
                longest = min(LONGEST, _longest(model.config))
                rows = more.get("train_dataloader")
                num_tokens = _count_tokens(rows, args, state)
                texts = affordable(num_tokens, longest, SHARE, self._texts or 8, _first(model.config))
            return recall_cases(tokenizer, end, self._lengths or tuple(texts), texts)
        finally:
            tokenizer.close()

    def _measure(self, args: Any, model: Any) -> list[Recall]:
        was_training = model.training
        model.eval()
        device = args.device.type
        context = torch.autocast(device, torch.bfloat16) if getattr(args, "bf16", False) else nullcontext()
        try:
            with context:
                return measure_recall(logits_of(model), self._cases)
        finally:
            model.train(was_training)

    def _read_record(self) -> list[Recall]:
        try:
            rows = json.loads(self._record.read_text()) if self._record is not None else []
            return [Recall(**row) for row in rows]
        except (OSError, ValueError, TypeError):
            return []


def _longest(config: Any) -> int:
    """Return the longest sequence of the training, where it is known."""
    known = (getattr(config, name, None) for name in ("trained_length", "max_position_embeddings"))
    return next((int(value) for value in known if value), 1 << 15)


def _first(config: Any) -> int:
    """Return the length that is always measured."""
    return sparse_length(config.to_sala()) if hasattr(config, "to_sala") else SHORTEST


def _count_tokens(rows: Any, args: Any, state: Any) -> float:
    """Return the tokens that the run trains on, from the lengths of the first rows of its data."""
    per_update = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    dataset: Any = getattr(rows, "dataset", ())
    size = len(dataset) if hasattr(dataset, "__len__") else 0  # a stream has none
    sizes = [_size(dataset[index]) for index in range(min(64, size))]
    mean = sum(sizes) / len(sizes) if sizes else 512
    return state.max_steps * per_update * max(mean, 1)


def _size(row: Any) -> int:
    """Return the tokens of a row; TRL's pairs have several sequences."""
    if not isinstance(row, dict):
        return sum(map(len, row))
    names = ["input_ids"] if "input_ids" in row else [name for name in row if name.endswith("_ids")]
    return sum(len(row[name]) for name in names)


def _tokenizer_of(model: Any, processing: Any) -> Tokenizer:
    """Return the tokenizer of the directory that the model was loaded from, or what transformers has loaded."""
    path = Path(str(getattr(model.config, "_name_or_path", "")))
    if (path / "tokenizer.json").is_file():
        return Tokenizer.load(path)
    if processing is None or not hasattr(processing, "save_pretrained"):
        raise InputError("model", "has no tokenizer beside it", "load it from a directory, or give processing_class")
    with tempfile.TemporaryDirectory() as room:
        processing.save_pretrained(room)
        return Tokenizer.load(Path(room))
