"""Controls of an answer: a grammar to follow, a budget for reasoning."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sala.errors import InputError, MissingExtra
from sala.protocol import Sampling, Verdict
from sala.text.answer import CLOSE, OPEN, Detokenizer
from sala.text.schemas import explaining, spell_patterns
from sala.text.tokenizer import Tokenizer
from sala.text.workers import SandboxProcess, SandboxTask, WorkerKilled

COMPILE_SECONDS = 2.0
LOAD_SECONDS = 30.0  # for a new process to load the tokenizer, on a busy machine
MAX_GRAMMAR_BYTES = 256 << 10
MAX_KEPT = 64  # grammars that are kept compiled; even a short one takes tens of kilobytes
MAX_KEPT_BYTES = 1 << 20  # size of their texts
# White space between the parts of JSON, as people write it. Without a bound a weak model may sample spaces for ever.
WHITESPACE = r"( |\n(\t| {0,8}))?"


class ThinkBudget:
    """Closes the reasoning after `budget` tokens, so that the answer follows."""

    allows_drafts = False

    def __init__(self, tokenizer: Tokenizer, budget: int, is_open: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._closing = tuple(tokenizer.encode(f"\n{CLOSE}\n\n", bos=False))
        self._left = budget
        self._text = ""
        self._is_open: bool | None = True if is_open else None  # None: not known yet
        self.opening = self._closing if is_open and budget == 0 else ()  # forced before anything is sampled
        if self.opening:
            self._is_open = False

    def mask(self) -> bytes | None:
        return None

    def observe(self, token: int) -> Verdict | None:
        if self._is_open is False:
            return None
        self._text += self._detokenizer.push(token)
        if self._is_open is None:
            self._is_open = self._opened()
            if not self._is_open:
                return None
        elif CLOSE in self._text:
            self._is_open = False
            return None
        else:
            self._text = self._text[-len(CLOSE) :]
            self._left -= 1
        if self._left > 0:
            return None
        self._is_open = False
        return Verdict(force=self._closing)

    def _opened(self) -> bool | None:
        start = self._text.lstrip()
        if start.startswith(OPEN):
            self._text = start[len(OPEN) :]
            return True
        return None if OPEN.startswith(start) else False


class Grammar:
    """Allows only tokens that keep the answer inside a JSON schema, a regular expression or a Lark grammar."""

    allows_drafts = False

    def __init__(self, field: str, matcher: Any, tokenizer: Tokenizer | None = None) -> None:
        self._field = field
        self._matcher = matcher
        # Set inside reasoning, where the grammar does not hold yet.
        self._reasoning = None if tokenizer is None else Detokenizer(tokenizer)
        self._tail = ""
        self._has_begun = tokenizer is None

    def mask(self) -> bytes | None:
        if self._reasoning is not None:
            return None
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._problem()
        return mask

    def observe(self, token: int) -> Verdict | None:
        if self._reasoning is not None:
            self._tail = (self._tail + self._reasoning.push(token))[-2 * len(CLOSE) :]
            if CLOSE in self._tail:
                self._reasoning = None
            return None
        if not self._has_begun and not self._matcher.validate_tokens([token]):
            return None  # white space that was forced after the closing tag
        self._has_begun = True
        if not self._matcher.consume_token(token):
            raise self._problem()
        return Verdict(finish="stop") if self._matcher.is_stopped() else None

    def _problem(self) -> InputError:
        reason = _first_line(self._matcher.get_error())
        if "NoExtensionBias" in reason:
            return InputError(self._field, "cannot be followed: no text fits all that it demands", "check it")
        return InputError(self._field, f"cannot be followed: {reason}", "make it simpler")


def _first_line(error: object) -> str:
    """Return the reason of an error in one line: the first one, and the last if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = re.sub(r"^\w+Error: ", "", lines[0])
    return (f"{first} {lines[-1]}" if first.endswith(":") else first)[:200].rstrip(":")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, first in a process that can be killed; the last ones used are kept."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._stop_ids = sorted(stop_ids)
        self._tokenizer: Any = None
        self._worker = SandboxProcess()
        self._known: OrderedDict[tuple[str, str], Any] = OrderedDict()  # matchers, or why there is none
        self._lock = threading.Lock()

    def compile(self, sampling: Sampling, tokenizer: Tokenizer | None = None, begun: str = "") -> Grammar:
        """Return the control for the schema, regular expression or grammar that `sampling` demands.

        With a tokenizer, the answer begins inside reasoning, and the grammar holds only after it. `begun` is the
        beginning of the answer that is there already.
        """
        given = {name: getattr(sampling, name) for name in ("json_schema", "regex", "grammar")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise InputError(" and ".join(given), "exclude each other", "give one of them")
        field, text = next(iter(given.items()))
        if len(text) > MAX_GRAMMAR_BYTES:
            raise InputError(field, f"has {len(text):,} characters", f"at most {MAX_GRAMMAR_BYTES:,} are allowed")
        matcher = self._find(field, text)
        if begun:
            self._advance(matcher, begun)
        return Grammar(field, matcher, tokenizer)

    def _find(self, field: str, text: str) -> Any:
        """Return a fresh matcher, compiled unless it is known."""
        with self._lock:
            found = self._known.get((field, text))
            if found is not None:
                self._known.move_to_end((field, text))
        if found is None:
            try:
                with _compiling():
                    found = self._compile(field, text)
            except WorkerKilled:  # not remembered: the machine may just have been busy
                problem = f"takes longer than {COMPILE_SECONDS:g} s to compile"
                raise InputError(field, problem, "make it simpler") from None
            except InputError as error:
                found = error
            with self._lock:
                self._known[field, text] = found
                while len(self._known) > MAX_KEPT or (len(self._known) > 1 and self._kept_bytes() > MAX_KEPT_BYTES):
                    self._known.popitem(last=False)
        if isinstance(found, InputError):
            raise InputError(found.field, found.problem, found.remedy)
        return found.deep_copy()

    def _kept_bytes(self) -> int:
        return sum(len(text) for _, text in self._known)

    def _advance(self, matcher: Any, begun: str) -> None:
        """Let a matcher read the beginning of an answer. Raises InputError if there is nothing to continue."""
        tokens = self._tokenizer.tokenize_str(begun)
        if matcher.validate_tokens(tokens) < len(tokens) or not matcher.consume_tokens(tokens):
            raise InputError("messages", "begin an answer without the requested form", "correct the last one")
        if matcher.is_stopped():
            raise InputError("messages", "end with an answer that is complete already", "leave the last one out")

    @property
    def num_waiting(self) -> int:
        """How many grammars wait for the process that compiles."""
        return self._worker.num_waiting

    def close(self) -> None:
        """Stop the process that compiles, if it runs."""
        self._worker.close()

    def _compile(self, field: str, text: str) -> Any:
        """Compile a grammar in the worker and, if that succeeds in time, here."""
        try:
            grammar = self._translate(field, text)
            limits = {"tokenizer": str(self._file), "vocab_size": self._vocab_size, "stop_ids": self._stop_ids}
            load = SandboxTask("tokenizer", limits, LOAD_SECONDS)  # in addition to the time for the grammar
            reply = self._worker.ask_all(load, SandboxTask("grammar", {"grammar": grammar, **limits}, COMPILE_SECONDS))
        except InputError:
            raise
        except (ValueError, RecursionError) as error:
            raise InputError(field, f"is not understood: {_first_line(error)}", "check it") from None
        if "error" in reply:
            raise InputError(field, f"is not understood: {_first_line(reply['error'])}", "check it")
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, grammar)

    def _load(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise MissingExtra("llguidance", "server") from None
        return LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=self._stop_ids or None)

    def _translate(self, field: str, text: str) -> str:
        """Return the grammar in llguidance's own form. Raises ValueError."""
        if self._tokenizer is None:
            self._tokenizer = self._load()
        from llguidance import LLMatcher

        if field == "json_schema":
            with explaining(field):
                schema = json.dumps(spell_patterns(json.loads(text)))
            return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE}))
        return str(LLMatcher.grammar_from_regex(text) if field == "regex" else LLMatcher.grammar_from_lark(text))


def num_compiling() -> int:
    """Return how many grammars are being compiled now or wait for that."""
    return len(_live)


@contextmanager
def _compiling() -> Iterator[None]:
    one = object()
    _live.add(one)
    try:
        yield
    finally:
        _live.discard(one)


_live: set[object] = set()
