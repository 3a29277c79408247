"""Select the layers that keep attention: those that matter for recall more than for other abilities.

For each layer, attention is replaced by the aligned lightning mixer, and two things are measured: R, how well the model
recalls facts from its context, and C, how well it answers common-sense questions. The score of a layer is

    s_i = (max R - R_i) / (max C - C_i + epsilon)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sala.backends.torch.model import SalaModel
from sala.lab.eval.tasks.choice import ChoiceTask
from sala.lab.eval.tasks.needle import NeedleMaker, NeedleSpec
from sala.lab.train.recipe import SelectStage
from sala.lab.train.score import choice_accuracy, score_rows

Pairs = list[tuple[tuple[int, ...], tuple[int, ...]]]


class Importance(NamedTuple):
    recall: float
    sense: float
    score: float


def needle_pairs(maker: NeedleMaker, length: int, count: int, num_keys: int = 2) -> Pairs:
    spec = NeedleSpec(length, num_keys=num_keys, value="number", split="train")
    cases = (maker.make(spec, 1_000_000 + index) for index in range(count))  # not used for training
    return [(case.token_ids, case.answer_ids) for case in cases]


def measure_layers(
    teacher: SalaModel,
    aligned: Sequence[Any],
    needles: Pairs,
    tasks: Sequence[Sequence[ChoiceTask]],
    encode: Callable[[str], list[int]],
) -> Iterator[tuple[float, float]]:
    """Yield R and C of the teacher with each layer's attention replaced in turn; it is unchanged afterwards.

    R is the mean share of answer tokens that are the model's top-1 prediction, C the mean accuracy over the tasks.
    """
    for layer, mixer in zip(teacher.model.layers, aligned, strict=True):
        original, layer.self_attn = layer.self_attn, mixer
        try:
            scores = score_rows(teacher, needles)
            recall = sum(sum(score.is_first) / len(score.is_first) for score in scores) / len(scores)
            found = [choice_accuracy(teacher, questions, encode) for questions in tasks]
            sense = sum((one.acc + one.acc_norm) / 2 for one in found) / max(len(found), 1)
        finally:
            layer.self_attn = original
        yield recall, sense


def rate_layers(measures: Sequence[tuple[float, float]], epsilon: float) -> list[Importance]:
    """Return the importance of each layer from its R and C."""
    best_recall, best_sense = (max(values) for values in zip(*measures, strict=True))
    return [
        Importance(recall, sense, (best_recall - recall) / (best_sense - sense + epsilon)) for recall, sense in measures
    ]


def select_layers(scores: Sequence[Importance], stage: SelectStage) -> tuple[int, ...]:
    """Return the layers that keep attention: with `keep_ends` the first and the last, then the highest scores."""
    num_layers = len(scores)
    ends = {0, num_layers - 1} if stage.keep_ends else set()
    others = sorted((i for i in range(num_layers) if i not in ends), key=lambda i: -scores[i].score)
    count = stage.num_layers or max(1, num_layers // 4)
    return tuple(sorted([*ends, *others[: max(0, count - len(ends))]]))
