"""smol-sala against its teacher on the same data. Prints a table, writes JSON.

    python models/smol-sala/measure.py TEACHER STUDENT CORPUS -o results.json --device cuda

CORPUS is what corpus.py wrote. Perplexity on held-out text of the training's sources and on other sources; ARC-Easy;
simple questions; needles by length, of the test split: wordings, keys and haystacks that no training saw. A needle is
found if its value is in what the model answers, decoding greedily. With --parts, only some of it: what an output file
holds already is kept, so that several runs can share one.
"""

import argparse
import json
import lzma
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from sala.backends.torch.loader import pick_device
from sala.backends.torch.model import SalaModel
from sala.eval.tasks.choice import read_tasks
from sala.eval.tasks.needle import NeedleMaker
from sala.eval.tasks.questions import QUESTIONS, accuracy
from sala.text.tokenizer import Tokenizer
from sala.train.models import load_for_training
from sala.train.report import choice_accuracy, needle_cases, recall, to_tokens
from sala.train.score import perplexity, write_greedy

Models = dict[str, SalaModel]
TALK = (
    "Hello! How are you?",
    "What is gravity?",
    "Tell me a short story about a fox.",
    "Give me three tips for sleeping well.",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "What should I cook with eggs and potatoes?",
    "Explain what a computer is to a child.",
)
PARTS = ("perplexity", "arc_easy", "questions", "talk", "needle")
MAX_TALK = 320  # tokens; an answer that is longer has not ended


def read(file: Path) -> list[dict]:
    with lzma.open(file, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def perplexities(models: Models, corpus: Path, tokenizer: Tokenizer, length: int, limit: int) -> dict:
    eos = models["teacher"].config.eos_token_id[0]
    sets = {"heldout": read(corpus / "heldout.jsonl.xz")}
    for document in read(corpus / "unseen.jsonl.xz"):
        sets.setdefault(document["source"], []).append(document)
    out = {}
    for name, documents in sets.items():
        tokens = to_tokens((document["text"] for document in documents), tokenizer, eos)[: limit * length]
        out[name] = compare(models, f"perplexity {name}", lambda model, ids=tokens: perplexity(model, ids, length))
        out[name] |= {"ratio": out[name]["student"] / out[name]["teacher"], "tokens": len(tokens)}
    others = [entry["ratio"] for name, entry in out.items() if name != "heldout"]
    out["unseen"] = {"ratio": math.exp(sum(map(math.log, others)) / len(others))}
    print(f"perplexity ratios: held-out {out['heldout']['ratio']:.3f}, unseen {out['unseen']['ratio']:.3f}", flush=True)
    return out


def compare(models: Models, what: str, measure: Callable[[SalaModel], float], only: tuple[str, ...] = ()) -> dict:
    values = {who: measure(model) for who, model in models.items() if not only or who in only}
    print(f"{what:40}" + "".join(f" {who} {value:8.3f}" for who, value in values.items()), flush=True)
    return values


def choices(models: Models, file: Path, tokenizer: Tokenizer, limit: int) -> dict:
    tasks = read_tasks(file)[:limit]
    encode = partial(tokenizer.encode, bos=False)
    out = {who: choice_accuracy(model, tasks, encode)._asdict() for who, model in models.items()}
    out["ratio"] = out["student"]["acc"] / out["teacher"]["acc"]
    print(f"{file.stem} ({len(tasks)}): {out}", flush=True)
    return out


def answer(model: SalaModel, tokenizer: Tokenizer, questions: list[str], max_tokens: int) -> tuple[list[str], float]:
    """What the model says, and the share of the answers that it ends by itself."""
    asked = [
        tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True) for text in questions
    ]
    ends = model.config.eos_token_id
    written = write_greedy(model, asked, max_tokens, ends)
    return [tokenizer.decode(ids) for ids in written], sum(ids[-1] in ends for ids in written) / len(written)


def needles(models: Models, maker: NeedleMaker, tokenizer: Tokenizer, options: argparse.Namespace) -> Iterator[dict]:
    """The table so far, after each entry."""
    out = {}
    for length in map(int, options.lengths.split(",")):
        for kind, keys in (("number", 1), ("word", 1), ("uuid", 1), ("mixed", 4)):
            name = kind if keys == 1 else f"{kind}, {keys} keys"
            cases = needle_cases(maker, length, keys, options.trials, kind)
            who = () if length <= options.teacher_max else ("student",)
            measure = partial(recall, tokenizer=tokenizer, cases=cases)
            out.setdefault(name, {})[length] = compare(models, f"needle {name} {length}", measure, who)
            yield out


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
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--teacher-max", type=int, default=16384, help="longest needle asked of the teacher")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    began, device = time.time(), pick_device(options.device)
    torch.set_float32_matmul_precision("high")
    models = {
        "teacher": load_for_training(options.teacher, device),
        "student": load_for_training(options.student, device),
    }
    tokenizer = Tokenizer.load(options.teacher)
    encode = partial(tokenizer.encode, bos=False, parse_special=True)
    haystack = [d["text"] for d in read(options.corpus / "unseen.jsonl.xz")]
    maker = NeedleMaker(encode, {"train": [], "test": haystack}, seed=11)
    results: dict = {}
    if options.output and options.output.is_file():
        results = json.loads(options.output.read_text())
    results["settings"] = {name: getattr(options, name) for name in ("rows", "questions", "trials")}

    def save() -> None:
        results["seconds"] = round(time.time() - began)
        results["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        if options.output:
            options.output.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")

    if "perplexity" in parts:
        results["perplexity"] = perplexities(models, options.corpus, tokenizer, 1024, options.rows)
    if "arc_easy" in parts:
        results["arc_easy"] = choices(models, options.corpus / "tasks" / "arc_easy.jsonl", tokenizer, options.questions)
    if "questions" in parts:
        asked = [question.text for question in QUESTIONS]
        results["questions"] = compare(
            models, "questions", lambda model: accuracy(QUESTIONS, answer(model, tokenizer, asked, 64)[0])
        )
    if "talk" in parts:
        results["talk"] = {}
        for who, model in models.items():
            said, ended = answer(model, tokenizer, list(TALK), MAX_TALK)
            results["talk"][who] = {"ended": ended, "answers": dict(zip(TALK, said, strict=True))}
            print(f"talk: {who} ends {ended:.0%} of its answers", flush=True)
    save()
    if "needle" in parts:
        for found in needles(models, maker, tokenizer, options):
            for name, by_length in found.items():
                known = results.setdefault("needle", {}).setdefault(name, {})
                known |= {str(length): entry for length, entry in by_length.items()}
            save()


if __name__ == "__main__":
    main()
