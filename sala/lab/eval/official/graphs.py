"""GraphWalks: walks in a graph that is given as a list of edges. Its published questions, and ones made for any length.

Made questions follow the definition: a directed graph of hexadecimal names; which nodes are at a given distance from
one of them, or which have an edge to it. Several questions are about one graph, which is read once.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

from sala.errors import InputError
from sala.lab.eval.official import reading, scores
from sala.lab.eval.official.case import Question
from sala.lab.eval.official.request import BenchmarkRequest, Progress

GIVEN = ("bfs", "parents")
MADE = {"made_bfs": "bfs", "made_parents": "parents"}
PER_GRAPH = 5  # questions
EDGES_PER_NODE = 2
MAX_NODES = 40  # of an answer
ROOM = 640  # tokens of an answer
BEFORE = (
    "Below are the edges of a directed graph, one in each line. An edge goes from the first node to the second.\n\n"
)
QUESTIONS = {
    "bfs": "Which nodes have a distance of exactly {depth} from {node}? "
    "The distance is the number of edges on the shortest way.",
    "parents": "Which nodes have an edge to {node}?",
}  # fmt: skip
AFTER = "\n\n{question} Give each node once, and end with a line of this form:\nFinal Answer: [node, node]"


@dataclass(frozen=True)
class Graph:
    edges: list[tuple[str, str]]

    def targets(self) -> dict[str, list[str]]:
        """Return the nodes behind each node."""
        found: dict[str, list[str]] = {}
        for source, target in self.edges:
            found.setdefault(source, []).append(target)
        return found

    def at_distance(self, start: str, depth: int) -> set[str]:
        targets, seen, edge = self.targets(), {start}, {start}
        for _ in range(depth):
            edge = {target for node in edge for target in targets.get(node, ())} - seen
            seen |= edge
        return edge

    def parents(self, node: str) -> set[str]:
        return {source for source, target in self.edges if target == node}

    def text(self) -> str:
        return BEFORE + "\n".join(f"{source} -> {target}" for source, target in self.edges)


def graphwalks(request: BenchmarkRequest, progress: Progress) -> Iterator[Question]:
    for task in request.tasks:
        if task in GIVEN:
            yield from reading.given_graphs(request, progress, task)
    fitting = cache(partial(_fitting, request))
    for length in request.lengths:
        for task in request.tasks:
            if task in MADE:
                progress(task, length)
                for number in range(request.limits[length]):
                    yield _question(request, task, length, number, fitting(length, number // PER_GRAPH))


def make_graph(num_edges: int, rng: random.Random) -> Graph:
    """Return a random graph without loops and repeated edges."""
    names = [f"{rng.getrandbits(40):010x}" for _ in range(max(3, num_edges // EDGES_PER_NODE))]
    edges: set[tuple[str, str]] = set()
    while len(edges) < num_edges:
        source, target = rng.sample(names, 2)
        edges.add((source, target))
    ordered = sorted(edges)
    rng.shuffle(ordered)
    return Graph(ordered)


def _question(request: BenchmarkRequest, task: str, length: int, number: int, graph: Graph) -> Question:
    kind = MADE[task]
    rng = random.Random(repr((request.seed, task, length, number)))  # noqa: S311
    nodes = sorted({source for source, _ in graph.edges})
    while True:
        node, depth = rng.choice(nodes), rng.randint(1, 3)
        wanted = sorted(graph.at_distance(node, depth) if kind == "bfs" else graph.parents(node))
        if 0 < len(wanted) <= MAX_NODES:
            break
    question = QUESTIONS[kind].format(node=node, depth=depth)
    text = graph.text() + AFTER.format(question=question)
    score = partial(scores.overlap, wanted)
    return Question(task, length, number, text, tuple(wanted), score, ROOM)


def _fitting(request: BenchmarkRequest, length: int, number: int) -> Graph:
    """Return the graph of a length, the same for all questions about it."""
    probe = make_graph(64, random.Random(request.seed))  # noqa: S311
    per_edge = request.count(probe.text()) / 64
    num_edges = int((length - ROOM - 160) / per_edge)
    while num_edges >= 8:
        graph = make_graph(num_edges, random.Random(repr((request.seed, length, number))))  # noqa: S311
        if request.count(graph.text()) + ROOM + 160 <= length:
            return graph
        num_edges = int(num_edges * 0.98) - 1
    raise InputError("lengths", f"are too short for a graph: {length:,} tokens", f"begin with {2 * length:,}")
