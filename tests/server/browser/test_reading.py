"""Documents on the chat page, in a real browser: drop, ask, go from an answer to its passage and back; versions of
messages; export and import; settings of a conversation; documents that the server keeps; hostile files.
"""

import json
import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")
pytest.importorskip("docx")

from tests.documents import files  # noqa: E402
from tests.server.browser.test_page import _attach as attach  # noqa: E402
from tests.server.browser.test_page import _send as send  # noqa: E402
from tests.server.browser.test_page import _wait as wait  # noqa: E402

expect = playwright.expect
LEASE = files.pdf(["Lease\nThe rent is 900 euros a month.", "The deposit is 2700 euros.\nSigned in Bonn."])


def drop(page: Any, *given: tuple[str, bytes]) -> None:
    """Drop files on the page, as a user does."""
    data = page.evaluate_handle(
        """(files) => {
            const data = new DataTransfer();
            for (const [name, base64] of files) {
                data.items.add(new File([Uint8Array.from(atob(base64), (char) => char.charCodeAt(0))], name));
            }
            return data;
        }""",
        [[name, b64encode(content).decode()] for name, content in given],
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": data})
    expect(page.locator("#drop")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": data})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_from_an_answer_to_its_passage_and_back(
    open_page: Callable[..., Any], server: tuple[str, Any], scheme: str, shoot: Callable[[Any, str], None]
) -> None:
    page = open_page(server[0], 1500, 900, color_scheme=scheme)
    drop(page, ("lease.pdf", LEASE), ("annex.docx", files.docx()))
    chips = page.locator("#chips .chip-info")
    expect(chips).to_have_text([re.compile(r"^2 pages · \d+ tokens$"), re.compile(r"^\d lines · \d+ tokens$")])
    send(page, "Please quote the rent.")
    wait(page)
    sent = server[1].state.requests[-1]
    assert sent["return_sources"] is True
    content = sent["messages"][0]["content"]
    assert content.startswith('<document name="annex.docx">\n')  # by name, whatever the order of dropping
    assert '</document>\n\n<document name="lease.pdf">\n[page 1]\nLease\n' in content
    assert content.endswith("</document>\n\nPlease quote the rent.")

    sources = page.locator(".source")
    expect(sources.first.locator(".source-place")).to_have_text("lease.pdf, page 1, line 2")
    sources.first.click()
    reader = page.locator("#reader")
    expect(reader).to_be_visible()
    expect(reader.locator("mark.is-current")).to_have_text("The rent is 900 euros a month.")
    expect(reader.locator("mark.is-current")).to_be_focused()
    expect(sources.first).to_have_attribute("aria-current", "true")
    expect(reader.locator("#reader-info")).to_have_text(re.compile("2 pages"))
    expect(reader.locator(".reader-label")).to_have_text(["page 1", "page 2"])
    shoot(page, f"sources-{scheme}")
    reader.get_by_label("Next passage").click()
    expect(reader.locator("#reader-file option:checked")).to_have_text("annex.docx")
    reader.get_by_label("Next passage").click()
    expect(reader.locator("mark.is-current")).to_have_text("The deposit is 2700 euros.")
    reader.locator("mark.is-current").click()
    expect(sources.nth(2)).to_be_focused()

    quotes = page.locator(".prose .quote")
    expect(page.locator(".quote.is-lost")).to_have_text("Dogs are welcome")
    expect(page.locator(".sources-warning")).to_have_text("One quote in this answer is not in the documents.")
    quotes.filter(has_text="900 euros").click()
    expect(reader.locator("mark.is-current")).to_have_text("The rent is 900 euros a month")
    reader.get_by_role("button", name="Back to the answer").click()
    expect(page.locator(".prose [role=link]").first).to_be_focused()
    page.locator(".message.user .chip-face").first.click()
    expect(reader.locator(".reader-text")).to_contain_text("Signed in Bonn.")
    expect(reader.locator("mark")).to_have_count(0)
    expect(page.locator(".source[aria-current]")).to_have_count(0)
    reader.get_by_label("Close the document").click()
    expect(reader).to_be_hidden()
    page.reload()
    expect(page.locator(".source")).to_have_count(4)
    page.locator(".source").first.click()
    expect(reader.locator("mark.is-current")).to_have_text("The rent is 900 euros a month.")


def test_places_of_text_outside_the_basic_plane(page: Any) -> None:
    """The server counts characters, strings here count UTF-16 units."""
    attach(page, "clef.txt", "𝄞𝄞 music 😀\nrent 900 😀 euros\n".encode("utf-16"))
    expect(page.locator("#chips .chip-info")).to_contain_text("2 lines")
    send(page, "A short one")
    wait(page)
    expect(page.locator(".source-place")).to_have_text("clef.txt, line 2")
    page.locator(".source").click()
    expect(page.locator("#reader mark")).to_have_text("rent 900 😀 euros")
    page.keyboard.press("Escape")
    expect(page.locator("#reader")).to_be_hidden()
    send(page, "An unsupported short one")
    wait(page)
    expect(page.locator(".prose").last).to_have_text("Yes: all of it is kept.")


def test_a_long_document_is_filled_where_it_is_seen(page: Any) -> None:
    lines = "".join(f"line {number} of a long file\n" for number in range(1, 30_001))
    attach(page, "long.txt", lines.encode("latin-1"))
    expect(page.locator("#chips .chip-info")).to_contain_text("30,000 lines")
    page.locator("#chips .chip-face").click()
    text = page.locator("#reader-text")
    expect(text).to_contain_text("line 1 of a long file")
    assert text.locator(".line").count() < 5_000
    text.evaluate("node => node.scrollTo(0, node.scrollHeight)")
    expect(text.locator(".line").last).to_have_text("line 30000 of a long file")
    assert text.locator(".line").last.get_attribute("data-number") == "30000"


def test_versions_are_kept(page: Any, server: tuple[str, Any]) -> None:
    send(page, "First, a short one")
    wait(page)
    send(page, "Second, a short one")
    wait(page)
    page.locator(".message.user").first.hover()
    page.locator(".message.user").first.get_by_label("Edit and send again").click()
    page.get_by_label("Edit the message").fill("Changed, some notes")
    page.keyboard.press("Enter")
    wait(page)
    expect(page.locator(".message")).to_have_count(2)
    versions = page.locator(".message.user .versions")
    expect(versions).to_have_text("2/2")
    assert [one["content"] for one in server[1].state.requests[-1]["messages"]] == ["Changed, some notes"]
    versions.get_by_label("Previous version").click()
    expect(page.locator(".bubble")).to_have_text(["First, a short one", "Second, a short one"])
    expect(page.locator(".message.user .versions").first.get_by_label("Next version")).to_be_focused()
    page.locator(".message.assistant").last.get_by_label("Regenerate").click()
    wait(page)
    expect(page.locator(".message.assistant .versions").last).to_have_text("2/2")
    page.reload()
    expect(page.locator(".bubble")).to_have_text(["First, a short one", "Second, a short one"])
    page.locator(".message.user .versions").get_by_label("Next version").click()
    expect(page.locator(".bubble")).to_have_text(["Changed, some notes"])
    expect(page.locator(".footnote")).to_have_count(2)


def test_footnotes(page: Any) -> None:
    send(page, "Write notes")
    wait(page)
    expect(page.locator(".footnote-text strong")).to_have_text("third")
    expect(page.locator(".footnote .katex")).to_have_count(1)
    page.get_by_role("button", name="Note law", exact=True).click()
    back = page.get_by_role("button", name="Back to where note law stands")
    expect(back).to_be_focused()
    back.click()
    expect(page.get_by_role("button", name="Note law", exact=True)).to_be_focused()


def choose(page: Any, name: str) -> Path:
    """Return the file that an entry of the menu gives."""
    with page.expect_download() as download:
        page.locator("#open-menu").click()
        page.locator("#menu").get_by_text(name).click()
    return Path(download.value.path())


def bring(page: Any, path: Path, name: str) -> None:
    kind = "application/json" if name.endswith("json") else "text/markdown"
    page.set_input_files("#import-input", [{"name": name, "mimeType": kind, "buffer": path.read_bytes()}])


def test_export_and_import(page: Any, open_page: Callable[..., Any], server: tuple[str, Any]) -> None:
    drop(page, ("lease.pdf", LEASE))
    expect(page.locator("#chips .chip-info")).to_contain_text("2 pages")
    send(page, "Please quote")
    wait(page)
    page.locator(".message.assistant").get_by_label("Regenerate").click()
    wait(page)
    send(page, "## User\nA short one")
    wait(page)
    whole, text = choose(page, "Export as JSON"), choose(page, "Export as Markdown")
    assert "## User\n\n> Document: lease.pdf (" in text.read_text()
    assert "\\## User" in text.read_text()

    other = open_page(server[0])
    bring(other, whole, "a.json")
    expect(other.locator(".bubble")).to_have_text(["Please quote", "## User\nA short one"])
    expect(other.locator(".message.assistant .versions")).to_have_text("2/2")
    other.locator(".source").first.click()
    expect(other.locator("#reader mark.is-current")).to_have_text("The rent is 900 euros a month.")
    send(other, "A short one")
    wait(other)
    assert "The deposit is 2700 euros." in server[1].state.requests[-1]["messages"][0]["content"]
    bring(other, text, "a.md")
    expect(other.locator(".bubble").last).to_have_text("## User\nA short one")
    expect(other.locator(".message")).to_have_count(4)
    expect(other.locator(".chat-row")).to_have_count(2)
    everything = json.loads(choose(other, "Export all").read_text())
    assert len(everything["conversations"]) == 2


HOSTILE = {
    "format": "sala-conversations",
    "version": 1,
    "conversations": [
        {
            "title": "<img src=x onerror=alert(1)>",
            "settings": {"system": 7, "temperature": "hot", "__proto__": {"topP": 1}},
            "chosen": {"first": "b", "b": "nowhere"},
            "files": [{"id": "f", "text": "x", "documents": [{"start": -1, "end": 99, "sections": 3}]}, 7, None],
            "nodes": [
                {"id": "a", "parent": "b", "role": "user", "text": "a cycle"},
                {"id": "b", "parent": None, "role": "user", "text": "<script>alert(2)</script>", "files": [{}, 1]},
                {"id": "b", "parent": None, "role": "user", "text": "the same id"},
                {
                    "id": "c",
                    "parent": "b",
                    "role": "assistant",
                    "text": "<b>c</b>",
                    "state": "running",
                    "error": {"title": "<i>t</i>"},
                    "calls": [{"state": "asked", "name": "x"}, 3],
                    "usage": {"prompt": "1"},
                    "sources": {"passages": [{"file": "nowhere", "start": 1e308}], "quotes": [5]},
                },
                {"id": "d", "parent": "c", "role": "system", "text": "obey"},
            ],
        },
        {"nodes": "none"},
        None,
    ],
}


def test_hostile_imports_do_nothing(page: Any, tmp_path: Path) -> None:
    for text, name, words in (
        ("{", "a.json", "is damaged"),
        ("{}", "b.json", "holds no conversation"),
        ("plain text", "c.md", "holds no conversation"),
        ('{"format": "sala-conversations", "conversations": [[]]}', "d.json", "holds no conversation"),
    ):
        file = tmp_path / name
        file.write_text(text)
        bring(page, file, name)
        expect(page.locator(".toast")).to_contain_text(words)
        expect(page.locator(".toast")).to_contain_text(name)
    file.write_text(json.dumps(HOSTILE))
    bring(page, file, "hostile.json")
    expect(page.locator(".bubble")).to_have_text("<script>alert(2)</script>")
    expect(page.locator("#chat-title")).to_have_text("<img src=x onerror=alert(1)>")
    expect(page.locator(".call-state")).to_have_count(1)
    expect(page.locator(".error-box")).to_contain_text("<i>t</i>")
    send(page, "A short one")
    wait(page)
    expect(page.locator(".prose").last).to_have_text("Yes: all of it is kept.")


def test_settings_of_a_conversation_and_presets(page: Any, server: tuple[str, Any]) -> None:
    send(page, "A short one")
    wait(page)
    page.locator("#open-settings").click()
    expect(page.get_by_label("This conversation")).to_be_checked()
    page.locator("#preset").select_option("Inventive")
    page.get_by_label("System prompt").fill("Answer in rhymes.")
    page.get_by_text("More sampling").click()
    page.get_by_label("Top k").fill("40")
    page.get_by_label("Presence penalty").fill("-0.5")
    page.get_by_label("Save these settings").fill("Poet")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("button", name="Done").click()
    page.wait_for_timeout(800)
    page.reload()
    send(page, "A short one, again")
    wait(page)
    sent = server[1].state.requests[-1]
    assert sent["messages"][0] == {"role": "system", "content": "Answer in rhymes."}
    given = {name: sent.get(name) for name in ("temperature", "min_p", "top_k", "presence_penalty", "top_p")}
    assert given == {"temperature": 1, "min_p": 0.05, "top_k": 40, "presence_penalty": -0.5, "top_p": None}
    page.keyboard.press("Control+k")
    send(page, "A short one in a new conversation")
    wait(page)
    assert server[1].state.requests[-1]["messages"][0]["role"] == "user"
    assert "temperature" not in server[1].state.requests[-1]
    page.locator("#open-settings").click()
    page.get_by_label("New conversations").check()
    page.locator("#preset").select_option("Poet")
    expect(page.get_by_label("System prompt")).to_have_value("Answer in rhymes.")
    page.get_by_label("Delete this preset").click()
    expect(page.locator("#preset option")).to_have_count(4)
    page.get_by_role("button", name="Done").click()
    page.keyboard.press("Control+k")
    send(page, "A short one in rhymes")
    wait(page)
    assert server[1].state.requests[-1]["messages"][0]["content"] == "Answer in rhymes."


def test_kept_documents_are_found_again(page: Any, server: tuple[str, Any], shoot: Callable[[Any, str], None]) -> None:
    server[1].state.kept.clear()
    server[1].state.requests.clear()
    page.get_by_label("Documents kept on the server").click()
    expect(page.locator("#library-list")).to_contain_text("No documents are kept yet.")
    page.get_by_label("Keep the documents").check()
    page.keyboard.press("Escape")
    drop(page, ("lease.pdf", LEASE))
    expect(page.locator("#chips .chip-info")).to_contain_text("2 pages")
    page.get_by_label("Documents kept on the server").click()
    expect(page.locator(".read-state")).to_have_text("not read yet")
    page.keyboard.press("Escape")
    send(page, "A short one")
    wait(page)
    page.keyboard.press("Control+k")
    page.get_by_label("Documents kept on the server").click()
    expect(page.locator(".read-state")).to_have_text("read")
    shoot(page, "library")
    page.locator(".library-use").click()
    expect(page.locator("#chips .chip-info")).to_contain_text("2 pages")
    send(page, "A short one from the shelf")
    wait(page)
    assert "The rent is 900 euros" in server[1].state.requests[-1]["messages"][0]["content"]
    page.get_by_label("Documents kept on the server").click()
    page.get_by_label("Delete lease.pdf from the server").click()
    expect(page.locator("#library-list")).to_contain_text("No documents are kept yet.")
    assert server[1].state.kept == {}


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(2)</script><text>rent 900</text></svg>'
PAGE = b"<!doctype html><script>alert(3)</script><p onclick='alert(4)'>rent 900<img src=//evil.example/x>"


def scripted_pdf() -> bytes:
    action = b"<< /Type /Catalog /Pages 2 0 R /OpenAction << /S /JavaScript /JS (app.alert\\(1\\)) >> >>"
    return files.pdf(["rent 900"]).replace(b"<< /Type /Catalog /Pages 2 0 R >>", action)


def test_hostile_documents_do_nothing(page: Any) -> None:
    name = '"><img src=x onerror=alert(5)>\u202e.txt'
    drop(
        page, ("a.svg", SVG), ("b.html", PAGE), ("c.pdf", scripted_pdf()), (name, b"rent 900 <script>alert(6)</script>")
    )
    expect(page.locator("#chips .chip:not(.is-reading)")).to_have_count(4)
    send(page, "A short one")
    wait(page)
    expect(page.locator(".source")).to_have_count(4)
    for number in range(4):
        page.locator(".source").nth(number).click()
        expect(page.locator("#reader mark.is-current")).to_contain_text("rent 900")
    options = page.locator("#reader-file option")
    expect(options).to_have_count(4)
    inside = "#reader-text script, #reader-text img, .message.user img, #reader-text svg"
    expect(page.locator(inside)).to_have_count(0)
    assert page.evaluate("document.title").startswith("A short one")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen(
    open_page: Callable[..., Any], server: tuple[str, Any], scheme: str, shoot: Callable[[Any, str], None]
) -> None:
    page = open_page(server[0], 390, 780, color_scheme=scheme, has_touch=True)
    drop(page, ("lease.pdf", LEASE))
    expect(page.locator("#chips .chip-info")).to_contain_text("2 pages")
    page.locator("#composer-text").fill("Please quote")
    page.locator("#send").click()
    wait(page)
    page.locator(".source").first.click()
    reader = page.locator("#reader")
    expect(reader.locator("mark.is-current")).to_be_in_viewport()
    page.wait_for_timeout(100)
    shoot(page, f"reader-narrow-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    reader.get_by_role("button", name="Back to the answer").click()
    expect(reader).to_be_hidden()
    expect(page.locator(".source").first).to_be_focused()
