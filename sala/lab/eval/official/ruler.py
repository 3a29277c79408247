"""RULER's thirteen tasks (arXiv 2404.06654), made for any tokenizer and length.

The cases are those of lm-eval 0.4.13 for the same seed: random numbers are taken in its order, one generator for each
task and length, so they equal a run of lm-eval with this task and this length alone. What a case consists of does not
depend on how many cases are made.
"""

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count as count_from
from itertools import pairwise

import numpy as np

from sala.errors import InputError, MissingExtra
from sala.lab.eval.official.texts import Essays, QuestionDocuments, WordPairs, read_words

Count = Callable[[str], int]  # the tokens of a text, with those that the tokenizer adds
SHUFFLE_SEED = 42
NUMPY_SEED = 1234  # of lm-eval, if none is given
SHORT = 4096  # tokens below which units are smaller
LONG = 20_000  # characters below which every text is encoded
DRIFT = 1.03  # by how much the tokens of texts of equal length may differ
FILLER_DRIFT = 1.003  # the same where all but a few needles is the same text
GROWTH = 2.0  # by how much the tokens per character of what is added may exceed those of the text so far
DEPTHS = [int(one) for one in np.round(np.linspace(0, 100, num=40))]


@dataclass(frozen=True)
class RulerCase:
    """`input` is the question with its text, `opening` begins the answer, and `outputs` are what it must contain."""

    index: int
    input: str
    outputs: tuple[str, ...]
    opening: str
    length: int  # tokens of the input and of the longest answer


@dataclass(frozen=True)
class NeedleTask:
    """The text that hides the needles (repeat, essay or needle), and how many needles of which kind."""

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def has_one_answer(self) -> bool:
        return self.num_queries * self.num_values == 1


NEEDLES = {
    "niah_single_1": NeedleTask("repeat"),
    "niah_single_2": NeedleTask("essay"),
    "niah_single_3": NeedleTask("essay", values="uuids"),
    "niah_multikey_1": NeedleTask("essay", num_keys=4),
    "niah_multikey_2": NeedleTask("needle"),
    "niah_multikey_3": NeedleTask("needle", keys="uuids", values="uuids"),
    "niah_multiquery": NeedleTask("essay", num_keys=4, num_queries=4),
    "niah_multivalue": NeedleTask("essay", num_values=4),
}
QUESTIONS = {"qa_1": "squad", "qa_2": "hotpotqa"}
MAX_TOKENS = {**dict.fromkeys(NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50, **dict.fromkeys(QUESTIONS, 32)}
TASKS = tuple(MAX_TOKENS)


class Ruler:
    """Makes cases. `essays` and `documents` are read when a task first needs them."""

    def __init__(
        self,
        count: Count,
        prompts: dict[str, str],
        essays: Callable[[], Essays],
        documents: Callable[[str], QuestionDocuments],
        seed: int = 0,
    ) -> None:
        self.prompts, self.essays, self.documents = prompts, essays, documents
        self._count, self._seed = count, seed

    def cases(self, task: str, num_tokens: int) -> Iterator[RulerCase]:
        """Yield the cases of a task, without end except for questions about documents.

        Raise InputError if `num_tokens` are too few.
        """
        rng = random.Random(self._seed)  # noqa: S311 - lm-eval's generator
        is_filler = task == "vt" or (task in NEEDLES and NEEDLES[task].haystack != "needle")
        fit = Fit(self._count, num_tokens, FILLER_DRIFT if is_filler else DRIFT)
        if task in NEEDLES:
            return _needles(self, NEEDLES[task], rng, fit)
        if task in QUESTIONS:
            return _questions(self, self.documents(QUESTIONS[task]), rng, fit)
        if task == "vt":
            numbers = np.random.RandomState(self._seed or NUMPY_SEED)
            return _chains(self, rng, numbers, fit)
        return {"cwe": _common, "fwe": _frequent}[task](self, rng, fit)


class Fit:
    """Says whether growing texts of one task fit. A text that is surely too short to reach the limit is not encoded.

    The last text that was encoded bounds the tokens of the next ones: what they have in addition may have GROWTH times
    as many tokens per character. So about as many texts are encoded as the distance to the limit can be halved.
    """

    def __init__(self, count: Count, num_tokens: int, drift: float = DRIFT) -> None:
        self.count, self.num_tokens, self._drift = count, num_tokens, drift
        self._chars, self._tokens = 0, 0

    def is_short(self, num_chars: int, more: int) -> bool:
        """Return whether a text of so many characters, and `more` tokens, are surely below the limit."""
        if not self._chars or num_chars <= LONG:
            return False
        added = max(0, num_chars - self._chars) * self._tokens / self._chars
        return self._tokens * self._drift + added * GROWTH + more < self.num_tokens

    def estimate(self, text: str, more: int) -> int:
        """Return the tokens of a text; none if they and `more` are surely below the limit."""
        if self.is_short(len(text), more):
            return 0
        self._chars, self._tokens = len(text), self.count(text)
        return self._tokens

    def too_short(self, task: str) -> InputError:
        message = f"are too short for {task}: {self.num_tokens:,} tokens"
        return InputError("lengths", message, f"begin with {max(2 * self.num_tokens, 1024):,}")


# Needles


class NeedleText:
    """The texts that hide needles. A unit is a word of the essays, a line of noise, or another needle."""

    def __init__(self, ruler: Ruler, spec: NeedleTask, rng: random.Random) -> None:
        self.prompts, self.spec, self.rng = ruler.prompts, spec, rng
        self.essays = ruler.essays() if spec.haystack == "essay" else None

    def token(self, kind: str) -> str:
        """Return a random key or value."""
        if kind == "numbers":
            return str(self.rng.randint(10**6, 10**7 - 1))
        if kind == "words":
            return str(self.rng.choice(_word_pairs()))
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def needle(self, key: str, value: str) -> str:
        return self.prompts["needle"].format(type_needle_v=self.spec.values, key=key, value=value)

    def num_chars(self, num_units: int) -> int:
        """Return about how many characters a text has; none where it is quick to write."""
        return self.essays.num_chars(num_units) if self.essays is not None else 0

    def draw(self, num_units: int) -> "DrawnNeedles":
        """Take the random numbers of a text."""
        spec, keys, values, needles = self.spec, list[str](), list[list[str]](), list[str]()
        for _ in range(spec.num_keys):
            keys.append(self.token(spec.keys))
            values.append([])
            for _ in range(spec.num_values):
                values[-1].append(self.token(spec.values))
                needles.append(self.needle(keys[-1], values[-1][-1]))
        random.Random(SHUFFLE_SEED).shuffle(needles)  # noqa: S311
        lines, places = self._draw_places(needles, num_units)
        asked = self.rng.sample(range(spec.num_keys), spec.num_queries)
        return DrawnNeedles(keys, values, needles, lines, places, asked)

    def write(self, num_units: int, drawn: "DrawnNeedles") -> tuple[str, list[str], str]:
        """Return a question with its text, the answers, and the keys that are asked for."""
        spec = self.spec
        text = self._hide(drawn, num_units)
        names = [drawn.keys[at] for at in drawn.asked]
        query = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
        template, kind = self.prompts["niah"], spec.values
        if spec.has_one_answer:
            for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
                template = template.replace(plural, single)
            kind = kind[:-1]
        question = template.format(type_needle_v=kind, context=text, query=query)
        return question, [value for at in drawn.asked for value in drawn.values[at]], query

    def _draw_places(self, needles: list[str], num_units: int) -> tuple[list[str], list[int]]:
        """Return the lines that needles are hidden among, and their places; of essays none, and depths."""
        if self.essays is not None:
            return [], self.rng.sample(DEPTHS, len(needles))
        if self.spec.haystack == "repeat":
            lines = [self.prompts["noise"]] * num_units
        else:
            lines = [self.needle(self.token(self.spec.keys), self.token(self.spec.values)) for _ in range(num_units)]
        return lines, sorted(self.rng.sample(range(num_units), len(needles)), reverse=True)

    def _hide(self, drawn: "DrawnNeedles", num_units: int) -> str:
        if self.essays is not None:
            sentences = self.essays.sentences(num_units)
            places = sorted(int(len(sentences) * (depth / 100)) for depth in drawn.places)
            parts = []
            for begin, end, needle in zip([0, *places], places, drawn.needles, strict=False):
                parts += [" ".join(sentences[begin:end]), needle]
            return " ".join([*parts, " ".join(sentences[places[-1] :])])
        lines = [*drawn.lines]
        for place, needle in zip(drawn.places, drawn.needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


@dataclass(frozen=True)
class DrawnNeedles:
    """The random parts of a text: keys with their values, needles in order, and where they are hidden."""

    keys: list[str]
    values: list[list[str]]
    needles: list[str]
    lines: list[str]
    places: list[int]
    asked: list[int]


@cache
def _word_pairs() -> WordPairs:
    words = read_words()
    return WordPairs(words["adjective"], words["noun"])


def _needles(ruler: Ruler, spec: NeedleTask, rng: random.Random, fit: Fit) -> Iterator[RulerCase]:
    haystack, room = NeedleText(ruler, spec, rng), 128
    step = 500 if spec.haystack == "essay" else 25 if fit.num_tokens >= SHORT else 5
    num_needles = spec.num_keys * spec.num_values
    num_units, total = max(step, num_needles), 0
    while total + room < fit.num_tokens:
        drawn = haystack.draw(num_units)
        if fit.is_short(haystack.num_chars(num_units), room):
            num_units += step
            continue
        text, answers, _ = haystack.write(num_units, drawn)
        total = fit.estimate(" ".join([text, *answers]), room)
        if total + room > fit.num_tokens:
            num_units -= step
            break
        num_units += step
    num_units = max(num_units, num_needles)
    opening = ruler.prompts["niah_one" if spec.has_one_answer else "niah_many"]
    kind = spec.values[:-1] if spec.has_one_answer or opening.count("{kind}s") else spec.values
    for index in count_from():
        for units in range(num_units, 0, -step):
            try:
                text, answers, query = haystack.write(units, haystack.draw(units))
            except ValueError:  # fewer units than needles
                continue
            length = fit.count(text) + room
            if length <= fit.num_tokens:
                yield RulerCase(index, text, tuple(answers), opening.format(kind=kind, query=query), length)
                break
        else:
            raise fit.too_short("needles")


# Chains of variables


def _chains(ruler: Ruler, rng: random.Random, numbers: np.random.RandomState, fit: Fit) -> Iterator[RulerCase]:
    """Yield texts with a chain of four assignments, each after an example with other names."""
    writer = ChainWriter(ruler.prompts, rng, numbers)
    small = Fit(fit.count, 500)
    first, variables, _ = writer.make(writer.most(small, 5, 0, True), small, 5, 0, True)
    example = f"{first} {' '.join(variables)}\n\n"
    taken = fit.count(example)
    most = writer.most(fit, 10, taken, False)
    template, opening = ruler.prompts["vt"], ruler.prompts["vt_opening"]
    for index in count_from():
        text, variables, length = writer.make(most, fit, 10, taken, False)
        cut = text.index(template[:20])
        text = f"{text[:cut]}{writer.rename(example)}\n\n{text[cut:]}"
        end = text.rfind(opening[:40])
        yield RulerCase(index, text[:end], tuple(variables), text[end:].strip(), length)


@dataclass(frozen=True)
class DrawnChain:
    """The random parts of a text: variables, their value, the assignments, and the lines they are hidden among."""

    names: list[str]
    value: str
    chain: list[str]
    lines: list[str]
    places: list[int]


class ChainWriter:
    ROOM = 30  # tokens of an answer
    HOPS = 4

    def __init__(self, prompts: dict[str, str], rng: random.Random, numbers: np.random.RandomState) -> None:
        self.prompts, self.rng, self.numbers = prompts, rng, numbers

    def name(self, size: int) -> str:
        return "".join(self.rng.choices(string.ascii_uppercase, k=size))

    def draw(self, num_lines: int, is_example: bool) -> "DrawnChain":
        """Take the random numbers of a text."""
        names = [self.name(3 if is_example else 5) for _ in range(self.HOPS + 1)]
        while len(set(names)) <= self.HOPS:
            names.append(self.name(3 if is_example else 5))
        names = names[: self.HOPS + 1]
        value = str(self.numbers.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
        lines = [self.prompts["noise"] + "\n"] * num_lines
        if len(lines) <= len(chain):
            parts = [part for line in lines for part in line.split(".")]
            lines = [f"{part}." if part.strip() else part for part in parts]
            if len(lines) <= len(chain):
                chain = chain[: len(lines) - 1]
        places = sorted(self.rng.sample(range(len(lines)), len(chain)))
        return DrawnChain(names, value, chain, lines, places)

    def write(self, drawn: "DrawnChain") -> tuple[str, list[str]]:
        """Return a question with its text, and the variables that hold the value."""
        lines = [*drawn.lines]
        for shift, (place, link) in enumerate(zip(drawn.places, drawn.chain, strict=True)):
            lines.insert(place + shift, link)
        text = " ".join(lines).replace(". \n", ".\n")
        template = self.prompts["vt"] + self.prompts["vt_opening"]
        return template.format(context=text, query=drawn.value, num_v=self.HOPS + 1), drawn.names

    def most(self, fit: Fit, step: int, taken: int, is_example: bool) -> int:
        """Return how many lines of noise fit beside `taken` tokens of an example."""
        num_lines, total, more = step, 0, self.ROOM + taken
        while total + more < fit.num_tokens:
            drawn = self.draw(num_lines, is_example)
            if fit.is_short(num_lines * (len(self.prompts["noise"]) + 1), more):
                num_lines += step
                continue
            text, names = self.write(drawn)
            total = fit.estimate(f"{text} {names}", more)
            if total + more > fit.num_tokens:
                num_lines -= step
                break
            num_lines += step
        return num_lines

    def make(self, num_lines: int, fit: Fit, step: int, taken: int, is_example: bool) -> tuple[str, list[str], int]:
        """Return a question that fits, its variables and its length."""
        while num_lines > 0:
            text, names = self.write(self.draw(num_lines, is_example))
            length = fit.count(text) + self.ROOM + taken
            if length <= fit.num_tokens:
                return text, names, length
            num_lines -= step
        raise fit.too_short("vt")

    def rename(self, example: str) -> str:
        """Return the example with other variables."""
        mark = self.prompts["vt_opening"][-10:]
        for name in example[example.index(mark) + len(mark) :].split():
            example = example.replace(name, self.name(len(name)))
        return example


# Words


def _common(ruler: Ruler, rng: random.Random, fit: Fit) -> Iterator[RulerCase]:
    """Yield lists in which ten words occur more often than all others."""
    order, room, step = random.Random(SHUFFLE_SEED), 120, 10  # noqa: S311
    words = sorted({word for kind in ("noun", "adjective", "verb") for word in read_words()[kind]})
    order.shuffle(words)
    is_short = fit.num_tokens < SHORT
    template = ruler.prompts["cwe"] + ruler.prompts["cwe_opening"]

    def numbered(some: Sequence[str]) -> str:
        return " ".join(f"{number}. {word}" for number, word in enumerate(some, 1))

    def write(num_words: int, often: int, rarely: int) -> tuple[str, list[str]]:
        chosen = rng.sample(words, num_words)
        listed = chosen[:10] * often + chosen[10:] * rarely
        order.shuffle(listed)
        return template.format(context=numbered(listed), query=""), chosen[:10]

    def pair(num_words: int) -> tuple[str, str, list[str]]:
        example, answer = write(*((20, 3, 1) if is_short else (40, 10, 3)))
        return example + numbered(answer), *write(num_words, *((6, 1) if is_short else (30, 3)))

    num_words, total = step, 0
    while total + room < fit.num_tokens:
        example, text, answer = pair(num_words)
        total = fit.estimate(f"{example}\n{text} {numbered(answer)}", room)
        if total + room > fit.num_tokens:
            num_words -= step
            break
        num_words += step
        if num_words > len(words):
            num_words = len(words)
            break
    opening = ruler.prompts["cwe_opening"]
    for index in count_from():
        used = num_words
        while True:
            if used < step:
                raise fit.too_short("cwe")
            _, text, answer = pair(used)
            length = fit.count(text) + room
            if length <= fit.num_tokens:
                break
            used -= step
        yield RulerCase(index, text[: text.rfind(opening)].strip(), tuple(answer), opening.strip(), length)


def _frequent(ruler: Ruler, rng: random.Random, fit: Fit) -> Iterator[RulerCase]:
    """Yield coded texts: the n-th word occurs n² times less often than the first, which is noise."""
    size, num_tokens = 6, fit.num_tokens
    vocab_size, step = num_tokens // 50, max(1, num_tokens // 32)
    template = ruler.prompts["fwe"] + ruler.prompts["fwe_opening"]
    if vocab_size < 4:
        raise fit.too_short("fwe")

    def vocabulary() -> list[str]:
        words = ["".join(rng.choices(string.ascii_lowercase, k=size)) for _ in range(vocab_size)]
        while len(set(words)) < vocab_size:
            words.append("".join(rng.choices(string.ascii_lowercase, k=size)))
        words = sorted(set(words))
        random.Random(SHUFFLE_SEED).shuffle(words)  # noqa: S311
        return ["...", *words[1:]]

    def write(words: Sequence[str], num_words: int) -> str:
        ranks = np.arange(1, len(words) + 1)
        counts = (num_words * (ranks**-2.0) / (math.pi**2 / 6)).astype(int).tolist()
        text = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
        random.Random(SHUFFLE_SEED).shuffle(text)  # noqa: S311
        return template.format(context=" ".join(text), query="")

    words, most = vocabulary(), num_tokens // size
    while fit.count(write(words, most)) < num_tokens:
        most += step
    most -= step
    opening = ruler.prompts["fwe_opening"]
    for index in count_from():
        words, num_words = vocabulary(), most
        text = write(words, num_words)
        while (length := fit.count(text)) > num_tokens:
            num_words -= step
            if num_words <= 0:
                raise fit.too_short("fwe")
            text = write(words, num_words)
        yield RulerCase(index, text[: text.rfind(opening)].strip(), tuple(words[1:4]), opening.strip(), length + 50)


# Questions about documents


def _questions(ruler: Ruler, data: QuestionDocuments, rng: random.Random, fit: Fit) -> Iterator[RulerCase]:
    room, step = 32, 10
    documents = [*data.texts]

    def write(number: int, num_docs: int) -> str:
        question = data.questions[number]
        # where all documents fit, lm-eval shuffles its own list, so the next text begins with that order
        chosen = documents if num_docs >= len(documents) else data.choose(documents, question, num_docs, rng)
        random.Random(SHUFFLE_SEED).shuffle(chosen)  # noqa: S311
        numbered = [ruler.prompts["qa_document"].format(i=at, document=text) for at, text in enumerate(chosen, 1)]
        return ruler.prompts["qa"].format(context="\n\n".join(numbered), query=question.text)

    num_docs, total = step, 0
    while total + room < fit.num_tokens:
        total = fit.estimate(f"{write(0, num_docs)} {[*data.questions[0].answers]}", room)
        if total + room > fit.num_tokens:
            num_docs -= step
            break
        num_docs += step
        if num_docs > len(data.texts):
            num_docs = len(data.texts)
            break
    num_docs = max(num_docs, 1)
    for index, question in enumerate(data.questions):
        least = len(question.needed)
        for used in (*range(max(num_docs, least), least, -step), least):
            text = write(index, used)
            length = fit.count(text) + room
            if length <= fit.num_tokens:
                yield RulerCase(index, text, question.answers, ruler.prompts["qa_opening"], length)
                break
        else:
            continue  # its own documents do not fit; lm-eval leaves it out as well


def need_wonderwords() -> None:
    """Raise MissingExtra if the word lists of RULER are not installed."""
    try:
        import wonderwords  # noqa: F401
    except ImportError:
        raise MissingExtra("wonderwords", "eval") from None
