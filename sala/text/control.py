"""Controls of an answer: a grammar to follow, a budget for reasoning."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

from sala.errors import InputError, MissingExtra
from sala.protocol import Sampling, Verdict
from sala.text.answer import CLOSE, OPEN, Detokenizer
from sala.text.tokenizer import Tokenizer

COMPILE_SECONDS = 2.0
MAX_GRAMMAR_BYTES = 256 << 10
# White space between the parts of JSON. Without this bound a weak model may sample spaces for ever.
WHITESPACE = r"( |\n[ \t]{0,32})?"


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
        message = f"cannot be followed: {_first_line(self._matcher.get_error())}"
        return InputError(self._field, message, "make it simpler")


def _first_line(error: object) -> str:
    return str(error).partition("\n")[0][:200]


class GrammarCompiler:
    """Compiles grammars for one tokenizer within a time limit; call it outside of the engine thread."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._stop_ids = sorted(stop_ids)
        self._tokenizer: Any = None

    def compile(self, sampling: Sampling, tokenizer: Tokenizer | None = None) -> Grammar:
        """Return the control for the schema, regular expression or grammar that `sampling` demands.

        With a tokenizer, the answer begins inside reasoning, and the grammar holds only after it.
        """
        given = {name: getattr(sampling, name) for name in ("json_schema", "regex", "grammar")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise InputError(" and ".join(given), "exclude each other", "give one of them")
        field, text = next(iter(given.items()))
        if len(text) > MAX_GRAMMAR_BYTES:
            raise InputError(field, f"has {len(text):,} characters", f"at most {MAX_GRAMMAR_BYTES:,} are allowed")
        return Grammar(field, self._in_time(field, lambda: self._matcher(field, text)), tokenizer)

    def _in_time(self, field: str, work: Callable[[], Any]) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        outcome: Future[Any] = Future()

        def attempt() -> None:
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)

        Thread(target=attempt, daemon=True, name="grammar").start()
        try:
            return outcome.result(COMPILE_SECONDS)
        except TimeoutError:
            raise InputError(field, f"takes longer than {COMPILE_SECONDS:g} s to compile", "make it simpler") from None
        except Exception as error:
            raise InputError(field, f"is not understood: {_first_line(error)}", "check it") from None

    def _load(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise MissingExtra("llguidance", "server") from None
        return LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=self._stop_ids or None)

    def _matcher(self, field: str, text: str) -> Any:
        from llguidance import LLMatcher

        if field == "json_schema":
            json.loads(text)
            grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
        elif field == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(self._tokenizer, grammar)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher
