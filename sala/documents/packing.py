"""Documents as one line of tokens, and a table that says which file, page and line each token comes from.

Every document is encoded by itself, in blocks that end at line ends. So a prompt that begins with the same documents
begins with the same tokens, and a text that has grown differs only from its last block on.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from sala.documents.model import Document, Section
from sala.errors import InputError
from sala.text.frames import CLOSING, Place, mark, opening
from sala.text.tokenizer import Tokenizer

BLOCK = 1 << 15  # characters that are encoded together, about
BATCH = 1 << 22  # characters that are encoded at a time
KEPT_AT = (1 / 2, 3 / 4, 7 / 8)  # shares of the tokens near which a document's end is worth keeping
OnTokens = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SectionSpan:
    """The tokens `start` to `end` of a packed text: a section of a document, or a part of one.

    `lines` are the tokens at which its lines begin, `numbers` the numbers of these lines.
    """

    name: str
    label: str
    unit: str
    start: int
    end: int
    lines: "array[int]"
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class SectionPart:
    """A part of a section as tokens: `mark` names the section, `lines` are where lines begin in `ids`."""

    label: str
    unit: str
    mark: "array[int]"
    ids: "array[int]"
    lines: "array[int]"
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.mark) + len(self.ids)

    def cut(self, room: int) -> "tuple[SectionPart, SectionPart]":
        """Return this block in two, the first of at most `room` tokens; between lines unless one line is longer."""
        most = room - len(self.mark)
        at = bisect_right(self.lines, most) - 1
        begins_line = self.lines[at] > 0
        size, first = (self.lines[at], at) if begins_line else (most, at + 1)
        rest = array("I", (start - size for start in self.lines[first:]))
        if not begins_line:
            rest.insert(0, 0)
        head = SectionPart(self.label, self.unit, self.mark, self.ids[:size], self.lines[:first], self.numbers[:first])
        numbers = self.numbers[first if begins_line else first - 1 :]
        return head, SectionPart(self.label, self.unit, self.mark, self.ids[size:], rest, numbers)


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """A document as tokens, or a part of one that is too long for the context."""

    name: str
    opening: "array[int]"
    blocks: list[SectionPart]
    closing: "array[int]"
    notes: Sequence[str] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_frame + sum(map(len, self.blocks))

    @property
    def num_frame(self) -> int:
        return len(self.opening) + len(self.closing)

    def part(self, blocks: list[SectionPart]) -> "EncodedDocument":
        return EncodedDocument(self.name, self.opening, blocks, self.closing, self.notes)


@dataclass(slots=True)
class PackedDocuments:
    """Documents in one line of tokens. `ends` are the tokens after which each of them ends."""

    ids: "array[int]" = field(default_factory=lambda: array("I"))
    spans: list[SectionSpan] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def locate(self, token: int) -> Place | None:
        """Return where a token comes from; None for one that is not of a document's text."""
        at = bisect_right(self.spans, token, key=lambda span: span.start) - 1
        if at < 0 or token >= self.spans[at].end:
            return None
        span = self.spans[at]
        line = bisect_right(span.lines, token) - 1
        return Place(span.name, span.label, span.unit, span.numbers[line] if line >= 0 else None)

    @property
    def kept(self) -> tuple[int, ...]:
        """Lengths that are worth keeping: all of it, and ends of documents before which later versions may differ."""
        total = len(self.ids)
        near = (max((end for end in self.ends if end <= share * total), default=0) for share in KEPT_AT)
        return tuple(sorted({total, *near} - {0}))


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, on_tokens: OnTokens | None = None
) -> list[EncodedDocument]:
    """Return documents as tokens. `on_tokens` is told of characters that are done, and all of them."""
    total, done = sum(document.num_chars for document in documents), 0
    closing = _ids(tokenizer, CLOSING)
    marks: dict[str, array[int]] = {"": array("I")}
    entries = []
    for batch in _batches(documents):
        pieces = [(document, list(_pieces(document))) for document in batch]
        texts = [text for _, some in pieces for _, text, _ in some]
        openings = [opening(document.name) for document in batch]
        encoded = iter(tokenizer.encode_with_ends(texts))
        for (document, some), begun in zip(pieces, tokenizer.encode_many(openings), strict=True):
            blocks = []
            for section, text, first in some:
                if section.label not in marks:
                    marks[section.label] = _ids(tokenizer, mark(section.label))
                ids, ends = next(encoded)
                blocks.append(_block(section, text, first, marks[section.label], ids, ends))
            entries.append(EncodedDocument(document.name, array("I", begun), blocks, closing, tuple(document.notes)))
            done += document.num_chars
        if on_tokens is not None:
            on_tokens(done, total)
    return entries


def _ids(tokenizer: Tokenizer, text: str) -> "array[int]":
    return array("I", tokenizer.encode(text, bos=False))


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if sum(one.num_chars for one in batch) > BATCH or len(batch) >= 256:
            yield batch
            batch = []
    if batch:
        yield batch


def _pieces(document: Document) -> Iterator[tuple[Section, str, int]]:
    """Yield sections in pieces that end with a line, each with the index of its first line."""
    for section in document.sections:
        text = section.text if section.text.endswith("\n") else f"{section.text}\n"
        start = num_lines = 0
        while start < len(text):
            end = text.find("\n", min(start + BLOCK, len(text) - 1)) + 1
            end = min(end or len(text), start + 2 * BLOCK)  # a line may be endless
            yield section, text[start:end], num_lines
            num_lines += text.count("\n", start, end)
            start = end


def _block(section: Section, text: str, first: int, mark: "array[int]", ids: list[int], ends: list[int]) -> SectionPart:
    lengths = [len(line) + 1 for line in text.removesuffix("\n").split("\n")]
    starts = list(accumulate(lengths[:-1], initial=0))
    numbers: Sequence[int] = section.numbers or range(1, first + len(starts) + 1)
    lines = array("I", (0, *(bisect_right(ends, start) for start in starts[1:])))
    return SectionPart(section.label, section.unit, mark, array("I", ids), lines, numbers[first : first + len(starts)])


def pack(entries: Iterable[EncodedDocument]) -> PackedDocuments:
    """Return documents in one line of tokens."""
    packed = PackedDocuments()
    for entry in entries:
        packed.ids += entry.opening
        for at, block in enumerate(entry.blocks):
            if at == 0 or block.label != entry.blocks[at - 1].label:
                packed.ids += block.mark
            start = len(packed.ids)
            packed.ids += block.ids
            lines = array("I", (start + line for line in block.lines))
            span = SectionSpan(entry.name, block.label, block.unit, start, len(packed.ids), lines, block.numbers)
            packed.spans.append(span)
        packed.ids += entry.closing
        packed.ends.append(len(packed.ids))
    return packed


def split(entries: Iterable[EncodedDocument], max_tokens: int) -> list[list[EncodedDocument]]:
    """Return documents in parts of at most `max_tokens` tokens each, cut between files, pages or lines."""
    parts: list[list[EncodedDocument]] = [[]]
    room = max_tokens
    for entry in entries:
        left = list(entry.blocks)
        while left:
            if parts[-1] and entry.part(left).num_tokens > room:
                fits_alone = entry.part(left).num_tokens <= max_tokens
                if fits_alone or room < max_tokens // 2:
                    parts.append([])
                    room = max_tokens
            taken, left = _take(left, room - entry.num_frame, max_tokens // 4)
            if not taken and not parts[-1]:
                raise InputError("ctx", "is too small for documents", "raise it: --ctx")
            if taken:
                parts[-1].append(entry.part(taken))
                room -= parts[-1][-1].num_tokens
            if left:
                parts.append([])
                room = max_tokens
    return [part for part in parts if part]


def _take(blocks: list[SectionPart], room: int, whole: int) -> tuple[list[SectionPart], list[SectionPart]]:
    """Return the blocks that fit and the rest. The last one is cut, unless it has at most `whole` tokens."""
    taken: list[SectionPart] = []
    for at, block in enumerate(blocks):
        if len(block) <= room:
            taken.append(block)
            room -= len(block)
            continue
        if room < len(block.mark) + 1 or (taken and len(block) <= whole):
            return taken, blocks[at:]
        head, rest = block.cut(room)
        return [*taken, head], [rest, *blocks[at + 1 :]]
    return taken, []
