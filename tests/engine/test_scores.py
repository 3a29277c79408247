"""Scores of prompts in the loop of the engine, step by step: whose prompt is next, and when a request is cut."""

from collections.abc import Sequence
from typing import Any

import pytest

from sala.engine.engine import Engine
from sala.engine.loop import EngineLoop, RequestHandle
from sala.engine.requests import Client, PromptScoring, Submission
from sala.engine.stream import PromptScores, StreamItem
from sala.errors import InputError, ScoringTooSlow
from sala.protocol import Options, Row
from tests.engine.fake import FakeExecutor
from tests.engine.test_engine import SPARSE
from tests.integrity import integrity

CHUNK = 8


class ScoringExecutor(FakeExecutor):
    def logits(self, row: Row) -> list[int]:
        return [*row.tokens]


class Scene:
    """A loop that runs in the test's own thread, and what it does in order."""

    def __init__(self, num_slots: int = 8, max_request_s: float = 0.0) -> None:
        self.loop = EngineLoop(Engine(ScoringExecutor(num_slots=num_slots), SPARSE, Options(), is_measured=False))
        self.loop.max_request_s = max_request_s
        self.chunks: list[str] = []  # request, prompt and chunk
        self.found: dict[str, list[int]] = {}  # prompts of which all scores have come
        self.errors: dict[str, BaseException | None] = {}  # of requests that are over
        self.handles: dict[str, RequestHandle] = {}

    def add(self, name: str, owner: str, *lengths: int, is_background: bool = False) -> None:
        """Let a request arrive whose prompts have so many chunks each."""

        def push(items: Sequence[StreamItem], is_over: bool, error: BaseException | None) -> None:
            self.found.setdefault(name, []).extend(one.index for one in items if isinstance(one, PromptScores))
            if is_over:
                self.errors[name] = error

        def scoring(index: int, length: int) -> PromptScoring:
            def reduce(logits: Any, start: int) -> None:
                self.chunks.append(f"{name}{index}.{start // CHUNK}")
                self.at_chunk(name)

            return PromptScoring(index, [1] * length * CHUNK, reduce, CHUNK)

        handle = self.handles[name] = RequestHandle(push, is_background)
        handle.submission = Submission(scores=[scoring(*pair) for pair in enumerate(lengths)])
        handle.submission.belong_to(Client(owner))
        self.loop.orders.put(handle)

    def at_chunk(self, name: str) -> None:
        """Called while a chunk is scored."""

    def run(self) -> str:
        """Work until nothing is left to do; return the chunks in order."""
        assert self.loop.run(None)
        hybrid = self.loop.engine.hybrid
        assert integrity(self.loop.engine) == []
        assert (hybrid.slots.num_free, hybrid.pages.num_free) == (hybrid.slots.size, hybrid.pages.size)
        return " ".join(self.chunks)


def test_clients_take_turns_by_the_chunk_and_their_requests_by_the_prompt() -> None:
    scene = Scene()
    scene.add("a", "anna", 3, 3)
    scene.add("b", "anna", 2)
    scene.add("c", "ben", 2, 1)
    scene.add("d", "", 1, is_background=True)
    assert scene.run() == "a0.0 c0.0 a0.1 c0.1 a0.2 c1.0 b0.0 b0.1 a1.0 a1.1 a1.2 d0.0"
    assert scene.found == {"a": [0, 1], "b": [0], "c": [0, 1], "d": [0]}
    assert set(scene.errors.values()) == {None}


def test_who_comes_again_and_again_overtakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.add("a", "anna", 4)
    scene.add("0", "ben", 1)

    def at_chunk(name: str) -> None:  # whenever one of them is served, the other one is back
        if name.isdigit() and len(scene.handles) < 30:
            scene.add(str(int(name) + 1), "cora" if int(name) % 2 else "ben", 1)

    monkeypatch.setattr(scene, "at_chunk", at_chunk)
    assert scene.run().startswith("a0.0 00.0 a0.1 10.0 a0.2 20.0 a0.3 30.0 40.0")


def test_a_prompt_waits_for_the_room_of_those_in_progress() -> None:
    scene = Scene(num_slots=1)
    scene.add("a", "anna", 2, 2)
    scene.add("b", "ben", 2)
    assert scene.run() == "a0.0 a0.1 b0.0 b0.1 a1.0 a1.1"
    assert set(scene.errors.values()) == {None}


def test_a_prompt_for_which_there_is_never_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    monkeypatch.setattr(scene.loop.engine.hybrid, "admit", lambda sequence: len(sequence.tokens) < 3 * CHUNK)
    monkeypatch.setattr(scene.loop.engine.hybrid, "release", lambda sequence: None)
    scene.add("a", "anna", 3)
    assert scene.run() == ""
    assert isinstance(scene.errors["a"], InputError)


def test_scoring_is_cut_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is scored by then has been sent; what runs in the background waits for all others, and is not cut."""
    scene = Scene(max_request_s=60.0)
    for name, is_background in (("a", False), ("b", True)):
        scene.add(name, "anna", 2, 2, 2, is_background=is_background)

    def at_chunk(name: str) -> None:
        if scene.chunks[-1] in ("a1.0", "b0.0"):
            scene.handles[name].accepted_at -= 61.0

    monkeypatch.setattr(scene, "at_chunk", at_chunk)
    assert scene.run() == "a0.0 a0.1 a1.0 b0.0 b0.1 b1.0 b1.1 b2.0 b2.1"
    assert scene.found == {"a": [0], "b": [0, 1, 2]}
    assert scene.errors["b"] is None
    assert isinstance(scene.errors["a"], ScoringTooSlow)
    assert str(scene.errors["a"]).startswith("the prompts were not scored within the 60 s that a request may take")
