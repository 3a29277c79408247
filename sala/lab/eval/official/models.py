"""Who answers: our engine, or a dense model through transformers. Both decode greedily and reuse shared prefixes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sala.checkpoint.reader import Checkpoint
from sala.engine.requests import Call
from sala.lab.eval.official.case import Prepared
from sala.lab.eval.tasks.case import count_shared
from sala.lab.eval.tasks.haystack import Ids
from sala.llm import LLM
from sala.protocol import Sampling
from sala.text.tokenizer import Tokenizer

OnProgress = Callable[[int, int], None]
CHUNK = 2048  # prompt tokens that the dense model computes at a time
PROBE_READ, PROBE_WRITTEN = 512, 8  # tokens that measure the speed before a run


@dataclass(frozen=True)
class TimedAnswer:
    """A text with counts of tokens and seconds; `num_cached` tokens of the prompt were not read again."""

    text: str
    num_prompt: int
    num_cached: int
    num_written: int
    read_s: float
    written_s: float
    is_cut: bool  # at the most tokens that an answer may have


class AnsweringModel(Protocol):
    name: str
    fingerprint: str
    tokenizer: Tokenizer
    max_tokens: int  # of its context

    def answer(self, case: Prepared, boundaries: tuple[int, ...], on_progress: OnProgress) -> TimedAnswer: ...

    def speeds(self) -> tuple[float, float]:
        """Measure tokens read and written per second."""


class EngineModel:
    """A model on our engine."""

    def __init__(self, llm: LLM, name: str, fingerprint: str = "") -> None:
        self.name, self.fingerprint = name, fingerprint
        self.tokenizer, self.max_tokens = llm.tokenizer, llm.ctx
        self._llm = llm

    def answer(self, case: Prepared, boundaries: tuple[int, ...], on_progress: OnProgress) -> TimedAnswer:
        question = case.question
        sampling = Sampling(temperature=0, max_tokens=question.max_tokens, stop=question.stops)
        call = Call(None, sampling, prompt=case.token_ids.tolist(), boundaries=boundaries)
        done = self._llm.answer(call, on_progress)
        usage, timings = done.usage, done.timings
        return TimedAnswer(
            done.text, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, timings.prompt_s,
            timings.predicted_s, done.finish_reason == "length",
        )  # fmt: skip

    def speeds(self) -> tuple[float, float]:
        ids = probe(self.tokenizer, min(PROBE_READ, self.max_tokens // 2))
        for size in (32, len(ids)):
            sampling = Sampling(temperature=0, max_tokens=PROBE_WRITTEN, ignore_eos=True)
            timings = self._llm.generate(ids[-size:], sampling).timings
        return timings.prompt_n / max(1e-9, timings.prompt_s), timings.predicted_n / max(1e-9, timings.predicted_s)


class TransformersModel:
    """A causal language model of transformers. The KV cache is kept as far as the next prompt agrees with the last."""

    def __init__(self, path: Path, device: str = "auto") -> None:
        import torch

        from sala.backends.torch.loader import pick_device
        from sala.lab.dense import load_dense

        self._torch = torch
        self.tokenizer = Tokenizer.load(path)
        self._model = load_dense(path, pick_device(device), "auto")
        with Checkpoint(path) as checkpoint:
            self.fingerprint = f"transformers {checkpoint.fingerprint()[:16]} {self._model.dtype}"
        self.name = path.name
        config, generation = self._model.config, self._model.generation_config
        self.max_tokens = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self._stops = {*_as_list(config.eos_token_id), *_as_list(generation.eos_token_id)}
        end = self.tokenizer.token_id("<|im_end|>")
        self._stops |= set() if end is None else {end}
        self._cache: Any = None
        self._read: Ids | None = None  # tokens in the cache

    def answer(self, case: Prepared, boundaries: tuple[int, ...], on_progress: OnProgress) -> TimedAnswer:
        question, torch = case.question, self._torch
        with torch.inference_mode():
            began = time.perf_counter()
            cached = self._keep(case.token_ids)
            token = self._prefill(case.token_ids, cached, on_progress)
            read_s, began = time.perf_counter() - began, time.perf_counter()
            written, text = [token], ""
            while token not in self._stops and len(written) < question.max_tokens:
                text = self.tokenizer.decode(written)
                if any(stop in text for stop in question.stops):
                    break
                token = self._forward([token])
                written.append(token)
        whole = self.tokenizer.decode([one for one in written if one not in self._stops])
        text = min((whole.partition(stop)[0] for stop in question.stops), key=len, default=whole)
        is_cut = text == whole and token not in self._stops
        seconds = time.perf_counter() - began
        return TimedAnswer(text, len(case.token_ids), cached, len(written), read_s, seconds, is_cut)

    def speeds(self) -> tuple[float, float]:
        ids = probe(self.tokenizer, min(PROBE_READ, self.max_tokens // 2))
        with self._torch.inference_mode():
            self._cache = self._read = None
            began = time.perf_counter()
            token = self._prefill(ids, 0, lambda *_: None)
            read_s, began = time.perf_counter() - began, time.perf_counter()
            for _ in range(PROBE_WRITTEN):
                token = self._forward([token])
        self._cache = self._read = None
        return len(ids) / read_s, PROBE_WRITTEN / (time.perf_counter() - began)

    def _keep(self, ids: Ids) -> int:
        """Cut the cache to what the prompt shares with the last one; return how many tokens that is."""
        shared = 0 if self._read is None else min(count_shared(self._read, ids), len(ids) - 1)
        if shared and hasattr(self._cache, "crop"):
            surplus = self._cache.get_seq_length() - shared
            if surplus > 0:
                self._cache.crop(-surplus)
        else:
            self._cache, shared = None, 0
        self._read = ids
        return shared

    def _prefill(self, ids: Ids, start: int, on_progress: OnProgress) -> int:
        token = 0
        for at in range(start, len(ids), CHUNK):
            token = self._forward(ids[at : at + CHUNK].tolist())
            on_progress(min(at + CHUNK, len(ids)), len(ids))
        return token

    def _forward(self, ids: Sequence[int]) -> int:
        """Return the most probable next token."""
        input_ids = self._torch.tensor([[*ids]], device=self._model.device)
        out = self._model(input_ids=input_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        return int(out.logits[0, -1].argmax())


def probe(tokenizer: Tokenizer, num_tokens: int) -> Any:
    """Return tokens of ordinary text."""
    import numpy as np

    from sala.lab.eval.tasks.prose import write_documents

    return np.array(tokenizer.encode(" ".join(write_documents(4)))[:num_tokens], np.int32)


def _as_list(value: Any) -> list[int]:
    return [] if value is None else [*value] if isinstance(value, list | tuple) else [value]
