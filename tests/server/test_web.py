"""The chat page: what is served and with which headers, that it loads nothing from other hosts, its Markdown."""

import hashlib
import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
from fastapi.testclient import TestClient  # noqa: E402

from sala.server.http import page as web  # noqa: E402

FILES = Path(str(resources.files("sala.server"))) / "web"
NAMES = sorted(web.content_types())
OWN = sorted(web.OWN)
VENDORED: dict[str, dict[str, str]] = json.loads((FILES / web.MANIFEST).read_text())
MAX_VENDORED = 1_000_000
PARSER = Path(__file__).parent / "browser" / "parse.mjs"


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = fastapi.FastAPI()
    app.include_router(web.router)
    return TestClient(app)


def _address(name: str) -> str:
    return "/" if name == web.PAGE else f"/web/{name}"


def test_the_list_is_the_directory() -> None:
    names = {path.relative_to(FILES).as_posix() for path in FILES.rglob("*") if path.is_file()}
    assert names == {*web.OWN, web.MANIFEST, *(f"vendor/{name}" for name in VENDORED)}


def test_vendored_files_are_the_pinned_ones() -> None:
    sizes = []
    for name, entry in VENDORED.items():
        body = (FILES / "vendor" / name).read_bytes()
        assert hashlib.sha256(body).hexdigest() == entry["sha256"], name
        sizes.append(len(body))
    assert sum(sizes) < MAX_VENDORED


def test_every_vendored_package_has_its_licence() -> None:
    licences = {entry["package"] for name, entry in VENDORED.items() if name.startswith("LICENSE.")}
    assert licences == {entry["package"] for entry in VENDORED.values()}
    versions = {(entry["package"], entry["version"]) for entry in VENDORED.values()}
    assert len(versions) == len(licences)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_comes_whole_and_guarded(client: TestClient, name: str) -> None:
    answer = client.get(_address(name))
    assert answer.status_code == 200
    assert answer.content == (FILES / name).read_bytes()
    assert answer.headers["content-type"] == web.content_types()[name]
    assert answer.headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    assert "set-cookie" not in answer.headers


def test_head_has_no_body(client: TestClient) -> None:
    answer = client.head("/")
    assert answer.status_code == 200
    assert answer.content == b""


@pytest.mark.parametrize("form", ["{tag}", "W/{tag}", '"other", {tag}'])
def test_a_known_file_is_not_sent_again(client: TestClient, form: str) -> None:
    tag = client.get("/web/app.js").headers["etag"]
    answer = client.get("/web/app.js", headers={"If-None-Match": form.format(tag=tag)})
    assert answer.status_code == 304
    assert answer.content == b""
    assert answer.headers["etag"] == tag
    assert client.get("/web/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


def test_ranges_are_ignored(client: TestClient) -> None:
    ranges = "bytes=" + ",".join(f"{at}-{at}" for at in range(10_000))
    answer = client.get("/web/app.js", headers={"Range": ranges})
    assert answer.status_code == 200
    assert answer.content == (FILES / "app.js").read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        *("/web/", "/web/index.html", "/web/nothing.js", "/web/../web.py", "/web/..%2fweb.py", "/web/%2e%2e%2fweb.py"),
        *("/web/vendor/vendored.json", "/web/vendor/LICENSE.katex.txt", "/web/vendor/", "/web/vendor/..%2fapp.js"),
        *("/web/app.js%00", "/web/APP.JS", "/web/..\\web.py", "/web/C:\\x", "/web//etc/passwd", "/web/app.js/"),
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path, follow_redirects=False).status_code in (404, 307)
    assert b"APIRouter" not in client.get(path).content


def test_the_page_refers_to_its_own_files_only() -> None:
    page = (FILES / web.PAGE).read_text()
    addresses = re.findall(r"""(?:src|href)=["']([^"']*)["']""", page)
    assert addresses
    for address in addresses:
        assert address.startswith("#") or address.removeprefix("web/") in NAMES
    assert not re.search(r"\bon\w+=|style=|<style|javascript:", page)
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith((".js", ".css"))])
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    text = (FILES / name).read_text()
    addresses = [found for found in re.findall(r"https?://[\w.]+[^\s\"'`)]*", text) if "www.w3.org" not in found]
    assert addresses == []
    assert "@import" not in text
    assert re.findall(r"url\(", text) == []
    for imported in re.findall(r"""from ["']([^"']+)["']""", text):
        assert imported.removeprefix("./") in NAMES


def test_vendored_styles_load_their_own_fonts_only() -> None:
    for name in [name for name in NAMES if name.startswith("vendor/") and name.endswith(".css")]:
        text = (FILES / name).read_text()
        assert "@import" not in text
        addresses = re.findall(r"url\(([^)]*)\)", text)
        assert addresses
        assert [
            address for address in addresses if not re.fullmatch(r"fonts/KaTeX_[\w-]+\.(woff2|woff|ttf)", address)
        ] == []
        assert {f"vendor/{address}" for address in addresses if address.endswith(".woff2")} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith(".js")])
def test_no_text_ever_becomes_markup(name: str) -> None:
    text = (FILES / name).read_text()
    ways = "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|createContextualFragment|setHTML|srcdoc"
    assert re.findall(ways + r"|\beval\(|new Function", text) == []


# ------------------------------------------------------------------------------------------------------- Markdown


def _convert(*texts: str) -> list[str]:
    """Return the HTML of some texts, before it is sanitized; a text that takes for ever runs into the time limit."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    command = [node, str(PARSER), str(FILES)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pages: list[str] = json.loads(done.stdout)
    return pages


def _show(page: str) -> str:
    """HTML in short: tags without their ends and line breaks, links by address, math by its source."""
    return re.sub(r"</(?:p|h\d|li|ul|ol|pre|td|th|tr|thead|tbody|table|div|blockquote)>|⏎", "", page)


CASES = {
    "# One **two**": '<h3 class="level-1">One <strong>two</strong>',
    "*a* _b_ **c** __d__ ~~e~~ snake_case": (
        "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> <del>e</del> snake_case"
    ),
    "***both*** **a*b*c**": "<p><em><strong>both</strong></em> <strong>a<em>b</em>c</strong>",
    "**重要：**内容": "<p><strong>重要：</strong>内容",
    "- a\n  - b\n- c": "<ul><li>a<ul><li>b<li>c",
    "1. a\n  - b\n2. c": "<ol><li>a<ul><li>b<li>c",
    "1. a\n  - b\n    ```\n    x\n    ```\n2. c": '<ol><li>a<ul><li>b<pre data-language=""><code>x</code><li>c',
    "> a\n> - b": "<blockquote><p>a<ul><li>b",
    "so:\n|a|b|\n|:-|-:|\n|`x`|y \\| z|": (
        '<p>so:<div class="table"><table><thead><tr><th class="align-left">a<th class="align-right">b'
        '<tbody><tr><td class="align-left"><code>x</code><td class="align-right">y | z'
    ),
    "```py\na\n\n**b**\n```\nc": '<pre data-language="py"><code>a**b**</code><p>c',
    "```\nnot closed": '<pre data-language=""><code>not closed</code>',
    "$5 and $6 but $x_1$ and \\(a_b\\)": (
        '<p>$5 and $6 but <span class="math" data-tex="x_1">$x_1$</span> and '
        '<span class="math" data-tex="a_b">\\(a_b\\)</span>'
    ),
    "$$\na*b*c\n$$\nand \\[d\\]": (
        '<p class="math math-display" data-tex="a*b*c">$$a*b*c$$<p>and '
        '<span class="math math-display" data-tex="d">\\[d\\]</span>'
    ),
    "`$a$` and \\$b\\$": "<p><code>$a$</code> and $b$",
    "a\nb  \nc": "<p>a<br>b<br>c",
    "[a](https://x.y/z_(q)) https://c.d/e).": (
        '<p><a href="https://x.y/z_(q)">a</a> <a href="https://c.d/e">https://c.d/e</a>).'
    ),
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](//x.y)": ("<p><span>a</span> <span>b</span> <span>c</span>"),
    "[d](JaVaScRiPt:1) [e](vbscript:1) [f](\\x01javascript:1)": "<p><span>d</span> <span>e</span> <span>f</span>",
    "![i](https://x.y/t.png)": '<p><a href="https://x.y/t.png">i</a>',
    "<script>alert(1)</script> &lt;b&gt;": "<p>&lt;script&gt;alert(1)&lt;/script&gt; &lt;b&gt;",
    "| a<br>b |\n|-|": '<div class="table"><table><thead><tr><th>a<br>b<tbody>',
    "- [x] a": '<ul><li class="task"><input type="checkbox" disabled checked> a',
    "---": "<hr>",
    "a[^1] b\n\n[^1]: *c*\n  d\n[^x-2]: e": (
        '<p>a<span class="footnote-ref" data-note="1">1</span> b'
        '<div class="footnote" data-note="1"><span class="footnote-label">1</span>'
        '<span class="footnote-text"><em>c</em><br>d</span>'
        '<div class="footnote" data-note="x-2"><span class="footnote-label">x-2</span>'
        '<span class="footnote-text">e</span>'
    ),
}


def test_markdown() -> None:
    assert {text: _show(page) for text, page in zip(CASES, _convert(*CASES), strict=True)} == CASES


def test_hostile_markdown_comes_to_an_end() -> None:
    pieces = ["*", "*a ", "`", "`a``b", "[", "[a](", "> ", "- ", "<", "_a_ ", "**a", "|", "$$ x\n", "- a\n", "http://"]
    pieces += ["a**b", "\\(", "![", "x ", "|a|b|\n|-|-|\n", "&", "~~", "$a", "#", "\t- a\n", "1) ", "```\n"]
    pieces += [
        "[^1]",
        "[^1]: a\n",
        "[^1]: a\n  b",
        "[^",
        "\\[",
        "\\[\n",
        "$$\n",
        "1. a\n  - b\n",
        "[a]: b\n",
        "[a][",
        "<!--",
        "<a ",
    ]
    texts = [piece * (200_000 // len(piece)) for piece in pieces]
    texts += [piece * (7_900 // len(piece)) for piece in pieces]
    texts.append("\n".join(" " * depth + "- a" for depth in range(400)))
    pages = _convert(*texts)
    assert len(pages) == len(texts)
    assert sum(not page for page in pages) <= 2  # link definitions show nothing
