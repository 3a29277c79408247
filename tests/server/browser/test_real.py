"""The chat page against the real server with a tiny model: documents are read, asked, kept and found read."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")
pytest.importorskip("docx")

from tests.documents import files  # noqa: E402
from tests.server.browser.test_page import _send as send  # noqa: E402
from tests.server.browser.test_page import _wait as wait  # noqa: E402
from tests.server.browser.test_reading import drop  # noqa: E402
from tests.server.conftest import Server, start  # noqa: E402

expect = playwright.expect
PAGES = ["\n".join(f"Clause {page}.{line} names {page * line} euros." for line in range(1, 9)) for page in range(1, 4)]


@pytest.fixture(scope="module")
def real(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start(tiny, tmp_path_factory.mktemp("room"), ctx=4096)
    yield server
    server.stop()


def test_documents_with_the_real_server(real: Server, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{real.url}/")
    page.locator("#open-settings").click()
    page.get_by_label("Maximum tokens", exact=True).fill("8")
    page.get_by_role("button", name="Done").click()
    page.get_by_label("Documents kept on the server").click()
    page.get_by_label("Keep the documents").check()
    page.keyboard.press("Escape")
    drop(page, ("contract.pdf", files.pdf(PAGES)), ("lease.docx", files.docx()))
    expect(page.locator("#chips .chip-info")).to_have_text(
        [re.compile("3 pages · [\\d,]+ tokens"), re.compile("lines")]
    )
    send(page, "What does clause 2.3 say?")
    wait(page)
    expect(page.locator(".error-box")).to_have_count(0)
    sources = page.locator(".source:enabled")
    expect(sources.first).to_be_visible()
    place = sources.first.locator(".source-place").inner_text()
    sources.first.click()
    mark = page.locator("#reader mark.is-current").first
    expect(mark).to_be_in_viewport()
    name = page.locator("#reader-file option:checked").inner_text()
    assert place.startswith(f"{name}, ")
    assert mark.inner_text().strip() in texts_of(real)[name]
    mark.click()
    expect(sources.first).to_be_focused()
    check_read_states(page, "read", "read")
    page.keyboard.press("Control+k")  # a conversation may begin with the first of them, but not with the second
    check_read_states(page, "not read yet", "read", closes=False)
    page.locator(".library-use").last.click()
    expect(page.locator("#chips .chip-name")).to_have_text(["contract.pdf"])
    check_read_states(page, "not read yet", "read", closes=False)
    page.locator(".library-use").first.click()
    expect(page.locator("#chips .chip-name")).to_have_text(["contract.pdf", "lease.docx"])
    check_read_states(page, "read", "read")


def texts_of(real: Server) -> dict[str, str]:
    """Return the texts of the documents that the server keeps."""
    with real.client() as client:
        kept = [client.get(f"/v1/documents/{one['id']}").json() for one in client.get("/v1/documents").json()["data"]]
    return {document["name"]: document["text"] for one in kept for document in one["documents"]}


def check_read_states(page: Any, lease: str, contract: str, closes: bool = True) -> None:
    page.get_by_label("Documents kept on the server").click()
    expect(page.locator(".library-use .chip-name")).to_have_text(["lease.docx", "contract.pdf"])
    expect(page.locator(".read-state")).to_have_text([lease, contract])
    if closes:
        page.keyboard.press("Escape")
