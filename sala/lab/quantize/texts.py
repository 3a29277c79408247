"""Texts to calibrate with and to measure on: a file, or text that the model generates."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.eval.documents import LINES, read_documents
from sala.options import Options
from sala.options.sources import read_text
from sala.text.tokenizer import Tokenizer

HELD_OUT = 0.2  # share of a file that is reserved for measuring
MAX_HELD_OUT = 65536  # tokens
MIN_TOKENS = 256
FIELD = "calibration"  # in error messages
_SEED = 20


@dataclass
class FileText:
    """A text file, or a .jsonl file with a "text" per line. Its end is held out.

    `key` identifies it; `pieces` and `held_out` are disjoint token ids [S, length].
    """

    file: Path
    model: Path

    @property
    def key(self) -> str:
        return hashlib.sha256(read_text(self.file).encode()).hexdigest()

    @cached_property
    def tokens(self) -> list[int]:
        tokenizer, config = Tokenizer.load(self.model), SalaConfig.load(self.model)
        ends = list(config.eos_token_id[:1])
        texts = read_documents(self.file, FIELD, (*LINES, ".json"))
        tokens = [token for ids in tokenizer.encode_many(texts) for token in [*ids, *ends]]
        if len(tokens) < MIN_TOKENS:
            message = f"{self.file} has {len(tokens)} tokens"
            raise InputError(FIELD, message, f"give at least {MIN_TOKENS}; some ten thousand are better")
        return tokens

    @property
    def num_seen(self) -> int:
        """The number of tokens that are not held out."""
        return len(self.tokens) - min(MAX_HELD_OUT, int(HELD_OUT * len(self.tokens)))

    def pieces(self, num_tokens: int, length: int) -> Tensor:
        return cut(self.tokens[: self.num_seen][:num_tokens], length)

    def held_out(self, num_tokens: int, length: int) -> Tensor:
        return cut(self.tokens[self.num_seen :][:num_tokens], length)


@dataclass
class SampledText:
    """Text that the model generates unprompted: pieces that begin with a random token.

    It has the model's own distribution and needs neither a file nor a tokenizer.
    """

    model: Path
    device: str = "auto"
    note: Callable[[int, int], None] = lambda *_: None
    options: Options = field(default_factory=Options)  # of the model that writes

    @property
    def key(self) -> str:
        return f"sampled {_SEED}"

    def pieces(self, num_tokens: int, length: int) -> Tensor:
        return self._generate(num_tokens, length, _SEED)

    def held_out(self, num_tokens: int, length: int) -> Tensor:
        return self._generate(num_tokens, length, _SEED + 1)

    def _generate(self, num_tokens: int, length: int, seed: int) -> Tensor:
        from sala.engine.requests import Call
        from sala.llm import LLM
        from sala.protocol import Sampling

        count = max(1, num_tokens // length)
        rng = np.random.default_rng(seed)
        changes: dict[str, Any] = {"device": self.device, "ctx": length + 64, "max_batch": 16}
        with LLM(self.model, options=replace(self.options, snapshots=self.options.snapshots or 0), **changes) as llm:
            config = llm.config
            head = [] if config.bos_token_id is None else [config.bos_token_id]
            first = rng.integers(0, config.vocab_size, count).tolist()
            plain = Sampling(temperature=1.0, max_tokens=length - len(head) - 1, ignore_eos=True)
            sampling = [replace(plain, seed=seed * 65536 + at) for at in range(count)]
            calls = (Call(at, sampling[at], [*head, token]) for at, token in enumerate(first))
            rows: dict[int, list[int]] = {}
            for at, answer in llm.many(calls):
                if isinstance(answer, Exception):
                    raise answer
                rows[at] = [*head, first[at], *answer.token_ids]
                self.note(len(rows), count)
        return torch.tensor([rows[at] for at in range(count)])


CalibrationText = FileText | SampledText


def cut(tokens: list[int], length: int) -> Tensor:
    """Return pieces [S, length] of equal length; a shorter text is one piece."""
    length = min(length, len(tokens))
    count = len(tokens) // length if length else 0
    return torch.tensor(tokens[: count * length], dtype=torch.long).view(count, length)
