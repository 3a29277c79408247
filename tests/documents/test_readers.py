"""Files in, text with its places out, or one clear line: all formats, odd encodings, broken and hostile files."""

import json
import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from sala.documents import reader
from sala.documents.find import find_files
from sala.documents.model import MIB, Document
from sala.documents.reader import DocumentSet, read_documents
from sala.errors import InputError
from tests.documents import files

MOST_OWN, MOST_CHILD = 128 * MIB, 512 * MIB  # resident bytes; a bomb unpacks to 200 MiB and is cut far before
GERMAN = "Die Größe der Straße beträgt fünf Meter, sagt Müller.\nWeiße Äpfel und süße Öle für die Gäste.\n"
RUSSIAN = "Съешь ещё этих мягких французских булок, да выпей чаю.\nВ чащах юга жил бы цитрус.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。\nどこで生れたかとんと見当がつかぬ。\n"
TEXTS = {
    "utf8.txt": GERMAN.encode(),
    "utf8-mark.txt": GERMAN.encode("utf-8-sig"),
    "latin1.txt": GERMAN.encode("latin-1"),
    "utf16.txt": GERMAN.encode("utf-16"),
    "utf16-no-mark.txt": GERMAN.encode("utf-16-le"),
    "utf32.txt": GERMAN.encode("utf-32"),
    "windows.txt": GERMAN.replace("\n", "\r\n").encode("cp1252"),
    "russian-1251.txt": RUSSIAN.encode("cp1251"),
    "russian-koi8.txt": RUSSIAN.encode("koi8_r"),
    "japanese-sjis.txt": JAPANESE.encode("shift_jis"),
    "japanese-jis.txt": JAPANESE.encode("iso2022_jp"),
}
CONTENTS = {
    "a.pdf": files.pdf(["first page\nsecond line", "", "third page says \xfcber"]),
    "no-suffix": files.pdf(["known by its content"]),
    "xetex.pdf": files.spaceless_pdf(),
    "lease.docx": files.docx(),
    "deck.pptx": files.pptx(),
    "sales.xlsx": files.xlsx(),
    "far.xlsx": files.far_xlsx(),
    "book.epub": files.epub(),
    "page.html": b"""<html><head><title>Fees</title><script>evil()</script><style>p{}</style></head><body>
        <h2>Costs</h2><p>A  fee of <b>30</b>&nbsp;&euro;.</p><table><tr><th>a<th>b</tr><tr><td>1<td>2</tr></table>
        <pre>x  =  1\n  y</pre><ul><li>one<li>two</ul></body></html>""",
    "meta.htm": b'<html><meta charset="cp1251"><p>' + RUSSIAN.encode("cp1251"),
    "entities.xhtml": b"""<?xml version="1.0"?>\n<!DOCTYPE html [<!ENTITY e SYSTEM "file:///etc/passwd">
        <!ENTITY f "a ]> b"> <!ELEMENT p (#PCDATA)>]>\n<html><body><p>&e; Fees &lt; 3</p></body></html>""",
    "doctype.xhtml": b'<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "x.dtd"><html><p>a [link] > b</p></html>',
    "note.eml": files.mail(files.pdf(["pay by June"])),
    "all.mbox": b"From a@b Mon\nSubject: one\n\nfirst mail\n\nFrom c@d Tue\nSubject: two\n\nsecond mail\n",
    "table.csv": b"name,age\nAna,31\n",
    "code.py": b"def answer():\n    return 42\n",
    "many.zip": files.archive({"b/two.txt": "next", "a.html": "<p>first</p>", "inner.zip": files.nested(0)}),
    "scan.pdf": files.pdf(["", ""]),
    "locked.pdf": files.encrypted_pdf("secret"),
    "open.pdf": files.encrypted_pdf(""),
    "broken.pdf": files.pdf(["lost"])[:200],
    "broken.docx": files.docx()[:3000],
    "broken.zip": files.archive({"x.txt": "x" * 5000}, 0)[:400],
    "locked.zip": files.with_password(files.archive({"x.txt": "text"})),
    "drm.epub": files.epub(encrypted="OPS/one.xhtml"),
    "bomb.zip": files.archive({"zeros.txt": bytes(20 << 20)}),
    "bomb.docx": files.archive({"word/document.xml": bytes(20 << 20)}),
    "laughs.docx": files.laughing_docx(),
    "laughs.epub": files.archive({"META-INF/container.xml": files.laughs() + "<x>&j;</x>"}),
    "bomb.pdf": files.pdf(["", "second"], {0: zlib.compress(bytes(200 << 20), 1)}),
    "nested.zip": files.nested(4),
    "arrays.zip": files.archive({f"{number}.bin": bytes(99) for number in range(5)}),
    "old.doc": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
    "empty.txt": b" \n",
    "noise.bin": bytes(range(256)) * 20,
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(60),
    "z-copy.txt": b"name,age\nAna,31\n",
}  # fmt: skip
PLACES = {  # label of the section, and text that is in it
    "a.pdf": {"page 1": "first page\nsecond line", "page 3": "third page says über"},
    "no-suffix": {"page 1": "known by its content"},
    "xetex.pdf": {"page 1": "two words"},
    "lease.docx": {"": "# Lease\nThe rent is 900 euros a month\nDeposit | 1800\nSigned in Bonn."},
    "deck.pptx": {"slide 1": "Plan\nLaunch in May", "slide 2": "Risks\nRain\nCost | 12 million\nNotes: Smile here"},
    "sales.xlsx": {"sheet Sales": "Region,Units\nNorth,41\nSouth East,7\n"},
    "far.xlsx": {"sheet Far": "near\n", "sheet Next": "the next sheet\n"},
    "book.epub": {
        "chapter 1: The Calm": "# The Calm\n\nAna slept.",
        "chapter 2: The Storm": "# The Storm\n\nIt rained.",
    },
    "page.html": {"": "Fees\n\n## Costs\n\nA fee of 30 €.\n\na | b\n1 | 2\n\nx  =  1\n  y\n\n- one\n- two"},
    "meta.htm": {"": RUSSIAN.strip().replace("\n", " ")},
    "entities.xhtml": {"": "&e; Fees < 3"},
    "doctype.xhtml": {"": "a [link] > b"},
    "note.eml": {"": "Please pay 77 euros."},
    "note.eml/invoice.pdf": {"page 1": "pay by June"},
    "all.mbox": {"message 1": "Subject: one\n\nfirst mail", "message 2": "Subject: two\n\nsecond mail"},
    "table.csv": {"": "name,age\nAna,31\n"},
    "code.py": {"": "def answer():\n    return 42\n"},
    "many.zip/a.html": {"": "first"},
    "many.zip/b/two.txt": {"": "next"},
    "many.zip/inner.zip/deep.txt": {"": "the innermost text"},
    "open.pdf": {"page 1": "kept secret"},
    "bomb.pdf": {"page 2": "second"},
}
REASONS = {
    "scan.pdf": "OCR",
    "locked.pdf": "encrypted; save it without a password",
    "broken.pdf": "damaged",
    "broken.docx": "damaged",
    "broken.zip": "damaged",
    "locked.zip/x.txt": "encrypted",
    "drm.epub": "encrypted (DRM)",
    "bomb.zip": "zip bomb",
    "bomb.docx": "zip bomb",
    "laughs.docx": "",
    "laughs.epub": "damaged",
    "nested.zip/level3.zip/level2.zip/level1.zip/level0.zip": "nested",
    "arrays.zip": "none of its 5 files can be read (it is not text)",
    "old.doc": "old Office format",
    "empty.txt": "empty",
    "noise.bin": "not text",
    "picture.png": "image",
    "link-out": "a link out of the directory",
    "link-in": "it is a link",
    "pipe": "not a regular file",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("documents")
    (root / "secret.txt").write_text("out of the directory")
    folder = root / "set"
    folder.mkdir()
    for name, content in {**TEXTS, **CONTENTS}.items():
        (folder / name).write_bytes(content)
    (folder / ".hidden").write_text("hidden")
    (folder / "link-out").symlink_to(root / "secret.txt")
    (folder / "link-in").symlink_to(folder / "code.py")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> DocumentSet:
    return read_documents([folder])


def texts(found: DocumentSet, name: str) -> dict[str, str]:
    document = next(one for one in found.documents if one.name == f"set/{name}")
    return {section.label: section.text for section in document.sections}


@pytest.mark.parametrize("name", TEXTS)
def test_encodings(found: DocumentSet, name: str) -> None:
    wanted = {"japanese": JAPANESE, "russian": RUSSIAN}.get(name.partition("-")[0], GERMAN)
    if any(f"set/{name}" == one.name for one in found.left_out):  # the same text once is enough
        assert next(one.why for one in found.left_out if one.name == f"set/{name}").startswith(
            "it has the same text as"
        )
        return
    assert texts(found, name) == {"": wanted}


def test_every_encoding_gives_the_same_text(found: DocumentSet) -> None:
    read = [one.name for one in found.documents if one.name.removeprefix("set/") in TEXTS]
    assert len(read) == 3  # German, Russian, Japanese; the others have the same text


@pytest.mark.parametrize("name", PLACES)
def test_formats_give_their_text_with_places(found: DocumentSet, name: str) -> None:
    sections = texts(found, name)
    assert list(sections) == list(PLACES[name])
    for label, text in PLACES[name].items():
        assert text in sections[label]
    assert not any(hidden in "".join(sections.values()) for hidden in ("evil()", "a year", "not this part"))


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_read_is_left_out_with_one_line(found: DocumentSet, name: str) -> None:
    (line,) = [str(one) for one in found.left_out if one.name == f"set/{name}"]
    assert REASONS[name] in line
    assert "\n" not in line


def test_nothing_else_is_read(found: DocumentSet) -> None:
    names = {one.name.removeprefix("set/") for one in found.documents}
    assert names <= {*PLACES, *TEXTS}
    everything = "".join(section.text for one in found.documents for section in one.sections)
    assert "out of the directory" not in everything
    assert "hahaha" not in everything


def test_hypertext_with_declarations_of_its_own_is_only_its_text(found: DocumentSet) -> None:
    assert texts(found, "entities.xhtml") == PLACES["entities.xhtml"]
    assert texts(found, "doctype.xhtml") == PLACES["doctype.xhtml"]


def test_what_is_missing_is_told(found: DocumentSet) -> None:
    notes = {one.name: one.notes for one in found.documents}
    assert notes["set/a.pdf"] == ["page 2 without text"]
    assert notes["set/bomb.pdf"] == ["page 1 cannot be read"]
    assert notes["set/far.xlsx"] == ["sheet Far from row 100,003 on, after 100,001 empty rows, is not read"]
    assert [name for name, told in notes.items() if told] == ["set/a.pdf", "set/bomb.pdf", "set/far.xlsx"]


def test_rows_keep_their_numbers(found: DocumentSet) -> None:
    (document,) = [one for one in found.documents if one.name == "set/sales.xlsx"]
    assert [(section.unit, section.numbers) for section in document.sections] == [("row", [1, 2, 90])]


def test_a_pdf_of_500_dense_pages(tmp_path: Path) -> None:
    """Half a million characters, of which no page leaves anything in memory but its text."""
    line = "page {0}, line {1}: the rent is {2} euros a month, and may be raised once in {0} years"
    pages = ["\n".join(line.format(page, at, page * at) for at in range(1, 14)) for page in range(1, 501)]
    (tmp_path / "long.pdf").write_bytes(files.pdf(pages))
    worker = reader.SandboxProcess(program=reader.CHILD)
    try:
        (document,) = reader.read_file(worker, tmp_path / "long.pdf", "long.pdf").documents
        assert worker._process is not None
        lines = Path(f"/proc/{worker._process.pid}/status").read_text().splitlines()
    finally:
        worker.close()
    assert [(section.label, section.text) for section in document.sections] == [
        (f"page {number}", text) for number, text in enumerate(pages, 1)
    ]
    (most,) = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    assert most << 10 < MOST_OWN


def test_a_repository_of_2000_files_is_read_as_git_sees_it(tmp_path: Path) -> None:
    for number in range(2000):
        folder = tmp_path / f"part{number % 20}"
        folder.mkdir(exist_ok=True)
        (folder / f"file{number}.py").write_text(f"value = {number}\n")
    (tmp_path / ".gitignore").write_text("*.log\n/build/\npart3/file1*.py\n!important.log\ndeep/**/x.txt\n")
    (tmp_path / "part4" / ".gitignore").write_text("*\n!file4.py\n!.gitignore\n")
    for name in (
        "a.log",
        "important.log",
        "build/out.txt",
        "part5/b.log",
        ".github/ci.yml",
        "deep/1/2/x.txt",
        "deep/y",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"text of {name}")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".git" / "info" / "exclude").write_text("file7.py\n")
    tracked = {"a.log", "build/out.txt", "part3/file143.py", "part4/file24.py", "part7/file7.py", "part8/file8.py"}
    subprocess.run(["git", "-C", str(tmp_path), "add", "--force", *sorted(tracked)], check=True)
    command = ["git", "-C", str(tmp_path), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    found = read_documents([tmp_path])
    assert {one.name.partition("/")[2] for one in found.documents} == set(listed)
    assert tracked < set(listed)
    assert len(listed) > 1800
    ignored = 2000 + 7 + 2 - len(listed)  # seven with names of their own, two lists of rules
    assert [str(one) for one in found.left_out] == [f"{ignored} files in {tmp_path.name}: left out: Git ignores them"]
    inner = read_documents([tmp_path / "part3"])
    assert {one.name for one in inner.documents} == {name for name in listed if name.startswith("part3/")}


def test_order_depends_on_names_alone(tmp_path: Path) -> None:
    for name in ("b.txt", "a10.txt", "a9.txt"):
        (tmp_path / name).write_text(name)
    paths = [tmp_path / "b.txt", str(tmp_path / "a*.txt"), tmp_path / "a9.txt"]
    names = [one.name for one in read_documents(paths).documents]
    assert names == [one.name for one in read_documents(paths[::-1]).documents] == ["a9.txt", "a10.txt", "b.txt"]


def test_directories_with_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x/docs/a.md", "y/docs/a.md", "y/docs/b.md", "y/more/c.md", "z/x/docs/a.md", "more.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"text of {name}")
    names = [one.name for one in read_documents(["x/docs", "y/docs", "./y/docs/", "y/more", "more.md"]).documents]
    assert names == ["more/c.md", "more.md", "x/docs/a.md", "y/docs/a.md", "y/docs/b.md"]
    names = [one.name for one in read_documents(["x/docs", "x/docs/"]).documents]
    assert names == ["docs/a.md"]
    names = [one.name for one in read_documents(["x", "z/x"]).documents]
    assert names == ["x/docs/a.md", "z/x/docs/a.md"]
    names = [one.name for one in read_documents(["x/docs/a.md", "y/docs/a.md", "z/x"]).documents]
    assert names == [f"{tmp_path.as_posix()}/z/x/docs/a.md", "x/docs/a.md", "y/docs/a.md"]


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", f"{tmp_path}/*.pdf"):
        with pytest.raises(InputError, match="does not exist"):
            read_documents([path])


def test_a_file_that_takes_too_long_is_left_out_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pdf").write_bytes(files.pdf(["much work"] * 3000))
    (tmp_path / "b.txt").write_text("quick")
    monkeypatch.setattr(reader, "READ_S", 0.4)
    monkeypatch.setattr(reader, "READ_S_PER_MIB", 0.0)
    found = read_documents([tmp_path / "a.pdf", tmp_path / "b.txt"])
    assert [one.name for one in found.documents] == ["b.txt"]
    assert "takes more than 0 s" in str(found.left_out[0])


def test_the_child_process_is_limited(tmp_path: Path) -> None:
    worker = reader.SandboxProcess(program=reader.CHILD)
    try:
        (tmp_path / "a.txt").write_text("text")
        worker.ask("read", {"path": str(tmp_path / "a.txt"), "name": "a.txt"}, 10)
        assert worker._process is not None
        limits = {
            kind: resource.prlimit(worker._process.pid, kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
        }
    finally:
        worker.close()
    assert limits == {resource.RLIMIT_AS: (2 << 30, 2 << 30), resource.RLIMIT_FSIZE: (0, 0)}  # for good


def test_the_whole_set_is_read_within_the_limits(folder: Path) -> None:
    """No file of the set needs all its time or memory, and the text that bombs unpack to never enters this process."""
    script = """
import json, pathlib, resource, sys
from sala.documents.reader import read_documents
left_out = [str(one) for one in read_documents([sys.argv[1]]).left_out]
(own,) = [line.split()[1] for line in pathlib.Path("/proc/self/status").open() if line.startswith("VmHWM")]
print(json.dumps([left_out, int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""
    command = [sys.executable, "-c", script, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(reader.__file__).parents[2])}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    left_out, own, child = json.loads(output)
    assert len(left_out) > 10
    assert [line for line in left_out if "takes more than" in line or "too much memory" in line] == []
    assert own << 10 < MOST_OWN
    assert child << 10 < MOST_CHILD


def test_a_hostile_ignore_file_does_not_hold_up_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("a*" * 40 + "b\n")
    (tmp_path / ("a" * 200)).write_text("text")
    monkeypatch.setattr(reader, "FIND_S", 1.0)
    with pytest.raises(InputError, match="takes more than 1 s to list"):
        read_documents([tmp_path])


def test_names_cannot_control_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m\n.txt").write_text("text")
    (document,) = read_documents([tmp_path]).documents
    assert isinstance(document, Document)
    assert document.name.endswith("a\\x1b[31m\\n.txt")


def test_find_is_stable(tmp_path: Path) -> None:
    for name in ("chapter10", "chapter2", "Chapter1"):
        (tmp_path / name).write_text(name)
    assert [name for name, _ in find_files(str(tmp_path), "x").files] == ["x/Chapter1", "x/chapter2", "x/chapter10"]
