"""The options table: every option of loading, sampling and serving, declared once.

Flags, `SALA_*` variables, TOML keys, arguments of `LLM`, `--show-config` and the reference pages are derived from these
classes. To add an option, add a field here and use it; nothing else has to be written.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sala.errors import InputError
from sala.options.schema import Count, File, Hosts, Kind, LoopGuard, Plain, Stops, Text, Url, option, options, spelling

MAX_LOGPROBS = 20
MOST = 1 << 50
_INT32, _INT64 = 1 << 31, 1 << 63

_loading = partial(option, scope="loading")
_sampling = partial(option, scope="sampling")
_commands = partial(option, scope="commands")

Backend = Annotated[Literal["auto", "torch", "mlx"], spelling()]
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], spelling()]
KV = Annotated[Literal["auto", "fp8"], spelling()]
Prefill = Annotated[Literal["auto", "fp8"], spelling(exact="auto")]
Kernels = Annotated[Literal["auto", "off"], spelling(_0="off", _1="auto", on="auto")]
Metal = Annotated[Literal["auto", "off", "on"], spelling(_0="off", _1="on")]
Speculate = Annotated[Literal["off", "lookup", "layers"], spelling()]


@options
class Options:
    """How to load and run a model."""

    RENAMED: ClassVar = (("num_snapshots", "snapshots"),)

    model: Text | None = _loading(None, "Model: a directory or a name.", flags=("-m",), shown="smol-sala")
    adapter: File | None = _loading(None, "LoRA adapter to merge into the model.")
    backend: Backend = _loading("auto", "auto, torch or mlx; auto is mlx on Apple Silicon where it is installed.")
    device: Text = _loading("auto", "auto, cpu, cuda, cuda:N or mps; with mlx auto, cpu or gpu.")
    dtype: Dtype = _loading("auto", "Precision of the weights; auto is the checkpoint's own.")
    kv: KV = _loading("auto", "Precision of the KV cache: auto, as computed, or fp8.")
    prefill: Prefill = _loading("auto", "Precision of prefill: auto, as the weights, or fp8 on recent GPUs.")
    packed: bool = _loading(True, "Compute with quantized weights as stored; off: expand them.", off="--no-packed")
    kernels: Kernels = _loading("auto", "Kernels in C++, Triton and Metal: auto, or off for the reference.")
    metal: Metal = _loading("auto", "Metal kernels: auto, where they prove equal and faster, on or off.")
    threads: int | None = _loading(None, "CPU threads.", ge=1, le=1 << 12, shown="one per core")
    ctx: Count | None = _loading(
        None, "Longest sequence in tokens, e.g. 128k or 1M.", ge=1, le=MOST, shown="by free memory"
    )
    cache_memory: Count | None = _loading(
        None, "Bytes for the KV cache of all sequences, e.g. 8G.", ge=1, le=MOST, shown="half of what is free"
    )
    cache_dir: File | None = _loading(None, "Keep the cache of long prefixes here, across restarts.")
    cache_disk: Count | None = _loading(None, "Bytes in cache_dir at most.", ge=1, le=MOST, shown="no limit")
    max_batch: int = _loading(8, "Sequences that run at a time.", ge=1, le=1 << 16)
    snapshots: int = _loading(16, "States kept for reuse by later requests.", ge=0, le=1 << 16)
    prefill_chunk: Count | None = _loading(
        None, "Prompt tokens computed in a step; it bounds memory.", ge=1, le=MOST, shown="by device"
    )
    speculate: Speculate = _loading("off", "Source of draft tokens: off, lookup (the text so far) or layers.")
    num_draft: int = _loading(4, "Draft tokens at a time.", ge=1, le=64)
    draft_layers: int = _loading(8, "Layers that draft, with speculate = layers.", ge=1, le=1 << 10)


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

    temperature: Temperature = _sampling(0.7, "Randomness; 0 takes the most probable token.", flags=("-t",))
    top_p: TopP = _sampling(1.0, "Sample from the most probable tokens that make up this share.")
    top_k: TopK = _sampling(0, "Sample from this many tokens at most; 0: no limit.")
    min_p: float = _sampling(0.0, "Leave out tokens below this share of the most probable one.", ge=0.0, le=1.0)
    repetition_penalty: float = _sampling(1.0, "Divide the scores of tokens that occurred.", gt=0.0, le=100.0)
    presence_penalty: Penalty = _sampling(0.0, "Subtract this from the scores of tokens in the answer.")
    frequency_penalty: Penalty = _sampling(0.0, "Subtract this for each time a token is in the answer.")
    seed: int | None = _sampling(None, "The same seed samples the same tokens.", ge=-_INT64, le=_INT64 - 1)
    stop: Stops = _sampling((), "End the answer before this text. Repeatable.")
    max_tokens: MaxTokens = _sampling(256, "Length of the answer at most.", flags=("-n",))
    min_tokens: Count = _sampling(0, "Length of the answer at least.", ge=0, le=_INT32)
    logit_bias: LogitBias = _sampling(dict, "Numbers added to the scores of tokens, by token id.", is_flag=False)
    logprobs: int | None = _sampling(None, "Report this many alternatives per token.", ge=0, le=MAX_LOGPROBS)
    ignore_eos: bool = _sampling(False, "Continue past the end-of-sequence token.", off="--heed-eos")
    think_budget: ThinkBudget | None = _sampling(None, "Tokens of reasoning at most, then the answer.")
    loop_guard: LoopGuard = _sampling(0, "End an answer that repeats itself for so many tokens; 0: never.")
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


@options
class CommandOptions:
    """Options of single commands that are neither about loading nor about sampling or serving."""

    config: File | None = _commands(None, "TOML file with options.", is_flag=False)
    url: Url = _commands("http://127.0.0.1:8080", "Address of a running server.")
    sessions_dir: File | None = _commands(None, "Directory of saved sessions.", shown="the user's cache directory")
    hub_hosts: Hosts = _commands((), "Further hosts that the hub may redirect downloads to.")
