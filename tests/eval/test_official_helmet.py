"""HELMET's archive: the files that a run needs, by length, from the directory of the data and over HTTP."""

import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sala.errors import InputError, SalaError
from sala.lab.eval.official import helmet
from sala.lab.eval.official.benchmarks import BENCHMARKS
from sala.lab.eval.official.case import Question
from sala.lab.eval.official.data import Data
from sala.lab.eval.official.request import BenchmarkRequest
from sala.text.tokenizer import Tokenizer
from tests.eval.benchmark_data import FILLER
from tests.eval.lm_eval_ruler import TOKENIZER

ROWS = 3  # of each file


def rows_of(size: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of one size by the name of their file, in the form of the published data."""
    text = (FILLER * (size // 2000))[: 3 * size]  # 0.7 tokens for each of the length
    needle = {"context": text, "query": "apt-axe", "type_needle_v": "numbers", "answer": ["4711", "815"]}
    pairs, _ = helmet.SIZES[size]
    key = {"context": text, "question": "k7", "answer": "v7", "num_kvs": pairs, "demos": [["k1", "v1"]]}
    return {
        f"json_kv/test_k{pairs}_dep6.jsonl": [key] * ROWS,
        **{f"ruler/{name}/validation_{size}.jsonl": [needle] * ROWS for name in helmet.RULER.values()},
    }


def cited() -> dict[str, list[dict[str, Any]]]:
    docs = [{"title": f"Title {at}", "text": f"Place {at}. {FILLER[at : at + 700]}"} for at in range(90)]
    asked = {"question": "Where?", "docs": docs}
    return {
        "alce/asqa_eval_gtr_top2000.json": [{**asked, "qa_pairs": [{"short_answers": ["Oslo"]}]}] * ROWS,
        "alce/qampari_eval_gtr_top2000.json": [{**asked, "answers": [["Oslo"], ["Bergen"]]}] * ROWS,
    }


def write_archive(file: Path, sizes: tuple[int, ...] = (8192, 16384)) -> None:
    with tarfile.open(file, "w:gz") as archive:
        for part in (*map(rows_of, sizes), cited()):
            for name, rows in part.items():
                lines = "\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows)
                member = tarfile.TarInfo(f"data/{name}")
                member.size = len(lines.encode())
                archive.addfile(member, io.BytesIO(lines.encode()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("helmet")
    write_archive(path / helmet.ARCHIVE)
    return path


def ask(data: Data, *tasks: str, lengths: dict[int, int] | None = None) -> list[Question]:
    request = BenchmarkRequest(tasks or helmet.TASKS, lengths or {8192: 1, 16384: 1}, Tokenizer.load(TOKENIZER), data)
    return [*BENCHMARKS["helmet"].make(request, lambda *_: None)]


def test_texts_of_each_length(directory: Path) -> None:
    data = Data(directory)
    questions = ask(data)
    assert sorted((one.task, one.length) for one in questions) == sorted(
        (task, length) for task in helmet.TASKS for length in (8192, 16384)
    )
    for one in questions:
        right = ", ".join(one.answers)
        assert (one.score(right), one.score("no idea")) == (1, 0)
        if one.task in helmet.CITED:
            assert one.text.count("Title") == {8192: 30, 16384: 75}[one.length]
        else:
            assert one.text.endswith(f"Question: {'k7' if one.task == 'json_kv' else 'apt-axe'}\nAnswer:")
    assert data.used["data/json_kv/test_k105_dep6.jsonl"]
    kept = {file.name for file in Path(f"{directory / helmet.ARCHIVE}.files").iterdir()}
    assert kept == {f"data--{name.replace('/', '--')}" for part in (rows_of(8192), rows_of(16384), cited())
                    for name in part}  # fmt: skip


def test_what_was_unpacked_is_not_read_again_unless_the_archive_is_newer(tmp_path: Path) -> None:
    archive = tmp_path / helmet.ARCHIVE
    write_archive(archive)
    assert ask(Data(tmp_path), "json_kv")
    made = archive.stat().st_mtime
    archive.write_bytes(b"broken")
    os.utime(archive, (made - 60, made - 60))
    assert ask(Data(tmp_path), "json_kv")
    with pytest.raises(InputError, match="download it again"):
        ask(Data(tmp_path), "niah_mv")
    os.utime(archive, (made + 60, made + 60))
    with pytest.raises(InputError, match="download it again"):
        ask(Data(tmp_path), "json_kv")


def test_lengths_and_files_that_are_not_there(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="HELMET's texts begin at 8,192"):
        ask(Data(directory), "json_kv", lengths={4096: 1})
    with pytest.raises(InputError, match=r"has no data/json_kv/test_k440_dep6\.jsonl"):
        ask(Data(directory), "json_kv", lengths={32768: 1})


@pytest.fixture
def server(directory: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/{helmet.ARCHIVE}"
        running.shutdown()


def test_the_archive_is_read_over_http(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path)
    monkeypatch.setattr(helmet, "URL", server)
    texts = [one.text for one in ask(Data(), "json_kv", "asqa")]
    assert len(texts) == 4
    monkeypatch.setattr(helmet, "URL", f"{server}.not-there")
    with pytest.raises(SalaError, match=r"put data.tar.gz into a directory"):
        ask(Data(), "json_kv")
    (room,) = (path for path in tmp_path.iterdir() if any(path.iterdir()))
    assert len([*room.iterdir()]) == 3  # no other files are kept
