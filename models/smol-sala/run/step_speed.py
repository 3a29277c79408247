"""How fast the training loop of a `mix` stage computes a micro-batch: by CUDA graphs, and launched kernel by kernel.

    python models/smol-sala/run/step_speed.py -o run2-profile.json

Teacher and student have smol-sala's shapes and random weights. --smoke measures two small shapes, on a CPU.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sala.backends.torch.model import SalaModel
from sala.checkpoint.overlay import OverlayPacking
from sala.config import SalaConfig
from sala.lab.train.adapters import add_low_rank
from sala.lab.train.data import TrainingRow
from sala.lab.train.fast_paths import FastPaths
from sala.lab.train.halo.source import dense_config
from sala.lab.train.halo.transfer import to_hybrid
from sala.lab.train.latent import LatentLearner, Latents
from sala.lab.train.objectives import Distil
from sala.lab.train.overlays import TeacherBase, overlay_storage
from sala.lab.train.recipe import MixStage, load_recipe
from sala.lab.train.steps import TrainingBatch, collate

MODEL = Path(__file__).resolve().parents[1]
TEACHER = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "vocab_size": 49152, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip
SHAPES = [(64, 256), (24, 512), (30, 1024), (1, 8192), (1, 32768)]  # rows and tokens, of recipe-6.toml


def random_pair(device: torch.device) -> tuple[SalaModel, SalaModel]:
    """Return a teacher, and a student whose trained parameters are those of recipe-6.toml."""
    with torch.device("meta"):
        teacher = SalaModel(dense_config(TEACHER))
    generator = torch.Generator(device).manual_seed(0)
    teacher = teacher.to_empty(device=device).requires_grad_(False)
    for value in teacher.parameters():
        value.data.normal_(0, 0.03, generator=generator)
        if value.ndim == 1:
            value.data.fill_(1.0)
    teacher.lm_head.weight = teacher.model.embed_tokens.weight
    student = to_hybrid(teacher, replace(SalaConfig.load(MODEL), quantization=None), 0).to(device)
    add_low_rank(student, teacher, 56, 0)
    for name, value in student.named_parameters():
        value.requires_grad_(".self_attn." in name or name.endswith((".up", ".down")) or "layernorm" in name)
    return teacher, student


def make_learner(device: torch.device, tile_rows: int) -> LatentLearner:
    teacher, student = random_pair(device)
    latents = Latents(student, overlay_storage(student, TeacherBase.of(teacher), OverlayPacking()), (0.9, 0.95))
    objective = Distil(student, teacher, 2048, has_selection_loss=True, is_mixed=True, tile_rows=tile_rows)
    objective.use(FastPaths.on(device))
    if device.type == "cuda":
        for layer in (*student.model.layers, *teacher.model.layers):
            layer.compile(dynamic=False)
    stage = next(stage for stage in load_recipe(MODEL / "recipe-6.toml").stages if isinstance(stage, MixStage))
    return LatentLearner(objective, latents, stage, print)


def random_batch(rows: int, length: int, tile_rows: int) -> TrainingBatch:
    rng = np.random.default_rng(0)
    weights = (rng.random((rows, length)) < 0.7).astype(np.float32)
    weights[:, 0] = 0
    tokens = rng.integers(3, 49152, (rows, length))
    answer = rng.random((rows, length)) < 0.1
    parts = zip(tokens, weights > 0, answer, weights, strict=True)
    made = [TrainingRow(*row[:3], (length,), 0.0, "text", row[3], row[3] * np.float32(0.3)) for row in parts]
    return collate(made, tile_rows=tile_rows)


def measure(learner: LatentLearner, rows: int, length: int) -> dict[str, float]:
    """Return the milliseconds of forward and backward pass, the seconds of the first, and tokens per second."""
    batch, is_cuda = random_batch(rows, length, learner.tile_rows), learner.device.type == "cuda"
    seconds = []
    for _ in range(6 if is_cuda else 2):
        if is_cuda:
            torch.cuda.synchronize()
        began = time.monotonic()
        learner.run(batch, batch.counts[2])
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
        learner.latents.update(1e-5, 1.0, 0.9)
    best = sorted(seconds)[len(seconds) // 3]
    return {"ms": round(1000 * best, 1), "first_s": round(seconds[0], 1), "tok_s": round(rows * length / best)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.smoke else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    learner = make_learner(device, 64 if options.smoke else 2048)
    fast, table = learner.objective.fast, {}
    for rows, length in [(1, 64), (2, 32)] if options.smoke else SHAPES:
        for name in ("graph", "eager"):
            learner.objective.fast = replace(fast, has_graphs=name == "graph" and device.type == "cuda")
            table[f"{name} {rows}x{length}"] = measure(learner, rows, length)
            options.output.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
