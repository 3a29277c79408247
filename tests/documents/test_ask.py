"""Questions about files: from Python and at the command line; what was read once is not read again."""

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

import sala.cli
from sala.documents.model import Document, Section
from sala.documents.packing import PackedDocuments, encode_documents, pack
from sala.engine.requests import Attachment, Call
from sala.engine.stream import Completion, Timings, Usage
from sala.errors import InputError
from sala.llm import LLM, AsyncLLM
from sala.llm.documents import PreparedQuestion, Summary
from sala.protocol import Sampling
from sala.text.sources import Passage, Quote, Sources
from sala.text.tokenizer import Tokenizer
from tests.documents import files

GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "papers"
    folder.mkdir()
    for number in range(8):
        (folder / f"file{number}.txt").write_text(f"This is file {number}.\n" * 40)
    return folder


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=16384)


def test_an_answer_is_that_of_a_conversation_with_the_documents(llm: LLM) -> None:
    packed = pack(encode_documents([Document("a.txt", [Section("", "Some text.")])], llm.tokenizer))
    text = llm.tokenizer.decode(packed.ids)
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "?"},
    ]
    plain = [{**messages[0], "content": f"{text}Why?"}, *messages[1:]]
    assert llm.tokenizer.encode_chat(messages, attached=packed.ids) == llm.encode_chat(plain)


def test_the_tokens_of_documents_are_where_the_answer_says(llm: LLM, folder: Path) -> None:
    answer = llm.ask(folder / "file3.txt", "What?", system="Be brief.", **GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    prompt = llm.tokenizer.encode_chat(messages, attached=answer.packed.ids)
    assert prompt[answer.offset : answer.offset + len(answer.packed)] == answer.packed.ids.tolist()
    assert len(prompt) == answer.completion.usage.prompt_tokens


def test_the_second_question_reads_nothing_again(llm: LLM, folder: Path) -> None:
    documents = llm.read(folder)
    first = documents.ask("What is this?", **GREEDY)
    second = llm.ask([folder], "And who wrote it?", system=None, **GREEDY)
    assert second.packed.ids == first.packed.ids
    new = second.completion.usage.prompt_tokens - second.completion.usage.cached_tokens
    assert second.completion.usage.cached_tokens >= len(second.packed)
    assert new < 100
    assert str(second.packed.locate(len(second.packed) - 20)) == "papers/file7.txt, line 40"
    assert second.text == second.completion.text


def test_after_a_restart_only_what_changed_is_read(tiny: Path, folder: Path, tmp_path: Path) -> None:
    def ask(question: str) -> tuple[int, int]:
        with LLM(tiny, device="cpu", ctx=16384, cache_dir=tmp_path / "cache") as llm:
            usage = llm.ask(folder, question, **GREEDY).completion.usage
        return usage.prompt_tokens, usage.cached_tokens

    total, cached = ask("First?")
    assert cached == 0
    total, cached = ask("Second?")
    assert total - cached < 0.01 * total
    (folder / "file8.txt").write_text("One more file.\n")
    assert ask("Third?")[1] > total - 100
    (folder / "file6.txt").write_text("It has changed.\n")
    assert 0.7 * total < ask("Fourth?")[1] < total * 7 / 8
    (folder / "file0.txt").write_text("The first one has changed.\n")
    assert ask("Fifth?")[1] < 100
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert all(name.startswith("auto-") for name in names)  # no question is kept


def test_documents_longer_than_the_context_are_read_in_parts(tiny: Path, folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    with LLM(tiny, device="cpu", ctx=4096) as llm:
        documents = llm.read(folder)
        assert documents.num_tokens > documents.part_size
        answer = documents.ask("Which?", on_part=lambda number, total, text: seen.append((number, total)), **GREEDY)
        with pytest.raises(InputError, match="sala ask, which reads parts"):
            _ = documents.attachment
    assert len(answer.summaries) > 1
    assert seen[: len(answer.summaries)] == [(at + 1, seen[0][1]) for at in range(len(answer.summaries))]
    assert answer.packed.spans[0].name.startswith("summary of part 1: papers/file0.txt to papers/file")


def test_sources_of_documents_in_parts_are_the_documents(tiny: Path, folder: Path) -> None:
    with LLM(tiny, device="cpu", ctx=4096) as llm:
        documents = llm.read(folder)
        sampling = replace(llm.default_sampling, **GREEDY, return_sources=True)
        asked = documents.prepare("Which?", sampling)
        plain = llm.answer(asked.call)
        assert plain.sources is not None
        read = {passage.file for passage in plain.sources.passages} - {None}  # None: the question
        assert read
        assert read <= {one.name for one in asked.rounds[-1]}
        quotes = [
            Quote("This is  file 5.", (0, 15), False),
            Quote("invented in a summary", (20, 41), True, 0, file="summary of part 1: papers/file0.txt"),
            Quote("Which?", (50, 56), True, 0, 7, 13),
        ]
        sources = Sources(plain.sources.passages, quotes)
        traced = documents.traced(asked, replace(plain, sources=sources)).sources
    assert traced is not None
    assert any(passage.file is not None for passage in traced.passages)
    for passage in (one for one in traced.passages if one.file is not None):
        assert passage.file.removeprefix("papers/") in {file.name for file in folder.iterdir()}
        assert passage.text in (folder.parent / passage.file).read_text()
    assert sum(one.weight for one in traced.passages) <= sum(one.weight for one in plain.sources.passages) + 1e-6
    found, invented, question = traced.quotes
    assert (found.found, found.file, found.place) == (True, "papers/file5.txt", "line 1")
    assert (invented.found, invented.file) == (False, None)
    assert question == quotes[2]


def test_the_weight_of_a_summary_goes_to_what_it_was_written_from() -> None:
    def summary(name: str, *passages: Passage) -> Summary:
        sources = Sources([*passages])
        return Summary(name, Completion("x", [], "stop", Usage(1, 1, 0), Timings(0, 0, 0, 0), sources=sources))

    first = Passage("one", 0.3, (0, 64), 0, file="a.txt", place="line 1")
    second = Passage("two", 0.1, (64, 128), 0, file="a.txt", place="line 9")
    rounds = [
        [summary("s1", first, second), summary("s2")],
        [summary("t1", Passage("", 0.5, (0, 64), 0, file="s1"), Passage("", 0.25, (64, 128), 0, file="s2"))],
    ]
    answer = summary("", Passage("", 0.6, (0, 64), 0, file="t1")).completion
    asked = PreparedQuestion(Call("x", Sampling()), PackedDocuments(), 0, rounds)
    traced = asked.traced(answer, [], cast("Tokenizer", None)).sources
    assert traced is not None
    assert [(one.text, one.file) for one in traced.passages] == [("one", "a.txt"), ("", "s2"), ("two", "a.txt")]
    assert [one.weight for one in traced.passages] == pytest.approx([0.3, 0.2, 0.1])


def test_asking_with_asyncio(tiny: Path, folder: Path) -> None:
    async def ask() -> tuple[str, list[str]]:
        async with await AsyncLLM.load(tiny, device="cpu", ctx=4096) as llm:
            answer = await llm.ask(folder, "Which?", **GREEDY)
            return answer.text, answer.summaries

    with LLM(tiny, device="cpu", ctx=4096) as llm:
        answer = llm.ask(folder, "Which?", **GREEDY)
    assert asyncio.run(ask()) == (answer.text, answer.summaries)


def test_files_without_text_are_an_error_that_says_why(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes(files.pdf([""]))
    with pytest.raises(InputError, match=r"hold no text .*scan\.pdf: left out: .* OCR"):
        llm.ask(tmp_path, "What?")


def test_an_attachment_needs_a_message_of_the_user(llm: LLM) -> None:
    with pytest.raises(InputError, match="no user message"):
        llm.tokenizer.encode_chat([{"role": "system", "content": "x"}], attached=Attachment([5]).ids)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = sala.cli.run([str(one) for one in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sala" / "documents"


def test_the_command(tiny: Path, folder: Path, cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "noise.bin").write_bytes(bytes(999))
    for number in range(5):
        (folder / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    more = ("-m", tiny, "-t", 0, "-n", 4, "--ctx", 16384)
    code, out, err = run(capsys, "ask", folder, "What is this?", *more)
    assert code == 0
    assert len(out) > 1
    assert "papers/noise.bin: left out: it is not text" in err
    assert "papers/0.png and 4 more: left out: it is an image; --verbose lists them" in err
    assert re.search(r"^ *[\d,]+  papers/file3.txt$", err, re.M)
    (total,) = re.findall(r"^ *([\d,]+)  in all$", err, re.M)
    code, _, err = run(capsys, "ask", folder, "Another question?", *more)
    assert code == 0
    (kept,) = re.findall(r"\(([\d,]+) cached\)", err)
    assert int(kept.replace(",", "")) >= int(total.replace(",", ""))
    assert any(cached.iterdir())


def test_a_dry_run_loads_no_model(tiny: Path, folder: Path, cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        (folder / f"{number}.bin").write_bytes(bytes(99 + number))
    code, out, err = run(capsys, "ask", "--dry-run", folder, "-m", tiny, "--ctx", 4096)
    assert (code, out) == (0, "")
    assert err.count("papers/file") == 8
    assert err.count("left out: it is not text") == 5
    assert "a context of 4,096 tokens takes them in 2 parts" in err
    assert not cached.exists()


def test_what_is_missing_is_said_before_anything_is_loaded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ("-m", "no-such-model")
    assert "question is missing" in run(capsys, "ask", folder, *nowhere)[2]
    code, _, err = run(capsys, "ask", folder / "none.pdf", "What?", *nowhere)
    assert code == 2
    assert "none.pdf does not exist; check the path; the question comes last" in err
    code, _, err = run(capsys, "chat", "--docs", folder / "none.pdf", *nowhere)
    assert code == 2
    assert "none.pdf does not exist; check the path\n" in err  # a conversation has no last argument


@pytest.mark.parametrize("last", ["typo.pdf", "TYPO.MD", "no/such", "./x", "*.docx", "no/**/*.md", "/no/such.file"])
@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_a_misspelt_path_is_not_taken_for_the_question(
    folder: Path, capsys: pytest.CaptureFixture[str], last: str, more: list[str]
) -> None:
    code, out, err = run(capsys, "ask", *more, folder, last, "-m", "no-such-model")
    assert (code, out) == (2, "")
    assert f"{last} does not exist; check the path" in err


@pytest.mark.parametrize(
    "last", ["Why?", "either/or?", "什么是Node.js？", "收入/支出", "Compare a.md and b.md", "[x]", "~u"]
)
def test_a_question_is_not_taken_for_a_path(folder: Path, capsys: pytest.CaptureFixture[str], last: str) -> None:
    err = run(capsys, "ask", folder, last, "-m", "no-such-model")[2]
    assert "no-such-model" in err
    assert "check the path;" not in err


def test_a_pattern_last_is_no_question(tiny: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = f"{folder}/**/*3.txt"
    code, _, err = run(capsys, "ask", "--dry-run", folder / "file1.txt", pattern, "-m", tiny)
    assert (code, "  file1.txt" in err, "  file3.txt" in err) == (0, True, True)
    assert "question is missing" in run(capsys, "ask", folder, pattern, "-m", "no-such-model")[2]


def test_standard_input(
    tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_bytes(files.pdf(["piped"]))
    with (tmp_path / "in").open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        more = ("--json", "--no-keep", "-m", tiny, "-n", 2, "-t", 0, "--ctx", 4096)
        code, out, _ = run(capsys, "ask", "What?", *more)
    assert code == 0
    found = json.loads(out)
    assert [file["name"] for file in found["documents"]] == ["standard input"]
    assert found["usage"]["completion_tokens"] == 2
    assert (found["left_out"], found["summaries"]) == ([], [])


def test_a_conversation_about_documents(
    tiny: Path, folder: Path, cached: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["What is this?", "And more?", "/clear", "Once more?", "/bye"])
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    code, out, err = run(capsys, "chat", "-m", tiny, "--docs", folder, "-t", 0, "-n", 4, "--ctx", 16384)
    assert code == 0
    (total,) = re.findall(r"^ *([\d,]+)  in all$", err, re.M)
    used = [
        int((found or "0").replace(",", ""))
        for found in re.findall(r"prompt [\d,]+ tokens(?: \(([\d,]+) cached\))?", err)
    ]
    assert used[0] == 0
    assert len(used) == 3
    assert used[1] > used[2] >= int(total.replace(",", ""))
    code, _, err = run(capsys, "ask", "-m", tiny, folder, "What?", "-t", 0, "-n", 4, "--ctx", 16384)
    assert " cached)" in err
    assert out.strip()
