"""Fine-tuning on one GPU: full, LoRA and QLoRA with the 9B shapes and random weights, by row length.

    PYTHONPATH=. python benchmarks/gpu_finetune.py [PART …]

writes into benchmarks/gpu_finetune.json, or --output FILE.

A part is METHOD-LENGTH, e.g. full-4K or qlora-64K; without any, all of METHODS at LENGTHS. Every part runs the Trainer
of `sala finetune` on rows of random tokens that are all learnt: a few updates to warm up (kernels are compiled and
tuned then), then some that are timed. Recorded are tokens per second, the peak of the memory that torch holds, what
`sala estimate --finetune` says, and what runs the lightning layers. A part that does not fit is recorded as such.
Full fine-tuning: weights, gradients and both moments of AdamW in bf16, weights rounded at random (adamw-bf16).
QLoRA: our own packed 4-bit weights, expanded for every product. `--candidates 5` lets flash-linear-attention try five
configurations of each of its kernels at first use instead of all, which takes minutes. `--tiny` is a trial of the
script on any machine.
"""

import argparse
import gc
import json
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import TrainerCallback

from benchmarks.outputs import VARIABLE, stamp
from sala.backends.torch.fast.training import simple_gla
from sala.backends.torch.linears import AffineWeight
from sala.backends.torch.loader import random_model
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.random import RELEASED, TINY, spread
from sala.config import SalaConfig
from sala.lab.finetune.dialogues import Example
from sala.lab.finetune.frozen import FrozenLinear
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.rows import Row, collate
from sala.lab.finetune.run import make_trainer
from sala.lab.finetune.target import LINEARS, adapter_settings
from sala.lab.finetune.training import FinetuneCallbacks, estimate_for, training_arguments
from sala.plugins.transformers.loading import adopt

HERE = Path(__file__).parent
METHODS = ("qlora", "lora", "full")
LENGTHS = ("4K", "16K", "64K")
WARM, TIMED = 2, 3
LONG = 65536  # rows of so many tokens: one update to warm up, two that are timed
OPTIMIZERS = {"full": "adamw-bf16", "lora": "adamw", "qlora": "adamw"}


class Clock(TrainerCallback):
    """When each update ended."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ends, self.losses = device, [], []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def random_rows(config: SalaConfig, length: int, count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    learn = np.arange(length) > 0
    return [(Example(rng.integers(0, config.vocab_size, length), learn, 1),) for _ in range(count)]


def random_frozen(shape: torch.Size, name: str, config: SalaConfig, device: torch.device) -> FrozenLinear:
    """Codes at random, with scales that give weights of the usual size."""
    num_out, num_in = shape
    codes = torch.randint(-(1 << 31), (1 << 31) - 1, (num_out, num_in // 8), device=device).int()
    scale = spread(name, (num_out, num_in), config) / 4.6
    scales = torch.full((num_out, num_in // 64), scale, dtype=torch.float16, device=device)
    return FrozenLinear(AffineWeight(codes, scales, -7.5 * scales, 4, 64))


def open_model(config: SalaConfig, options: FinetuneOptions, device: torch.device) -> Any:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if options.method == "qlora":
        inner = random_model(replace(config, num_hidden_layers=1, mixer_types=config.mixer_types[:1]), dtype, device)
        edges = {"embed": inner.model.embed_tokens, "head": inner.lm_head}
        source = frozen_model(config, dtype, device, edges)
    else:
        source = random_model(config, dtype, device)
    model = adopt(source, Path(), dtype)
    model.loss_rows = options.loss_rows
    model.config.use_cache = False
    if not options.has_adapter:
        return model
    from peft import get_peft_model

    return get_peft_model(model, adapter_settings(options, config))


def frozen_model(config: SalaConfig, dtype: torch.dtype, device: torch.device, edges: dict[str, nn.Module]) -> Any:
    """Never more than one layer of plain weights in memory: linears of the layers are packed from the start."""
    from sala.backends.torch.model import SalaModel

    with torch.device("meta"):
        model = SalaModel(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in LINEARS:
            model.set_submodule(name, random_frozen(module.weight.shape, f"{name}.weight", config, device))
    for name, parameter in list(model.named_parameters()):
        place, _, leaf = name.rpartition(".")
        if parameter.dim() == 1:
            ones = torch.ones(parameter.shape, dtype=dtype, device=device)
            setattr(model.get_submodule(place), leaf, nn.Parameter(ones))
    model.model.embed_tokens, model.lm_head = edges["embed"], edges["head"]
    return model


def measure(method: str, length: int, config: SalaConfig, device: torch.device, room: Path) -> dict[str, Any]:
    warm, timed = (1, 2) if length >= LONG else (WARM, TIMED)
    options = FinetuneOptions(
        model="random",
        train=room / "none",
        output=room / "out",
        method=method,
        max_length=length,
        accumulate=1,
        steps=warm + timed,
        optimizer=OPTIMIZERS[method],
        device=str(device),
        dtype="auto" if device.type == "cpu" else "bfloat16",
        save_every=1 << 20,
    )
    needed = estimate_for(options, config, device)
    rows = random_rows(config, length, warm + timed)
    arguments = training_arguments(options, device, len(rows), False)
    arguments.save_strategy = "no"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = open_model(config, options, device)
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    clock = Clock(device)
    data = {"train_dataset": rows, "data_collator": collate}
    trainer = make_trainer(model, arguments, options, FinetuneCallbacks(), clock, **data)
    trainer.train()
    spent = clock.ends[-1] - clock.ends[warm - 1]
    return {
        "tokens_per_second": length * timed / spent,
        "seconds_per_update": spent / timed,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "weights_bytes": held,
        "estimate": {**asdict(needed), "total": needed.total},
        "losses": clock.losses,
        "optimizer": options.optimizer,
    }


def limit_candidates(most: int) -> None:
    """Of the configurations that Triton tries, some, evenly taken. To be called before the kernels are imported."""
    from triton.runtime.autotuner import Autotuner

    begin = Autotuner.__init__

    def begin_with_few(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        begin(self, fn, arg_names, configs and configs[:: -(-len(configs) // most)], *rest, **named)

    Autotuner.__init__ = begin_with_few


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--output", type=Path, default=HERE / "gpu_finetune.json")
    parser.add_argument("--commit", help=f"what is measured, where there is no git; or set {VARIABLE}")
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    config = TINY if given.tiny else RELEASED
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.candidates:
        limit_candidates(given.candidates)
    parts = given.parts or [f"{method}-{length}" for method in METHODS for length in LENGTHS]
    results = json.loads(given.output.read_text()) if given.output.is_file() else {}
    results |= {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "lightning": "flash-linear-attention" if device.type == "cuda" and simple_gla() else "torch",
        "candidates": given.candidates,
        "parameters": sum(int(np.prod(shape)) for shape in expected_tensors(config).values()),
    }
    for part in parts:
        method, _, text = part.partition("-")
        length = int(text.removesuffix("K")) * 1024 if text.endswith("K") else int(text)
        began = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as room:
                results[part] = measure(method, length, config, device, Path(room))
        except torch.cuda.OutOfMemoryError as error:
            results[part] = {"error": "out of memory", "detail": str(error).splitlines()[0][:300]}
        except Exception as error:
            traceback.print_exc()
            results[part] = {"error": f"{type(error).__name__}: {error}"[:500]}
        results[part] |= {"wall_seconds": time.perf_counter() - began, "run": stamp(given.commit)}
        print(part, json.dumps({k: v for k, v in results[part].items() if k != "estimate"}), flush=True)
        given.output.write_text(json.dumps(results, indent=1) + "\n")
        clear()


if __name__ == "__main__":
    main()
