"""The options table: every option of loading, sampling and serving, declared once.

Flags, `SALA_*` variables, TOML keys, arguments of `LLM`, `--show-config` and the reference pages are derived from these
classes. To add an option, add a field here and use it; nothing else has to be written.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sala.errors import InputError
from sala.options.schema import (
    Adapters,
    Count,
    File,
    Kind,
    LoopGuard,
    Plain,
    Stops,
    Text,
    Url,
    option,
    option_of,
    options,
    spelling,
    table,
)

MAX_LOGPROBS = 20
LOOP_GUARD = 512  # of answers at a terminal and of the server; the library has none unless asked or recommended
MOST = 1 << 50
MOST_BLOCKS = 1024  # that a query may select; dense attention reads more
_INT32, _INT64 = 1 << 31, 1 << 63

_loading = partial(option, scope="loading")
_sampling = partial(option, scope="sampling")
_commands = partial(option, scope="commands")
_attention = partial(option, scope="attention")

Backend = Annotated[Literal["auto", "torch", "mlx"], spelling()]
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], spelling()]
KV = Annotated[Literal["auto", "fp8"], spelling()]
KVHome = Annotated[Literal["auto", "device", "host", "disk"], spelling(gpu="device", memory="device")]
State = Annotated[Literal["auto", "bf16"], spelling(fp32="auto", bfloat16="bf16")]
Prefill = Annotated[Literal["auto", "fp8"], spelling(exact="auto")]
Kernels = Annotated[Literal["auto", "off"], spelling(_0="off", _1="auto", on="auto")]
Metal = Annotated[Literal["auto", "off", "on"], spelling(_0="off", _1="on")]
Speculate = Annotated[Literal["off", "lookup", "layers", "head", "auto"], spelling()]
AttentionRule = Annotated[Literal["auto", "dense", "sparse"], spelling()]
DenseBelow = Annotated[Count, Field(ge=0, le=MOST)]
NumBlocks = Annotated[int, Field(ge=1, le=MOST_BLOCKS)]


@options
class Attention:
    """How the sparse layers attend, where that differs from what the model or its options say."""

    attention: AttentionRule | None = _attention(
        None,
        "Attention of the sparse layers: auto (dense for short prompts), dense or sparse at any length.",
        shown="the model's, auto",
    )
    dense_below: DenseBelow | None = _attention(
        None, "Prompts with fewer tokens attend to everything, with attention auto.", shown="the model's"
    )
    topk: NumBlocks | None = _attention(
        None, "Blocks of text that a query selects, besides the most recent ones.", shown="the model's"
    )

    def __post_init__(self) -> None:
        if self.dense_below is not None and self.attention not in (None, "auto"):
            raise InputError("dense_below", f"has no effect if attention is {self.attention}", "leave one of them out")

    def over(self, default: "Attention") -> "Attention":
        """Return this choice, with another's for what is not chosen."""
        topk = default.topk if self.topk is None else self.topk
        if self.attention is None and self.dense_below is None:
            return Attention(attention=default.attention, dense_below=default.dense_below, topk=topk)
        below = default.dense_below if self.attention == "auto" and self.dense_below is None else self.dense_below
        return Attention(attention=self.attention, dense_below=below, topk=topk)


@options
class Options:
    """How to load and run a model."""

    RENAMED: ClassVar = (("num_snapshots", "snapshots"),)

    model: Text | None = _loading(None, "Model: a directory or a name.", flags=("-m",), shown="smol-sala")
    adapter: Adapters = _loading(
        (), "LoRA adapter to merge into the model; NAME=PATH, repeatable: to use by name in requests."
    )
    backend: Backend = _loading("auto", "auto, torch or mlx; auto is mlx on Apple Silicon where it is installed.")
    device: Text = _loading("auto", "auto, cpu, cuda, cuda:N or mps; with mlx auto, cpu or gpu.")
    dtype: Dtype = _loading("auto", "Precision of the weights; auto is the checkpoint's own.")
    kv: KV = _loading("auto", "Precision of the KV cache: auto, as computed, or fp8.")
    kv_home: KVHome = _loading(
        "auto", "Where keys and values lie: device, host (GPU) or disk (CPU); auto: disk on a CPU if ctx needs that."
    )
    kv_home_size: Count | None = _loading(
        None,
        "Bytes for keys and values on disk or in host memory, e.g. 40G.",
        ge=1,
        le=MOST,
        shown="half of what is free, or what ctx needs",
    )
    kv_hot: Count | None = _loading(
        None,
        "Bytes on the GPU for copies of keys and values in host memory, e.g. 1G; 0: none.",
        ge=0,
        le=MOST,
        shown="an eighth of cache_memory",
    )
    state: State = _loading(
        "auto", "Precision of the recurrent state: auto, fp32, or bf16: half the memory, less exact."
    )
    prefill: Prefill = _loading("auto", "Precision of prefill: auto, as the weights, or fp8 on recent GPUs.")
    packed: bool = _loading(True, "Compute with quantized weights as stored; off: expand them.", off="--no-packed")
    attention: AttentionRule = option_of(Attention, "attention", "auto", scope="loading", shown=None)
    dense_below: DenseBelow | None = option_of(Attention, "dense_below", None, scope="loading")
    topk: NumBlocks | None = option_of(Attention, "topk", None, scope="loading")
    kernels: Kernels = _loading("auto", "Kernels in C++, Triton and Metal: auto, or off for the reference.")
    metal: Metal = _loading("auto", "Metal kernels: auto, where they prove equal and faster, on or off.")
    threads: int | None = _loading(None, "CPU threads.", ge=1, le=1 << 12, shown="one per core")
    ctx: Count | None = _loading(
        None, "Longest sequence in tokens, e.g. 128k or 1M.", ge=1, le=MOST, shown="by free memory"
    )
    cache_memory: Count | None = _loading(
        None, "Bytes for the KV cache of all sequences, e.g. 8G.", ge=1, le=MOST, shown="half of what is free"
    )
    cache_ram: Count | None = _loading(
        None, "Host memory for prefixes evicted from a GPU, e.g. 32G.", ge=1, le=MOST, shown="none"
    )
    cache_dir: File | None = _loading(None, "Keep long cached prefixes in this directory, across restarts.")
    cache_disk: Count | None = _loading(
        None, "Maximum bytes in cache_dir.", ge=1, le=MOST, shown="a tenth of the free disk"
    )
    max_batch: int | None = _loading(
        None, "Maximum sequences per step.", ge=1, le=1 << 16, shown="by device and memory"
    )
    snapshots: int | None = _loading(
        None, "Maximum cached prefixes; 0 disables caching.", ge=0, le=1 << 16, shown="as many as fit into cache_memory"
    )
    prefill_chunk: Count | None = _loading(
        None, "Maximum prompt tokens computed per step; bounds activation memory.", ge=1, le=MOST, shown="by device"
    )
    prefill_ms: int = _loading(
        100,
        "Target in milliseconds for what prefill adds to a step while others decode (GPU).",
        ge=1,
        le=1 << 20,
    )
    speculate: Speculate = _loading(
        "off", "Source of draft tokens: off, lookup (the text so far), layers, head (a draft head), or auto."
    )
    draft_head: File | None = _loading(
        None,
        "Directory of a draft head (speculate = head, auto) or of a trained exit (layers).",
        shown="draft-head or draft-exit in the model's directory",
    )
    num_draft: int = _loading(4, "Maximum draft tokens per round.", ge=1, le=64)
    draft_layers: int = _loading(
        8, "Layers that draft, with speculate = layers; a trained exit has its own number.", ge=1, le=1 << 10
    )

    def __post_init__(self) -> None:
        names = [_split_adapter(text)[0] for text in self.adapter]
        if len(set(names)) < len(names):
            problem = "names the same adapter twice" if "" not in names else "names two adapters to merge"
            raise InputError("adapter", problem, "give each of them a name: --adapter NAME=PATH")
        _ = self.attention_choice  # raises for options that exclude each other

    @property
    def attention_choice(self) -> Attention:
        """How the sparse layers attend, for requests that do not say."""
        return Attention(attention=self.attention, dense_below=self.dense_below, topk=self.topk)

    @property
    def merged_adapter(self) -> Path | None:
        """The adapter that is merged into the model."""
        return next((path for name, path in map(_split_adapter, self.adapter) if not name), None)

    @property
    def named_adapters(self) -> dict[str, Path]:
        """The adapters that requests may name."""
        return {name: path for name, path in map(_split_adapter, self.adapter) if name}

    @property
    def only_adapter(self) -> Path | None:
        """The adapter that is merged, where requests cannot name others. Raises InputError if there are others."""
        if self.named_adapters:
            remedy = "give the directory without a name; names are for sala serve and LLM"
            raise InputError("adapter", f"names {', '.join(self.named_adapters)}", remedy)
        return self.merged_adapter


def _split_adapter(text: str) -> tuple[str, Path]:
    """Return name and directory of an adapter; without a name it is empty."""
    found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})=(.+)", text)
    return (found[1], Path(found[2]).expanduser()) if found else ("", Path(text).expanduser())


ATTENTION_FIELDS = tuple(table(Attention))
Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
TopK = Annotated[int, Field(ge=0, le=_INT32)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
MaxTokens = Annotated[Count, Field(ge=1, le=_INT32)]
ThinkBudget = Annotated[Count, Field(ge=0, le=_INT32)]
LogitBias = Annotated[
    Mapping[Annotated[int, Field(ge=0, le=_INT32)], Annotated[float, Field(ge=-100, le=100)]],
    Kind("MAP", "it maps token ids to numbers from -100 to 100"),
]


@options
class Sampling:
    """How the next token is sampled. Temperature 0 takes the most probable one."""

    temperature: Temperature = _sampling(
        0.7, "Randomness; 0 takes the most probable token.", flags=("-t",), shown="the model's, or 0.7"
    )
    top_p: TopP = _sampling(
        1.0, "Sample from the most probable tokens that make up this share.", shown="the model's, or 1"
    )
    top_k: TopK = _sampling(0, "Sample from this many most probable tokens; 0: no limit.", shown="the model's, or 0")
    min_p: float = _sampling(
        0.0,
        "Exclude tokens below this share of the most probable one.",
        ge=0.0,
        le=1.0,
        shown="the model's, or 0",
    )
    repetition_penalty: float = _sampling(
        1.0, "Divide the scores of tokens that have occurred.", gt=0.0, le=100.0, shown="the model's, or 1"
    )
    presence_penalty: Penalty = _sampling(0.0, "Subtract this from the scores of tokens in the answer.")
    frequency_penalty: Penalty = _sampling(0.0, "Subtract this for every occurrence of a token in the answer.")
    seed: int | None = _sampling(None, "The same seed samples the same tokens.", ge=-_INT64, le=_INT64 - 1)
    stop: Stops = _sampling((), "End the answer before this text. Repeatable.")
    max_tokens: MaxTokens = _sampling(256, "Maximum tokens of the answer.", flags=("-n",))
    min_tokens: Count = _sampling(0, "Minimum tokens of the answer.", ge=0, le=_INT32)
    logit_bias: LogitBias = _sampling(dict, "Numbers added to the scores of tokens, by token id.", is_flag=False)
    logprobs: int | None = _sampling(None, "Report this many alternatives per token.", ge=0, le=MAX_LOGPROBS)
    return_sources: bool = _sampling(
        False, "Report which passages of the prompt the answer comes from.", flags=("--sources",)
    )
    ignore_eos: bool = _sampling(False, "Continue past the end-of-sequence token.", off="--heed-eos")
    think_budget: ThinkBudget | None = _sampling(None, "Maximum tokens of reasoning before the answer.")
    loop_guard: LoopGuard = _sampling(0, "End an answer that repeats itself for this many tokens; 0: never.")
    json_schema: Plain | None = _sampling(None, "JSON schema that the answer must follow.", flags=("--schema",))
    regex: Plain | None = _sampling(None, "Regular expression that the answer must match.")
    grammar: Plain | None = _sampling(None, "Grammar in Lark's syntax that the answer must follow.")

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise InputError("min_tokens", f"is {self.min_tokens}", f"it must be at most max_tokens, {self.max_tokens}")

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must follow a schema, a regular expression or a grammar."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def has_penalty(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def with_request(self, **given: Any) -> "Sampling":
        """Return these defaults of a model with what a request gives.

        Where the request enforces the answer, the model's own repetition penalty does not count: quotes and tags
        repeat, and where they are penalized, a string never ends.
        """
        merged = replace(self, **given)
        return merged if "repetition_penalty" in given else merged.without_model_penalty()

    def without_model_penalty(self) -> "Sampling":
        """Return the same without a repetition penalty if the answer is enforced."""
        return replace(self, repetition_penalty=1.0) if self.is_constrained else self


@options
class CommandOptions:
    """Options of single commands that are neither about loading nor about sampling or serving."""

    config: File | None = _commands(None, "TOML file with options.", is_flag=False)
    url: Url = _commands("http://127.0.0.1:8080", "Address of a running server.")
    sessions_dir: File | None = _commands(None, "Directory of saved sessions.", shown="the user's cache directory")
