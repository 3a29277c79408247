"""Quotations are found in an answer, and looked up in a text whatever its spelling, in bounded time."""

import random
import re

import pytest

from sala.text.folding import FoldedText
from sala.text.quotes import (
    MAX_PIECES,
    MAX_QUOTES,
    SearchBudget,
    TooMuchWorkError,
    find_quotes,
    look_up,
    split_quote,
)


def find(text: str, quote: str) -> str | None:
    """Return what of a text is the quote."""
    found = look_up(split_quote(quote), FoldedText(text), SearchBudget.for_text(len(text)))
    return None if found is None else text[slice(*found)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('He said "good morning all" twice.', ["good morning all"]),
        ("„Guten Tag allerseits“, sagte er.", ["Guten Tag allerseits"]),
        ("Il dit « bonjour à tous ».", ["bonjour à tous"]),
        ("她说“今天天气很好”。", ["今天天气很好"]),
        ("彼は「今日は暑いです」と言った。", ["今日は暑いです"]),
        ("‘two words’ and it's John's", ["two words"]),
        ('a so-called "expert" and "4711"', ["4711"]),
        ('`"in code"` and ```\n"in a fence"\n```', []),
        ("> a block quote\n> of two lines\n\nand text", ["a block quote\nof two lines"]),
        ('five 5" pipes and 6" pipes here', []),
        ('one "that is cut', []),
    ],
)
def test_quotations_of_several_languages(answer: str, expected: list[str]) -> None:
    found = list(find_quotes(answer))
    assert [text for text, _, _ in found] == expected


def test_an_answer_with_very_many_quotes() -> None:
    answer = '"a b" `x`, ' * 20_000
    assert len(list(find_quotes(answer))) == MAX_QUOTES
    assert [text for text, _, _ in find_quotes("> a" + " " * 200_000 + "b")] == ["a" + " " * 200_000 + "b"]


def test_a_quote_of_very_many_pieces_is_not_looked_up() -> None:
    answer = "“" + "a … " * MAX_PIECES + "zq”"
    assert list(find_quotes(answer)) == []
    assert len(list(find_quotes(answer.replace("a … ", "", 1)))) == 1
    assert len(list(find_quotes("> 1. Rent ............................................ 12"))) == 1


BOOKS = "He wrote: ‘It’s  the\nbest—by far—of all “great” books’ in 1873, and then he left the room."
LEASE = (
    "Art. 5\u00a0(2)  The rent is 1,900 euros a month. The ten-\nant pays for re-\npairs, long-\nterm and short-term."
)


@pytest.mark.parametrize(
    ("text", "quote", "found"),
    [
        (BOOKS, 'It\'s the best-by far-of all "great" books.', "It’s  the\nbest—by far—of all “great” books"),
        (BOOKS, "He wrote … and then he left", BOOKS[:-10]),
        (BOOKS, "It’s the best [...] of all «great» books", "It’s  the\nbest—by far—of all “great” books"),
        (BOOKS, "he wrote (. . .) the room", BOOKS[:-1]),
        (BOOKS, "…y far—of all “gre…", "y far—of all “gre"),
        (LEASE, "The tenant pays for repairs, long-term and short-term", LEASE[45:-1]),
        (LEASE, "the ten-\nant pays", "The ten-\nant pays"),
        (LEASE, "Art. 5 (2) the rent", None),  # a capital inside the quote
        (LEASE, "art. 5 (2) The rent", "Art. 5\u00a0(2)  The rent"),
        (LEASE, "Term and short-term", "term and short-term"),
        ("It says that the tenant pays for all repairs.", "The tenant pays", "the tenant pays"),
        ("the \ufb01rst of\ufb01ce is open", "first office", "\ufb01rst of\ufb01ce"),
        ("the first office is open", "\ufb01rst of\ufb01ce", "first office"),
        ("Cafe\u0301 au lait", "Café au", "Cafe\u0301 au"),
        ("Café au lait", "cafe\u0301 au", "Café au"),
        ("das hieße A\u0308pfel-\nsaft", "Äpfelsaft", "A\u0308pfel-\nsaft"),
        ("a soft\u00adhyphen, an\u00ad\nother\u200b", "softhyphen, another", "soft\u00adhyphen, an\u00ad\nother"),
        ("the **bold** text", "the bold text", "the **bold** text"),
        ("the bold text, said _she_", "the **bold** text, *said* she", "the bold text, said _she"),
        ("重要的**内容**在\n这里，\r\n今天 很好。", "内容在这里，今天很好", "内容**在\n这里，\r\n今天 很好"),
        ("__init__ of\r\nsnake_case", "__init__ of snake_case", "init__ of\r\nsnake_case"),
        ("a 5-\r\n10 ratio", "5-10 ratio", "5-\r\n10 ratio"),
        ("ราคาห้องเช่าต่อเดือน", "ห้องเช่า", "ห้องเช่า"),
    ],
)  # fmt: skip
def test_the_spelling_of_a_quote_does_not_count(text: str, quote: str, found: str | None) -> None:
    assert find(text, quote) == found


@pytest.mark.parametrize(
    ("text", "quote"),
    [
        (BOOKS, "it is the best"),
        (BOOKS, "best books"),
        (BOOKS, "all the books … He wrote"),  # in another order
        (LEASE, "The rent is 1,800 euros"),
        (LEASE, "The rent is 1900 euros"),
        (LEASE, "900 euros a month"),  # a number that is cut
        (LEASE, "…900 euros a month"),
        (LEASE, "The rent is 1"),
        (LEASE, "The rent is 1…"),
        (LEASE, "The landlord pays for repairs"),
        (LEASE, "The rent is 1,900 euro"),  # a word that is cut
        (LEASE, "he rent is 1,900"),
        (LEASE, "longterm and shortterm"),
        (LEASE, "the tenants pay"),
        (LEASE, "the rent is not 1,900 euros"),
        ("please resign the lease", "re-sign the lease"),
        ("please re-sign the lease", "resign the lease"),
        ("about 1020 people", "10-20 people"),
        ("10² metres, 2**3 is 8, a_b is c", "102 metres"),
        ("10² metres, 2**3 is 8, a_b is c", "23 is 8"),
        ("10² metres, 2**3 is 8, a_b is c", "ab is c"),
        ("US law", "us law"),
        ("the résumé is long", "the resume is long"),
        ("for 1\u00a0900 euros or 1½ cups", "900 euros"),
        ("for 1\u00a0900 euros or 1½ cups", "½ cups"),
        ("an agree- ment", "an agreement"),
        ("今天天气很好", "今天天气不好"),
        ("first" + " and" * 400 + " last", "first … last"),  # too far apart
    ],
)
def test_what_is_nearly_a_quote_is_none(text: str, quote: str) -> None:
    assert find(text, quote) is None


def test_pieces_of_a_quote_may_be_anywhere_within_reach() -> None:
    """The first places of the pieces before are too far away, or do not fit together."""
    far = " x" * 600
    for text in (
        f"the a.{far} the owl{far} the a {far[:400]} the owl",
        f"the owl. the a the{far} a; the a and the owl",
    ):
        assert find(text, "the a … the owl") == text[text.rindex("the a ") :]
    text = f"one two{far} two one three{far} one b two c three d four"
    assert find(text, "one … two … three … four") == text[text.rindex("one") :]


def test_pieces_are_found_where_a_plain_search_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sala.text.quotes.MAX_GAP", 6)
    chance = random.Random(5)
    for _ in range(1000):
        text = " ".join(chance.choices("abcd", k=chance.randint(3, 40)))
        pieces = [" ".join(chance.choices("abcd", k=chance.randint(1, 2))) for _ in range(chance.randint(1, 4))]
        plain = re.compile(".{0,6}".join(pieces))
        found = find(text, " … ".join(pieces))
        assert (found is None) == (plain.search(text) is None), (text, pieces)
        assert found is None or plain.fullmatch(found), (text, pieces)


@pytest.mark.parametrize(
    ("text", "quote"),
    [
        ("the rent is a house and a tenant pays a lot. " * 1500, "a … " * 30 + "zq"),
        ("the rent is a house and a tenant pays a lot. " * 1500, "a … " * 30 + "a lot of"),
        ("a" * 60_000, "a a … a"),
        ("-a" * 30_000, "a-" * 900 + "aa-a"),
        ("a\n\n" * 20_000, "a " * 900 + "1 " + "a " * 90),
        ("a" + "\u0301\u0323" * 30_000, "a b"),
        ("*" * 30_000 + "a_" * 30_000, "a b"),
        ("a" + " \u00ad" * 20_000 + "-\n" + " " * 20_000, "a b"),
        ("a b" * 20_000, "b … " + "a ba b" * 5 + "c"),
    ],
)
def test_work_is_in_proportion_to_the_text(text: str, quote: str) -> None:
    pieces, work = split_quote(quote), SearchBudget.for_text(len(text))
    assert pieces
    before, folded = work.left, FoldedText(text)
    assert len(folded.text) <= len(text)
    try:
        assert look_up(pieces, folded, work) is None
    except TooMuchWorkError:
        assert work.left < 0
    else:
        assert before - work.left <= len(pieces) * (2 * len(text) + SearchBudget.TEXT + 100 * SearchBudget.PLACE)
