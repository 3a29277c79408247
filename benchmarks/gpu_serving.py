"""Serving on a GPU through the engine, without HTTP: full 9B shapes with random weights, default settings.

    PYTHONPATH=. python benchmarks/gpu_serving.py [PART …]     writes benchmarks/gpu_serving.json after each case
    PYTHONPATH=. python benchmarks/gpu_serving.py --smoke      a tiny model on a CPU, to test the script itself

Parts, each of one to two minutes: start (from the start of a process until the engine has answered, without and with
compiled kernels on disk; after the former, the longest stall of prompts with lengths not seen before), first_token (by
length, warm), decode (greedy and sampled), load (closed loop), prefill (128K and 256K, in bf16 and with FP8 products),
quantized (decode with 8 and 4 bits), long (a prompt of a million tokens, and decode behind it).
`SALA_*` variables set options, e.g. SALA_MAX_BATCH=64. Results of earlier runs are kept, case by case.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from sala.backends.torch.executor import TorchExecutor, free_bytes, plan_capacity
from sala.backends.torch.loader import random_model
from sala.checkpoint.random import RELEASED, TINY
from sala.engine.engine import Engine
from sala.engine.scheduler import Request
from sala.lab.bench.meters import PowerMeter, Timeline, summarize
from sala.options.sources import resolve
from sala.protocol import Options, Sampling

FILE = Path(__file__).with_suffix(".json")
LIMIT_S = 110.0  # of a part: cases that would begin later are left out
NUM_WARM = 8  # tokens of each sequence before decoding is timed
NUM_STEPS = 100  # decode steps that are timed
REPEATS = 5
LENGTHS = (40, 512, 2048, 4096)
GREEDY = Sampling(temperature=0, ignore_eos=True, seed=0)
SAMPLED = replace(GREEDY, temperature=0.7, top_p=0.95, top_k=50)
DECODES = (
    ("1 x 4K greedy", 1, 4096, GREEDY),
    ("1 x 4K sampled", 1, 4096, SAMPLED),
    ("32 x 1K greedy", 32, 1024, GREEDY),
    ("32 x 1K sampled", 32, 1024, SAMPLED),
    ("128 x 256 greedy", 128, 256, GREEDY),
)
LOADS = (  # name, requests at a time, requests, tokens in, tokens out
    ("64 of 2048/128", 64, 128, 2048, 128),
    ("128 of 300/128", 128, 256, 300, 128),
    ("256 of 300/128", 256, 512, 300, 128),
    ("16 of 32768/256", 16, 16, 32768, 256),
)
PREFILLS = (("128K", 131072), ("256K", 262144))
LONGEST = 1 << 20
QUANTIZED = {  # bits, and what keeps 8 of them
    "8 bits": (8, ()),
    "4 bits": (4, ("lm_head",)),
    "4 bits, default file": (4, ("lm_head", "v_proj", "layers.31.")),
}
SHOWN = (  # label, path in the results, factor, bound, whether it is a lower one, vLLM 0.25.1 with a dense 8B model
    ("start to ready, kernels on disk, s", ("start", "cached", "ready_s"), 1, 20, False, None),
    ("start to ready, nothing on disk, s", ("start", "fresh", "ready_s"), 1, 75, False, 75),
    ("longest stall, prompts of 1 to 4,096 tokens, s", ("start", "fresh", "stall_s"), 1, 0.1, False, None),
    ("first token, 40 tokens, ms", ("first_token", "40", "warm_s"), 1e3, 12, False, 14.5),
    ("first token, 512 tokens, ms", ("first_token", "512", "warm_s"), 1e3, 17, False, 16.3),
    ("first token, 2,048 tokens, ms", ("first_token", "2048", "warm_s"), 1e3, 56, False, 52),
    ("first token, 4,096 tokens, ms", ("first_token", "4096", "warm_s"), 1e3, 108, False, 101),
    ("decode 1 x 4K greedy, tok/s", ("decode", "1 x 4K greedy", "per_second"), 1, 204, True, 185),
    ("decode 1 x 4K sampled, tok/s", ("decode", "1 x 4K sampled", "per_second"), 1, 202, True, 179),
    ("decode 32 x 1K greedy, tok/s", ("decode", "32 x 1K greedy", "per_second"), 1, 5000, True, None),
    ("decode 32 x 1K sampled, tok/s", ("decode", "32 x 1K sampled", "per_second"), 1, 4900, True, None),
    ("decode 128 x 256 greedy, tok/s", ("decode", "128 x 256 greedy", "per_second"), 1, 12500, True, None),
    ("64 of 2048/128, answers/s", ("load", "64 of 2048/128", "answers_per_second"), 1, 14.7, True, 14.6),
    ("64 of 2048/128, p99 between, ms", ("load", "64 of 2048/128", "between_tokens_s_p99"), 1e3, 150, False, None),
    ("128 of 300/128, tok/s out", ("load", "128 of 300/128", "output_per_second"), 1, 8400, True, 8345),
    ("256 of 300/128, tok/s out", ("load", "256 of 300/128", "output_per_second"), 1, 9700, True, 9622),
    ("16 of 32768/256, s", ("load", "16 of 32768/256", "seconds"), 1, 17, False, 25.6),
    ("16 of 32768/256, median first token, s", ("load", "16 of 32768/256", "first_token_s_p50"), 1, 8.7, False, 11.7),
    ("prefill 128K bf16, s", ("prefill", "128K auto", "seconds"), 1, 4.1, False, 11.1),
    ("prefill 256K bf16, s", ("prefill", "256K auto", "seconds"), 1, 8.5, False, 40.3),
    ("prefill 128K FP8, s", ("prefill", "128K fp8", "seconds"), 1, None, False, None),
    ("prefill 256K FP8, s", ("prefill", "256K fp8", "seconds"), 1, 5.4, False, None),
    ("decode, default 4-bit file, tok/s", ("quantized", "4 bits, default file", "per_second"), 1, 430, True, None),
    ("decode, all 4 bits, tok/s", ("quantized", "4 bits", "per_second"), 1, 480, True, None),
    ("decode, 8 bits, tok/s", ("quantized", "8 bits", "per_second"), 1, 325, True, None),
    ("1M tokens, bf16, s", ("long", "1M auto", "seconds"), 1, 39, False, None),
    ("1M tokens, FP8 products, s", ("long", "1M fp8", "seconds"), 1, 28, False, None),
)


@dataclass
class Bench:
    """The model, its default engine while that is open, and the results so far."""

    is_smoke: bool
    file: Path
    results: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.config = TINY if self.is_smoke else RELEASED
        self.device = torch.device("cpu" if self.is_smoke else "cuda")
        self.dtype = torch.float32 if self.is_smoke else torch.bfloat16
        self.options: Options = resolve(None, {"ctx": 1024, "max_batch": 4} if self.is_smoke else {})
        self._model: Any = None
        self._default: Engine | None = None
        self._executor: TorchExecutor | None = None
        self._seeds = count(random.SystemRandom().getrandbits(32))

    def small(self, number: int, divisor: int = 64, least: int = 1) -> int:
        """Return a length or count as it is, or much smaller for a smoke test."""
        return max(least, number // divisor) if self.is_smoke else number

    @property
    def model(self) -> Any:
        if self._model is None:
            self._model = random_model(self.config, self.dtype, self.device)
        return self._model

    @property
    def engine(self) -> Engine:
        """An engine with the default settings, which the parts share."""
        if self._default is None:
            self._default, self._executor = self._open(self.options)
        return self._default

    def close(self) -> None:
        """Close the default engine and free its memory."""
        if self._executor is not None:
            self._executor.close()
        self._default = self._executor = None
        self.release()

    @contextmanager
    def other_engine(self, **changes: Any) -> Iterator[Engine]:
        """Open an engine with other options instead of the default one."""
        self.close()
        engine, executor = self._open(replace(self.options, **changes))
        try:
            yield engine
        finally:
            executor.close()
            del engine, executor
            self.release()

    def _open(self, options: Options) -> tuple[Engine, TorchExecutor]:
        capacity = plan_capacity(self.config, options, self.dtype, self.device, free_bytes(self.device))
        executor = TorchExecutor(self.model, capacity, self.device, self.dtype, options)
        engine = Engine(executor, self.config.sparse_config, options)
        began = time.perf_counter()
        engine.warm_up(lambda done, total: None)
        print(f"  warmed up in {time.perf_counter() - began:.1f} s", flush=True)
        return engine, executor

    def release(self, is_model: bool = False) -> None:
        if is_model:
            self._model = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def prompts(self, number: int, length: int) -> list[list[int]]:
        """Return random prompts that no earlier request had, so that no cached prefix helps."""
        generator = random.Random(next(self._seeds))
        return [generator.choices(range(self.config.vocab_size), k=length) for _ in range(number)]

    def is_late(self) -> bool:
        return time.perf_counter() - self.began > LIMIT_S

    def keep(self, part: str, case: str, result: dict[str, Any]) -> None:
        """Print a result and write all of them."""
        self.results.setdefault(part, {})[case] = result
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        self.results["machine"] = {"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        shown = ", ".join(f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, int | float))
        print(f"[{time.perf_counter() - self.began:6.1f} s] {part}, {case}: {shown or result}", flush=True)
        self.file.write_text(json.dumps(self.results, indent=1) + "\n")


def drive(
    engine: Engine, prompts: Sequence[list[int]], sampling: Sampling, at_a_time: int
) -> tuple[float, list[Timeline]]:
    """Answer all prompts, so many at a time. Return the seconds and what came when; only updates count as tokens."""
    queue, alive, done = deque(prompts), {}, []
    began = time.perf_counter()
    while queue or alive:
        while queue and len(alive) < at_a_time:
            prompt = queue.popleft()
            timeline = Timeline(time.perf_counter(), num_input=len(prompt))
            alive[engine.submit(Request(prompt, sampling)).id] = timeline
        updates = engine.step()
        now = time.perf_counter()
        for update in updates:
            timeline = alive.get(update.sequence.id)
            if timeline is None:  # the late update of a sequence that has finished
                continue
            if update.sampled:
                timeline.events.append(now)
                timeline.num_output += len(update.sampled)
            if update.sequence.is_finished:
                if update.sequence.error is not None:
                    raise update.sequence.error
                done.append(alive.pop(update.sequence.id))
    seconds = time.perf_counter() - began
    while not engine.is_idle:
        engine.step()
    return seconds, done


def first_token_s(bench: Bench, engine: Engine, length: int) -> float:
    """Return the seconds from the request to the first token of a prompt that runs alone."""
    _, [timeline] = drive(engine, bench.prompts(1, length), replace(GREEDY, max_tokens=2), 1)
    return timeline.first_token_s


# The parts.


def start(bench: Bench) -> None:
    """Start twice in processes of their own: with an empty directory of compiled kernels, and with what that left."""
    bench.close()
    bench.release(is_model=True)
    with tempfile.TemporaryDirectory(prefix="kernels-") as directory:
        for case in ("fresh", "cached"):
            caches = {"TRITON_CACHE_DIR": f"{directory}/triton", "XDG_CACHE_HOME": f"{directory}/cache"}
            command = [sys.executable, __file__, "--child", case, *(["--smoke"] if bench.is_smoke else [])]
            began = time.time()
            child = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(child.stdout.splitlines()[-1])
            ready = {"ready_s": found.pop("ready_at") - began, "engine_s": found.pop("engine_s")}
            bench.keep("start", case, {**ready, **found})


def run_child(bench: Bench, case: str) -> None:
    """Open an engine, answer a short prompt, and print when; then measure stalls, if kernels were compiled anew."""
    bench.model  # noqa: B018 - the weights are made now; a server would load them
    began = time.perf_counter()
    first_token_s(bench, bench.engine, 16)
    found = {"ready_at": time.time(), "engine_s": time.perf_counter() - began}
    print(json.dumps({**found, **(measure_stalls(bench) if case == "fresh" else {})}))


def measure_stalls(bench: Bench) -> dict[str, Any]:
    """Return by how much the first prompt of a length waited longer than the second one, at worst."""
    generator = random.Random(0)
    lengths = [*range(1, 131, 3), *generator.sample(range(131, 4096), 60), 1024, 2048, 4096]
    lengths = [7, 8, 9] if bench.is_smoke else generator.sample(lengths, len(lengths))
    bench.began, stalls = time.perf_counter(), {}
    for length in lengths:
        if bench.is_late():
            break
        first, second = (first_token_s(bench, bench.engine, length) for _ in range(2))
        stalls[length] = first - second
    worst = sorted(stalls, key=lambda length: -stalls[length])[:5]
    by_length = {str(length): stalls[length] for length in worst}
    return {"stall_s": stalls[worst[0]], "num_lengths": len(stalls), "worst": by_length}


def first_token(bench: Bench) -> None:
    for length in LENGTHS:
        num_tokens = bench.small(length)
        first = first_token_s(bench, bench.engine, num_tokens)
        warm = [first_token_s(bench, bench.engine, num_tokens) for _ in range(REPEATS)]
        result = {"first_s": first, "warm_s": statistics.median(warm), "worst_s": max(warm)}
        bench.keep("first_token", str(length), result)


def decode(bench: Bench) -> None:
    """Time steps in which every sequence decodes."""
    for name, number, length, sampling in DECODES:
        if bench.is_late():
            break
        number, steps = bench.small(number, 16), bench.small(NUM_STEPS, 10)
        sampling = replace(sampling, max_tokens=NUM_WARM + 2 * steps)
        prompts = bench.prompts(number, bench.small(length))
        bench.keep("decode", name, time_decode(bench.engine, [Request(prompt, sampling) for prompt in prompts], steps))


def time_decode(engine: Engine, requests: Sequence[Request], num_steps: int) -> dict[str, Any]:
    sequences = [engine.submit(request) for request in requests]
    seen: Counter[int] = Counter()

    def step() -> int:
        updates = engine.step()
        for update in updates:
            if update.sequence.error is not None:
                raise update.sequence.error
            seen[update.sequence.id] += len(update.sampled)
        return sum(len(update.sampled) for update in updates)

    while any(seen[one.id] < NUM_WARM for one in sequences) and not any(one.is_finished for one in sequences):
        step()
    began, num_tokens = time.perf_counter(), 0
    while num_tokens < num_steps * len(sequences) and not engine.is_idle:
        num_tokens += step()
    seconds = time.perf_counter() - began
    for one in sequences:
        engine.cancel(one)
    while not engine.is_idle:
        engine.step()
    return {"per_second": num_tokens / seconds, "tokens": num_tokens, "seconds": seconds}


def load(bench: Bench) -> None:
    """Closed loop: when an answer ends, the next request begins."""
    for name, at_a_time, number, num_input, num_output in LOADS:
        if bench.is_late():
            break
        at_a_time, number = bench.small(at_a_time, 16), bench.small(number, 32)
        num_input, sampling = bench.small(num_input), replace(GREEDY, max_tokens=bench.small(num_output, 16))
        warm = replace(sampling, max_tokens=4)
        drive(bench.engine, bench.prompts(min(at_a_time, 8), num_input), warm, at_a_time)
        prompts, preempted = bench.prompts(number, num_input), bench.engine.scheduler.num_preemptions
        with PowerMeter() as power:
            seconds, timelines = drive(bench.engine, prompts, sampling, at_a_time)
        result = summarize(timelines, seconds)
        energy = {"watts": power.watts, "joules_per_1k_output": power.joules_per_1k(number * sampling.max_tokens)}
        preemptions = bench.engine.scheduler.num_preemptions - preempted
        bench.keep("load", name, {**result, **energy, "preemptions": preemptions})


def prefill(bench: Bench) -> None:
    """One long prompt alone, until its first token; another one of that length before."""
    for kind in ("auto", "fp8"):
        if bench.is_late():
            break
        if bench.is_smoke and kind == "fp8":  # needs a GPU
            continue
        ctx = bench.small(PREFILLS[-1][1], 1024) + 64
        with bench.other_engine(prefill=kind, ctx=ctx) as engine:
            for name, length in PREFILLS:
                num_tokens = bench.small(length, 1024)
                first_token_s(bench, engine, num_tokens)
                seconds = first_token_s(bench, engine, num_tokens)
                bench.keep("prefill", f"{name} {kind}", {"seconds": seconds, "per_second": num_tokens / seconds})
    bench.release(is_model=True)  # it also holds weights in FP8 now


def quantized(bench: Bench) -> None:
    """Decode one sequence with quantized matrices."""
    if bench.is_smoke:  # packed matrices need a GPU here
        return
    from benchmarks.gpu_quant import quantize_model

    sampling = replace(GREEDY, max_tokens=NUM_WARM + 2 * NUM_STEPS)
    for name, (bits, keep) in QUANTIZED.items():
        if bench.is_late():
            break
        bench.release(is_model=True)
        quantize_model(bench.model, bits, keep)
        with bench.other_engine(max_batch=1, ctx=8192) as engine:
            requests = [Request(prompt, sampling) for prompt in bench.prompts(1, 4096)]
            bench.keep("quantized", name, time_decode(engine, requests, NUM_STEPS))
    bench.release(is_model=True)


def long(bench: Bench) -> None:
    """A million tokens until the first token, then decode, against decode behind 4K tokens in the same engine."""
    steps, length = bench.small(NUM_STEPS, 10), bench.small(LONGEST, 4096)
    sampling = replace(GREEDY, max_tokens=NUM_WARM + 2 * steps)
    for kind in ("auto",) if bench.is_smoke else ("auto", "fp8"):
        with bench.other_engine(prefill=kind, ctx=length + 512, max_batch=2) as engine:
            short, deep = ([Request(prompt, sampling)] for size in (4096, length) for prompt in bench.prompts(1, size))
            if kind == "auto":
                bench.keep("long", "decode at 4K", time_decode(engine, short, steps))
            began = time.perf_counter()
            found = time_decode(engine, deep, steps)
            seconds = time.perf_counter() - began - found["seconds"]  # with a few tokens of the answer
            bench.keep("long", f"1M {kind}", {"seconds": seconds, **({} if kind == "fp8" else {"decode": found})})
    bench.release(is_model=True)


PARTS: dict[str, Callable[[Bench], None]] = {
    "start": start, "first_token": first_token, "decode": decode, "load": load, "prefill": prefill,
    "quantized": quantized, "long": long,
}  # fmt: skip


def print_table(results: dict[str, Any]) -> None:
    """Print what was measured beside what is aimed at."""
    print(f"\n{'':52}{'measured':>10}{'bound':>10}{'vLLM 8B':>10}")
    for label, path, factor, bound, is_least, peer in SHOWN:
        value: Any = results
        for key in path:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        if not isinstance(value, int | float):
            continue
        measured = value * factor
        is_met = bound is None or (measured >= bound if is_least else measured <= bound)
        cells = (
            "–" if one is None else f"{one:,.0f}" if one >= 1000 else f"{one:.4g}" for one in (measured, bound, peer)
        )
        print(f"{label:52}" + "".join(f"{cell:>10}" for cell in cells) + ("" if is_met else "  missed"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--output", type=Path, default=FILE, metavar="FILE.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := sorted(set(given.parts) - PARTS.keys()):
        parser.error(f"{unknown[0]} is not a part; use {', '.join(PARTS)}")
    if given.smoke and given.output == FILE and given.child is None:
        parser.error("--smoke needs --output: its figures mean nothing")
    bench = Bench(given.smoke, given.output)
    if given.child is not None:
        run_child(bench, given.child)
        return 0
    if given.output.exists():
        bench.results = json.loads(given.output.read_text())
    failed = False
    for part in given.parts or PARTS:
        bench.began = time.perf_counter()
        try:
            PARTS[part](bench)
        except Exception:  # the other parts can still be measured
            traceback.print_exc()
            failed = True
            bench.close()
    print_table(bench.results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
