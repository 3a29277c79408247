"""Loads for any server with OpenAI's API: closed and open loop, and single requests by length.

Prompts are new in every run, so that no cached prefix answers them. Where the server takes token ids they have exactly
the wanted length; elsewhere they are chats of short words, and the lengths are those that the server reports.
"""

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sala.errors import InputError, SalaError
from sala.lab.bench.client import TIMEOUT_S, Endpoint, Response, explain
from sala.lab.bench.meters import PowerMeter, Timeline, summarize
from sala.options.schema import read_count

VOCABULARIES = (30_000, 4_000, 256)  # sizes to try; current models have more tokens than the first
WORDS = ("time", "year", "work", "life", "hand", "part", "case", "week", "fact", "home", "area", "room", "book", "line")
PROBES = (16, 272)  # words of the two chats that measure the tokens per word
REFUSED = (400, 404, 405, 422, 500, 501)  # status codes for a field or form that a server does not support
OnDone = Callable[[Timeline], None]


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: a single one, a list, or a range; all are equally likely."""

    values: Sequence[int]

    @classmethod
    def parse(cls, text: str, name: str) -> "Lengths":
        """Read 2048, 512,2K or 100-4000; raise InputError for anything else."""
        try:
            if found := re.fullmatch(r"(\w+)-(\w+)", text.strip()):
                low, high = (read_count(part) for part in found.groups())
                values: Sequence[int] = range(low, high + 1)
            else:
                values = [read_count(part.strip()) for part in text.split(",")]
            if not values or min(values) < 1:
                raise ValueError
        except ValueError:
            raise InputError(name, f"is {text!r}", "write it as 2048, 512,2048 or 100-4000") from None
        return cls(values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass(frozen=True)
class Target:
    """A model behind an endpoint, and the requests that the server supports."""

    endpoint: Endpoint
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # of every request
    vocabulary: int | None = None  # token ids that prompts may use; None: the server takes chats only
    words: tuple[float, float] = (0.0, 1.0)  # tokens of a chat without words, and of a word
    timeout_s: float = TIMEOUT_S

    def request(self, num_input: int, num_output: int, rng: random.Random) -> tuple[str, bytes]:
        """Return the path and body of a request with a random prompt."""
        if self.vocabulary is not None:
            ids = rng.choices(range(self.vocabulary // 16, self.vocabulary), k=num_input)
            return "/completions", self._body(num_output, prompt=ids)
        base, each = self.words
        return self.chat(max(1, round((num_input - base) / each)), num_output, rng)

    def chat(self, num_words: int, num_output: int, rng: random.Random) -> tuple[str, bytes]:
        content = " ".join(rng.choices(WORDS, k=num_words))
        return "/chat/completions", self._body(num_output, messages=[{"role": "user", "content": content}])

    def _body(self, num_output: int, **prompt: Any) -> bytes:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": self.model, "max_tokens": num_output, **stream, **self.fields, **prompt}).encode()

    async def ask(self, path: str, body: bytes, num_input: int) -> Timeline:
        """Return the timeline of a request; if the request fails, it holds the error."""
        began = time.perf_counter()
        try:
            response = await self.endpoint.send(path, body, self.timeout_s)
            return response.timeline(num_input)
        except TimeoutError:
            reason = f"no answer within {self.timeout_s:g} s"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error) or type(error).__name__
        return Timeline(began, num_input=num_input, error=reason)


def open_target(
    endpoint: Endpoint, model: str | None, sampling: Mapping[str, Any], timeout_s: float = TIMEOUT_S
) -> Target:
    """Return a target with the richest requests that the server supports; raise SalaError if it supports none."""
    return asyncio.run(_open_target(endpoint, model, sampling, timeout_s))


async def _open_target(endpoint: Endpoint, model: str | None, sampling: Mapping[str, Any], timeout_s: float) -> Target:
    if model is None:
        listed = await endpoint.get_json("/models")
        models = [one for one in listed.get("data") or () if isinstance(one, dict) and "id" in one]
        if not models:
            raise SalaError(f"the server at {endpoint.url} lists no model", "load one there, or name one with --model")
        model = next((one for one in models if one.get("loaded")), models[0])["id"]  # ours also lists models on disk
    rng = random.Random()  # noqa: S311 - prompts, not secrets
    for fields in (
        {**sampling, "ignore_eos": True},
        sampling,
    ):  # for answers of equal length, if supported
        for size in VOCABULARIES:
            found = Target(endpoint, model, fields, size, timeout_s=timeout_s)
            response = await _probe(found, "/completions", found._body(1, prompt=[size // 2, size - 1]))
            if response.status == 200:
                return found
        found = Target(endpoint, model, fields, timeout_s=timeout_s)
        response = await _probe(found, *found.chat(PROBES[0], 1, rng))
        if response.status == 200:
            return await _fit_words(found, response, rng)
    raise response.problem(endpoint.url)


async def _probe(target: Target, path: str, body: bytes) -> Response:
    try:
        response = await target.endpoint.send(path, body, target.timeout_s)
    except OSError as error:
        raise SalaError(
            f"the server at {target.endpoint.url} does not answer: {explain(error)}", "see its log"
        ) from None
    if response.status != 200 and response.status not in REFUSED:
        raise response.problem(target.endpoint.url)
    return response


async def _fit_words(target: Target, first: Response, rng: random.Random) -> Target:
    """Return the target with the number of tokens per word, from two chats of different lengths."""
    second = await _probe(target, *target.chat(PROBES[1], 1, rng))
    few, many = (one.timeline(0).num_input for one in (first, second))
    if not many > few:  # the server does not report usage: a word counts as a token
        return target
    each = (many - few) / (PROBES[1] - PROBES[0])
    return replace(target, words=(few - PROBES[0] * each, each))


@dataclass(frozen=True)
class Load:
    """Requests that come `concurrency` at a time, or at random with `rate` per second on average (Poisson)."""

    inputs: Lengths
    outputs: Lengths
    num_requests: int
    num_warm: int
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0  # of lengths and arrivals

    def sizes(self) -> Iterator[tuple[int, int]]:
        rng = random.Random(self.seed)  # noqa: S311
        while True:
            yield rng.choice(self.inputs.values), rng.choice(self.outputs.values)

    def arrivals(self) -> Iterator[float]:
        """Yield the seconds from the start to each request of an open loop."""
        rng, at = random.Random(self.seed + 1), 0.0  # noqa: S311
        while self.rate:
            yield at
            at += rng.expovariate(self.rate)


def run_load(target: Target, load: Load, on_done: OnDone = lambda _: None) -> dict[str, Any]:
    """Warm up, run a load, and return its figures. Failed requests are counted, and the first failure is named."""
    rng, sizes = random.Random(), load.sizes()  # noqa: S311
    requests = [
        (*target.request(num_input, num_output, rng), num_input)
        for (num_input, num_output), _ in zip(sizes, range(load.num_warm + load.num_requests), strict=False)
    ]
    warm, timed = requests[: load.num_warm], requests[load.num_warm :]
    asyncio.run(_closed(target, warm, load.concurrency or load.num_warm, lambda _: None))
    with PowerMeter(is_on=target.endpoint.is_local) as meter:
        seconds, timelines = asyncio.run(_run(target, load, timed, on_done))
    done = [one for one in timelines if one.error is None]
    if not done:
        raise SalaError(f"no request succeeded: {timelines[0].error}", "see the log of the server")
    return {
        "concurrency": load.concurrency, "rate": load.rate,
        "input_tokens": statistics.fmean(one.num_input for one in done),
        "output_tokens": statistics.fmean(one.num_output for one in done),
        **summarize(timelines, seconds),
        "cached_share": cached_share(done),
        "watts": meter.watts, "joules_per_1k_output": meter.joules_per_1k(sum(one.num_output for one in done)),
        "error": next((one.error for one in timelines if one.error is not None), None),
    }  # fmt: skip


def cached_share(timelines: Sequence[Timeline]) -> float:
    """Return the share of the prompts that the server did not have to compute."""
    return sum(one.num_cached for one in timelines) / max(1, sum(one.num_input for one in timelines))


Requests = Sequence[tuple[str, bytes, int]]


async def _run(target: Target, load: Load, requests: Requests, on_done: OnDone) -> tuple[float, list[Timeline]]:
    began = time.perf_counter()
    if load.rate is None:
        timelines = await _closed(target, requests, load.concurrency or 1, on_done)
    else:
        timelines = await _open(target, requests, load.arrivals(), on_done)
    return time.perf_counter() - began, timelines


async def _closed(target: Target, requests: Requests, concurrency: int, on_done: OnDone) -> list[Timeline]:
    """Keep `concurrency` requests running; send the next one when one is done."""
    queue, timelines = iter(requests), []

    async def work() -> None:
        for path, body, num_input in queue:
            timelines.append(await target.ask(path, body, num_input))
            on_done(timelines[-1])

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return timelines


async def _open(target: Target, requests: Requests, arrivals: Iterator[float], on_done: OnDone) -> list[Timeline]:
    """Send every request at its time, without waiting for others."""
    began = time.perf_counter()

    async def work(path: str, body: bytes, num_input: int, at: float) -> Timeline:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        timeline = await target.ask(path, body, num_input)
        on_done(timeline)
        return timeline

    return await asyncio.gather(*(work(*request, at) for request, at in zip(requests, arrivals, strict=False)))


def measure_first_tokens(target: Target, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Send prompts of this length one at a time; return the time to first token of the first and of later ones."""

    async def ask() -> Timeline:
        path, body = target.request(num_tokens, 1, random.Random())  # noqa: S311
        timeline = await target.ask(path, body, num_tokens)
        if timeline.error is not None:
            raise SalaError(f"a prompt of {num_tokens:,} tokens failed: {timeline.error}", "see the log of the server")
        return timeline

    first, *later = [asyncio.run(ask()) for _ in range(1 + repeats)]
    return {
        "num_tokens": first.num_input,
        "cold_s": first.first_token_s,
        "warm_s": statistics.median(one.first_token_s for one in later),
        "worst_s": max(one.first_token_s for one in later),
        "cached_share": cached_share([first, *later]),
    }
