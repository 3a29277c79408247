"""Train a draft head or an exit: write the model's answers, learn from them, write the directory of the result.

The working directory holds answers and state until the result is written; a stopped run resumes from there.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sala.backends.torch.draft_exit import DraftExit
from sala.backends.torch.draft_head import DraftHead
from sala.checkpoint.draft_exit import DraftExitConfig, write_draft_exit
from sala.checkpoint.draft_head import TOKENS, DraftHeadConfig, write_draft_head
from sala.checkpoint.writer import check_new
from sala.config import SalaConfig
from sala.errors import InputError, ModelNotFound
from sala.lab.draft.answers import (
    TEMPERATURES,
    AnsweredPrompt,
    as_stream,
    frequent_tokens,
    read_answers,
    read_prompts,
    write_answers,
)
from sala.lab.draft.exit_objective import ExitObjective
from sala.lab.draft.objective import DraftingObjective, DraftObjective
from sala.lab.train.accelerated import Accelerated
from sala.lab.train.data import Array, Epochs, TrainingRow
from sala.lab.train.loop import train
from sala.lab.train.models import load_for_training
from sala.lab.train.processes import barrier, destroy_process, init_process, is_main_process
from sala.lab.train.recipe import Learning
from sala.lab.train.recipe_run import Note
from sala.lab.train.steps import StepPart, collate
from sala.llm import LLM
from sala.options import Options
from sala.protocol import Sampling

ANSWERS, VOCABULARY = "answers.jsonl", "tokens.npy"
HELD_OUT = 16  # one row of so many is held out
MAX_COMPARED = 16  # held-out rows by which drafts are compared with the model
LENGTHS = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)  # bounds of the groups in the report
MODEL_DTYPES = {"cuda": torch.bfloat16}
DraftConfig = DraftHeadConfig | DraftExitConfig


@dataclass(frozen=True, slots=True)
class DraftTraining:
    """Train a draft head or, with `exit_layers`, an exit after so many layers.

    `row` is the number of tokens of the longest text, `chain` the number of drafts of a round.
    """

    model: Path
    data: Path
    output: Path
    work: Path
    device: str = "auto"
    row: int = 1024
    epochs: float = 2.0
    batch: int = 4  # rows of a step
    lr: float = 1e-3
    chain: int = 4
    max_tokens: int = 256
    temperature: float | None = None
    seed: int = 0
    minutes: float | None = None
    sizes: dict[str, Any] = field(default_factory=dict)  # fields of the configuration that differ from its defaults
    exit_layers: int | None = None
    loading: Options = field(default_factory=Options)  # of the model that answers; `kernels` also holds in training

    def run(self, note: Note) -> "list[Agreement]":
        """Train to the end, and return how often drafts for held-out rows agree with the model.

        Raise OutOfTime when the minutes are over; another run resumes.
        """
        deadline = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        check_new(self.output)
        if not (self.model / "config.json").is_file():
            raise ModelNotFound(f"{self.model} has no config.json", "give a checkpoint's directory")
        config = self._config(SalaConfig.load(self.model))
        self.work.mkdir(parents=True, exist_ok=True)
        device = init_process(self.device)
        if is_main_process():
            self._write_data(config, note)
        barrier()
        rows = self._written()
        objective = self._objective(config, device)
        stage = self._stage(rows)
        names = [name for name, parameter in objective.named_parameters() if parameter.requires_grad]
        learner = Accelerated(objective, stage, {1.0: names})
        make = AnswerRows(rows, self.row, self.seed, is_held_out=False)
        held = AnswerRows(rows, self.row, self.seed, is_held_out=True)
        own = note if is_main_process() else lambda *_: None
        parts = [StepPart(make, stage.batch_rows, self.row)]
        report: list[Agreement] = []

        def probe(is_last: bool) -> dict[str, float]:
            report.extend(agreement(objective, held, device) if is_last else ())
            return total(report) if is_last else {}

        train(learner, stage, parts, self.work / "draft", lambda news: own("draft", news), deadline, probe)
        if is_main_process():
            self._write(config, learner.tensors())
        barrier()
        destroy_process()
        return report

    def _config(self, model: SalaConfig) -> DraftConfig:
        if self.exit_layers is None:
            return DraftHeadConfig.of(model, **self.sizes)
        if others := sorted(set(self.sizes) - {"intermediate_size"}):
            raise InputError("exit", f"does not go together with {others[0]}", "an exit has no such size")
        return DraftExitConfig.of(model, self.exit_layers, **self.sizes)

    def _write(self, config: DraftConfig, learned: Mapping[str, torch.Tensor]) -> None:
        weights = {name.split(".", 2)[2]: one.float().cpu().numpy() for name, one in learned.items()}
        if isinstance(config, DraftExitConfig):
            write_draft_exit(self.output, config, weights, "BF16")
        else:
            write_draft_head(self.output, config, weights | {TOKENS: self._vocabulary()}, "BF16")

    def _written(self) -> list[AnsweredPrompt]:
        found = dict(read_answers(self.work / ANSWERS))
        return [found[number] for number in sorted(found)]

    def _vocabulary(self) -> Any:
        return np.load(self.work / VOCABULARY, allow_pickle=False)

    def _write_data(self, config: DraftConfig, note: Note) -> None:
        """Write the answers and the reduced vocabulary, unless an earlier run has done so."""
        own: dict[str, Any] = {"model": str(self.model), "device": self.device, "ctx": self.row}
        options = replace(self.loading, **own, snapshots=self.loading.snapshots or 0)
        with LLM(options=options) as llm:
            prompts = read_prompts(self.data, llm, self.row)
            sampling = Sampling(max_tokens=self.max_tokens, repetition_penalty=llm.default_sampling.repetition_penalty)
            temperatures = TEMPERATURES if self.temperature is None else (self.temperature,)
            last = 0.0

            def on_answer(done: int, total: int) -> None:
                nonlocal last
                if time.monotonic() - last > 5 or done == total:
                    last = time.monotonic()
                    note("answers", f"{done:,} of {total:,} answers")

            rows = write_answers(llm, prompts, self.work / ANSWERS, sampling, self.row, on_answer, temperatures)
        if isinstance(config, DraftHeadConfig) and not (self.work / VOCABULARY).is_file():
            tokens = frequent_tokens(rows, config.vocab_size, config.draft_vocab_size)
            np.save(self.work / VOCABULARY, tokens)

    def _objective(self, config: DraftConfig, device: torch.device) -> DraftingObjective:
        dtype = MODEL_DTYPES.get(device.type, torch.float32)
        model = load_for_training(self.model, device, dtype, kernels=self.loading.kernels)
        if isinstance(config, DraftExitConfig):
            return ExitObjective(new_exit(config, self.seed).to(device), model)
        head = new_head(config, self._vocabulary(), self.seed).to(device)
        return DraftObjective(head, model, self.chain)

    def _stage(self, rows: Sequence[AnsweredPrompt]) -> Learning:
        num_rows = max(1, sum(len(one.tokens) for one in rows) // self.row)
        steps = max(1, round(self.epochs * num_rows / self.batch))
        return Learning(
            name="draft", data=(), seq_len=self.row, batch_rows=self.batch, micro_rows=1, steps=steps,
            packing="documents", lr=self.lr, final_lr=self.lr / 20, warmup_steps=min(50, steps // 10 + 1),
            save_every=100, weight_decay=0.01, clip=1.0,
        )  # fmt: skip


def new_head(config: DraftHeadConfig, tokens: Any, seed: int) -> DraftHead:
    """Return an untrained head; its layer is the identity at first."""
    head = DraftHead(config)
    _initialize(head, seed)
    setattr(head, TOKENS, torch.from_numpy(np.asarray(tokens, np.int64)))
    return head


def new_exit(config: DraftExitConfig, seed: int) -> DraftExit:
    """Return an untrained exit; it only applies its norm at first."""
    made = DraftExit(config)
    _initialize(made, seed)
    return made


def _initialize(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        elif name.startswith(("o_proj", "down_proj")):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)


class AnswerRows:
    """Rows of packed answers in a seeded order that changes with every epoch; some are held out."""

    def __init__(self, rows: Sequence[AnsweredPrompt], length: int, seed: int, is_held_out: bool) -> None:
        self.stream, self.length, self.kinds = as_stream(rows), length, [row.kind for row in rows]
        count = len(self.stream.tokens) // length
        if count < 2:
            remedy = f"give more data, or shorter rows: --row {max(64, len(self.stream.tokens) // 8)}"
            raise InputError("data", f"fills {count} rows of {length:,} tokens", remedy)
        held = set(range(HELD_OUT - 1, count, HELD_OUT)) or {count - 1}
        self.numbers = [number for number in range(count) if (number in held) == is_held_out]
        self.order = Epochs(np.array(self.numbers), seed)

    def __call__(self, number: int) -> TrainingRow:
        return self.stream.row(self.order(number), self.length)

    def groups(self, number: int) -> list[tuple[str, int]]:
        """Return the kind of text of each token of a row, and a bound for the tokens of the text before it."""
        first = self.order(number) * self.length
        places = np.arange(first, first + self.length)
        texts = np.searchsorted(self.stream.ends, places, "right")
        before = places - np.concatenate([[0], self.stream.ends])[texts]
        bounds = [LENGTHS[index] for index in np.searchsorted(LENGTHS[:-1], before)]
        return list(zip((self.kinds[text] for text in texts), bounds, strict=True))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many first, second, … drafts of a chain there were, and how many of them the model would choose itself."""

    kind: str  # of the text
    length: int  # upper bound for the tokens of the text before them
    asked: Array
    agreed: Array

    @property
    def rates(self) -> list[float]:
        """The share of agreement of each draft, counted where all drafts before it in its chain agree."""
        return [round(float(rate), 4) for rate in self.agreed / np.maximum(self.asked, 1)]


@torch.no_grad()
def agreement(objective: DraftingObjective, rows: AnswerRows, device: torch.device) -> list[Agreement]:
    """Return how often drafts for held-out rows agree with the model, by kind of text and length."""
    found: dict[tuple[str, int], Agreement] = {}
    for number in range(min(MAX_COMPARED, len(rows.numbers))):
        batch = collate([rows(number)], "documents").to(device)
        guesses, wanted = objective.guesses(batch.tokens.flatten(), batch.document_lengths)
        is_alive, groups = (batch.main > 0).cpu().numpy(), rows.groups(number)
        for step, guess in enumerate(guesses):
            is_right = is_alive & (guess == wanted).cpu().numpy()
            for group in sorted({groups[at] for at in np.flatnonzero(is_alive)}):
                one = found.setdefault(group, Agreement(*group, *np.zeros((2, objective.num_steps), np.int64)))
                is_own = np.asarray([own == group for own in groups])
                one.asked[step] += int((is_alive & is_own).sum())
                one.agreed[step] += int((is_right & is_own).sum())
            is_alive = np.roll(is_right, 1)  # the next draft of this chain is one position further
            is_alive[0] = False
            groups = [groups[-1], *groups[:-1]]
    return [found[group] for group in sorted(found)]


def total(report: Sequence[Agreement]) -> dict[str, float]:
    """Return the agreement over all texts, by metric name."""
    asked, agreed = (sum((getattr(one, name) for one in report), np.zeros(1)) for name in ("asked", "agreed"))
    return {f"agreed {step}": rate for step, rate in enumerate(Agreement("", 0, asked, agreed).rates, 1)}
