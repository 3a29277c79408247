"""Decode speed of fp32, bf16, 8-bit and 4-bit weights on the CPU, as a share of what the memory can deliver.

    python benchmarks/quant_cpu.py [--threads N] [--rounds N] [--clock wall|cpu]

Two models: the embedded one, and random weights of the released layers' shapes that no cache holds. Each is written
four times into a temporary directory (groups of 64 by round-to-nearest). All decode in turn, a few tokens at a time,
with a read-only stream over the largest of the four files in between, mapped as weights are; the least and the median
time of a token count. Bytes are those of the weights that a token reads: all but the embedding. Results go to
quant_cpu.json beside this file.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sala.backends.torch.executor import TorchExecutor, open_executor
from sala.backends.torch.kernels import native
from sala.checkpoint.names import expected_tensors, quantized_modules
from sala.checkpoint.packing import Packed, dequantize, encode, quantize
from sala.checkpoint.random import RELEASED, cut_layers, spread
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_text, write_weights
from sala.config import SalaConfig
from sala.models.embedded import EMBEDDED, find_model
from sala.protocol import Options, Plan, Row, Sampling
from sala.quantization_config import QuantConfig

KINDS: dict[str, tuple[str, int | None]] = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "8 bits": ("bfloat16", 8),
    "4 bits": ("bfloat16", 4),
}
FILE_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
GROUP_SIZE, LAYERS, VOCAB = 64, 2, 16384
STREAM_BYTES = 128 << 20  # read between two measurements
# Eight rows side by side: no order of reading that was tried on these machines is faster.
STREAM = """
#include <cstdint>
#include <cstring>
typedef int64_t Words __attribute__((vector_size(64)));
extern "C" int64_t read_all(const char* x, int64_t bytes, int threads) {
    const int64_t row = 16384;
    int64_t total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(^ : total)
    for (int64_t i = 0; i < bytes / (8 * row); i++) {
        Words seen[8] = {};
        for (int64_t j = 0; j < row; j += 64)
            for (int s = 0; s < 8; s++) {
                Words words;
                std::memcpy(&words, x + (8 * i + s) * row + j, 64);
                seen[s] ^= words;
            }
        for (int s = 0; s < 8; s++)
            for (int k = 0; k < 8; k++) total ^= seen[s][k];
    }
    return total;
}
"""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Clock = Callable[[], float]
Read = Callable[[str], "np.ndarray[Any, np.dtype[np.float32]]"]


def embedded_weights(checkpoint: Checkpoint, config: SalaConfig) -> Read:
    """The matrices of the embedded model in fp32."""
    packed = quantized_modules(checkpoint.tensors, config)
    kinds: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32}

    def array(name: str) -> tuple[Any, str]:
        raw = checkpoint.read(name)
        return np.frombuffer(raw.data, kinds[raw.dtype]).reshape(raw.shape), raw.dtype

    def read(name: str) -> Any:
        module = name.removesuffix(".weight")
        if module in packed and name.endswith(".weight"):
            (codes, _), (scales, dtype), (biases, _) = (
                array(f"{module}.{part}") for part in ("weight", "scales", "biases")
            )
            return dequantize(Packed(codes, scales, biases, packed[module].bits, packed[module].group_size, dtype))
        values, dtype = array(name)
        return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values.astype(np.float32)

    return read


def random_weights(config: SalaConfig) -> Read:
    """The first rows of every matrix; the others repeat them, as sampling all would take longer than all the rest."""
    shapes, rng = expected_tensors(config), np.random.default_rng(0)

    def read(name: str) -> Any:
        shape = shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return rng.standard_normal((64, shape[1]), np.float32) * np.float32(spread(name, shape, config))

    return read


def write_kind(target: Path, config: SalaConfig, read: Read, kind: str) -> int:
    """One of the four → bytes of weights that a token reads."""
    dtype, bits = KINDS[kind]
    own = replace(config, dtype=dtype, quantization=None)
    tensors: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    for name, shape in expected_tensors(own).items():
        is_read = len(shape) == 2 and (name != "model.embed_tokens.weight" or config.tie_word_embeddings)
        if bits is not None and is_read:
            module = name.removesuffix(".weight")
            packed = quantize(read(name), bits, GROUP_SIZE, "BF16")
            parts = {"weight": packed.codes, "scales": packed.scales, "biases": packed.biases}
            whole = {f"{module}.{part}": _repeat(values, shape[0]) for part, values in parts.items()}
            specs |= {key: ("U32" if key == name else "BF16", values.shape) for key, values in whole.items()}
            tensors |= whole
        else:
            tensors[name] = _repeat(encode(read(name), FILE_DTYPES[dtype]), shape[0])
            specs[name] = (FILE_DTYPES[dtype], shape)
    if bits is not None:
        own = replace(own, quantization=_quantization(config, bits))
    with new_directory(target) as draft:
        write_weights(draft, specs, lambda name: np.ascontiguousarray(tensors[name]).data.cast("B"))
        write_text(draft / "config.json", json.dumps(own.to_dict()))
    total = sum(tensor.nbytes for tensor in tensors.values())
    return total - (0 if config.tie_word_embeddings else tensors["model.embed_tokens.weight"].nbytes)


def _repeat(rows: Any, count: int) -> Any:
    return rows if len(rows) == count else rows[np.arange(count) % len(rows)]


def _quantization(config: SalaConfig, bits: int) -> QuantConfig:
    return QuantConfig(bits, GROUP_SIZE, () if config.tie_word_embeddings else (("model.embed_tokens", None),))


class Decoder:
    """Tokens one after the other, from a short prompt on."""

    def __init__(self, path: Path, num_tokens: int, clock: Clock) -> None:
        self.clock = clock
        config = SalaConfig.load(path)
        options = Options(ctx=num_tokens, device="cpu", max_batch=1, snapshots=1, cache_memory=1 << 29)
        self.executor: TorchExecutor = open_executor(Checkpoint(path), config, options)
        assert self.executor.fused is not None, "the native step is not in use"
        self.pages = tuple(range(self.executor.capacity.num_pages))
        self.end, self.token = 0, 5
        self.step(tuple(range(3, 35)))

    def step(self, tokens: tuple[int, ...]) -> None:
        row = Row(tokens, self.end, self.pages, 1, 1 << 40, Sampling(temperature=0))
        self.token = self.executor.run(Plan((row,))).sampled[0][0].token
        self.end += len(tokens)

    def time(self, count: int) -> float:
        """Seconds of a token."""
        start = self.clock()
        for _ in range(count):
            self.step((self.token,))
        return (self.clock() - start) / count


class Stream:
    """Reads a mapped file, with as many threads as the models have."""

    def __init__(self, place: Path, threads: int, clock: Clock) -> None:
        self.clock = clock
        source, library = place / "stream.cpp", place / "stream.so"
        source.write_text(STREAM)
        compiler = next(path for name in ("g++", "c++", "clang++") if (path := shutil.which(name)))
        flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w"]
        subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
        self.function = ctypes.CDLL(str(library)).read_all
        self.function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self.threads, self.at = threads, 0

    def open(self, file: Path) -> None:
        self.buffer = np.memmap(file, np.uint8, "r")
        for _ in range(len(self.buffer) // STREAM_BYTES):  # into memory
            self.time()

    def time(self) -> float:
        """Seconds of a byte, over one part of the file after the other."""
        start = self.clock()
        self.function(self.buffer.ctypes.data + self.at * STREAM_BYTES, STREAM_BYTES, self.threads)
        self.at = (self.at + 1) % (len(self.buffer) // STREAM_BYTES)
        return (self.clock() - start) / STREAM_BYTES


def measure(place: Path, config: SalaConfig, read: Read, stream: Stream, rounds: int, count: int) -> dict[str, Any]:
    sizes = {kind: write_kind(place / kind, config, read, kind) for kind in KINDS}
    stream.open(max((place / "fp32").glob("*.safetensors"), key=lambda file: file.stat().st_size))
    decoders = {kind: Decoder(place / kind, 64 + (rounds + 1) * count, stream.clock) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in ("stream", *KINDS)}
    for decoder in decoders.values():
        decoder.time(count)
    for _ in range(rounds):
        for kind, decoder in decoders.items():
            times["stream"].append(stream.time())
            times[kind].append(decoder.time(count))
    best, usual = (1e-9 / pick(times["stream"]) for pick in (min, statistics.median))
    out: dict[str, Any] = {"stream": {"gb_per_s": best, "median_gb_per_s": usual}}
    for kind, size in sizes.items():
        least, median = min(times[kind]), statistics.median(times[kind])
        out[kind] = {
            "bytes_per_token": size,
            "tokens_per_s": 1 / least,
            "median_tokens_per_s": 1 / median,
            "gb_per_s": size / least / 1e9,
            "share_of_stream": size / least / 1e9 / best,
            "median_share_of_stream": size / median / 1e9 / usual,
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine, with one thread")
    parser.add_argument("--into", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {
        "unit": "tokens per second, greedy, one sequence; fastest and median of many short rounds",
        "threads": args.threads,
        "clock": args.clock,
        "kernels": native.describe(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }
    large = replace(cut_layers(RELEASED, LAYERS), vocab_size=VOCAB, eos_token_id=(2,))
    with tempfile.TemporaryDirectory() as place:
        stream = Stream(Path(place), args.threads, CLOCKS[args.clock])
        path = find_model(EMBEDDED)
        with Checkpoint(path) as checkpoint:
            config = SalaConfig.load(path)
            read = embedded_weights(checkpoint, config)
            results[EMBEDDED] = measure(Path(place) / "small", config, read, stream, args.rounds, 8)
        results[f"released shapes, {LAYERS} layers"] = measure(
            Path(place) / "large", large, random_weights(large), stream, args.rounds, 1
        )
    results["load_after"] = os.getloadavg()[0]
    args.into.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
