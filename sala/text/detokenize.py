"""Tokens to text while they arrive, never cutting a character in half."""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "�"
CONTEXT = 6  # tokens of the prompt that decide about a leading space
MAX_HELD = 8  # no character takes more tokens: what is held longer is not valid text
TAIL = 4  # of those, the tokens that may still begin a character


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Detokenizer:
    """`push` gives the text that a token completes, `flush` whatever is left; together they are the whole text."""

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._ids = list(prompt[-CONTEXT:])
        self._shown = len(self._ids)  # tokens whose text is out; those before serve as context
        self._start = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._pending(len(self._ids))
        if not text.endswith(REPLACEMENT):
            return self._show(text, len(self._ids))
        if len(self._ids) - self._shown > MAX_HELD:
            upto = len(self._ids) - TAIL
            return self._show(self._pending(upto), upto)
        return ""

    def flush(self) -> str:
        return self._show(self._pending(len(self._ids)), len(self._ids))

    def _pending(self, upto: int) -> str:
        """Text of the tokens not yet shown, decoded together with a little of what comes before."""
        before = self._decoder.decode(self._ids[self._start : self._shown])
        text = self._decoder.decode(self._ids[self._start : upto])
        return text[len(before) :]

    def _show(self, text: str, upto: int) -> str:
        if text:
            self._start = max(self._start, self._shown - CONTEXT)
            self._shown = upto
        return text
