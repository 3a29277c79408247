"""Documents over HTTP: text and places of every format, exact counts, what is kept for whom, hostile uploads."""

import asyncio
import io
import json
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sala.documents.layout import lay_out
from sala.documents.model import Document, Section
from sala.documents.packing import encode_documents, pack
from sala.server import documents
from sala.server.http.keys import KeyFile
from tests.documents import files
from tests.server.conftest import Server, wait_for

PDF = files.pdf(["The rent is 900 euros.\nDue in advance.", "", "Signed in Bonn."])
LATIN = "Die Größe der Straße beträgt fünf Meter, sagt Müller.\n"


def upload(server: Server, name: str, content: bytes, key: str = "", **fields: str) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with server.client(headers=headers) as client:
        return client.post("/v1/documents", files={"file": (name, io.BytesIO(content))}, data=fields)


def test_pages_lines_and_tokens(server: Server) -> None:
    answer = upload(server, "contract.pdf", PDF).json()
    (document,) = answer["documents"]
    assert (answer["filename"], answer["bytes"], "id" in answer) == ("contract.pdf", len(PDF), False)
    assert document["notes"] == ["page 2 without text"]
    text = document["text"]
    places = {one["label"]: text[one["start"] : one["end"]] for one in document["sections"]}
    assert places == {"page 1": "The rent is 900 euros.\nDue in advance.\n", "page 3": "Signed in Bonn.\n"}
    assert text.startswith('<document name="contract.pdf">\n[page 1]\nThe rent')
    asked = [{"role": "user", "content": text + "What is the rent?"}]
    without = [{"role": "user", "content": "What is the rent?"}]
    counts = [
        server.post("/v1/chat/completions/input_tokens", {"messages": one}).json()["input_tokens"]
        for one in (asked, without)
    ]
    assert document["tokens"] == answer["tokens"] == counts[0] - counts[1]
    assert sum(one["tokens"] for one in document["sections"]) < document["tokens"]
    assert all(one["tokens"] > 0 for one in document["sections"])


@pytest.mark.parametrize("name", ["lease.docx", "deck.pptx", "sales.xlsx", "book.epub", "note.eml", "many.zip"])
def test_formats(server: Server, name: str) -> None:
    make = {
        "docx": files.docx,
        "pptx": files.pptx,
        "xlsx": files.xlsx,
        "epub": files.epub,
        "eml": lambda: files.mail(files.pdf(["pay by June"])),
        "zip": lambda: files.archive({"a.txt": "one", "b.txt": "two"}),
    }
    found = upload(server, name, make[name.rpartition(".")[2]]()).json()["documents"]
    assert len(found) == (2 if name.endswith(("eml", "zip")) else 1)
    for document in found:
        for section in document["sections"]:
            assert document["text"][section["start"] : section["end"]].strip()
    if name == "sales.xlsx":
        assert found[0]["sections"][0]["unit"] == "row"
        assert isinstance(found[0]["sections"][0]["numbers"], list)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-8-sig", "utf-32"])
def test_encodings(server: Server, encoding: str) -> None:
    found = upload(server, "note.txt", LATIN.encode(encoding)).json()["documents"]
    assert LATIN in found[0]["text"]


def test_the_text_is_what_the_packed_tokens_say(server: Server) -> None:
    many = [
        Document("a.pdf", [Section("page 1", "Ünï\ncode\n\nend"), Section("page 4", "one line")]),
        Document("b<&>.xlsx", [Section("sheet X", "r,s\nt,u\n", "row", [3, 90])]),
        Document("c.txt", [Section("", "".join(f"line number {number}\n" for number in range(1, 6001)))]),
    ]
    tokenizer = server.llm.tokenizer
    text = "".join(lay_out(document).text for document in many)
    assert tokenizer.decode(pack(encode_documents(many, tokenizer)).ids) == text


def test_a_lone_surrogate_keeps_places(server: Server) -> None:
    document = Document("s\ud800.txt", [Section("page 1", "a\udc00b"), Section("page 2", "here")])
    layout = lay_out(document)
    assert layout.text[layout.stretches[1].start : layout.stretches[1].end] == "here\n"
    assert json.loads(documents.dump_text(layout.text)) == layout.text


def test_kept_documents_belong_to_a_key(make_server: Callable[..., Server], tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    mine, theirs = keys.add("ann"), keys.add("bob")
    server = make_server(keys_file=keys.path, max_files=2)
    kept = upload(server, "contract.pdf", PDF, mine, keep="true").json()
    store = server.app.state.documents.files
    assert store.path(store.find(kept_owner(server), kept["id"])).stat().st_mode & 0o777 == 0o600
    path = f"/v1/documents/{kept['id']}"
    with server.client(headers={"authorization": f"Bearer {theirs}"}) as other:
        assert other.get("/v1/documents").json()["data"] == []
        for answer in (other.get(path), other.delete(path), other.post(f"{path}/state", json={})):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "document_not_found")
    with server.client(headers={"authorization": f"Bearer {mine}"}) as client:
        (listed,) = client.get("/v1/documents").json()["data"]
        assert (listed["filename"], listed["sections"], listed["tokens"]) == ("contract.pdf", 2, kept["tokens"])
        assert client.get(path).json() == {**kept, **listed}
        assert upload(server, "b.txt", b"two", mine, keep="true").status_code == 200
        full = upload(server, "c.txt", b"three", mine, keep="true")
        assert (full.status_code, full.json()["error"]["code"]) == (400, "too_many_files")
        assert upload(server, "c.txt", b"three", mine).status_code == 200
        assert client.delete(path).json()["deleted"] is True
        assert client.get(path).status_code == 404
    with server.client() as stranger:
        assert stranger.get("/v1/documents").status_code == 401
        assert upload(server, "a.txt", b"x").status_code == 401


def kept_owner(server: Server) -> str:
    files = server.app.state.documents.files
    (file,) = [one for one in files._files.values() if one.purpose == documents.PURPOSE]
    return file.owner


def test_read_state(make_server: Callable[..., Server], tmp_path: Path) -> None:
    """A document that was asked about is read, for any other question; with a cache on disk after a restart too."""
    server = make_server(cache_dir=tmp_path / "cache")
    text = "".join(f"line number {number}\n" for number in range(40))
    kept = upload(server, "book.txt", text.encode(), keep="true").json()
    path = f"/v1/documents/{kept['id']}/state"
    before = server.post(path, {}).json()
    assert before["cached_tokens"] == 0
    assert before["tokens"] > kept["tokens"]
    documents = kept["documents"][0]["text"]
    parts = [
        {"type": "text", "text": documents[:-1], "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Why is that so? Ünd 😀"},
    ]
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", asked).status_code == 200
    server.wait_idle()
    after = server.post(path, {}).json()
    opening = before["tokens"] - kept["tokens"]  # of the template, around the text
    assert kept["tokens"] - 4 <= after["cached_tokens"] <= kept["tokens"] + opening
    assert server.post(path, {"system": "Be brief."}).json()["cached_tokens"] == 0
    other = {"messages": [{"role": "user", "content": f"{documents}And then?"}], "max_tokens": 2}
    usage = server.post("/v1/chat/completions", other).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == after["cached_tokens"]
    server.stop()
    again = make_server(cache_dir=tmp_path / "cache")
    wait_for(lambda: again.post(path, {}).json()["cached_tokens"] == after["cached_tokens"])


def ask_about(server: Server, *documents: Any, question: str = "Why is that so?", **more: Any) -> Any:
    """Return the answer to a question about documents, sent as the chat page sends it."""
    text = "".join(one["text"] for document in documents for one in document["documents"])
    parts = [
        {"type": "text", "text": text[:-1], "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": question},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "temperature": 0, **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    server.wait_idle()
    return answer.json()


def shares(server: Server, *documents: Any) -> list[str]:
    """Return how much of each document a conversation with these documents finds in the cache, as the page says it."""
    answer = server.post("/v1/documents/state", {"documents": [one["id"] for one in documents]}).json()
    for one, state in zip(documents, answer["data"], strict=True):
        assert (state["id"], abs(state["tokens"] - one["tokens"]) <= 1) == (one["id"], True)
    missing = [one["tokens"] - one["cached_tokens"] for one in answer["data"]]
    return [
        "read" if left <= 4 else "new" if not one["cached_tokens"] else "part"
        for left, one in zip(missing, answer["data"], strict=True)
    ]


def test_read_state_of_several_documents(make_server: Callable[..., Server], tmp_path: Path) -> None:
    """What was asked about together is read in that order; a changed document leaves those before it read."""
    server = make_server(cache_dir=tmp_path / "cache")
    texts = {name: "".join(f"{name} line {number}\n" for number in range(20)) for name in ("alpha", "beta", "gamma")}
    alpha, beta, gamma = (
        upload(server, f"{name}.txt", text.encode(), keep="true").json() for name, text in texts.items()
    )
    assert shares(server, alpha, beta) == ["new", "new"]
    ask_about(server, alpha, beta)
    assert shares(server, alpha, beta) == ["read", "read"]
    assert shares(server, alpha, beta, gamma) == ["read", "read", "new"]
    assert shares(server, alpha, gamma) == ["read", "new"]
    assert shares(server, alpha) == ["read"]
    assert shares(server, beta) == ["new"]
    assert shares(server, beta, alpha) == ["new", "new"]
    state = server.post(f"/v1/documents/{alpha['id']}/state", {}).json()
    assert state["tokens"] - state["cached_tokens"] < 32  # what the template puts after it
    expected = server.post("/v1/documents/state", {"documents": [alpha["id"], gamma["id"]]}).json()["cached_tokens"]
    usage = ask_about(server, alpha, gamma)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == expected >= alpha["tokens"] - 4
    server.stop()
    again = make_server(cache_dir=tmp_path / "cache")
    wait_for(lambda: shares(again, alpha, gamma) == ["read", "read"])
    assert [shares(again, alpha, beta), shares(again, alpha), shares(again, beta)] == [["read"] * 2, ["read"], ["new"]]


def test_ends_of_many_documents(server: Server) -> None:
    """Not all of them are kept, but some on the way."""
    many = [upload(server, f"many{number}.txt", b"some text " * 4, keep="true").json() for number in range(9)]
    ask_about(server, *many)
    assert shares(server, *many) == ["read"] * 9
    read = [shares(server, *many[:count]).count("read") for count in range(1, 10)]
    assert all(count - 2 <= found <= count for count, found in enumerate(read, 1)), read


@pytest.mark.parametrize(
    ("documents", "status"), [([], 400), (["nothing"], 404), (["x"] * 257, 400), (None, 400), ("x", 400)]
)
def test_states_of_what_is_not_there(server: Server, documents: Any, status: int) -> None:
    assert server.post("/v1/documents/state", {"documents": documents}).status_code == status


def test_sources_have_file_and_place(server: Server) -> None:
    """For any client: its documents may be a part of the message, or stand in the same text as the question."""
    lines = [f"The owl has seen {number * 7} trains." for number in range(1, 13)]
    found = [upload(server, "contract.pdf", PDF).json(), upload(server, "owls.txt", "\n".join(lines).encode()).json()]
    content = "".join(one["text"] for document in found for one in document["documents"])
    sources = ask_about(server, *found, return_sources=True)["choices"][0]["sources"]["passages"]
    whole = {"messages": [{"role": "user", "content": f"{content}Why is that so?"}], "max_tokens": 2, "temperature": 0}
    answer = server.post("/v1/chat/completions", {**whole, "return_sources": True}).json()
    assert answer["choices"][0]["sources"]["passages"] == sources
    assert sources
    for passage in sources:
        assert content[passage["start"] : passage["end"]] == passage["text"]
        assert passage["file"] in ("contract.pdf", "owls.txt")
        first, last = re.fullmatch(r"(?:page 1, )?lines? (\d+)(?:-(\d+))?.*", passage["place"]).groups()
        if passage["file"] == "owls.txt":
            assert passage["text"] == "\n".join(lines[int(first) - 1 : int(last or first)])


@pytest.mark.parametrize("content", ["Why?", [{"type": "text", "text": "Why?", "cache_control": {}}]])
def test_a_mark_without_a_question_does_nothing(server: Server, content: Any) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    assert answer.status_code == 200


BAD = {
    "empty.pdf": (b"", "it is empty"),
    "broken.pdf": (PDF[:200], "it is damaged"),
    "locked.pdf": (files.encrypted_pdf("secret"), "encrypted"),
    "bomb.zip": (files.archive({"zeros.txt": bytes(20 << 20)}), "zip bomb"),
    "old.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "old Office format"),
    "picture.png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "it is an image"),
    "\x1b[31m<img src=x onerror=alert(1)>.bin": (bytes(range(256)) * 8, "it is not text"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_says_why(server: Server, name: str) -> None:
    content, why = BAD[name]
    answer = upload(server, name, content)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "file", "unreadable_document")
    assert why in error["message"]
    assert "\x1b" not in error["message"]
    assert tempfile.gettempdir() not in error["message"]


def test_scripts_are_left_out_or_stay_text(server: Server) -> None:
    page = b"<html><script>alert(1)</script><p onclick=alert(2)>Fees: 30</p></html>"
    assert re.findall("alert", upload(server, "page.html", page).json()["documents"][0]["text"]) == []
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    assert "<script>" in upload(server, "a.svg", drawing).json()["documents"][0]["text"]
    named = upload(server, '"></document>\n<document name="x.txt', b"text").json()["documents"][0]
    assert named["text"].count("<document name=") == 1


def test_too_long(server: Server) -> None:
    answer = upload(server, "long.txt", b"word " * 40_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "document_too_long")


@pytest.mark.parametrize(
    ("fields", "param"), [({"keep": "perhaps"}, "keep"), ({"keep": "true", "model": "nobody"}, "model")]
)
def test_fields(server: Server, fields: dict[str, str], param: str) -> None:
    answer = upload(server, "a.txt", b"text", **fields)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_bodies_that_are_not_uploads(server: Server) -> None:
    head = {"content-type": "multipart/form-data; boundary=b"}
    with server.client() as client:
        assert client.post("/v1/documents", json={"file": "x"}).status_code == 415
        for content in (
            b"",
            b"--b\r\n",
            b"--b\r\n\r\n\r\n--b--",
            b'--b\r\ncontent-disposition: form-data; name="file"',
        ):
            answer = client.post("/v1/documents", content=content, headers=head)
            assert (answer.status_code, set(answer.json())) == (400, {"error"})
        two = [("file", ("a.txt", b"a")), ("file", ("b.txt", b"b"))]
        assert client.post("/v1/documents", files=two).status_code == 400
        assert client.post("/v1/documents", files={"file": ("a", b"a")}, data={"keep": "x" * 5000}).status_code == 400


def test_a_server_without_files_reads_but_keeps_nothing(make_server: Callable[..., Server]) -> None:
    server = make_server(max_files=0)
    assert upload(server, "a.txt", b"text").status_code == 200
    refused = upload(server, "a.txt", b"text", keep="true")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "files_unavailable")


def test_a_slow_file_delays_its_own_key_only(make_server: Callable[..., Server], monkeypatch: Any) -> None:
    server = make_server()
    reader = server.app.state.document_reader
    is_free, names = threading.Event(), []
    read = documents.read_file

    def slowly(worker: Any, path: Any, name: str, max_s: float) -> Any:
        names.append(name)
        if name == "slow.txt":
            is_free.wait(20)
        return read(worker, path, name, max_s)

    monkeypatch.setattr(documents, "read_file", slowly)
    monkeypatch.setattr(documents, "MAX_WAITING", 2)
    answers: list[int] = []

    def send(name: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(upload(server, name, b"text").status_code))
        thread.start()
        return thread

    threads = [send("slow.txt")]
    wait_for(lambda: "slow.txt" in names)
    threads.append(send("next.txt"))
    wait_for(lambda: reader._waiting.total() == 2)
    assert names == ["slow.txt"]
    assert upload(server, "more.txt", b"text").status_code == 429
    assert asyncio.run(reader.read("another owner", "other.txt", io.BytesIO(b"text"))).documents
    is_free.set()
    for thread in threads:
        thread.join(20)
    assert answers == [200, 200]
    assert names == ["slow.txt", "other.txt", "next.txt"]
    assert not reader._turns
    assert not reader._waiting
