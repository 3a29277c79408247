"""The cases of an evaluation: from names of tasks to jobs for the runner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Protocol

from sala.errors import InputError
from sala.lab.eval.documents import HaystackSource
from sala.lab.eval.runner import Job
from sala.lab.eval.tasks import reasoning
from sala.lab.eval.tasks.case import Case, PromptWriter
from sala.lab.eval.tasks.chain import ChainMaker
from sala.lab.eval.tasks.counting import CountingMaker
from sala.lab.eval.tasks.haystack import Haystack
from sala.lab.eval.tasks.needle import ANY_KIND, AuroraMaker, KeyMaker, KeySpec
from sala.lab.eval.tasks.reading import PassageMaker, ReadingMaker, UserPassage
from sala.lab.eval.tasks.words import ValueKind

PRESETS = ("varied", "aurora")
KEY_SPECS = {
    "single": KeySpec(),
    "multikey": KeySpec(num_keys=4),
    "multivalue": KeySpec(num_values=4),
    "multiquery": KeySpec(num_keys=8, num_asked=4),
}
RULER = (*KEY_SPECS, "chain", "common", "frequent", "reading")
SHARING = ("multikey", "multiquery", "chain", "reading")  # tasks with several questions about one text
QUESTIONS = "questions"  # the user's own task


class Maker(Protocol):
    def make(self, num_tokens: int, number: int, *, question: int = 0) -> Case: ...


@dataclass
class Suite:
    """Makes the cases for one model. The haystack is read and encoded when it is first needed."""

    writer: PromptWriter
    source: Callable[[], HaystackSource]
    seed: int = 0

    @cached_property
    def haystack(self) -> Haystack:
        return Haystack(self.source().documents, self.writer.encode)

    def needle(
        self,
        lengths: Sequence[int],
        depths: Sequence[float],
        trials: int,
        preset: str = "varied",
        num_keys: int = 1,
        kinds: tuple[ValueKind, ...] = ANY_KIND,
    ) -> list[Job[Case]]:
        """Return the needle jobs. The depths of a trial share its text and are adjacent."""
        if preset == "aurora":
            maker: KeyMaker = AuroraMaker(self.writer, self.seed)
        elif preset in PRESETS:
            maker = KeyMaker(self.writer, self.haystack, self.seed, KeySpec(num_keys, kinds=kinds))
        else:
            raise InputError("preset", f"is {preset!r}", f"choose one of {', '.join(PRESETS)}")
        maker.make(min(lengths), 0, depths[0])  # raises now if the length is too short
        jobs = []
        for length, trial, depth in product(sorted(lengths), range(trials), sorted(depths)):
            labels = {"length": length, "depth": depth, "trial": trial}
            jobs.append(Job(labels, length, partial(maker.make, length, trial, depth / 100)))
        return jobs

    def ruler(
        self,
        tasks: Sequence[str],
        lengths: Sequence[int],
        trials: int,
        per_text: int = 1,
        passages: Sequence[UserPassage] = (),
    ) -> list[Job[Case]]:
        """Return the jobs of long-context tasks; `per_text` trials share a text where the task allows it."""
        jobs = []
        for task in tasks:
            maker = self._ruler_maker(task, passages)
            shared = per_text if task in SHARING else 1
            maker.make(min(lengths), 0)
            for length, trial in product(sorted(lengths), range(trials)):
                number, question = divmod(trial, shared)
                make = partial(maker.make, length, number, question=question)
                labels = {"task": task, "length": length, "trial": trial, "number": number, "question_at": question}
                jobs.append(Job(labels, length, make))
        return jobs

    def _ruler_maker(self, task: str, passages: Sequence[UserPassage]) -> Maker:
        if task in KEY_SPECS:
            return KeyMaker(self.writer, self.haystack, self.seed, KEY_SPECS[task])
        if task == "chain":
            return ChainMaker(self.writer, self.haystack, self.seed)
        if task in ("common", "frequent"):
            return CountingMaker(self.writer, task, self.seed)
        if task == "reading":
            return ReadingMaker(self.writer, self.seed)
        if task == QUESTIONS and passages:
            return PassageMaker(self.writer, list(passages), self.haystack, self.seed)
        raise InputError("tasks", f"hold {task!r}", f"choose from {', '.join(RULER)}")


def reasoning_tasks(
    kinds: Sequence[str], count: int, seed: int, budgets: Sequence[int | None]
) -> list[Job[reasoning.ReasoningProblem]]:
    """Return `count` problems of every kind, each once for every budget."""
    return [
        Job({"task": kind, "budget": budget, "number": number}, 1, partial(reasoning.make, kind, number, seed))
        for budget, kind, number in product(budgets, kinds, range(count))
    ]
