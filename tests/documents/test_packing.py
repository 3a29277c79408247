"""Documents as tokens: each token's place, the same beginning for the same files, parts that fit."""

from pathlib import Path

import pytest

from sala.documents.model import Document, Section
from sala.documents.packing import PackedDocuments, encode_documents, pack, split
from sala.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(tiny)


PAGES = Document("a.pdf", [Section("page 1", "Ünï\ncode\n\nend"), Section("page 4", "one line")])
SHEET = Document("b.xlsx", [Section("sheet X", "r,s\nt,u\n", "row", [3, 90])])
TEXT = Document("c<d>.txt", [Section("", "".join(f"line number {number}\n" for number in range(1, 6001)))])


def read_places(packed: PackedDocuments, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the text of every place, put together from its tokens."""
    found: dict[str, list[int]] = {}
    for at, token in enumerate(packed.ids):
        place = packed.locate(at)
        found.setdefault("" if place is None else str(place), []).append(token)
    return {place: tokenizer.decode(ids) for place, ids in found.items()}


def test_every_token_has_its_place(tokenizer: Tokenizer) -> None:
    packed = pack(encode_documents([PAGES, SHEET, TEXT], tokenizer))
    places = read_places(packed, tokenizer)
    frame = places.pop("")
    assert frame.startswith('<document name="a.pdf">\n[page 1]\n[page 4]\n</document>\n\n<document name="b.xlsx">')
    assert '<document name="c&lt;d&gt;.txt">' in frame
    assert places.pop("a.pdf, page 1, line 1") == "Ünï\n"
    assert places.pop("a.pdf, page 1, line 3") == "\n"
    assert places.pop("a.pdf, page 4, line 1") == "one line\n"
    assert places.pop("b.xlsx, sheet X, row 90") == "t,u\n"
    for number in range(1, 6001):
        assert places.pop(f"c<d>.txt, line {number}") == f"line number {number}\n"
    assert len(places) == 3  # two lines of the page, a row


def test_what_follows_changes_nothing_before_it(tokenizer: Tokenizer) -> None:
    grown = Document(TEXT.name, [Section("", TEXT.sections[0].text + "and more\n")])
    one = pack(encode_documents([PAGES, TEXT], tokenizer)).ids
    other = pack(encode_documents([PAGES, grown, SHEET], tokenizer)).ids
    same = next(at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    assert same > len(one) - 40


@pytest.mark.parametrize("size", [150, 1000, 7777])
def test_parts_fit_and_hold_everything(tokenizer: Tokenizer, size: int) -> None:
    long_line = Document("long.txt", [Section("", "x" * 3000)])
    entries = encode_documents([PAGES, long_line, SHEET, TEXT], tokenizer)
    parts = [pack(part) for part in split(entries, size)]
    assert max(map(len, parts)) <= size
    assert min(map(len, parts[:-1])) > size // 3
    whole, together = read_places(pack(entries), tokenizer), dict[str, str]()
    for part in parts:
        for place, text in read_places(part, tokenizer).items():
            together[place] = together.get(place, "") + text
    whole.pop(""), together.pop("")
    assert together == whole


def test_text_that_spells_special_tokens_stays_text(tokenizer: Tokenizer) -> None:
    packed = pack(encode_documents([Document("x<|im_end|>.txt", [Section("<|im_end|>", "<|im_end|>")])], tokenizer))
    assert tokenizer.token_id("<|im_end|>") not in packed.ids
