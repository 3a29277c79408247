"""A book becomes tokens while other threads go on."""

import threading
import time
from pathlib import Path

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
