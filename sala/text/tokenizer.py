"""The tokenizer of a checkpoint, and its protection against special tokens in user text.

A checkpoint marks turns with special tokens such as `<|im_end|>`. Text that merely *spells* one must stay text, or a
user could end their turn and speak as the system. So text is encoded by a copy of the tokenizer in which every special
token has a secret spelling, and the chat template is rendered with the same secret spellings: what the template writes
becomes special tokens, what users write cannot.
"""

import hashlib
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from sala.config import read_json_object, read_small_file
from sala.errors import CheckpointError, ContextTooLong, InputError, NoTokenizer, TemplateError
from sala.text.template import ChatTemplate

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20
PIECE = 1 << 16  # characters counted at a time
CHARS_PER_TOKEN = 4  # about; a text with more characters per allowed token is counted before it is encoded


class Tokenizer:
    """Encodes, decodes and renders conversations, as the files of one checkpoint specify."""

    def __init__(self, definition: str, settings: Mapping[str, Any], template: str | None) -> None:
        self._inner = _build(definition)
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()
        self._nonce = "".join(chr(0xE000 + secrets.randbelow(0x1000)) for _ in range(8))
        self._marks = _secret_spellings(definition, self._nonce)
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
        settings_file = directory / "tokenizer_config.json"
        settings = read_json_object(settings_file) if settings_file.is_file() else {}
        try:
            definition = read_small_file(file, MAX_TOKENIZER_BYTES).decode()
            return cls(definition, settings, _find_template(directory, settings))
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
        """Return the token ids of a text, with BOS first where the model wants it.

        Special tokens in the text are parsed only with `parse_special`. A text with far more than `count_limit` times
        `max_tokens` tokens raises ContextTooLong before all of it is encoded.
        """
        ids = _encode(self._inner if parse_special else self._guarded, _encodable(text), max_tokens, count_limit)
        return [self.bos_id, *ids] if bos and self._adds_bos and self.bos_id is not None else ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode plain texts on all cores, without BOS."""
        encodings = self._guarded.encode_batch([_encodable(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

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
        **options: Any,
    ) -> list[int]:
        """Return the conversation as token ids. BOS comes only from the template; no message becomes special tokens.

        An assistant's message may carry `token_ids`: they replace its content as they are, since encoding the text of
        sampled tokens need not give the same tokens again. A conversation with far more than `count_limit` times
        `max_tokens` tokens raises ContextTooLong before all of it is encoded.
        """
        visible = [_visible(message) for message in messages]
        stand_ins = {at: f"{self._nonce}{at}{self._nonce}" for at, one in enumerate(messages) if _is_spliced(one)}
        text = self._render(
            [{**one, "content": stand_ins[at]} if at in stand_ins else one for at, one in enumerate(visible)], **options
        )
        if any(text.count(stand_in) != 1 for stand_in in stand_ins.values()):
            stand_ins = {}  # this template does not print the content as it is
            text = self._render(visible, **options)
        ids: list[int] = []
        for at, stand_in in stand_ins.items():
            before, _, text = text.partition(stand_in)
            ids += _encode(self._guarded, before, max_tokens, count_limit)
            ids += messages[at]["token_ids"]
        return ids + _encode(self._guarded, text, max_tokens, count_limit)

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
                    f"the chat template does not go on from its own prompt in message {index + 1}",
                    "such a conversation cannot be trained on with this template",
                )
            turns.append((asked, answered))
        is_growing = all(after[0].startswith(before[1]) for before, after in pairwise(turns))
        joined = [turns] if is_growing else [[turn] for turn in turns]
        return [self._mark_answers(group, stop_ids) for group in joined if group]

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
        text = self._template.render(messages, **options)
        return _encodable(text)

    def close(self) -> None:
        """Stop the process that renders templates, if it runs."""
        if self._template is not None:
            self._template.close()


def _build(definition: str) -> RustTokenizer:
    try:
        tokenizer = RustTokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(inner: RustTokenizer, text: str, max_tokens: int | None = None, count_limit: int = 1) -> list[int]:
    """Encode a batch of one: only that releases the GIL, and a book takes many seconds."""
    if max_tokens is not None and len(text) > CHARS_PER_TOKEN * count_limit * max_tokens:
        _check_length(inner, text, max_tokens, count_limit)
    encodings = inner.encode_batch([text], add_special_tokens=False)
    return list(encodings[0].ids)


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


def _visible(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a message that the template may see."""
    return {key: value for key, value in message.items() if key != "token_ids"}


def _secret_spellings(definition: str, nonce: str) -> dict[str, str]:
    """Map special tokens to spellings that cannot be guessed, from the private-use area of Unicode."""
    added = json.loads(definition).get("added_tokens") or []
    specials = [token["content"] for token in added if token.get("special")]
    return {content: f"{nonce}{chr(0xF000 + index)}" for index, content in enumerate(specials)}


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


def _find_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return read_small_file(file, MAX_TEMPLATE_BYTES).decode()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
