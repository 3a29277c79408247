"""A dense model in transformers, measured like ours: time to first token and decoding speed, by context length.

It gets a preallocated KV cache, torch's own attention kernels and, on a GPU, a CUDA graph for the decode step. The
prompt is prefilled in one call.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sala.backends.torch.fast.dispatch import linear_kernels
from sala.backends.torch.linears import AffineLinear, LinearKernels
from sala.backends.torch.loader import pick_device, pick_dtype, to_affine
from sala.checkpoint.dtypes import ELEMENT_BYTES
from sala.checkpoint.packing import quantize
from sala.checkpoint.random import RELEASED
from sala.config import SalaConfig, read_json_object
from sala.errors import InputError
from sala.lab.bench import measure as bench
from sala.lab.bench.measure import Latency, RunTimes
from sala.lab.dense import find_dense, load_dense, need_transformers
from sala.protocol import Options

RANDOM: dict[str, dict[str, Any]] = {
    "qwen3-8b-random": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny-random": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip
MEASURES = ("first_token", "decode")
GROUP_SIZE = 64  # of a dense model that is packed for the comparison
BITS = (16, 8, 4)


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A causal language model of transformers on its device."""

    name: str
    model: Any
    device: torch.device

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps all keys and values, so that the KV cache can be preallocated."""
        kinds = getattr(self.model.config, "layer_types", None) or ["full_attention"]
        return set(kinds) == {"full_attention"}


def open_dense(source: str, device: torch.device, dtype: torch.dtype, bits: int = 16) -> DenseModel:
    """Return the model of a checkpoint directory, or one of `RANDOM` with random weights made on the device.

    Below 16 bits the matrices of its layers and its head are packed as ours are, and run by the same kernels.
    """
    dense = _open_plain(source, device, dtype)
    if bits < 16:
        _pack(dense.model, bits, device)
    return dense


def _pack(model: Any, bits: int, device: torch.device) -> None:
    """Replace the linears by packed ones, one at a time, rounded to nearest.

    Those whose inputs do not divide into groups stay as they are.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module.in_features % GROUP_SIZE == 0:
            dtype = module.weight.dtype
            kind = "BF16" if dtype == torch.bfloat16 else "F16"
            packed = quantize(module.weight.detach().float().cpu().numpy(), bits, GROUP_SIZE, kind)
            weight = to_affine(packed).map(lambda part: part.to(device))
            kernels = linear_kernels(device, dtype) or LinearKernels()
            model.set_submodule(name, AffineLinear(weight, module.bias, kernels=kernels))


def _open_plain(source: str, device: torch.device, dtype: torch.dtype) -> DenseModel:
    transformers = need_transformers()
    if source in RANDOM:
        config = transformers.Qwen3Config(**RANDOM[source], max_position_embeddings=1 << 20, tie_word_embeddings=False)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return DenseModel(source, model.eval(), device)
    path = _find(source)
    return DenseModel(path.name, load_dense(path, device, dtype), device)


def _find(source: str) -> Path:
    return find_dense(source, "dense model", f"give one, or {' or '.join(RANDOM)}")


def check_dense(source: str, options: Options, num_tokens: int, bits: int = 16) -> None:
    """Raise before anything is measured if there is no such model, or no memory for it and `num_tokens`.

    A model is loaded whole before it is packed, so `bits` do not lower the memory needed.
    """
    if bits not in BITS:
        raise InputError("bits", f"is {bits}", "use 16, 8 or 4")
    device, size = pick_device(options.device), pick_dtype(options.dtype, RELEASED).itemsize
    if source in RANDOM:
        weights, running = count_parameters(RANDOM[source]) * size, running_bytes(RANDOM[source], num_tokens, size)
        bench.check_memory(source, weights, running, device)
        return
    path = _find(source)
    table = read_json_object(path / "config.json")
    weights = stored_bytes(path) * size // element_bytes(table, size)
    bench.check_memory(path.name, weights, running_bytes(table, num_tokens, size), device)


def stored_bytes(path: Path) -> int:
    """Return the bytes of a checkpoint's weights on disk."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def element_bytes(table: Mapping[str, Any], default: int) -> int:
    """Return the bytes of a stored weight by its config.json."""
    return ELEMENT_BYTES.get(str(table.get("dtype") or table.get("torch_dtype")), default)


def running_bytes(table: Mapping[str, Any], num_tokens: int, size: int, chunk: int | None = None) -> int:
    """Return the bytes of keys, values and activations of a dense model, by its config.json; 0 if it does not say.

    An element has `size` bytes. `chunk` tokens of the prompt, or all of them, are read at a time.
    """
    try:
        hidden, heads = table["hidden_size"], table["num_attention_heads"]
        groups, dim = table.get("num_key_value_heads") or heads, table.get("head_dim") or hidden // heads
        cached = 2 * table["num_hidden_layers"] * groups * dim
        active = 8 * hidden + max(3 * table["intermediate_size"], 4 * heads * dim)  # of a layer, and what norms copy
        return int(size * (num_tokens * cached + min(num_tokens, chunk or num_tokens) * active))
    except (KeyError, TypeError):
        return 0


def bits_of(path: Path) -> int:
    """Return the bits of most matrices of one of our checkpoints; 16 if it is not quantized."""
    found = SalaConfig.load(path).quantization
    return 16 if found is None else found.bits


def count_parameters(shape: dict[str, int]) -> int:
    """Return the parameters of the matrices; norms are negligible."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"] + shape["num_key_value_heads"]
    layer = 2 * heads * shape["head_dim"] * width + 3 * shape["intermediate_size"] * width
    return shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * width


def measure_dense(dense: DenseModel, num_tokens: int, new_tokens: int) -> Latency:
    """Measure one request alone, after a warm-up. Raise SalaError, before anything is run, if it does not fit."""
    table, size = dense.model.config.get_text_config().to_dict(), next(dense.model.parameters()).dtype.itemsize
    bench.need_room(num_tokens, running_bytes(table, num_tokens + new_tokens, size), bench.free_memory(dense.device))
    vocab_size = dense.model.config.vocab_size
    warm_tokens = num_tokens if dense.device.type == "cuda" else min(num_tokens, 512)
    try:
        times = bench.run_warm(partial(_run, dense), vocab_size, 1, num_tokens, new_tokens, warm_tokens)
        return bench.to_latency(num_tokens, times)
    finally:
        bench.release()


def _run(dense: DenseModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> RunTimes:
    length = len(prompts[0])
    with torch.inference_mode():
        memory = bench.PeakMemory(dense.device)
        cache = _preallocate(dense, length + new_tokens)
        ids = torch.tensor(prompts, device=dense.device)
        began = time.perf_counter()
        out = dense.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        int(token)  # wait for the device
        first_s = time.perf_counter() - began
        memory.update()
        cache = cache if cache is not None else out.past_key_values
        del out
        decode_s = _decode(dense, token, cache, length, new_tokens - 1)
        memory.update()
    return RunTimes(first_s, new_tokens - 1, decode_s, memory.peak)


def _decode(dense: DenseModel, token: torch.Tensor, cache: Any, length: int, count: int) -> float:
    """Return the seconds for `count` more tokens."""
    position = torch.full((1, 1), length, device=dense.device)

    def step() -> torch.Tensor:
        out = dense.model(
            input_ids=token, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        best: torch.Tensor = out.logits[:, -1:].argmax(-1)
        return best

    if dense.device.type == "cuda" and dense.is_plain:
        try:
            return _replay(step, cache, length, count)
        except RuntimeError as error:
            if "memory" in str(error).lower():
                raise
            warnings.warn(f"{dense.name} decodes without a CUDA graph, which is slower: {error}", stacklevel=2)
            _rewind(cache, length)
    began = time.perf_counter()
    for _ in range(count):
        token = step()
        position = position + 1
        int(token)
    return time.perf_counter() - began


def _replay(step: Callable[[], Any], cache: Any, length: int, count: int) -> float:
    """Return the seconds of `count` decode steps at this context, replayed as a CUDA graph without Python."""

    def again() -> None:
        _rewind(cache, length)
        step()

    graph = bench.capture(again)
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _rewind(cache: Any, length: int) -> None:
    for layer in cache.layers:
        layer.length = length


def _preallocate(dense: DenseModel, size: int) -> Any:
    """Return a KV cache of `size` tokens that is never copied; None if the model needs a cache of its own."""
    if not dense.is_plain:
        return None
    from transformers.cache_utils import Cache, DynamicLayer

    class PreallocatedLayer(DynamicLayer):
        def __init__(self) -> None:
            super().__init__()
            self.length = 0

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            batch, heads, _, dim = key_states.shape
            self.dtype, self.device = key_states.dtype, key_states.device
            self.buffers = [key_states.new_empty(batch, heads, size, dim) for _ in range(2)]
            self.is_initialized = True

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            begin, self.length = self.length, self.length + key_states.shape[-2]
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[:, :, begin : self.length] = states
            self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)
            return self.keys, self.values

        def get_seq_length(self) -> int:
            return self.length

    return Cache(layers=[PreallocatedLayer() for _ in range(dense.model.config.num_hidden_layers)])


def compare(ours: Sequence[Latency], theirs: Sequence[Latency]) -> list[dict[str, Any]]:
    """Return a row per length: both models, how many times as fast ours is, and where it overtakes the other."""
    sides = {prefix: {one.num_tokens: one for one in side} for prefix, side in (("", ours), ("dense_", theirs))}
    names = ("first_token_s", "prefill_per_second", "decode_per_second", "peak_bytes")
    rows: list[dict[str, Any]] = []
    for length in sorted({one.num_tokens for one in (*ours, *theirs)}):
        row: dict[str, Any] = {"num_tokens": length}
        for prefix, side in sides.items():
            row |= {prefix + name: getattr(side.get(length), name, None) for name in names}
        row["first_token_ratio"] = _ratio(row["dense_first_token_s"], row["first_token_s"])
        row["decode_ratio"] = _ratio(row["decode_per_second"], row["dense_decode_per_second"])
        row["crossover"] = {name: at for name in MEASURES if (at := _crossing(rows, row, f"{name}_ratio")) is not None}
        rows.append(row)
    return rows


def _ratio(large: float | None, small: float | None) -> float | None:
    return None if large is None or small is None else large / small


def _crossing(before: Sequence[dict[str, Any]], row: dict[str, Any], name: str) -> int | None:
    """Return the length, since the row before, where ours became faster; interpolated on logarithmic axes."""
    earlier = next((one for one in reversed(before) if one[name] is not None), None)
    if earlier is None or row[name] is None or not earlier[name] < 1 <= row[name]:
        return None
    share = -math.log(earlier[name]) / (math.log(row[name]) - math.log(earlier[name]))
    low, high = math.log(earlier["num_tokens"]), math.log(row["num_tokens"])
    return round(math.exp(low + share * (high - low)))


def verdict(rows: Sequence[dict[str, Any]], name: str) -> str:
    """Return a sentence that says from which length on ours is faster at `name`."""
    ratios = [row[f"{name}_ratio"] for row in rows if row[f"{name}_ratio"] is not None]
    places = [row["crossover"][name] for row in rows if name in row["crossover"]]
    if not ratios:
        return "no length was measured on both"
    if places:
        return f"faster from about {places[-1]:,} tokens on" if ratios[-1] >= 1 else "faster at some lengths only"
    return "faster at every length measured" if min(ratios) >= 1 else "slower at the longest length measured"
