"""Training rows with hidden facts: a needle case, padded to the row's length."""

import numpy as np

from sala.errors import InputError
from sala.eval.tasks.needle import NeedleDialogue, NeedleMaker, NeedleSpec
from sala.train.data import Row


class NeedleRows:
    """Row number i hides one to `max_keys` facts anywhere in real text and asks for some of them."""

    def __init__(self, maker: NeedleMaker, length: int, max_keys: int, pad: int, seed: int) -> None:
        self.maker, self.length, self.max_keys, self.pad, self.seed = maker, length, max_keys, pad, seed
        if length < 256:
            raise InputError("seq_len", f"is {length}", "needle rows need at least 256 tokens")

    def __call__(self, index: int) -> Row:
        rng = np.random.default_rng([self.seed, index])
        num_keys = int(rng.integers(1, self.max_keys + 1))
        dialogue = self._fit(num_keys, int(rng.integers(1, num_keys + 1)), index)
        ids = np.full(self.length, self.pad, np.int64)
        answer = np.zeros(self.length, np.bool_)
        learn = np.zeros(self.length, np.bool_)
        ids[: len(dialogue.token_ids)] = dialogue.token_ids
        answer[: len(dialogue.is_answer)] = dialogue.is_answer
        learn[: len(dialogue.token_ids)] = True
        learn[answer] = False  # a teacher may be wrong about them; they have a loss of their own
        return Row(ids, learn, answer, (self.length,))

    def _fit(self, num_keys: int, num_questions: int, index: int) -> NeedleDialogue:
        """As many facts and questions as the row has room for."""
        while True:
            spec = NeedleSpec(self.length, num_keys=num_keys, value="mixed", split="train")
            try:
                return self.maker.dialogue(spec, index, num_questions)
            except InputError:
                if num_keys == 1:
                    raise
                num_keys, num_questions = num_keys - 1, min(num_questions, num_keys - 1)
