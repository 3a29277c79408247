"""The chat page in a real browser. Needs `pip install playwright` and a Chromium; skipped where either is missing.

SALA_TEST_CHROMIUM names the browser, SALA_TEST_SCREENSHOTS a directory for pictures of every state.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")

from tests.server.browser.standin import KEY, create_standin, running  # noqa: E402

expect = playwright.expect
LONG_TEXT = b"All work and no play makes a long file. " * 50_000  # 2 MB


def _send(page: Any, text: str) -> None:
    page.locator("#composer-text").fill(text)
    page.keyboard.press("Enter")


def _wait(page: Any) -> None:
    """Until the answer has ended, however it did."""
    expect(page.locator("#send")).to_have_attribute("aria-label", "Send", timeout=20_000)
    expect(page.locator(".message.assistant").last).to_have_attribute("aria-busy", "false")


def _attach(page: Any, name: str, content: bytes) -> None:
    page.set_input_files("#file-input", [{"name": name, "mimeType": "text/plain", "buffer": content}])


def test_an_answer_streams_and_is_found_again(page: Any, shoot: Callable[[Any, str], None]) -> None:
    expect(page.locator("#composer-text")).to_be_focused()
    shoot(page, "welcome")
    _send(page, "Which rivers are the longest? Please think first.")
    expect(page.locator(".thinking summary")).to_contain_text("Thinking…")
    expect(page.locator(".thinking-text")).to_be_hidden()
    _wait(page)
    expect(page.locator(".thinking summary")).to_contain_text(re.compile(r"Thought for \d+\.\d s"))
    expect(page.locator(".prose .level-2")).to_have_text("Three long rivers")
    expect(page.locator(".prose table tbody tr")).to_have_count(3)
    expect(page.locator(".prose pre code")).to_contain_text("def length")
    expect(page.locator(".prose a")).to_have_attribute("rel", re.compile("noopener"))
    expect(page.locator(".prose pre .hljs-keyword").first).to_have_text("def")
    expect(page.locator(".prose .katex")).to_have_count(4)
    expect(page.locator(".prose .math-display .katex-display")).to_have_count(1)
    expect(page.locator(".prose")).to_contain_text("costs $5 to $6 per km")
    expect(page.locator(".stats")).to_contain_text("41.3 tok/s")
    expect(page.locator("#context-text")).to_contain_text("of 1.05M tokens")
    page.reload()
    expect(page.locator(".prose .level-2")).to_have_text("Three long rivers")
    expect(page.locator(".chat-row.is-current a")).to_have_text("Which rivers are the longest? Please think first.")
    page.locator("#scroller").evaluate("node => node.scrollTop = 640")
    shoot(page, "light")
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.mouse.move(700, 500)
    shoot(page, "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_an_answer_can_be_stopped_and_asked_for_again(page: Any, server: tuple[str, Any]) -> None:
    _send(page, "A slow one")
    expect(page.locator(".prose")).to_contain_text("One word")
    page.keyboard.press("Escape")
    _wait(page)
    expect(page.locator(".remark")).to_have_text("Stopped.")
    kept = page.locator(".prose").inner_text()
    assert "One word" in kept
    page.wait_for_timeout(500)
    assert page.locator(".prose").inner_text() == kept
    assert server[1].state.aborted >= 1
    page.locator("#composer-text").press("ArrowUp")
    editor = page.get_by_label("Edit the message")
    expect(editor).to_be_focused()
    editor.fill("A short one")
    editor.press("Enter")
    _wait(page)
    expect(page.locator(".message.user .bubble")).to_have_text("A short one")
    expect(page.locator(".prose")).to_have_text("Yes: all of it is kept.")
    before = len(server[1].state.requests)
    page.get_by_label("Regenerate").click()
    _wait(page)
    assert len(server[1].state.requests) == before + 1
    assert server[1].state.requests[-1]["messages"] == [{"role": "user", "content": "A short one"}]
    expect(page.locator(".message")).to_have_count(2)


def test_the_button_stops_too(page: Any) -> None:
    _send(page, "A slow one")
    expect(page.locator(".prose")).to_contain_text("One word")
    page.get_by_role("button", name="Stop").click()
    _wait(page)
    expect(page.locator(".remark")).to_have_text("Stopped.")


def test_a_long_file_is_read_with_a_bar(page: Any, server: tuple[str, Any], shoot: Callable[[Any, str], None]) -> None:
    _attach(page, "annual report.txt", LONG_TEXT)
    expect(page.locator("#chips .chip-info")).to_have_text("1 line · 500,013 tokens")
    _send(page, "Is all of it kept? A short answer will do.")
    bar = page.get_by_role("progressbar")
    expect(bar).to_be_visible()
    seen = set()
    while bar.is_visible():
        seen.add(page.evaluate("document.querySelector('[role=progressbar]')?.ariaValueNow"))  # it may be gone by now
        if len(seen) == 8:
            shoot(page, "reading")
        page.wait_for_timeout(60)
    assert len(seen) > 5
    _wait(page)
    expect(page.locator(".message.user .chip-name")).to_have_text("annual report.txt")
    sent = server[1].state.requests[-1]["messages"][-1]["content"]
    assert LONG_TEXT.decode() in sent
    assert sent.startswith('<document name="annual report.txt">\n')
    assert sent.endswith("\n</document>\n\nIs all of it kept? A short answer will do.")
    assert server[1].state.requests[-1]["return_progress"] is True
    page.reload()
    _send(page, "Also the end? Be short.")
    _wait(page)
    expect(page.locator(".stats").last).to_contain_text("500k cached")
    assert LONG_TEXT.decode() in server[1].state.requests[-1]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("picture.png", b"\x89PNG\r\n\x1a\n\x00\x00\x00", "picture.png: it is an image"),
        ("noise.bin", bytes(range(256)) * 8, "noise.bin: it is not text"),
        ("nothing.txt", b"", "“nothing.txt” is empty"),
    ],
)
def test_other_files_are_refused_kindly(page: Any, name: str, content: bytes, words: str) -> None:
    _attach(page, name, content)
    expect(page.locator(".toast")).to_contain_text(words)
    expect(page.locator("#chips .chip")).to_have_count(0)


def test_markup_of_the_model_stays_text(page: Any) -> None:
    _send(page, "Some html please")
    _wait(page)
    prose = page.locator(".prose")
    expect(prose).to_contain_text("<script>window.hacked = 1</script>")
    expect(prose).to_contain_text('<iframe srcdoc="<script>parent.hacked=5</script>">')
    assert page.evaluate("window.hacked") is None
    assert prose.locator("script, img, iframe, b, style, svg image, math mtext script").count() == 0
    names = prose.evaluate("node => [...node.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())")
    assert [name for name in names if name.startswith("on")] == []
    for link in prose.locator("a").all():
        assert (link.get_attribute("href") or "").startswith("https://")
    _send(page, "<img src=x onerror='window.hacked=7'> short")
    _wait(page)
    expect(page.locator(".bubble").last).to_have_text("<img src=x onerror='window.hacked=7'> short")
    page.reload()
    expect(page.locator(".chat-row a")).to_have_count(1)
    assert page.evaluate("window.hacked") is None


GROWING = """\
1. one
  - child

2. two

Text with **bold**, $a_1$ and `code`.

```python
def f(): return 1
```

> quote
> - item

| a | b |
|---|---|
| 1 | $x$ |

\\[ x^2 \\]

- [x] done
- last
"""


def test_a_growing_answer_ends_as_if_shown_at_once(page: Any) -> None:
    """And blocks that did not change keep their nodes, so that nothing flickers while an answer streams."""
    grown, whole, num_kept = page.evaluate(
        """async (text) => {
            const { MarkdownView } = await import("/web/markdown.js");
            const [growing, whole] = [document.createElement("div"), document.createElement("div")];
            const view = new MarkdownView(growing);
            let early = null;
            for (let end = 1; end <= text.length; end += 1) {
                view.update(text.slice(0, end));
                if (text.slice(0, end).endsWith("> quote")) early = [...growing.children].slice(0, 3);
            }
            new MarkdownView(whole).update(text);
            const kept = early.filter((node) => node.isConnected || growing.contains(node)).length;
            return [growing.innerHTML, whole.innerHTML, kept];
        }""",
        GROWING,
    )
    assert grown == whole
    assert whole.count('class="katex"') == 3
    assert num_kept == 3


def test_failures_are_told_in_plain_words(page: Any, shoot: Callable[[Any, str], None]) -> None:
    _send(page, "This is too long")
    box = page.locator(".error-box")
    expect(box).to_contain_text("This is longer than the model’s context.")
    expect(box).to_contain_text("the prompt has 1,200,000 tokens")
    _send(page, "Are you busy?")
    expect(box.last).to_contain_text("The server is busy.")
    expect(box.last).to_contain_text("Try again in 7 s.")
    _send(page, "Now cut it")
    expect(box.last).to_contain_text("The connection was lost.")
    expect(page.locator(".prose").last).to_contain_text("Three long rivers")
    _send(page, "Now break it")
    expect(box.last).to_contain_text("the engine stopped")
    shoot(page, "errors")
    count = page.locator(".message").count()
    box.last.get_by_role("button", name="Try again").click()
    expect(box.last).to_contain_text("the engine stopped")
    expect(page.locator(".message")).to_have_count(count)


def test_a_dead_server_is_told(page: Any) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    _send(page, "Hello?")
    expect(page.locator(".error-box")).to_contain_text("The server does not answer.")
    page.unroute("**/v1/chat/completions")
    page.locator(".error-box").get_by_role("button", name="Try again").click()
    _wait(page)
    expect(page.locator(".error-box")).to_have_count(0)


def test_conversations_are_renamed_deleted_and_found(page: Any) -> None:
    for text in ("A short one about rivers", "A short one about mountains"):
        _send(page, text)
        _wait(page)
        page.keyboard.press("Control+k")
        expect(page.locator("#welcome")).to_be_visible()
    rows = page.locator(".chat-row a")
    expect(rows).to_have_text(["A short one about mountains", "A short one about rivers"])
    page.locator("#search").fill("RIVER")
    expect(rows).to_have_text(["A short one about rivers"])
    page.locator("#search").fill("")
    row = page.locator(".chat-row").filter(has_text="rivers")
    row.hover()
    row.get_by_label(re.compile("Rename")).click()
    page.get_by_label("Title").fill("Rivers")
    page.keyboard.press("Enter")
    expect(rows.filter(has_text="Rivers")).to_have_count(1)
    row = page.locator(".chat-row").filter(has_text="Rivers")
    row.hover()
    row.get_by_label(re.compile("Delete")).click()
    expect(rows).to_have_text(["A short one about mountains"])
    page.get_by_role("button", name="Undo").click()
    expect(rows).to_have_text(["A short one about mountains", "Rivers"])
    expect(page.locator("#chat-title")).to_have_text("Rivers")
    expect(page.locator(".prose")).to_have_text("Yes: all of it is kept.")


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Any) -> None:
    _send(page, "A slow one")
    expect(page.locator(".prose")).to_contain_text("One word")
    page.keyboard.press("Control+k")
    expect(page.locator(".chat-row.is-live")).to_have_count(1)
    _send(page, "A short one")
    _wait(page)
    page.locator(".chat-row a").filter(has_text="slow").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    _wait(page)
    expect(page.locator(".prose")).to_contain_text("One word")


def test_settings_are_sent_and_kept(page: Any, server: tuple[str, Any], shoot: Callable[[Any, str], None]) -> None:
    page.locator("#open-settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Maximum tokens", exact=True).fill("200")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("radio", name="On", exact=True).check()
    page.get_by_label("Maximum thinking tokens").fill("64")
    page.locator("#set-model").select_option("smol-sala")
    expect(page.locator("#model-note")).to_contain_text("tokens (trained on up to 32,768).")
    page.wait_for_timeout(300)
    shoot(page, "settings")
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#model-name")).to_have_text("smol-sala")
    page.reload()
    _send(page, "A short one")
    _wait(page)
    sent = server[1].state.requests[-1]
    sent.pop("tools", None)  # if they have arrived by then
    assert sent.pop("messages")[0] == {"role": "system", "content": "Be brief."}
    assert sent == {
        "model": "smol-sala",
        "temperature": 0.3,
        "top_p": 0.9,
        "max_tokens": 200,
        "seed": 7,
        "thinking_budget": 64,
        "chat_template_kwargs": {"enable_thinking": True},
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }


def test_a_key_is_asked_for_and_not_kept_unless_told(browser: Any) -> None:
    with running(create_standin(KEY)) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#key-note")).to_be_visible()
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Done").click()
        expect(page.locator("#model-chip")).to_have_attribute("data-state", "loaded")
        _send(page, "A short one")
        _wait(page)
        expect(page.locator(".prose")).to_have_text("Yes: all of it is kept.")
        assert page.evaluate("JSON.stringify({...localStorage})").find(KEY) < 0
        page.locator("#open-settings").click()
        page.get_by_label("Remember it on this computer").check()
        assert page.evaluate("JSON.stringify({...localStorage})").find(KEY) > 0
        context.close()


def test_a_narrow_screen(page: Any, shoot: Callable[[Any, str], None]) -> None:
    page.set_viewport_size({"width": 390, "height": 780})
    expect(page.locator("#sidebar")).not_to_be_visible()
    _send(page, "Which rivers are the longest?")
    _wait(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#scroller").evaluate("node => node.scrollWidth - node.clientWidth") <= 0
    page.locator("#scroller").evaluate("node => node.scrollTop = 0")
    shoot(page, "narrow")
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#sidebar")).to_be_visible()
    page.wait_for_timeout(300)
    shoot(page, "drawer")
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).not_to_be_visible()


def test_tools_are_called_when_the_user_permits_it(
    page: Any, server: tuple[str, Any], shoot: Callable[[Any, str], None]
) -> None:
    state = server[1].state
    state.calls.clear()
    _send(page, "Ask the tool, and be short.")
    cards = page.locator(".call")
    expect(cards).to_have_count(2)
    expect(cards.first).to_contain_text("Call this tool?")
    expect(cards.first.locator(".call-text")).to_contain_text('"river": "Nile"')
    shoot(page, "tools")
    page.locator("#composer-text").focus()
    page.keyboard.press("Enter")
    assert state.calls == []
    cards.first.get_by_role("button", name="Call", exact=True).click()
    expect(cards.first).to_have_attribute("data-state", "done")
    cards.nth(1).get_by_role("button", name="Don’t call").click()
    _wait(page)
    assert state.calls == [{"name": "river_length", "arguments": {"river": "Nile"}}]
    *_, asked, called, one, other = state.requests[-1]["messages"]
    assert (asked["role"], called["role"], len(called["tool_calls"])) == ("user", "assistant", 2)
    assert (one["content"], other["content"]) == ("<b>6,650</b> km", "The user did not permit this call.")
    cards.first.locator("summary").click()
    expect(cards.first.locator("details .call-text")).to_have_text("<b>6,650</b> km")
    page.reload()
    expect(page.locator(".call").nth(1)).to_contain_text("Not permitted")
    expect(page.locator("#model-chip")).to_have_attribute("data-state", "loaded")

    _send(page, "Ask the slow tool.")
    page.locator(".call").nth(2).get_by_role("button", name="Always for this tool").click()
    expect(page.locator(".call").nth(2)).to_have_attribute("data-state", "running")
    page.keyboard.press("Escape")
    expect(page.locator(".call").nth(3)).to_have_attribute("data-state", "cancelled")
    _wait(page)
    _send(page, "Ask the tool, and be short.")
    _wait(page)
    assert [one["arguments"]["river"] for one in state.calls] == ["Nile", "Slow", "Nile", "Nile"]

    page.locator("#open-settings").click()
    expect(page.locator("#tools-note")).to_have_text("river_length")
    page.locator("#set-tools").uncheck()
    page.keyboard.press("Escape")
    _send(page, "Ask the tool, and be short.")
    _wait(page)
    assert "tools" not in state.requests[-1]
