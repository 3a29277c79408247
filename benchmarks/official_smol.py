"""Every published benchmark on smol-sala, one case of each task, and how much shared texts save.

    python benchmarks/official_smol.py -o benchmarks/official_smol.json [--work DIR]

The data are small stand-ins in the form of the published ones, written by the tests; RULER's and the made graphs are
those of any run. One case per task shows that everything runs, and nothing about the model. Answers that are in DIR are
not asked again. It needs the extra `eval`.

`shared` counts the tokens of prompts that are asked for, and those that are to be read, for made graphs of each length:
twenty questions of two kinds, ten about each graph. Nothing is run for it; `graphwalks, four questions about a graph`
among the runs shows that the engine reads what is counted.
"""

import argparse
import json
import os
from pathlib import Path

from sala import cli
from sala.lab.eval.official.benchmarks import BENCHMARKS
from sala.lab.eval.official.case import QuestionWriter
from sala.lab.eval.official.data import Data
from sala.lab.eval.official.plan import Volume, arrange
from sala.lab.eval.official.request import BenchmarkRequest
from sala.lab.report.record import Record
from sala.models.embedded import find_model
from sala.text.tokenizer import Tokenizer
from tests.eval.benchmark_data import write_data

ONE = ("--limit", "1")
RUNS: dict[str, tuple[str, ...]] = {
    "ruler": ("--lengths", "2K", "--tasks", "niah_single_1,niah_multivalue,fwe,qa_1", "--haystack", "prose", *ONE),
    "longbench2": ("--lengths", "4K", *ONE),
    "babilong": ("--lengths", "1K", "--tasks", "qa1", *ONE),
    "infinitebench": ("--lengths", "4K", *ONE),
    "mrcr": ("--lengths", "4K", *ONE),
    "graphwalks": ("--lengths", "4K", *ONE),
    "nolima": ("--lengths", "2K", *ONE),
    "helmet": ("--lengths", "4K", *ONE),
    "graphwalks, four questions about a graph": ("--lengths", "2K", "--tasks", "made_bfs,made_parents", "--limit", "2"),
}
LENGTHS = [1 << power for power in range(12, 21, 2)]
MADE = ("made_bfs", "made_parents")
KEPT = ("task", "length", "trials", "score", "metric", "asked", "read")


def run(name: str, more: tuple[str, ...], data: Path, work: Path) -> list[dict[str, object]]:
    """Return the cells of a run."""
    file = work / f"{name.replace(', ', '-').replace(' ', '-')}.json"
    command = ["eval", "official", name.partition(",")[0], "-m", "smol-sala", "--device", "cpu", "--data", str(data)]
    if cli.run([*command, *more, "-o", str(file), "--plot", str(file.with_suffix(".svg"))]):
        raise SystemExit(f"{name} failed")
    return [{key: row[key] for key in KEPT if key in row} for row in Record.load(file).results]


def count(tokenizer: Tokenizer, length: int) -> dict[str, int]:
    """Return the tokens asked for and to be read of twenty questions about two graphs."""
    request = BenchmarkRequest(MADE, {length: 10}, tokenizer, Data())
    writer = QuestionWriter(tokenizer)
    questions = BENCHMARKS["graphwalks"].make(request, lambda *_: None)
    volume = Volume.of(arrange([*map(writer.prepare, questions)]))
    return {"length": length, "cases": volume.num_cases, "asked": volume.asked, "read": volume.read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("official-smol"), help="for the data and the answers")
    asked = parser.parse_args()
    data = asked.work / "data"
    if not data.exists():
        draft = asked.work / f"data-{os.getpid()}"
        draft.mkdir(parents=True)
        write_data(draft)
        draft.rename(data)
    model = find_model("smol-sala")
    tokenizer = Tokenizer.load(model)
    results = {
        "model": model.name,
        "shared": [count(tokenizer, length) for length in LENGTHS],
        "runs": {name: run(name, more, data, asked.work) for name, more in RUNS.items()},
    }
    tokenizer.close()
    asked.output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
