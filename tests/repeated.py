"""Repeated text, in which many blocks have equal scores, and the ways in which a prompt can reach the model."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sala.checkpoint.random import TINY, write_random
from sala.config import SparseConfig
from sala.engine.stream import Completion
from sala.llm import LLM
from sala.options import MAX_LOGPROBS

SPARSE = SparseConfig(
    kernel_size=8, kernel_stride=4, init_blocks=1, block_size=16, window_size=32, topk=4, dense_len=128
)
MODEL = replace(
    TINY,
    vocab_size=MAX_LOGPROBS,  # so that an answer reports the log-probability of every token
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    mixer_types=("minicpm4", "lightning", "minicpm4"),  # the second selection sees what rounding made of the first
    bos_token_id=0,
    eos_token_id=(1,),
    pad_token_id=1,
    sparse_config=SPARSE,
)
CHUNK = 64
NUM_PROMPTS = 200
NUM_PERIODS = 64
IS_FULL = bool(os.environ.get("SALA_TEST_FULL"))
ANSWER = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logprobs": MODEL.vocab_size}


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of periods from 1 to 64, some behind other text, as long as what implementations count in."""
    rng = random.Random(seed)
    borders = [SPARSE.block_size, SPARSE.kernel_size, 4 * SPARSE.kernel_size, CHUNK, SPARSE.agreement_len]
    found = []
    for number in range(count):
        unit = [rng.randrange(MODEL.vocab_size) for _ in range(1 + number * 13 % NUM_PERIODS)]
        opening = [rng.randrange(MODEL.vocab_size) for _ in range(rng.choice([0, 0, 1, 7, 40]))]
        border = rng.choice([SPARSE.dense_len, 2 * SPARSE.dense_len])
        length = border + rng.choice(borders) * rng.randint(0, 2) + rng.randint(-2, 2)
        found.append((opening + unit * length)[:length])
    return found


def splits(prompt: list[int], rng: random.Random) -> tuple[int, int]:
    """Return two lengths, ascending: prefixes of the prompt whose regime lets the prompt continue them."""
    length, agreed = len(prompt), SPARSE.agreement_len
    fitting = [
        split
        for split in range(agreed - 30, length)
        if split <= agreed or SPARSE.regime(split) == SPARSE.regime(length)
    ]
    early, late = sorted(rng.sample(fitting, 2))
    return early, late


class Ways:
    """Answers to a prompt by every way that it can take through the engine; the weights are read once per way."""

    def __init__(self, place: Path, **options: object) -> None:
        write_random(place / "model", MODEL)
        self._model, self._options = place / "model", {"ctx": 1024, **options}
        self._chunked, self._stepped = self._open(prefill_chunk=29), self._open(prefill_chunk=1)
        self._cached, self._restored = self._open(prefill_chunk=CHUNK), self._open()
        self._tiered = self._open(cache_dir=place / "tier")
        self._batched = self._open(prefill_chunk=CHUNK, max_batch=5)
        self._drafting = self._open(speculate="lookup", num_draft=3)
        self._drafting.engine.speculation._is_measured = False
        self._store = self._cached.open_store(place / "store")

    def _open(self, **options: object) -> LLM:
        return LLM(self._model, **{**self._options, **options})  # type: ignore[arg-type]

    def fresh(self) -> LLM:
        """Return a model that computes every prompt at once and keeps nothing."""
        return self._open(prefill_chunk=1024, snapshots=0)

    def answers(self, number: int, prompt: list[int]) -> Iterator[tuple[str, Completion]]:
        """Yield the answer by every way; the slow ones are taken by one prompt in sixteen."""
        early, late = splits(prompt, random.Random(number))
        self._chunked.reset()
        yield "chunked", self._chunked.generate(prompt, **ANSWER)
        self._cached.reset()
        name = f"prompt-{number}"
        self._cached.generate(prompt[:early], **{**ANSWER, "max_tokens": 1})
        self._cached.save_session(self._store, name, prompt[:late])
        self._restored.reset()
        self._restored.load_session(self._store, name)
        self._store.remove(name)
        for way, llm in (("cached", self._cached), ("from a session", self._restored)):
            answer = llm.generate(prompt, **ANSWER)
            assert answer.usage.cached_tokens >= late - 1
            yield way, answer
        yield "from the disk tier", self._from_the_disk_tier(prompt, late)
        if number % 16 == 0:
            self._stepped.reset()
            yield "token by token", self._stepped.generate(prompt, **ANSWER)
            self._drafting.reset()
            yield "with drafts", self._drafting.generate(prompt, **ANSWER)

    def _from_the_disk_tier(self, prompt: list[int], split: int) -> Completion:
        """Ask for a prefix, which writes it to disk, and then for the prompt, with nothing else in memory."""
        tiers = self._tiered.tiers
        assert tiers is not None
        assert tiers.disk is not None
        self._tiered.reset()
        self._tiered.generate(prompt[:split], **{**ANSWER, "max_tokens": 1})
        tiers.disk.flush()
        self._tiered.reset()
        answer = self._tiered.generate(prompt, **ANSWER)
        assert tiers.statistics.hit["disk"] == answer.usage.cached_tokens >= split - 1
        return answer

    def batched(self, prompts: Sequence[list[int]]) -> list[Completion]:
        self._batched.reset()
        return list(self._batched.generate(list(prompts), **ANSWER))


def difference(one: Completion, other: Completion) -> float:
    """Return the largest difference of the log-probabilities of all tokens; infinity if the answers differ."""
    if one.token_ids != other.token_ids:
        return float("inf")
    largest = 0.0
    for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
        known = dict(theirs.top_logprobs)
        assert len(known) == len(ours.top_logprobs) == MODEL.vocab_size
        largest = max(largest, *(abs(value - known[token]) for token, value in ours.top_logprobs))
    return largest


def check(ways: Ways, count: int, seed: int) -> None:
    """Assert that every way gives the answers of prompts that are computed at once, alone and afresh."""
    fresh, texts = ways.fresh(), prompts(count, seed)
    wanted = [fresh.generate(text, **ANSWER) for text in texts]
    assert not any(answer.usage.cached_tokens for answer in wanted)
    found = [
        (f"{way}, prompt {number}", answer, want)
        for number, (text, want) in enumerate(zip(texts, wanted, strict=True))
        for way, answer in ways.answers(number, text)
    ]
    found += [
        (f"batched, prompt {number}", answer, want)
        for number, (answer, want) in enumerate(zip(ways.batched(texts), wanted, strict=True))
    ]
    failed = {name: round(far, 7) for name, answer, want in found if (far := difference(answer, want)) > 1e-4}
    assert failed == {}
