"""The tokenizer of a checkpoint, and its protection against special tokens in user text.

A checkpoint marks turns with special tokens such as `<|im_end|>`. Text that merely *spells* one must stay text, or a
user could end their turn and speak as the system. So text is encoded by a copy of the tokenizer in which every special
token has a secret spelling, and the chat template is rendered with the same secret spellings: what the template writes
becomes special tokens, what users write cannot.

A template is a program from an untrusted source. It runs in Jinja's immutable sandbox, which stops it from reaching
Python, and in a separate process, which can be killed: the sandbox bounds neither time nor memory, and a thread cannot
be stopped.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from sala.config import own_file, read_json_object, read_small_file
from sala.errors import CheckpointError, ContextTooLong, InputError, NoTokenizer, TemplateError, TokenizerFailed
from sala.text.tool_prompt import write_tools
from sala.text.workers import SandboxProcess, WorkerKilled

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20
PIECE = 1 << 16  # characters counted at a time
CHARS_PER_TOKEN = 4  # about; a text with more characters per allowed token is counted before it is encoded
CHARS_UNRENDERED = 32  # per allowed token; a conversation with more of them is counted before it is rendered
RENDER_S = 2.0
RENDER_S_PER_MIB = 0.1  # more time for long documents
MAX_RENDERED_BYTES = 128 << 20


Message = Mapping[str, Any]


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InputError for a conversation that is not a list of messages with roles and text."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        remedy = 'e.g. [{"role": "user", "content": "Hello"}]'
        raise InputError("messages", "must be a list with at least one message", remedy)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{index}]", "has no role", 'use {"role": "user", "content": "..."}')
        tokens = message.get("token_ids")
        if tokens is not None and not (isinstance(tokens, list) and all(isinstance(item, int) for item in tokens)):
            raise InputError(f"messages[{index}].token_ids", "is not a list of token ids", "leave it out")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise InputError(f"messages[{index}].content", f"is of type {type(content).__name__}", "give text")


def check_tools(tools: object) -> None:
    """Raise InputError for tools that are not a list of objects."""
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError("tools", "must be a list of objects", 'e.g. [{"type": "function", "function": {…}}]')


@contextmanager
def _surviving() -> Iterator[None]:
    """Turn a panic of the library, which is not an Exception, into TokenizerFailed."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed from None


class ChatTemplate:
    """A chat template; `marks` maps special tokens in its source to secret spellings.

    If it does not mention tools, the messages describe them.
    """

    def __init__(self, source: str, names: Mapping[str, str | None], marks: Mapping[str, str]) -> None:
        self._marks = marks
        self._knows_tools = re.search(r"\btools\b", source) is not None
        for plain, secret in sorted(marks.items(), key=lambda item: -len(item[0])):
            source = source.replace(plain, secret)
        self._source = source
        self._names = {key: marks.get(name, name) for key, name in names.items() if name is not None}
        self._worker = SandboxProcess()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Render a conversation. `extra` reaches the template as variables; it cannot override the other arguments."""
        variables: dict[str, Any] = {**extra, **self._names, "add_generation_prompt": add_generation_prompt}
        try:
            if not self._knows_tools and (tools or any(map(_is_about_tools, messages))):
                messages, tools = write_tools(messages, tools), None
            variables |= {"messages": list(messages), "tools": list(tools) if tools else None}
            arguments = {"source": self._source, "variables": variables, "limit": MAX_RENDERED_BYTES}
            reply = self._worker.ask("render", arguments, RENDER_S, RENDER_S_PER_MIB)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the messages cannot be given to the chat template: {self._plain(error)}") from None
        except WorkerKilled as error:
            message = f"the chat template did not finish within {error.seconds:.1f} s or ran out of memory"
            raise TemplateError(message, "use another template") from None
        if "error" in reply:
            raise TemplateError(f"the chat template refused the messages: {self._plain(reply['error'])}")
        return str(reply["text"])

    def _plain(self, problem: object) -> str:
        """Return text without secret spellings, for display."""
        text = str(problem)
        for plain, secret in self._marks.items():
            text = text.replace(secret, plain)
        return "".join(char for char in text if not "\ue000" <= char <= "\uf8ff")

    @property
    def num_waiting(self) -> int:
        return self._worker.num_waiting

    def close(self) -> None:
        self._worker.close()


class Tokenizer:
    """Encodes, decodes and renders conversations, as the files of one checkpoint specify."""

    def __init__(self, definition: str, settings: Mapping[str, Any], template: str | None) -> None:
        self._inner = _build(definition)
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()
        self._nonce = "".join(chr(0xE000 + secrets.randbelow(0x1000)) for _ in range(8))
        # Spellings that cannot be guessed, from the private-use area of Unicode, by special token.
        specials = [
            token["content"] for token in json.loads(definition).get("added_tokens") or [] if token.get("special")
        ]
        self._marks = {content: f"{self._nonce}{chr(0xF000 + index)}" for index, content in enumerate(specials)}
        self._guarded = _build(_respell(definition, self._marks)) if self._marks else self._inner
        names = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        first = next(iter(self._inner.encode("", add_special_tokens=True).ids), None)
        self.bos_id = first if names["bos_token"] is None else self.token_id(names["bos_token"])
        adds_bos = settings.get("add_bos_token")
        self._adds_bos = adds_bos if isinstance(adds_bos, bool) else first is not None and first == self.bos_id
        self._template = None if template is None else ChatTemplate(template, names, self._marks)

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Load the tokenizer of a checkpoint. Raises NoTokenizer and CheckpointError."""
        directory = Path(directory)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise NoTokenizer(str(directory))
        settings = _read_settings(directory)
        try:
            definition = read_small_file(own_file(file), MAX_TOKENIZER_BYTES).decode()
            return cls(definition, settings, find_template(directory))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", "download it again") from None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(
        self,
        text: str,
        bos: bool = True,
        parse_special: bool = False,
        max_tokens: int | None = None,
        count_limit: int = 1,
    ) -> list[int]:
        """Return the token ids of a text, with BOS first if the model uses it.

        Special tokens in the text are parsed only with `parse_special`. A text with far more than `count_limit` times
        `max_tokens` tokens raises ContextTooLong before all of it is encoded.
        """
        ids = _encode(self._inner if parse_special else self._guarded, _encodable(text), max_tokens, count_limit)
        return [self.bos_id, *ids] if bos and self._adds_bos and self.bos_id is not None else ids

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raise ContextTooLong for a text with far more than `max_tokens` tokens, before all of it is encoded."""
        if len(text) > CHARS_PER_TOKEN * max_tokens:
            _check_length(self._guarded, _encodable(text), max_tokens, 1)

    @_surviving()
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode plain texts on all cores, without BOS."""
        encodings = self._guarded.encode_batch([_encodable(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @_surviving()
    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Encode plain texts on all cores, without BOS; with each id comes the place in the text where it ends."""
        encodings = self._guarded.encode_batch([_encodable(text) for text in texts], add_special_tokens=False)
        return [(encoding.ids, [end for _, end in encoding.offsets]) for encoding in encodings]

    @_surviving()
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=skip_special))

    def decode_runs(self, runs: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each run of tokens within a longer text, special tokens and leading spaces included."""
        before = self.encode("a", bos=False)[-1:]  # at the very beginning of a text, a space would be lost
        size = len(self.decode(before, skip_special=False))
        texts = self._inner.decode_batch([[*before, *run] for run in runs], skip_special_tokens=False)
        return [text[size:] for text in texts]

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its spelling, special ones included."""
        found: int | None = self._inner.token_to_id(text)
        return found

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the conversation as the template writes it, for display."""
        text = self._render([_visible(message) for message in messages], **options)
        for plain, secret in self._marks.items():
            text = text.replace(secret, plain)
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        count_limit: int = 1,
        continue_final: bool = False,
        attached: Sequence[int] = (),
        **options: Any,
    ) -> list[int]:
        """Return the conversation as token ids. BOS comes only from the template; no message becomes special tokens.

        With `continue_final` it ends with the text of the last message, which is an answer to be continued.
        The first message of the user begins with the tokens `attached`.

        An assistant's message may carry `token_ids`: they replace its content as they are, since encoding the text of
        sampled tokens need not give the same tokens again. A conversation with far more than `count_limit` times
        `max_tokens` tokens raises ContextTooLong before all of it is encoded, and if possible before it is rendered.
        """
        if max_tokens is not None:
            self._check_messages(messages, max_tokens, count_limit)
        render = self._render_open if continue_final else self._render
        visible = [_visible(message) for message in messages]
        holes = [(f"{self._nonce}attached{self._nonce}", attached)] if attached else []
        if attached:
            first = next((one for one in visible if one.get("role") == "user"), None)
            if first is None:
                raise InputError("messages", "have no user message to attach the documents to", "ask a question")
            first["content"] = f"{holes[0][0]}{first.get('content') or ''}"
        stand_ins = {at: f"{self._nonce}{at}{self._nonce}" for at, one in enumerate(messages) if _is_spliced(one)}
        text = render(
            [{**one, "content": stand_ins[at]} if at in stand_ins else one for at, one in enumerate(visible)], **options
        )
        if any(text.count(stand_in) != 1 for stand_in in stand_ins.values()):
            stand_ins = {}  # this template does not print the content as it is
            text = render(visible, **options)
        if any(text.count(hole) != 1 for hole, _ in holes):
            raise TemplateError("the chat template does not print the first message as it is", "use another template")
        ids: list[int] = []
        splices = [(stand_in, messages[at]["token_ids"]) for at, stand_in in stand_ins.items()]
        for stand_in, tokens in sorted([*splices, *holes], key=lambda splice: text.find(splice[0])):
            before, _, text = text.partition(stand_in)
            ids += _encode(self._guarded, before, max_tokens, count_limit)
            ids += tokens
        return ids + _encode(self._guarded, text, max_tokens, count_limit)

    def _check_messages(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, count_limit: int) -> None:
        """Raise ContextTooLong for messages that are far too long. Of answers, the template may leave parts out."""
        texts = [message.get("content") or "" for message in messages if message.get("role") != "assistant"]
        if sum(map(len, texts)) > CHARS_UNRENDERED * count_limit * max_tokens:
            _check_length(self._guarded, _encodable("".join(texts)), max_tokens, count_limit)

    def encode_answers(
        self, messages: Sequence[Mapping[str, Any]], stop_ids: Collection[int] = (), **options: Any
    ) -> list[tuple[list[int], list[bool]]]:
        """Return the conversation as token ids, and for each id whether the assistant is to write it.

        The end of a turn (one of `stop_ids`) belongs to the assistant, what the template writes after it does not.
        Where the template renders earlier answers differently, there is one conversation for each answer.
        """
        visible = [_visible(message) for message in messages]
        places = [index for index, message in enumerate(visible) if message.get("role") == "assistant"]
        turns = []
        for index in places:
            asked = self._render(visible[:index], **{**options, "add_generation_prompt": True}) if index else ""
            answered = self._render(visible[: index + 1], **{**options, "add_generation_prompt": False})
            if not answered.startswith(asked):
                raise TemplateError(
                    f"the chat template renders earlier turns differently at message {index + 1}",
                    "such a conversation cannot be trained on with this template",
                )
            turns.append((asked, answered))
        is_growing = all(after[0].startswith(before[1]) for before, after in pairwise(turns))
        joined = [turns] if is_growing else [[turn] for turn in turns]
        return [self._mark_answers(group, stop_ids) for group in joined if group]

    @_surviving()
    def _mark_answers(
        self, turns: Sequence[tuple[str, str]], stop_ids: Collection[int]
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of the last of the turns, each of which continues the one before, and marks on the answers."""
        encoding = self._guarded.encode_batch([turns[-1][1]], add_special_tokens=False)[0]
        ids, ends = list(encoding.ids), [end for _, end in encoding.offsets]
        marks = [False] * len(ids)
        for asked, answered in turns:
            inside = [at for at, end in enumerate(ends) if len(asked) < end <= len(answered)]
            last = max((at for at in inside if ids[at] in stop_ids), default=inside[-1] if inside else 0)
            for at in inside:
                marks[at] = at <= last
        return ids, marks

    def encode_around(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
        """Return the conversation with its last message open: ids up to the end of its text, and ids that close it."""
        hole = f"{self._nonce}hole{self._nonce}"
        opened = [_visible(message) for message in messages]
        opened[-1]["content"] = f"{opened[-1].get('content') or ''}{hole}"
        before, _, after = self._render(opened, **options).partition(hole)
        return _encode(self._guarded, before), _encode(self._guarded, after)

    def _render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if self._template is None:
            remedy = "add chat_template.jinja to it, or generate without the chat format (--raw)"
            raise TemplateError("this checkpoint has no chat template", remedy)
        return _encodable(self._template.render(messages, **options))

    def _render_open(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render a conversation up to the end of the text of its last message."""
        hole = f"{self._nonce}hole{self._nonce}"
        opened = [*messages[:-1], {**messages[-1], "content": f"{messages[-1].get('content') or ''}{hole}"}]
        before, found, after = self._render(opened, **{**options, "add_generation_prompt": False}).partition(hole)
        if not found or hole in after:
            raise TemplateError("the chat template does not print the last message as it is", "end with a question")
        return before

    @property
    def num_waiting(self) -> int:
        """How many conversations wait to be rendered."""
        return 0 if self._template is None else self._template.num_waiting

    def close(self) -> None:
        """Stop the process that renders templates, if it runs."""
        if self._template is not None:
            self._template.close()


def _build(definition: str) -> RustTokenizer:
    try:
        with _surviving():
            tokenizer = RustTokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@_surviving()
def _encode(inner: RustTokenizer, text: str, max_tokens: int | None = None, count_limit: int = 1) -> list[int]:
    """Encode a batch of one: only that releases the GIL, and a book takes many seconds."""
    if max_tokens is not None and len(text) > CHARS_PER_TOKEN * count_limit * max_tokens:
        _check_length(inner, text, max_tokens, count_limit)
    return list(inner.encode_batch([text], add_special_tokens=False)[0].ids)


def _check_length(inner: RustTokenizer, text: str, max_tokens: int, count_limit: int) -> None:
    """Raise ContextTooLong for a text that is far too long, before all of it is encoded: that could take minutes.

    It is counted in pieces. A cut may add a token, hence the allowance of an eighth.
    """
    count, limit = 0, count_limit * (max_tokens + max_tokens // 8)
    for at in range(0, len(text), PIECE):
        count += len(_encode(inner, text[at : at + PIECE]))
        if count > limit:
            raise ContextTooLong(count, max_tokens, is_whole=at + PIECE >= len(text))


def _encodable(text: str) -> str:
    """Replace lone surrogates, which have no encoding in UTF-8."""
    if not isinstance(text, str):
        raise InputError("text", f"is of type {type(text).__name__}", "give a string")
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _content(token: object) -> str | None:
    """Return the name of a token, given as text or as an object with its `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _is_spliced(message: Mapping[str, Any]) -> bool:
    return bool(message.get("token_ids")) and message.get("role") == "assistant" and not message.get("tool_calls")


def _is_about_tools(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _visible(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a message that the template may see."""
    return {key: value for key, value in message.items() if key != "token_ids"}


def _respell(definition: str, marks: Mapping[str, str]) -> str:
    """Return the same tokenizer with other names for its special tokens; all ids stay the same."""
    data = json.loads(definition)
    for token in data["added_tokens"]:
        token["content"] = marks.get(token["content"], token["content"])
    model = data["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {marks.get(piece, piece): index for piece, index in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[marks.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = marks.get(model["unk_token"], model["unk_token"])
    data["post_processor"] = None  # it adds BOS by name; we add it by id
    return json.dumps(data, ensure_ascii=False)


def _read_settings(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    return read_json_object(file) if file.is_file() else {}


def find_template(directory: Path) -> str | None:
    """Return the chat template of a checkpoint, if it has one."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return read_small_file(own_file(file), MAX_TEMPLATE_BYTES).decode()
    template = _read_settings(directory).get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
