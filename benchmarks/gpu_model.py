"""The whole model on a GPU, full 9B shapes with random weights, against Qwen3-8B in transformers in the same run.

    PYTHONPATH=. python benchmarks/gpu_model.py [PART …]     writes into benchmarks/gpu_model.json, or --output FILE

Parts: check (kernels against the definition, 4 layers), decode (one CUDA graph per step, by context and batch),
prefill (by length and by size of a chunk, ours and the peer's), peer (Qwen3-8B's shapes decoding in a CUDA graph),
engine (as a user sees it: requests through the engine), long (one and two million tokens), profile (where a decode step
and a chunk of a long prompt spend their time, and how fast the card's clock is then). The peer's prompt is read in one
call, ours in chunks; both have run before they are timed.
"""

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.outputs import load, make_parser, parse, run_parts, save, stamp
from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.loader import random_model
from sala.checkpoint.random import RELEASED
from sala.lab.bench.measure import measure_latency, measure_throughput, open_random
from sala.options import Options
from sala.protocol import Plan, Row, Sampling

HERE = Path(__file__).parent
DEVICE = torch.device("cuda")
CHUNK = 8448  # what the engine takes on 132 processors
CHUNKS = (CHUNK, 2 * CHUNK, 8192)
REST_S = 3.0  # before a prompt is timed, ours or the peer's: a card that was busy is slower
CLOCK = ("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0")
GREEDY = Sampling(temperature=0)
RESULTS: dict[str, Any] = {}  # what earlier runs measured is kept, part by part


def row(count: int, start: int, pages: range, slot: int, sparse_from: int) -> Row:
    used = -(-(start + count) // 64)
    ids = tuple(torch.randint(0, RELEASED.vocab_size, (count,)).tolist())
    return Row(ids, start, tuple(pages[:used]), slot, sparse_from, GREEDY)


def seconds(work: Callable[[], Any], repeats: int = 1) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


class Ours:
    """The model with one cache of so many pages; contexts are made of random numbers, not read."""

    def __init__(self, num_layers: int | None, num_pages: int, num_slots: int, max_tokens: int) -> None:
        config = RELEASED
        if num_layers is not None:
            config = replace(config, num_hidden_layers=num_layers, mixer_types=config.mixer_types[:num_layers])
        self.config = config
        self.model = random_model(config, torch.bfloat16, DEVICE)
        self.forward = GpuForward(self.model, DEVICE, max_tokens)
        self.chunk = CHUNK
        self.reset(num_pages, num_slots)

    def reset(self, num_pages: int, num_slots: int) -> None:
        self.cache = HybridCache(self.config, num_pages, num_slots, torch.bfloat16, DEVICE)
        for pages in self.cache.pages.values():
            for pool in (pages.k, pages.v, pages.k1, pages.k2):
                pool.normal_()
        self.forward.graphs.clear()
        self.forward.prefill_graphs.clear()
        self.forward.cache = None

    @torch.inference_mode()
    def read(self, length: int, note: Callable[[int], None] = lambda _: None) -> None:
        """A prompt of `length` tokens into slot 0, chunk by chunk, up to its first logits."""
        sparse_from = 0 if length >= self.config.sparse_config.dense_len else length
        for start in range(0, length, self.chunk):
            count = min(self.chunk, length - start)
            plan = Plan((row(count, start, range(1 << 20), 0, sparse_from),))
            wanted = [count - 1] if start + count == length else []
            hidden = self.forward(pack(plan, DEVICE), self.cache, None, wanted)
            note(start + count)
        self.forward.logits(hidden).argmax()

    @torch.inference_mode()
    def warm(self, length: int) -> None:
        """Kernels are compiled for sizes that grow with the context: a chunk at each power of two makes them all."""
        starts = [0]
        while starts[-1] < length - self.chunk:
            starts.append(min(max(self.chunk, 2 * starts[-1]), length - self.chunk))
        for start in starts:
            self.forward(pack(Plan((row(self.chunk, start, range(1 << 20), 0, 0),)), DEVICE), self.cache, None, [])

    @torch.inference_mode()
    def step(self, batch: int, context: int) -> Callable[[], Any]:
        per_row = -(-(context + 1) // 64)
        rows = tuple(row(1, context, range(i * per_row, (i + 1) * per_row), i, 0) for i in range(batch))
        plan = pack(Plan(tuple(replace(r, sparse_from=0 if context >= 8192 else 1 << 30) for r in rows)), DEVICE)
        self.size = self.forward.size_of(plan.spans, 1)  # of the graph

        @torch.inference_mode()
        def once() -> Any:
            return self.forward.logits(self.forward(plan, self.cache)).argmax(-1)

        return once


def check() -> None:
    """The kernels against the definition: hidden states of a dense and a sparse prompt, then decoding."""
    ours = Ours(4, 600, 4, 32768)
    reference = HybridCache(ours.config, 600, 4, torch.bfloat16, DEVICE)
    out = {}
    with torch.inference_mode():
        for name, count, start, sparse_from in (
            ("dense chunk", 1000, 0, 1 << 30),
            ("sparse chunk", 9000, 0, 0),
            ("later chunk", 3000, 9000, 0),
            ("one token", 1, 12000, 0),
        ):
            batch = pack(Plan((row(count, start, range(1, 600), 1, sparse_from),)), DEVICE)
            if start == 0:
                ours.cache.clear_state(1)
                reference.clear_state(1)
            found, wanted = ours.forward(batch, ours.cache), ours.model(batch, reference)
            out[name] = float((found.float() - wanted.float()).norm() / wanted.float().norm())
            print(f"check {name:14} relative error {out[name]:.2e}", flush=True)
        alone = ours.forward(pack(Plan((row(1, 12001, range(1, 600), 1, 0),)), DEVICE), ours.cache)
        print("finite:", bool(torch.isfinite(alone).all()), flush=True)
    RESULTS["check"] = out


def decode() -> None:
    ours = Ours(None, 1 << 15, 34, (1 << 20) + 64)
    out = {}
    for batch, context in ((1, 4096), (1, 32768), (1, 131072), (1, 1 << 20), (8, 32768), (32, 4096), (32, 32768)):
        if batch * -(-(context + 1) // 64) > 1 << 15:
            continue
        once = ours.step(batch, context)
        once()
        taken = seconds(once, 20)
        out[f"{batch} x {context}"] = {"ms": taken * 1e3, "tokens_per_second": batch / taken}
        print(f"decode batch {batch:2} at {context:8,}: {taken * 1e3:6.2f} ms, {batch / taken:7.1f} tok/s", flush=True)
        graph = ours.forward.graphs.get(ours.size)
        if graph is not None:
            print(f"   the graph alone: {seconds(graph.replay, 20) * 1e3:6.2f} ms", flush=True)
    RESULTS["decode"] = out


def read_prompts(ours: Ours, lengths: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    ours.read(2 * ours.chunk)
    ours.warm(max(lengths))
    out: dict[int, dict[str, Any]] = {}
    for length in lengths:
        torch.cuda.reset_peak_memory_stats()
        ours.cache.clear_state(0)
        time.sleep(REST_S)
        taken = seconds(lambda n=length: ours.read(n))
        peak = torch.cuda.max_memory_allocated() / 1e9
        out[length] = {"seconds": taken, "peak_gb": peak}
        print(
            f"prefill {length:9,} by {ours.chunk:6,}: {taken:7.3f} s, {length / taken / 1e3:6.1f}k tok/s, "
            f"peak {peak:.1f} GB",
            flush=True,
        )
    return out


def prefill(lengths: tuple[int, ...] = (32768, 131072, 262144)) -> None:
    ours = Ours(None, max(lengths) // 64 + 200, 2, max(lengths) + 2 * max(CHUNKS))
    by_chunk = {}
    for ours.chunk in CHUNKS:
        by_chunk[ours.chunk] = read_prompts(ours, lengths)
    out = by_chunk[CHUNK]
    del ours
    gc.collect()
    torch.cuda.empty_cache()
    peer = qwen()
    for length in lengths:
        ids = torch.randint(0, 150000, (1, length), device=DEVICE)
        with torch.inference_mode():
            if length == lengths[0]:
                peer(ids, logits_to_keep=1)
            time.sleep(REST_S)
            taken = seconds(lambda tokens=ids: peer(tokens, logits_to_keep=1))
        seconds_by_chunk = {chunk: found[length]["seconds"] for chunk, found in by_chunk.items()}
        out[length] |= {"peer_seconds": taken, "ratio": taken / out[length]["seconds"], "by_chunk": seconds_by_chunk}
        ratios = ", ".join(f"{taken / one:.2f}x by {chunk:,}" for chunk, one in seconds_by_chunk.items())
        print(f"Qwen3-8B {length:9,}: {taken:7.2f} s; ours is faster: {ratios}", flush=True)
    RESULTS["prefill"] = out


def long() -> None:
    longest = 1 << 21
    RESULTS["long"] = read_prompts(Ours(None, longest // 64 + 200, 2, longest + 2 * CHUNK), (longest >> 1, longest))


def engine() -> None:
    """Requests through the engine, with everything that a user waits for but the text."""
    subject = open_random("released", Options(device="cuda", dtype="bfloat16"))
    out: dict[str, Any] = {"latency": [], "throughput": []}
    for length in (4096, 32768, 131072):
        one = measure_latency(subject, length, 65)
        out["latency"].append(asdict(one))
        print(
            f"engine, {length:,} tokens: first after {one.first_token_s:.3f} s, then {one.decode_per_second:.1f} tok/s",
            flush=True,
        )
    many = measure_throughput(subject, 32, 4096, 33)
    out["throughput"].append(asdict(many))
    print(f"engine, 32 x 4,096 tokens: {many.decode_per_second:,.0f} tok/s", flush=True)
    RESULTS["engine"] = out


def peer() -> None:
    """A dense model of Qwen3-8B's shapes decodes one token in a CUDA graph: what its weights and its cache cost."""
    layers, heads, groups, dim, hidden, wide, vocab = 36, 32, 8, 128, 4096, 12288, 151936
    make = partial(torch.randn, dtype=torch.bfloat16, device=DEVICE)
    weights = [
        [
            make(n, k) * 0.02
            for n, k in (
                ((heads + 2 * groups) * dim, hidden),
                (hidden, heads * dim),
                (2 * wide, hidden),
                (hidden, wide),
            )
        ]
        for _ in range(layers)
    ]
    head, out = make(vocab, hidden) * 0.02, {}
    for context in (4096, 32768, 131072):
        caches = [(make(1, groups, context, dim), make(1, groups, context, dim)) for _ in range(layers)]
        x = make(1, hidden)

        def step(caches: list[Any] = caches, x: torch.Tensor = x) -> torch.Tensor:
            for (qkv, o, up, down), (k, v) in zip(weights, caches, strict=True):
                projected = F.linear(F.rms_norm(x, (hidden,)), qkv)
                q = projected[:, : heads * dim].view(1, heads, 1, dim)
                found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                x = x + F.linear(found.reshape(1, -1), o)
                gate, value = F.linear(F.rms_norm(x, (hidden,)), up).chunk(2, 1)
                x = x + F.linear(F.silu(gate) * value, down)
            return F.linear(x, head).argmax(-1)

        with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            taken = seconds(graph.replay, 20)
        out[context] = {"ms": taken * 1e3, "tokens_per_second": 1 / taken}
        print(f"dense peer decodes at {context:8,}: {taken * 1e3:6.2f} ms, {1 / taken:.1f} tok/s", flush=True)
        del caches, graph
        torch.cuda.empty_cache()
    RESULTS["peer"] = out


def qwen(device: torch.device = DEVICE, **changes: int) -> Any:
    """Return a dense model of Qwen3-8B's shapes, or of others, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shapes = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1 << 20,
    }  # fmt: skip
    config = Qwen3Config(**shapes | changes, tie_word_embeddings=False, attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def profile() -> None:
    """Kernels by name; the chunk is the last one of 128K tokens, when the card is as warm as it gets."""
    ours = Ours(None, 131072 // 64 + 200, 34, 1 << 18)
    last = pack(Plan((row(CHUNK, 131072 - CHUNK, range(1 << 20), 0, 0),)), DEVICE)
    out = {}
    for name, prepare, work in (
        ("decode 1 x 4K", lambda: None, ours.step(1, 4096)),
        ("decode 32 x 4K", lambda: None, ours.step(32, 4096)),
        ("chunk at 120K", lambda: ours.read(131072), lambda: ours.forward(last, ours.cache, None, [])),
    ):
        work()
        prepare()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found, torch.inference_mode():
            taken = seconds(work)
        clock = int(subprocess.run(CLOCK, capture_output=True, text=True, check=True).stdout)
        events = sorted(
            (e for e in found.key_averages() if e.self_device_time_total > 0), key=kernel_time, reverse=True
        )
        total = sum(map(kernel_time, events))
        out[name] = {
            "ms": taken * 1e3,
            "gpu_ms": total,
            "launches": sum(event.count for event in events),
            "clock_mhz": clock,
            "kernels": [{"name": e.key[:90], "count": e.count, "ms": kernel_time(e)} for e in events[:18]],
        }
        print(f"{name}: {total:.2f} ms on the GPU, {out[name]['launches']} launches, {clock} MHz", flush=True)
        for event in events[:18]:
            print(f"   {kernel_time(event):9.3f} ms {event.count:6} x {event.key[:90]}", flush=True)
    RESULTS["profile"] = out


def kernel_time(event: Any) -> float:
    return float(event.self_device_time_total) / 1e3


PARTS = {
    "check": check,
    "decode": decode,
    "peer": peer,
    "engine": engine,
    "prefill": prefill,
    "long": long,
    "profile": profile,
}


def main() -> int:
    file = HERE / "gpu_model.json"
    given = parse(make_parser(__doc__, file, list(PARTS)), list(PARTS))
    RESULTS.update(load(given.output))
    RESULTS["device"] = torch.cuda.get_device_name()

    def keep(name: str, is_good: bool) -> None:
        if is_good:
            RESULTS.setdefault("runs", {})[name] = stamp(given.commit)
        save(given.output, RESULTS)

    return run_parts(PARTS, given.parts, keep)


if __name__ == "__main__":
    sys.exit(main())
