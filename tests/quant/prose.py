"""A text to calibrate tiny models with."""

import random

WORDS = """
    the a river stone bridge morning letter window quiet heavy green walked carried found under over before after
    captain garden winter lamp table and but while because slowly never always seven hundred kilometres
""".split()  # noqa: SIM905


def prose(num_words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    sentences = []
    while num_words > 0:
        count = rng.randint(4, 14)
        sentences.append(" ".join(rng.choices(WORDS, k=count)).capitalize() + ".")
        num_words -= count
    return " ".join(sentences)
