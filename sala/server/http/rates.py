"""Limits per minute: the tokens and the requests of each key.

What a key has used drains steadily, a whole limit in a minute. A request is admitted if what it may use at most fits:
the tokens of its prompts and the longest answers that it asks for. When it ends, what it did not use is given back.
So a key never gets more than its limit, except by a single answer that is longer than a minute's tokens.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sala.server.http.errors import ApiError

WINDOW_S = 60.0
MAX_NAP_S = 5.0  # limits may change while a batch waits
UNITS = {"tokens": "tokens per min (TPM)", "requests": "requests per min (RPM)"}
HEADERS = tuple(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in UNITS)


@dataclass
class Meter:
    """What has been used of a limit per minute; it drains steadily."""

    limit: int = 0  # 0: none
    used: float = 0.0
    at: float = 0.0  # when `used` was right

    def drain(self, now: float) -> None:
        self.used = max(0.0, self.used - max(0.0, now - self.at) * self.limit / WINDOW_S)
        self.at = now

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.limit - self.used))

    def wait_for(self, amount: float, limit: float | None = None) -> float:
        """Return the seconds until so much more may be used."""
        return max(0.0, (self.used + amount - (limit or self.limit)) * WINDOW_S / self.limit)


@dataclass
class Rates:
    """The meters of one key. Thread-safe."""

    clock: Callable[[], float] = time.monotonic
    meters: dict[str, Meter] = field(default_factory=lambda: {kind: Meter() for kind in UNITS})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def limit(self, num_tokens: int, num_requests: int) -> None:
        """Set the limits per minute; 0: none. What has been used stays used."""
        with self._lock:
            for kind, limit in (("tokens", num_tokens), ("requests", num_requests)):
                self.meters[kind].drain(self.clock())
                self.meters[kind].limit = limit

    def count_request(self) -> None:
        """Count a request. Raises ApiError if it is one too many."""
        with self._lock:
            if self.meters["requests"].limit:
                self._take("requests", 1)

    def reserve(self, num_prompt: int, num_answers: int) -> Callable[[int], None]:
        """Count the tokens that a request may use; return what to call with those that it did use. Raises ApiError."""
        with self._lock:
            need = self._need(num_prompt, num_answers)
            if need:
                self._take("tokens", need)
        return self._settlement(need)

    async def reserve_in_turn(self, num_prompt: int, num_answers: int) -> Callable[[int], None]:
        """Like `reserve`, for a batch: wait until half of the limit would be left to other requests of the key.

        A request that needs more than that half waits until nothing is used.
        """
        while True:
            with self._lock:
                meter, need = self.meters["tokens"], self._need(num_prompt, num_answers)
                meter.drain(self.clock())
                half = meter.limit / 2
                seconds = meter.wait_for(min(need, half), half) if need else 0.0
                if not seconds:
                    meter.used += need
                    return self._settlement(need)
            await asyncio.sleep(min(seconds, MAX_NAP_S))

    def headers(self) -> dict[str, str]:
        """Return OpenAI's headers about the limits."""
        with self._lock:
            return self._headers()

    def _need(self, num_prompt: int, num_answers: int) -> int:
        """Return the tokens to count: no more than the limit, so that an answer of any length can be asked for."""
        limit = self.meters["tokens"].limit
        least = num_prompt + (num_answers > 0)
        if 0 < limit < least:
            message = (
                f"Request too large for this key on {UNITS['tokens']}: Limit {limit}, Requested {least}. "
                "The prompt must be reduced in order to run successfully."
            )
            headers = {"x-should-retry": "false", **self._headers()}  # OpenAI's clients would try it again
            raise ApiError(429, message, "tokens", code="rate_limit_exceeded", headers=headers)
        return min(limit, num_prompt + num_answers)

    def _take(self, kind: str, amount: int) -> None:
        meter = self.meters[kind]
        meter.drain(self.clock())
        seconds = meter.wait_for(amount)
        if seconds:
            used = meter.limit - meter.remaining
            message = (
                f"Rate limit reached for this key on {UNITS[kind]}: Limit {meter.limit}, Used {used}, "
                f"Requested {amount}. Please try again in {as_duration(seconds)}."
            )
            headers = {"retry-after-ms": str(math.ceil(seconds * 1000)), **self._headers()}
            retry_s = math.ceil(seconds)
            raise ApiError(429, message, kind, code="rate_limit_exceeded", headers=headers, retry_s=retry_s)
        meter.used += amount

    def _settlement(self, reserved: int) -> Callable[[int], None]:
        def settle(num_used: int) -> None:
            with self._lock:
                meter = self.meters["tokens"]
                meter.drain(self.clock())
                meter.used = max(0.0, meter.used + num_used - reserved)

        return settle

    def _headers(self) -> dict[str, str]:
        found = {}
        for kind, meter in self.meters.items():
            if meter.limit:
                meter.drain(self.clock())
                found[f"x-ratelimit-limit-{kind}"] = str(meter.limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(meter.remaining)
                found[f"x-ratelimit-reset-{kind}"] = as_duration(meter.used * WINDOW_S / meter.limit)
        return found


def as_duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 6m0s, 1.2s, 17ms."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{ms / 1000:g}s"
