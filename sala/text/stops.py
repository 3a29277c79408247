"""Stop strings in a stream: found across token borders, cut exactly, and nothing of them ever shown."""

from collections.abc import Sequence


class StopFinder:
    """`push` returns the text that cannot be part of a stop string; once `is_found`, nothing follows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    @property
    def is_found(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        if self.is_found or not self._stops:
            return "" if self.is_found else text
        self._held += text
        hits = [(self._held.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if hits:  # the one that is complete first, as a reader of single characters would see it
            end, size, self.found = min(hits)
            at = end + size
            out, self._held = self._held[:at], ""
            return out
        keep = max(longest_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        out, self._held = self._held, ""
        return out


def longest_overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
