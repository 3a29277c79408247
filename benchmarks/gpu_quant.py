"""Packed matrices and FP8 on a GPU: right, how fast against the memory's floor, and what a whole model gains.

    PYTHONPATH=. python benchmarks/gpu_quant.py [PART …]     writes into benchmarks/gpu_quant.json, or --output FILE

Parts: check (bf16 and fp16 against dequantized weights, at the shapes of the released 9B model), tune4 and tune8 (all
configurations by shape and rows), tiles (other heights of a tile for few rows: bits and speed), decode (a random 9B
model in bf16, 8 and 4 bits), prefill (128K tokens in bf16, 4 bits and FP8), long (a million tokens with 4-bit weights),
gemlite (a peer's kernels, if build/gemlite has them). Weights are rotated past the L2 cache, calls follow each other in
a CUDA graph, as they do in a decode step.
"""

import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from triton.testing import do_bench

from benchmarks.gpu_model import CHUNK, REST_S, Ours, seconds
from benchmarks.outputs import load, make_parser, parse, run_parts, save, stamp
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.kernels import fp8, fused, linear, packed
from sala.backends.torch.kernels.launch import Config, shared_memory
from sala.backends.torch.kernels.packed import PackedWeight
from sala.backends.torch.linears import AffineEmbedding, AffineLinear, AffineWeight, LinearKernels
from sala.backends.torch.loader import random_model
from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops.affine import pack
from sala.checkpoint.random import RELEASED

HERE = Path(__file__).parent
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
HIDDEN, MLP = 4096, 16384
SHAPES = {
    "o": (HIDDEN, HIDDEN),
    "down": (HIDDEN, MLP),
    "qkvz": (4 * HIDDEN, HIDDEN),
    "gate_up": (2 * MLP, HIDDEN),
    "lm_head": (73448, HIDDEN),
}
OTHERS = {"sparse qkvg": (8704, HIDDEN), "small": (576, 1536), "odd": (1000, 576)}
READ_RATE = 4.3  # TB/s of an H200
ROTATED = 400 << 20  # bytes of weights, many times the L2 cache
ROW_COUNTS = (1, 8, 32)
CHECKED = (1, 8, 64, 128)
TUNED_ROWS = (1, 32)  # 8 rows have the tiles of one
THREADS = 16
RESULTS: dict[str, Any] = {}  # what earlier runs measured is kept, part by part
DEFAULTS = ("lm_head", "v_proj", "layers.31.")  # what `sala quantize` keeps in 8 bits, unless told otherwise
Call = Callable[[], Any]


def tile(columns: int, splits: int, num_stages: int) -> Config:
    return Config({"COLUMNS": columns, "SPLITS": splits}, 4, num_stages, uses_pdl=True)


SPLIT = [tile(columns, splits, stages) for columns in (64, 128) for splits in (4, 8) for stages in (3, 4, 5)]
WHOLE = [tile(64, 1, stages) for stages in (3, 4, 5, 6, 8)]
WHOLE += [tile(128, 1, stages) for stages in (3, 4, 5)]


# weights


def quantize(weight: Tensor, bits: int, group_size: int = 64) -> AffineWeight:
    """The nearest codes between the smallest and the largest number of a group."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.aminmax(dim=-1)
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-7).to(weight.dtype)
    biases = low.to(weight.dtype)
    codes = ((groups - biases.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round().clamp(0, (1 << bits) - 1)
    return AffineWeight(pack(codes.int().flatten(1), bits), scales, biases, bits, group_size)


def numbers(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def affine(n: int, k: int, bits: int, group_size: int = 64, dtype: torch.dtype = DTYPE) -> AffineWeight:
    pieces = [
        quantize((torch.randn(min(8192, n - at), k, device=DEVICE) * k**-0.5).to(dtype), bits, group_size)
        for at in range(0, n, 8192)
    ]
    parts = [torch.cat([getattr(piece, name) for piece in pieces]) for name in ("codes", "scales", "biases")]
    return AffineWeight(parts[0], parts[1], parts[2], bits, group_size)


def copies(n: int, k: int, bits: int) -> list[PackedWeight]:
    """Enough of them to be read from memory every time; what they hold does not matter for the time."""
    first = affine(n, k, bits).for_gpu(DTYPE, DEVICE)
    count = max(3, math.ceil(ROTATED / first.nbytes))
    return [first] + [replace(first, codes=first.codes.clone(), groups=first.groups.clone()) for _ in range(count - 1)]


# measuring


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is filled with NaN: whatever is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def compile_all(calls: list[Call]) -> None:
    """First calls in threads, as compiling takes far longer than running; what fails will fail again when timed."""
    began = time.perf_counter()

    def first(call: Call) -> bool:
        try:
            call()
        except Exception:
            return False
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        count = sum(pool.map(first, calls))
    torch.cuda.synchronize()
    print(f"  {count} of {len(calls)} compiled in {time.perf_counter() - began:.1f} s", flush=True)


def microseconds(calls: list[Call], rep: int = 20) -> float:
    """One call in a captured graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken = do_bench(graph.replay, warmup=5, rep=rep, return_mode="median")
    return float(taken) * 1000 / len(calls)


def rotated(call: Callable[..., Any], x: Tensor, weights: list[Any], *rest: Any) -> list[Call]:
    count = max(12, len(weights))
    return [partial(call, x, weight, *rest) for weight in itertools.islice(itertools.cycle(weights), count)]


def named(config: Config) -> str:
    when = ", pdl" if config.uses_pdl else ""
    sizes = "{COLUMNS} columns, {SPLITS} splits".format(**config.tile)
    return f"{sizes}, {config.num_warps} warps, {config.num_stages} stages{when}"


# check


def check() -> None:
    torch.manual_seed(0)
    cases = [(name, n, k, bits, 64, DTYPE) for bits in (4, 8) for name, (n, k) in SHAPES.items()]
    cases += [(name, n, k, bits, 32, DTYPE) for bits in (4, 8) for name, (n, k) in OTHERS.items()]
    cases += [("o", HIDDEN, HIDDEN, bits, 128, DTYPE) for bits in (4, 8)]
    cases += [("odd", *OTHERS["odd"], bits, 32, torch.float16) for bits in (4, 8)]
    cases += [("down", *SHAPES["down"], bits, 64, torch.float16) for bits in (4, 8)]
    subjects = [Case(*case) for case in cases]
    compile_all([partial(call, one.x[:count]) for one in subjects for call in one.calls.values() for count in CHECKED])
    RESULTS["check"] = {subject.name: subject.check() for subject in subjects}
    check_pdl()


class Case:
    """A matrix, and the products that read its codes."""

    def __init__(self, name: str, n: int, k: int, bits: int, group_size: int, dtype: torch.dtype) -> None:
        self.name = f"{name}, {bits} bits, groups of {group_size}, {dtype}"
        weight = affine(n, k, bits, group_size, dtype)
        self.held = weight.for_gpu(dtype, DEVICE)
        self.exact = torch.cat([weight.rows(slice(at, at + 8192)) for at in range(0, n, 8192)])
        self.x = numbers(max(CHECKED), k, dtype=dtype)
        self.calls: dict[str, Callable[[Tensor], Tensor]] = {
            "linear": lambda rows: linear.linear(rows, self.held),
            "split": lambda rows: linear.split_linear(rows, self.held).sum(0),
            "pair": lambda rows: linear.linear_silu_mul(rows, self.held),
        }

    def check(self) -> float:
        """The largest error, relative to the norm of what was wanted."""
        held, x = self.held, self.x
        errors = {"expand": error_of(packed.expand(held), self.exact)}
        index = torch.randint(0, held.num_out, (5,), device=DEVICE)
        is_same = [torch.equal(packed.expand(held, index), packed.expand(held)[index])]
        others = torch.randn_like(x) * 100
        others[0], others[1] = x[0], float("nan")
        whole = F.linear(x.float(), self.exact)
        wanted = {"linear": whole, "split": whole, "pair": fused.silu_mul(whole) if held.num_out % 2 == 0 else whole}
        for kind, call in self.calls.items():
            with poisoned():
                all_rows = call(x)
                for count in CHECKED:
                    some = call(x[:count])
                    errors[f"{kind} of {count}"] = error_of(some, wanted[kind][:count])
                    is_same.append(torch.equal(some, all_rows[:count]))
                is_same.append(torch.equal(call(others)[0], all_rows[0]))
        largest = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else math.inf)
        is_right = errors[largest] < (8e-3 if x.dtype == torch.bfloat16 else 2e-3)
        verdict = "ok" if is_right and all(is_same) else "WRONG"
        print(
            f"{self.name:52} largest error {errors[largest]:.2e} ({largest}), a row's bits its own {all(is_same)} "
            f"{verdict}",
            flush=True,
        )
        return errors[largest]


def check_pdl() -> None:
    """Kernels that start before the one ahead has ended must see all that it wrote: a chain of layers in a graph."""
    layers = [
        [affine(*shape, bits).for_gpu(DTYPE, DEVICE) for shape in (SHAPES["gate_up"], SHAPES["down"], SHAPES["o"])]
        for bits in (4, 8, 4, 8)
    ]
    norm, first = torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE), numbers(8, HIDDEN)

    def forward(uses_pdl: bool) -> Tensor:
        x, normed = first, first
        for both, weight, out in layers:
            configs = [
                packed.config_of(held, 8, most, is_pair)._replace(uses_pdl=uses_pdl)
                for held, most, is_pair in ((out, 8, False), (both, 1, True), (weight, 8, False))
            ]
            partials = linear.split_linear(normed, out, configs[0])
            x, normed = linear.add_partials_rms_norm(x, partials, 0.25, norm, 1e-6, uses_pdl)
            partials = linear.split_linear(linear.linear_silu_mul(normed, both, configs[1]), weight, configs[2])
            x, normed = linear.add_partials_rms_norm(x, partials, 0.25, norm, 1e-6, uses_pdl)
        return x

    forward(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(True)
    same = []
    for _ in range(20):
        first.copy_(numbers(8, HIDDEN))
        graph.replay()
        same.append(torch.equal(found, forward(False)))
    print(f"kernels with pdl in a graph give the same bits: {all(same)} ({sum(same)} of {len(same)})", flush=True)


# tune


def tune(bits: int) -> None:
    out: dict[str, Any] = {}
    for name, (n, k) in SHAPES.items():
        weights = copies(n, k, bits)
        is_split, is_pair = name in ("o", "down"), name == "gate_up"
        call = linear.split_linear if is_split else linear.linear_silu_mul if is_pair else linear.linear
        floor = weights[0].nbytes / READ_RATE / 1e6
        plain = [numbers(n, k) for _ in range(max(2, ROTATED // (2 * n * k)))]
        cases = []
        for rows in TUNED_ROWS:
            usual = packed.config_of(weights[0], rows, 8 if is_split else 1, is_pair)
            others = [config for config in (SPLIT if is_split else WHOLE) if config != usual]
            cases += [(rows, config) for config in (usual, *others)]
        xs = {rows: numbers(rows, k) for rows in TUNED_ROWS}
        compile_all([partial(call, xs[rows], weights[0], config) for rows, config in cases])
        for rows in TUNED_ROWS:
            dense = linear.split_linear if is_split else linear.linear_silu_mul if is_pair else linear.linear
            before = microseconds(rotated(dense, xs[rows], plain))
            found = time_configs([c for r, c in cases if r == rows], call, xs[rows], weights)
            usual_us = found[0][0]
            found.sort(key=lambda one: one[0])
            print(
                f"{name} [{n}, {k}], {bits} bits, {rows} rows: floor {floor:.1f} us, bf16 {before:.1f} us, "
                f"default {usual_us:.2f} us ({floor / usual_us:.0%}), "
                f"best {found[0][0]:.2f} us ({floor / found[0][0]:.0%})"
            )
            for us, config in found[:6]:
                print(f"   {us:7.2f} us {weights[0].nbytes / us / 1e6:5.2f} TB/s  {named(config)}", flush=True)
            out[f"{name} x {rows}"] = {
                "floor_us": floor,
                "bf16_us": before,
                "default_us": usual_us,
                "best": [{"us": us, "config": list(config)} for us, config in found[:6]],
            }
        del weights, plain
        torch.cuda.empty_cache()
    RESULTS[f"tune{bits}"] = out


def time_configs(
    configs: list[Config], call: Callable[..., Any], x: Tensor, weights: list[PackedWeight]
) -> list[tuple[float, Config]]:
    found = []
    for config in configs:
        try:
            found.append((microseconds(rotated(call, x, weights, config)), config))
        except Exception as error:
            print(f"   {named(config)}: {type(error).__name__} {str(error)[:100]}", flush=True)
            found.append((math.inf, config))
    return found


def tiles() -> None:
    """Whether a tile of 8 rows, which Hopper multiplies by other instructions, gives the same bits, and how fast."""
    out: dict[str, Any] = {}
    for bits, name in itertools.product((4, 8), ("down", "o")):
        weights, results = copies(*SHAPES[name], bits), {}
        x = numbers(8, SHAPES[name][1])
        for least in (8, 16, 32):
            packed.MIN_TILE = least
            for one in (packed._config, packed._packed_kernel):
                getattr(one, "cache_clear", lambda: None)()
            results[least] = linear.split_linear(x, weights[0])
            us = microseconds(rotated(linear.split_linear, x, weights))
            is_same = torch.equal(results[least], results[8])
            print(f"{name}, {bits} bits, tiles of {least:2} rows: {us:6.2f} us, bits as with 8: {is_same}", flush=True)
            out[f"{name} {bits} bits, {least}"] = {"us": us, "is_same": is_same}
        packed.MIN_TILE = 16
        del weights
        torch.cuda.empty_cache()
    packed._config.cache_clear()
    RESULTS["tiles"] = out


# whole models


def quantize_model(model: SalaModel, bits: int, keep: tuple[str, ...]) -> None:
    """In place; the embedding and what is to be kept have 8 bits."""
    kernels = LinearKernels(has_triton=True)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            model.set_submodule(name, AffineEmbedding(in_pieces(module.weight, 8), module.weight.dtype, kernels))
        elif isinstance(module, nn.Linear):
            weight = in_pieces(module.weight, 8 if any(part in name for part in keep) else bits)
            model.set_submodule(name, AffineLinear(weight, module.bias, kernels=kernels))


def in_pieces(weight: Tensor, bits: int) -> AffineWeight:
    pieces = [quantize(weight[at : at + 8192], bits) for at in range(0, weight.shape[0], 8192)]
    parts = [torch.cat([getattr(piece, name) for piece in pieces]) for name in ("codes", "scales", "biases")]
    return AffineWeight(parts[0], parts[1], parts[2], bits, pieces[0].group_size)


class Subject(Ours):
    """A random 9B model of 16, 8 or 4 bits per weight."""

    def __init__(
        self,
        bits: int,
        num_pages: int,
        num_slots: int,
        max_tokens: int,
        prefill: str = "auto",
        keep: tuple[str, ...] = ("lm_head",),
    ) -> None:
        self.config = RELEASED
        self.model = random_model(RELEASED, DTYPE, DEVICE)
        if bits < 16:
            quantize_model(self.model, bits, keep)
        self.forward = GpuForward(self.model, DEVICE, max_tokens, prefill=prefill)
        self.chunk = CHUNK
        gc.collect()
        torch.cuda.empty_cache()
        self.gb = torch.cuda.memory_allocated() / 1e9
        self.reset(num_pages, num_slots)


def decode() -> None:
    out: dict[str, Any] = {}
    subjects = {"16": (16, ()), "8": (8, ()), "4": (4, ("lm_head",)), "4, as sala quantize keeps them": (4, DEFAULTS)}
    for bits, (number, keep) in subjects.items():
        subject = Subject(number, 4096, 34, (1 << 17) + 64, keep=keep)
        print(f"{bits} bits: {subject.gb:.2f} GB of weights", flush=True)
        for batch, context in ((1, 4096), (1, 131072), (8, 4096), (32, 4096)):
            once = subject.step(batch, context)
            once()
            once()
            taken = seconds(once, 20)
            key = f"{batch} x {context}"
            out.setdefault(key, {})[bits] = taken * 1e3
            ratio = out[key]["16"] / out[key][bits]
            print(f"   decode {key:12}: {taken * 1e3:6.3f} ms, {batch / taken:7.1f} tok/s, {ratio:.2f}x", flush=True)
        del subject, once
        gc.collect()
        torch.cuda.empty_cache()
    RESULTS["decode"] = out


def prefill() -> None:
    """128K tokens; the error is of the last hidden state against bf16 with the same weights."""
    length, out = 131072, {}
    for name, bits, how in (("bf16", 16, "auto"), ("fp8", 16, "fp8"), ("4 bits", 4, "auto")):
        subject = Subject(bits, length // 64 + 200, 2, length + 8192, how)
        subject.warm(length)
        subject.cache.clear_state(0)
        torch.cuda.reset_peak_memory_stats()
        time.sleep(REST_S)
        taken = seconds(lambda one=subject: one.read(length))
        out[name] = {"seconds": taken, "weights_gb": subject.gb, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}
        ratio = out["bf16"]["seconds"] / taken
        print(
            f"prefill {length:,}, {name:7}: {taken:6.3f} s, {ratio:.2f}x, peak {out[name]['peak_gb']:.1f} GB",
            flush=True,
        )
        del subject
        gc.collect()
        torch.cuda.empty_cache()
    out["fp8_error"] = fp8_error()
    print(f"FP8: relative error of a layer's products {out['fp8_error']}", flush=True)
    RESULTS["prefill"] = out


def fp8_error() -> dict[str, float]:
    """Of one product with weights and rows in FP8, against fp32; and of the fused passes against the plain ones."""
    x, norm = numbers(512, HIDDEN), torch.rand(HIDDEN, device=DEVICE).to(DTYPE)
    weight = numbers(HIDDEN, HIDDEN) * HIDDEN**-0.5
    rows, held = fp8.quantize(x), fp8.from_weight(weight)
    found = fp8.product(rows, held, DTYPE)
    told = (rows.codes.float() * rows.scales) @ (held.codes.float() * held.scales).T
    a, b = fp8.rms_norm(x, norm, 1e-6), fp8.quantize(fused.rms_norm(x, norm, 1e-6))
    c, d = fp8.silu_mul(x), fp8.quantize(fused.silu_mul(x))
    return {
        "product": error_of(found, F.linear(x.float(), weight.float())),
        "of the definition": error_of(found, told),
        "norm": error_of(a.codes.float() * a.scales, b.codes.float() * b.scales),
        "silu": error_of(c.codes.float() * c.scales, d.codes.float() * d.scales),
    }


def long() -> None:
    length = 1 << 20
    subject = Subject(4, length // 64 + 200, 2, length + 8192)
    subject.warm(length)
    subject.cache.clear_state(0)
    torch.cuda.reset_peak_memory_stats()
    taken = seconds(lambda: subject.read(length))
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(f"prefill {length:,} with 4 bits: {taken:.2f} s, peak {peak:.1f} GB, weights {subject.gb:.2f} GB", flush=True)
    RESULTS["long"] = {"seconds": taken, "peak_gb": peak, "weights_gb": subject.gb}


# a peer


def gemlite() -> None:
    sys.path.insert(0, str(HERE.parent / "build" / "gemlite"))
    from gemlite import DType, GemLiteLinear

    out: dict[str, Any] = {}
    for bits, name in itertools.product((4, 8), ("o", "down", "qkvz", "gate_up")):
        n, k = SHAPES[name]
        ours = copies(n, k, bits)
        peers = []
        for _ in ours:
            one = GemLiteLinear(
                bits, group_size=64, in_features=k, out_features=n, input_dtype=DType.BF16, output_dtype=DType.BF16
            )
            codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=DEVICE)
            scales = torch.rand(n * k // 64, 1, device=DEVICE).to(DTYPE) * 0.01
            one.pack(codes, scales, torch.full_like(scales, 1 << (bits - 1)), None)
            peers.append(one)
        for rows in ROW_COUNTS:
            x = numbers(rows, k)
            call = linear.split_linear if name in ("o", "down") else linear.linear
            us = microseconds(rotated(call, x, ours))
            try:
                peers[0](x)
                theirs = microseconds(rotated(lambda x, one: one(x), x, peers))
            except Exception as error:
                print(f"{name}, {bits} bits, {rows} rows: {type(error).__name__} {str(error)[:160]}", flush=True)
                continue
            out[f"{name} {bits} bits x {rows}"] = {"us": us, "peer_us": theirs}
            print(f"{name:8} {bits} bits {rows:2} rows: ours {us:6.2f} us, gemlite {theirs:6.2f} us", flush=True)
        del ours, peers
        torch.cuda.empty_cache()
    RESULTS["gemlite"] = out


PARTS: dict[str, Callable[[], None]] = {
    "check": check,
    "tune4": partial(tune, 4),
    "tune8": partial(tune, 8),
    "tiles": tiles,
    "decode": decode,
    "prefill": prefill,
    "long": long,
    "gemlite": gemlite,
}


def main() -> int:
    file = HERE / "gpu_quant.json"
    given = parse(make_parser(__doc__, file, list(PARTS)), list(PARTS))
    RESULTS.update(load(given.output))
    RESULTS["device"] = torch.cuda.get_device_name()
    print(RESULTS["device"], f"{shared_memory(DEVICE) >> 10} KiB of shared memory", flush=True)

    def keep(name: str, is_good: bool) -> None:
        if is_good:
            RESULTS.setdefault("runs", {})[name] = stamp(given.commit)
        save(given.output, RESULTS)

    return run_parts(PARTS, given.parts, keep)


if __name__ == "__main__":
    sys.exit(main())
