"""POST /completions: a text or token ids in, what follows out. Also scores a text, for evaluations."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sala.engine.requests import Call, Submission
from sala.engine.service import Stream
from sala.engine.stream import Completion, Event, PromptProgress, PromptScores, StreamItem
from sala.llm import LLM
from sala.protocol import SampledToken, Sampling
from sala.server.api import answers
from sala.server.api.chat import STREAMED
from sala.server.api.chat_schema import CompletionRequest, StrictRoute, TextCompletion
from sala.server.http.errors import ALWAYS, dump
from sala.server.http.sse import EventStream, until_gone
from sala.server.runtime import LoadedModel, Runtime
from sala.server.settings import Settings
from sala.server.worker import SCORE_CHUNK
from sala.text.detokenize import Detokenizer

router = APIRouter(tags=["completions"], route_class=StrictRoute)
FIELDS = {"prompt": "prompt", "logit_bias token": "logit_bias"}


@router.post("/completions", response_model=TextCompletion, responses={**ALWAYS, **STREAMED}, summary="Continue a text")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    runtime: Runtime = request.app.state.runtime
    settings: Settings = request.app.state.settings
    model = await until_gone(request, runtime.get(body.model))
    with answers.naming(FIELDS):
        plan = Plan(body, build_sampling(body, settings))
        stream = await until_gone(request, model.worker.open(plan.prepare), model.worker.cancel)
    continuation = Continuation(model, plan, stream)
    if body.stream:
        events = continuation.events(settings.ping_s)
        return EventStream(events, stream.overflowed, lambda: model.worker.cancel(stream))
    try:
        whole = await until_gone(request, continuation.collect())
    finally:
        model.worker.cancel(stream)
    return Response(dump(whole), media_type="application/json")


def build_sampling(body: CompletionRequest, settings: Settings) -> Sampling:
    """With max_tokens 0 nothing is sampled, but the rest is checked all the same."""
    max_tokens = None if body.max_tokens is None else max(1, body.max_tokens)
    return answers.build_sampling(body, settings, max_tokens=max_tokens, logprobs=body.logprobs)


@dataclass
class Plan:
    """What a request comes down to; the ids are there once it is prepared."""

    body: CompletionRequest
    sampling: Sampling
    ids: list[list[int]] = field(default_factory=list)

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.body.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def num_answers(self) -> int:
        return self.body.n or 1

    @property
    def is_scored(self) -> bool:
        return bool(self.body.echo) and self.body.logprobs is not None

    def prepare(self, llm: LLM) -> Submission:
        """Encode the prompts; runs in the thread pool."""
        self.ids = [llm.encode(prompt) for prompt in self.prompts]
        submission = Submission(wants_progress=bool(self.body.return_progress))
        for index, ids in enumerate(self.ids):
            if self.body.max_tokens != 0:
                submission.groups.append(llm.inputs.prepare(Call(None, self.sampling, prompt=ids, n=self.num_answers)))
            else:
                llm.engine.check(ids)
            if self.is_scored:
                submission.scores.append(llm.token_scoring(ids, self.body.logprobs or 0, SCORE_CHUNK, index))
        return submission


@dataclass
class Choice:
    """One continuation while it grows. Offsets count from the beginning of the text that is given back."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    completion: Completion | None = None
    num_told: int = 0  # tokens
    num_shown: int = 0  # characters

    def add(self, speller: answers.Speller, sampled: SampledToken, is_first: bool = False) -> None:
        token = speller.text(sampled.token)
        rivals: dict[str, float] = {}
        for number, logprob in (*sampled.top_logprobs, (sampled.token, answers.finite(sampled.logprob))):
            rivals.setdefault(speller.text(number), answers.finite(logprob))
        self.tokens.append(token)
        self.token_logprobs.append(None if is_first else answers.finite(sampled.logprob))
        self.top_logprobs.append(None if is_first else rivals)
        self.text_offset.append(len(self.text))

    def take_news(self) -> tuple[str, dict[str, Any]]:
        """Text and log-probabilities since the last time."""
        text, at = self.text[self.num_shown :], self.num_told
        self.num_shown, self.num_told = len(self.text), len(self.tokens)
        logprobs = {
            "tokens": self.tokens[at:],
            "token_logprobs": self.token_logprobs[at:],
            "top_logprobs": self.top_logprobs[at:],
            "text_offset": self.text_offset[at:],
        }
        return text, logprobs


class Continuation:
    """The answers to one request: `n` for every prompt, in their order."""

    def __init__(self, model: LoadedModel, plan: Plan, stream: Stream) -> None:
        self._model = model
        self._plan = plan
        self._stream = stream
        self._body = plan.body
        self._choices = [Choice() for _ in range(len(plan.ids) * plan.num_answers)]
        self._speller = answers.Speller(model.llm) if self._body.logprobs is not None else None
        if self._body.echo and not plan.is_scored:
            self._echo()

    def _echo(self) -> None:
        for index, prompt in enumerate(self._plan.prompts):
            text = prompt if isinstance(prompt, str) else self._model.llm.tokenizer.decode(prompt)
            for choice in self._of(index):
                choice.text = text

    def _of(self, prompt: int) -> list[Choice]:
        count = self._plan.num_answers
        return self._choices[prompt * count : (prompt + 1) * count]

    async def collect(self) -> dict[str, Any]:
        while (item := await self._stream.aread()) is not None:
            self._take(item)
        answer = {
            **answers.head("text_completion", "cmpl", self._model.id),
            "choices": [self._show(index, choice, *_end(choice)) for index, choice in enumerate(self._choices)],
            "usage": self._usage(),
        }
        return {**answer, **self._timings()}

    def events(self, ping_s: float) -> AsyncIterator[bytes]:
        self._head = answers.head("text_completion", "cmpl", self._model.id)
        echoed = [index for index, choice in enumerate(self._choices) if choice.text]
        opening = [self._chunk(index) for index in echoed]
        return answers.send_events(self._stream, ping_s, opening, self._chunks, self._closing)

    def _take(self, item: StreamItem) -> list[int]:
        """Book what has come; the answers that it belongs to."""
        if isinstance(item, PromptScores):
            self._take_scores(item)
            count = self._plan.num_answers
            return list(range(item.index * count, (item.index + 1) * count))
        if not isinstance(item, Event):
            return []
        choice = self._choices[item.index]
        for sampled in item.sampled:
            if self._speller is not None:
                choice.add(self._speller, sampled)
        choice.text += item.delta.text
        choice.completion = item.completion or choice.completion
        return [item.index]

    def _take_scores(self, scored: PromptScores) -> None:
        if self._speller is None:
            return
        ids = self._plan.ids[scored.index]
        for choice in self._of(scored.index):
            reader = Detokenizer(self._model.llm.tokenizer)
            for sampled in (SampledToken(ids[0]), *chain.from_iterable(scored.parts)):
                choice.add(self._speller, sampled, is_first=not choice.tokens)
                choice.text += reader.push(sampled.token)
            choice.text += reader.flush()

    def _chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        if isinstance(item, PromptProgress):
            yield {**self._chunk(0), "prompt_progress": answers.progress(item)}
        for index in self._take(item):
            choice = self._choices[index]
            is_last = choice.completion is not None
            if is_last or choice.num_shown < len(choice.text) or choice.num_told < len(choice.tokens):
                yield self._chunk(index, *(_end(choice) if is_last else ()))

    def _closing(self) -> Iterator[dict[str, Any]]:
        if self._body.max_tokens == 0:
            for index in range(len(self._choices)):
                yield self._chunk(index, "length")
        if self._wants_usage:
            yield {**self._head, "choices": [], "usage": self._usage(), **self._timings()}

    @property
    def _wants_usage(self) -> bool:
        return self._body.stream_options is not None and self._body.stream_options.include_usage

    def _chunk(self, index: int, reason: str | None = None, more: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {**self._head, "choices": [self._show(index, self._choices[index], reason, more)]}
        return {**chunk, "usage": None} if self._wants_usage else chunk

    def _show(
        self, index: int, choice: Choice, reason: str | None = None, more: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        text, logprobs = choice.take_news()
        shown = None if self._speller is None else logprobs
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason, **(more or {})}

    def _completions(self) -> list[Completion]:
        return [choice.completion for choice in self._choices if choice.completion is not None]

    def _usage(self) -> dict[str, Any]:
        completions = self._completions()
        firsts = completions[:: self._plan.num_answers]
        return answers.usage(
            sum(len(ids) for ids in self._plan.ids),
            sum(one.usage.cached_tokens for one in firsts),
            sum(one.usage.completion_tokens for one in completions),
        )

    def _timings(self) -> dict[str, Any]:
        completions = self._completions()
        return {"timings": answers.timings(completions)} if completions and len(self._plan.ids) == 1 else {}


def _end(choice: Choice) -> tuple[str, dict[str, Any]]:
    """Why it ended; where nothing was to be sampled, because that was the length."""
    if choice.completion is None:
        return "length", {}
    more = answers.finish(choice.completion)
    return more.pop("finish_reason"), more
