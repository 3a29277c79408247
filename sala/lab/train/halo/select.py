"""Select the layers that keep attention: those that matter for recall more than for other abilities.

For each layer, attention is replaced by the aligned lightning mixer, and two things are measured: R, how well the model
recalls facts from its context, and C, how well it answers common-sense questions. The score of a layer is

    s_i = (max R - R_i) / (max C - C_i + epsilon)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from sala.backends.torch.model import SalaModel
from sala.lab.eval.tasks.choice import ChoiceTask
from sala.lab.eval.tasks.needle import NeedleMaker, NeedleSpec
from sala.lab.train.recipe import SelectStage
from sala.lab.train.score import choice_accuracy, score_rows

Pairs = list[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Importance:
    recall: float
    sense: float
    score: float


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """The measurements of every candidate: needle cases and multiple-choice questions."""

    needles: Pairs
    tasks: tuple[tuple[ChoiceTask, ...], ...]
    encode: Callable[[str], list[int]]

    def recall(self, model: SalaModel) -> float:
        """Return the mean share of answer tokens that are the model's top-1 prediction."""
        scores = score_rows(model, self.needles)
        return sum(sum(score.is_first) / len(score.is_first) for score in scores) / len(scores)

    def sense(self, model: SalaModel) -> float:
        """Return the mean accuracy over the tasks; 0 without tasks."""
        if not self.tasks:
            return 0.0
        return sum(self._accuracy(model, task) for task in self.tasks) / len(self.tasks)

    def _accuracy(self, model: SalaModel, questions: Sequence[ChoiceTask]) -> float:
        found = choice_accuracy(model, questions, self.encode)
        return (found.acc + found.acc_norm) / 2


def needle_pairs(maker: NeedleMaker, length: int, count: int, num_keys: int = 2) -> Pairs:
    spec = NeedleSpec(length, num_keys=num_keys, value="number", split="train")
    cases = (maker.make(spec, 1_000_000 + index) for index in range(count))  # not used for training
    return [(case.token_ids, case.answer_ids) for case in cases]


def measure_layers(
    teacher: SalaModel,
    aligned: Mapping[int, nn.Module],
    probe: LayerProbe,
    epsilon: float,
    note: Callable[[int, float, float], None],
) -> dict[int, Importance]:
    """Return the importance of every layer with an aligned mixer; the teacher is unchanged afterwards."""
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
    """Return the layers that keep attention: with `keep_ends` the first and the last, then the highest scores."""
    count = stage.num_layers or max(1, num_layers // 4)
    kept = {0, num_layers - 1} if stage.keep_ends else set()
    for index in sorted(scores, key=lambda i: -scores[i].score):
        if len(kept) >= count:
            break
        kept.add(index)
    return tuple(sorted(kept))
