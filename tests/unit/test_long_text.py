"""A book becomes tokens while other threads go on."""

import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from sala.errors import ContextTooLong
from sala.llm import LLM
from sala.text.tokenizer import Tokenizer


def test_encoding_lets_other_threads_go_on(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    text = "a few words of a long book, again and again\n" * 60_000
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.005)
        turns += 1
    assert turns > 10  # an encoder that lets nobody in gives one or two


def test_a_text_that_is_far_too_long_is_not_encoded_to_its_end() -> None:
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]
    vocab = {piece: index for index, piece in enumerate(("a", "aa", "aaaa", "a" * 8))}
    tokenizer = Tokenizer(RustTokenizer(models.BPE(vocab=vocab, merges=merges)).to_str(), {}, None)
    text = "a" * 400_000
    assert len(tokenizer.encode(text, max_tokens=50_000)) == 50_000
    assert len(tokenizer.encode(text, max_tokens=49_000)) == 50_000  # near the limit the true number is told
    with pytest.raises(ContextTooLong, match="more than") as caught:
        tokenizer.encode(text, max_tokens=1000)
    assert 1000 < caught.value.num_tokens < 10_000
    assert "more than" not in str(ContextTooLong(5, 4))


def test_prompts_and_chats_have_that_limit(tiny: Path) -> None:
    llm = LLM(tiny, device="cpu", ctx=256)
    text = "a" * 3_000_000
    for encode in (lambda: llm.encode(text), lambda: llm.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(ContextTooLong, match="more than"):
            encode()
    chat = [{"role": "user", "content": "a" * 2000}]
    assert len(llm.encode_chat(chat)) > 2000  # to be counted it may be longer than the context
