"""Questions about documents: they are read once, by parts if they are longer than the context."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from sala.documents.model import Document, LeftOut, Section
from sala.documents.packing import EncodedDocument, PackedDocuments, encode_documents, pack, split
from sala.documents.reader import OnFile, read_documents
from sala.engine.requests import Attachment, Call
from sala.engine.stream import Completion, OnProgress
from sala.errors import InputError
from sala.protocol import Sampling
from sala.text.sources import MAX_PASSAGES, Passage, PromptText, Quote, Sources
from sala.text.tokenizer import Tokenizer

MAX_SUMMARY = 512  # tokens
NOTHING = "nothing"  # a summary of a part that does not help
SUMMARIZE = """\
The documents above are part {number} of {total}. Summarize what they say that helps to answer the question below. \
Keep names, numbers and the names of files. If they say nothing about it, write: nothing.

Question: {question}"""
FROM_SUMMARIES = """\
The documents above are summaries of all parts of a longer text. Answer from them.

Question: {question}"""
Paths = Sequence[str | Path] | str | Path
OnPart = Callable[[int, int, str], None]  # (number of the part, how many there are, its summary)


class AnyLLM(Protocol):
    """What documents need of the model: an LLM, or an AsyncLLM, whose answers are coroutines."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def ctx(self) -> int: ...

    def merge_sampling(self, sampling: Sampling | None, settings: dict[str, Any]) -> Sampling: ...

    def answer(self, call: Call, on_progress: OnProgress | None = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of one part: the name under which the model reads it, and the answer that it is."""

    name: str
    completion: Completion

    @property
    def text(self) -> str:
        return self.completion.text.strip() or NOTHING


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question that is ready to be answered: the request, the documents in it, the summaries that it rests on.

    The tokens of `packed` stand in the prompt from `offset` on. `rounds` are the summaries of the documents, then
    summaries of these, until they fit; the answer comes from the last.
    """

    call: Call
    packed: PackedDocuments
    offset: int
    rounds: list[list[Summary]] = field(default_factory=list)

    @property
    def summaries(self) -> list[str]:
        return [one.text for one in self.rounds[-1]] if self.rounds else []

    def traced(self, completion: Completion, entries: Sequence[EncodedDocument], tokenizer: Tokenizer) -> Completion:
        """Return an answer from summaries with sources in the documents `entries` instead of in the summaries.

        The weight of a passage of a summary goes to the passages from which that summary was written.
        """
        if completion.sources is None or not self.rounds:
            return completion
        passages = completion.sources.passages
        for summaries in reversed(self.rounds):
            passages = _followed(passages, {one.name: one.completion.sources for one in summaries})
        quotes = _looked_up(completion.sources.quotes, entries, tokenizer)
        return replace(completion, sources=Sources(passages, quotes))


def _followed(passages: Sequence[Passage], sources: dict[str, Sources | None]) -> list[Passage]:
    """Map passages of summaries back to the passages that were summarised, heaviest first."""
    found: dict[tuple[Any, ...], Passage] = {}
    for passage in passages:
        known = sources.get(passage.file or "")
        origins = known.passages if known is not None and known.passages else [replace(passage, weight=1.0)]
        total = sum(one.weight for one in origins)
        for one in origins:
            place = one.file, one.place, one.tokens
            earlier = found[place].weight if place in found else 0.0
            found[place] = replace(one, weight=earlier + passage.weight * one.weight / total)
    return sorted(found.values(), key=lambda passage: -passage.weight)[:MAX_PASSAGES]


def _looked_up(quotes: Sequence[Quote], entries: Sequence[EncodedDocument], tokenizer: Tokenizer) -> list[Quote]:
    """Return quotes with their places in the documents; that a summary contains one says nothing."""
    places: dict[str, dict[str, Any]] = {}
    for packed in (pack([entry]) for entry in entries if len(places) < len({quote.text for quote in quotes})):
        message = {"role": "user", "content": ""}
        text = PromptText(tokenizer, packed.ids, [message], range(len(packed)), packed.locate)
        for quote in quotes:
            where = None if quote.text in places else text.find(quote.text)
            places |= {} if where is None else {quote.text: where}
    return [
        Quote(quote.text, quote.answer, True, **places[quote.text])
        if quote.text in places
        else quote
        if quote.found and quote.file is None  # in a message
        else Quote(quote.text, quote.answer, False)
        for quote in quotes
    ]


@dataclass(frozen=True, slots=True)
class DocumentAnswer:
    """An answer from documents.

    - packed: what the model has read; `packed.locate(token)` says where a token of it comes from
    - offset: where its tokens begin in the prompt
    - summaries: of the parts, where the documents are longer than the context; the answer then comes from them
    """

    completion: Completion
    packed: PackedDocuments
    offset: int
    left_out: list[LeftOut]
    summaries: list[str]

    @property
    def text(self) -> str:
        return self.completion.text


@dataclass(slots=True)
class Documents:
    """Documents as tokens of one model, ready for questions. Raises InputError if there are none."""

    llm: AnyLLM
    entries: list[EncodedDocument]
    left_out: list[LeftOut] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.entries:
            reasons = "; ".join(map(str, self.left_out[:3]))
            raise InputError("documents", f"hold no text ({reasons or 'no files'})", "name other files")

    @classmethod
    def read(cls, llm: AnyLLM, paths: Paths, on_file: OnFile | None = None) -> Self:
        found = read_documents([paths] if isinstance(paths, str | Path) else paths, on_file)
        return cls(llm, encode_documents(found.documents, llm.tokenizer), found.left_out)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def part_size(self) -> int:
        """Tokens of documents that are read at a time, whatever the question: so parts stay cached."""
        return part_size(self.llm.ctx)

    @property
    def attachment(self) -> Attachment:
        """The documents for a conversation; raise InputError if they are longer than the context."""
        if self.num_tokens > self.part_size:
            message = f"have {self.num_tokens:,} tokens, and {self.part_size:,} of the context are for them"
            raise InputError("documents", message, "raise --ctx, name fewer files, or use sala ask, which reads parts")
        return _attachment(pack(self.entries))

    def prepare(
        self,
        question: str,
        sampling: Sampling,
        system: str | None = None,
        on_part: OnPart | None = None,
        on_progress: OnProgress | None = None,
    ) -> PreparedQuestion:
        """Return a question to be answered; longer documents are read and summarised part by part meanwhile."""
        steps = self._steps(question, sampling, system, on_part)
        try:
            call = next(steps)
            while True:
                call = steps.send(self.llm.answer(call, on_progress))
        except StopIteration as done:
            found: PreparedQuestion = done.value
            return found

    def _steps(
        self, question: str, sampling: Sampling, system: str | None, on_part: OnPart | None
    ) -> Generator[Call, Completion, PreparedQuestion]:
        """Yield requests for summaries, as long as the documents are too long, and take their answers."""
        opening = [{"role": "system", "content": system}] if system else []

        def call(packed: PackedDocuments, text: str, how: Sampling) -> Call:
            messages = [*opening, {"role": "user", "content": text}]
            return Call(None, how, messages=messages, attachment=_attachment(packed))

        entries = self.entries
        rounds: list[list[Summary]] = []
        while len(parts := split(entries, self.part_size)) > 1:
            summaries = []
            for number, part in enumerate(parts, 1):
                text = SUMMARIZE.format(number=number, total=len(parts), question=question)
                how = replace(sampling, max_tokens=self._summary_size, min_tokens=0, json_schema=None, regex=None)
                completion = yield call(pack(part), text, replace(how, grammar=None))
                summaries.append(Summary(_name(number, part), completion))
                if on_part is not None:
                    on_part(number, len(parts), summaries[-1].text)
            size = sum(entry.num_tokens for entry in entries)
            rounds.append(summaries)
            found = [Document(one.name, [Section("", one.text)]) for one in summaries]
            entries = encode_documents(found, self.llm.tokenizer)
            if sum(entry.num_tokens for entry in entries) >= size:
                raise InputError("ctx", "is too small: summaries of parts are as long as the parts", "raise it: --ctx")
        packed = pack(parts[0])
        text = FROM_SUMMARIES.format(question=question) if rounds else question
        before, _ = self.llm.tokenizer.encode_around([*opening, {"role": "user", "content": ""}])
        return PreparedQuestion(call(packed, text, sampling), packed, len(before), rounds)

    def ask(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        system: str | None = None,
        on_part: OnPart | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> DocumentAnswer:
        """Answer a question. The next one reuses the documents as long as the cache holds them."""
        asked = self.prepare(question, self.llm.merge_sampling(sampling, settings), system, on_part, on_progress)
        return self._answer(asked, self.llm.answer(asked.call, on_progress))

    def _answer(self, asked: PreparedQuestion, completion: Completion) -> DocumentAnswer:
        completion = self.traced(asked, completion)
        return DocumentAnswer(completion, asked.packed, asked.offset, self.left_out, asked.summaries)

    def traced(self, asked: PreparedQuestion, completion: Completion) -> Completion:
        """Return an answer with sources in the documents, also where it comes from summaries of them."""
        return asked.traced(completion, self.entries, self.llm.tokenizer)

    @property
    def _summary_size(self) -> int:
        return min(MAX_SUMMARY, max(1, self.llm.ctx // 16))


class AsyncDocuments(Documents):
    """Documents for asyncio."""

    async def ask(  # type: ignore[override]
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        system: str | None = None,
        on_part: OnPart | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> DocumentAnswer:
        """Answer a question, like `Documents.ask`."""
        steps = self._steps(question, self.llm.merge_sampling(sampling, settings), system, on_part)
        try:
            call = next(steps)
            while True:
                call = steps.send(await self.llm.answer(call, on_progress))
        except StopIteration as done:
            asked: PreparedQuestion = done.value
        return self._answer(asked, await self.llm.answer(asked.call, on_progress))


def _name(number: int, part: Sequence[EncodedDocument]) -> str:
    names = part[0].name if len(part) == 1 else f"{part[0].name} to {part[-1].name}"
    return f"summary of part {number}: {names}"


def part_size(ctx: int) -> int:
    """Return how many tokens of documents a context takes besides a question and its answer."""
    return ctx - min(ctx // 4, 8192)


def _attachment(packed: PackedDocuments) -> Attachment:
    return Attachment(packed.ids, packed.kept, packed.locate)
