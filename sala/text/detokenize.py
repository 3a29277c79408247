"""Tokens to text while they arrive, never cutting a character in half."""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "�"
CONTEXT = 6  # tokens of the past that decide about a leading space
WINDOW = 16  # tokens of the past that are decoded again at most, while no good place to begin is found
MAX_HELD = 8  # no character takes more tokens: what is held longer is not valid text
TAIL = 4  # of those, the tokens that may still begin a character


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Detokenizer:
    """`push` gives the text that a token completes, `flush` whatever is left; together they are the whole text.

    New tokens are decoded together with a few earlier ones, since spaces and byte runs depend on what stands before.
    The window of earlier tokens moves only to places between two characters.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._ids = list(prompt[-CONTEXT:])
        self._start = next((n for n in range(len(self._ids)) if self._is_whole(n, len(self._ids))), len(self._ids))
        self._shown = len(self._ids)  # tokens whose text is out; those from _start on serve as context

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
        if not text:
            return ""
        self._shown = upto
        if upto - self._start > CONTEXT:
            latest = upto - WINDOW
            places = range(upto - CONTEXT, max(self._start, latest), -1)
            self._start = next((n for n in places if self._is_whole(n, upto)), max(self._start, latest))
        return text

    def _is_whole(self, start: int, end: int) -> bool:
        """Whether decoding may begin at this token: it shows something, and no half character."""
        text = self._decoder.decode(self._ids[start:end])
        return bool(text) and REPLACEMENT not in text
