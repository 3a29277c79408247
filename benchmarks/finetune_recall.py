"""What fine-tuning on short chats does to facts hidden in long texts, and what keeps them.

    python benchmarks/finetune_recall.py -o benchmarks/finetune_recall.json [--work DIR]

500 chats of one exchange each are composed from `finetune_chats.toml`, with the lists of the embedded model's prompts.
`OPTIONS` train an adapter on them, once for each of `RUNS`. Then the facts are counted that the model finds without an
adapter, with that of each run, and with its queries and keys restored in both ways. This takes hours on a CPU: after
Ctrl-C the same command goes on from what is in DIR and in the output.
"""

import argparse
import json
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from sala.config import SalaConfig
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.result import LOSSES_FILE, put_adapter, restore
from sala.lab.finetune.run import finetune
from sala.lab.finetune.target import load_target
from sala.lab.finetune.training import FinetuneCallbacks, Stopped, last_checkpoint
from sala.lab.train.needles import SlotLists
from sala.lab.train.recall import logits_of, measure_recall, recall_cases
from sala.models.embedded import find_model
from sala.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
LISTS = HERE.parent / "models" / "smol-sala" / "prompts.toml"
NUM_CHATS = 500
TEXTS = 8
TOLD = {
    "model": "smol-sala",
    "lr": 1e-3,
    "epochs": 1.0,
    "max_length": 512,
    "accumulate": 1,
    "dtype": "bfloat16",
    "rank": 16,
}
OPTIONS: dict[str, Any] = TOLD | {"recall": False}
RUNS: dict[str, dict[str, Any]] = {"plain": {"keep_long": 0.0}, "replay": {}}
RESTORED = {"as trained": None, "plain": "plain", "orthogonal": "orthogonal"}


def compose(count: int = NUM_CHATS, seed: int = 1) -> list[dict[str, object]]:
    """Return different chats, always the same ones."""
    templates = tomllib.loads((HERE / "finetune_chats.toml").read_text())["chats"]
    slots, rng, found = SlotLists.load(LISTS), np.random.default_rng(seed), {}
    while len(found) < count:
        names: dict[str, str] = {}
        question, answer = (slots.fill(text, names, rng) for text in templates[int(rng.integers(len(templates)))])
        found[question] = answer
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]}
        for pair in found.items()
    ]


def train(work: Path, device: str) -> None:
    """Train the runs that are not there yet; raise Stopped after Ctrl-C."""
    chats = work / "chats.jsonl"
    if not chats.exists():
        chats.write_text("".join(json.dumps(chat) + "\n" for chat in compose()))
    for name, changes in RUNS.items():
        options = FinetuneOptions(**OPTIONS | changes, train=chats, output=work / name, device=device)
        if not options.output.exists():
            is_begun = last_checkpoint(options.work) is not None
            finetune(replace(options, resume=is_begun), FinetuneCallbacks(message=print))


def measure(work: Path, lengths: list[int], texts: int, output: Path, device: str) -> None:
    """Add what is found to the output; what is in it already is not measured again."""
    results = json.loads(output.read_text()) if output.exists() else {}
    path = find_model(OPTIONS["model"])
    about = {"version": path.name, "options": TOLD, "texts": texts}
    if results and {name: results.get(name) for name in about} != about:
        sys.exit(f"{output} has other results: choose another output, or remove it")
    results |= about
    for name in RUNS:
        table = json.loads((work / name / LOSSES_FILE).read_text())
        facts = {"long_rows": table.get("long_rows", 0), "examples": table["examples"], "updates": table["updates"]}
        losses = [round(entry["loss"], 4) for entry in table["losses"] if "loss" in entry]
        results.setdefault("runs", {})[name] = facts | {"losses": losses}
    wanted = {"before": None} | {f"{name}, {how}": (name, by) for name in RUNS for how, by in RESTORED.items()}
    tokenizer, end = Tokenizer.load(path), SalaConfig.load(path).eos_token_id[0]
    for title, adapted in wanted.items():
        found = results.setdefault("recall", {}).setdefault(title, [])
        for length in (one for one in lengths if all(row["length"] != one for row in found)):
            logits = logits_of(load(work, path, adapted, device))
            cases = recall_cases(tokenizer, end, [length], texts)
            found += [asdict(one) for one in measure_recall(logits, cases)]
            print(title, found[-1], flush=True)
            output.write_text(json.dumps(results, indent=1) + "\n")
    tokenizer.close()


def load(work: Path, path: Path, adapted: tuple[str, str | None] | None, device: str) -> torch.nn.Module:
    """Return the model with the adapter of a run, restored as it is asked for; None: without one."""
    options = FinetuneOptions(**OPTIONS, train=work, output=work, device=device)
    model = load_target(path, options, torch.device(device)).eval()
    if adapted is not None:
        name, how = adapted
        tensors = load_file(work / name / "adapter_model.safetensors")
        if how is not None:
            tensors = restore(tensors, path, replace(options, restore_qk=True, restore_by=how))
        put_adapter(model, tensors)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("finetune-recall"), help="for the chats and the adapters")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--texts", type=int, default=TEXTS, help="of each length, with eight facts each")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    try:
        train(asked.work, asked.device)
    except Stopped as stopped:
        sys.exit(f"{stopped}: the same command goes on from here")
    measure(asked.work, asked.lengths, asked.texts, asked.output, asked.device)


if __name__ == "__main__":
    main()
