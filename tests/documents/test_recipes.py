"""The recipes for long documents: every command and program of the page runs as printed, on small files.

And the example of the page before it, whose table is what the command prints.
"""

import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import docx
import pytest

import sala.cli
from tests.documents import files

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "long-documents.md"
BLOCKS = re.findall(r"^```(sh|python|json)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
# Instead of running, `sala` notes its arguments and what is piped to it: one directory per call.
RECORD = """
sala() {
    number=$(($(ls "$CALLS" | wc -l) + 1)); mkdir "$CALLS/$number"
    printf '%s\\0' "$@" > "$CALLS/$number/arguments"
    if [ -p /dev/stdin ]; then cat > "$CALLS/$number/input"; fi
}
"""


def expand(block: str, place: Path) -> list[tuple[list[str], bytes | None]]:
    """Let a shell expand a block; return the arguments of each call of sala, and what is piped to it."""
    shutil.rmtree(place / "calls", ignore_errors=True)
    (place / "calls").mkdir()
    script = f"set -euo pipefail\nCALLS={place / 'calls'}\n{RECORD}\n{block}"
    subprocess.run(["bash", "-c", script], cwd=place / "work", check=True, timeout=60)
    found = []
    for call in sorted((place / "calls").iterdir(), key=lambda call: int(call.name)):
        arguments = (call / "arguments").read_text().split("\0")[:-1]
        found.append((arguments, (call / "input").read_bytes() if (call / "input").exists() else None))
    return found


@pytest.fixture
def place(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    (work / "src").mkdir(parents=True)
    (work / "papers").mkdir()
    (work / "book.epub").write_bytes(files.epub())
    contract = docx.Document()
    contract.add_paragraph("The tenant pays for repairs.\n" * 20)  # shorter prefixes are not kept on disk
    contract.save(str(work / "contract.docx"))
    (work / "checklist.txt").write_text("What is the rent?\nWho pays for repairs?\n")
    (work / "src" / "main.py").write_text("PORT = 8080\n")
    (work / "README.md").write_text("# A server\n")
    (work / "app.log").write_text("".join(f"{at} DEBUG tick\n{at} INFO ok\n" for at in range(30)) + "31 ERROR gone\n")
    for name, pages in (("one.pdf", ["We measured speed."]), ("two.pdf", ["We measured energy."]), ("scan.pdf", [""])):
        (work / "papers" / name).write_bytes(files.pdf(pages))
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    monkeypatch.chdir(work)
    for name, value in {"MODEL": str(tiny), "CTX": "8192", "MAX_TOKENS": "4"}.items():
        monkeypatch.setenv(f"SALA_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_page_runs(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    work = place / "work"
    schema = next(text for kind, text in BLOCKS if kind == "json")
    (work / "findings.json").write_text(schema)
    assert json.loads(schema)["type"] == "array"
    calls = []
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), {})  # noqa: S102
            assert "scan.pdf: left out: it holds no text" in capsys.readouterr().out
        for arguments, piped in expand(text, place) if kind == "sh" else ():
            stdin = io.BytesIO(piped or b"")
            monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stdin, isatty=lambda piped=piped: piped is None))
            code = sala.cli.run([*arguments, *(["--max-tokens", "300"] if "--schema" in arguments else [])])
            out, err = capsys.readouterr()
            assert code == 0, err
            calls.append((" ".join(arguments), out, err))
    assert len(calls) == len(re.findall(r"^ *(?:[a-z].* \| )?sala ", "".join(text for _, text in BLOCKS), re.M)) + 1
    by_words = {words: (out, err) for words, out, err in calls}
    second = next(err for words, (_, err) in by_words.items() if "Who pays for repairs?" in words and "Quote" in words)
    assert re.search(r"\([\d,]+ cached\)", second)
    dense = next(err for words, (_, err) in by_words.items() if "--attention dense" in words)
    assert "dense at any length" in dense
    findings = next(out for words, (out, _) in by_words.items() if "--schema" in words)
    assert findings.strip().startswith("[")
    answers = [json.loads(line) for line in (work / "answers.jsonl").read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"one.pdf", "two.pdf"}


def test_the_tokens_of_the_example_are_those_of_the_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (PAGE.parent / "documents.md").read_text(encoding="utf-8")
    ((command, table),) = re.findall(r"^\$ (sala ask .*)\n(tokens  file\n(?:.+\n)+? .*in all\n)", page, re.M)
    monkeypatch.chdir(PAGE.parents[2])
    assert sala.cli.run([*shlex.split(command)[1:], "--dry-run"]) == 0
    assert capsys.readouterr().err == table
