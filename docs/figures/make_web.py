"""Make the pictures of the chat page: `python docs/figures/make_web.py`, with Playwright and a Chromium installed.

The page is the real one; the server is the stand-in of its tests, which reads documents as the real server does.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from tests.documents import files
from tests.server.browser import standin

HERE = Path(__file__).parent
NAMES = ("chromium", "chromium-browser", "google-chrome")
COLOURS = 96

CLAUSES = [
    """Lease of a flat
Landlord: Erika Muster, Bonn. Tenant: Hans Beispiel, Bonn.
The flat is on the third floor of Lindenweg 12, with four rooms, a kitchen,
a bath and a cellar, 92 square metres in all.
The lease begins on 1 March and runs for an indefinite time.""",
    """Rent and costs
The rent is 940 euros a month without heating.
For heating and water the tenant pays 180 euros in advance each month.
Both are due on the third working day of the month.
Costs are settled once a year, within twelve months after the year has ended.
If the tenant pays late, interest is due from the day after.""",
    """Deposit
The tenant pays a deposit of 2,820 euros, in three parts of 940 euros.
The first part is due when the lease begins.
The landlord keeps the deposit apart from her own money, at the usual interest.
It is returned within six months after the tenant has moved out.""",
    """Notice
The tenant may give notice of three months at the end of any month.
For the landlord the notice is three months in the first five years,
six months after five years and nine months after eight years.
Notice must be given in writing; an e-mail is not enough.
Pets that are larger than a cat need the consent of the landlord.""",
]
ANSWER = """\
You pay **1,120 euros a month**: “The rent is 940 euros a month without heating”, and 180 euros in advance for heating \
and water.

| what | amount | due |
|:--|--:|:--|
| rent | 940 € | third working day |
| heating and water | 180 € | third working day |
| deposit | 2,820 € | in three parts[^1] |

To leave, you give “notice of three months at the end of any month”, in writing.

[^1]: The first when the lease begins; $3 \\times 940 = 2820$ euros.
"""
ANSWER = ANSWER.replace("$3 \\times 940 = 2820$", "$n \\times 940 = 2820$ with $n = 3$")
PASSAGES = (
    ("The rent is 940 euros a month without heating.", 0.31),
    ("For heating and water the tenant pays 180 euros in advance each month.\nBoth are due on", 0.24),
    ("The tenant pays a deposit of 2,820 euros, in three parts of 940 euros.", 0.17),
    ("The tenant may give notice of three months at the end of any month.", 0.12),
)


def answer_to(question: str) -> str:
    """Return what the stand-in says about the lease."""
    return ANSWER if "lease" in question or "pay" in question else standin.MARKDOWN


def find_sources(messages: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    """Return the passages above, where they stand in the messages, and the quotes of an answer."""
    found = FIND_SOURCES(messages, answer)
    text = messages[0]["content"]
    places = [(one, weight, text.find(one)) for one, weight in PASSAGES]
    passages = [
        {"text": one, "weight": weight, "tokens": [0, 1], "message": 0, "start": at, "end": at + len(one)}
        for one, weight, at in places
        if at >= 0
    ]
    return {"passages": passages, "quotes": found["quotes"]}


FIND_SOURCES = standin.find_sources


def main() -> None:
    expect.set_options(timeout=30_000)
    standin._answer_to = answer_to
    standin.find_sources = find_sources
    path = os.environ.get("SALA_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    flags = ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"]
    with standin.running(standin.create_standin()) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        for scheme in ("light", "dark"):
            page = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme=scheme).new_page()
            ask(page, url, "Which rivers are the longest?")
            page.locator("#scroller").evaluate("node => node.scrollTop = 640")
            shoot(page, f"web-{scheme}")
        page = browser.new_context(viewport={"width": 1440, "height": 860}, color_scheme="light").new_page()
        read(page, url)
        page.locator(".source").first.click()
        page.mouse.move(700, 20)
        shoot(page, "web-sources")
        page.locator("#reader-close").click()
        show_versions(page)
        show_library(page)
        page = browser.new_context(viewport={"width": 390, "height": 780}, color_scheme="light").new_page()
        ask(page, url, "Which rivers are the longest?")
        page.locator("#scroller").evaluate("node => node.scrollTop = 0")
        shoot(page, "web-narrow")
        page = browser.new_context(viewport={"width": 390, "height": 780}, color_scheme="dark").new_page()
        read(page, url)
        page.locator(".source").first.click()
        shoot(page, "web-sources-narrow")
        browser.close()


def ask(page: Page, url: str, question: str) -> None:
    if not page.url.startswith(url):
        page.goto(url)
        expect(page.locator("#model-chip")).to_have_attribute("data-state", "loaded")
    page.locator("#composer-text").fill(question)
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant").last).to_have_attribute("aria-busy", "false", timeout=30_000)


def read(page: Page, url: str) -> None:
    """Ask about a lease and a house rule."""
    page.goto(url)
    rules = ("House rules\n" + "Quiet hours are from 22 to 6.\n" * 40).encode()
    given = [("lease.pdf", files.pdf(CLAUSES)), ("house rules.txt", rules)]
    page.set_input_files(
        "#file-input", [{"name": name, "mimeType": "text/plain", "buffer": content} for name, content in given]
    )
    expect(page.locator("#chips .chip:not(.is-reading)")).to_have_count(2)
    ask(page, url, "What do I pay under this lease, and how can I leave?")
    expect(page.locator(".source")).to_have_count(4)


def show_versions(page: Page) -> None:
    page.get_by_label("Regenerate").click()
    expect(page.locator(".versions")).to_have_text("2/2")
    expect(page.locator(".message.assistant").last).to_have_attribute("aria-busy", "false", timeout=30_000)
    page.locator("#open-settings").click()
    page.locator("#preset").select_option("Close to the text")
    page.get_by_label("System prompt").fill("Answer from the documents alone, and quote them.")
    page.wait_for_timeout(300)
    shoot(page, "web-settings")
    page.get_by_role("button", name="Done").click()


def show_library(page: Page) -> None:
    page.get_by_label("Documents kept on the server").click()
    page.get_by_label("Keep the documents").check()
    page.keyboard.press("Escape")
    for name in ("handbook.epub", "minutes 2025.docx"):
        make = files.epub if name.endswith("epub") else files.docx
        page.set_input_files("#file-input", [{"name": name, "mimeType": "text/plain", "buffer": make()}])
        expect(page.locator("#chips .chip:not(.is-reading)")).to_have_count(1)
        page.get_by_label(f"Remove {name}").click()
    page.get_by_label("Documents kept on the server").click()
    expect(page.locator(".read-state").last).not_to_have_text("…")
    shoot(page, "web-library")


def shoot(page: Page, name: str) -> None:
    """Write a picture with a small palette."""
    page.wait_for_timeout(400)
    file = HERE / f"{name}.png"
    page.screenshot(path=file)
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    main()
