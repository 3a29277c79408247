"""Which layers keep attention: those whose loss costs recall and little else.

Layer by layer, attention is replaced by its aligned lightning mixer, and two things are measured: R, how well the
model recalls facts from its context, and C, how well it answers common-sense questions. A layer's score is

    s_i = (max R - R_i) / (max C - C_i + epsilon)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from sala.backends.torch.model import SalaModel
from sala.lab.eval.tasks.choice import ChoiceTask, accuracy, requests
from sala.lab.eval.tasks.needle import NeedleMaker, NeedleSpec
from sala.lab.train.recipe import SelectStage
from sala.lab.train.score import score_rows

Pairs = list[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Importance:
    recall: float
    sense: float
    score: float


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """What is asked of every candidate: needle cases, and multiple-choice questions."""

    needles: Pairs
    tasks: tuple[tuple[ChoiceTask, ...], ...]
    encode: Callable[[str], list[int]]

    def recall(self, model: SalaModel) -> float:
        """Mean share of answer tokens that are the model's first choice."""
        scores = score_rows(model, self.needles)
        return sum(sum(score.is_first) / len(score.is_first) for score in scores) / len(scores)

    def sense(self, model: SalaModel) -> float:
        """Mean accuracy over the tasks."""
        if not self.tasks:
            return 0.0
        return sum(self._accuracy(model, task) for task in self.tasks) / len(self.tasks)

    def _accuracy(self, model: SalaModel, questions: Sequence[ChoiceTask]) -> float:
        asked = [requests(question, self.encode) for question in questions]
        flat = iter(score_rows(model, [(r.context_ids, r.continuation_ids) for group in asked for r in group]))
        scores = [[next(flat).logprob for _ in group] for group in asked]
        found = accuracy(questions, scores)
        return (found.acc + found.acc_norm) / 2


def needle_pairs(maker: NeedleMaker, length: int, count: int, num_keys: int = 2) -> Pairs:
    spec = NeedleSpec(length, num_keys=num_keys, value="number", split="train")
    cases = (maker.make(spec, 1_000_000 + index) for index in range(count))  # far from those used for training
    return [(case.token_ids, case.answer_ids) for case in cases]


def measure_layers(
    teacher: SalaModel,
    aligned: Mapping[int, nn.Module],
    probe: LayerProbe,
    epsilon: float,
    note: Callable[[int, float, float], None],
) -> dict[int, Importance]:
    """The importance of every layer for which there is an aligned mixer; the teacher is left as it was."""
    recalls, senses = {}, {}
    for index, mixer in aligned.items():
        layer = teacher.model.layers[index]
        original, layer.self_attn = layer.self_attn, mixer
        try:
            recalls[index], senses[index] = probe.recall(teacher), probe.sense(teacher)
        finally:
            layer.self_attn = original
        note(index, recalls[index], senses[index])
    best_recall, best_sense = max(recalls.values()), max(senses.values())
    return {
        index: Importance(
            recalls[index],
            senses[index],
            (best_recall - recalls[index]) / (best_sense - senses[index] + epsilon),
        )
        for index in aligned
    }


def select_layers(scores: Mapping[int, Importance], stage: SelectStage, num_layers: int) -> tuple[int, ...]:
    """The layers that keep attention: the ends if so wished, then the highest scores."""
    count = stage.num_layers or max(1, num_layers // 4)
    kept = {0, num_layers - 1} if stage.keep_ends else set()
    for index in sorted(scores, key=lambda i: -scores[i].score):
        if len(kept) >= count:
            break
        kept.add(index)
    return tuple(sorted(kept))
