"""Recipes: lists of stages in TOML, run in order. Unknown keys are errors."""

import difflib
import tomllib
import types
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sala.config import SparseConfig, read_small_file
from sala.errors import ConfigError
from sala.lab.train.schedule import Schedule

_MAX_RECIPE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A source of training rows.

    text: JSONL (`field` of each line), plain text, or a Hugging Face dataset; chat: `messages` of each line, with a
    loss on the assistant's messages only; samples: the free text of a `sample` stage; dialogues: the dialogues of a
    `sample` stage, one per row; needle: facts hidden in the texts of `path`; reading: passages of `table` hidden in
    these texts, with questions about them.

    With `rows`, every step has exactly that many rows of this source, of `seq_len` tokens: the stage then mixes rows of
    several lengths in every step. Without it, rows are distributed by `weight`.
    """

    kind: Literal["text", "chat", "samples", "dialogues", "needle", "reading"] = "text"
    path: str = ""
    dataset: str = ""
    split: str = "train"
    field: str = "text"
    weight: float = 1.0
    max_documents: int | None = None
    num_keys: int = 4  # needle: largest number of similar facts, some of which are asked for
    num_topics: int = 1  # needle: largest number of such groups of facts in a row
    truth: float = 0.0  # text, samples: share of the text's own tokens in the target of a distil stage
    table: str = ""  # reading, and a third of a needle source's rows: passages with questions and answers
    lists: str = ""  # with table: the prompt table whose lists fill the passages' slots
    rows: int = 0  # rows in every step
    seq_len: int = 0  # their length; 0: the stage's
    shortest: int = 0  # dialogues: only those with more tokens than this
    is_sparse: bool = False  # sparse attention in these rows from dense_len on
    answer_share: float = 1.2  # needle, with rows: weight of a row's answers relative to its tokens
    has_system: bool = False  # needle, with rows: half of the rows start with the chat template's system turn


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for the teacher: templates in which {topic} is replaced by a topic from a list.

    With an empty chat template the teacher also writes the user's turn.
    """

    weight: float = 1.0
    templates: tuple[str, ...] = ("",)
    path: str = ""  # instead of templates: JSONL with the `turns` of the user, every line used before any repeats
    is_chat: bool = True
    temperature: float = 0.7
    temperatures: tuple[float, ...] = ()  # instead of temperature: a random one of these for each row; 0 is greedy
    must_end: bool = False  # leave out documents without an end token
    second_turns: float = 0.0  # share of the dialogues in which the teacher writes another question and answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStage:
    """Sample text from the teacher: rows of `seq_len` tokens that start with prompts."""

    name: str
    kind: Literal["sample"]
    prompts: tuple[Prompts, ...] = (Prompts(),)
    topics: str = ""  # a file with a topic per line, for {topic} in templates
    num_rows: int = 1024
    seq_len: int = 512
    batch_rows: int = 1024  # rows sampled at a time
    seconds: int = 0  # above 0: stop after this time and keep the finished documents
    is_filtered: bool = False  # keep dialogues that end and do not loop, cut free text at a loop
    held_out: tuple[str, ...] = ()  # JSONL files whose questions must not occur in the kept documents


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectStage:
    """Measure the loss of recall and common sense when a layer loses attention, and select the layers that keep it."""

    name: str
    kind: Literal["select"]
    num_layers: int | None = None  # None: a quarter
    layers: tuple[int, ...] = ()  # keep attention in these layers, without measuring
    keep_ends: bool = True  # the first and the last layer always keep attention
    haystack: str = ""  # documents for the recall measure
    recall_len: int = 1024
    recall_rows: int = 64
    tasks: tuple[str, ...] = ()  # files of multiple-choice questions for the common-sense measure
    max_questions: int = 300
    epsilon: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The keys of every stage that trains."""

    name: str
    data: tuple[Source, ...]
    seq_len: int = 512
    batch_rows: int = 32
    micro_rows: int | None = None  # rows per forward pass on one device; None: all
    steps: int = 0
    tokens: int = 0  # instead of steps
    packing: Literal["stream", "documents"] = "stream"  # documents: no attention across documents
    schedule: Literal["constant", "cosine", "wsd", "exponential"] = "cosine"
    lr: float = 1e-3
    final_lr: float = 1e-5
    warmup_steps: int = 50
    decay_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    checkpointing: bool = False
    save_every: int = 500

    @property
    def num_steps(self) -> int:
        return self.steps or max(1, self.tokens // (self.batch_rows * self.seq_len))

    @property
    def rate(self) -> Schedule:
        return Schedule(self.schedule, self.lr, self.final_lr, self.num_steps, self.warmup_steps, self.decay_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignStage(Learning):
    """Train new mixers to match the teacher's, layer by layer: all as lightning, or the kept ones without RoPE."""

    kind: Literal["align"]
    mixers: Literal["lightning", "sparse"] = "lightning"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStage(Learning):
    """Train all or some weights on the next token."""

    kind: Literal["train"]
    # attention: the mixers of sparse layers alone
    learns: tuple[Literal["all", "mixers", "attention", "mlps", "norms", "embeddings"], ...] = ("all",)
    mlp_rank: int = 0  # above 0: MLPs are trained as low-rank changes
    mlp_lr_scale: float = 1.0
    bits: int = 0  # above 0: quantization-aware training of the mixers
    group_size: int = 64
    answer_weight: float = 0.0  # extra weight of the answers in needle rows
    is_sparse: bool = False  # sparse attention from dense_len on; false: dense at every length
    sparse: SparseConfig | None = None  # another geometry during this stage, to train block selection on short rows
    choice_weight: float = 0.0  # weight of the block-selection loss


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilStage(TrainStage):
    """Train on the teacher's distribution instead of the next token."""

    kind: Literal["distil"]  # type: ignore[assignment]
    teacher_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixStage(DistilStage):
    """Distil on one mixture: every step has `rows` rows of each source, of several lengths.

    Mixers are quantized as an overlay stores them: their difference from the teacher's matrices in `bits`, their gates
    in `gate_bits`. The result is the running mean of the weights. The stage lasts `steps` or `seconds`.
    """

    kind: Literal["mix"]  # type: ignore[assignment]
    seconds: int = 0  # instead of steps: the schedule follows the clock
    decay_share: float = 0.35  # last share of the stage, in which the rate falls from lr to final_lr
    gate_bits: int = 5
    mean_decay: float = 0.998
    probe: str = ""  # a file of prompts and teacher answers for `Probe`, measured every `probe_every` steps
    probe_every: int = 300
    cache_gb: int = 48  # device memory for the teacher's hidden states of repeated rows


Stage = SampleStage | SelectStage | AlignStage | TrainStage | DistilStage | MixStage
STAGES: dict[str, type[Any]] = {
    "sample": SampleStage,
    "align": AlignStage,
    "select": SelectStage,
    "distil": DistilStage,
    "train": TrainStage,
    "mix": MixStage,
}


@dataclass(frozen=True, slots=True)
class Report:
    """What to measure after the last stage, on the result and on the source model."""

    texts: tuple[str, ...] = ()  # files for perplexity
    tasks: tuple[str, ...] = ()  # files of multiple-choice questions
    haystack: str = ""  # documents for needles
    lengths: tuple[int, ...] = (1024, 4096)  # tokens, for needles and for speed
    trials: int = 20  # needles per length


@dataclass(frozen=True, slots=True)
class Recipe:
    stages: tuple[Stage, ...]
    seed: int = 0
    sparse: SparseConfig = field(default_factory=SparseConfig)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    is_compiled: bool = True
    report: Report | None = None


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; raise ConfigError that names a wrong or missing key."""
    try:
        values = tomllib.loads(read_small_file(path, _MAX_RECIPE_BYTES).decode())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "give a recipe in TOML; docs/guides/convert.md shows one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    values["stages"] = values.pop("stage", [])
    recipe: Recipe = _build(Recipe, values, str(path))
    _check(recipe, path)
    return recipe


def _check(recipe: Recipe, path: Path) -> None:
    if not recipe.stages:
        raise ConfigError(f"{path} has no [[stage]]", "add at least one")
    names = [stage.name for stage in recipe.stages]
    for stage in recipe.stages:
        where = f"{path}: stage {stage.name!r}"
        if not stage.name.replace("-", "").replace("_", "").isalnum() or names.count(stage.name) > 1:
            raise ConfigError(f"{where}: names consist of letters, digits, - and _, and must be unique", "rename it")
        if isinstance(stage, Learning):
            _check_learning(stage, where)


def _check_learning(stage: Learning, where: str) -> None:
    if not (stage.steps or stage.tokens or (isinstance(stage, MixStage) and stage.seconds)):
        raise ConfigError(f"{where} sets neither steps nor tokens", "add one of them")
    if not stage.data:
        raise ConfigError(f"{where} has no data", "add [[stage.data]] with a path, a dataset or kind = 'needle'")
    if stage.micro_rows is not None and stage.batch_rows % stage.micro_rows:
        raise ConfigError(f"{where}: batch_rows {stage.batch_rows} is not a multiple of micro_rows {stage.micro_rows}")
    window = stage.teacher_window if isinstance(stage, DistilStage) else None
    if window is not None and (not window or (window < stage.seq_len and stage.seq_len % window)):
        raise ConfigError(f"{where}: seq_len {stage.seq_len} is not a multiple of teacher_window {window}")
    if window and stage.packing == "documents":
        raise ConfigError(f"{where}: teacher_window needs packing = 'stream'", "leave one of them out")
    if any(source.truth > 1 for source in stage.data):
        raise ConfigError(f"{where}: truth is a share", "give a number from 0 to 1")
    if isinstance(stage, MixStage):
        _check_mix(stage, where)
        return
    if isinstance(stage, TrainStage) and stage.sparse is not None and not stage.is_sparse:
        raise ConfigError(f"{where}: sparse needs is_sparse", "set is_sparse = true")
    if isinstance(stage, TrainStage) and stage.choice_weight and (not stage.is_sparse or stage.packing != "stream"):
        raise ConfigError(f"{where}: choice_weight needs is_sparse = true and packing = 'stream'")
    if stage.schedule == "exponential" and not (stage.lr and stage.final_lr):
        raise ConfigError(f"{where}: an exponential schedule cannot start or end at 0", "raise lr and final_lr")


def _check_mix(stage: MixStage, where: str) -> None:
    if not all(source.rows for source in stage.data):
        raise ConfigError(f"{where}: every source needs rows", "set rows, for example 16")
    if not stage.mlp_rank or not {"all", "embeddings"}.isdisjoint(stage.learns):
        raise ConfigError(f"{where}: mix needs low-rank MLPs and frozen embeddings", "set mlp_rank and learns")


def _build(kind: Any, values: Any, where: str) -> Any:
    """Return a dataclass from a TOML table; raise ConfigError if a value does not match its annotation."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a table")
    known = {item.name: item for item in fields(kind)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(known)
            raise ConfigError(f"{where}: {name!r} is not a valid key", hint)
    hints = get_type_hints(kind)
    out = {}
    for name, item in known.items():
        if name in values:
            out[name] = _value(hints[name], values[name], f"{where}: {name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{where}: {name!r} is missing", "add it")
    return kind(**out)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint == Stage:
        return _stage(value, where)
    if is_dataclass(hint):
        return _build(hint, value, where)
    if origin in (Union, types.UnionType):
        return _value(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}", "use " + ", ".join(map(repr, args)))
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list")
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) != len(value):
            raise ConfigError(f"{where} must have {len(kinds)} entries")
        return tuple(_value(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(kinds, value, strict=True)))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}", f"it must be a {_PLAIN.get(hint, hint.__name__)}")
    if hint in (int, float) and value < 0:
        raise ConfigError(f"{where} is {value}", "it must not be negative")
    return value


def _stage(value: Any, where: str) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in STAGES:
        raise ConfigError(f"{where}: kind is {kind!r}", "use " + ", ".join(map(repr, STAGES)))
    return _build(STAGES[kind], value, f"{where} {value.get('name', '')!r}")


_PLAIN = {int: "whole number", float: "number", str: "string in quotes", bool: "true or false"}
