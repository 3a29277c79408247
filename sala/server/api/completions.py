"""POST /completions: text or token ids in, their continuation out. Also scores a text, for evaluations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sala.engine.requests import Call, InputProcessor, Submission
from sala.engine.stream import Completion, Event, PromptProgress, PromptScores, StreamItem
from sala.protocol import SampledToken
from sala.server.api import answers
from sala.server.api.answers import Reply, TokenSpeller
from sala.server.api.chat import STREAMED, read_sampling
from sala.server.api.completions_schema import CompletionRequest, TextCompletion
from sala.server.http.body import StrictRoute
from sala.server.http.errors import ALWAYS
from sala.text.answer import Detokenizer

SCORE_CHUNK = 256  # tokens scored between two steps of other requests
router = APIRouter(tags=["completions"], route_class=StrictRoute)


@router.post("/completions", response_model=TextCompletion, responses={**ALWAYS, **STREAMED}, summary="Continue a text")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    return await answers.answer(request, body, CompletionReply)


@dataclass
class Continuation:
    """One continuation while it grows. Offsets count from the beginning of the returned text."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    completion: Completion | None = None
    num_told: int = 0  # tokens that have been sent
    num_shown: int = 0  # characters that have been sent

    @property
    def has_news(self) -> bool:
        is_more = self.num_shown < len(self.text) or self.num_told < len(self.tokens)
        return self.completion is not None or is_more

    def add(self, speller: TokenSpeller, sampled: SampledToken, is_first: bool = False) -> None:
        token = speller.text(sampled.token)
        rivals: dict[str, float] = {}
        for number, logprob in (*sampled.top_logprobs, (sampled.token, answers.finite(sampled.logprob))):
            rivals.setdefault(speller.text(number), answers.finite(logprob))
        self.tokens.append(token)
        self.token_logprobs.append(None if is_first else answers.finite(sampled.logprob))
        self.top_logprobs.append(None if is_first else rivals)
        self.text_offset.append(len(self.text))

    def take_news(self) -> tuple[str, dict[str, Any]]:
        """Return text and log-probabilities since the last call."""
        text, at = self.text[self.num_shown :], self.num_told
        self.num_shown, self.num_told = len(self.text), len(self.tokens)
        logprobs = {
            "tokens": self.tokens[at:],
            "token_logprobs": self.token_logprobs[at:],
            "top_logprobs": self.top_logprobs[at:],
            "text_offset": self.text_offset[at:],
        }
        return text, logprobs

    def ending(self) -> dict[str, Any]:
        """Return why it ended: where nothing was to be sampled, because of the length."""
        return {"finish_reason": "length"} if self.completion is None else answers.finish(self.completion)


class CompletionReply(Reply[CompletionRequest]):
    """The continuations of one request: `n` for every prompt, in order."""

    fields = {"prompt": "prompt", "logit_bias token": "logit_bias"}  # noqa: RUF012

    def prepare(self, inputs: InputProcessor) -> Submission:
        body, llm = self.body, self.model.llm
        prompts: Any = body.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        self._n = body.n or 1
        self._ids = [inputs.encode(prompt) for prompt in prompts]
        self._continuations = [Continuation() for _ in range(len(self._ids) * self._n)]
        self._speller = TokenSpeller(llm) if body.logprobs is not None else None
        is_scored = bool(body.echo) and body.logprobs is not None
        if body.echo and not is_scored:
            self._echo(prompts)
        sampling = answers.build_sampling(
            self.settings,
            **read_sampling(body),
            max_tokens=1 if body.max_tokens == 0 else body.max_tokens,  # with 0 the prompt is only checked and scored
            logprobs=body.logprobs,
        )
        calls = [Call(None, sampling, prompt=ids, n=self._n) for ids in self._ids]
        submission = inputs.submit(*calls, wants_progress=bool(body.return_progress))
        if body.max_tokens == 0:
            submission.groups = []
        if is_scored:
            submission.scores = [
                llm.token_scoring(ids, body.logprobs or 0, SCORE_CHUNK, index) for index, ids in enumerate(self._ids)
            ]
        return submission

    def _echo(self, prompts: Sequence[str | list[int]]) -> None:
        for index, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else self.model.llm.tokenizer.decode(prompt)
            for one in self._of_prompt(index):
                one.text = text

    def _of_prompt(self, index: int) -> list[Continuation]:
        return self._continuations[index * self._n : (index + 1) * self._n]

    def take(self, item: StreamItem) -> None:
        if isinstance(item, PromptScores):
            self._take_scores(item)
        if not isinstance(item, Event):
            return
        one = self._continuations[item.index]
        for sampled in item.sampled:
            if self._speller is not None:
                one.add(self._speller, sampled)
        one.text += item.delta.text
        one.completion = item.completion or one.completion

    def _take_scores(self, scores: PromptScores) -> None:
        if self._speller is None:
            return
        ids = self._ids[scores.index]
        for one in self._of_prompt(scores.index):
            detokenizer = Detokenizer(self.model.llm.tokenizer)
            for sampled in (SampledToken(ids[0]), *(each for part in scores.parts for each in part)):
                one.add(self._speller, sampled, is_first=not one.tokens)
                one.text += detokenizer.push(sampled.token)
            one.text += detokenizer.flush()

    def whole(self) -> dict[str, Any]:
        return {
            **answers.head("text_completion", "cmpl", self.model.id),
            "choices": [self._choice(index, **one.ending()) for index, one in enumerate(self._continuations)],
            "usage": self._usage(),
            **self._timings(),
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        self._head = answers.head("text_completion", "cmpl", self.model.id)
        for index, one in enumerate(self._continuations):
            if one.text:  # echoed
                yield self._chunk(index)

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        if isinstance(item, PromptProgress):
            yield {**self._chunk(0), "prompt_progress": answers.prompt_progress(item)}
            return
        count = self._n if isinstance(item, PromptScores) else 1
        for index in range(item.index * count, (item.index + 1) * count):
            one = self._continuations[index]
            if one.has_news:
                yield self._chunk(index, **(one.ending() if one.completion is not None else {}))

    def closing(self) -> Iterator[dict[str, Any]]:
        if self.body.max_tokens == 0:
            for index, one in enumerate(self._continuations):
                yield self._chunk(index, **one.ending())
        if self._wants_usage:
            yield {**self._head, "choices": [], "usage": self._usage(), **self._timings()}

    @property
    def _wants_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def _chunk(self, index: int, **ending: Any) -> dict[str, Any]:
        chunk = {**self._head, "choices": [self._choice(index, **ending)]}
        return {**chunk, "usage": None} if self._wants_usage else chunk

    def _choice(self, index: int, **ending: Any) -> dict[str, Any]:
        text, logprobs = self._continuations[index].take_news()
        shown = None if self._speller is None else logprobs
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": None, **ending}

    def _completions(self) -> list[Completion]:
        return [one.completion for one in self._continuations if one.completion is not None]

    def _usage(self) -> dict[str, Any]:
        completions = self._completions()
        return answers.usage(
            sum(len(ids) for ids in self._ids),
            sum(one.usage.cached_tokens for one in completions[:: self._n]),
            sum(one.usage.completion_tokens for one in completions),
        )

    def _timings(self) -> dict[str, Any]:
        completions = self._completions()
        return {"timings": answers.timings(completions)} if completions and len(self._ids) == 1 else {}
