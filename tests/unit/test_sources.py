"""From weights of blocks to passages, and from quotation marks to quotes, on a tiny tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from sala.documents.model import Document, Section
from sala.documents.packing import encode_documents, pack
from sala.text.folding import FoldedText
from sala.text.quotes import SearchBudget
from sala.text.sources import PromptText, find_passages, find_sources, telling
from sala.text.tokenizer import Tokenizer

SIZE = 16


@dataclass
class Weights:
    weights: list[float]
    block_size: int = SIZE
    num_first: int = 1

    def by_block(self) -> list[float]:
        return self.weights


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(tiny)


TEXT = "\n".join(f"Line {number} says something – ‚ünïcode‘ {number * 37} times." for number in range(40))
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"  {TEXT}\nWhat?  "}]


def test_every_token_has_its_place_in_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(MESSAGES)
    prompt = PromptText(tokenizer, ids, MESSAGES)
    assert prompt.text == tokenizer.render_chat(MESSAGES)
    offsets = [prompt.offset_of(token) for token in range(len(ids))]
    assert offsets == sorted(offsets)
    for token in (0, 5, 63, 64, 65, 200, len(ids) - 1):
        assert prompt.text[: offsets[token]] == tokenizer.decode(ids[:token], skip_special=False)
        if offsets[token] < offsets[min(token + 1, len(ids) - 1)]:
            assert prompt.token_at(offsets[token]) == token


def test_passages_are_pieces_of_messages(tokenizer: Tokenizer) -> None:
    prompt = PromptText(tokenizer, tokenizer.encode_chat(MESSAGES), MESSAGES)
    num_blocks = -(-len(prompt) // SIZE)
    weights = [0.1] * num_blocks
    weights[9] = weights[10] = 3.0
    weights[20] = 2.0
    passages = find_passages(prompt, weights, SIZE)
    for passage, (first, end) in zip(passages, [(9, 11), (20, 21)], strict=True):
        assert passage.tokens[0] <= first * SIZE
        assert passage.tokens[1] >= end * SIZE
        assert passage.tokens[1] - passage.tokens[0] < 8 * SIZE
    assert passages[0].weight == pytest.approx(6.0 / sum(weights))
    for passage in passages:
        assert passage.message == 1
        assert MESSAGES[1]["content"][passage.start : passage.end] == passage.text != ""


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("\n", " ")])
def test_passages_begin_and_end_with_a_sentence(tokenizer: Tokenizer, text: str) -> None:
    messages = [{"role": "user", "content": f"{text}\nWhat?"}]
    prompt = PromptText(tokenizer, tokenizer.encode_chat(messages), messages)
    for block in range(2, len(prompt) // SIZE - 1):
        weights = [0.0] * (len(prompt) // SIZE + 1)
        weights[block] = 1.0
        (passage,) = find_passages(prompt, weights, SIZE)
        assert passage.text.startswith("Line ")
        assert passage.text.endswith(("times.", "What?"))
        assert text.find(passage.text) in (passage.start, -1)
        assert (
            prompt.text[prompt.offset_of(block * SIZE) : prompt.offset_of((block + 1) * SIZE)].strip() in passage.text
        )


def test_a_passage_without_sentences_is_made_of_words(tokenizer: Tokenizer) -> None:
    text = " ".join(f"word{number}" for number in range(2000))
    messages = [{"role": "user", "content": text}]
    prompt = PromptText(tokenizer, tokenizer.encode_chat(messages), messages)
    weights = [0.0] * (len(prompt) // SIZE)
    weights[50] = 1.0
    (passage,) = find_passages(prompt, weights, SIZE)
    assert set(passage.text.split()) <= set(text.split())
    assert len(passage.text) < 8 * SIZE


def test_blocks_that_tell_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(MESSAGES)
    prompt = PromptText(tokenizer, ids, MESSAGES)
    weights = [1.0] * (len(ids) // SIZE + 3)
    kept = telling(weights, len(ids), SIZE, 1)
    assert kept[0] == 0
    assert kept[1] == 1
    assert not any(kept[(len(ids) - 64) // SIZE + 1 :])
    sources = find_sources(prompt, len(ids), Weights(weights), "")
    assert all(passage.tokens[0] >= SIZE for passage in sources.passages)
    assert find_sources(prompt, 10, Weights([1.0]), "").passages == []


def test_a_prompt_that_is_no_conversation(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    prompt = PromptText(tokenizer, ids)
    passages = find_passages(prompt, [0.0, 0.0, 1.0, *[0.01] * 9], SIZE)
    assert passages[0].message is passages[0].start is passages[0].file is None
    assert prompt.text[prompt.offset_of(32) : prompt.offset_of(48)].strip() in passages[0].text
    assert find_passages(None, [0.0, 0.0, 1.0, *[0.01] * 9], SIZE)[0].tokens == (32, 48)


@pytest.fixture(scope="module")
def documents(tokenizer: Tokenizer) -> tuple[PromptText, range]:
    pages = [
        Section(f"page {number}", f"On page {number} the first line.\nThe owl is silver.\n" * 4) for number in (1, 2)
    ]
    entries = encode_documents([Document("book.pdf", pages), Document("notes.txt", [Section("", TEXT)])], tokenizer)
    packed = pack(entries)
    messages = [{"role": "user", "content": "What does “the book” say?"}]
    ids = tokenizer.encode_chat(messages, attached=packed.ids)
    start = next(at for at in range(len(ids)) if ids[at : at + len(packed)] == packed.ids.tolist())
    attached = range(start, start + len(packed))
    return PromptText(tokenizer, ids, messages, attached, packed.locate), attached


def test_passages_of_documents_have_file_and_place(documents: tuple[PromptText, range]) -> None:
    prompt, _ = documents
    num_blocks = -(-len(prompt) // SIZE)
    for block in range(1, num_blocks):
        weights = [0.01] * num_blocks
        weights[block] = 5.0
        heavy = [passage for passage in find_passages(prompt, weights, SIZE) if passage.weight > 0.5]
        for passage in heavy:
            if passage.file is None:
                assert passage.start is not None  # the question
                continue
            assert passage.message == 0
            assert passage.file in ("book.pdf", "notes.txt")
            assert passage.place is not None
            assert passage.place.startswith("page " if passage.file == "book.pdf" else "line")
            assert "<document" not in passage.text


def test_quotes_are_looked_up_in_documents_first(documents: tuple[PromptText, range]) -> None:
    prompt, _ = documents
    answer = 'It says: "On page 2 the\nfirst line. The owl is silver," and “the owl is made of gold”. > no\n\n'
    answer += '> What does "the book" say?'
    sources = find_sources(prompt, len(prompt), None, answer)
    first, second, third = sources.quotes
    assert (first.found, first.file, first.place) == (True, "book.pdf", "page 2, lines 1-2")
    assert answer[slice(*first.answer)] == first.text
    assert not second.found
    assert (third.found, third.message, third.start, third.end) == (True, 0, 0, 24)
    as_json = sources.as_json()
    assert as_json["quotes"][1] == {"text": "the owl is made of gold", "answer": second.answer, "found": False}


def test_a_place_is_one_in_the_text_as_it_was_given(tokenizer: Tokenizer) -> None:
    content = "It is so:  the **first** agree-\nment of the ﬁrm, the Cafe\u0301 No.\u00a05, ends in May. What?"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    prompt = PromptText(tokenizer, tokenizer.encode_chat(messages), messages)
    (quote,) = find_sources(prompt, 10, None, "“The first agreement of the firm, the Café No. 5,”").quotes
    assert quote.found
    assert content[quote.start : quote.end] == "the **first** agree-\nment of the ﬁrm, the Cafe\u0301 No.\u00a05"


def test_text_is_folded_once_and_for_quotes_only(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = []
    monkeypatch.setattr("sala.text.sources.FoldedText", lambda text: folded.append(text) or FoldedText(text))
    prompt = PromptText(tokenizer, tokenizer.encode_chat(MESSAGES), MESSAGES)
    assert find_sources(prompt, 10, None, "No quote.").quotes == []
    assert not folded
    quotes = find_sources(
        prompt, 10, None, "“Line 7 says something”, “Line 8 says something”, “Line 8 says a thing”"
    ).quotes
    assert [quote.found for quote in quotes] == [True, True, False]
    assert [text.strip() for text in folded] == [message["content"].strip() for message in MESSAGES]


def test_quotes_that_take_too_long_are_left_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not said of them that they are not in the text."""
    prompt = PromptText(tokenizer, tokenizer.encode_chat(MESSAGES), MESSAGES)
    monkeypatch.setattr(PromptText, "work", lambda self: SearchBudget(4 * SearchBudget.TEXT + 3 * len(self.text)))
    answer = " ".join(f"“gold {number} and silver”" for number in range(9))
    sources = find_sources(prompt, 10, None, answer)
    assert 0 < len(sources.quotes) < 9
    assert prompt.find("Line 7 says something") is not None
    monkeypatch.setattr(PromptText, "work", lambda self: SearchBudget(10))
    assert prompt.find("Line 7 says something") is None
