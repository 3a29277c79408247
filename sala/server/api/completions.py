"""Completions: text or token ids in, their continuation out. Also scores a text, for evaluations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import Field, Tag, model_validator

from sala.engine.requests import MAX_ANSWERS, Call, InputProcessor, Submission
from sala.engine.stream import Completion, Event, PromptProgress, PromptScores, StreamItem
from sala.protocol import SampledToken
from sala.server.api import answers
from sala.server.api.answers import ENTRY_BYTES, MAX_INT, ChoicesReply, GenerationRequest, TokenSpeller, finite
from sala.server.http.body import FIRST_ONLY, LazyList, discriminate, problem
from sala.text.answer import Detokenizer

SCORE_CHUNK = 256  # tokens scored between two steps of other requests
MAX_PROMPTS = 128
DEFAULT_LENGTH = 16  # as OpenAI's specification has it
MAX_SEQUENCES = 1024  # of one request
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
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_INT, description=f"By default {DEFAULT_LENGTH}. 0 is for scoring a text, with `echo`."
    )
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
        num_prompts = (
            len(self.prompt) if isinstance(self.prompt[:1], list) and not isinstance(self.prompt[0], int) else 1
        )
        if num_prompts * (self.n or 1) > MAX_SEQUENCES:
            raise problem(f"times the number of prompts exceeds {MAX_SEQUENCES}; send fewer at a time", "n")
        if self.max_tokens == 0 and (self.n or 1) > 1:
            raise problem("must be 1 if max_tokens is 0", "n")
        return self


@dataclass
class Continuation:
    """One continuation while it grows. Offsets count from the beginning of the returned text."""

    text: str = ""
    completion: Completion | None = None
    num_shown: int = 0  # characters that have been sent
    sampled: list[SampledToken] = field(default_factory=list)  # tokens that have not been sent
    offsets: list[int] = field(default_factory=list)  # of these
    begins_prompt: bool = False  # whether the first of them does: it has no score

    def add(self, sampled: Sequence[SampledToken], offsets: Sequence[int]) -> None:
        self.sampled += sampled
        self.offsets += offsets

    def take_news(self, speller: TokenSpeller | None) -> tuple[str, dict[str, Any] | None]:
        """Return text and log-probabilities since the last call."""
        text, sampled, offsets = self.text[self.num_shown :], self.sampled, self.offsets
        first = sampled[0] if self.begins_prompt and sampled else None
        self.num_shown, self.sampled, self.offsets, self.begins_prompt = len(self.text), [], [], False
        if speller is None:
            return text, None

        def spell_rivals(one: SampledToken) -> dict[str, float] | None:
            return None if one is first else speller.rivals(one)

        return text, {
            "tokens": LazyList(lambda one: speller.text(one.token), sampled, ENTRY_BYTES),
            "token_logprobs": LazyList(lambda one: None if one is first else finite(one.logprob), sampled, ENTRY_BYTES),
            "top_logprobs": speller.spell(sampled, spell_rivals),
            "text_offset": offsets,
        }

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
        num_tokens = DEFAULT_LENGTH if body.max_tokens is None else max(1, body.max_tokens)  # 0: only check and score
        values = {**answers.read_sampling(body), "max_tokens": num_tokens, "logprobs": body.logprobs}
        sampling = answers.build_sampling(self.llm.default_sampling, self.settings, values)
        attention = answers.allow_attention(answers.read_attention(body), self.settings)
        calls = [Call(None, sampling, prompt=ids, n=self._n, attention=attention) for ids in self._ids]
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
        if self._speller is not None:
            one.add(item.sampled, [len(one.text)] * len(item.sampled))
        one.text += item.delta.text
        one.completion = item.completion or one.completion

    def _take_scores(self, scores: PromptScores) -> None:
        """Begin the answers to a prompt with its tokens: the first, which has no score, and those that have one."""
        if self._speller is None:
            return
        sampled = [SampledToken(self._ids[scores.index][0]), *(each for part in scores.parts for each in part)]
        detokenizer, texts, offsets, length = Detokenizer(self.llm.tokenizer), [], [], 0
        for each in sampled:
            offsets.append(length)
            texts.append(detokenizer.push(each.token))
            length += len(texts[-1])
        text = "".join([*texts, detokenizer.flush()])
        for one in self.answers[scores.index * self._n :][: self._n]:
            one.add(sampled, offsets)
            one.text, one.begins_prompt = text, True

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
            if one.completion is not None or one.sampled or one.num_shown < len(one.text):
                yield self.chunk(self._choice(index, **(one.ending() if one.completion is not None else {})))

    def closing(self) -> Iterator[dict[str, Any]]:
        if self.body.max_tokens == 0:
            for index, one in enumerate(self.answers):
                yield self.chunk(self._choice(index, **one.ending()))
        yield from super().closing()

    def _choice(self, index: int, **ending: Any) -> dict[str, Any]:
        text, logprobs = self.answers[index].take_news(self._speller)
        return {"index": index, "text": text, "logprobs": logprobs, **ending}

    def usage(self) -> dict[str, Any]:
        cached = sum(one.usage.cached_tokens for one in self.completions[:: self._n])
        sampled = sum(one.usage.completion_tokens for one in self.completions)
        return answers.usage(sum(len(ids) for ids in self._ids), cached, sampled)

    def summary(self) -> dict[str, Any]:
        has_timings = self.completions and len(self._ids) == 1
        return super().summary() if has_timings else {"usage": self.usage()}
