"""What load measurements share: timelines of requests, percentiles, and the energy that the GPUs use meanwhile."""

import itertools
import math
import os
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self

PERCENTS = (50, 90, 99)
POLL_MS = 200
START_S = 5.0  # how long to wait for the first line of nvidia-smi
QUERY = ("--query-gpu=index,power.draw", "--format=csv,noheader,nounits", f"--loop-ms={POLL_MS}")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that at least `percent` of the values do not exceed; None if there are no values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)] if ranked else None


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the percentiles of a row of results, keyed `name_p50` and so on."""
    return {f"{name}_p{percent}": percentile(values, percent) for percent in PERCENTS}


@dataclass(slots=True)
class Timeline:
    """When the tokens of one answer arrived. An event may bring several tokens, and some servers hold tokens back."""

    began: float
    events: list[float] = field(default_factory=list)  # times at which tokens arrived
    num_input: int = 0
    num_output: int = 0
    num_cached: int = 0  # tokens of the prompt that the server had computed before
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        return self.events[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """The seconds between events."""
        return [later - earlier for earlier, later in itertools.pairwise(self.events)]

    @property
    def token_gaps(self) -> list[float]:
        """The seconds between tokens: where events bring several tokens, each gap is shared among them evenly."""
        gaps = self.gaps
        share = len(gaps) / max(len(gaps), self.num_output - 1) if gaps else 1.0
        return [gap * share for gap in gaps]


def summarize(timelines: Sequence[Timeline], seconds: float) -> dict[str, Any]:
    """Return the figures of a load that took `seconds`; failed requests are counted but not measured."""
    done = [one for one in timelines if one.error is None and one.events]
    return {
        "answers": len(done),
        "errors": len(timelines) - len(done),
        "seconds": seconds,
        "answers_per_second": len(done) / seconds,
        "input_per_second": sum(one.num_input for one in done) / seconds,
        "output_per_second": sum(one.num_output for one in done) / seconds,
        **percentiles("first_token_s", [one.first_token_s for one in done]),
        **percentiles("between_tokens_s", [gap for one in done for gap in one.token_gaps]),
        "longest_stall_s": max((gap for one in done for gap in one.gaps), default=None),
    }


class PowerMeter:
    """Poll nvidia-smi while the context is open. Where it is not installed, the results are None.

    CUDA_VISIBLE_DEVICES limits it to the GPUs that a server with the same environment uses.
    """

    def __init__(self, is_on: bool = True) -> None:
        self._command = shutil.which("nvidia-smi") if is_on else None
        self._watts: dict[str, list[float]] = defaultdict(list)
        self._process: subprocess.Popen[str] | None = None
        self._has_begun = threading.Event()
        self._began = self._ended = 0.0

    def __enter__(self) -> Self:
        if self._command is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            arguments = [self._command, *QUERY, *([f"--id={visible}"] if visible else [])]
            self._process = subprocess.Popen(
                arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
            )
            self._thread = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._thread.start()
            self._has_begun.wait(START_S)
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join(START_S)

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._has_begun.set()
                index, _, watts = line.partition(",")
                with suppress(ValueError):  # a GPU that does not report its power
                    self._watts[index].append(float(watts))
        self._has_begun.set()  # it may have ended without a line

    @property
    def watts(self) -> float | None:
        """The mean power of all GPUs together."""
        seen = [sum(some) / len(some) for some in list(self._watts.values()) if some]
        return sum(seen) if seen else None

    def joules_per_1k(self, num_tokens: int) -> float | None:
        """Return the energy per 1,000 tokens, of `num_tokens` in all; None if it was not measured."""
        watts = self.watts
        return None if watts is None or not num_tokens else watts * (self._ended - self._began) / num_tokens * 1000
