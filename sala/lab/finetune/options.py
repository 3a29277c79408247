"""What a fine-tuning run is told: one frozen, strict table for flags, files and scripts."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sala.errors import InputError

METHODS = ("full", "lora", "qlora")
OBJECTIVES = ("sft", "dpo", "kto")
OPTIMIZERS = ("adamw", "adamw-bf16", "adafactor", "adamw-8bit")
DTYPES = ("auto", "bfloat16", "float16", "float32")
FORMATS = ("auto", "sala", "nf4")
SCHEDULES = ("cosine", "linear", "constant")
RATES = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4}
PREFERENCE_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}


def option(default: Any, words: str, least: float | None = None, most: float | None = None) -> Any:
    """A field with its help and its bounds."""
    return field(default=default, metadata={"help": words, "least": least, "most": most})


def choice(default: str, words: str, known: tuple[str, ...]) -> Any:
    return field(default=default, metadata={"help": words, "known": known})


@dataclass(frozen=True, slots=True)
class FinetuneOptions:
    """`output` never exists before; what is needed to go on lies in `output`.run until the run is over."""

    model: str = option("", "Checkpoint directory, or the name of a model that is here.")
    train: Path = option(Path(), "Examples: JSON or JSONL with messages or text, or a plain text.")  # noqa: RUF009
    output: Path = option(Path(), "Where the adapter or the model goes; must not exist.")  # noqa: RUF009
    eval: Path | None = option(None, "Examples to measure on.")  # noqa: RUF009
    eval_share: float = option(0.0, "Share of the training examples to measure on instead.", 0, 0.9)
    method: str = choice("lora", "full (all weights), lora, or qlora (lora on 4-bit weights).", METHODS)
    objective: str = choice(
        "sft", "sft (examples), dpo (pairs of answers) or kto (answers marked good or bad).", OBJECTIVES
    )
    beta: float = option(0.1, "dpo, kto: how closely the model keeps to what it was.", 0)
    max_length: int = option(4096, "Tokens of a row; longer conversations are refused.", 8)
    epochs: float = option(3.0, "Times that every example is seen.", 0)
    steps: int | None = option(None, "Stop after so many updates instead.", 1)
    lr: float | None = option(None, "Peak learning rate; else 1e-5 for full, 2e-4 for LoRA; dpo, kto: 1e-6, 1e-5.", 0)
    schedule: str = choice("cosine", "How the rate falls after the warm-up.", SCHEDULES)
    warmup: float = option(0.03, "Share of the updates in which the rate rises.", 0, 1)
    weight_decay: float = option(0.0, "Pull of the weights towards zero.", 0)
    clip: float = option(1.0, "Largest norm of a gradient.", 0)
    batch: int = option(1, "Rows at a time on every device.", 1)
    accumulate: int = option(8, "Batches that make one update.", 1)
    optimizer: str = choice("adamw", "adamw-bf16 and adafactor keep less; adamw-8bit needs bitsandbytes.", OPTIMIZERS)
    rank: int = option(16, "Rank of the adapter.", 1, 1024)
    alpha: float = option(32.0, "Its weight is alpha / rank.", 0)
    dropout: float = option(0.05, "Share of the adapter's inputs that is left out.", 0, 0.9)
    targets: str = option("all", "Linears that get an adapter: all, or names with commas: q_proj,z_proj,up_proj.")
    bits: int = option(4, "Bits of a base that qlora quantizes itself.", 2, 8)
    format: str = choice("auto", "How: sala (our own) or nf4 (bitsandbytes, NVIDIA GPUs).", FORMATS)
    packing: bool = option(True, "Fill rows with several examples, which do not see each other.")
    checkpointing: bool = option(True, "Compute activations twice instead of keeping them.")
    restore_qk: bool = option(False, "Put the old query and key projections back at the end.")
    loss_rows: int = option(1024, "Tokens whose scores of the vocabulary are in memory at a time.", 1)
    eval_every: int | None = option(None, "Updates between measurements; else ten times in a run.", 1)
    save_every: int | None = option(None, "Updates between checkpoints; else ten times in a run.", 1)
    log_every: int = option(1, "Updates between entries of the log.", 1)
    skip_bad: bool = option(False, "Leave bad lines out instead of stopping.")
    cut_long: bool = option(False, "Cut conversations that are too long.")
    seed: int = option(0, "Order of the examples, and the adapter's first weights.", 0)
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps.")
    dtype: str = choice("auto", "Precision of the weights while they learn.", DTYPES)
    deepspeed: Path | None = option(None, "DeepSpeed's configuration.")  # noqa: RUF009
    resume: bool = option(False, "Go on with the run that was stopped.")

    def __post_init__(self) -> None:
        for name in ("train", "output", "eval", "deepspeed"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else Path(value).expanduser())
        for each in fields(self):
            _check(each.name, getattr(self, each.name), each.metadata)
        for name in ("model", "train", "output"):
            if str(getattr(self, name)) in ("", "."):
                raise InputError(name, "is missing", "say it")
        if self.eval is not None and self.eval_share:
            raise InputError("eval-share", "does not go with eval", "keep one of them")
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise InputError("bits", f"is {self.bits}", "use 2, 3, 4, 5, 6 or 8")

    @property
    def rate(self) -> float:
        rates = RATES if self.objective == "sft" else PREFERENCE_RATES
        return rates[self.method] if self.lr is None else self.lr

    @property
    def has_adapter(self) -> bool:
        return self.method != "full"

    @property
    def work(self) -> Path:
        """Where the run lies while it is not over."""
        return self.output.with_name(self.output.name + ".run")

    def lasting(self) -> dict[str, Any]:
        """What must not change when a run goes on, as JSON can hold it."""
        left_out = ("resume", "device", "deepspeed", "log_every", "skip_bad")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _check(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    flag = name.replace("_", "-")
    if "known" in rules and value not in rules["known"]:
        raise InputError(flag, f"is {str(value)[:60]!r}", "use " + ", ".join(rules["known"]))
    least, most = rules.get("least"), rules.get("most")
    if value is None or (least is None and most is None):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InputError(flag, f"is {str(value)[:60]!r}", "it must be a number")
    if least is not None and value < least:
        raise InputError(flag, f"is {value:g}", f"it must be at least {least:g}")
    if most is not None and value > most:
        raise InputError(flag, f"is {value:g}", f"it must be at most {most:g}")


def read_options(file: Path | None, flags: Mapping[str, Any]) -> FinetuneOptions:
    """Flags beat the file; `None` among them is one that was not given. Unknown keys are errors."""
    values: dict[str, Any] = {}
    if file is not None:
        values = _read_file(file)
    return FinetuneOptions(**{**values, **{name: value for name, value in flags.items() if value is not None}})


def _read_file(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.expanduser().read_text("utf-8"))
    except OSError as error:
        raise InputError("config", f"{file} cannot be read: {error.strerror}", "name a file that can be") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("config", f"{file} is no TOML: {error}", "correct it there") from None
    kinds = {each.name: each.type for each in fields(FinetuneOptions)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise InputError("config", f"{file}: {key[:60]!r} is no option", "see: sala finetune --help")
        if not _fits(value, str(kinds[name])):
            raise InputError("config", f"{file}: {key} is {str(value)[:60]!r}", f"it must be of type {kinds[name]}")
        is_path = "Path" in str(kinds[name])
        values[name] = file.expanduser().parent / value if is_path else value
    return values


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int):
        return "int" in kind or "float" in kind
    if isinstance(value, float):
        return "float" in kind
    return isinstance(value, str) and ("str" in kind or "Path" in kind)
