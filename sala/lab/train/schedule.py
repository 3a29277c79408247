"""Learning-rate schedules: a linear warm-up, then one of four shapes."""

import math
from dataclasses import dataclass

KINDS = ("constant", "cosine", "wsd", "exponential")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning-rate schedule; `wsd` (warmup-stable-decay) falls linearly over the last `decay_steps`."""

    kind: str
    peak: float
    final: float
    num_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0

    def rate(self, step: int) -> float:
        """Return the rate of step 0, 1, …; the warm-up starts above zero and ends at the peak."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        span = max(1, self.num_steps - 1 - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return _SHAPES[self.kind](self, done, step)


def _constant(schedule: Schedule, done: float, step: int) -> float:
    return schedule.peak


def _cosine(schedule: Schedule, done: float, step: int) -> float:
    return schedule.final + (schedule.peak - schedule.final) * 0.5 * (1 + math.cos(math.pi * done))


def _exponential(schedule: Schedule, done: float, step: int) -> float:
    return schedule.peak * (schedule.final / schedule.peak) ** done


def _wsd(schedule: Schedule, done: float, step: int) -> float:
    first = schedule.num_steps - schedule.decay_steps
    if step < first or not schedule.decay_steps:
        return schedule.peak
    done = min(1.0, (step - first + 1) / schedule.decay_steps)
    return schedule.peak + (schedule.final - schedule.peak) * done


_SHAPES = {"constant": _constant, "cosine": _cosine, "wsd": _wsd, "exponential": _exponential}
