"""How a request is prepared: the one place where prompts and conversations become work for the engine.

`InputProcessor.prepare` renders and encodes, checks everything that can be wrong with a request, and builds its
controls (grammar, think budget, loop guard) and the state that turns its tokens into text. It queues nothing, takes no
lock and may be called from any thread.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sala.engine.scheduler import TOKEN_BYTES, Request, as_bytes
from sala.engine.stream import AnswerState
from sala.errors import InputError, NoTokenizer, TemplateError
from sala.options import Attention
from sala.protocol import Control, Sampling, Verdict
from sala.text.answer import CLOSE, OPEN, Answer, ChatSplitter, Detokenizer
from sala.text.control import GrammarCompiler, ThinkBudget
from sala.text.frames import CLOSING
from sala.text.sources import Locate, PromptText
from sala.text.tokenizer import Message, Tokenizer, check_messages, check_tools

Prompt = str | Sequence[int]
Tools = Sequence[Mapping[str, Any]]

MAX_ANSWERS = 128
CHECK_EVERY = 16  # tokens between two checks for a loop
NUM_REPEATS = 3  # repetitions of a longer text that count as a loop
NEAR_END = 1024  # tokens at the end of a prompt that may not belong to the last message
MARGIN = 2  # tokens before a question or the next document whose tokenization may change with these
MAX_ENDS = 6  # of documents, after which a prefix is kept
COUNT_LIMIT = 8  # contexts: texts up to this length are encoded where only their tokens are counted


@dataclass(frozen=True, slots=True)
class Attachment:
    """Tokens that the first message of the user begins with: documents.

    `kept` are numbers of them after which the prefix is worth keeping, on disk too, instead of the whole prompt.
    `locate` says where one of them comes from, for sources.
    """

    ids: Sequence[int]
    kept: tuple[int, ...] = ()
    locate: Locate | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A request: a prompt or a conversation, and how to answer it. `key` identifies the answer among many.

    - messages: a conversation in the form `[{"role": "user", "content": "..."}, …]`, instead of `prompt`
    - tools: only with them are tool calls taken out of the answer
    - n: how many answers to give; they share one prefill
    - continue_final: the last message is an answer that has been begun; the new one continues it
    - is_chat: `prompt` is a rendered conversation, so reasoning is taken out of the answer
    - variables: for the chat template
    - boundaries: prompt lengths at which a later prompt may go on differently; worth a snapshot
    - adapter: the name of the adapter that answers; None: the model alone
    - stops_when_shown: stop strings count only in the text that is shown, not in reasoning
    - ends_on_repeat: the answer ends where a tool call is repeated
    - attachment: documents that the conversation is about
    - attention: how the sparse layers attend; None: as the options of the model say
    - question: how the last message ends; what stands before it is worth keeping, on disk too
    - controls: of a single answer, besides those that `sampling` asks for
    """

    key: Any
    sampling: Sampling
    prompt: Prompt = ()
    messages: Sequence[Message] | None = None
    tools: Tools | None = None
    n: int = 1
    continue_final: bool = False
    is_chat: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    boundaries: tuple[int, ...] = ()
    stops_when_shown: bool = False
    adapter: str | None = None
    ends_on_repeat: bool = False
    attachment: Attachment | None = None
    attention: Attention | None = None
    question: str = ""
    controls: tuple[Control, ...] = ()


@dataclass(frozen=True, slots=True)
class Beginning:
    """How an answer begins before anything is sampled: by the prompt, or by a last message that is continued.

    - is_open: inside reasoning
    - has_begun: with text, in the reasoning if it is open
    - text: what of the answer itself is there
    """

    is_open: bool = False
    has_begun: bool = False
    text: str = ""


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
    adapter: str = ""  # fingerprint
    owner: str = ""  # the client, which takes turns with others


class TokenLimit(Protocol):
    """A limit on the tokens of a client over time."""

    def reserve(self, num_prompt: int, num_answers: int) -> Callable[[int], None]:
        """Count the tokens of prompts, and the most that the answers can have; raise if that exceeds the limit.

        Returns what to call when the request has ended, with the number of tokens that it took.
        """


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends a request: the owner of shares of batch and cache, and what it may share cached prefixes with.

    It may wait for `max_sequences` answers at a time; 0: for any number.
    """

    owner: str = ""
    salt: str = ""
    max_sequences: int = 0
    token_limit: TokenLimit | None = None


@dataclass(slots=True)
class Submission:
    """Prepared work: prompts to score, then answers in groups. The first of a group computes what all of it shares.

    - is_streamed: send events while answers grow; otherwise only their completions
    - wants_progress: send PromptProgress while prompts are computed
    - settle: called at the end of the request, with the number of tokens that it took
    """

    groups: list[list[AnswerState]] = field(default_factory=list)
    scores: list[PromptScoring] = field(default_factory=list)
    is_streamed: bool = True
    wants_progress: bool = False
    settle: Callable[[int], None] | None = None

    @property
    def num_answers(self) -> int:
        return sum(len(group) for group in self.groups)

    def count_tokens(self, ctx: int) -> tuple[int, int]:
        """Return the tokens of all prompts, and the most that the answers to them can have.

        A prompt counts once, also if it gets several answers, or is scored and continued.
        """
        prompts = [len(group[0].request.prompt) for group in self.groups]
        answers = (
            min(state.request.sampling.max_tokens, ctx + 1 - length)
            for group, length in zip(self.groups, prompts, strict=True)
            for state in group
        )
        return sum(prompts) or sum(len(scoring.ids) for scoring in self.scores), sum(answers)

    def limit_tokens(self, limit: TokenLimit | None, ctx: int) -> None:
        """Count the tokens of this request against a limit, from now to its end."""
        self.settle = None if limit is None else limit.reserve(*self.count_tokens(ctx))

    def limit_answers(self, num_tokens: int) -> None:
        """Cut every answer at a number of tokens."""
        for request in (state.request for group in self.groups for state in group):
            sampling = request.sampling
            if sampling.max_tokens > num_tokens:
                least = min(sampling.min_tokens, num_tokens)
                request.sampling = replace(sampling, max_tokens=num_tokens, min_tokens=least)

    def belong_to(self, client: Client) -> None:
        for state in (state for group in self.groups for state in group):
            state.request.owner, state.request.salt = client.owner, client.salt + state.request.salt
        for scoring in self.scores:
            scoring.owner = client.owner

    def use_adapter(self, fingerprint: str) -> None:
        """Let an adapter compute everything. What it computes is of no use to requests of others."""
        for request in (state.request for group in self.groups for state in group):
            request.adapter, request.salt = fingerprint, fingerprint + request.salt
        for scoring in self.scores:
            scoring.adapter = fingerprint


def submit_tokens(prompts: Iterable[Sequence[int]], sampling: Sampling) -> Submission:
    """Return answers to prompts that are taken as they are, for measurements: without checks, and without text."""
    return Submission([[AnswerState(Request(ids, sampling))] for ids in prompts], is_streamed=False)


class LoopGuard:
    """Ends an answer that only repeats itself, with finish reason `repetition`.

    It does so where the last `limit` tokens repeat with a period of at most a third of `limit`, or where a longer
    text, of up to `limit` tokens, occurs three times in a row.
    """

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
        del tokens[: -NUM_REPEATS * self._limit - CHECK_EVERY]
        last = tokens[-2:]
        for period in range(1, min(self._limit, len(tokens) // NUM_REPEATS) + 1):
            repeated = max(self._limit, NUM_REPEATS * period)
            is_candidate = tokens[-2 - period : len(tokens) - period] == last
            if is_candidate and tokens[period - repeated :] == tokens[-repeated:-period]:
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
        check: Callable[[Sequence[int], Attention | None], None],
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

    def jobs_waiting(self) -> dict[str, int]:
        """Return how many tasks wait for the processes that render templates and compile grammars."""
        templates = 0 if self._tokenizer is None else self._tokenizer.num_waiting
        return {"templates": templates, "grammars": self._grammars.num_waiting}

    def close(self) -> None:
        """Stop the processes that render templates and compile grammars."""
        self._grammars.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

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
            more: dict[str, Any] = {
                "tools": call.tools,
                "count_limit": 1,
                "continue_final": call.continue_final,
                **call.variables,
            }
            if call.attachment is not None:
                more["attached"] = call.attachment.ids
            ids, is_chat = self.encode_chat(call.messages, **more), True
        self._check(ids, call.attention)
        self._check_sampling(call.sampling)
        attached = _attached(call.attachment, ids)
        prompt = self._prompt_text(call, ids, attached) if call.sampling.return_sources else None
        start, lengths = (0, ()) if attached is None or not call.attachment else (attached.start, call.attachment.kept)
        kept = tuple(start + length for length in lengths) or self._before(call, ids, prompt)
        boundaries = (*call.boundaries, *kept, self._last_message(call, ids))
        beginning = self._beginning(call, ids, is_chat)
        answers = []
        for _ in range(call.n):
            controls, forced = self._controls(call.sampling, beginning)
            request = Request(
                ids, call.sampling, self._stop_ids, "", boundaries, (*call.controls, *controls), forced, kept=kept,
                attention=call.attention,
            )  # fmt: skip
            form = None
            if is_chat:
                form = ChatSplitter(call.tools, beginning.is_open, beginning.has_begun, call.ends_on_repeat)
            answer = None
            if self._tokenizer is not None:
                detokenizer = Detokenizer(self._tokenizer, ids)
                answer = Answer(detokenizer, call.sampling.stop, form, call.stops_when_shown)
            answers.append(AnswerState(request, answer, prompt))
        return answers

    def _prompt_text(self, call: Call, ids: Sequence[int], attached: range | None) -> PromptText | None:
        if self._tokenizer is None:
            return None
        locate = None if call.attachment is None else call.attachment.locate
        return PromptText(self._tokenizer, ids, call.messages or (), attached, locate or (lambda token: None))

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
        continue_final: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins or, with `continue_final`, goes on.

        A conversation much longer than `count_limit` contexts is refused before all of it is encoded.
        """
        check_messages(messages)
        check_tools(tools)
        if continue_final and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
            raise InputError(
                "messages", "do not end with an answer that can be continued", "end them with one without calls"
            )
        more: dict[str, Any] = {"max_tokens": self._max_tokens, "count_limit": count_limit}
        more["continue_final"] = continue_final
        return self.check_ids(self.tokenizer.encode_chat(messages, tools=tools, **more, **variables))

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
                remedy = f"use ids below {self._vocab_size}, the size of the vocabulary"
                raise InputError("logit_bias", f"names token {token}", remedy)

    def _beginning(self, call: Call, ids: Sequence[int], is_chat: bool) -> Beginning:
        if not call.continue_final or not call.messages:
            tail = self.tokenizer.decode(ids[-16:], skip_special=False) if is_chat else ""
            return Beginning(is_open=tail.rstrip().endswith(OPEN))
        last = call.messages[-1]
        text = last.get("content") or ""
        reasoning, closing, answer = text.partition(CLOSE)
        if not reasoning.lstrip().startswith(OPEN):
            return Beginning(False, bool(text.strip() or last.get("reasoning_content")), text)
        if closing:
            return Beginning(False, True, answer.lstrip())
        return Beginning(True, bool(reasoning.lstrip().removeprefix(OPEN).strip()))

    def _controls(self, sampling: Sampling, beginning: Beginning) -> tuple[tuple[Control, ...], tuple[int, ...]]:
        """Return what steers the answer, and the tokens it must begin with."""
        controls: list[Control] = []
        forced: tuple[int, ...] = ()
        is_open = beginning.is_open
        if sampling.think_budget is not None and (is_open or not beginning.has_begun):
            budget = ThinkBudget(self.tokenizer, sampling.think_budget, is_open)
            controls.append(budget)
            forced = budget.opening
        if sampling.loop_guard:
            controls.append(LoopGuard(sampling.loop_guard))
        if sampling.is_constrained:
            controls.append(self._grammars.compile(sampling, self.tokenizer if is_open else None, beginning.text))
        return tuple(controls), forced

    def _before(self, call: Call, ids: Sequence[int], prompt: PromptText | None) -> tuple[int, ...]:
        """Return after how many tokens documents end and the question after them begins; empty without a question."""
        length = self._length_before(call.question, ids)
        if not length:
            return ()
        ends: list[int] = []
        if any(CLOSING.strip() in (message.get("content") or "") for message in call.messages or ()):
            prompt = prompt or PromptText(self.tokenizer, ids, call.messages or ())
            ends = [end - MARGIN for end in prompt.document_ends(MAX_ENDS) if MARGIN < end < length]
        return tuple(sorted({*ends, length}))

    def _length_before(self, question: str, ids: Sequence[int]) -> int:
        """Return after how many tokens a question begins, or 0 if it is not found near the end of a prompt.

        It is a few tokens less: the last ones may be others before another question.
        """
        question = question.strip()
        size, most = 64, min(len(ids), len(question) + NEAR_END)
        while question:
            text = self._tail(ids, size)
            at = text.rfind(question)
            if at > 0:
                counts = range(1, size + 1)
                found = bisect_left(counts, len(text) - at, key=lambda count: len(self._tail(ids, count)))
                return max(0, len(ids) - counts[found] - MARGIN)
            if size >= most:
                break
            size *= 2
        return 0

    def _tail(self, ids: Sequence[int], count: int) -> str:
        return self.tokenizer.decode(ids[-count:], skip_special=False)

    def _last_message(self, call: Call, ids: Sequence[int]) -> int:
        """Return where the last message begins: a conversation is most likely to be continued differently there."""
        messages = call.messages or ()
        if len(messages) < 2:
            return 0
        attached = () if call.attachment is None else call.attachment.ids
        more: dict[str, Any] = {"attached": attached, "add_generation_prompt": False, **call.variables}
        try:
            before = self.tokenizer.encode_chat(messages[:-1], tools=call.tools, **more)
        except (TemplateError, InputError):
            return 0  # some templates accept whole conversations only; documents need a message of the user
        return next((at for at, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), len(before))


def _attached(attachment: Attachment | None, ids: Sequence[int]) -> range | None:
    """Return the tokens of a prompt that are its attachment; None if there is none."""
    if attachment is None or not attachment.ids:
        return None
    whole, part = as_bytes(ids), as_bytes(attachment.ids)
    at = whole.find(part)
    while at % TOKEN_BYTES:  # a chance match that begins inside a token
        at = whole.find(part, at + 1)
        assert at >= 0
    start = at // TOKEN_BYTES
    return range(start, start + len(attachment.ids))
