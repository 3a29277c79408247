"""smol-sala against its teacher on the same data. Prints a table, writes JSON.

    python models/smol-sala/measure.py TEACHER STUDENT CORPUS -o results.json --device cuda

CORPUS is what corpus.py wrote. Perplexity on held-out text of the training's sources and on other sources; ARC-Easy;
simple questions; needles by length, of the test split: wordings, keys and haystacks that no training saw. A needle is
found if its value is in the engine's greedy answer (bf16 on a GPU; the teacher, which is sensitive to it, in fp32).
`everyday` are the 200 questions of everyday.jsonl, judged by their rules; `development` are 200 others to steer by;
`reading` are questions on a paragraph, alone and in 4,096 tokens; `typed` are needles as a user types them: with the
system turn, and no answer begun. With --parts, only some of it: what an output file holds already is kept, so that
several runs can share one.
"""

import argparse
import json
import lzma
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rules import RuledQuestion, accuracy, is_met, read_questions, simple_questions

from sala.backends.torch.loader import pick_device
from sala.backends.torch.model import SalaModel
from sala.engine.stream import Completion
from sala.lab.eval.runner import NUM_ANSWERED
from sala.lab.eval.tasks.case import score_value as score
from sala.lab.eval.tasks.choice import read_tasks
from sala.lab.eval.tasks.needle import NeedleCase, NeedleMaker, NeedleSpec, ValueChoice
from sala.lab.train.documents import has_loop
from sala.lab.train.models import load_for_training
from sala.lab.train.needles import chat_wrap
from sala.lab.train.report import to_tokens
from sala.lab.train.score import choice_accuracy, perplexity
from sala.llm import LLM
from sala.options import Sampling
from sala.text.tokenizer import Tokenizer

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
    "What is a volcano?",
    "Who was Napoleon?",
    "How do I make tea?",
    "Tell me a joke.",
    "Write a haiku about rain.",
    "What is the largest ocean?",
    "Why do cats purr?",
    "Give me two ideas for dinner.",
    "What is photosynthesis?",
    "How does a bicycle work?",
    "Name three colours.",
    "What is a good name for a dog?",
    "Describe a forest in autumn.",
    "How can I learn a language?",
    "What is money?",
    "Why do we sleep?",
    "Tell me about the moon.",
    "What is the use of a hammer?",
    "Write a letter to my grandmother.",
    "How tall is Mount Everest?",
    "What is love?",
    "Explain rain to a child.",
    "Give me a tip for running.",
    "What is bread made of?",
)
NUM_SHOWN = 8  # answers that the results keep
TEMPERATURE = 0.7  # the default of every command
PARTS = ("perplexity", "arc_easy", "questions", "talk", "everyday", "development", "reading", "needle", "typed")
HERE = Path(__file__).parent
MAX_EVERYDAY = 250  # tokens in which an everyday answer must end
GREEDY = Sampling(temperature=0, max_tokens=MAX_EVERYDAY)  # without the defaults of the model
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


def compare(models: Mapping[str, Any], what: str, measure: Callable[[Any], float]) -> dict:
    values = {who: measure(model) for who, model in models.items()}
    print(f"{what:40}" + "".join(f" {who} {value:8.3f}" for who, value in values.items()), flush=True)
    return values


def choices(models: Models, file: Path, tokenizer: Tokenizer, limit: int) -> dict:
    tasks = read_tasks(file)[:limit]
    encode = partial(tokenizer.encode, bos=False)
    out = {who: choice_accuracy(model, tasks, encode)._asdict() for who, model in models.items()}
    out["ratio"] = out["student"]["acc"] / out["teacher"]["acc"]
    print(f"{file.stem} ({len(tasks)}): {out}", flush=True)
    return out


def answer(llm: LLM, questions: Sequence[str], max_tokens: int, temperature: float = 0) -> list[Completion]:
    asked = [[{"role": "user", "content": text}] for text in questions]
    prompts = [llm.tokenizer.encode_chat(messages, add_generation_prompt=True) for messages in asked]
    return llm.generate(prompts, Sampling(temperature=temperature, max_tokens=max_tokens, seed=1))


def conversations(engines: Mapping[str, LLM], parts: Sequence[str]) -> dict:
    out: dict[str, Any] = {}
    if "questions" in parts:
        simple = simple_questions()
        asked = [question.turns[0] for question in simple]
        out["questions"] = compare(
            engines, "questions", lambda llm: accuracy(simple, [said.text for said in answer(llm, asked, 64)])
        )
    if "talk" in parts:
        out["talk"] = {}
        for who, llm in engines.items():
            greedy, drawn = (answer(llm, TALK, MAX_TALK, heat) for heat in (0, TEMPERATURE))
            ended = {
                name: sum(one.finish_reason == "stop" for one in said) / len(said)
                for name, said in (("greedy", greedy), ("drawn", drawn))
            }
            answers = {text: one.text for text, one in zip(TALK[:NUM_SHOWN], greedy[:NUM_SHOWN], strict=True)}
            out["talk"][who] = {"ended": ended, "answers": answers}
            print(
                f"talk: {who} ends {ended['greedy']:.0%} of greedy answers, {ended['drawn']:.0%} of drawn", flush=True
            )
    return out


def everyday(
    engines: Mapping[str, LLM], questions: Sequence[RuledQuestion], shown: int = 0, sampling: Sampling = GREEDY
) -> dict:
    """Judge answers by the rules of the questions: one that does not end, or loops, is not correct."""
    out: dict[str, Any] = {}
    for who, llm in engines.items():
        began = time.time()
        said = reply(llm, [question.turns for question in questions], sampling)
        table: dict[str, list[dict]] = {}
        for question, completion in zip(questions, said, strict=True):
            has_ended = completion.finish_reason == "stop"
            loops = has_loop(llm.tokenizer.encode(completion.text, bos=False))
            entry = {
                "correct": has_ended and not loops and is_met(question, completion.text),
                "ended": has_ended,
                "loops": loops,
                "tokens": len(completion.token_ids),
            }
            table.setdefault(question.kind, []).append(entry)
        whole = [entry for entries in table.values() for entry in entries]
        out[who] = {"all": means(whole), "by_kind": {kind: means(entries) for kind, entries in table.items()}}
        if shown:
            step = max(1, len(questions) // shown)
            out[who]["answers"] = {q.turns[-1]: c.text for q, c in list(zip(questions, said, strict=True))[::step]}
        print(f"everyday: {who} {out[who]['all']} in {time.time() - began:.0f} s", flush=True)
    if {"teacher", "student"} <= set(out):
        both = [out[who]["all"] for who in ("student", "teacher")]
        out["ratio"] = {name: both[0][name] / max(both[1][name], 1e-9) for name in ("correct", "ended")}
        print(f"everyday: share of the teacher's {out['ratio']}", flush=True)
    return out


def means(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: round(sum(float(e[name]) for e in entries) / len(entries), 4) for name in entries[0]}


def reply(llm: LLM, asked: Sequence[Sequence[str]], sampling: Sampling) -> list[Completion]:
    """The answer to the last turn of each conversation; the model answers the turns before it, too."""
    talks: list[list[dict[str, str]]] = [[] for _ in asked]
    last: dict[int, Completion] = {}
    for turn in range(max(map(len, asked))):
        active = [at for at, turns in enumerate(asked) if turn < len(turns)]
        for at in active:
            talks[at].append({"role": "user", "content": asked[at][turn]})
        prompts = [llm.tokenizer.encode_chat(talks[at], add_generation_prompt=True) for at in active]
        for at, completion in zip(active, llm.generate(prompts, sampling), strict=True):
            last[at] = completion
            talks[at].append({"role": "assistant", "content": completion.text})
    return [last[at] for at in range(len(asked))]


def reading(engines: Mapping[str, LLM], haystack: Sequence[str], length: int) -> dict:
    """Questions on a paragraph: given alone, and in `length` tokens of other text, with the question after it."""
    questions = [q for name in ("everyday", "development") for q in read_questions(HERE / f"{name}.jsonl")]
    chosen = [q for q in questions if q.kind == "paragraphs" and "\n\n" in q.turns[0]]
    long = [replace(q, turns=(bury(q.turns[0], haystack, at, length),)) for at, q in enumerate(chosen)]
    return {
        "paragraph": everyday(engines, chosen),
        f"paragraph in {length} tokens": everyday(engines, long),
    }


def bury(text: str, haystack: Sequence[str], seed: int, length: int) -> str:
    """The paragraph somewhere in other text of about `length` tokens (4.3 characters each), the question last."""
    paragraph, question = text.rsplit("\n\n", 1)
    rng = np.random.default_rng([7, seed])
    document = "\n\n".join(haystack[int(at)] for at in rng.permutation(len(haystack))[:12])
    pieces = document[: int(length * 4.3)].split("\n\n")
    pieces.insert(int(rng.integers(len(pieces) + 1)), paragraph)
    return "\n\n".join([*pieces, question])


def typed_needles(maker: NeedleMaker, lengths: Sequence[int], trials: int, llm: LLM) -> Iterator[dict]:
    """Needles as a user types them: the model's own template with its system turn, and no answer begun."""
    out: dict[str, dict] = {}
    for length in lengths:
        for kind in ("number", "word", "uuid"):
            cases = needle_cases(maker, length, 1, trials, kind)
            out.setdefault(kind, {})[length] = compare(
                {"student": llm}, f"typed {kind} {length}", partial(recall, cases)
            )
            yield out


def needles(maker: NeedleMaker, options: argparse.Namespace, device: torch.device) -> Iterator[dict]:
    """The table so far, after each entry."""
    lengths = [int(length) for length in options.lengths.split(",")]
    is_gpu = device.type == "cuda"
    open_llm = partial(LLM, device=str(device), max_batch=16, cache_memory=4 << 30)
    student = open_llm(options.student, ctx=max(lengths), dtype="bfloat16" if is_gpu else "float32")
    both = {"student": student}
    if options.teacher_max:
        both["teacher"] = open_llm(options.teacher, ctx=options.teacher_max, dtype="float32")
    out: dict[str, dict] = {}
    for length in lengths:
        asked = both if length <= options.teacher_max else {"student": student}
        for kind, keys in (("number", 1), ("word", 1), ("uuid", 1), ("mixed", 4)):
            name = kind if keys == 1 else f"{kind}, {keys} keys"
            cases = needle_cases(maker, length, keys, options.trials, kind)
            out.setdefault(name, {})[length] = compare(asked, f"needle {name} {length}", partial(recall, cases))
            yield out


def needle_cases(
    maker: NeedleMaker, length: int, num_keys: int, trials: int, value: ValueChoice = "mixed"
) -> list[NeedleCase]:
    """Return needle prompts of the test split; prompt and answer fit into `length` tokens."""
    spec = NeedleSpec(length - NUM_ANSWERED, num_keys=num_keys, value=value, split="test")
    return [maker.make(spec, index) for index in range(trials)]


def recall(cases: Sequence[NeedleCase], llm: LLM) -> float:
    """The share of the needles whose value is in the greedy answer."""
    sampling = Sampling(temperature=0, max_tokens=NUM_ANSWERED)
    answers = llm.generate([list(case.token_ids) for case in cases], sampling)
    return sum(score(case.value, answer.text) == 1 for case, answer in zip(cases, answers, strict=True)) / len(cases)


def parse_options() -> argparse.Namespace:
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
    parser.add_argument("--every", type=int, default=1, help="ask only every so many-th everyday question")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--teacher-max", type=int, default=8192, help="longest needle asked of the teacher")
    parser.add_argument(
        "--student-only", action="store_true", help="everyday, development and reading: do not ask the teacher again"
    )
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def open_engines(
    options: argparse.Namespace, device: torch.device, ctx: int, has_teacher: bool = True
) -> dict[str, LLM]:
    """Return the engines of student and teacher in fp32."""
    paths = {"teacher": options.teacher, "student": options.student} if has_teacher else {"student": options.student}
    settings: dict[str, Any] = {"device": str(device), "dtype": "float32", "max_batch": 16, "cache_memory": 4 << 30}
    return {who: LLM(path, ctx=ctx, **settings) for who, path in paths.items()}


@torch.inference_mode()
def main() -> None:
    options = parse_options()
    parts = options.parts
    began, device = time.time(), pick_device(options.device)
    torch.set_float32_matmul_precision("high")
    models = {}
    if {"perplexity", "arc_easy"} & set(parts):
        models["teacher"] = load_for_training(options.teacher, device)
        models["student"] = load_for_training(options.student, device)
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
    save()
    if {"questions", "talk"} & set(parts):
        results |= conversations(open_engines(options, device, 1024), parts)
    save()
    sets = [part for part in ("everyday", "development") if part in parts]
    if sets or "reading" in parts:
        engines = open_engines(options, device, 8192 if "reading" in parts else 2048, not options.student_only)
        for part in sets:
            results[part] = everyday(engines, read_questions(HERE / f"{part}.jsonl")[:: options.every], NUM_SHOWN)
            save()
        if "reading" in parts:
            results["reading"] = reading(engines, haystack, 4096)
    save()
    if "typed" in parts:
        typed = NeedleMaker(encode, {"train": [], "test": haystack}, seed=11, wrap=chat_wrap(tokenizer), unopened=1.0)
        lengths = [int(length) for length in options.lengths.split(",")]
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        llm = LLM(options.student, device=str(device), ctx=max(lengths), dtype=dtype, max_batch=16)
        for found in typed_needles(typed, lengths, options.trials, llm):
            results["typed"] = {kind: {str(n): v for n, v in row.items()} for kind, row in found.items()}
            save()
    if "needle" in parts:
        for found in needles(maker, options, device):
            for name, by_length in found.items():
                known = results.setdefault("needle", {}).setdefault(name, {})
                known |= {str(length): entry for length, entry in by_length.items()}
            save()


if __name__ == "__main__":
    main()
