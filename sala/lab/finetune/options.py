"""The options of a fine-tuning run: flags of `sala finetune`, keys of its TOML file, and arguments for scripts."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from sala.errors import InputError
from sala.options import Dtype, Kernels, Options
from sala.options.schema import REQUIRED, Count, File, Kind, Text, option, option_of, options, read_count, spelling

Method = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw-bf16", "adafactor", "adamw-8bit"]
METHODS = get_args(Method)
OPTIMIZERS = get_args(Optimizer)
RATES = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4}
KEEP_LONG = 0.1
PREFERENCE_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}


_tune = partial(option, scope="fine tuning")
_loaded = partial(option_of, Options, scope="fine tuning")
_MOST = 1 << 40

Positive = Annotated[int, Field(ge=1, le=_MOST)]
Amount = Annotated[float, Field(ge=0.0, le=1e12)]
Share = Annotated[float, Field(ge=0.0, le=0.9)]


def read_share(value: Any) -> Any:
    """Read 10% or 0.1. Raises ValueError."""
    if not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    text = value.strip()
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


Percent = Annotated[
    float, Kind("SHARE", "give a share from 0 to 90%, such as 10% or 0.1", read_share), Field(ge=0, le=0.9)
]


@options
class FinetuneOptions:
    """How a model is fine-tuned. The state of an unfinished run is in `output`.run."""

    variables: ClassVar = frozenset({"device", "dtype", "kernels"})  # those of every command that loads a model
    has_relative_paths: ClassVar = True  # those of a TOML file are relative to its directory

    model: Text = _loaded("model", REQUIRED, flags=(), shown=None)
    train: File = _tune(REQUIRED, "Examples: JSON or JSONL with messages or text, or a plain text.")
    output: File = _tune(REQUIRED, "Directory for the adapter or the model; must not exist.", flags=("-o",))
    eval: File | None = _tune(None, "Examples to evaluate on.")
    eval_share: Share = _tune(0.0, "Share of the training examples to evaluate on instead.")
    method: Annotated[Method, spelling()] = _tune("lora", "full (all weights), lora, or qlora (lora on 4-bit weights).")
    objective: Annotated[Literal["sft", "dpo", "kto"], spelling()] = _tune(
        "sft", "sft (examples), dpo (pairs of answers) or kto (answers marked good or bad)."
    )
    beta: Amount = _tune(0.1, "dpo, kto: strength of the penalty for diverging from the reference model.")
    max_length: Count = _tune(4096, "Tokens of a row; longer conversations are refused.", ge=8, le=_MOST)
    epochs: Amount = _tune(3.0, "Passes over the examples.")
    steps: Positive | None = _tune(None, "Number of updates, instead of epochs.")
    lr: Amount | None = _tune(None, "Peak learning rate; default: 1e-5 for full, 2e-4 for LoRA; dpo, kto: 1e-6, 1e-5.")
    schedule: Annotated[Literal["cosine", "linear", "constant"], spelling()] = _tune(
        "cosine", "Learning-rate schedule after the warm-up."
    )
    warmup: float = _tune(0.03, "Share of the updates for the warm-up.", ge=0.0, le=1.0)
    weight_decay: Amount = _tune(0.0, "Weight decay of the optimizer.")
    clip: Amount = _tune(1.0, "Largest gradient norm; larger gradients are scaled down.")
    batch: Positive = _tune(1, "Rows per device and forward pass.")
    accumulate: Positive = _tune(8, "Gradient accumulation: batches per update.")
    optimizer: Annotated[Optimizer, spelling()] = _tune(
        "adamw", "adamw-bf16 and adafactor need less memory; adamw-8bit needs bitsandbytes."
    )
    rank: int = _tune(16, "Rank of the adapter.", ge=1, le=1024)
    alpha: Amount = _tune(32.0, "The weight of the adapter is alpha / rank.")
    dropout: Share = _tune(0.05, "Dropout on the adapter's inputs.")
    targets: Text = _tune("all", "Linears that get an adapter: all, or comma-separated names: q_proj,z_proj,up_proj.")
    bits: int = _tune(4, "Bits of a base that qlora quantizes itself: 2, 3, 4, 5, 6 or 8.", ge=2, le=8)
    format: Annotated[Literal["auto", "sala", "nf4"], spelling()] = _tune(
        "auto", "Format of that base: sala (affine) or nf4 (bitsandbytes, NVIDIA GPUs)."
    )
    packing: bool = _tune(
        True, "Fill rows with several examples, which do not attend to each other.", off="--no-packing"
    )
    checkpointing: bool = _tune(
        True, "Recompute activations in the backward pass instead of storing them.", off="--no-checkpointing"
    )
    learns: Text = _tune(
        "all",
        "Parts that learn: all, or some of mixers, attention, lightning, mlps, norms, embeddings.",
    )
    keep_long: Percent | None = _tune(
        None, "Long rows mixed in, by share of the examples' tokens; 0 for none.", shown="10%; dpo, kto: 0"
    )
    keep_long_length: Count | None = _tune(
        None,
        "Tokens of a long row; default: where sparse attention is at work, if share and memory allow.",
        ge=512,
        le=_MOST,
    )
    long_texts: File | None = _tune(None, "Long texts of your own for these rows: a text file, JSONL, or a directory.")
    restore_qk: bool = _tune(False, "Restore the original query and key projections at the end.")
    restore_by: Annotated[Literal["plain", "orthogonal"], spelling()] = _tune(
        "plain", "How: plain (the original projections) or orthogonal (each head turned closest to them)."
    )
    recall: bool = _tune(True, "Measure before and after how many facts in long texts are found.", off="--no-recall")
    recall_lengths: Text = _tune("auto", "Lengths of these texts: 2K,8K,32K; auto: sparse attention first.")
    recall_texts: Positive | None = _tune(None, "Texts of each length, each with eight facts.")
    loss_rows: Count = _tune(1024, "Tokens whose logits are in memory at a time.", ge=1, le=_MOST)
    eval_every: Positive | None = _tune(None, "Updates between evaluations; default: a tenth of the run.")
    save_every: Positive | None = _tune(None, "Updates between checkpoints; default: a tenth of the run.")
    log_every: Positive = _tune(1, "Updates between entries of the log.")
    skip_bad: bool = _tune(False, "Skip bad lines instead of stopping.")
    cut_long: bool = _tune(False, "Truncate conversations that are too long.")
    seed: int = _tune(0, "Seed for the order of the examples and the adapter's initial weights.", ge=0, le=_MOST)
    device: Text = _loaded("device", "auto", help="auto, cpu, cuda, cuda:N or mps.")
    kernels: Kernels = _loaded("kernels", "auto")
    dtype: Dtype = _loaded("dtype", "auto", help="Precision of the weights in training.")
    deepspeed: File | None = _tune(None, "DeepSpeed's configuration.")
    resume: bool = _tune(False, "Resume a stopped run.")

    def __post_init__(self) -> None:
        if self.eval is not None and self.eval_share:
            raise InputError("eval_share", "cannot be combined with eval", "keep one of them")
        if self.bits == 7:
            raise InputError("bits", "is 7", "use 2, 3, 4, 5, 6 or 8")
        if self.keep_long and self.objective != "sft":
            raise InputError("keep_long", f"cannot be used with objective {self.objective}", "leave it out")
        if self.long_texts is not None and not self.long_share:
            raise InputError("long_texts", "are given without long rows", "add --keep-long 10%")
        read_lengths(self.recall_lengths)
        if self.restore_by != "plain" and not self.restore_qk:
            raise InputError("restore_by", "is given without restore_qk", "add --restore-qk")

    @property
    def rate(self) -> float:
        rates = RATES if self.objective == "sft" else PREFERENCE_RATES
        return rates[self.method] if self.lr is None else self.lr

    @property
    def long_share(self) -> float:
        """Return the share of long rows among the examples' tokens."""
        if self.keep_long is None:
            return KEEP_LONG if self.objective == "sft" else 0.0
        return self.keep_long

    @property
    def has_adapter(self) -> bool:
        return self.method != "full"

    @property
    def work(self) -> Path:
        """Return the directory of the unfinished run."""
        return self.output.with_name(self.output.name + ".run")

    def persistent(self) -> dict[str, Any]:
        """Return the options that must not change when a run is resumed, as JSON values."""
        left_out = ("resume", "device", "deepspeed", "log_every", "skip_bad")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def read_lengths(text: str) -> tuple[int, ...]:
    """Return lengths from `2K,8K`; none for `auto`. Raise InputError."""
    if text == "auto":
        return ()
    try:
        lengths = tuple(sorted({read_count(part) for part in text.split(",")}))
    except ValueError as error:
        raise InputError("recall_lengths", str(error), "write them as 2K,8K,32K, or auto") from None
    if lengths[0] < 512:
        raise InputError("recall_lengths", f"begin with {lengths[0]}", "give 512 tokens or more")
    return lengths
