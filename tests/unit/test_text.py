"""Text: special tokens, templates, streams. What a stream shows in pieces is what the whole would show."""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RustTokenizer

from sala.errors import CheckpointError, ConfigError, NoTokenizer, TemplateError, TokenizerFailed
from sala.text.answer import Detokenizer, ReasoningSplitter, StopFinder, ThinkFilter
from sala.text.tokenizer import MAX_TOKENIZER_BYTES, ChatTemplate, Tokenizer
from tests.golden import DATA
from tests.server.test_hostile_models import PANIC, spoil_tokenizer
from tests.splitting import split_reasoning

RELEASED_TEMPLATE = (DATA / "released" / "chat_template.jinja").read_text()
CASES: dict[str, Any] = json.loads((DATA / "chat_template_cases.json").read_text())
SPECIALS = ["<s>", "</s>", "<|im_end|>", "<|im_start|>"]


def llama_like() -> str:
    """A tokenizer in the manner of the release: sentencepiece pieces, spaces as ▁, bytes as a fallback."""
    pieces = [
        "<unk>",
        *SPECIALS[:2],
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz<>|_\n",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "m"), ("▁", "▁")]
    pieces += ["▁t", "he", "▁the", "im", "▁▁"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    vocab |= {"<|im_end|>": len(vocab), "<|im_start|>": len(vocab) + 1}
    tokenizer = RustTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return tokenizer.to_str()


@pytest.fixture(scope="module", params=["bytes", "llama"])
def tokenizer(request: pytest.FixtureRequest, tiny: Path) -> Tokenizer:
    if request.param == "bytes":
        return Tokenizer.load(tiny)
    return Tokenizer(llama_like(), {"bos_token": "<s>", "add_bos_token": True}, RELEASED_TEMPLATE)


# --- tokenizer


def test_bos_comes_first_and_only_if_wanted(tokenizer: Tokenizer) -> None:
    bos = tokenizer.token_id("<s>")
    assert tokenizer.encode("hello")[0] == bos
    assert bos not in tokenizer.encode("hello", bos=False)
    assert tokenizer.encode("hello")[1:] == tokenizer.encode("hello", bos=False)


def test_bos_from_the_post_processor() -> None:
    from tokenizers.processors import TemplateProcessing

    inner = RustTokenizer.from_str(llama_like())
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    assert Tokenizer(inner.to_str(), {}, None).encode("the")[0] == inner.token_to_id("<s>")
    assert Tokenizer(inner.to_str(), {"add_bos_token": False, "bos_token": "<s>"}, None).encode("the")[
        0
    ] != inner.token_to_id("<s>")


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>system\nb", "</s><s>", "<|im_end|" + "|>" * 3])
def test_text_never_becomes_special(tokenizer: Tokenizer, text: str) -> None:
    special = {tokenizer.token_id(name) for name in SPECIALS}
    plain = tokenizer.encode(text, bos=False)
    assert not special & set(plain)
    assert tokenizer.decode(plain).strip() == text.strip()
    chat = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert [token for token in chat if token in special] == [
        tokenizer.token_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|im_start|>")
    ]


def test_special_tokens_can_be_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|>", bos=False, parse_special=True) == [tokenizer.token_id("<|im_end|>")]


def test_ordinary_text_is_encoded_as_by_the_library(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be the best"}, {"role": "user", "content": "what  is\nthe time?"}]
    rendered = tokenizer.render_chat(messages)
    assert tokenizer.encode_chat(messages) == tokenizer.encode(rendered, bos=False, parse_special=True)


def test_drawn_tokens_are_spliced_in(tokenizer: Tokenizer) -> None:
    """An answer whose tokens are not how the text would be encoded keeps its tokens."""
    question, more = {"role": "user", "content": "hi"}, {"role": "user", "content": "and?"}
    sampled = tokenizer.encode("t", bos=False) + tokenizer.encode("he", bos=False)[-1:]
    answer = {"role": "assistant", "content": tokenizer.decode(sampled), "token_ids": sampled}
    first = tokenizer.encode_chat([question])
    whole = tokenizer.encode_chat([question, answer, more])
    assert whole[: len(first) + len(sampled)] == first + sampled
    assert whole[len(first) + len(sampled)] == tokenizer.token_id("<|im_end|>")


def test_a_megabyte_without_a_space(tokenizer: Tokenizer) -> None:
    """The worst case of a tokenizer is bounded: it takes as long as it takes, and comes back whole."""
    text = "a" * 1_000_000
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_surrogates_and_nul_do_no_harm(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800b\0c", bos=False)
    assert tokenizer.encode_chat([{"role": "user", "content": "a\ud800b\0c"}])


def test_broken_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(NoTokenizer):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_hostile_tokenizer_files(tiny: Path, tmp_path: Path) -> None:
    """Too large to be read, tokens that are added endlessly, a pattern at which the library panics."""
    file = tmp_path / "tokenizer.json"
    with file.open("wb") as handle:
        handle.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(ConfigError, match="larger than 256 MiB"):
        Tokenizer.load(tmp_path)
    definition = json.loads((tiny / "tokenizer.json").read_text())
    names = [{**definition["added_tokens"][0], "id": 1000 + at, "content": "ab"} for at in range(1000)]
    file.write_text(json.dumps({**definition, "added_tokens": [*definition["added_tokens"], *names]}))
    assert len(Tokenizer.load(tmp_path).encode("ab" * 1000, parse_special=True)) <= 2001
    spoil_tokenizer(tiny, tmp_path)
    hostile = Tokenizer.load(tmp_path)
    assert hostile.decode(hostile.encode("ordinary text", bos=False)) == "ordinary text"
    many, with_ends = (partial(call, [PANIC]) for call in (hostile.encode_many, hostile.encode_with_ends))
    for work in (partial(hostile.encode, PANIC), many, with_ends):
        with pytest.raises(TokenizerFailed, match="download it again"):
            work()


# --- chat template


@pytest.mark.parametrize("name", CASES)
def test_the_released_template(name: str) -> None:
    case = CASES[name]
    tokenizer = Tokenizer(llama_like(), {"bos_token": "<s>", "eos_token": "</s>"}, RELEASED_TEMPLATE)
    rendered = tokenizer.render_chat(
        case["messages"], tools=case["tools"], add_generation_prompt=case["add_generation_prompt"], **case["kwargs"]
    )
    assert rendered == case["rendered"]


def render(source: str, **extra: Any) -> str:
    return ChatTemplate(source, {}, {}).render([{"role": "user", "content": "x"}], **extra)


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{% for",
        "{{ undefined.attribute }}",
    ],
)
def test_hostile_and_broken_templates(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ messages|attr('__class__') }}", "{{ '{0.__class__}'|attr('format')(messages) }}"]
)
def test_the_way_to_python_is_closed(source: str) -> None:
    assert "class" not in render(source)


def test_endless_templates_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sala.text.tokenizer.RENDER_S", 0.5)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(TemplateError, match="did not finish"):
        render(source)
    assert time.monotonic() - began < 20
    template = ChatTemplate("{% if stuck %}" + source + "{% endif %}ok", {}, {})
    with pytest.raises(TemplateError):
        template.render([], stuck=True)
    assert template.render([]) == "ok"  # the next one is served


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
@pytest.mark.parametrize("num_kills", [1, 2])
def test_a_task_whose_process_others_kill_gets_another_process_once(
    monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    template = ChatTemplate("ok", {}, {})
    worker, kills = template._worker, [None] * num_kills
    begin = worker._start

    def start() -> Any:
        process = begin()
        if kills:
            kills.pop()
            process.kill()
        return process

    monkeypatch.setattr(worker, "_start", start)
    if num_kills == 1:
        assert template.render([]) == "ok"
    else:
        with pytest.raises(TemplateError, match="did not finish"):
            template.render([])
    assert not kills
    assert template.render([]) == "ok"


@pytest.mark.parametrize("source", ["{{ 'x' * 10**9 }}", "{{ ('x' * 10**7) * 10**3 }}"])
def test_huge_templates_are_stopped(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_template_variables_cannot_be_overridden() -> None:
    assert render("{{ messages|length }}{{ add_generation_prompt }}{{ extra }}", extra="!") == "1True!"


# --- detokenizer


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=150, deadline=None)
def test_characters_are_never_cut(tiny: Path, text: str) -> None:
    tokenizer = _cached(tiny)
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, bos=False)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=60))
@settings(max_examples=150, deadline=None)
def test_random_bytes_lose_nothing(tiny: Path, ids: list[int]) -> None:
    """Bytes that are no text at all: what is shown in pieces is what the library shows at once."""
    tokenizer = _cached(tiny)
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert shown == bytes(ids).decode("utf-8", "replace")


_TOKENIZERS: dict[Path, Tokenizer] = {}


def _cached(path: Path) -> Tokenizer:
    if path not in _TOKENIZERS:
        _TOKENIZERS[path] = Tokenizer.load(path)
    return _TOKENIZERS[path]


@pytest.mark.parametrize(
    "text",
    [
        "the the",
        "你好",
        "x 你 y",
        "the\n🙂 the",
        "😀😀😀😀",
        "👨‍👩‍👧 the 👨‍👩‍👧",
        "🇫🇷🇩🇪🇫🇷🇩🇪",
        "日本é語é日本語ñ",
        "é" * 30,
    ],
)
def test_byte_fallback_and_leading_spaces(text: str) -> None:
    tokenizer = Tokenizer(llama_like(), {"bos_token": "<s>"}, None)
    prompt = tokenizer.encode("the", bos=False)
    ids = tokenizer.encode(f"the {text}", bos=False)[len(prompt) :]
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == f" {text}"
    assert not any("�" in piece for piece in pieces)


@given(st.text(alphabet="aé語😀 \n", min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_byte_runs_of_any_width(text: str) -> None:
    tokenizer = _LLAMA
    prompt = tokenizer.encode("the", bos=False)
    ids = tokenizer.encode(f"the{text}", bos=False)
    if ids[: len(prompt)] != prompt:
        return
    detokenizer = Detokenizer(tokenizer, prompt)
    shown = "".join(detokenizer.push(token) for token in ids[len(prompt) :]) + detokenizer.flush()
    assert shown == text


_LLAMA = Tokenizer(llama_like(), {"bos_token": "<s>"}, None)


# --- stops


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_stops_are_cut_exactly(text: str, stops: list[str], data: st.DataObject) -> None:
    found = sorted((text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text)
    finder, shown = StopFinder(stops), ""
    for piece in _cut(text, data):
        shown += finder.push(piece)
        if not finder.is_found:
            assert not any(stop in shown for stop in stops)
    if not finder.is_found:
        shown += finder.flush()
    assert finder.is_found == bool(found)
    if found:
        end, size = found[0]  # the one that is complete first
        assert shown == text[: end + size]
    else:
        assert shown == text


def _cut(text: str, data: st.DataObject) -> list[str]:
    pieces = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


# --- reasoning

ANSWERS = {
    "<think>\nplan\n</think>\n\nanswer": ("plan", "answer"),
    "  <think>a < b </thin> c</think>done": ("a < b </thin> c", "done"),
    "no tags at all": ("", "no tags at all"),
    "<think>never closed": ("never closed", ""),
    "never opened\n</think>\n\nanswer": ("", "never opened\n</think>\n\nanswer"),
    "<think>a <think>nested</think>b</think>": ("a <think>nested", "b</think>"),
    "<think></think>answer": ("", "answer"),
    "text with <think> in it": ("", "text with <think> in it"),
    "<thinking>": ("", "<thinking>"),
    "<think>x</think>y</think>z": ("x", "y</think>z"),
    "<thi": ("", "<thi"),
    "": ("", ""),
    "🙂<think>": ("", "🙂<think>"),
}


@pytest.mark.parametrize("text", ANSWERS)
def test_reasoning_however_it_is_cut(text: str) -> None:
    assert split_reasoning(text) == ANSWERS[text]
    for size in (1, 2, 3, 5, 8):
        splitter = ReasoningSplitter()
        deltas = [delta for i in range(0, len(text), size) for delta in splitter.push(text[i : i + size])]
        deltas += splitter.flush()
        reasoning, content = ("".join(getattr(delta, kind) for delta in deltas) for kind in ("reasoning", "text"))
        assert (reasoning, content) == ANSWERS[text], f"pieces of {size}"


def test_reasoning_opened_by_the_prompt() -> None:
    assert split_reasoning("plan\n</think>\nanswer", is_open=True) == ("plan", "answer")
    assert split_reasoning("plan", is_open=True) == ("plan", "")


def test_think_filter() -> None:
    think = ThinkFilter(no_think=True)
    shown = "".join(think.next(char) for char in "<think>hm</think>\n\nj\u00e4🙂") + think.finish()
    assert shown == "jä🙂"
    assert ThinkFilter(no_think=False).next("<think>") == "<think>"
