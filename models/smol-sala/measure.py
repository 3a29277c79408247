"""smol-sala against its teacher on the same data: perplexity, ARC-Easy, needles by length. Prints a table, writes JSON.

    python models/smol-sala/measure.py TEACHER STUDENT CORPUS -o results.json --device cuda

CORPUS is what corpus.py wrote. Needles are of the test split: wordings, keys and haystacks that no training saw.
A needle is found if greedy decoding would write exactly the right value.
"""

import argparse
import json
import lzma
import math
import time
from functools import partial
from pathlib import Path

import torch

from sala.backends.torch.loader import pick_device
from sala.eval.tasks.choice import read_tasks
from sala.eval.tasks.needle import NeedleMaker
from sala.text.tokenizer import Tokenizer
from sala.train.models import load_for_training
from sala.train.report import choice_accuracy, needle_rows, recall, to_tokens
from sala.train.score import perplexity


def read(file: Path) -> list[dict]:
    with lzma.open(file, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def perplexities(models: dict, corpus: Path, tokenizer: Tokenizer, eos: int, length: int, limit: int) -> dict:
    sets = {"heldout": read(corpus / "heldout.jsonl.xz")}
    for document in read(corpus / "unseen.jsonl.xz"):
        sets.setdefault(document["source"], []).append(document)
    out = {}
    for name, documents in sets.items():
        tokens = to_tokens((document["text"] for document in documents), tokenizer, eos)[: limit * length]
        values = {who: perplexity(model, tokens, length) for who, model in models.items()}
        out[name] = values | {"ratio": values["student"] / values["teacher"], "tokens": len(tokens)}
        print(
            f"perplexity {name:12} teacher {values['teacher']:.2f} student {values['student']:.2f}"
            f" ratio {out[name]['ratio']:.3f}",
            flush=True,
        )
    others = [entry["ratio"] for name, entry in out.items() if name != "heldout"]
    out["unseen"] = {"ratio": math.exp(sum(map(math.log, others)) / len(others))}
    print(f"perplexity unseen sources together: ratio {out['unseen']['ratio']:.3f}", flush=True)
    return out


def choices(models: dict, file: Path, tokenizer: Tokenizer, limit: int) -> dict:
    tasks = read_tasks(file)[:limit]
    encode = partial(tokenizer.encode, bos=False)
    out = {who: choice_accuracy(model, tasks, encode)._asdict() for who, model in models.items()}
    out["ratio"] = out["student"]["acc"] / out["teacher"]["acc"]
    print(
        f"{file.stem} ({len(tasks)}): "
        + ", ".join(f"{who} {out[who]}" for who in models)
        + f" ratio {out['ratio']:.3f}",
        flush=True,
    )
    return out


def needles(models: dict, maker: NeedleMaker, encode, lengths, keys: int, trials: int, teacher_max: int) -> dict:
    out = {}
    for length in lengths:
        rows = needle_rows(maker, encode, length, keys, trials)
        out[length] = {}
        for who, model in models.items():
            if who == "teacher" and length > teacher_max:
                continue
            out[length][who] = recall(model, rows)
        print(f"needle keys {keys} length {length}: {out[length]}", flush=True)
    return out


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("student", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--rows", type=int, default=200, help="pieces of 1024 tokens per text")
    parser.add_argument("--questions", type=int, default=2376)
    parser.add_argument("--teacher-max", type=int, default=16384, help="longest needle asked of the teacher")
    options = parser.parse_args()
    began, device = time.time(), pick_device(options.device)
    models = {
        "teacher": load_for_training(options.teacher, device),
        "student": load_for_training(options.student, device),
    }
    tokenizer = Tokenizer.load(options.teacher)
    eos = models["teacher"].config.eos_token_id[0]
    encode = partial(tokenizer.encode, bos=False, parse_special=True)
    haystack = [d["text"] for d in read(options.corpus / "unseen.jsonl.xz")]
    maker = NeedleMaker(encode, {"train": [], "test": haystack}, seed=11)
    lengths = [int(n) for n in options.lengths.split(",")]
    results = {
        "perplexity": perplexities(models, options.corpus, tokenizer, eos, 1024, options.rows),
        "arc_easy": choices(models, options.corpus / "tasks" / "arc_easy.jsonl", tokenizer, options.questions),
        "needle": needles(models, maker, encode, lengths, 1, options.trials, options.teacher_max),
        "needle_4_keys": needles(models, maker, encode, lengths, 4, options.trials, options.teacher_max),
    }
    results["settings"] = {name: getattr(options, name) for name in ("rows", "questions", "trials", "lengths")}
    results["seconds"] = round(time.time() - began)
    results["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
