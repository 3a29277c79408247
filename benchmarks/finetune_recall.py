"""What fine-tuning on short chats does to facts hidden in long texts, and what keeps them.

    python benchmarks/finetune_recall.py -o benchmarks/finetune_recall.json [--work DIR]

500 chats of one exchange each are composed from `finetune_chats.toml`, with the lists of the embedded model's prompts.
`OPTIONS` train an adapter on them, once for each of `RUNS`. Then the facts are counted that the model finds without an
adapter, with that of each run, and with its queries and keys restored in both ways. This takes half an hour on a core
of a CPU: after Ctrl-C the same command goes on from what is in DIR and in the output, also with more --texts.
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
from sala.lab.train.recall import Logits, logits_of, measure_recall, recall_cases
from sala.models.embedded import find_model
from sala.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
LISTS = HERE.parent / "models" / "smol-sala" / "prompts.toml"
NUM_CHATS = 500
TEXTS = 2
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
RUNS: dict[str, dict[str, Any]] = {"plain": {"keep_long": 0.0}, "replay": {}, "default rate": {"lr": None}}
RESTORED = {"as trained": None, "plain": "plain", "orthogonal": "orthogonal"}
BEFORE = "before"
# the models: name → run, and how queries and keys are restored
TITLES: dict[str, tuple[str, str | None]] = {BEFORE: ("", None)} | {
    f"{name}, {title}": (name, how)
    for name, changes in RUNS.items()
    for title, how in RESTORED.items()
    if how is None or "lr" not in changes
}


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
    """Add what is found to the output, one text after another in all models; what is in it is not measured again."""
    results = json.loads(output.read_text()) if output.exists() else {}
    path = find_model(OPTIONS["model"])
    about = {"version": path.name, "options": TOLD, "lengths": lengths}
    if results and {name: results.get(name) for name in about} != about:
        sys.exit(f"{output} has other results: choose another output, or remove it")
    results |= about
    for name in RUNS:
        table = json.loads((work / name / LOSSES_FILE).read_text())
        facts = {"long_rows": table.get("long_rows", 0), "examples": table["examples"], "updates": table["updates"]}
        losses = [round(entry["loss"], 4) for entry in table["losses"] if "loss" in entry]
        results.setdefault("runs", {})[name] = facts | {"losses": losses}
    tokenizer, end = Tokenizer.load(path), SalaConfig.load(path).eos_token_id[0]
    models = Models(work, path, device)
    for length in lengths:
        for index, case in enumerate(recall_cases(tokenizer, end, [length], texts)):
            for title in TITLES:
                found = results.setdefault("recall", {}).setdefault(title, [])
                if any((row["length"], row["text"]) == (length, index) for row in found):
                    continue
                (recall,) = measure_recall(models.logits(title), [case])
                found.append({"text": index, **asdict(recall), "tokens": sum(map(len, case.values))})
                print(title, found[-1], flush=True)
                output.write_text(json.dumps(results, indent=1) + "\n")
    tokenizer.close()


class Models:
    """The model without an adapter, and with that of each run, as it was trained or with queries and keys restored."""

    def __init__(self, work: Path, path: Path, device: str) -> None:
        self._work, self._path = work, path
        self._options = FinetuneOptions(**OPTIONS, train=work, output=work, device=device)
        self._model = load_target(path, self._options, torch.device(device)).eval()

    def logits(self, title: str) -> Logits:
        if title == BEFORE:
            return self._before
        name, how = TITLES[title]
        tensors = load_file(self._work / name / "adapter_model.safetensors")
        if how is not None:
            tensors = restore(tensors, self._path, replace(self._options, restore_qk=True, restore_by=how))
        put_adapter(self._model, tensors)
        return logits_of(self._model)

    def _before(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        with self._model.disable_adapter():
            return logits_of(self._model)(tokens, places)


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
