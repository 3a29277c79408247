"""NoLiMa: needles that share no word with the question. Needles, questions and books are those of its authors."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from sala.lab.eval.official import scores
from sala.lab.eval.official.case import Question
from sala.lab.eval.official.data import HubDataset, need
from sala.lab.eval.official.request import BenchmarkRequest, Progress
from sala.lab.eval.tasks.haystack import split_sentences

TASKS = ("onehop", "twohop")
DEPTHS = 26  # places of the needle, evenly from the start to the end
SOURCE = "https://huggingface.co/datasets/amodaresi/NoLiMa/resolve/main"
MAX_TOKENS = 192


def nolima(request: BenchmarkRequest, progress: Progress) -> Iterator[Question]:
    """Yield questions whose answer follows from a needle in a book by what is known of the world."""
    needles = request.data.object("needle_set", f"{SOURCE}/needlesets/needle_set.json")
    books = request.data.texts(
        "haystack", HubDataset("amodaresi/NoLiMa", files="haystack/rand_shuffle/*.txt", is_text=True)
    )
    tests = [(entry, name, test) for entry in needles for name, test in need(entry, "tests")[0].items()]
    for length in request.lengths:
        for task in request.tasks:
            progress(task, length)
            asked = [one for one in tests if task in need(one[0], "questions")[0]]
            random.Random(repr((request.seed, task, length))).shuffle(asked)  # noqa: S311
            for number, (entry, name, test) in enumerate(asked[: request.limits[length]]):
                rng = random.Random(repr((request.seed, task, length, number)))  # noqa: S311
                yield _question(request, task, length, number, entry, f"{entry.get('id')} {name}", test, books, rng)


def _question(
    request: BenchmarkRequest, task: str, length: int, number: int, entry: dict[str, Any], name: str,
    test: dict[str, Any], books: list[str], rng: random.Random,
) -> Question:  # fmt: skip
    needle, frame = need(entry, "needle", "task_template")
    question = entry["questions"][task]
    character = rng.choice(entry["character_set"]) if entry.get("character_set") else ""
    for at, value in enumerate(need(test, "input_args")[0], 1):
        needle, question = (text.replace(f"{{{at}}}", str(value)) for text in (needle, question))
    needle, question = (text.replace("{CHAR}", character) for text in (needle, question))
    answers = tuple(map(str, test.get("gold_answers") or [character]))
    depth = rng.randrange(DEPTHS) / (DEPTHS - 1)
    system = entry.get("system_prompt") or ""
    around = request.count(frame + question + needle + system) + MAX_TOKENS + 32
    sentences = _cut(request, rng.choice(books), length - around)
    place = round(depth * len(sentences))
    text = "".join([*sentences[:place], f" {needle}", *sentences[place:]]).strip()
    filled = frame.replace("{haystack}", text).replace("{question}", question)
    whole = f"{system}\n\n{filled}" if system else filled
    score = partial(scores.contains_any, answers)
    facts = {"test": name, "depth": round(100 * depth)}
    return Question(task, length, number, whole, answers, score, MAX_TOKENS, facts=facts)


def _cut(request: BenchmarkRequest, book: str, num_tokens: int) -> list[str]:
    """Return the first sentences of a book that fit; a book that is too short is repeated."""
    ids = request.tokenizer.encode_many([book])[0]
    text = book if len(ids) >= num_tokens else f"{book}\n" * (num_tokens // max(1, len(ids)) + 1)
    kept, total = list[str](), 0
    for sentence in split_sentences(text):
        total += len(request.tokenizer.encode(sentence, bos=False))
        if total > num_tokens:
            break
        kept.append(sentence)
    return kept
