"""Sample training documents from a dense teacher: whole dialogues, answers to given prompts, and free text.

Distilling on the teacher's own text preserves its behaviour, above all its style of answering, better than plain text.
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sala.backends.torch.model import SalaModel
from sala.errors import InputError
from sala.lab.train.documents import (
    ANSWER,
    ASKED,
    GIVEN,
    TEXT,
    HeldOut,
    TokenizedDocuments,
    filter_documents,
    read_held_out,
    read_turns,
    runs,
)
from sala.lab.train.halo.slots import Slots, SlotUpdate
from sala.lab.train.loop import prefetch
from sala.lab.train.recipe import Prompts, SampleStage
from sala.options.sources import read_text
from sala.text.tokenizer import Tokenizer

MIN_P = 0.05  # for answers: tokens less likely than this share of the likeliest are never sampled
ASK_TEMPERATURE, ASK_MIN_P = 1.0, 0.02  # for the users' turns that the teacher writes, which should vary
TEXT_MIN_P = 0.02
MAX_QUESTION, MAX_ANSWER = 120, 320  # tokens
TEXT_END = "<|endoftext|>"  # ends free text where a tokenizer has it; turns end with the model's own end tokens
MIN_PARALLEL = 5000  # documents; for more, the held-out check uses several processes
CHUNK = 500  # documents that a process checks at a time
STEPS = 8  # decoding steps between two checks for finished rows


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of a row, and what the teacher writes after it.

    tokens        the given tokens
    temperature   for answers and free text; 0 is greedy
    must_end      drop the row if its (first) answer has no end token
    writes        "answer", "text", or "question": first the rest of the user's turn, then its answer
    turns         further turns of the user, each with the template's tokens after the previous answer
    num_asked     further turns of the user that the teacher writes
    """

    tokens: tuple[int, ...]
    temperature: float
    must_end: bool = False
    writes: str = "answer"
    turns: tuple[tuple[int, ...], ...] = ()
    num_asked: int = 0


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens of a chat template between the messages of a user and an assistant.

    opening      before the user's first message
    to_answer    from the end token of the user's turn to the answer
    to_question  from the end token of the answer to the user's message
    """

    opening: tuple[int, ...] = ()
    to_answer: tuple[int, ...] = ()
    to_question: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, ends: Sequence[int]) -> "Marks":
        """Derive the marks from the template's output; raise InputError if turns have no end token."""

        def ids(*contents: str) -> list[int]:
            roles = ("user", "assistant")
            messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
            return tokenizer.encode_chat(messages, add_generation_prompt=len(contents) % 2 == 1)

        one, other = ids("a"), ids("b")
        start = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
        end = next((at for at in range(start, len(one)) if one[at] in ends), None)
        three = ids("a", "b", "c")
        second = [at for at in range(start, len(three)) if three[at] in ends]
        if end is None or len(second) < 3:
            raise InputError("templates", "need a chat template that ends every turn with an end token")
        place = next(at for at, (a, b) in enumerate(zip(three, ids("a", "b", "d"), strict=False)) if a != b)
        return cls(tuple(one[:start]), tuple(one[end + 1 :]), tuple(three[second[1] + 1 : place]))

    def turn(self, text: Sequence[int], end: int) -> tuple[int, ...]:
        """Return a complete further turn of the user, up to the answer."""
        return (*self.to_question, *text, end, *self.to_answer)


def make_openings(
    prompts: Sequence[Prompts],
    topics: Sequence[str],
    count: int,
    tokenizer: Tokenizer,
    seed: int,
    ends: Sequence[int],
    bos: int | None = None,
    composed: Sequence[Sequence[str]] = (),
) -> list[Opening]:
    """Return `count` openings in the shares of the prompts; `composed` are the users' turns that `path` names."""
    rng = np.random.default_rng(seed)
    shares = np.array([prompt.weight for prompt in prompts])
    marks = Marks.of(tokenizer, ends) if any(prompt.is_chat for prompt in prompts) else Marks()
    order = rng.permutation(len(composed)) if composed else np.arange(0)
    out, next_composed = [], 0
    for choice in rng.choice(len(prompts), size=count, p=shares / shares.sum()):
        prompt = prompts[choice]
        temperature = prompt.temperature
        if prompt.temperatures:
            temperature = prompt.temperatures[rng.integers(len(prompt.temperatures))]
        if prompt.path:
            turns = composed[int(order[next_composed % len(order)])]
            next_composed += 1
        else:
            turns = [_fill(prompt.templates[rng.integers(len(prompt.templates))], topics, rng)]
        if not prompt.is_chat:
            first = [] if bos is None else [bos]
            out.append(Opening((*first, *tokenizer.encode(turns[0], bos=False)), temperature, prompt.must_end, "text"))
            continue
        num_asked = int(rng.random() < prompt.second_turns) if len(turns) == 1 else 0
        if not turns[0]:
            out.append(Opening(marks.opening, temperature, prompt.must_end, "question", num_asked=num_asked))
            continue
        # the template itself takes 4 ms per prompt in its own process: its marks give the same tokens
        given = (*marks.opening, *tokenizer.encode(turns[0], bos=False), ends[0], *marks.to_answer)
        more = tuple(marks.turn(tokenizer.encode(turn, bos=False), ends[0]) for turn in turns[1:])
        out.append(Opening(given, temperature, prompt.must_end, "answer", more, num_asked))
    return out


def _fill(template: str, topics: Sequence[str], rng: np.random.Generator) -> str:
    return re.sub(r"\{topic\}", lambda _: topics[int(rng.integers(len(topics)))], template)


@dataclass(slots=True)
class _Row:
    """An opening in progress: the roles of its tokens up to `begin`, where the teacher writes as `role` now."""

    opening: Opening
    number: int
    parts: deque[tuple[int, Sequence[int]]]  # still to be written: each role, with the tokens given before it
    role: int = GIVEN
    begin: int = 0
    roles: list[int] = field(default_factory=list)


class Writer:
    """Continue openings into documents, as many at a time as there are slots."""

    def __init__(
        self, model: SalaModel, num_slots: int, length: int, ends: Sequence[int], marks: Marks, seed: int
    ) -> None:
        self.slots = Slots(model, num_slots, length, ends, seed)
        self.length, self.ends, self.marks = length, frozenset(ends), marks
        self.rows: list[_Row | None] = [None] * num_slots
        self.has_opening = [False] * num_slots  # the slot's KV cache starts with the template's opening
        self.documents: list[tuple[int, list[int], list[int], bool]] = []

    def restart(self) -> None:
        """Forget the documents so far, and take over the model's current weights."""
        self.documents = []
        self.slots.refresh()

    def write(
        self,
        openings: Iterable[Opening],
        deadline: float | None = None,
        note: Callable[[int, int], None] = lambda rows, tokens: None,
    ) -> TokenizedDocuments:
        """Return the continued openings in their order; at the deadline, drop incomplete dialogues."""
        waiting = deque(enumerate(openings))
        num_tokens = 0
        while waiting or any(row is not None for row in self.rows):
            idle = [slot for slot, row in enumerate(self.rows) if row is None]
            changes = [self._begin(slot, *waiting.popleft()) for slot in idle[: len(waiting)]]
            self.slots.update(changes)
            self.slots.run(STEPS)
            num_tokens += self._collect()
            note(len(self.documents), num_tokens)
            if deadline is not None and time.monotonic() > deadline:
                self._keep_unfinished_text()
                break
        self.documents.sort(key=lambda document: document[0])
        return TokenizedDocuments.of([document[1:] for document in self.documents])

    def _begin(self, slot: int, number: int, opening: Opening) -> SlotUpdate:
        given = len(self.marks.opening)
        tokens = opening.tokens[: self.length]
        is_chat = bool(given) and tokens[:given] == self.marks.opening
        position = min(given, len(tokens) - 1) if is_chat and self.has_opening[slot] else 0
        self.has_opening[slot] = is_chat and not self.slots.has_states
        question = [(ASKED, self.marks.to_question), (ANSWER, self.marks.to_answer)] * opening.num_asked
        parts: deque[tuple[int, Sequence[int]]] = deque([*((ANSWER, turn) for turn in opening.turns), *question])
        if opening.writes == "question":
            parts.appendleft((ANSWER, self.marks.to_answer))
        parts.appendleft(({"question": ASKED, "answer": ANSWER, "text": TEXT}[opening.writes], tokens))
        self.rows[slot] = row = _Row(opening, number, parts)
        return self._change(slot, row, position)

    def _change(self, slot: int, row: _Row, position: int) -> SlotUpdate:
        """Start the next part of the row."""
        start = len(row.roles)
        row.role, tokens = row.parts.popleft()
        row.roles += [GIVEN] * len(tokens)
        row.begin = len(row.roles)
        if row.role == ASKED:
            limit, temperature, min_p = row.begin + MAX_QUESTION, ASK_TEMPERATURE, ASK_MIN_P
        elif row.role == TEXT:
            limit, temperature, min_p = self.length, row.opening.temperature, TEXT_MIN_P
        else:
            limit, temperature, min_p = row.begin + MAX_ANSWER, row.opening.temperature, MIN_P
        return SlotUpdate(slot, start, position, tokens, min(limit, self.length), temperature, min_p)

    def _collect(self) -> int:
        """Collect finished rows, or start their next turn; return the number of tokens in new documents."""
        active = self.slots.is_active.tolist()
        done = [slot for slot, row in enumerate(self.rows) if row is not None and not active[slot]]
        if not done:
            return 0
        index = torch.tensor(done, device=self.slots.device)
        tokens = self.slots.tokens[index].cpu().numpy()
        sizes = (self.slots.position[index] + 1).tolist()
        changes, before = [], len(self.documents)
        for slot, ids, size in zip(done, tokens, sizes, strict=True):
            row = self.rows[slot]
            assert row is not None
            change = self._continue(slot, row, ids[:size].tolist())
            if change is None:
                self.rows[slot] = None
            else:
                changes.append(change)
        self.slots.update(changes)
        return sum(len(document[1]) for document in self.documents[before:])

    def _keep_unfinished_text(self) -> None:
        """Keep the free text so far, which needs no end."""
        sizes = (self.slots.position + 1).tolist()
        for slot, row in enumerate(self.rows):
            if row is not None and row.role == TEXT and sizes[slot] > row.begin:
                self._keep(row, self.slots.tokens[slot, : sizes[slot]].tolist(), is_ended=False)
        self.rows = [None] * len(self.rows)

    def _continue(self, slot: int, row: _Row, ids: list[int]) -> SlotUpdate | None:
        """Return the next task of this row; None if it is complete or dropped."""
        size = len(ids) - row.begin
        is_ended = ids[-1] in self.ends and size >= (3 if row.role == ASKED else 1)
        space = self.length - len(ids) - len(row.parts[0][1]) if is_ended and row.parts else 0
        if space >= (MAX_QUESTION if row.role == ANSWER else 1):
            row.roles += [row.role] * size
            return self._change(slot, row, len(ids) - 1)
        if row.role != ASKED or not is_ended:
            self._keep(row, ids, is_ended)
        return None

    def _keep(self, row: _Row, ids: list[int], is_ended: bool) -> None:
        """Record a document; of several answers an unfinished last one, or an unfinished question, is cut off."""
        roles = [*row.roles, *[row.role] * (len(ids) - row.begin)]
        if not is_ended and ANSWER in row.roles:
            cut = max(at for at, role in enumerate(row.roles) if role == ANSWER) + 1
            ids, roles, is_ended = ids[:cut], roles[:cut], True
        if is_ended or (row.role != ASKED and not row.opening.must_end):
            self.documents.append((row.number, ids, roles, is_ended))


def write_samples(
    model: SalaModel,
    tokenizer: Tokenizer,
    stage: SampleStage,
    base: Path,
    seed: int,
    note: Callable[[int, int, int], None],
    deadline: float | None = None,
) -> TokenizedDocuments:
    """Return the documents of a `sample` stage, filtered, and without held-out questions.

    `note` is called with the number of finished rows, of all rows, and of tokens. At the deadline, finished documents
    are kept.
    """
    config = model.config
    text_end = tokenizer.token_id(TEXT_END)
    ends = tuple(dict.fromkeys((*config.eos_token_id, *([] if text_end is None else [text_end]))))
    composed = [one.turns for prompt in stage.prompts if prompt.path for one in read_turns(base / prompt.path)]
    topics = [line for line in read_text(base / stage.topics).split("\n") if line] if stage.topics else []
    bos = config.bos_token_id if config.bos_token_id is not None else 0
    openings = make_openings(stage.prompts, topics, stage.num_rows, tokenizer, seed, ends, bos, composed)
    marks = Marks.of(tokenizer, ends) if any(opening.writes != "text" for opening in openings) else Marks()
    writer = Writer(model, min(stage.batch_rows, len(openings)), stage.seq_len, ends, marks, seed)
    documents = writer.write(openings, deadline, lambda rows, tokens: note(rows, len(openings), tokens))
    del writer
    torch.cuda.empty_cache()  # training needs the memory of the slots' KV caches
    kept = filter_documents(documents) if stage.is_filtered else documents
    if not stage.held_out:
        return kept
    held_out = read_held_out([base / path for path in stage.held_out])
    return kept.select(np.flatnonzero(~_repeats(kept, tokenizer, held_out)).tolist())


def _repeats(
    documents: TokenizedDocuments, tokenizer: Tokenizer, held_out: HeldOut
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each document whether the teacher asked a held-out question in it; many are checked in processes."""

    def check(part: int) -> list[bool]:
        indices = range(part * CHUNK, min((part + 1) * CHUNK, len(documents)))
        questions = (runs(*documents.document(at)[:2], ASKED) for at in indices)
        return [any(tokenizer.decode(run) in held_out for run in one) for one in questions]

    num_workers = (os.cpu_count() or 1) if len(documents) >= MIN_PARALLEL and hasattr(os, "fork") else 0
    parts = prefetch(check, range(-(-len(documents) // CHUNK)), num_workers)
    return np.array([value for part in parts for value in part], np.bool_)
