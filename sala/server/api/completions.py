"""Completions: text or token ids in, their continuation out. Also scores a text, for evaluations."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import Field, Tag, model_validator

from sala.engine.requests import Call, InputProcessor, Submission
from sala.engine.stream import Completion, Event, PromptProgress, PromptScores, StreamItem
from sala.protocol import SampledToken
from sala.server.api import answers
from sala.server.api.answers import MAX_ANSWERS, MAX_INT, ChoicesReply, GenerationRequest, TokenSpeller
from sala.server.http.body import FIRST_ONLY, discriminate, problem
from sala.text.answer import Detokenizer

SCORE_CHUNK = 256  # tokens scored between two steps of other requests
MAX_PROMPTS = 128
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TokenId = Annotated[int, Ge(0), Le(MAX_INT)]
TokenIds = Annotated[list[TokenId], MinLen(1), FIRST_ONLY]


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return {str: "~texts", int: "~tokens", list: "~lists"}.get(type(first))


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], MinLen(1), MaxLen(MAX_PROMPTS), FIRST_ONLY, Tag("~texts")]
    | Annotated[TokenIds, Tag("~tokens")]
    | Annotated[list[TokenIds], MinLen(1), MaxLen(MAX_PROMPTS), FIRST_ONLY, Tag("~lists")],
    discriminate(_prompt_kind, "a string, a list of token ids, or a list of either"),
]


class CompletionRequest(GenerationRequest):
    """One or several texts to continue. The ignored and unsupported fields are those of chats."""

    prompt: Prompt = Field(description="Text, token ids, or a list of either.", json_schema_extra={"example": "Hello"})
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT, description="0 is for scoring a text, with `echo`.")
    echo: bool | None = Field(None, description="Return the prompt too, with its log-probabilities if requested.")
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="Must be equal to `n`.")
    suffix: None = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise problem("must be equal to n", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise problem("can be 0 only with echo", "max_tokens")
        if self.max_tokens == 0 and (self.n or 1) > 1:
            raise problem("must be 1 if max_tokens is 0", "n")
        return self


@dataclass
class Continuation:
    """One continuation while it grows. Offsets count from the beginning of the returned text."""

    text: str = ""
    completion: Completion | None = None
    num_shown: int = 0  # characters that have been sent
    tokens: list[tuple[Any, ...]] = field(default_factory=list)  # that have not been sent, in the order of LISTS

    def add(self, speller: TokenSpeller, sampled: SampledToken, is_first: bool = False) -> None:
        rivals: dict[str, float] = {}
        for number, logprob in (*sampled.top_logprobs, (sampled.token, answers.finite(sampled.logprob))):
            rivals.setdefault(speller.text(number), answers.finite(logprob))
        scores = (None, None) if is_first else (answers.finite(sampled.logprob), rivals)
        self.tokens.append((speller.text(sampled.token), *scores, len(self.text)))

    def take_news(self) -> tuple[str, dict[str, Any]]:
        """Return text and log-probabilities since the last call."""
        text, tokens = self.text[self.num_shown :], self.tokens
        self.num_shown, self.tokens = len(self.text), []
        return text, {name: [token[at] for token in tokens] for at, name in enumerate(LISTS)}

    def ending(self) -> dict[str, Any]:
        """Return why it ended: where nothing was to be sampled, because of the length."""
        return {"finish_reason": "length"} if self.completion is None else answers.finish(self.completion)


class CompletionReply(ChoicesReply[CompletionRequest]):
    """The continuations of one request: `n` for every prompt, in order."""

    kind, prefix = "text_completion", "cmpl"
    fields = {"prompt": "prompt", "logit_bias token": "logit_bias"}  # noqa: RUF012

    def prepare(self, inputs: InputProcessor) -> Submission:
        body = self.body
        prompts: Any = body.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        self._n = body.n or 1
        self._ids = [inputs.encode(prompt) for prompt in prompts]
        self.answers = [Continuation() for _ in range(len(self._ids) * self._n)]
        self._speller = TokenSpeller(self.llm) if body.logprobs is not None else None
        if body.echo and self._speller is None:
            texts = [one if isinstance(one, str) else self.llm.tokenizer.decode(one) for one in prompts]
            for index, one in enumerate(self.answers):
                one.text = texts[index // self._n]
        values = {**answers.read_sampling(body), "max_tokens": body.max_tokens, "logprobs": body.logprobs}
        if body.max_tokens == 0:
            values["max_tokens"] = 1  # the prompt is only checked and scored
        sampling = answers.build_sampling(self.settings, values)
        calls = [Call(None, sampling, prompt=ids, n=self._n) for ids in self._ids]
        submission = inputs.submit(*calls, wants_progress=bool(body.return_progress))
        if body.max_tokens == 0:
            submission.groups = []
        if body.echo and body.logprobs is not None:
            scored = enumerate(self._ids)
            submission.scores = [self.llm.token_scoring(ids, body.logprobs, SCORE_CHUNK, at) for at, ids in scored]
        return submission

    def take(self, item: StreamItem) -> None:
        if isinstance(item, PromptScores):
            self._take_scores(item)
        if not isinstance(item, Event):
            return
        one = self.answers[item.index]
        for sampled in item.sampled:
            if self._speller is not None:
                one.add(self._speller, sampled)
        one.text += item.delta.text
        one.completion = item.completion or one.completion

    def _take_scores(self, scores: PromptScores) -> None:
        if self._speller is None:
            return
        ids = self._ids[scores.index]
        for one in self.answers[scores.index * self._n :][: self._n]:
            detokenizer = Detokenizer(self.llm.tokenizer)
            for sampled in (SampledToken(ids[0]), *(each for part in scores.parts for each in part)):
                one.add(self._speller, sampled, is_first=not one.tokens)
                one.text += detokenizer.push(sampled.token)
            one.text += detokenizer.flush()

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(index, **one.ending()) for index, one in enumerate(self.answers)]
        return {**self.head, "choices": choices, **self.summary()}

    def opening(self) -> Iterator[dict[str, Any]]:
        for index, one in enumerate(self.answers):
            if one.text:  # echoed
                yield self.chunk(self._choice(index))

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        if isinstance(item, PromptProgress):
            yield self.chunk(self._choice(0), prompt_progress=answers.prompt_progress(item))
            return
        count = self._n if isinstance(item, PromptScores) else 1
        for index in range(item.index * count, (item.index + 1) * count):
            one = self.answers[index]
            if one.completion is not None or one.tokens or one.num_shown < len(one.text):
                yield self.chunk(self._choice(index, **(one.ending() if one.completion is not None else {})))

    def closing(self) -> Iterator[dict[str, Any]]:
        if self.body.max_tokens == 0:
            for index, one in enumerate(self.answers):
                yield self.chunk(self._choice(index, **one.ending()))
        yield from super().closing()

    def _choice(self, index: int, **ending: Any) -> dict[str, Any]:
        text, logprobs = self.answers[index].take_news()
        return {"index": index, "text": text, "logprobs": None if self._speller is None else logprobs, **ending}

    def usage(self) -> dict[str, Any]:
        cached = sum(one.usage.cached_tokens for one in self.completions[:: self._n])
        sampled = sum(one.usage.completion_tokens for one in self.completions)
        return answers.usage(sum(len(ids) for ids in self._ids), cached, sampled)

    def summary(self) -> dict[str, Any]:
        has_timings = self.completions and len(self._ids) == 1
        return super().summary() if has_timings else {"usage": self.usage()}
