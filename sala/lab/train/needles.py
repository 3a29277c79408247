"""Training rows that hide facts in text and ask for them, padded to the row length."""

from collections.abc import Sequence

import numpy as np

from sala.errors import InputError
from sala.lab.eval.tasks.needle import NeedleDialogue, NeedleMaker, NeedleSpec, Wrap
from sala.lab.train.data import TrainingRow
from sala.text.tokenizer import Tokenizer


def chat_wrap(tokenizer: Tokenizer) -> Wrap:
    """Return what the tokenizer's chat template puts around a user's messages, including its system turn."""

    def text(*contents: str) -> str:
        messages = [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(contents)]
        return tokenizer.render_chat(messages, add_generation_prompt=True)

    before, _, after = text("QUESTION").partition("QUESTION")
    _, _, rest = text("FIRST", "ANSWER", "SECOND").partition("ANSWER")
    between = tokenizer.encode(rest.partition("SECOND")[0], bos=False, parse_special=True)
    return Wrap(before, after, tokenizer.decode(between[1:], skip_special=False))  # the answer includes its end token


class NeedleRows:
    """Row i hides up to `max_keys` facts on each of up to `max_topics` topics in real text, and asks for some of them.

    Rows alternate between several makers, whose wraps may differ.
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
        loss_mask = np.zeros(self.length, np.bool_)
        ids[: len(dialogue.token_ids)] = dialogue.token_ids
        answer[: len(dialogue.is_answer)] = dialogue.is_answer
        loss_mask[: len(dialogue.token_ids)] = True
        loss_mask[answer] = False  # the teacher may be wrong about answers; they have a loss of their own
        return TrainingRow(ids, loss_mask, answer, (self.length,))

    def _fit(self, num_keys: int, num_questions: int, num_topics: int, index: int) -> NeedleDialogue:
        """Return a dialogue with as many facts and questions as fit into the row."""
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
