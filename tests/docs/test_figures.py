"""Every figure and every table of results in the documentation comes from a committed script and committed results."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from docs.figures import make_all, measured, tables, weights
from docs.figures.make_all import FIGURES, HERE, MEASURED, ROOT, SCREENSHOTS
from docs.figures.provenance import digest, mark_svg, read_digest, save_png
from docs.figures.results import read

PAGES = tables.pages()
IMAGE = re.compile(r"(?:!\[[^\]]*\]\(|src=\")([^)\"\s]+\.(?:png|svg|pdf))")
PLAIN = re.compile(r"[\d.,x%±/ –+\-→ofGBiMKkstm()]+")  # numbers with units
VERSION = re.compile(r"\d+\.\d+\.\d+")
MOSTLY = 0.4  # share of cells with a number from which a table counts as one of results
MEASURED_VALUE = re.compile(r"\d[\d.,]*(x|%|k? (ms|us|s|tok/s|TFLOP/s))(?![\w/])")
# Tables of numbers that are written by hand, by the start of their first line, and why.
BY_HAND = {
    "docs/concepts/halo.md": {"| stage | tokens | speed": "from the logs in models/smol-sala/run"},
    "docs/reference/server-other-apis.md": {"| status | type |": "no results"},
}
# Results that any weights of the embedded model's shapes give: times, and what a cache holds.
OF_ANY_WEIGHTS = {"attend_cpu.json", "conversations.json", "quant_cpu.json", "smol_cpu.json", "tiers_cpu.json"}
ABOUT_MODEL = [
    file
    for file in sorted((ROOT / "benchmarks").glob("*.json"))
    if "smol-sala" in file.read_text(encoding="utf-8") and file.name not in OF_ANY_WEIGHTS
]


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def tables_in(text: str) -> list[list[str]]:
    """Return the tables of a page as lists of lines, without those between markers."""
    text = re.sub(r"<!-- (results|table): .*?<!-- end of (results|table) -->", "", text, flags=re.DOTALL)
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [lines for lines in found if len(lines) > 2]


def has_results(lines: list[str]) -> bool:
    """Return whether many cells are numbers, or most rows have a time, a speed, a ratio or a share."""
    plain = [re.sub(r"`[^`]*`", "", line) for line in lines[2:] if "](" not in line]
    if len(plain) > 1 and sum(bool(MEASURED_VALUE.search(line)) for line in plain) > len(lines[2:]) / 2:
        return True
    cells = [cell.strip() for line in lines[2:] for cell in line.strip("|").split("|")]
    numbers = [
        cell for cell in cells if PLAIN.fullmatch(cell) and any(map(str.isdigit, cell)) and not VERSION.search(cell)
    ]
    return len(numbers) >= max(4, MOSTLY * len(cells))


def test_every_picture_is_drawn_by_a_script() -> None:
    drawn = {*FIGURES, *SCREENSHOTS}
    taken = (HERE / "make_web.py").read_text(encoding="utf-8")
    for name in SCREENSHOTS:
        kind = name.removesuffix(".png")
        assert kind in taken or kind in ("web-dark", "web-light"), f"{name} is not taken by make_web.py"
    lying = {file.name for file in HERE.iterdir() if file.suffix in (".png", ".svg", ".pdf")}
    assert lying == drawn, "add it to FIGURES in docs/figures/make_all.py, or remove it"
    for page in PAGES:
        for name in IMAGE.findall(page.read_text(encoding="utf-8")):
            if "://" not in name:
                file = (page.parent / name).resolve()
                assert file.is_relative_to(HERE), f"{relative(page)} shows {name}, which no script draws"
                assert file.name in drawn


def test_scripts_and_results_are_committed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a Git repository")
    known = set(listed.stdout.splitlines())
    wanted = {file for figure in FIGURES.values() for file in figure.files}
    wanted |= {f"benchmarks/{name}" for name in MEASURED} | {f"docs/figures/{name}" for name in FIGURES}
    assert wanted <= known, f"not committed: {sorted(wanted - known)}"


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_is_stale(name: str) -> None:
    assert FIGURES[name].is_current(HERE / name), f"{name} was drawn from other results: make figures"


def test_a_changed_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure as Drawing

    from docs.figures import provenance

    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    (tmp_path / "results.json").write_text("1")
    figure = make_all.Figure(Drawing, ("results.json",))
    save_png(Drawing(figsize=(1, 1)), tmp_path / "a.png", figure.source)
    (tmp_path / "a.svg").write_text(mark_svg("<svg><g/></svg>", digest(["results.json"])))
    assert read_digest(tmp_path / "a.svg") == read_digest(tmp_path / "a.png") == figure.source
    assert figure.is_current(tmp_path / "a.png")
    (tmp_path / "results.json").write_text("2")
    assert not figure.is_current(tmp_path / "a.png")
    assert not figure.is_current(tmp_path / "a.svg")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.render(text) == text, "the results have changed: make figures"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_other_table_has_results(page: Path) -> None:
    allowed = BY_HAND.get(relative(page), {})
    heads = [lines[0] for lines in tables_in(page.read_text(encoding="utf-8")) if has_results(lines)]
    unknown = [head for head in heads if not head.startswith(tuple(allowed))]
    assert not unknown, "put it into docs/figures/tables.py, between markers"
    unused = [start for start in allowed if not any(head.startswith(start) for head in heads)]
    assert not unused, "no longer there: remove it from BY_HAND"


def test_a_table_of_results_is_recognized() -> None:
    lines = ["| tokens | time |", "|---|---|", "| 4K | 1.25 s |", "| 8K | 2.5 s |"]
    assert has_results(lines)
    assert not has_results(
        ["| flag | meaning |", "|---|---|", "| `--trials 3` | cases per cell |", "| `-n 4` | four |"]
    )
    assert has_results(["| kernel | time | |", "|---|---|---|", "| one | 1.5 ms | ok |", "| two | | 3.1x as fast |"])
    page = "\n".join(["<!-- results: against -->", *lines, "<!-- end of results -->", "", *lines, "text"])
    assert tables_in(page) == [lines]


@pytest.mark.parametrize("file", ABOUT_MODEL, ids=lambda file: file.name)
def test_results_name_a_version_and_pages_tell_an_older_one(file: Path) -> None:
    versions = weights.versions_in(file)
    assert versions, "say which version was measured: smol-sala-VERSION"
    if not weights.is_of_older_weights(file):
        return
    paragraphs = [
        paragraph
        for page in PAGES
        for paragraph in page.read_text(encoding="utf-8").split("\n\n")
        if f"benchmarks/{file.name}" in paragraph
    ]
    assert paragraphs, "no page links to it"
    for paragraph in paragraphs:
        for version in versions:
            assert re.search(rf"(smol-sala|[Vv]ersion) {re.escape(version)}\b", paragraph), (
                f"these are results of version {version}: say so, or measure again: make figures"
            )


def test_results_that_were_measured_in_part_are_listed_and_said() -> None:
    """Whoever commits a result with fewer cases than its command asks for says why, below its table."""
    partial = {name for name in MEASURED if measured.differences(name)}
    assert partial == set(measured.PARTIAL), "measure it as MEASURED says, or list it with the reason"
    assert partial <= set(make_all.to_measure())
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    for name in partial:
        (said,) = filter(None, measured.remark(name))
        assert any(said in page and f"benchmarks/{name}" in page for page in pages), "call remark() in its table"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("needle_smol.json", lambda data: data["settings"].update(lengths=[1000, 2000]), "2 of 6 lengths"),
        ("needle_smol.json", lambda data: data["results"].pop(), "29 of 30 cases"),
        ("official_smol.json", lambda data: data["runs"].pop("mrcr"), "8 of 9 runs"),
        ("finetune_recall.json", lambda data: data["options"].update(rank=8), "other options"),
        ("quant_recall.json", lambda data: data["settings"].update(measured=1024), "1024 of 2048 tokens to measure"),
        ("ruler_smol.json", lambda data: data["settings"].update(haystack="essays"), "other haystack"),
    ],
)
def test_other_settings_are_noticed(name: str, change: Callable[[Any], Any], words: str) -> None:
    data = read(name)
    assert words not in measured.differences(name, data)
    change(data)
    assert words in measured.differences(name, data)


def test_facts_of_several_texts_are_added_up() -> None:
    rows = [
        {"length": 8192, "text": 0, "found": 5, "asked": 8, "loss": 0.5, "tokens": 10},
        {"length": 8192, "text": 1, "found": 7, "asked": 8, "loss": 0.2, "tokens": 20},
        {"length": 2048, "text": 0, "found": 8, "asked": 8, "loss": 0.1, "tokens": 9},
    ]
    assert measured.totals(rows) == {
        8192: {"found": 12, "asked": 16, "tokens": 30, "loss": pytest.approx(0.3), "texts": 2},
        2048: {"found": 8, "asked": 8, "tokens": 9, "loss": pytest.approx(0.1), "texts": 1},
    }


def test_results_of_other_weights_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for text, is_older in (
        ('"model": "smol-sala"', True), ('"smol-sala-0.4"', True), ('"smol-sala-0.4", "smol-sala-0.5"', True),
        ('"smol-sala-0.5"', False), ('"smol-sala-0.5.1"', False), ('"smol-sala-0.10"', False),
    ):  # fmt: skip
        file.write_text(text)
        assert weights.is_of_older_weights(file) is is_older, text
    assert weights.is_of_older_weights(tmp_path / "none.json")


def test_the_weights_are_those_that_are_named() -> None:
    assert weights.digest() == weights.DIGEST, "these are new weights: set SINCE and DIGEST in docs/figures/weights.py"
    version = json.loads((weights.MODEL / "base.json").read_text(encoding="utf-8"))["version"]
    assert tuple(map(int, version.split("."))) >= tuple(map(int, weights.SINCE.split(".")))
    measured = json.loads((weights.MODEL / "results.json").read_text(encoding="utf-8"))["version"]
    assert measured == weights.SINCE, "measure the model card again: models/smol-sala/measure.py"


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let a result be measured by a Python program; the repository is a temporary one."""
    monkeypatch.setattr(make_all, "ROOT", tmp_path)
    monkeypatch.setattr(make_all, "WORK", tmp_path / "work")
    (tmp_path / "benchmarks").mkdir()

    def set_program(program: str) -> None:
        (tmp_path / "program.py").write_text(program)
        monkeypatch.setattr(make_all, "MEASURED", {"a.json": ("python {root}/program.py {name}",)})

    return set_program


STOPPED = """
import pathlib, sys, time
begun = pathlib.Path("begun")
if begun.exists():
    pathlib.Path(sys.argv[1]).write_text("all")
else:
    pathlib.Path(sys.argv[1]).write_text("some")
    try:
        begun.touch()
        time.sleep(600)
    except KeyboardInterrupt:
        pathlib.Path("told").touch()
"""


def test_measuring_goes_on_where_it_was_stopped(measuring: Callable[[str], None], tmp_path: Path) -> None:
    measuring(STOPPED)
    begun = tmp_path / "work" / "a" / "begun"
    readings = iter((0.0, 300.0))

    def clock() -> float:
        """Five minutes are over as soon as the program has begun."""
        reading = next(readings)
        while reading and not begun.exists():
            sleep(0.01)
        return reading

    make_all.measure(["a.json"], minutes=5, clock=clock)
    assert not (tmp_path / "benchmarks" / "a.json").exists()  # it is not complete
    assert (tmp_path / "work" / "a" / "told").exists()
    make_all.measure(["a.json"])
    assert (tmp_path / "benchmarks" / "a.json").read_text() == "all"
    assert not (tmp_path / "work" / "a").exists()


def test_a_measurement_that_fails_changes_no_results(measuring: Callable[[str], None], tmp_path: Path) -> None:
    measuring("import sys; open(sys.argv[1], 'w').write('half'); sys.exit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        make_all.measure(["a.json"])
    assert not (tmp_path / "benchmarks" / "a.json").exists()
