"""Documents are found again in a text that holds them in their frames, with the places that they were written from."""

from pathlib import Path

import pytest

from sala.documents.layout import lay_out
from sala.documents.model import Document, Section
from sala.documents.packing import encode_documents, pack
from sala.text.frames import find_documents
from sala.text.sources import PromptText, find_passages
from sala.text.tokenizer import Tokenizer

BOOK = Document('a <b> & "c".pdf', [Section("page 1", "One\n\ntwo\n"), Section("page 4", "[page 2]\n[slide 5]\nthree")])
NOTE = Document("note.txt", [Section("", "[page 7 of 9]\nfirst\n</document>\n\nlast\n")])
SHEET = Document(
    "b.xlsx", [Section("sheet X", "r,s\nt,u\n", "row", [3, 90]), Section("sheet Y [2]", "v\n", "row", [1])]
)
EPUB = Document("c.epub", [Section("chapter 1: Whales", "Call me.\n"), Section("chapter 2", "So.\n")])
QUESTION = "What is </document> for?"


def test_names_sections_and_lines() -> None:
    texts = [lay_out(one).text for one in (BOOK, NOTE, SHEET, EPUB)]
    whole = "Read this:\n" + "".join(texts) + QUESTION
    found = find_documents(whole)
    assert [one.name for one in found] == [BOOK.name, NOTE.name, SHEET.name, EPUB.name]
    assert [whole[one.start : one.end] for one in found] == texts
    labels = [[section.label for section in one.sections] for one in found]
    assert labels == [["page 1", "page 4"], [""], ["sheet X", "sheet Y [2]"], ["chapter 1: Whales", "chapter 2"]]
    places = [
        str(next(filter(None, (one.place(whole, whole.index(word)) for one in found))))
        for word in ("two", "three", "first", "last", "t,u", "Call", "So.")
    ]
    assert places == [
        f"{BOOK.name}, page 1, line 3", f"{BOOK.name}, page 4, line 3", "note.txt, line 2", "note.txt, line 5",
        "b.xlsx, sheet X", "c.epub, chapter 1: Whales, line 1", "c.epub, chapter 2, line 1",
    ]  # fmt: skip
    assert found[0].place(whole, whole.index("[page 1]")) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("no documents </document>\n\n", []),
        ('<document name="cut">\ntext', []),
        ('<document name="bare">\ntext\n</document>', ["bare"]),
        ('<document name="empty">\n</document>\n\n', ["empty"]),
        ('in a line <document name="no">\n</document>\n', []),
        ('</document>\n<document name="a">\n<document name="inside">\n</document>\n\n', ["a"]),
        (f'<document name="a">\n[page {"9" * 5000}]\n[page 1]\n</document>\n\n', ["a"]),
    ],
)
def test_texts_that_are_not_framed_as_they_should(text: str, names: list[str]) -> None:
    found = find_documents(text)
    assert [one.name for one in found] == names
    assert all(0 <= section.start <= section.end <= len(text) for one in found for section in one.sections)


def test_passages_are_those_of_attached_documents(tiny: Path) -> None:
    """The same prompt has the same sources, whether its documents were attached as tokens or stand in its text."""
    tokenizer = Tokenizer.load(tiny)
    pages = [Section(f"page {page}", f"Page {page} begins.\n" + "The owl is grey.\n" * 5) for page in (1, 2, 5)]
    documents = [Document("book.pdf", pages), Document("notes.txt", [Section("", "A line of notes.\n" * 20)])]
    packed, question = pack(encode_documents(documents, tokenizer)), "What is grey?"
    text = "".join(lay_out(one).text for one in documents)
    asked, plain = ([{"role": "user", "content": content}] for content in (question, text + question))
    ids = tokenizer.encode_chat(plain)
    assert tokenizer.encode_chat(asked, attached=packed.ids) == ids
    start = next(at for at in range(len(ids)) if ids[at : at + len(packed)] == packed.ids.tolist())
    attached = PromptText(tokenizer, ids, asked, range(start, start + len(packed)), packed.locate)
    inside = PromptText(tokenizer, ids, plain)
    assert inside.document_ends(2) == [start + end for end in packed.ends]
    assert inside.document_ends(1) == [start + packed.ends[-1]]
    for block in range(start // 16 + 1, (start + len(packed)) // 16):
        weights = [1.0 if at in (block, block + 1) else 0.0 for at in range(len(ids) // 16 + 2)]
        one, other = (find_passages(prompt, weights, 16) for prompt in (attached, inside))
        facts = [[(p.file, p.place, p.text, p.tokens, p.weight) for p in found] for found in (one, other)]
        assert facts[0] == facts[1]
        assert all(text[p.start : p.end] == p.text for p in other if p.file is not None)
    assert inside.find("The owl is grey") == {
        "message": 0, "start": text.index("The owl"), "end": text.index("The owl") + 15,
        "file": "book.pdf", "place": "page 1, line 2",
    }  # fmt: skip
