"""Names that nobody has: put together from syllables, so that there are plenty and none means anything."""

import numpy as np

FIRST = """
ba be bo dra fe fi ga gle go ka ke kor lu ma mi mo na ne ni no pa pel po ra ri ro sa se sil ta te to tu va ve vi
wa we zo zu
"""
MIDDLE = """
bi da den do fa gi ka la le li lo mar mi na ne no pe ra ri ro ru sa se ta ti to va vo
"""
LAST = """
bek dan dor fin gan kel lem lis mon nax nel nor pim rik ros rum sen tas tel tor vak ven vin zan zel
"""


def draw_names(count: int, rng: np.random.Generator) -> list[str]:
    """`count` different names of three syllables, such as "kelomon"."""
    parts = [text.split() for text in (FIRST, MIDDLE, LAST)]
    sizes = tuple(map(len, parts))
    chosen = rng.choice(sizes[0] * sizes[1] * sizes[2], size=count, replace=False)
    places = zip(*np.unravel_index(chosen, sizes), strict=True)
    return ["".join(part[at] for part, at in zip(parts, place, strict=True)) for place in places]
