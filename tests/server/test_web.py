"""The chat page: what is served and with which headers, that it loads nothing from elsewhere, what its Markdown is."""

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
from fastapi.testclient import TestClient  # noqa: E402

from sala.server import web  # noqa: E402

FILES = Path(str(resources.files("sala.server"))) / "web"
NAMES = sorted(web.CONTENT_TYPES)
PARSER = Path(__file__).parent / "browser" / "parse.mjs"


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = fastapi.FastAPI()
    app.include_router(web.router)
    return TestClient(app)


def _address(name: str) -> str:
    return "/" if name == web.PAGE else f"/web/{name}"


def test_the_list_is_the_directory() -> None:
    assert sorted(path.name for path in FILES.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_file_comes_whole_and_guarded(client: TestClient, name: str) -> None:
    answer = client.get(_address(name))
    assert answer.status_code == 200
    assert answer.content == (FILES / name).read_bytes()
    assert answer.headers["content-type"] == web.CONTENT_TYPES[name]
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


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith((".js", ".css"))])
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    text = (FILES / name).read_text()
    addresses = [found for found in re.findall(r"https?://[\w.]+[^\s\"'`)]*", text) if "www.w3.org" not in found]
    assert addresses == []
    assert "@import" not in text
    assert re.findall(r"url\(", text) == []
    for imported in re.findall(r"""from ["']([^"']+)["']""", text):
        assert imported.removeprefix("./") in NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".js")])
def test_no_text_ever_becomes_markup(name: str) -> None:
    text = (FILES / name).read_text()
    ways = "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|createContextualFragment|setHTML|srcdoc"
    assert re.findall(ways + r"|\beval\(|new Function", text) == []


# ------------------------------------------------------------------------------------------------------- Markdown


def _parse(*texts: str) -> list[list[dict[str, Any]]]:
    """The trees of some texts; a text that takes for ever runs into the time limit."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    command = [node, str(PARSER), str(FILES / "markdown.js")]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    trees: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return trees


def _show(nodes: list[dict[str, Any]]) -> str:
    """A tree in short: types in brackets, text as it is."""
    shown = ""
    for node in nodes:
        children = node.get("children") or node.get("blocks")
        if node["type"] == "text":
            shown += node["text"]
        elif node["type"] == "list":
            items = "".join(f"({_show(item['blocks'])})" for item in node["items"])
            shown += f"[{'ul' if node['start'] is None else 'ol'} {items}]"
        elif node["type"] == "table":
            rows = [node["head"], *node["rows"]]
            shown += "[table " + "/".join("|".join(_show(cell) for cell in row) for row in rows) + "]"
        elif node["type"] == "link":
            shown += f"[link {node['href']} {_show(children)}]"
        else:
            shown += f"[{node['type']} {_show(children) if children else node.get('text', '')}]"
    return shown


CASES = {
    "# One **two**": "[heading One [strong two]]",
    "*a* _b_ **c** __d__ ~~e~~ snake_case": "[paragraph [em a] [em b] [strong c] [strong d] [del e] snake_case]",
    "***both*** **a*b*c**": "[paragraph [em [strong both]] [strong a[em b]c]]",
    "**重要：**内容": "[paragraph [strong 重要：]内容]",
    "- a\n  - b\n- c": "[ul ([paragraph a][ul ([paragraph b])])([paragraph c])]",
    "1. a\n  - b\n2. c": "[ol ([paragraph a][ul ([paragraph b])])([paragraph c])]",
    "> a\n> - b": "[quote [paragraph a][ul ([paragraph b])]]",
    "so:\n|a|b|\n|:-|-:|\n|`x`|y \\| z|": "[paragraph so:][table a|b/[code-span x]|y | z]",
    "```py\na\n\n**b**\n```\nc": "[code a\n\n**b**][paragraph c]",
    "```\nnot closed": "[code not closed]",
    "$5 and $6 but $x_1$ and \\(a_b\\)": "[paragraph $5 and $6 but [math $x_1$] and [math \\(a_b\\)]]",
    "a\nb  \nc": "[paragraph a[break ]b[break ]c]",
    "[a](https://x.y/z_(q)) https://c.d/e).": (
        "[paragraph [link https://x.y/z_(q) a] [link https://c.d/e https://c.d/e]).]"
    ),
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](//x.y)": "[paragraph [span a] [span b] [span c]]",
    "[d](JaVaScRiPt:1) [e](vbscript:1) [f](\\x01javascript:1)": "[paragraph [span d] [span e] [span f]]",
    "![i](https://x.y/t.png)": "[paragraph [link https://x.y/t.png i]]",
    "<script>alert(1)</script> &lt;b&gt;": "[paragraph <script>alert(1)</script> <b>]",
    "---": "[rule ]",
}


def test_markdown() -> None:
    assert {text: _show(tree) for text, tree in zip(CASES, _parse(*CASES), strict=True)} == CASES


def test_hostile_markdown_comes_to_an_end() -> None:
    pieces = ["*", "*a ", "`", "`a``b", "[", "[a](", "> ", "- ", "<", "_a_ ", "**a", "|", "$$ x\n", "- a\n", "http://"]
    pieces += ["a**b", "\\(", "![", "x ", "|a|b|\n|-|-|\n", "&", "~~", "$a", "#", "\t- a\n", "1) ", "```\n"]
    texts = [piece * (200_000 // len(piece)) for piece in pieces]
    texts += [piece * (19_000 // len(piece)) for piece in pieces]
    texts.append("\n".join(" " * depth + "- a" for depth in range(400)))
    assert all(_parse(*texts))
