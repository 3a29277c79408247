"""A run of a recipe in commands of limited length, on a machine that keeps its files between them.

    python models/smol-sala/run/run.py gather CARRIED WORK      # unpack what was carried there
    python models/smol-sala/run/run.py profile WORK OUT         # speed of the loop with and without CUDA graphs
    python models/smol-sala/run/run.py run WORK OUT --minutes 9 # write data, then train; again to go on
    python models/smol-sala/run/run.py finish WORK OUT          # pack what was learnt, measure it

`pieces BASE CORPUS PROMPTS TARGET` makes the pieces. With --smoke everything runs on a CPU at a tiny scale. What a
command leaves in OUT is small enough to be carried back.
"""

import argparse
import json
import lzma
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sala.backends.torch.model import SalaModel
from sala.checkpoint.overlay import OverlayPacking, assemble, overlay_files
from sala.checkpoint.writer import copy_companions
from sala.config import SalaConfig, SparseConfig
from sala.lab.train.data import TrainingRow
from sala.lab.train.fast_paths import FastPaths
from sala.lab.train.halo.source import dense_config, import_dense
from sala.lab.train.halo.transfer import to_hybrid
from sala.lab.train.latent import LatentLearner, Latents
from sala.lab.train.loop import OutOfTime, Progress
from sala.lab.train.models import load_for_training
from sala.lab.train.objectives import Distil
from sala.lab.train.overlays import TeacherBase, overlay_storage
from sala.lab.train.pipeline import run_recipe
from sala.lab.train.recipe import MixStage, Recipe, SampleStage, load_recipe
from sala.lab.train.recipe_run import RecipeRun
from sala.lab.train.steps import TrainingBatch, collate

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent
sys.path.insert(0, str(MODEL))
from pack import pack_overlay, write_overlay  # noqa: E402

SMOL = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "vocab_size": 49152, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip
CORPUS_SHARE = 0.36  # of its documents that travel
SHAPES = [(64, 256), (24, 512), (30, 1024), (1, 8192), (1, 32768)]  # of recipe-6
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f}s] {text}", flush=True)


def make_pieces(base: Path, corpus: Path, prompts: Path, target: Path) -> None:
    """Write folders 1, 2, 3 that travel one at a time: the teacher's GGUF file (BASE, by xz) in halves, the text."""
    for name in ("1", "2", "3"):
        shutil.rmtree(target / name, ignore_errors=True)
        (target / name).mkdir(parents=True)
    packed = base.read_bytes()
    half = -(-len(packed) // 2)
    for number in range(2):
        part = packed[number * half : (number + 1) * half]
        (target / str(number + 1) / f"base.gguf.xz.part{number + 1}").write_bytes(part)
    for file in (prompts, corpus / "topics.txt"):
        (target / "2" / f"{file.name}.xz").write_bytes(lzma.compress(file.read_bytes()))
    for name in ("heldout.jsonl.xz", "unseen.jsonl.xz"):
        shutil.copy(corpus / name, target / "3" / name)
    with lzma.open(corpus / "train.jsonl.xz") as handle:
        lines = handle.readlines()
    order = np.random.default_rng(6).permutation(len(lines))[: int(len(lines) * CORPUS_SHARE)]
    (target / "3" / "train.jsonl.xz").write_bytes(lzma.compress(b"".join(lines[at] for at in order), preset=6))
    for folder in sorted(target.iterdir()):
        print(folder, sum(file.stat().st_size for file in folder.iterdir()) / 2**20, "MiB")


def gather(carried: Path, work: Path) -> None:
    """Copy what has come into WORK/in, and put everything into its place."""
    place = work / "in"
    for name in ("in", "start", "build/corpus"):
        (work / name).mkdir(parents=True, exist_ok=True)
    for file in carried.rglob("*"):
        if file.is_file():
            shutil.copy(file, place / file.name)
    parts = sorted(place.glob("base.gguf.xz.part*"))
    if len(parts) == 2:
        (place / "base.gguf.xz").write_bytes(b"".join(part.read_bytes() for part in parts))
    for name, target in (("prompts.jsonl", work / "build"), ("topics.txt", work / "build/corpus")):
        if (place / f"{name}.xz").is_file():
            (target / name).write_bytes(lzma.decompress((place / f"{name}.xz").read_bytes()))
    for file in place.glob("*.jsonl.xz"):
        shutil.copy(file, work / "build/corpus")
    if (place / "base.gguf.xz").is_file() and not (work / "teacher").is_dir():
        (place / "base.gguf").write_bytes(lzma.decompress((place / "base.gguf.xz").read_bytes()))
        import_dense(place / "base.gguf", work / "teacher")
    copy_companions(work / "teacher", work / "start")
    for file in [*overlay_files(MODEL), MODEL / "config.json"]:
        shutil.copy(file, work / "start" / file.name)
    found = (f"{file.relative_to(work)} {file.stat().st_size:,}" for file in work.rglob("*") if file.is_file())
    say("gathered: " + ", ".join(sorted(found)))


def device_of(options: argparse.Namespace) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not options.smoke else "cpu")


def recipe_of(work: Path, is_smoke: bool, recipe_name: str) -> tuple[Recipe, Path]:
    """The recipe, its paths under WORK; tiny for a smoke test."""
    base = work / "models" / "smol-sala"  # paths of the recipe are relative to its directory
    base.mkdir(parents=True, exist_ok=True)
    for file in [*MODEL.glob("*.jsonl"), *MODEL.glob("probe.json"), *MODEL.glob("*.toml")]:
        shutil.copy(file, base / file.name)
    recipe = load_recipe(MODEL / recipe_name)
    if is_smoke or not (base / "probe.json").is_file():
        stages = [replace(s, probe="") if isinstance(s, MixStage) else s for s in recipe.stages]
        recipe = replace(recipe, stages=tuple(stages))
    if not is_smoke:
        return recipe, base
    stages: list[Any] = []
    for stage in recipe.stages:
        if isinstance(stage, SampleStage):
            prompts = tuple(replace(one, must_end=False) for one in stage.prompts)
            small = {"num_rows": 8, "batch_rows": 8, "seq_len": 96, "seconds": 240, "is_filtered": False}
            stages.append(replace(stage, prompts=prompts, **small))  # type: ignore[arg-type]
        elif isinstance(stage, MixStage):
            data = tuple(
                replace(source, rows=1, seq_len=min(source.seq_len, 512 if source.is_sparse else 256), shortest=0,
                        max_documents=200)
                for source in stage.data
            )  # fmt: skip
            sparse = SparseConfig(window_size=64, topk=1, dense_len=512)
            own = stage.on_policy and replace(stage.on_policy, rows=2, seq_len=128, every=2, after=0.0)
            stages.append(
                replace(stage, data=data, seconds=0, steps=2, warmup_steps=1, sparse=sparse, teacher_window=256,
                        cache_gb=1, probe_every=2, on_policy=own)
            )  # fmt: skip
    return replace(recipe, stages=tuple(stages)), base


def run(options: argparse.Namespace) -> None:
    """Go on with the recipe until it is done or the minutes are over."""
    work, out = options.work, options.out
    recipe, base = recipe_of(work, options.smoke, options.recipe)
    if options.only_write:
        recipe = replace(recipe, stages=recipe.stages[:1])
    if options.seconds:  # another length of the last stage, also of one that has begun
        recipe = replace(recipe, stages=(*recipe.stages[:-1], replace(recipe.stages[-1], seconds=options.seconds)))
        for claim in (work / "stages").glob("*-talk/stage.json"):
            claim.unlink()
    deadline = BEGAN + 60 * options.minutes
    last = 0.0

    def note(stage: str, news: Any) -> None:
        nonlocal last
        if isinstance(news, Progress):
            if time.monotonic() - last < 5 and news.step < news.num_steps:
                return
            last = time.monotonic()
            values = " ".join(f"{name}={value:.4g}" for name, value in news.values.items())
            news = f"{news.step}/{news.num_steps} {values}"
        say(f"{stage} {news}")

    torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
    place = RecipeRun(recipe, base, work / "stages", work / "teacher", device_of(options), note, deadline)
    try:
        final = run_recipe(place, work / "start")
        say(f"DONE {final}")
    except OutOfTime as stop:
        say(f"STOP {stop}")
        if not options.only_write:
            safely(lambda: pack(work, out, recipe))
    finally:
        out.mkdir(parents=True, exist_ok=True)
        for file in (work / "stages").rglob("metrics.jsonl"):
            shutil.copy(file, out / "metrics.jsonl")
        if options.only_write:
            safely(lambda: keep_samples(work, out))


def keep_samples(work: Path, out: Path) -> None:
    """Compress what the teacher wrote into OUT, for later runs."""
    with np.load(next((work / "stages").rglob("samples.npz"))) as arrays:
        flat = {name: arrays[name] for name in arrays.files}
    flat["tokens"] = flat["tokens"].astype(np.uint16)
    np.savez(work / "samples-16.npz", **flat)
    packed = lzma.compress((work / "samples-16.npz").read_bytes(), preset=1)
    half = -(-len(packed) // 2)
    for number in range(2):
        (out / f"samples.npz.xz.part{number + 1}").write_bytes(packed[number * half : (number + 1) * half])
    say(f"samples: {len(packed) / 2**20:.1f} MiB")


def pack(work: Path, out: Path, recipe: Recipe) -> None:
    """Pack the newest model of the last stage into OUT."""
    stage = next(stage for stage in recipe.stages if isinstance(stage, MixStage))
    directory = work / "stages" / f"{len(recipe.stages):02}-{stage.name}"
    source = next((directory / name for name in ("model", "so-far") if (directory / name).is_dir()), None)
    if source is None:
        say("nothing to pack")
        return
    cpu = torch.device("cpu")
    model, teacher = load_for_training(source, cpu), load_for_training(work / "teacher", cpu)
    packing = OverlayPacking(stage.bits, stage.gate_bits, stage.group_size, stage.mlp_rank)
    tensors = {name: value.detach().numpy() for name, value in model.named_parameters()}
    modules, norms, quantization = pack_overlay(model.config, tensors, TeacherBase.of(teacher), packing)
    out.mkdir(parents=True, exist_ok=True)
    for old in overlay_files(out):
        old.unlink()
    write_overlay(out, modules, norms)
    config = replace(model.config, dtype="float32", quantization=quantization).to_dict()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = sum(file.stat().st_size for file in out.glob("overlay-*"))
    say(f"packed {source.name}: {size / 1e6:.1f} MB")


def finish(options: argparse.Namespace) -> None:
    """Pack, put the checkpoint together as it will be served, and let it answer."""
    work, out = options.work, options.out
    recipe, _ = recipe_of(work, options.smoke, options.recipe)
    pack(work, out, recipe)
    for file in (work / "stages").rglob("metrics.jsonl"):
        shutil.copy(file, out / "metrics.jsonl")
    safely(lambda: served(work, out))
    safely(lambda: answers(work, out, options))


def served(work: Path, out: Path) -> None:
    target = work / "served"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    teacher = load_for_training(work / "teacher", torch.device("cpu"))
    assemble(target, SalaConfig.load(out), TeacherBase.of(teacher), out)
    copy_companions(work / "teacher", target)
    say(f"assembled {target}")


def answers(work: Path, out: Path, options: argparse.Namespace) -> None:
    """Greedy answers to the probe's questions."""
    from sala.lab.train.score import generate_greedy
    from sala.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(work / "served")
    model = load_for_training(work / "served", device_of(options))
    asked = ["What is the chemical symbol of gold?", "Hello!", "Name five fruits.", "Give me tips for sleeping well."]
    limit = 8 if options.smoke else 200
    told = []
    for question in asked:
        ids = tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)
        found = generate_greedy(model, [ids], limit, [2])[0]
        told.append({"question": question, "answer": tokenizer.decode(found)})
    (out / "answers.json").write_text(json.dumps(told, indent=1))
    say("answers: " + json.dumps(told)[:3000])


def profile(options: argparse.Namespace) -> None:
    """Milliseconds of forward and backward per shape, by CUDA graphs and without, on random weights."""
    device, out = device_of(options), options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.suppress_errors = True
    teacher, student, latents = random_pair(device)
    table: dict[str, Any] = {}
    shapes = [(1, 64), (2, 32)] if options.smoke else SHAPES
    tile_rows, fast = 64 if options.smoke else 2048, FastPaths.on(device)
    objective = Distil(student, teacher, 2048, has_selection_loss=True, is_mixed=True, tile_rows=tile_rows)
    objective.use(fast)
    if fast.is_compiled:
        for layer in (*student.model.layers, *teacher.model.layers):
            layer.compile(dynamic=False)
    stage = next(stage for stage in load_recipe(MODEL / "recipe-5.toml").stages if isinstance(stage, MixStage))
    learner = LatentLearner(objective, latents, stage, say)
    for rows, length in shapes:
        for name in ("graph", "eager"):
            if time.monotonic() - BEGAN > 60 * options.minutes:
                say("out of time")
                break
            objective.fast = replace(fast, has_graphs=name == "graph" and device.type == "cuda")
            table[f"{name} {rows}x{length}"] = safely(lambda s=(rows, length): timed(learner, *s, device))
            say(json.dumps(table))
    (out / "profile.json").write_text(json.dumps(table, indent=1))


def random_pair(device: torch.device) -> tuple[SalaModel, SalaModel, Latents]:
    """A teacher and a student of smol-sala's shapes with random weights."""
    overlay = SalaConfig.load(MODEL)
    config = dense_config(SMOL)
    with torch.device("meta"):
        teacher = SalaModel(config)
    generator = torch.Generator(device).manual_seed(0)
    teacher = teacher.to_empty(device=device)
    for value in teacher.parameters():
        value.data.normal_(0, 0.03, generator=generator).requires_grad_(False)
        if value.ndim == 1:
            value.data.fill_(1.0)
    teacher.requires_grad_(False)
    teacher.lm_head.weight = teacher.model.embed_tokens.weight
    student = to_hybrid(teacher, replace(overlay, quantization=None), 0).to(device)
    from sala.lab.train.adapters import add_low_rank

    add_low_rank(student, teacher, 56, 0)
    for name, value in student.named_parameters():
        value.requires_grad_(".self_attn." in name or name.endswith((".up", ".down")) or "layernorm" in name)
    base = TeacherBase.of(teacher)
    return teacher, student, Latents(student, overlay_storage(student, base, OverlayPacking()), (0.9, 0.95))


def random_batch(rows: int, length: int, tile_rows: int) -> TrainingBatch:
    rng = np.random.default_rng(0)
    weights = (rng.random((rows, length)) < 0.7).astype(np.float32)
    weights[:, 0] = 0
    tokens = rng.integers(3, 49152, (rows, length))
    answer = rng.random((rows, length)) < 0.1
    parts = zip(tokens, weights > 0, answer, weights, strict=True)
    made = [TrainingRow(*row[:3], (length,), 0.0, "text", row[3], row[3] * np.float32(0.3)) for row in parts]
    return collate(made, tile_rows=tile_rows)


def timed(learner: LatentLearner, rows: int, length: int, device: torch.device) -> dict[str, float]:
    batch = random_batch(rows, length, learner.tile_rows)
    took = []
    for _ in range(6 if device.type == "cuda" else 2):
        synchronise(device)
        began = time.monotonic()
        learner.run(batch, batch.counts[2])
        synchronise(device)
        took.append(time.monotonic() - began)
        learner.latents.update(1e-5, 1.0, 0.9)
    best = sorted(took)[len(took) // 3]
    return {"ms": round(1000 * best, 1), "first_s": round(took[0], 1), "tok_s": round(rows * length / best)}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def safely(action: Callable[[], Any]) -> Any:
    """What fails here must not cost the rest."""
    try:
        return action()
    except Exception:
        traceback.print_exc()
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("pieces")
    for name in ("base", "corpus", "prompts", "target"):
        one.add_argument(name, type=Path)
    one = commands.add_parser("gather")
    for name in ("carried", "work"):
        one.add_argument(name, type=Path)
    for command in ("profile", "run", "finish"):
        one = commands.add_parser(command)
        for name in ("work", "out"):
            one.add_argument(name, type=Path)
        one.add_argument("--smoke", action="store_true")
        one.add_argument("--minutes", type=float, default=9.0)
        one.add_argument("--recipe", default="recipe-6.toml")
        one.add_argument("--only-write", action="store_true")
        one.add_argument("--seconds", type=int, default=0, help="of training in all, instead of the recipe's")
    options = parser.parse_args()
    if options.command == "pieces":
        make_pieces(options.base, options.corpus, options.prompts, options.target)
    elif options.command == "gather":
        gather(options.carried, options.work)
    else:
        {"profile": profile, "run": run, "finish": finish}[options.command](options)


if __name__ == "__main__":
    main()
