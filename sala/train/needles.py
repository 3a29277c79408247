"""Training rows with hidden facts: needle cases, padded to the row's length."""

import numpy as np

from sala.errors import InputError
from sala.eval.tasks.needle import NeedleDialogue, NeedleMaker, NeedleSpec
from sala.train.data import Row

LEAST_PART = 4096  # tokens of a dialogue that shares its row with others


class NeedleRows:
    """Row number i hides one to `max_keys` facts anywhere in real text and asks for some of them.

    A long row may hold two or four such dialogues instead of one, so that shorter distances are learnt with it.
    """

    def __init__(self, maker: NeedleMaker, length: int, max_keys: int, pad: int, seed: int) -> None:
        self.maker, self.length, self.max_keys, self.pad, self.seed = maker, length, max_keys, pad, seed
        if length < 256:
            raise InputError("seq_len", f"is {length}", "needle rows need at least 256 tokens")

    def __call__(self, index: int) -> Row:
        rng = np.random.default_rng([self.seed, index])
        counts = [count for count in (1, 2, 4) if count == 1 or self.length >= count * LEAST_PART]
        count = int(rng.choice(counts)) if len(counts) > 1 else 1
        size = self.length // count
        ids = np.full(self.length, self.pad, np.int64)
        answer = np.zeros(self.length, np.bool_)
        learn = np.zeros(self.length, np.bool_)
        for number in range(count):
            num_keys = int(rng.integers(1, self.max_keys + 1))
            dialogue = self._fit(size, num_keys, int(rng.integers(1, num_keys + 1)), index * count + number)
            here = slice(number * size, number * size + len(dialogue.token_ids))
            ids[here], answer[here], learn[here] = dialogue.token_ids, dialogue.is_answer, True
        learn[answer] = False  # a teacher may be wrong about them; they have a loss of their own
        return Row(ids, learn, answer, (*[size] * (count - 1), self.length - size * (count - 1)))

    def _fit(self, size: int, num_keys: int, num_questions: int, index: int) -> NeedleDialogue:
        """As many facts and questions as there is room for."""
        while True:
            spec = NeedleSpec(size, num_keys=num_keys, value="mixed", split="train")
            try:
                return self.maker.dialogue(spec, index, num_questions)
            except InputError:
                if num_keys == 1:
                    raise
                num_keys, num_questions = num_keys - 1, min(num_questions, num_keys - 1)
