"""Serving on a GPU through the engine, without HTTP: full 9B shapes with random weights, default settings.

    PYTHONPATH=. python benchmarks/gpu_serving.py [PART …]     writes benchmarks/gpu_serving.json, or --output FILE
    PYTHONPATH=. python benchmarks/gpu_serving.py --smoke --output FILE      a tiny model on a CPU: tests the script

Parts, each of one to two minutes, start of up to four: start (from the start of a process until the engine has
answered, without and with compiled kernels on disk; after the former, the longest stalls of requests of kinds and
lengths not seen before), first_token (by length), decode (greedy and sampled), load (closed loop), quantized (decode
with 4 and 8 bits), prefill (128K and 256K, in bf16 and with FP8 products), peer256 (256K, ours and a dense model of
Qwen3-8B's shapes in transformers, in one run), long (a prompt of a million tokens, and decode behind it).

All of them take more than ten minutes. Where a command may not, use two; the second finds the kernels of the first:

    PYTHONPATH=. python benchmarks/gpu_serving.py --output FILE start first_token decode load
    PYTHONPATH=. python benchmarks/gpu_serving.py --output FILE quantized prefill peer256 long

`SALA_*` variables set options, e.g. SALA_MAX_BATCH=64. Results are written after each case, with the commit
(`--commit`, BENCH_COMMIT or git) and the date; those of earlier runs are kept, case by case.
"""

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import platformdirs
import torch

from benchmarks.outputs import load as load_results
from benchmarks.outputs import make_parser, parse, run_parts, save, stamp
from benchmarks.stalls import GREEDY, SAMPLED, drive, measure_stalls
from sala.backends.torch.executor import TorchExecutor, free_bytes, plan_capacity
from sala.backends.torch.loader import random_model
from sala.checkpoint.random import RELEASED, TINY
from sala.engine.engine import WARM_LENGTHS, Engine
from sala.engine.scheduler import Request
from sala.lab.bench.meters import PowerMeter, summarize
from sala.options.sources import resolve
from sala.protocol import Options

FILE = Path(__file__).with_suffix(".json")
KERNELS = platformdirs.user_cache_path("sala") / "bench-kernels"  # what `start` has compiled, for all later parts
LIMIT_S = 110.0  # of a part: cases that would begin later are left out
CHILD_S = 250.0  # for a start and its stalls; then the process is ended
NUM_WARM = 8  # tokens of each sequence before decoding is timed
NUM_STEPS = 100  # decode steps that are timed
REPEATS = 5
LENGTHS = (40, 512, 2048, 4096)
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
    "4 bits, default file": (4, ("lm_head", "v_proj", "layers.31.")),
    "4 bits": (4, ("lm_head",)),
    "8 bits": (8, ()),
}
SHOWN = (  # label, path in the results, factor, bound, whether it is a lower one, vLLM 0.25.1 with a dense 8B model
    ("start to ready, kernels on disk, s", ("start", "cached", "ready_s"), 1, 20, False, None),
    ("start to ready, nothing on disk, s", ("start", "fresh", "ready_s"), 1, 75, False, 75),
    ("longest stall of a request of a new kind or length, s", ("start", "fresh", "stall_s"), 1, 0.1, False, None),
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
    ("prefill 256K, times as fast as the dense peer", ("peer256", "256K", "ratio"), 1, None, True, None),
    ("the same with FP8 products", ("peer256", "256K", "ratio_fp8"), 1, None, True, None),
    ("1M tokens, bf16, s", ("long", "1M auto", "seconds"), 1, 39, False, None),
    ("1M tokens, FP8 products, s", ("long", "1M fp8", "seconds"), 1, 28, False, None),
)


@dataclass
class Bench:
    """The model, its default engine while that is open, and the results so far."""

    is_smoke: bool
    file: Path
    commit: str | None = None
    results: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.config = TINY if self.is_smoke else RELEASED
        self.device = torch.device("cpu" if self.is_smoke else "cuda")
        self.dtype = torch.float32 if self.is_smoke else torch.bfloat16
        self.options: Options = resolve(None, {"ctx": 1024, "max_batch": 4} if self.is_smoke else {})
        self.kernels = self.file.parent / "kernels" if self.is_smoke else KERNELS
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
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        run = {**stamp(self.commit), "device": name, "torch": torch.__version__}
        self.results.setdefault(part, {})[case] = {**result, "run": run}
        shown = ", ".join(f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, int | float))
        print(f"[{time.perf_counter() - self.began:6.1f} s] {part}, {case}: {shown or result}", flush=True)
        save(self.file, self.results)


def first_token_s(bench: Bench, engine: Engine, length: int) -> float:
    """Return the seconds from the request to the first token of a prompt that runs alone."""
    _, [timeline] = drive(engine, bench.prompts(1, length), replace(GREEDY, max_tokens=2), 1)
    return timeline.first_token_s


# The parts.


def start(bench: Bench) -> None:
    """Start twice in processes of their own: with an empty directory of compiled kernels, and with what that left."""
    bench.close()
    bench.release(is_model=True)
    shutil.rmtree(bench.kernels, ignore_errors=True)
    for case in ("fresh", "cached"):
        caches = {"TRITON_CACHE_DIR": f"{bench.kernels}/triton", "XDG_CACHE_HOME": f"{bench.kernels}/cache"}
        options = ["--smoke"] if bench.is_smoke else []
        command = [sys.executable, __file__, *options, "--output", str(bench.file), "--child", case]
        began, error = time.time(), None
        try:
            output = subprocess.run(
                command, env={**os.environ, **caches}, stdout=subprocess.PIPE, check=True, timeout=CHILD_S
            ).stdout
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as ended:  # what it has printed counts
            output, error = ended.stdout or b"", ended
        found: dict[str, Any] = {}
        for line in output.decode().splitlines():
            found |= json.loads(line) if line.startswith("{") else {}
        if "ready_at" in found:
            ready = {"ready_s": found.pop("ready_at") - began, "engine_s": found.pop("engine_s")}
            bench.keep("start", case, {**ready, **found})
        if error is not None:
            raise error


def run_child(bench: Bench, case: str) -> None:
    """Open an engine, answer a short prompt, and print when; then measure stalls, if kernels were compiled anew."""
    bench.model  # noqa: B018 - the weights are made now; a server would load them
    began = time.perf_counter()
    first_token_s(bench, bench.engine, 16)
    print(json.dumps({"ready_at": time.time(), "engine_s": time.perf_counter() - began}), flush=True)
    if case == "fresh":
        print(json.dumps(measure_stalls(bench)), flush=True)


def cold_length(length: int) -> int:
    """Return a length near by that the warm-up has not computed."""
    return next(near for near in range(length - 3, 0, -1) if near not in WARM_LENGTHS)


def first_token(bench: Bench) -> None:
    """First a length that neither the warm-up nor a request had, then the length itself."""
    for length in LENGTHS:
        num_tokens = bench.small(length, least=8)
        cold = cold_length(num_tokens)
        first = first_token_s(bench, bench.engine, cold)
        warm = [first_token_s(bench, bench.engine, num_tokens) for _ in range(1 + REPEATS)][1:]
        result = {"first_s": first, "cold_length": cold, "warm_s": statistics.median(warm), "worst_s": max(warm)}
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
        with bench.other_engine(prefill=kind, ctx=ctx, max_batch=2) as engine:
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
    sizes = (bench.small(4096), length)
    sampling = replace(GREEDY, max_tokens=NUM_WARM + 2 * steps)
    for kind in ("auto",) if bench.is_smoke else ("auto", "fp8"):
        with bench.other_engine(prefill=kind, ctx=length + 512, max_batch=2) as engine:
            short, deep = ([Request(prompt, sampling)] for size in sizes for prompt in bench.prompts(1, size))
            if kind == "auto":
                bench.keep("long", "decode at 4K", time_decode(engine, short, steps))
            began = time.perf_counter()
            found = time_decode(engine, deep, steps)
            seconds = time.perf_counter() - began - found["seconds"]  # with a few tokens of the answer
            bench.keep("long", f"1M {kind}", {"seconds": seconds, **({} if kind == "fp8" else {"decode": found})})
    bench.release(is_model=True)


def peer256(bench: Bench) -> None:
    """256K tokens until the first one, in bf16 and with FP8 products, and by a dense model of Qwen3-8B's shapes."""
    from benchmarks.gpu_model import REST_S, qwen

    name, length = "256K", bench.small(262144, 1024)
    result: dict[str, Any] = {}
    for kind in ("auto",) if bench.is_smoke else ("auto", "fp8"):
        with bench.other_engine(prefill=kind, ctx=length + 64, max_batch=2) as engine:
            first_token_s(bench, engine, bench.small(32768, 1024))
            time.sleep(0 if bench.is_smoke else REST_S)
            result["seconds" if kind == "auto" else "seconds_fp8"] = first_token_s(bench, engine, length)
        bench.keep("peer256", name, result)
    bench.release(is_model=True)
    tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    peer = qwen(bench.device, **tiny if bench.is_smoke else {})
    with torch.inference_mode():
        for size in (bench.small(32768, 1024), length):  # the first one warms up
            ids = torch.randint(0, 500, (1, size), device=bench.device)
            time.sleep(0 if bench.is_smoke else REST_S)
            began = time.perf_counter()
            peer(ids, logits_to_keep=1).logits.argmax().item()
            result["peer_seconds"] = time.perf_counter() - began
    del peer
    bench.release()
    ratios = {key.replace("seconds", "ratio"): result["peer_seconds"] / result[key] for key in list(result)[:-1]}
    bench.keep("peer256", name, {**result, **ratios})


PARTS: dict[str, Callable[[Bench], None]] = {
    "start": start, "first_token": first_token, "decode": decode, "load": load, "quantized": quantized,
    "prefill": prefill, "peer256": peer256, "long": long,
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


def adopt(results: dict[str, Any]) -> dict[str, Any]:
    """Give every result of an older file, which had one date for all, what is known about its run."""
    if machine := results.pop("machine", None):
        for cases in results.values():
            for result in cases.values():
                result.setdefault("run", {"commit": "unknown", **machine})
    return results


def main() -> int:
    parser = make_parser(__doc__, FILE, list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parse(parser, list(PARTS))
    if given.smoke and given.output == FILE:
        parser.error("--smoke needs --output: its figures mean nothing")
    bench = Bench(given.smoke, given.output, given.commit)
    if given.child is not None:
        run_child(bench, given.child)
        return 0
    os.environ.setdefault("TRITON_CACHE_DIR", f"{bench.kernels}/triton")
    bench.results = adopt(load_results(given.output))

    def run(part: str) -> None:
        bench.began = time.perf_counter()
        PARTS[part](bench)

    def clear(part: str, is_good: bool) -> None:
        if not is_good:
            bench.close()

    status = run_parts({part: partial(run, part) for part in PARTS}, given.parts, clear)
    print_table(bench.results)
    return status


if __name__ == "__main__":
    sys.exit(main())
