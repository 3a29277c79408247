"""Training rows with hidden facts: a needle case, padded to the row's length."""

from collections.abc import Sequence

import numpy as np

from sala.errors import InputError
from sala.lab.eval.tasks.needle import NeedleDialogue, NeedleMaker, NeedleSpec, Wrap
from sala.lab.train.data import TrainingRow
from sala.text.tokenizer import Tokenizer


def chat_wrap(tokenizer: Tokenizer) -> Wrap:
    """Return what the tokenizer's own chat template writes around a user's messages, its system turn included."""

    def text(*said: str) -> str:
        messages = [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(said)]
        return tokenizer.render_chat(messages, add_generation_prompt=True)

    before, _, after = text("QUESTION").partition("QUESTION")
    _, _, rest = text("FIRST", "ANSWER", "SECOND").partition("ANSWER")
    between = tokenizer.encode(rest.partition("SECOND")[0], bos=False, parse_special=True)
    return Wrap(before, after, tokenizer.decode(between[1:], skip_special=False))  # an answer has its end mark itself


class NeedleRows:
    """Row i hides up to `max_keys` facts on each of up to `max_topics` topics in real text, and asks for some of them.

    With several makers, rows take turns with them: their wraps may differ.
    """

    def __init__(
        self,
        maker: NeedleMaker | Sequence[NeedleMaker],
        length: int,
        max_keys: int,
        max_topics: int,
        pad: int,
        seed: int,
    ) -> None:
        self.makers = [maker] if isinstance(maker, NeedleMaker) else list(maker)
        self.length, self.pad, self.seed = length, pad, seed
        self.max_keys, self.max_topics = max_keys, max_topics
        if length < 256:
            raise InputError("seq_len", f"is {length}", "needle rows need at least 256 tokens")

    def __call__(self, index: int) -> TrainingRow:
        rng = np.random.default_rng([self.seed, index])
        num_keys = int(rng.integers(1, self.max_keys + 1))
        num_questions = int(rng.integers(1, num_keys + 1))
        num_topics = int(rng.integers(1, self.max_topics + 1)) if self.max_topics > 1 else 1
        dialogue = self._fit(num_keys, num_questions, num_topics, index)
        ids = np.full(self.length, self.pad, np.int64)
        answer = np.zeros(self.length, np.bool_)
        learn = np.zeros(self.length, np.bool_)
        ids[: len(dialogue.token_ids)] = dialogue.token_ids
        answer[: len(dialogue.is_answer)] = dialogue.is_answer
        learn[: len(dialogue.token_ids)] = True
        learn[answer] = False  # a teacher may be wrong about them; they have a loss of their own
        return TrainingRow(ids, learn, answer, (self.length,))

    def _fit(self, num_keys: int, num_questions: int, num_topics: int, index: int) -> NeedleDialogue:
        """As many facts and questions as the row has room for."""
        while True:
            spec = NeedleSpec(self.length, num_keys=num_keys, value="mixed", split="train")
            try:
                return self.makers[index % len(self.makers)].dialogue(spec, index, num_questions, num_topics)
            except InputError:
                if num_topics > 1:
                    num_topics //= 2
                elif num_keys > 1:
                    num_keys, num_questions = num_keys - 1, min(num_questions, num_keys - 1)
                else:
                    raise
