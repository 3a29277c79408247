"""Text of HTML: formulas, and pages with elements that are never closed."""

import pytest

from sala.documents.readers.markup import parse_html, read_html

FORMULAS = {
    "<mn>900</mn>": "900",
    "\n <mi>x</mi>\n <mo>=</mo>\n <mn>2</mn>\n": "x=2",
    "<msup><mn>10</mn><mn>6</mn></msup>": "10^6",
    "<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac><mi>c</mi>": "(a+b)/2c",
    "<msubsup><mi>x</mi><mi>i</mi><mrow><mi>n</mi></mrow></msubsup>": "x_i^(n)",
    "<msqrt><mn>2</mn></msqrt><mroot><mn>8</mn><mn>3</mn></mroot>": "√(2)√(8,3)",
    "<mtable><mtr><mtd>1</mtd><mtd>0</mtd></mtr><mtr><mtd>0</mtd><mtd>1</mtd></mtr></mtable>": "1 0; 0 1",
    "<semantics><mrow><mi>y</mi></mrow><annotation>\\gamma</annotation></semantics>": "y",
    "<msup><mi>a</mi><msup><mi>b</mi>": "a^b",
}


@pytest.mark.parametrize("content", FORMULAS)
def test_formulas(content: str) -> None:
    assert parse_html(f"<p>The rent is <math>{content}</math> euros.").text == f"The rent is {FORMULAS[content]} euros."


def test_a_formula_that_the_page_has_as_text_is_that_text() -> None:
    page = '<p>A <span><math alttext="x^{2}"><msup><mi>x</mi><mn>2</mn></msup></math></span><img alt="x^{2}"> B</p>'
    assert parse_html(page).text == "A x^{2} B"
    assert parse_html("<p>A <math><mi>x</mi><p>B c</p><p>D <b>e</b> f</p>").text == "A x\n\nB c\n\nD e f"


HIDING = ["select", "noscript", "template", "svg", "iframe", "object", "script", "style", "title", "math alttext='m'"]


@pytest.mark.parametrize("tag", HIDING)
def test_what_follows_an_element_that_is_not_closed_is_read(tag: str) -> None:
    page = f"<html><body><h1>Fees</h1><{tag}>inside<p>The rent is <b>900</b> euros.</p><p>Monthly.</p></body></html>"
    assert " ".join(parse_html(page).text.split()) == "# Fees inside The rent is 900 euros. Monthly."
    closed = page.replace("inside", f"inside</{tag.split()[0]}>")
    assert "inside" not in parse_html(closed).text
    assert parse_html(closed).text.endswith("\n\nThe rent is 900 euros.\n\nMonthly.")


@pytest.mark.parametrize("head", ["<title>T</title>", "<title>T", "", "<meta charset='utf-8'><script>s()</script>"])
def test_a_head_that_is_not_closed_ends_where_text_begins(head: str) -> None:
    for text in ("<p>The rent</p>", "<select>x</select>The rent", "The rent"):
        if not (head.endswith("T") and "<" not in text):  # then nothing says where the title ends
            (section,) = read_html(f"<html><head>{head}{text}".encode())
            assert section.text.endswith("The rent")
    assert parse_html(f"<head>{head}</title><noscript>n</noscript></head><body>The rent").text == "The rent"


def test_comments_that_are_not_closed_hide_nothing() -> None:
    assert parse_html("a<!-- b -->c<!-- d <p>e <!-- f").text.split() == ["ac", "d", "e", "f"]
    assert parse_html("a<!-- b -->c<!-- d -->e").text == "ace"
