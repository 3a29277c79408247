"""How a request is prepared: the one place where prompts and conversations become work for the engine.

`InputProcessor.prepare` renders and encodes, checks everything that can be wrong with a request, and builds its
controls (grammar, think budget, loop guard) and the state that turns its tokens into text. It queues nothing, takes no
lock and may be called from any thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sala.engine.cache import Request
from sala.engine.stream import AnswerState
from sala.errors import InputError, NoTokenizer, TemplateError
from sala.protocol import Control, Sampling, Verdict
from sala.text.answer import OPEN, Answer, Detokenizer, Structured
from sala.text.control import GrammarCompiler, ThinkBudget
from sala.text.template import Message, check_messages, check_tools
from sala.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Tools = Sequence[Mapping[str, Any]]

MAX_ANSWERS = 128
CHECK_EVERY = 16  # tokens between two checks for a loop
COUNT_LIMIT = 8  # contexts: texts up to this length are encoded where only their tokens are counted


@dataclass(frozen=True, slots=True)
class Call:
    """A request: a prompt or a conversation, and how to answer it. `key` identifies the answer among many.

    - messages: a conversation in the form `[{"role": "user", "content": "..."}, …]`, instead of `prompt`
    - tools: only with them are tool calls taken out of the answer
    - n: how many answers to give; they share one prefill
    - is_chat: `prompt` is a rendered conversation, so reasoning is taken out of the answer
    - variables: for the chat template
    - boundaries: prompt lengths at which a later prompt may go on differently; worth a snapshot
    - stops_when_shown: stop strings count only in the text that is shown, not in reasoning
    """

    key: Any
    sampling: Sampling
    prompt: Prompt = ()
    messages: Sequence[Message] | None = None
    tools: Tools | None = None
    n: int = 1
    is_chat: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    boundaries: tuple[int, ...] = ()
    stops_when_shown: bool = False


@dataclass(slots=True)
class PromptScoring:
    """A prompt whose own tokens are to be scored, `chunk` tokens between two steps of other requests.

    `reduce` turns the logits [t, V] of tokens `start` … into what is kept of them. It runs on the engine thread.
    """

    index: int
    ids: list[int]
    reduce: Callable[[Any, int], Any]
    chunk: int
    prompt_len: int | None = None  # tokens from here on are computed one by one, as if decoded


@dataclass(slots=True)
class Submission:
    """Prepared work: prompts to score, then answers in groups. The first of a group computes what all of it shares.

    - is_streamed: send events while answers grow; otherwise only their completions
    - wants_progress: send PromptProgress while prompts are computed
    """

    groups: list[list[AnswerState]] = field(default_factory=list)
    scores: list[PromptScoring] = field(default_factory=list)
    is_streamed: bool = True
    wants_progress: bool = False

    @property
    def num_answers(self) -> int:
        return sum(len(group) for group in self.groups)


class LoopGuard:
    """Ends an answer whose last `limit` tokens only repeat themselves, with finish reason `repetition`."""

    allows_drafts = True

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tokens: list[int] = []

    def mask(self) -> bytes | None:
        return None

    def observe(self, token: int) -> Verdict | None:
        tokens = self._tokens
        tokens.append(token)
        if len(tokens) % CHECK_EVERY or len(tokens) < self._limit:
            return None
        del tokens[: -2 * self._limit]
        recent = tokens[-self._limit :]
        for period in range(1, self._limit // 4 + 1):
            if recent[period:] == recent[:-period]:
                return Verdict(finish="repetition")
        return None


class InputProcessor:
    """Prepares requests for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler,
        stop_ids: frozenset[int],
        vocab_size: int,
        max_tokens: int,
        check: Callable[[Sequence[int]], None],
        where: str = "the checkpoint",
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._check = check  # the engine's: refuses a prompt that can never run
        self._where = where

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer(self._where)
        return self._tokenizer

    def submit(self, *calls: Call, is_streamed: bool = True, wants_progress: bool = False) -> Submission:
        """Prepare calls that are to be answered together."""
        groups = [self.prepare(call) for call in calls]
        return Submission(groups, is_streamed=is_streamed, wants_progress=wants_progress)

    def prepare(self, call: Call) -> list[AnswerState]:
        """Return the `n` answers to one call, ready to be submitted. Raises for everything that is wrong with it."""
        if not 1 <= call.n <= MAX_ANSWERS:
            raise InputError("n", f"is {call.n}", f"it must be from 1 to {MAX_ANSWERS}")
        if call.messages is None:
            ids, is_chat = self.encode(call.prompt), call.is_chat
        else:
            ids, is_chat = self.encode_chat(call.messages, tools=call.tools, count_limit=1, **call.variables), True
        self._check(ids)
        self._check_sampling(call.sampling)
        boundaries = (*call.boundaries, self._last_message(call, ids))
        is_open = is_chat and self.tokenizer.decode(ids[-16:], skip_special=False).rstrip().endswith(OPEN)
        answers = []
        for _ in range(call.n):
            controls, forced = self._controls(call.sampling, is_open)
            request = Request(ids, call.sampling, self._stop_ids, "", boundaries, controls, forced)
            form = Structured(call.tools, is_open) if is_chat else None
            answer = None
            if self._tokenizer is not None:
                detokenizer = Detokenizer(self._tokenizer, ids)
                answer = Answer(detokenizer, call.sampling.stop, form, call.stops_when_shown)
            answers.append(AnswerState(request, answer))
        return answers

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, with BOS where the model wants it; ids are only checked."""
        if isinstance(prompt, str):
            return self.check_ids(self.tokenizer.encode(prompt, max_tokens=self._max_tokens))
        if not hasattr(prompt, "__len__"):
            raise InputError("prompt", f"is {prompt!r}", "give text or a list of token ids")
        return self.check_ids(prompt)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        count_limit: int = COUNT_LIMIT,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins.

        A conversation much longer than `count_limit` contexts is refused before all of it is encoded.
        """
        check_messages(messages)
        check_tools(tools)
        limits = {"max_tokens": self._max_tokens, "count_limit": count_limit}
        return self.check_ids(self.tokenizer.encode_chat(messages, tools=tools, **limits, **variables))

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return token ids as ints. Raises InputError for an empty list and for what is not a token id."""
        if not len(ids):
            raise InputError("prompt", "is empty", "give at least one token")
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < self._vocab_size:
                raise InputError("prompt", f"holds {token!r}", f"token ids go from 0 to {self._vocab_size - 1}")
        return [int(token) for token in ids]

    def _check_sampling(self, sampling: Sampling) -> None:
        if self._tokenizer is None and (sampling.stop or sampling.think_budget is not None):
            raise InputError("stop", "needs a tokenizer, and the checkpoint has none", "leave it out")
        for token in sampling.logit_bias:
            if token >= self._vocab_size:
                raise InputError("logit_bias", f"names token {token}", f"ids go to {self._vocab_size - 1}")

    def _controls(self, sampling: Sampling, is_open: bool) -> tuple[tuple[Control, ...], tuple[int, ...]]:
        """Return what steers the answer, and the tokens it must begin with."""
        controls: list[Control] = []
        forced: tuple[int, ...] = ()
        if sampling.think_budget is not None:
            budget = ThinkBudget(self.tokenizer, sampling.think_budget, is_open)
            controls.append(budget)
            forced = budget.opening
        if sampling.loop_guard:
            controls.append(LoopGuard(sampling.loop_guard))
        if sampling.is_constrained:
            controls.append(self._grammars.compile(sampling, self.tokenizer if is_open else None))
        return tuple(controls), forced

    def _last_message(self, call: Call, ids: Sequence[int]) -> int:
        """Return where the last message begins: a conversation is most likely to be continued differently there."""
        messages = call.messages or ()
        if len(messages) < 2:
            return 0
        try:
            before = self.tokenizer.encode_chat(
                messages[:-1], tools=call.tools, add_generation_prompt=False, **call.variables
            )
        except TemplateError:
            return 0  # some templates accept whole conversations only
        return next((at for at, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), len(before))
