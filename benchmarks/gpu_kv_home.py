"""Keys and values in host memory on a GPU held to 24 or 12 GB: full 9B shapes, random weights in 4 bits.

    PYTHONPATH=. python benchmarks/gpu_kv_home.py [PART …]     writes benchmarks/gpu_kv_home.json, or --output FILE
    PYTHONPATH=. python benchmarks/gpu_kv_home.py --smoke --output FILE      a tiny model on a CPU: tests the script

Parts: bus (how fast kernels read blocks of host memory, and bulk copies), same (tokens of the answer with pages on the
device and in host memory), decode (a million tokens are read and answered within 24 GB: with pages on the device, in
host memory with the smallest hot pool, and with one of 1 GB), long (four million tokens within 24 GB), small (a million
tokens within 12 GB: FP8 pages on the device, and pages in host memory). `decode` reads a million tokens three times,
`small` twice; each of the parts should be given a command of its own where a command may not take long.

A case that is in the output already is left out, so a run that was ended goes on where it stopped; `--again` measures
it anew. Decoding is timed on text of its own (each token as sampled) and on one token that repeats, where neighbouring
steps select the same blocks; `fetched` is how many blocks a step brings into the hot pool, of all layers. Results are
written after each case, with the commit (`--commit`, BENCH_COMMIT or git) and the date. On a CPU there is no host
memory beside the device's: `--smoke` keeps all pages there.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_serving import NUM_WARM, Bench, time_decode
from benchmarks.outputs import load, make_parser, parse, run_parts
from benchmarks.stalls import GREEDY
from sala.backends.torch.host_memory import HostMemory
from sala.backends.torch.kernels import hot_pages
from sala.backends.torch.kernels.spans import PackedSpan, table_of
from sala.engine.engine import Engine
from sala.engine.scheduler import Request

FILE = Path(__file__).with_suffix(".json")
GB = 10**9
NUM_STEPS = 100  # decode steps that are timed
NUM_COUNTED = 20  # decode steps whose fetched blocks are counted
REPEATED = 7  # the token of text whose neighbours agree
MILLION = 1 << 20
SPARE = 1024  # tokens of the answer
HELD = {"24 GB": 24 * GB, "12 GB": 12 * GB}
HOMES: dict[str, dict[str, Any]] = {
    "device": {"kv_home": "device"},
    "host, least hot pool": {"kv_home": "host", "kv_hot": 64 << 20},
    "host, hot pool of 1 GB": {"kv_home": "host", "kv_hot": GB},
}
WITHOUT_POOL: dict[str, dict[str, Any]] = {"host, no hot pool": {"kv_home": "host", "kv_hot": 0}}
SHOWN = (  # label, case, what is divided (None: the value itself), by which case, bound
    ("decode at 1M, host by device", "host, least hot pool", "own", "device", 0.75),
    ("the same with a hot pool of 1 GB", "host, hot pool of 1 GB", "own", "device", None),
    ("the same, neighbours agree", "host, hot pool of 1 GB", "repeated", "device", 0.9),
)


@dataclass
class HomeBench(Bench):
    """The model in 4 bits; cases that are measured already are left out."""

    again: bool = False

    @property
    def model(self) -> Any:
        is_new, model = self._model is None, super().model
        if is_new and not self.is_smoke:  # packed matrices need a GPU here
            from benchmarks.gpu_quant import quantize_model

            quantize_model(model, 4, ("lm_head",))
            self.release()
        return model

    def is_due(self, part: str, case: str) -> bool:
        is_due = self.again or case not in self.results.get(part, {})
        if not is_due:
            print(f"  {part}, {case}: measured already", flush=True)
        return is_due

    @contextmanager
    def held(self, limit: str) -> Iterator[None]:
        """Hold the process to so much memory of the device."""
        self.model  # noqa: B018 - is quantized before, which takes more
        if self.device.type != "cuda":
            yield
            return
        total = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, HELD[limit] / total), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def peak(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        return {"peak_gb": torch.cuda.max_memory_reserved(self.device) / GB}

    def home(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a case; on a CPU its pages stay where they are."""
        return {"kv_home": "device"} if self.is_smoke else changes

    def prompt(self, length: int, seed: int) -> list[int]:
        """Return the same random prompt whenever it is asked for."""
        return random.Random(seed).choices(range(self.config.vocab_size), k=length)


def bus(bench: HomeBench) -> None:
    """Blocks of a decode step at random places, the context of a layer, and the same by bulk copies, from 8 GiB."""
    if bench.is_smoke or not bench.is_due("bus", "blocks"):
        return
    config = bench.config
    groups, block, dim = config.num_key_value_heads, config.sparse_config.block_size, config.head_dim
    num_pages = (4 << 30) // (groups * block * dim * 2)
    memory = HostMemory(bench.device, 8 << 30, 2)
    k, v = (memory.empty((groups, num_pages, block, dim), torch.bfloat16) for _ in range(2))
    for count in (96, 384, 1536, 16384):
        to_k, to_v = (torch.empty(groups, count, block, dim, dtype=k.dtype, device=bench.device) for _ in range(2))
        spans = table_of([PackedSpan(0, count * block)], bench.device)
        first = torch.zeros(1, dtype=torch.int32, device=bench.device)
        table = torch.randperm(num_pages, device=bench.device)[:count].int()[None]

        def fetch(
            to_k: torch.Tensor = to_k, to_v: torch.Tensor = to_v, table: torch.Tensor = table,
            spans: torch.Tensor = spans, first: torch.Tensor = first,
        ) -> None:  # fmt: skip
            hot_pages.stage(k, v, None, to_k, to_v, None, table, spans, first)

        def copy(to_k: torch.Tensor = to_k, count: int = count) -> None:
            for group in range(groups):
                to_k[group].copy_(memory.at_host(k)[group, :count], non_blocking=True)

        num_bytes = 2 * to_k.numel() * 2
        result = {"blocks_gb_s": num_bytes / timed(fetch) / GB, "bulk_gb_s": num_bytes / 2 / timed(copy) / GB}
        fetch()
        torch.cuda.synchronize()
        is_right = all(torch.equal(to, pool[:, table[0].long()]) for to, pool in ((to_k, k), (to_v, v)))
        bench.keep("bus", f"{count} blocks", {**result, "is_right": is_right})
    bench.keep("bus", "blocks", {"done": 1})


def timed(work: Callable[[], None], repeats: int = 20) -> float:
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def same(bench: HomeBench) -> None:
    """Greedy answers to the same prompts, one after another and together, in each home."""
    sampling = replace(GREEDY, max_tokens=bench.small(64, 16))
    lengths = [bench.small(length, 64) for length in (1000, 9000, 40000)]
    for kv in ("auto",) if bench.is_smoke else ("auto", "fp8"):
        if not bench.is_due("same", kv):
            continue
        found = {}
        for name, changes in (HOMES | WITHOUT_POOL).items():
            options = {**bench.home(changes), "kv": kv, "ctx": bench.small(65536), "max_batch": 4}
            with bench.other_engine(**options, snapshots=4) as engine:
                requests = [Request(bench.prompt(length, length), sampling) for length in lengths]
                alone = [answer(engine, [request])[0] for request in requests]
                together = answer(engine, [Request(bench.prompt(length, -length), sampling) for length in lengths])
                found[name] = (alone, together, [answer(engine, [request])[0] for request in requests])
        first = found["device"]
        bench.keep("same", kv, {name: tokens == first for name, tokens in found.items()})


def answer(engine: Engine, requests: list[Request]) -> list[list[int]]:
    sequences = [engine.submit(request) for request in requests]
    while not engine.is_idle:
        engine.step()
    for one in sequences:
        if one.error is not None:
            raise one.error
    return [[token.token for token in one.sampled] for one in sequences]


def decode(bench: HomeBench) -> None:
    """Read a million tokens and decode behind them, within 24 GB."""
    with bench.held("24 GB"):
        for name, changes in HOMES.items():
            if bench.is_due("decode", name):
                bench.keep("decode", name, read_and_answer(bench, MILLION, bench.home(changes)))


def long(bench: HomeBench) -> None:
    """Read four million tokens to the end and answer, within 24 GB."""
    with bench.held("24 GB"):
        if bench.is_due("long", "4M"):
            options = bench.home({"kv_home": "host"})
            bench.keep("long", "4M", read_and_answer(bench, 4 * MILLION, options))


def small(bench: HomeBench) -> None:
    """A million tokens within 12 GB."""
    kinds = {"FP8 pages": {"kv": "fp8", "kv_home": "device"}, "host": {"kv_home": "host"}}
    with bench.held("12 GB"):
        for name, changes in kinds.items():
            if bench.is_due("small", name):
                kv = {} if bench.is_smoke else changes
                options = {**kv, **bench.home(changes), **kv, "prefill_chunk": bench.small(2048)}
                bench.keep("small", name, read_and_answer(bench, MILLION, options))


def read_and_answer(bench: HomeBench, length: int, options: dict[str, Any]) -> dict[str, Any]:
    """Read a prompt of this length; time the reading, and decoding of text of its own and of one token that repeats."""
    length, steps = bench.small(length, 1024), bench.small(NUM_STEPS, 10)
    prompt = bench.prompt(length, length)
    more = replace(GREEDY, max_tokens=NUM_WARM + 2 * steps)
    kinds = {"own": more, "repeated": replace(more, logit_bias={REPEATED: 100.0})}
    with bench.other_engine(**options, ctx=length + SPARE, max_batch=1) as engine:
        began = time.perf_counter()
        first = answer(engine, [Request(prompt, replace(GREEDY, max_tokens=2))])
        result: dict[str, Any] = {"tokens": length, "read_s": time.perf_counter() - began, "first": first[0]}
        for kind, sampling in kinds.items():  # the prompt is in the cache now
            result[kind] = time_decode(engine, [Request(prompt, sampling)], steps)
            result[kind] |= count_fetched(engine, Request(prompt, sampling), bench.small(NUM_COUNTED, 4))
        return result | bench.peak()


def count_fetched(engine: Engine, request: Request, num_steps: int) -> dict[str, float]:
    """Return how many blocks a decode step brings into the hot pool, in all layers; nothing if there is no pool."""
    executor: Any = engine._executor
    pools = [pages.hot for pages in executor.cache.pages.values() if pages.hot is not None]
    if not pools:
        return {}
    sequence, counts = engine.submit(request), []
    for _ in range(NUM_WARM):
        engine.step()
    for _ in range(num_steps):
        before = [pool.pages.clone() for pool in pools]
        engine.step()
        changed = [int((pool.pages != old).sum()) for pool, old in zip(pools, before, strict=True)]
        counts.append(sum(changed))
    engine.cancel(sequence)
    while not engine.is_idle:
        engine.step()
    return {"fetched": statistics.mean(counts)}


PARTS: dict[str, Callable[[HomeBench], None]] = {
    "bus": bus, "same": same, "decode": decode, "long": long, "small": small,
}  # fmt: skip


def print_table(results: dict[str, Any]) -> None:
    """Print what was measured beside what is aimed at."""
    decoded = results.get("decode", {})
    print(f"\n{'':52}{'measured':>10}{'bound':>10}")

    def show(label: str, value: float, bound: float | None) -> None:
        is_met = bound is None or value >= bound
        print(f"{label:52}{value:>10.3f}{'–' if bound is None else bound:>10}" + ("" if is_met else "  missed"))

    for label, case, kind, by, bound in SHOWN:
        if case in decoded and by in decoded:
            show(label, decoded[case][kind]["per_second"] / decoded[by][kind]["per_second"], bound)
    for case in (case for case in decoded if case != "device" and "device" in decoded):
        show(f"reading 1M, {case}, by device", decoded["device"]["read_s"] / decoded[case]["read_s"], 0.85)
    for part in ("decode", "long", "small"):
        for case, found in results.get(part, {}).items():
            print(
                f"{part}, {case}: {found['tokens']:,} tokens in {found['read_s']:.1f} s, then "
                f"{found['own']['per_second']:.1f} tok/s; peak {found.get('peak_gb', 0):.1f} GB"
            )
    for kv, found in results.get("same", {}).items():
        print(f"the same tokens, kv {kv}: {all(value for name, value in found.items() if name != 'run')}")


def main() -> int:
    parser = make_parser(__doc__, FILE, list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--again", action="store_true", help="also measure what is in the output already")
    given = parse(parser, list(PARTS))
    if given.smoke and given.output == FILE:
        parser.error("--smoke needs --output: its figures mean nothing")
    bench = HomeBench(given.smoke, given.output, given.commit, again=given.again)
    os.environ.setdefault("TRITON_CACHE_DIR", f"{bench.kernels}/triton")
    bench.results = load(given.output)

    def clear(part: str, is_good: bool) -> None:
        bench.close()

    status = run_parts({part: partial(PARTS[part], bench) for part in PARTS}, given.parts, clear)
    print_table(bench.results)
    return status


if __name__ == "__main__":
    sys.exit(main())
