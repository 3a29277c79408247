"""What the engine saves, on a CPU with a small random model: every figure is a ratio within one run.

    python benchmarks/engine_cpu.py            writes benchmarks/engine_cpu.json

- batch: 8 requests together against the same 8 in turn
- prefix: the second turn over a long prefix against the first (time to the first token)
- disk: the same after a restart, restored from a file
- lookup: drafts from the text against plain decoding, on a copy task
"""

import json
import platform
import random
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from sala import LLM, __version__
from sala.checkpoint.random import RELEASED, write_random
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_weights
from sala.config import SparseConfig

HERE = Path(__file__).parent
PREFIX = 20_000
SMALL = replace(
    RELEASED, vocab_size=256, hidden_size=512, intermediate_size=2048, num_hidden_layers=8,
    mixer_types=("minicpm4", *["lightning-attn"] * 6, "minicpm4"), num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, lightning_nh=8, lightning_nkv=8, lightning_head_dim=64, eos_token_id=(2,), dtype="float32",
    sparse_config=SparseConfig(window_size=512, topk=16, dense_len=2048),
)  # fmt: skip
GREEDY = {"temperature": 0, "ignore_eos": True}


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def timed(work) -> tuple[float, object]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def batch(model: Path) -> dict[str, float]:
    llm = LLM(model, device="cpu", ctx=1024, snapshots=0)
    prompts = [words(seed, 64) for seed in range(8)]
    llm.generate(prompts[0], max_tokens=8, **GREEDY)
    in_turn, alone = timed(lambda: [llm.generate(prompt, max_tokens=64, **GREEDY) for prompt in prompts])
    together, answers = timed(lambda: llm.generate(prompts, max_tokens=64, **GREEDY))
    assert [a.token_ids for a in alone] == [a.token_ids for a in answers]
    return {"in_turn_s": in_turn, "together_s": together, "times_faster": in_turn / together}


def prefix(model: Path, folder: Path) -> dict[str, float]:
    document = words(1, PREFIX)
    llm = LLM(model, device="cpu", ctx=PREFIX + 1024, cache_dir=folder)
    first, answer = timed(lambda: llm.generate(document, max_tokens=1, **GREEDY))
    follow = document + answer.token_ids + words(2, 20)
    second, after = timed(lambda: llm.generate(follow, max_tokens=1, **GREEDY))
    llm.close()
    restarted = LLM(model, device="cpu", ctx=PREFIX + 1024, cache_dir=folder)
    restored, again = timed(lambda: restarted.generate(follow, max_tokens=1, **GREEDY))
    assert after.token_ids == again.token_ids
    assert again.usage.cached_tokens >= PREFIX - 1
    return {
        "first_turn_s": first, "second_turn_s": second, "times_sooner": first / second,
        "from_disk_s": restored, "times_sooner_from_disk": first / restored,
    }  # fmt: skip


def copyist(model: Path, target: Path) -> Path:
    """The same model with mixers that add nothing: it sees the last token alone, so its answer is a text repeated.

    It computes all that the original computes, and stands for a model that copies from its prompt.
    """
    with Checkpoint(model) as checkpoint, new_directory(target) as draft:
        specs = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}

        def read(name: str) -> bytes | memoryview:
            data = checkpoint.read(name).data
            return bytes(data.nbytes) if name.endswith("self_attn.o_proj.weight") else data

        write_weights(draft, specs, read)
        shutil.copy(model / "config.json", draft)
    return target


def lookup(model: Path) -> dict[str, float]:
    plain = LLM(model, device="cpu", ctx=4096)
    text = plain.generate(words(3, 64), max_tokens=700, **GREEDY).token_ids
    prompt = words(3, 64) + text[:500]
    plain.reset()
    plain.generate(prompt, max_tokens=1, **GREEDY)
    drafting = LLM(model, device="cpu", ctx=4096, speculate="lookup", num_draft=8)
    drafting.generate(prompt, max_tokens=1, **GREEDY)
    slow, want = timed(lambda: plain.generate(prompt, max_tokens=200, **GREEDY))
    fast, got = timed(lambda: drafting.generate(prompt, max_tokens=200, **GREEDY))
    assert want.token_ids == got.token_ids
    speculation = drafting.engine.speculation
    return {
        "plain_s": slow, "lookup_s": fast, "times_faster": slow / fast,
        "acceptance": speculation.acceptance, "tokens_per_round": speculation.tokens_per_round,
    }  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_random(model, SMALL)
        results = {
            "batch": batch(model),
            "lookup": lookup(copyist(model, Path(folder) / "copyist")),
            "prefix": prefix(model, Path(folder) / "cache"),
        }
    report = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"sala": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "model": "8 layers, hidden 512, fp32, random weights",
        "prefix_tokens": PREFIX,
        **results,
    }
    (HERE / "engine_cpu.json").write_text(json.dumps(report, indent=2) + "\n")
    for name, figures in results.items():
        print(name, {key: round(value, 3) for key, value in figures.items()})


if __name__ == "__main__":
    main()
