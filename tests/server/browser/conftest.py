"""A Chromium for all tests of the page, and the stand-in server."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    return os.environ.get("SALA_TEST_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=20_000)  # reading a file starts a process
    path = find_browser()
    with playwright.sync_playwright() as driver:
        if path is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip("there is no Chromium")
        browser = driver.chromium.launch(executable_path=path, args=[*FLAGS, "--disable-component-update"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, Any]]:
    from tests.server.browser.standin import create_standin, running

    app = create_standin()
    with running(app) as url:
        yield url, app


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens fresh browser profiles; whatever the browser complains about or asks of other hosts fails the test."""
    contexts: list[Any] = []
    complaints: list[str] = []
    foreign: list[str] = []

    def open_page(url: str, width: int = 1200, height: int = 800, **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, **{"color_scheme": "light", **options}
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda said: complaints.append(said.text) if "Content Security Policy" in said.text else None
        )
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: None if request.url.startswith(url) else foreign.append(request.url))
        page.goto(url)
        playwright = pytest.importorskip("playwright.sync_api")
        playwright.expect(page.locator("#model-chip")).to_have_attribute("data-state", "loaded")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in foreign if not url.startswith(("data:", "blob:"))] == []


@pytest.fixture
def page(open_page: Callable[..., Any], server: tuple[str, Any]) -> Any:
    return open_page(server[0])


@pytest.fixture
def shoot(tmp_path: Path) -> Callable[[Any, str], None]:
    place = Path(os.environ.get("SALA_TEST_SCREENSHOTS", tmp_path))
    place.mkdir(parents=True, exist_ok=True)

    def shoot(page: Any, name: str) -> None:
        page.screenshot(path=place / f"web-{name}.png")

    return shoot
