"""Stand-ins with the face of an LLM: one solves every task from the text of the prompt alone, one does not read it."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from sala.engine.requests import Call
from sala.engine.stream import Completion, Timings, Usage
from sala.lab.eval.data import read_data
from sala.lab.eval.tasks.counting import real_words
from sala.lab.eval.tasks.words import Wording, aurora, wordings, words_of
from sala.text.tokenizer import Tokenizer

Solve = Callable[[str], str]


class StandIn:
    """Answers by a function of the prompt's text; remembers what it was asked."""

    def __init__(self, directory: Path, solve: Solve, ctx: int = 1 << 21) -> None:
        self.tokenizer = Tokenizer.load(directory)
        self.ctx = ctx
        self.max_batch = 4
        self.prompts: list[str] = []
        self.boundaries: list[tuple[int, ...]] = []
        self._solve = solve

    def encode(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt)

    def generate(self, prompt: list[int], sampling: Any = None, **settings: Any) -> Completion:
        return self._complete(len(prompt), "")

    def answer(self, call: Call, on_progress: Any = None) -> Completion:
        ids: Any = call.prompt
        assert call.sampling.temperature == 0
        self.prompts.append(self.tokenizer.decode(ids, skip_special=False))
        self.boundaries.append(call.boundaries)
        on_progress(len(ids), len(ids))
        text = self._solve(self.prompts[-1])
        room = self.tokenizer.encode(text, bos=False)[: call.sampling.max_tokens]
        return self._complete(len(ids), self.tokenizer.decode(room))

    def many(self, calls: Iterable[Call], max_waiting: int) -> Iterator[tuple[Any, Completion]]:
        for call in calls:
            assert call.messages is not None
            self.prompts.append(call.messages[-1]["content"])
            yield call.key, self._complete(0, self._solve(self.prompts[-1]))

    def _complete(self, num_tokens: int, text: str) -> Completion:
        return Completion(text, [1], "stop", Usage(num_tokens, 1, 0), Timings(num_tokens, 1.0, 1, 1.0))


def guess(text: str) -> str:
    """Sees how long the prompt is, and nothing of what it says."""
    rng = np.random.default_rng(len(text))
    words = [real_words()[at] for at in rng.integers(len(real_words()), size=3).tolist()]
    city = words_of("city")[int(rng.integers(30))]
    return f" {rng.integers(10_000, 100_000)}, {rng.bytes(4).hex()}, {', '.join(words)}, {city}. Answer: {len(text)}"


def solve(prompt: str) -> str:
    """Reads the prompt as a person would who knows what kinds of questions there are."""
    for solver in (_count, _follow, _look_up, _read_lives, _reason):
        answer = solver(prompt)
        if answer is not None:
            return answer
    raise AssertionError(f"nothing is asked in …{prompt[-300:]!r}")


def _pattern(template: str, **gaps: str) -> re.Pattern[str]:
    """A template as a regular expression, with the gaps as groups."""
    text = re.escape(template)
    for name, gap in gaps.items():
        text = text.replace(re.escape("{" + name + "}"), gap, 1).replace(re.escape("{" + name + "}"), f"(?P={name})")
    return re.compile(text)


def _count(prompt: str) -> str | None:
    asked = re.search(r"\n\nWhich (\d) words (?:come|are used) most often in the (?:list|message)\?", prompt)
    if asked is None:
        return None
    body = prompt[: asked.start()].rpartition("\n\n")[2]
    return ", ".join(word for word, _ in Counter(body.split()).most_common(int(asked[1])))


def _follow(prompt: str) -> str | None:
    for telling in read_data("chain")["tellings"]:
        asked = _pattern(telling["question"], count=r"(?P<count>\d+)", value=r"(?P<value>\d+)").search(prompt)
        if asked is None:
            continue
        first = _pattern(telling["first"], name="(?P<name>[A-Z]+)", value=r"(?P<value>\d+)")
        then = _pattern(telling["then"], name="(?P<name>[A-Z]+)", other="(?P<other>[A-Z]+)")
        lines = sorted([*first.finditer(prompt), *then.finditer(prompt)], key=lambda found: found.start())
        held: dict[str, str] = {}
        for line in lines:
            groups = line.groupdict()
            held[groups["name"]] = groups.get("value") or held[groups["other"]]
        return ", ".join(name for name, value in held.items() if value == asked["value"])
    return None


def _look_up(prompt: str) -> str | None:
    """All values that the text gives for the keys of the question."""
    question = prompt[-1500:]
    for wording in (*wordings("test"), aurora()):
        asked = _pattern(wording.question, key=r"(?P<key>[A-Z]?[\w]+(?: \w+)?)").finditer(question)
        answers = [", ".join(_values(prompt, wording, found["key"])) for found in asked]
        if answers:
            return "\n".join(answers)
    return None


def _values(prompt: str, wording: Wording, key: str) -> list[str]:
    statement = _pattern(wording.statement.replace("{key}", key), value=r"(?P<value>[\w-]+)")
    return [found["value"] for found in statement.finditer(prompt)]


ABOUT = {"born": "town", "trade": "trade", "city": "city", "animal": "animal", "instrument": "instrument"}


def _read_lives(prompt: str) -> str | None:
    asked = re.search(r"from the passages only\. (.*\?)", prompt)
    if asked is None:
        return None
    field = next(field for word, field in ABOUT.items() if word in asked[1])
    name = re.search(r"([A-Z]\w+ [A-Z]\w+)", asked[1][3:])
    assert name is not None
    person = name[1]
    if "the teacher of" in asked[1]:
        person = _fact(prompt, person, "teacher")
    return _fact(prompt, person, field)


def _fact(prompt: str, name: str, field: str) -> str:
    """From the passage that opens with the birth of that person."""
    life = next(part for part in prompt.split("\n\n") if name in part.split(". ")[0])
    value = r"(?P<value>\w+ \w+)" if field == "teacher" else r"(?P<value>\w+)"
    given = name.split()[0]
    for sentence in read_data("reading")["sentences"][field]:
        found = _pattern(sentence.replace("{who}", given).replace("{name}", name), value=value).search(life)
        if found:
            return found["value"]
    raise AssertionError(f"nothing of {field} in {life}")


def _reason(prompt: str) -> str | None:
    for solver in (_reckon, _shop, _tank, _ages, _row):
        answer = solver(prompt)
        if answer is not None:
            return f"Let me see.\nAnswer: {answer}"
    return None


def _numbers(text: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", text)]


def _reckon(text: str) -> int | None:
    if not text.startswith("Begin with"):
        return None
    value = 0
    for step in text.split("Which number")[0].split(". "):
        number = (_numbers(step) or [2])[0]
        if step.startswith("Begin"):
            value = number
        elif step.startswith("Add"):
            value += number
        elif step.startswith("Take"):
            value -= number
        elif step.startswith(("Multiply", "Double")):
            value *= number
    return value


def _shop(text: str) -> int | None:
    if "crates of" not in text:
        return None
    a, b, c, d, paid = _numbers(text)
    return paid - a * b - c * d


def _tank(text: str) -> int | None:
    if "tank" not in text:
        return None
    start, flow, leak, hours = _numbers(text)
    return (start + hours * flow - hours * leak) // 2


def _ages(text: str) -> int | None:
    if "years old" not in text:
        return None
    age, times, less, years = _numbers(text)
    return age + times * age + (times * age - less) + 3 * years


def _row(text: str) -> str | None:
    if "stand in a row" not in text:
        return None
    names = re.findall(r"\w+", text.split(" stand in a row")[0].replace(" and ", ", "))
    orders = [order for order in permutations(names) if _holds(text, order)]
    assert len(orders) == 1, "the clues leave one order"
    place = next(at for at, word in enumerate(("first", "second", "third", "last")) if f"Who is {word}?" in text)
    return orders[0][place]


def _holds(text: str, order: tuple[str, ...]) -> bool:
    at = order.index
    return (
        all(at(a) < at(b) for a, b in re.findall(r"(\w+) stands before (\w+)\.", text))
        and all(abs(at(a) - at(b)) > 1 for a, b in re.findall(r"(\w+) does not stand next to (\w+)\.", text))
        and all(0 < at(a) < len(order) - 1 for a in re.findall(r"(\w+) is neither first nor last\.", text))
    )
