"""Records → a page: everything is on it, nothing of it is executed, and what is broken is named."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from sala.cli.report import report
from sala.errors import InputError
from sala.lab.report.charts import HeatMap, Lines, Series, plot, to_svg
from sala.lab.report.kinds import KINDS
from sala.lab.report.official import side_by_side
from sala.lab.report.page import RunFile, read_runs, to_page
from sala.lab.report.record import KINDS as RECORDED
from sala.lab.report.record import Record
from sala.lab.report.statistics import interval, ratio_text
from sala.options.schema import length_label

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "needle": [
        {"length": length, "depth": depth, "trials": 2, "exact": exact, "score": exact, "prefill_per_second": 900.0,
         "decode_per_second": None}
        for length, depth, exact in ((1024, 0.0, 1.0), (1024, 50.0, 0.5), (4096, 0.0, 1.0), (4096, 50.0, 0.0))
    ],
    "ruler": [{"task": task, "length": 4096, "trials": 3, "exact": 0.0, "score": 0.25} for task in ("single", "chain")],
    "official": [{"model": "small", "task": "vt", "length": 4096, "trials": 4, "score": 0.5}],
    "reasoning": [{"task": "steps", "budget": None, "cases": 9, "answered": 0.9, "correct": 0.3, "stuck": 0.1}],
    "perplexity": [
        {"length": length, "perplexity": value, "bits_per_byte": 0.9, "stderr": 0.1, "windows": 3, "tokens": 900}
        for length, value in ((256, 26.6), (1024, 21.1), (4096, 19.2))
    ],
    "latency": [
        {"num_tokens": count, "first_token_s": count / 1e4, "prefill_per_second": 1e4, "decode_per_second": 80.0,
         "peak_bytes": 1 << 33}
        for count in (1024, 65536)
    ],
    "throughput": [{"batch": count, "num_tokens": 512, "decode_per_second": 70.0 * count} for count in (1, 8)],
    "serve": [
        {"load": f"{count} at a time", "concurrency": count, "rate": None, "answers": 9, "errors": 0, "seconds": 3.0,
         "answers_per_second": 3.0 * count, "input_per_second": 900.0, "output_per_second": 90.0 * count,
         "longest_stall_s": 0.2, "watts": None, "joules_per_1k_output": None}
        | {f"{name}_s_p{p}": 0.1 * p for name in ("first_token", "between_tokens") for p in (50, 90, 99)}
        for count in (1, 8)
    ],
    "first_token": [
        {"num_tokens": count, "cold_s": 0.2, "warm_s": 0.1, "worst_s": 0.15, "requests": 5} for count in (40, 512)
    ],
    "against": [
        {"num_tokens": 1024, "first_token_s": 0.2, "dense_first_token_s": 0.1, "first_token_ratio": 0.5,
         "decode_per_second": 90.0, "dense_decode_per_second": 60.0, "decode_ratio": 1.5, "crossover": {}},
        {"num_tokens": 16384, "first_token_s": 1.0, "dense_first_token_s": 2.0, "first_token_ratio": 2.0,
         "decode_per_second": 88.0, "dense_decode_per_second": None, "decode_ratio": None,
         "crossover": {"first_token": 4096}},
    ],
    "harness": [{"task": "arc", "metric": "acc", "filter": "none", "value": 0.61, "stderr": None, "shots": 0}],
    "kernels": [{"name": "attention", "size": "8K", "ms": 0.5, "share": 0.7, "tflops": None, "error": ""}],
    "comparison": [
        {"measure": "weights", "on": None, "before": 1024.0, "after": 300.0, "unit": "MiB"},
        {"measure": "needles found", "on": 1024, "before": 1.0, "after": 0.85, "unit": "share"},
        {"measure": "needles found", "on": 4096, "before": None, "after": 0.5, "unit": "share"},
    ],
}  # fmt: skip


def write(folder: Path, kind: str, name: str = "", **changes: Any) -> Path:
    record = {
        "kind": kind, "model": "small", "settings": {"seed": 7}, "results": ROWS.get(str(kind), []), "plots": [],
        "machine": {"processor": "a processor", "memory": 1 << 34, "gpus": []}, "versions": {"sala": "0.1"},
        "commit": "0123456789abcdef+", "date": "2026-01-02T03:04:05+00:00", **changes,
    }  # fmt: skip
    file = folder / f"{name or kind}.json"
    file.write_text(json.dumps(record))
    return file


class Reader(HTMLParser):
    """What a browser would see: elements, their attributes, the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_kind_is_shown(tmp_path: Path) -> None:
    assert set(RECORDED) == set(KINDS) == set(ROWS)
    for kind in KINDS:
        write(tmp_path, kind)
    (tmp_path / "other.json").write_text('{"results": {}}')  # of somebody else
    runs = read_runs([tmp_path])
    assert {run.record.kind for run in runs} == set(KINDS)
    page = Reader(to_page(runs, "All of it", "2026-01-03"))
    for words in (
        "All of it", "small", "a processor", "16.0 GiB", "0.1 0123456789+", "seed", "2026-01-02 03:04", "50 %",
        "chain", "steps", "19.2", "8.00 GiB", "560.0", "0.61", "attention", "4,096", "64K", "1/2", "9–91 %", "300 MiB",
        "× 0.293", "85.0%",
    ):  # fmt: skip
        assert words in page.text, words
    assert page.tags.count("section") == len(KINDS)
    # in the order of the kinds; throughput has no memory there
    assert page.tags.count("svg") == 1 + 1 + 2 + 2 + 3 + 1 + 3 + 1 + 4 + 1 + 2
    assert page.text.count("first token: times as fast") == 1


def test_the_page_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "drawn.png").write_bytes(PIXEL)
    write(tmp_path, "perplexity", plots=["drawn.png", "gone.png"])
    page = to_page(read_runs([tmp_path]))
    found = Reader(page)
    assert not {"script", "link", "iframe", "object", "form"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    links = [value for name, value in found.attributes if name in ("src", "href")]
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert sum(link.startswith("data:") for link in links) == 1
    assert "url(" not in page
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page


def test_nothing_of_a_record_becomes_markup(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\"'&{0}"
    changes: dict[str, Any] = {
        "model": evil, "settings": {evil: [evil]}, "machine": {"processor": evil}, "versions": {"sala": evil},
        "commit": evil, "date": evil,
    }  # fmt: skip
    for kind in KINDS:
        rows = [{key: evil if isinstance(value, str) else value for key, value in row.items()} for row in ROWS[kind]]
        write(tmp_path, kind, results=rows, **changes)
        write(tmp_path, kind, f"{kind}-2", results=rows, **changes)
    found = Reader(to_page(read_runs([tmp_path]), evil, evil))
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.text.count(evil) > 50


def test_runs_of_a_kind_share_a_chart(tmp_path: Path) -> None:
    write(tmp_path, "perplexity", "one")
    write(tmp_path, "perplexity", "two", model="large")
    page = to_page(read_runs([tmp_path / "one.json", tmp_path / "two.json", tmp_path / "one.json"]))
    assert page.count("<svg") == 2
    assert page.count('class="series"') == 4
    assert page.count("<article>") == 2
    write(tmp_path, "perplexity", "two", date="2026-05-05T01:01:01")
    assert "small (2026-05-05 01:01)" in to_page(read_runs([tmp_path]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ({"kind": "dream"}, "is of kind 'dream'"),
        ({"kind": ["needle"]}, "is of kind"),
        ({"results": []}, "has no results"),
        ({"results": {}}, "has a value of results that is not a list"),
        ({"machine": None}, "has a value of machine that is not a dict"),
        ({"results": [3]}, "not an object (number 1)"),
        ({"results": [{"length": 5}]}, "has no perplexity in result 1"),
        ({"results": [{"length": 5, "perplexity": "9"}]}, "has no perplexity in result 1"),
        ({"results": [{"length": 5, "perplexity": float("nan")}]}, "has no perplexity in result 1"),
        ({"results": [{"length": 5, "perplexity": 10**400}]}, "has no perplexity in result 1"),
        ({"results": [{"length": 5, "perplexity": 1.0, "stderr": "?"}]}, "has stderr = '?' in result 1"),
        ({"results": [{"length": 5, "perplexity": 1.0, "more": float("inf")}]}, "has more = inf in result 1"),
        ({"plots": ["secret.txt"]}, "names secret.txt, which is not a PNG"),
        ({"plots": [7]}, "names a picture that is not text"),
    ],
    ids=lambda item: str(item)[:40] if not isinstance(item, str) or len(item) < 40 else "",
)
def test_a_broken_record_is_refused_by_name(content: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    write(tmp_path, "perplexity", "good")
    if isinstance(content, str):
        (tmp_path / "bad.json").write_text(content)
    else:
        write(tmp_path, **{"kind": "perplexity", "name": "bad", **content})
    for paths in ([tmp_path / "good.json", tmp_path / "bad.json"], [tmp_path]):
        with pytest.raises(InputError) as caught:
            read_runs(paths)
        assert "bad.json" in str(caught.value)
        assert words in str(caught.value)


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no record"):
        read_runs([tmp_path])
    with pytest.raises(InputError, match=r"nowhere\.json cannot be read"):
        read_runs([tmp_path / "nowhere.json"])


@pytest.mark.parametrize(
    "points",
    [[(1024.0, 3.0)], [(1.0, 0.0), (2.0, 0.0)], [(64.0, 1e-9), (1 << 20, 1e9)], [(5.0, -3.0), (6.0, 4.0)]],
)
@pytest.mark.parametrize("is_log", [False, True])
def test_charts_of_odd_values(points: list[tuple[float, float]], is_log: bool) -> None:
    chart = Lines("a < b", "x", [Series("one", points), Series("none", [])], is_log, marks=[7.0])
    svg = ElementTree.fromstring(to_svg(chart))  # noqa: S314 - well-formed
    width, height = (float(one) for one in svg.attrib["viewBox"].split()[2:])
    (series,) = [one for one in svg.iter() if one.attrib.get("class") == "series"]
    markers = [one for one in series.iter() if one.tag.endswith("}use")]
    assert len(markers) == len(points)
    for marker in markers:
        assert 0 <= float(marker.attrib["x"]) <= width
        assert 0 <= float(marker.attrib["y"]) <= height


def test_error_bars() -> None:
    """A standard error is drawn, and the axis has space for it."""
    plain, barred = (
        to_svg(Lines("", "x", [Series("one", [(1, 5.0), (2, 6.0)], errors)])) for errors in ((), (9.0, 0.5))
    )
    assert barred.count("<path") > plain.count("<path")
    assert ">14</text>" in barred


def test_maps() -> None:
    chart = HeatMap("found", ["4K"], ["0 %", "50 %", "100 %"], [[1.0], [None], [0.0]], [["2/2"], [""], ["0/2"]])
    text = "".join(ElementTree.fromstring(to_svg(chart)).itertext())  # noqa: S314
    assert text.count("/2") == 2
    assert "50 %" in text


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_formats(suffix: str, magic: bytes, tmp_path: Path) -> None:
    chart = Lines("a", "x", [Series("$one$", [(1024, 3.0)]), Series("_two", [(1024, 2.0)])])
    for name in ("one", "two"):
        plot([chart], (tmp_path / name).with_suffix(suffix), "title")
    first, second = ((tmp_path / name).with_suffix(suffix).read_bytes() for name in ("one", "two"))
    assert first.startswith(magic)
    assert first == second  # no date in it


def test_rates_of_few_trials() -> None:
    assert ratio_text(0.5, 2) == "1/2"
    assert ratio_text(0.75, 40) == "75%"
    assert interval(0.0, 1) == pytest.approx((0, 0.793), abs=0.001)
    assert interval(0.5, 2) == pytest.approx((0.0945, 0.9055), abs=0.001)
    assert [length_label(n) for n in (300, 4096, 1 << 20, 1536, 128_000)] == ["300", "4K", "1M", "1,536", "128,000"]


def test_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report)
    record, page = write(tmp_path, "latency"), tmp_path / "page.html"
    arguments = [str(record), "-o", str(page), "--title", "Speed"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "<title>Speed</title>" in page.read_text()
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, InputError)
    assert "exists already" in str(again.exception)
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0
    wrong = CliRunner().invoke(app, [str(record), "-o", str(tmp_path / "page.json")])
    assert "does not end in .html" in str(wrong.exception)


def test_charts_as_files(tmp_path: Path) -> None:
    """A picture for each kind of run that has charts, with the kind in its name if there are several."""
    app, room = typer.Typer(), tmp_path / "out"
    app.command()(report)
    room.mkdir()
    one, other, plain = (str(write(tmp_path, kind)) for kind in ("latency", "needle", "harness"))
    base = ["-o", str(room / "page.html"), "--plot"]

    def refused(*arguments: str) -> str:
        found = CliRunner().invoke(app, [*arguments])
        assert isinstance(found.exception, InputError)
        return str(found.exception)

    assert "does not end in .png, .pdf, .svg" in refused(one, *base, str(room / "a.jpg"))
    assert "its directory does not exist" in refused(one, *base, str(room / "none" / "a.svg"))
    assert not [*room.iterdir()]  # all is checked before anything is written
    found = CliRunner().invoke(app, [one, plain, *base, str(room / "a.svg")])
    assert found.exit_code == 0, found.output
    assert "<svg" in (room / "a.svg").read_text()
    assert "a.svg exists already" in refused(one, "-o", str(room / "other.html"), "--plot", str(room / "a.svg"))
    assert CliRunner().invoke(app, [one, plain, other, *base, str(room / "a.svg"), "--force"]).exit_code == 0
    assert {file.name for file in room.iterdir()} == {"page.html", "a.svg", "a-latency.svg", "a-needle.svg"}
    assert CliRunner().invoke(app, [one, *base, str(room), "--force"]).exit_code == 0
    assert (room / "page.png").read_bytes().startswith(b"\x89PNG")  # a directory: named after the page


def test_a_record_of_bench(tmp_path: Path) -> None:
    """What `sala bench` writes is a record."""
    from sala.cli import run as sala

    file = tmp_path / "figures.json"
    arguments = ["--random", "tiny", "-n", "2", "--device", "cpu", "--json", str(file)]
    assert sala(["bench", "latency", "--lengths", "16,32", *arguments]) == 0
    found: list[RunFile] = read_runs([file])
    assert [row["num_tokens"] for row in found[0].record.results] == [16, 32]
    assert "random tiny" in to_page(found)
    assert sala(["bench", "throughput", "--batches", "1,2", "--length", "16", *arguments, "--force"]) == 0
    assert read_runs([file])[0].record.settings["length"] == 16


def _official(path: Path, mean: str = "all", **settings: Any) -> Path:
    row = {"trials": 4, "score": 0.5, "exact": 0.5, "asked": 9, "read": 5}
    rows = [
        {"model": model, "task": task, "length": length, **row, "metric": "mean of the tasks" if task == mean else ""}
        for model in ("ours", "dense") for task in ("vt", "cwe", mean) for length in (65536, 131072)
    ]  # fmt: skip
    Record("official", "ours", {"benchmark": "ruler", **settings}, rows).save(path)
    return path


def test_published_scores_stand_beside_measured_ones(tmp_path: Path) -> None:
    runs = read_runs([_official(tmp_path / "ruler.json")])
    page = to_page(runs)
    for text in ("Qwen3-8B (published)", "technical report of MiniCPM-SALA", "89%", "15–85 %"):
        assert text in page
    assert "50 n=4" in page  # a cell says of how many cases it is
    curve = KINDS["official"].charts([run.record for run in runs])[0]
    assert isinstance(curve, Lines)
    assert [one.name for one in curve.series] == ["ours", "dense", "MiniCPM-SALA (published)", "Qwen3-8B (published)"]
    assert curve.series[0].bounds[0] == pytest.approx((35.0, 35.0), abs=0.1)
    assert curve.series[2].points[1] == (131072, 89.37)
    (table,) = side_by_side([run.record for run in runs])
    assert table.headings[:3] == ["model", "64K", "128K"]
    lines = {line[0]: line[1:3] for line in table.lines}
    assert lines["ours"] == lines["dense"] == ["50 n=4", "50 n=4"]
    assert lines["MiniCPM-SALA (published)"][1] == "89.4"
    assert re.search(r"<td class=.left.>ours</td><td>50 n=4</td>", page)


def test_runs_of_one_model_are_told_apart(tmp_path: Path) -> None:
    two = [Record.load(_official(tmp_path / f"{seed}.json", seed=seed)) for seed in (0, 5)]
    names = ["ours (seed 0)", "dense (seed 0)", "ours (seed 5)", "dense (seed 5)"]
    assert [line[0] for line in side_by_side(two)[0].lines][:4] == names
    charts = KINDS["official"].charts(two)
    assert [chart.title for chart in charts if isinstance(chart, HeatMap)] == names
    same = [Record.load(tmp_path / "0.json")] * 2
    assert [line[0] for line in side_by_side(same)[0].lines][:2] == ["ours (run 1)", "dense (run 1)"]


def test_a_single_case_is_not_a_rate(tmp_path: Path) -> None:
    record = Record.load(_official(tmp_path / "a.json"))
    rows = [row | {"trials": 1, "score": 1.0} for row in record.results]
    (*_, heat, _) = KINDS["official"].charts([replace(record, results=rows)])
    assert isinstance(heat, HeatMap)
    assert heat.texts[0] == ["1 of 1", "1 of 1"]


@pytest.mark.parametrize(("mean", "settings"), [("mean of 2 of 13", {}), ("all", {"haystack": "prose"})])
def test_published_means_stand_beside_nothing_else(mean: str, settings: dict[str, str], tmp_path: Path) -> None:
    runs = read_runs([_official(tmp_path / "ruler.json", mean, **settings)])
    curve = KINDS["official"].charts([run.record for run in runs])[0]
    assert isinstance(curve, Lines)
    assert [one.name for one in curve.series] == ["ours", "dense"]
    assert (mean in curve.title) is (mean != "all")


def test_results_of_lm_eval_are_runs(tmp_path: Path) -> None:
    results = {
        "niah_single_1": {"alias": "x", "4096,none": 0.75, "4096_stderr,none": "N/A", "8192,none": -1},
        "ruler_qa_squad": {"4096,none": 0.5},
    }
    config = {"model": "hf"}
    data = {"results": results, "config": config, "model_name": "org/other-8b"}
    data["n-samples"] = {"niah_single_1": {"effective": 8}}
    (tmp_path / "results_1.json").write_text(json.dumps(data))
    (tmp_path / "notes.json").write_text("{}")
    (run,) = read_runs([tmp_path])
    assert (run.record.kind, run.record.model) == ("official", "other-8b")
    assert [(row["task"], row["length"], row["score"], row["trials"]) for row in run.record.results] == [
        ("niah_single_1", 4096, 0.75, 8), ("qa_1", 4096, 0.5, None),
    ]  # fmt: skip
    *curves, heat = KINDS["official"].charts([run.record])
    assert [len(curve.series[0].bounds) for curve in curves if isinstance(curve, Lines)] == [1, 0]
    assert isinstance(heat, HeatMap)
    assert heat.texts == [["75 n=8"], ["50"]]
    other = {"results": {"arc_easy": {"acc,none": 0.4, "acc_stderr,none": 0.1}}, "config": config}
    (tmp_path / "results_2.json").write_text(json.dumps(other))
    harness = next(run for run in read_runs([tmp_path]) if run.record.kind == "harness")
    assert harness.record.results[0]["stderr"] == 0.1
    assert "other-8b" in to_page(read_runs([tmp_path]))
