"""Our model and a dense one of mlx-lm, both on MLX, measured alike: time to first token and decoding speed."""

import gc
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sala.backends.memory import USABLE, estimate
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig, read_json_object
from sala.engine.requests import Call
from sala.errors import InputError, MissingExtra, SalaError
from sala.lab.bench.dense import GROUP_SIZE, element_bytes, running_bytes, stored_bytes
from sala.lab.bench.measure import WARM_TOKENS, Latency, need_memory, need_room
from sala.llm import LLM
from sala.protocol import Options, Sampling

WARM_PROMPT = 64  # tokens
PREFILL = 2048  # tokens that mlx-lm reads at a time


def need_mlx_lm() -> None:
    """Raise an error, before anything is measured, if MLX or mlx-lm is missing."""
    if find_spec("mlx") is None:
        raise MissingExtra("mlx", "mlx")
    if find_spec("mlx_lm") is None:
        raise SalaError("mlx-lm is not installed", "run: pip install mlx-lm")


def check_fit(ours: Path, theirs: Path, options: Options, num_tokens: int) -> None:
    """Raise SalaError before anything is loaded if memory does not hold one of the models with `num_tokens`."""
    with Checkpoint(ours) as checkpoint:
        weights = checkpoint.nbytes
    need_memory(ours.name, weights, _own_bytes(ours, num_tokens), _free(options))
    table = read_json_object(theirs / "config.json")
    # mlx-lm quantizes after loading, so the plain weights are in memory once, whatever the bits
    need_memory(theirs.name, stored_bytes(theirs), _dense_bytes(table, num_tokens), _free(options))


def _own_bytes(path: Path, num_tokens: int) -> int:
    """Return the bytes that our model needs for `num_tokens` beside its weights."""
    config = SalaConfig.load(path)
    needed = estimate(config, count_parameters(expected_tensors(config)), num_tokens, 1, num_snapshots=0)
    return needed.total - needed.weights


def _dense_bytes(table: Mapping[str, Any], num_tokens: int) -> int:
    return running_bytes(table, num_tokens, element_bytes(table, 2), PREFILL)


def _free(options: Options) -> int:
    from sala.backends.mlx.executor import free_bytes
    from sala.backends.mlx.loader import pick_device

    return free_bytes(pick_device(options.device))


class SalaOnMlx:
    """Our model on MLX, opened for the longest of `lengths` (with its answer) that fits into memory."""

    def __init__(self, path: Path, options: Options, lengths: Sequence[int]) -> None:
        self._path, self._options = path, options
        with Checkpoint(path) as checkpoint:
            room = USABLE * _free(options) - checkpoint.nbytes
        self._longest = max((one for one in lengths if _own_bytes(path, one) <= room), default=min(lengths))
        own = replace(options, backend="mlx", ctx=self._longest, max_batch=1, snapshots=options.snapshots or 0)
        self._llm = LLM(path, options=own)
        self._answer(WARM_PROMPT, WARM_TOKENS)

    def _answer(self, num_tokens: int, new_tokens: int) -> Any:
        sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=new_tokens)
        return self._llm.answer(Call(None, sampling, prompt=_prompt(num_tokens, self._llm.config.vocab_size)))

    def measure(self, num_tokens: int, new_tokens: int) -> Latency:
        """Raise SalaError if memory does not hold so many tokens."""
        if num_tokens + new_tokens > self._longest:
            need_room(num_tokens, _own_bytes(self._path, num_tokens + new_tokens), _free(self._options))
            raise SalaError(
                f"{num_tokens:,} tokens did not fit when the model was loaded", "free some memory, and run it again"
            )
        return _measure(num_tokens, partial(self._time, num_tokens, new_tokens))

    def _time(self, num_tokens: int, new_tokens: int) -> tuple[float, int, float]:
        timings = self._answer(num_tokens, new_tokens).timings
        return timings.prompt_s, timings.predicted_n, timings.predicted_s

    def close(self) -> None:
        self._llm.close()
        gc.collect()


class DenseOnMlx:
    """A dense model of mlx-lm, quantized to `bits` unless it is quantized already."""

    def __init__(self, path: Path, options: Options, bits: int) -> None:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        from sala.backends.mlx.loader import pick_device

        self._device, self._options = pick_device(options.device), options
        try:
            with mx.stream(self._device):
                self._model, table = load_model(path)
        except (ValueError, KeyError, OSError) as error:
            line = " ".join(str(error).split())[:300]
            raise SalaError(f"mlx-lm cannot load {path}: {line}", "check that its files are complete") from None
        stored = (table.get("quantization") or {}).get("bits", 16)
        if stored not in (16, bits):
            raise InputError(
                "bits", f"is {bits}, and {path.name} has {stored}", f"use --bits {stored}, or its original"
            )
        if bits < 16 and stored == 16:

            def can_be_packed(_: str, module: Any) -> bool:
                return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0

            with mx.stream(self._device):
                nn: Any = import_module("mlx.nn")
                nn.quantize(self._model, group_size=GROUP_SIZE, bits=bits, class_predicate=can_be_packed)
                mx.eval(self._model.parameters())
        self._table, self._vocab_size = table, int(table["vocab_size"])
        self._run(WARM_PROMPT, WARM_TOKENS)

    def measure(self, num_tokens: int, new_tokens: int) -> Latency:
        return _measure(num_tokens, partial(self._run, num_tokens, new_tokens))

    def _run(self, num_tokens: int, new_tokens: int) -> tuple[float, int, float]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        mx.clear_cache()  # frees the buffers of shorter prompts
        need_room(num_tokens, _dense_bytes(self._table, num_tokens + new_tokens), _free(self._options))
        with mx.stream(self._device):
            began = time.perf_counter()
            prompt = mx.array(_prompt(num_tokens, self._vocab_size))
            tokens = generate_step(prompt, self._model, max_tokens=new_tokens)
            next(tokens)
            first = time.perf_counter()
            count = sum(1 for _ in tokens)
            return first - began, count, time.perf_counter() - first


def _prompt(num_tokens: int, vocab_size: int) -> list[int]:
    return random.Random(num_tokens).choices(range(vocab_size), k=num_tokens)  # noqa: S311 - numbers to compute with


def _measure(num_tokens: int, run: Callable[[], tuple[float, int, float]]) -> Latency:
    import mlx.core as mx

    mx.reset_peak_memory()
    first_s, count, decode_s = run()
    speed = count / decode_s if decode_s > 0 else math.inf
    return Latency(num_tokens, first_s, num_tokens / first_s, speed, int(mx.get_peak_memory()))
