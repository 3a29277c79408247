"""How well sources show where an answer comes from: are the facts that answer a question among the top passages?

The weights of heads are learnt from other texts than those that are judged: a head weighs as much as it attends to the
right blocks more than to others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sala.engine.requests import Call
from sala.engine.stream import Completion
from sala.head_weights import read_head_weights
from sala.lab.eval.tasks.sources import SourceQuestion, SourceText
from sala.llm import LLM
from sala.protocol import Sampling
from sala.text.sources import Passage, PromptText, find_passages, telling

TOP = 3
LEAST_COVERED = 0.5  # share of a fact's tokens that a passage must cover
SHARPNESS = 2  # heads that retrieve twice as well weigh four times as much


@dataclass(frozen=True)
class Judged:
    """One question: what the sums of attention by head and block were, and whether the answer was right."""

    question: SourceQuestion
    prompt_len: int
    heads: "np.ndarray[Any, np.dtype[np.float64]]"  # [L * H, blocks]
    block_size: int
    num_first: int
    is_right: bool
    answer: str
    text: PromptText | None = None  # of the prompt; passages are then those that are told, in whole sentences

    def weights(self, head_weights: "np.ndarray[Any, Any]") -> list[float]:
        """Return the weights of blocks, those that tell nothing left out."""
        summed = (head_weights.reshape(-1, 1) * self.heads).sum(0)
        return telling(summed.tolist(), self.prompt_len, self.block_size, self.num_first)

    def passages(self, head_weights: "np.ndarray[Any, Any]") -> list[Passage]:
        return find_passages(self.text, self.weights(head_weights), self.block_size)

    def rank(self, head_weights: "np.ndarray[Any, Any]") -> int | None:
        """Return the rank of the first passage that holds a fact, from 1; None if there is none."""
        ranked = (at for at, one in enumerate(self.passages(head_weights), 1) if self.holds_fact(one))
        return next(ranked, None)

    def holds_fact(self, passage: Passage) -> bool:
        span = range(*passage.tokens)
        return any(
            len(range(max(fact.start, span.start), min(fact.stop, span.stop))) >= LEAST_COVERED * len(fact)
            for fact in self.question.facts
        )


def ask_all(llm: LLM, text: SourceText, on_progress: Callable[[int, int], None] | None = None) -> Iterator[Judged]:
    """Ask all questions about a text, which is read once. The executor must keep heads apart."""
    for question in text.questions:
        sampling = Sampling(temperature=0, max_tokens=question.max_tokens, return_sources=True)
        prompt = np.concatenate([text.ids, question.tail]).tolist()
        completion = llm.answer(Call(None, sampling, prompt=prompt, boundaries=(len(text.ids),)), on_progress)
        yield judge(question, completion, PromptText(llm.tokenizer, prompt))


def judge(question: SourceQuestion, completion: Completion, text: PromptText) -> Judged:
    sources = completion.sources
    assert sources is not None
    gathered = sources.gathered
    gathered.add_up()
    return Judged(
        question,
        completion.usage.prompt_tokens,
        gathered.sums,
        gathered.block_size,
        gathered.num_first,
        question.solution.score(completion.text) == 1,
        completion.text,
        text,
    )


def learn(judged: Sequence[Judged], num_layers: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return weights of heads [L, H] from questions that were answered rightly; raise ValueError if none was.

    A head's score is the share of its attention that goes to blocks with facts, beyond the share of those blocks in
    the text; what goes to blocks that tell nothing is lost.
    """
    scores = [_score(one) for one in judged if one.is_right]
    if not scores:
        raise ValueError("no question was answered rightly")
    mean = np.clip(np.mean(scores, 0), 0, None) ** SHARPNESS
    found: np.ndarray[Any, np.dtype[np.float64]] = (mean / mean.sum()).reshape(num_layers, -1)
    return found


def _score(one: Judged) -> "np.ndarray[Any, np.dtype[np.float64]]":
    known = np.array(telling([1.0] * one.heads.shape[1], one.prompt_len, one.block_size, one.num_first)) > 0
    is_fact = np.zeros(one.heads.shape[1], bool)
    for fact in one.question.facts:
        is_fact[fact.start // one.block_size : (fact.stop - 1) // one.block_size + 1] = True
    total = one.heads.sum(1)
    share, other = (one.heads[:, part & known].sum(1) / total for part in (is_fact, ~is_fact))
    expected = (is_fact & known).sum() / max(1, known.sum())
    score: np.ndarray[Any, np.dtype[np.float64]] = share - expected * (share + other)
    return score


@contextmanager
def keeping_heads(llm: LLM) -> Iterator["np.ndarray[Any, Any]"]:
    """Let the executor keep heads apart meanwhile; yield the weights that the model has for them."""
    layers, heads = len(llm.config.sparse_layers), llm.config.num_attention_heads
    known = read_head_weights(llm.path, llm.config)
    executor = llm.engine.executor
    executor.weigh_heads(known, keeps_heads=True)
    try:
        yield np.ones((layers, heads)) if known is None else np.array(known)
    finally:
        executor.weigh_heads(known)


def to_row(one: Judged, weights: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """Return what is recorded of a question; `covered` is the share of the prompt in the top passages."""
    rank, top = one.rank(weights), one.passages(weights)[:TOP]
    return {
        "kind": one.question.kind,
        "is_right": one.is_right,
        "rank": rank,
        "is_in_top": rank is not None and rank <= TOP,
        "covered": round(sum(len(range(*passage.tokens)) for passage in top) / one.prompt_len, 4),
        "question": one.question.text,
        "answer": one.answer,
        "wanted": list(one.question.solution.wanted),
    }
