"""Where an answer comes from: passages of the prompt that the model attended to, and quotes that are looked up there.

`PromptText` is prepared with the request: the text of the prompt and where messages and documents lie in it. When the
answer is complete, `find_sources` turns the weights of blocks into passages.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

from sala.text.answer import MAX_HELD, REPLACEMENT
from sala.text.folding import FoldedText
from sala.text.frames import FramedDocument, Place, find_documents
from sala.text.quotes import SearchBudget, TooMuchWorkError, find_quotes, look_up, split_quote
from sala.text.tokenizer import Tokenizer

RUN = 64  # tokens that are decoded together
MAX_PASSAGES = 10
MAX_BLOCKS = 64  # the heaviest, of which passages are made
LEAST = 0.2  # from the weight of a usual block (0) to the heaviest (1); lighter blocks are left out
QUESTION = 64  # tokens at the end of a prompt, which every answer attends to
MAX_ADDED = 240  # characters that are shown before and after a passage so that it begins and ends with a sentence
END = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？][”’」』）]*|\n\s*")  # the end of a sentence or a line
GAP = re.compile(r"\s+")
MAX_MARKS = 4  # characters that end a sentence


Locate = Callable[[int], Place | None]


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of the prompt that the answer attended to.

    - weight: its share of all weight that was gathered
    - tokens: of the prompt, from the first to the one after the last
    - message, start, end: the message in which it stands and the characters of its text, if they were given as text
    - file, place: of a document, e.g. "page 3, lines 10-14"
    """

    text: str
    weight: float
    tokens: tuple[int, int]
    message: int | None = None
    start: int | None = None
    end: int | None = None
    file: str | None = None
    place: str | None = None


@dataclass(frozen=True, slots=True)
class Quote:
    """A quotation in the answer, and where in the prompt it stands, if it does; `answer` are characters."""

    text: str
    answer: tuple[int, int]
    found: bool
    message: int | None = None
    start: int | None = None
    end: int | None = None
    file: str | None = None
    place: str | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """Passages, heaviest first, and the quotes of the answer; `gathered` is what the backend summed up."""

    passages: list[Passage] = field(default_factory=list)
    quotes: list[Quote] = field(default_factory=list)
    gathered: Any = field(default=None, repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        return {"passages": list(map(asdict, self.passages)), "quotes": [_quote_as_json(one) for one in self.quotes]}


def _quote_as_json(quote: Quote) -> dict[str, Any]:
    found = asdict(quote)
    return found if quote.found else {name: found[name] for name in ("text", "answer", "found")}


@dataclass(frozen=True, slots=True)
class Region:
    """Characters of the prompt: the text of a message from `offset` on, with `documents`, or attached ones (`locate`).

    The characters of `documents` are those of the region.
    """

    start: int
    end: int
    message: int | None
    offset: int = 0
    first_token: int = 0
    locate: Locate | None = None
    documents: tuple[FramedDocument, ...] = field(default=(), compare=False)

    @property
    def has_documents(self) -> bool:
        return self.locate is not None or bool(self.documents)

    def document_at(self, char: int) -> FramedDocument | None:
        at = bisect_right(self.documents, char, key=lambda one: one.start) - 1
        return self.documents[at] if at >= 0 and char < self.documents[at].end else None

    def place(self, text: str, char: int) -> Place | None:
        """Return where a character of the region's text comes from, if it is of a document."""
        document = self.document_at(char)
        return None if document is None else document.place(text, char)


@dataclass(frozen=True, slots=True)
class Owner:
    """What a token belongs to: a message's own text, or a file."""

    region: Region
    file: str | None


class PromptText:
    """The text of a prompt, decoded from its tokens in runs, and the regions of its messages and documents."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]] = (),
        attached: range | None = None,
        locate: Locate | None = None,
    ) -> None:
        """`attached` are the tokens of documents, which the first message of the user begins with."""
        self._tokenizer, self._ids = tokenizer, ids
        self._firsts = list(range(0, len(ids), RUN))  # the first tokens of the runs
        self._runs = tokenizer.decode_runs([ids[at : at + RUN] for at in self._firsts])
        self._join_characters()
        self._starts = list(accumulate(map(len, self._runs), initial=0))
        self._known: dict[int, list[int]] = {}
        self._folded: dict[int, FoldedText] = {}  # by where a region starts
        self.text = "".join(self._runs)
        self.regions = list(self._find_regions(messages, attached, locate))

    def __len__(self) -> int:
        return len(self._ids)

    def offset_of(self, token: int) -> int:
        """Return the place in the text where a token begins."""
        if token >= len(self._ids):
            return len(self.text)
        run = bisect_right(self._firsts, token) - 1
        rest = token - self._firsts[run]
        return self._starts[run] + (self._places(run)[rest] if rest else 0)

    def document_ends(self, most: int) -> list[int]:
        """Return after how many tokens documents in messages end: of all, or of `most` that lie evenly in the text."""
        ends = [region.start + one.end for region in self.regions for one in region.documents]
        if len(ends) > most:
            ends = [ends[max(0, bisect_right(ends, ends[-1] * part // most) - 1)] for part in range(1, most + 1)]
        return sorted({self.token_at(end) for end in ends})

    def token_at(self, char: int) -> int:
        """Return the token that a character belongs to."""
        run = min(bisect_right(self._starts, char) - 1, len(self._runs) - 1)
        while not self._runs[run] and run:  # tokens without text
            run -= 1
        return self._firsts[run] + max(0, bisect_right(self._places(run), char - self._starts[run]) - 1)

    def _places(self, run: int) -> list[int]:
        """Return where the tokens of a run begin in its text."""
        if run not in self._known:
            ids = self._ids_of(run)
            texts = self._tokenizer.decode_runs([ids[:count] for count in range(1, len(ids))])
            self._known[run] = [0, *(len(text.rstrip(REPLACEMENT)) for text in texts)]
        return self._known[run]

    def _ids_of(self, run: int) -> Sequence[int]:
        return self._ids[self._firsts[run] : ([*self._firsts[run + 1 : run + 2], len(self._ids)])[0]]

    def _join_characters(self) -> None:
        """Let runs begin between two characters: the first bytes of one may be the last tokens of the run before."""
        for run in range(len(self._runs) - 1):
            if not self._runs[run].endswith(REPLACEMENT):
                continue
            ids = self._ids_of(run)
            shorter = self._tokenizer.decode_runs([ids[:-count] for count in range(1, MAX_HELD)])
            whole = next((at for at, text in enumerate(shorter) if text and not text.endswith(REPLACEMENT)), None)
            if whole is not None:
                self._firsts[run + 1] -= whole + 1
                self._runs[run] = shorter[whole]
                (self._runs[run + 1],) = self._tokenizer.decode_runs([self._ids_of(run + 1)])

    def _find_regions(
        self, messages: Sequence[Mapping[str, Any]], attached: range | None, locate: Locate | None
    ) -> Iterator[Region]:
        """Yield regions in order. Messages that the template does not print as they are have none."""
        at = 0
        for index, message in enumerate(messages):
            if attached is not None and message.get("role") == "user":
                start, end = self.offset_of(attached.start), self.offset_of(attached.stop)
                yield Region(start, end, index, 0, attached.start, locate)
                at, attached = end, None
            content = message.get("content") or ""
            bare = content.strip()
            start = self.text.find(content, at)
            offset = 0
            if start < 0:
                start, offset = self.text.find(bare, at), len(content) - len(content.lstrip())
            if bare and start >= 0:
                at = start + len(content if not offset and self.text.startswith(content, start) else bare)
                yield Region(start, at, index, offset, documents=tuple(find_documents(self.text[start:at])))
        if not messages:
            yield Region(0, len(self.text), None)

    def owner(self, token: int) -> Owner | None:
        """Return what a token belongs to; None for what the template or the frame of a document adds."""
        char = self.offset_of(token)
        at = bisect_right(self.regions, char, key=lambda region: region.start) - 1
        if at < 0 or char >= self.regions[at].end:
            return None
        region = self.regions[at]
        if region.locate is None:
            document = region.document_at(char - region.start)
            if document is None:
                return Owner(region, None)
            return Owner(region, document.name) if document.section_at(char - region.start) is not None else None
        place = region.locate(token - region.first_token)
        return None if place is None else Owner(region, place.name)

    def passage(self, owner: Owner, first: int, end: int, weight: float) -> Passage:
        """Return the tokens `first` to `end`, which have one owner, as a passage of whole sentences."""
        region = owner.region
        start, stop = max(self.offset_of(first), region.start), min(self.offset_of(end), region.end)
        start, stop = self._whole(start, stop, region)
        if start < stop:
            first, end = self.token_at(start), self.token_at(stop - 1) + 1
        return Passage(self.text[start:stop], weight, (first, end), **self._where(region, start, stop, first, end - 1))

    def _whole(self, start: int, stop: int, region: Region) -> tuple[int, int]:
        """Extend a piece to whole sentences within its lines, or to whole words where sentences are long."""
        piece = self.text[start:stop]
        if not piece.strip():
            return start, stop
        start, stop = start + len(piece) - len(piece.lstrip()), stop - len(piece) + len(piece.rstrip())
        low, high = max(region.start, start - MAX_ADDED), min(region.end, stop + MAX_ADDED)
        begins = [found.end() for found in END.finditer(self.text, low, start)]
        words = [found.end() for found in GAP.finditer(self.text, low, start)]
        ends = (found.end() for found in END.finditer(self.text, max(start, stop - MAX_MARKS), high))
        gaps = (found.start() for found in GAP.finditer(self.text, stop, high))
        first = begins[-1] if begins else low if low == region.start else words[-1] if words else start
        last = next((end for end in ends if end >= stop), high if high == region.end else next(gaps, stop))
        return first, first + len(self.text[first:last].rstrip())

    def _where(self, region: Region, start: int, stop: int, first: int, last: int) -> dict[str, Any]:
        """Return message, characters, file and place of a piece of a region."""
        if region.locate is not None:
            places = [region.locate(token - region.first_token) for token in (first, last)]
            return {"message": region.message, **_file_and_place(places)}
        if region.message is None:
            return {}
        moved = region.offset - region.start
        where = {"message": region.message, "start": start + moved, "end": stop + moved}
        text = self.text[region.start : region.end]
        return where | _file_and_place([region.place(text, at - region.start) for at in (start, max(start, stop - 1))])

    def find(self, text: str) -> dict[str, Any] | None:
        """Return where a text stands in documents or messages, or None; see `text.folding` for what doesn't count."""
        try:
            return self.look_up(text, self.work())
        except TooMuchWorkError:
            return None

    def look_up(self, text: str, work: SearchBudget) -> dict[str, Any] | None:
        """Like `find`, in at most this much work; raises TooMuchWorkError."""
        pieces = split_quote(text)
        for region in sorted(self.regions, key=lambda region: not region.has_documents) if pieces else ():
            found = look_up(pieces, self._fold(region), work)
            if found is not None:
                start, stop = (region.start + at for at in found)
                tokens = (0, 0) if region.locate is None else (self.token_at(start), self.token_at(stop - 1))
                return self._where(region, start, stop, *tokens)
        return None

    def work(self) -> SearchBudget:
        """Return what looking up the quotes of one answer may cost."""
        return SearchBudget.for_text(len(self.text))

    def _fold(self, region: Region) -> FoldedText:
        """Return the text of a region as it is searched, made when the first quote is looked up there."""
        if region.start not in self._folded:
            self._folded[region.start] = FoldedText(self.text[region.start : region.end])
        return self._folded[region.start]


def _file_and_place(places: Sequence[Place | None]) -> dict[str, str | None]:
    """Return the file and the place of a passage by the places of its ends; nothing where these are of no document."""
    known = [place for place in places if place is not None]
    return {"file": known[0].name, "place": place_of(known)} if known else {}


def place_of(places: Sequence[Place]) -> str | None:
    """Return the place of a passage by that of its first and its last token: "page 3, lines 10-14"."""
    if not places:
        return None
    first, last = places[0], places[-1]
    lines = [place.number for place in (first, last) if place.number is not None]
    if first.label != last.label:
        return " to ".join(filter(None, (place_of([first]), place_of([last])))) or None
    if len(lines) < 2 or lines[0] == lines[1]:
        line = f"{first.unit} {lines[0]}" if lines else ""
    else:
        line = f"{first.unit}s {lines[0]}-{lines[1]}"
    return ", ".join(part for part in (first.label, line) if part) or None


def find_sources(prompt: PromptText | None, prompt_len: int, gathered: Any, answer: str) -> Sources:
    """Return the passages with the heaviest blocks, and the quotes of an answer.

    `gathered` is a `protocol.Gathered`, or None where the model has no sparse layers. Without a tokenizer there is no
    `prompt`, and passages have no text.
    """
    quotes = [] if prompt is None else list(_look_up_all(prompt, answer))
    if gathered is None:
        return Sources([], quotes)
    weights = telling(gathered.by_block(), prompt_len, gathered.block_size, gathered.num_first)
    return Sources(find_passages(prompt, weights, gathered.block_size), quotes, gathered)


def telling(weights: Sequence[float], prompt_len: int, block_size: int, num_first: int) -> list[float]:
    """Return the weights of blocks with 0 for those that all answers attend to: the first, the question, the answer."""
    end = max(0, prompt_len - QUESTION + block_size // 2) // block_size
    return [weight if num_first <= block < end else 0.0 for block, weight in enumerate(weights)]


def _look_up_all(prompt: PromptText, answer: str) -> Iterator[Quote]:
    """Yield the quotes of an answer; those that would take too long are left out."""
    work = prompt.work()
    for text, start, end in find_quotes(answer):
        try:
            where = prompt.look_up(text, work)
        except TooMuchWorkError:
            return
        yield Quote(text, (start, end), where is not None, **(where or {}))


def find_passages(prompt: PromptText | None, weights: Sequence[float], block_size: int) -> list[Passage]:
    """Return at most MAX_PASSAGES passages: the heaviest blocks, neighbours of the same message or file joined."""
    total, usual = sum(weights), median([weight for weight in weights if weight > 0] or [0.0])
    ranked = sorted(range(len(weights)), key=lambda block: -weights[block])[:MAX_BLOCKS]
    least = usual + LEAST * (max(weights, default=0.0) - usual)
    kept = sorted(block for block in ranked if weights[block] > 0 and weights[block] >= least)
    found: list[tuple[Owner | None, int, int, float]] = []
    for block in kept:
        piece = (None, block * block_size, (block + 1) * block_size)
        owned = piece if prompt is None else _owned(prompt, *piece[1:])
        if owned is None:
            continue
        owner, first, end = owned
        if found and found[-1][0] == owner and found[-1][2] == block * block_size == first:
            owner, first, _, weight = found.pop()
            found.append((owner, first, end, weight + weights[block]))
        else:
            found.append((owner, first, end, weights[block]))
    passages = [
        Passage("", weight / total, (first, end))
        if prompt is None or owner is None
        else prompt.passage(owner, first, end, weight / total)
        for owner, first, end, weight in found
    ]
    return sorted(passages, key=lambda passage: -passage.weight)[:MAX_PASSAGES]


def _owned(prompt: PromptText, first: int, end: int) -> tuple[Owner, int, int] | None:
    """Return what most tokens of a block belong to, and the first and last of these; None if that is no text."""
    owners = [prompt.owner(token) for token in range(first, min(end, len(prompt)))]
    known = [owner for owner in owners if owner is not None]
    if not known:
        return None
    owner = max(known, key=known.count)
    places = [at for at, one in enumerate(owners) if one == owner]
    return owner, first + places[0], first + places[-1] + 1
