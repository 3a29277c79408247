"""A transformers Trainer that stops at the first non-finite loss, reports its progress and can be interrupted."""

import math
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from sala.lab.finetune.optimizers import Bf16AdamW
from sala.lab.finetune.result import read_metrics
from sala.lab.train.loop import Diverged, Progress
from sala.lab.train.processes import any_process


class FinetuneTrainer(Trainer):
    """Raise Diverged with `remedy` at the first loss or gradient that is not finite."""

    averages_tokens = True  # the loss is divided by the labels of the whole update; preferences average over answers

    def __init__(self, *arguments: Any, has_bf16_state: bool = False, remedy: str = "", **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._has_bf16_state, self._remedy = has_bf16_state, remedy
        self._clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._clip_checked
        self.model_accepts_loss_kwargs = self.averages_tokens

    def create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        if self._has_bf16_state and self.optimizer is None:
            assert self.model is not None
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = Bf16AdamW(trained, lr=self.args.learning_rate, weight_decay=self.args.weight_decay)
            return self.optimizer
        return super().create_optimizer(*arguments, **named)

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **named)
        if any_process(not bool(loss.isfinite()), loss.device):
            raise self._diverged("loss")
        return loss

    def _clip_checked(self, *arguments: Any, **named: Any) -> Any:
        norm = self._clip(*arguments, **named)
        if norm is not None and not bool(torch.as_tensor(norm).isfinite().all()):
            raise self._diverged("gradient")
        return norm

    def _diverged(self, what: str) -> Diverged:
        return Diverged(f"the {what} is not finite in update {self.state.global_step + 1}", self._remedy)


class ProgressCallback(TrainerCallback):
    """Report the latest value of every metric."""

    def __init__(self, note: Callable[[Progress], None]) -> None:
        self._note = note
        self._values: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        new = read_metrics(logs)
        self._values |= {name: value for name, value in new.items() if math.isfinite(value)}
        if new:
            self._note(Progress(state.global_step, state.max_steps, dict(self._values)))


class InterruptCallback(TrainerCallback):
    """A context manager that, on the first SIGINT or SIGTERM, saves after the current update and stops.

    A second signal stops at once.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        self.is_requested = False
        self.is_stopped = False
        self._device, self._note = device, note
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "InterruptCallback":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._on_signal)
            except ValueError:  # outside the main thread the caller handles signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        self._note("stopping after this update; interrupt again to stop at once")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if any_process(self.is_requested, self._device) and state.global_step < state.max_steps:
            self.is_stopped = True
            control.should_save = control.should_training_stop = True
        return control
