"""Recipes: lists of stages in TOML, run in order. Unknown keys are errors."""

import json
import math
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from sala.config import SparseConfig, read_small_file
from sala.errors import ConfigError
from sala.lab.train.parts import Part
from sala.options.schema import suggest

_MAX_RECIPE_BYTES = 1 << 20
Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(ge=0)]


class _Table:
    """A table of a recipe: every key must be known and have the annotated type."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Source(_Table):
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
    weight: Number = 1.0
    max_documents: Count | None = None
    num_keys: Count = 4  # needle: largest number of similar facts, some of which are asked for
    num_topics: Count = 1  # needle: largest number of such groups of facts in a row
    truth: Number = 0.0  # text, samples: share of the text's own tokens in the target of a distil stage
    table: str = ""  # reading, and a third of a needle source's rows: passages with questions and answers
    lists: str = ""  # with table: the prompt table whose lists fill the passages' slots
    rows: Count = 0  # rows in every step
    every: Annotated[int, Field(ge=1)] = 1  # with rows: in every n-th step only
    seq_len: Count = 0  # their length; 0: the stage's
    shortest: Count = 0  # dialogues: only those with more tokens than this
    is_sparse: bool = False  # sparse attention in these rows from dense_len on
    answer_share: Number = 1.2  # needle, with rows: weight of a row's answers relative to its tokens
    has_system: bool = False  # needle, with rows: half of the rows start with the chat template's system turn


@dataclass(frozen=True, slots=True)
class Prompts(_Table):
    """Prompts for the teacher: templates in which {topic} is replaced by a topic from a list.

    With an empty chat template the teacher also writes the user's turn.
    """

    weight: Number = 1.0
    templates: tuple[str, ...] = ("",)
    path: str = ""  # instead of templates: JSONL with the `turns` of the user, every line used before any repeats
    is_chat: bool = True
    temperature: Number = 0.7
    temperatures: tuple[Number, ...] = ()  # instead of temperature: a random one of these for each row; 0 is greedy
    must_end: bool = False  # leave out documents without an end token
    second_turns: Number = 0.0  # share of the dialogues in which the teacher writes another question and answer


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicy(_Table):
    """Answers that the student writes during a `mix` stage, to the questions of a `sample` stage."""

    path: str  # name of the `sample` stage
    rows: Count = 48  # in every step
    seq_len: Count = 256
    every: Annotated[int, Field(ge=1)] = 60  # steps between two rounds of writing; a round is written at once
    after: Number = 0.0  # share of the run before the first round
    weight: Number = 2.0  # of a token, relative to the other rows' tokens
    temperatures: tuple[Number, ...] = (0.0, 1.0)  # used in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStage(_Table):
    """Sample text from the teacher: rows of `seq_len` tokens that start with prompts."""

    name: str
    kind: Literal["sample"]
    prompts: tuple[Prompts, ...] = (Prompts(),)
    topics: str = ""  # a file with a topic per line, for {topic} in templates
    num_rows: Count = 1024
    seq_len: Count = 512
    batch_rows: Count = 1024  # rows sampled at a time
    seconds: Count = 0  # above 0: stop after this time and keep the finished documents
    is_filtered: bool = False  # keep dialogues that end and do not loop, cut free text at a loop
    held_out: tuple[str, ...] = ()  # JSONL files whose questions must not occur in the kept documents


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectStage(_Table):
    """Measure the loss of recall and common sense when a layer loses attention, and select the layers that keep it."""

    name: str
    kind: Literal["select"]
    num_layers: Count | None = None  # None: a quarter
    layers: tuple[Count, ...] = ()  # keep attention in these layers, without measuring
    keep_ends: bool = True  # the first and the last layer always keep attention
    haystack: str = ""  # documents for the recall measure
    recall_len: Count = 1024
    recall_rows: Count = 64
    tasks: tuple[str, ...] = ()  # files of multiple-choice questions for the common-sense measure
    max_questions: Count = 300
    epsilon: Number = 0.01


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning-rate schedule: a linear warm-up, then the shape `kind`.

    `wsd` (warmup-stable-decay) falls linearly over the last `decay_steps`; with `decay_share` it falls over that last
    share of the run instead, which may be bounded by time.
    """

    kind: str
    peak: float
    final: float
    num_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    decay_share: float = 0.0

    def at(self, step: int, done: float = 0.0) -> float:
        """Return the rate of step 0, 1, …, after the share `done` of the run.

        The warm-up starts above zero and ends at the peak.
        """
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        part = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - 1 - self.warmup_steps))
        if self.kind == "cosine":
            return self.final + (self.peak - self.final) * 0.5 * (1 + math.cos(math.pi * part))
        if self.kind == "exponential":
            return self.peak * (self.final / self.peak) ** part
        fall = 0.0
        if self.kind == "wsd" and self.decay_share:
            fall = (done - (1 - self.decay_share)) / self.decay_share
        elif self.kind == "wsd" and self.decay_steps:
            fall = (step - (self.num_steps - self.decay_steps) + 1) / self.decay_steps
        return self.peak + (self.final - self.peak) * min(max(fall, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning(_Table):
    """The keys of every stage that trains."""

    name: str
    data: tuple[Source, ...]
    seq_len: Count = 512
    batch_rows: Count = 32
    micro_rows: Count | None = None  # rows per forward pass on one device; None: all
    steps: Count = 0
    tokens: Count = 0  # instead of steps
    packing: Literal["stream", "documents"] = "stream"  # documents: no attention across documents
    schedule: Literal["constant", "cosine", "wsd", "exponential"] = "cosine"
    lr: Number = 1e-3
    final_lr: Number = 1e-5
    warmup_steps: Count = 50
    decay_steps: Count = 0
    weight_decay: Number = 0.0
    betas: tuple[Number, Number] = (0.9, 0.95)
    clip: Number = 1.0
    checkpointing: bool = False
    save_every: Count = 500

    @property
    def num_steps(self) -> int:
        return self.steps or max(1, self.tokens // (self.batch_rows * self.seq_len))

    @property
    def learning_rate(self) -> Schedule:
        return Schedule(self.schedule, self.lr, self.final_lr, self.num_steps, self.warmup_steps, self.decay_steps)

    @property
    def term_weights(self) -> tuple[float, ...]:
        """The weights of the terms of the loss."""
        return (1.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignStage(Learning):
    """Train new mixers to match the teacher's, layer by layer: all as lightning, or the kept ones without RoPE."""

    kind: Literal["align"]
    mixers: Literal["lightning", "sparse"] = "lightning"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStage(Learning):
    """Train all or some weights on the next token."""

    kind: Literal["train"]
    # attention, lightning: the mixers of these layers alone
    learns: tuple[Part, ...] = ("all",)
    mlp_rank: Count = 0  # above 0: MLPs are trained as low-rank changes
    mlp_lr_scale: Number = 1.0
    bits: Count = 0  # above 0: quantization-aware training of the mixers
    group_size: Count = 64
    answer_weight: Number = 0.0  # extra weight of the answers in needle rows
    is_sparse: bool = False  # sparse attention from dense_len on; false: dense at every length
    sparse: SparseConfig | None = None  # another geometry during this stage, to train block selection on short rows
    block_selection_weight: Number = 0.0  # weight of the block-selection loss

    @property
    def term_weights(self) -> tuple[float, ...]:
        return 1.0, self.answer_weight, self.block_selection_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilStage(TrainStage):
    """Train on the teacher's distribution instead of the next token."""

    kind: Literal["distil"]  # type: ignore[assignment]
    teacher_window: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixStage(DistilStage):
    """Distil on one mixture: every step has `rows` rows of each source, of several lengths.

    Mixers are quantized as an overlay stores them: their difference from the teacher's matrices in `bits`, their gates
    in `gate_bits`. The result is the running mean of the weights. The stage lasts `steps` or `seconds`.
    """

    kind: Literal["mix"]  # type: ignore[assignment]
    seconds: Count = 0  # instead of steps: the schedule follows the clock
    decay_share: Number = 0.35  # last share of the stage, in which the rate falls from lr to final_lr
    gate_bits: Count = 5
    mean_decay: Number = 0.998
    probe: str = ""  # a file of prompts and teacher answers for `Probe`, measured every `probe_every` steps
    probe_every: Count = 300
    on_policy: OnPolicy | None = None

    @property
    def learning_rate(self) -> Schedule:
        return Schedule("wsd", self.lr, self.final_lr, 0, self.warmup_steps, decay_share=self.decay_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStage(_Table):
    """Bring queries and keys back towards those of an earlier stage, after training that cost recall.

    plain: the projections and their norms from there; orthogonal: the trained projections, each head turned closest.
    """

    name: str
    kind: Literal["restore"]
    source: str = ""  # an earlier stage that trains or selects; empty: the checkpoint that the recipe starts from
    how: Literal["plain", "orthogonal"] = "orthogonal"
    layers: Literal["all", "attention"] = "attention"


Stage = SampleStage | AlignStage | SelectStage | DistilStage | TrainStage | MixStage | RestoreStage


@dataclass(frozen=True, slots=True)
class Report(_Table):
    """What to measure after the last stage, on the result and on the source model."""

    texts: tuple[str, ...] = ()  # files for perplexity
    tasks: tuple[str, ...] = ()  # files of multiple-choice questions
    haystack: str = ""  # documents for needles
    lengths: tuple[Count, ...] = (1024, 4096)  # tokens, for needles and for speed
    trials: Count = 20  # needles per length


@dataclass(frozen=True, slots=True)
class Recipe(_Table):
    stages: tuple[Annotated[Stage, Field(discriminator="kind")], ...]
    seed: Count = 0
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
    try:
        recipe = TypeAdapter(Recipe).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise _explain(error, values, path) from None
    _check(recipe, path)
    return recipe


def _explain(error: ValidationError, values: dict[str, Any], path: Path) -> ConfigError:
    """Return the first problem that pydantic found, unknown keys before others, with a remedy."""
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "unexpected_keyword_argument")[0]
    *outer, name = found["loc"]
    kind, value, ctx = found["type"], found["input"], found.get("ctx", {})
    table = next((part for part in reversed(outer) if isinstance(part, str)), "")
    steps = [f"[{part}]" if isinstance(part, int) else f": {part}" for part in found["loc"]]
    if len(outer) > 2 and outer[0] == "stages":  # after the index comes the stage's kind: show its name instead
        steps[2] = f" {values['stages'][outer[1]].get('name', '')!r}"
    where, place = (f"{path}{''.join(part)}" for part in (steps[:-1], steps))
    if kind == "unexpected_keyword_argument":
        known = [item.name for item in fields(_TABLES[table])]
        hint = suggest(str(name), known, "known: " + ", ".join(known))
        return ConfigError(f"{where}: {name!r} is not a valid key", hint)
    if kind == "missing" and isinstance(name, str):
        return ConfigError(f"{where}: {name!r} is missing", "add it")
    if kind in ("missing", "too_long"):
        return ConfigError(f"{where if kind == 'missing' else place} must have 2 entries")
    if kind.startswith("union_tag"):
        return ConfigError(f"{place}: kind is {value.get('kind')!r}", "use " + ", ".join(map(repr, _KINDS)))
    if kind in ("tuple_type", "dataclass_type", "dict_type"):
        return ConfigError(f"{place} must be a {'list' if kind == 'tuple_type' else 'table'}")
    if kind == "literal_error":
        return ConfigError(f"{place} is {value!r}", f"use {ctx['expected']}".replace(" or ", ", "))
    return ConfigError(f"{place} is {value!r}", found["msg"] if ctx.get("ge") else _RULES.get(kind, found["msg"]))


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
        if isinstance(stage, RestoreStage) and stage.source:
            before = recipe.stages[: recipe.stages.index(stage)]
            known = [one.name for one in before if not isinstance(one, SampleStage)]
            if stage.source not in known:
                raise ConfigError(f"{where}: source is {stage.source!r}", "name an earlier stage that writes a model")


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
        if not all(source.rows for source in stage.data):
            raise ConfigError(f"{where}: every source needs rows", "set rows, for example 16")
        if not stage.mlp_rank or not {"all", "embeddings"}.isdisjoint(stage.learns):
            raise ConfigError(f"{where}: mix needs low-rank MLPs and frozen embeddings", "set mlp_rank and learns")
        return
    if isinstance(stage, TrainStage) and stage.sparse is not None and not stage.is_sparse:
        raise ConfigError(f"{where}: sparse needs is_sparse", "set is_sparse = true")
    if (
        isinstance(stage, TrainStage)
        and stage.block_selection_weight
        and (not stage.is_sparse or stage.packing != "stream")
    ):
        raise ConfigError(f"{where}: block_selection_weight needs is_sparse = true and packing = 'stream'")
    if stage.schedule == "exponential" and not (stage.lr and stage.final_lr):
        raise ConfigError(f"{where}: an exponential schedule cannot start or end at 0", "raise lr and final_lr")


_KINDS = {get_args(get_type_hints(stage)["kind"])[0]: stage for stage in get_args(Stage)}
_TABLES: dict[str, Any] = {
    "": Recipe,
    "sparse": SparseConfig,
    "report": Report,
    "data": Source,
    "prompts": Prompts,
    "on_policy": OnPolicy,
} | _KINDS
_RULES = {
    "int_type": "it must be a whole number",
    "float_type": "it must be a number",
    "string_type": "it must be a string in quotes",
    "bool_type": "it must be true or false",
    "greater_than_equal": "it must not be negative",
}
