"""Run the stages of a recipe in order. Every stage writes a checkpoint; complete stages are skipped."""

import json
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sala.backends.torch.model import SalaModel, SparseMixer
from sala.backends.torch.ops.lightning import decay_slopes
from sala.checkpoint.overlay import OverlayPacking
from sala.checkpoint.writer import write_text
from sala.config import SalaConfig, SparseConfig
from sala.errors import InputError, SalaError
from sala.lab.eval.tasks.choice import read_tasks
from sala.lab.train import adapters
from sala.lab.train import probe as probing
from sala.lab.train.accelerated import Accelerated, RateGroups
from sala.lab.train.block_selection_loss import min_length
from sala.lab.train.fast_paths import FastPaths
from sala.lab.train.halo.sample import write_samples
from sala.lab.train.halo.select import Importance, measure_layers, needle_pairs, rate_layers, select_layers
from sala.lab.train.halo.source import ALWAYS_DENSE
from sala.lab.train.halo.transfer import hybrid_config, to_hybrid, to_sparse
from sala.lab.train.latent import LatentLearner, Latents
from sala.lab.train.loop import OutOfTime, Probe, Progress, train
from sala.lab.train.models import save_model
from sala.lab.train.objectives import Align, Distil, NextToken, Objective
from sala.lab.train.on_policy import StudentRows, first_questions
from sala.lab.train.overlays import TeacherBase, load_student, overlay_storage
from sala.lab.train.parts import parts_of
from sala.lab.train.plots import plot_log
from sala.lab.train.processes import any_process, barrier, gather_parameters, is_main_process
from sala.lab.train.recipe import (
    AlignStage,
    DistilStage,
    Learning,
    MixStage,
    RestoreStage,
    SampleStage,
    SelectStage,
    Stage,
    TrainStage,
)
from sala.lab.train.recipe_run import RecipeRun
from sala.lab.train.restore import bring_back, is_qk
from sala.lab.train.sources import needle_makers, step_parts, written_documents
from sala.text.tokenizer import Tokenizer

NOTE_EVERY = 5.0  # seconds between progress notes of a sample stage


def run_recipe(run: RecipeRun, start: Path) -> Path:
    """Run all stages from the checkpoint `start`, and return the checkpoint of the last stage.

    Raise OutOfTime at the deadline.
    """
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    model = start
    run = replace(run, start=start)
    for stage in run.recipe.stages:
        directory = run.directory(stage)
        is_sampling = isinstance(stage, SampleStage)
        if is_main_process():
            _claim(directory, stage)
        barrier()
        produced = directory / ("samples.npz" if is_sampling else "model")
        is_done = produced.exists()
        if any_process(run.deadline is not None and time.monotonic() > run.deadline, run.device):
            raise OutOfTime(f"out of time before stage {stage.name}", "run it again to resume")
        if not is_done:
            began = time.monotonic()
            if is_main_process() or isinstance(stage, Learning):
                _STAGES[type(stage)](run, stage, directory, model)
            barrier()
            run.note(stage.name, f"done in {time.monotonic() - began:,.0f} s")
            torch.compiler.reset()
        model = model if is_sampling else produced
    return model


def _claim(directory: Path, stage: Stage) -> None:
    """Record the stage in its directory; raise SalaError if it differs from the recorded one."""
    directory.mkdir(parents=True, exist_ok=True)
    file, text = directory / "stage.json", json.dumps(asdict(stage), indent=2) + "\n"
    if not file.exists():
        write_text(file, text)
    elif file.read_text("utf-8") != text:
        message = f"stage {stage.name} of the recipe has changed since {directory} was created"
        raise SalaError(message, "use another work directory, or remove this one yourself")


def _sample(run: RecipeRun, stage: SampleStage, directory: Path, start: Path) -> None:
    """Let the teacher write training documents."""
    model = run.load_teacher()
    assert run.teacher is not None
    limits = [time.monotonic() + stage.seconds] if stage.seconds else []
    deadline = min([*limits, *([] if run.deadline is None else [run.deadline])], default=None)
    last = time.monotonic()

    def note(rows: int, count: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last > NOTE_EVERY or rows == count:
            last = time.monotonic()
            run.note(stage.name, Progress(rows, count, {"rows": float(rows), "tokens": float(tokens)}))

    documents = write_samples(model, Tokenizer.load(run.teacher), stage, run.base, run.recipe.seed, note, deadline)
    run.note(stage.name, f"kept {len(documents):,} documents with {len(documents.tokens):,} tokens")
    documents.save(directory / "samples.npz")


def _align(run: RecipeRun, stage: AlignStage, directory: Path, start: Path) -> None:
    """Align new mixers with the teacher's: lightning mixers for all layers, or the sparse mixers of the hybrid."""
    teacher = run.load_teacher()
    generator = torch.Generator().manual_seed(run.recipe.seed)
    mixers: dict[int, Any]
    if stage.mixers == "lightning":
        config = hybrid_config(teacher.config, (), run.recipe.sparse)
        student = to_hybrid(teacher, config, run.recipe.seed)
        mixers = {i: layer.self_attn for i, layer in enumerate(student.model.layers)}
    else:
        student = run.load(start)
        config = student.config
        old: Any = [layer.self_attn for layer in teacher.model.layers]
        mixers = {i: to_sparse(old[i], config, generator) for i in config.sparse_layers}
    for index, mixer in mixers.items():
        student.model.layers[index].self_attn = mixer.to(run.device).requires_grad_(True)
    objective = Align(mixers, teacher)
    parts: list[Any] = [part for layer in teacher.model.layers for part in (layer.self_attn, layer.mlp)]
    _compile(run, [*mixers.values(), *parts], config)
    _dense(student)
    _learn(run, stage, directory, objective, {1.0: [name for name, _ in objective.named_parameters()]}, start)
    errors = {str(index): float(error) for index, error in objective.layer_errors.items()}
    if is_main_process():
        (directory / "errors.json").write_text(json.dumps(errors, indent=2) + "\n")
    _finish(student, directory, config, start)


def _select(run: RecipeRun, stage: SelectStage, directory: Path, start: Path) -> None:
    """Write the initial hybrid: attention in the selected layers, the aligned mixers elsewhere."""
    teacher, aligned = run.load_teacher(), run.load(start)
    kept = stage.layers
    if not kept:
        is_mixed = run.device.type == "cuda" and run.recipe.dtype == "bfloat16"
        with torch.autocast(run.device.type, torch.bfloat16, enabled=is_mixed):
            scores = _measure_layers(run, stage, teacher, [layer.self_attn for layer in aligned.model.layers])
        kept = select_layers(scores, stage)
        table = {str(index): score._asdict() for index, score in enumerate(scores)}
        (directory / "layers.json").write_text(json.dumps({"kept": kept, "layers": table}, indent=2) + "\n")
    run.note(stage.name, f"layers {', '.join(map(str, kept))} keep attention")
    config = hybrid_config(teacher.config, kept, run.recipe.sparse)
    student = to_hybrid(teacher, config, run.recipe.seed)
    for index in config.lightning_layers:
        student.model.layers[index].self_attn = aligned.model.layers[index].self_attn
    save_model(student, directory / "model", config, start)


def _measure_layers(run: RecipeRun, stage: SelectStage, teacher: SalaModel, mixers: list[Any]) -> list[Importance]:
    """Return the importance of every layer, by needles and multiple-choice questions."""
    assert run.teacher is not None
    tokenizer = Tokenizer.load(run.teacher)
    tasks = [read_tasks(run.base / task)[: stage.max_questions] for task in stage.tasks]
    needles = needle_pairs(needle_makers(run, tokenizer, stage.haystack)[0], stage.recall_len, stage.recall_rows)
    encode = partial(tokenizer.encode, bos=False)
    measures = []
    for recall, sense in measure_layers(teacher, mixers, needles, tasks, encode):
        measures.append((recall, sense))
        run.note(stage.name, Progress(len(measures), len(mixers), {"recall": recall, "sense": sense}))
    return rate_layers(measures, stage.epsilon)


def _train(run: RecipeRun, stage: TrainStage, directory: Path, start: Path) -> None:
    student = run.load(start)
    config = student.config
    needs_teacher = isinstance(stage, DistilStage) or stage.mlp_rank
    teacher = run.load_teacher() if needs_teacher else None
    if stage.mlp_rank:
        assert teacher is not None
        adapters.add_low_rank(student, teacher, stage.mlp_rank, run.recipe.seed)
    groups = _parameter_groups(student, stage)
    if stage.bits:
        adapters.add_rounding(student, stage.bits, stage.group_size)
    student.is_checkpointing = stage.checkpointing
    if not stage.is_sparse:
        _dense(student)
    elif stage.sparse is not None:
        _set_geometry(student, stage.sparse)
    teacher_layers = teacher.model.layers if teacher is not None and isinstance(stage, DistilStage) else ()
    # sparse attention is compiled separately: inside a compiled layer its gradients became NaN
    student_layers: list[Any] = [
        layer.mlp if stage.is_sparse and isinstance(layer.self_attn, SparseMixer) else layer
        for layer in student.model.layers
    ]
    _compile(run, [*student_layers, *teacher_layers], config)
    has_selection_loss = stage.block_selection_weight > 0
    if has_selection_loss and stage.seq_len < (least := min_length(stage.sparse or config.sparse_config)):
        raise InputError("seq_len", f"is {stage.seq_len}, too short for block selection", f"give at least {least}")
    objective: Objective = NextToken(student, has_selection_loss)
    if isinstance(stage, DistilStage):
        assert teacher is not None
        objective = Distil(student, teacher, stage.teacher_window, has_selection_loss)
    _learn(run, stage, directory, objective, groups, start)
    if stage.bits:
        adapters.remove_rounding(student)
    adapters.merge_low_rank(student)
    _finish(student, directory, config, start)


def _restore(run: RecipeRun, stage: RestoreStage, directory: Path, start: Path) -> None:
    """Write the model with its queries and keys brought back towards those of an earlier checkpoint."""
    stages = {one.name: one for one in run.recipe.stages}
    source = run.directory(stages[stage.source]) / "model" if stage.source else run.start
    assert source is not None
    model, before = run.load(start), dict(run.load(source).named_parameters())
    now = dict(model.named_parameters())
    others = [name for name in now if is_qk(name) and getattr(before.get(name), "shape", None) != now[name].shape]
    if model.config.mixers != SalaConfig.load(source).mixers or others:
        raise InputError("source", f"of stage {stage.name} is {source}, a model of other layers", "name a later stage")
    bring_back(now, before.__getitem__, model.config, stage.how, stage.layers)
    save_model(model, directory / "model", model.config, start)


def _mix(run: RecipeRun, stage: MixStage, directory: Path, start: Path) -> None:
    """Train on one mixture, on one device, and save the running mean, not yet quantized."""
    teacher = run.load_teacher()
    base = TeacherBase.of(teacher)
    student = load_student(start, teacher, base, stage.mlp_rank, run.recipe.seed)
    config = replace(student.config, quantization=None)
    _parameter_groups(student, stage)
    if stage.sparse is not None:
        _set_geometry(student, stage.sparse)
    packing = OverlayPacking(stage.bits, stage.gate_bits, stage.group_size, stage.mlp_rank)
    latents = Latents(student, overlay_storage(student, base, packing) if stage.bits else {}, stage.betas)
    objective = Distil(
        student,
        teacher,
        stage.teacher_window,
        stage.block_selection_weight > 0,
        is_mixed=True,
        tile_rows=2048 if run.device.type == "cuda" else 128,
    )
    if _is_compiled(run):
        objective.use(FastPaths.on(run.device, run.kernels))
        _compile(run, [*student.model.layers, *teacher.model.layers], config)
    note = partial(run.note, stage.name)
    learner = LatentLearner(objective, latents, stage, note, _student_rows(run, stage, student))
    parts, probe = step_parts(run, stage, start), _student_probe(run, stage, teacher, learner)
    target, stopped = directory / "model", None
    try:
        train(learner, stage, parts, directory, note, run.deadline, probe)
    except OutOfTime as error:
        target, stopped = directory / "so-far", error
    latents.use_mean(is_rounded=False)
    adapters.merge_low_rank(student)
    shutil.rmtree(directory / "so-far", ignore_errors=True)
    save_model(student, target, config, start)
    if stopped is not None:
        raise stopped


def _student_rows(run: RecipeRun, stage: MixStage, student: SalaModel) -> StudentRows | None:
    options = stage.on_policy
    if options is None:
        return None
    prompts = first_questions(written_documents(run, options.path), options.seq_len // 2)
    if not prompts:
        raise InputError("on_policy", f"{options.path} has no dialogue with a short question", "raise seq_len")
    return StudentRows(student, prompts, options, run.recipe.seed)


def _student_probe(run: RecipeRun, stage: MixStage, teacher: SalaModel, learner: LatentLearner) -> Probe | None:
    """Return what measures the student and, called with True, also its greedy answers."""
    if not stage.probe:
        return None
    with torch.compiler.set_stance("force_eager"):
        probe = probing.Probe(probing.read_cases(run.base / stage.probe), teacher)
    student = learner.objective.student
    end = student.config.eos_token_id[0]

    def measure(is_last: bool) -> dict[str, float]:
        return probe(student) | ({"ended": probe.ended(student, end)} if is_last else {})

    return partial(learner.measure, measure)


def _parameter_groups(student: SalaModel, stage: TrainStage) -> RateGroups:
    """Make the stage's parameters trainable, and return their names by the factor of their learning rate.

    The names are those of an objective whose attribute `student` is the model.
    """
    student.requires_grad_(False)
    groups: dict[float, list[str]] = {}
    for name, parameter in student.named_parameters():
        parts = parts_of(name, student.config)
        if parts.isdisjoint(stage.learns) or name.endswith("base.weight"):
            continue
        parameter.requires_grad_(True)
        scale = stage.mlp_lr_scale if "mlps" in parts else 1.0
        groups.setdefault(scale, []).append(f"student.{name}")
    return groups


def _learn(
    run: RecipeRun, stage: Learning, directory: Path, objective: Objective, groups: RateGroups, start: Path
) -> None:
    parts = step_parts(run, stage, start)
    learner = Accelerated(objective, stage, groups, run.recipe.dtype)
    log = train(learner, stage, parts, directory, partial(run.note, stage.name), run.deadline)
    if is_main_process():
        plot_log(log, directory / "loss.png", stage.name)


def _finish(student: SalaModel, directory: Path, config: SalaConfig, start: Path) -> None:
    """Gather the weights of all processes, and save them in the main process."""
    gather_parameters(student)
    if is_main_process():
        save_model(student, directory / "model", config, start)
    barrier()


def _dense(model: SalaModel) -> None:
    """Make attention dense at every length, for stages without sparse attention."""
    _set_geometry(model, replace(model.config.sparse_config, dense_len=ALWAYS_DENSE))


def _set_geometry(model: SalaModel, sparse: SparseConfig) -> None:
    for layer in model.model.layers:
        if isinstance(layer.self_attn, SparseMixer):
            layer.self_attn.sparse = sparse


def _is_compiled(run: RecipeRun) -> bool:
    return run.recipe.is_compiled and run.device.type == "cuda"


def _compile(run: RecipeRun, modules: Iterable[nn.Module], config: SalaConfig) -> None:
    if _is_compiled(run):
        decay_slopes(config.lightning_nh, run.device)  # cached before compilation, they are constants
        for module in modules:
            module.compile(dynamic=False)


_STAGES: dict[type[Any], Callable[[RecipeRun, Any, Path, Path], None]] = {
    SampleStage: _sample,
    AlignStage: _align,
    SelectStage: _select,
    TrainStage: _train,
    DistilStage: _train,
    MixStage: _mix,
    RestoreStage: _restore,
}
