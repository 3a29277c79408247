"""What clients send, as events of HTTP: a few at a time, however small they are.

h11 makes an event of each chunk of a body and parses each line of a header, even if they have a byte each. What one
read of a socket brings could keep the event loop busy for a fifth of a second. So `Parser` returns a limited number of
events until `allow` is called again, and gives h11 no more than it can parse in a moment.
"""

import re
from typing import Any

import h11

from sala.server.http.security import MAX_HEADERS

NUM_EVENTS = 256  # at a time, in about a millisecond
PIECE = 4096  # bytes given to h11 at a time, unless they are known to be one event
MAX_TRAILER_BYTES = 8192  # lines after a body in chunks, or the line before a chunk
BLANK_LINE = re.compile(rb"\n\r?\n")


class Parser(h11.Connection):
    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self.is_cut = False  # it had to stop, though there is more to parse
        self._num_allowed = NUM_EVENTS
        self._unread = bytearray()  # what h11 has not been given yet
        self._num_expected = 0  # bytes of the body that are still to come, if its length was declared

    @property
    def has_more(self) -> bool:
        """Return whether there is something that has been received and not parsed."""
        return bool(self._unread or self.trailing_data[0])

    def allow(self) -> None:
        """Let the next events be returned."""
        self.is_cut = False
        self._num_allowed = NUM_EVENTS

    def discard(self) -> None:
        """Forget what has been received and not parsed."""
        self._unread.clear()

    def receive_data(self, data: bytes) -> None:
        self._unread += data

    def next_event(self) -> Any:
        """Return the next event; NEED_DATA also if no more are allowed. Raises h11.RemoteProtocolError."""
        if not self._num_allowed:
            self.is_cut = True
            return h11.NEED_DATA
        self._num_allowed -= 1
        event = self._parse()
        while event is h11.NEED_DATA and self._unread:
            size = max(PIECE, self._num_expected)
            super().receive_data(bytes(self._unread[:size]))
            del self._unread[:size]
            event = self._parse()
        if isinstance(event, h11.Request):
            headers = dict(event.headers)
            is_chunked = b"transfer-encoding" in headers
            self._num_expected = 0 if is_chunked else int(headers.get(b"content-length", 0))
        elif isinstance(event, h11.Data):
            self._num_expected = max(0, self._num_expected - len(event.data))
        return event

    def _parse(self) -> Any:
        """Return the next event in what h11 has been given; check before and after what it takes its time for."""
        if self.their_state is h11.IDLE:
            self._check_header()
        event = super().next_event()
        is_partial = event is h11.NEED_DATA and self.their_state is h11.SEND_BODY
        if is_partial and len(self.trailing_data[0]) > MAX_TRAILER_BYTES:
            raise h11.RemoteProtocolError("too many bytes between two chunks, or after the last")
        return event

    def _check_header(self) -> None:
        """Raise h11.RemoteProtocolError if a header, complete or not, has too many lines to be parsed."""
        data = self.trailing_data[0]
        blank = BLANK_LINE.search(data)
        if data.count(b"\n", 0, blank.start() if blank else len(data)) > MAX_HEADERS + 1:
            raise h11.RemoteProtocolError("too many lines in a header", error_status_hint=431)
