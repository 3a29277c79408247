"""The benchmarks by name: their tasks, and how their questions are made for a request."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path

from sala.errors import InputError
from sala.lab.eval.documents import read_source
from sala.lab.eval.official import graphs, helmet, nolima, reading, ruler, scores
from sala.lab.eval.official.case import Question
from sala.lab.eval.official.data import HubDataset
from sala.lab.eval.official.prompts import ruler_prompts
from sala.lab.eval.official.request import BenchmarkRequest, Progress
from sala.lab.eval.official.texts import READERS, Essays, QuestionDocuments, has_punkt

ESSAYS = HubDataset("baber/paul_graham_essays")
FILES = {
    "squad": "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
    "hotpotqa": "https://huggingface.co/datasets/namlh2004/hotpotqa/resolve/"
    "7e54db4656209750ff487f6fdf8e39a66dba136b/hotpot_dev_distractor_v1.json",
}
PROSE = "prose"  # a haystack: the made-up prose of this package


@dataclass(frozen=True)
class Benchmark:
    """`metric` names the score of a task. Without `has_lengths` the texts are as long as they are.

    `more` tasks run only if they are named; `lacking` ones belong to the benchmark and are not part of this package.
    """

    title: str
    tasks: tuple[str, ...]
    metric: Callable[[str], str]
    make: Callable[[BenchmarkRequest, Progress], Iterator[Question]]
    lengths: str = "4K,8K"
    has_lengths: bool = True
    more: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[str, ...]:
        """All tasks of the benchmark, whose mean others publish."""
        return (*self.tasks, *self.lacking)


def _ruler(request: BenchmarkRequest, progress: Progress) -> Iterator[Question]:
    ruler.need_wonderwords()
    essays, documents = cache(partial(_essays, request)), cache(partial(_documents, request))
    maker = ruler.Ruler(request.count, ruler_prompts(request.data.directory), essays, documents, request.seed)
    for length in request.lengths:
        for task in request.tasks:
            progress(task, length)
            score = scores.contains_any if task in ruler.QUESTIONS else scores.contains_all
            for case in islice(maker.cases(task, length), request.limits[length]):
                yield Question(
                    task, length, case.index, case.input, case.outputs, partial(score, case.outputs),
                    ruler.MAX_TOKENS[task], case.opening, "\n\n" if task == "cwe" else " ",
                )  # fmt: skip


def _essays(request: BenchmarkRequest) -> Essays:
    if request.haystack is not None:
        is_prose = request.haystack == PROSE and not Path(PROSE).exists()
        source = read_source(None if is_prose else Path(request.haystack).expanduser())
        request.data.used["essays"] = source.name
        request.remark(f"needles are hidden in {source.name}, not in the essays that RULER uses")
        texts = source.documents
    else:
        texts = request.data.texts("essays", ESSAYS)
    if not has_punkt():
        request.remark("nltk's punkt_tab is not installed: sentences are found by rules of our own")
    return Essays(texts)


def _documents(request: BenchmarkRequest, name: str) -> QuestionDocuments:
    return READERS[name](request.data.object(name, FILES[name]))


LENGTHS = "4K,8K,16K,32K,64K,128K"
UP_TO_1M = f"{LENGTHS},256K,512K,1M"


def _infinitebench_metric(task: str) -> str:
    special = {
        "longbook_qa_eng": "F1 of words",
        "longbook_qa_chn": "F1 of characters",
        "longbook_sum_eng": "ROUGE-Lsum",
    }
    return special.get(task, "right answers")


BENCHMARKS: dict[str, Benchmark] = {
    "ruler": Benchmark(
        "RULER",
        ruler.TASKS,
        lambda task: "one of the answers" if task in ruler.QUESTIONS else "share of the answers",
        _ruler,
    ),
    "longbench2": Benchmark(
        "LongBench v2", reading.LONGBENCH, lambda _: "right choices", reading.longbench2, UP_TO_1M, False
    ),
    "babilong": Benchmark("BABILong", reading.BABILONG, lambda _: "the right name and no other", reading.babilong),
    "infinitebench": Benchmark(
        "InfiniteBench", tuple(reading.INFINITEBENCH), _infinitebench_metric, reading.infinitebench,
        UP_TO_1M, False, lacking=("math_calc",),
    ),
    "mrcr": Benchmark("MRCR", reading.MRCR, lambda _: "likeness of the texts", reading.mrcr, UP_TO_1M, False),
    "graphwalks": Benchmark(
        "GraphWalks", graphs.GIVEN, lambda _: "F1 of the nodes", graphs.graphwalks, UP_TO_1M, False,
        tuple(graphs.MADE),
    ),
    "nolima": Benchmark("NoLiMa", nolima.TASKS, lambda _: "the answer in the text", nolima.nolima),
    "helmet": Benchmark(
        "HELMET", helmet.TASKS,
        lambda task: "answers in the list, five are enough" if task == "qampari" else "share of the answers",
        helmet.helmet, LENGTHS, False, lacking=helmet.LACKING,
    ),
}  # fmt: skip


def find_benchmark(name: str) -> Benchmark:
    """Return a benchmark; raise InputError if there is none of that name."""
    if name not in BENCHMARKS:
        raise InputError("benchmark", f"is {name!r}", f"choose one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
