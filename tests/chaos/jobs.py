"""What is killed at random moments: each job is a function that runs in a process of its own."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from sala.cli import run
from sala.engine.sessions import SessionStore
from sala.lab.finetune import trainer as _  # noqa: F401  # what a run imports late, so that every process has it
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.run import finetune
from sala.lab.finetune.training import last_checkpoint
from sala.lab.quantize.pipeline import quantize_model
from sala.lab.quantize.plan import QuantizeSettings
from sala.lab.quantize.texts import FileText
from sala.llm import LLM
from sala.models.download import pull
from sala.models.hub import Hub
from sala.server import app as _app  # noqa: F401
from tests.train.small import SMALL

torch.set_num_threads(1)
CONFIG = replace(
    SMALL, intermediate_size=64, bos_token_id=256, eos_token_id=(257, 259), num_hidden_layers=2,
    mixer_types=SMALL.mixer_types[:2],
)  # fmt: skip
SESSION = "read"
SETTINGS = QuantizeSettings(4, 32, "gptq", num_tokens=512, length=64)


def quietly() -> None:
    """Write to nowhere: a job that is killed may have begun a line."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())


def load(model: Path) -> LLM:
    return LLM(model, device="cpu", ctx=4096, cache_memory=16 << 20, threads=1)


def open_store(llm: LLM, directory: Path) -> SessionStore:
    return llm.open_store(directory)


def save_session(model: Path, directory: Path, prompt: list[int]) -> None:
    quietly()
    with load(model) as llm:
        llm.save_session(open_store(llm, directory), SESSION, prompt)


def quantize(model: Path, target: Path, text: Path) -> None:
    quietly()
    quantize_model(model, target, SETTINGS, FileText(text, model))


def tune(model: Path, target: Path, examples: Path) -> None:
    """Fine-tune, from the last checkpoint of an earlier run if there is one."""
    quietly()
    options = FinetuneOptions(
        model=str(model), train=examples, output=target, max_length=96, epochs=2.0, accumulate=2, lr=2e-2, rank=4,
        alpha=8.0, save_every=1, device="cpu",
    )  # fmt: skip
    finetune(replace(options, resume=last_checkpoint(options.work) is not None))


def download(models: Path, url: str) -> None:
    quietly()
    pull(models, "org/model", hub=Hub(url, timeout=5.0, delay=0.01))


def serve(model: Path, models: Path, cache: Path, port: int) -> None:
    quietly()
    flags = ["-m", str(model), "--models-dir", str(models), "--cache-dir", str(cache), "--port", str(port)]
    flags += ["--device", "cpu", "--ctx", "4096", "--cache-memory", "8M", "--cache-disk", "16M", "--threads", "1"]
    flags += ["--files-dir", str(models / "files"), "--log-level", "error"]
    sys.exit(run(["serve", *flags]))


def write_examples(file: Path) -> None:
    lines = []
    for number in range(8):
        messages = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"It is {number}."}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))
