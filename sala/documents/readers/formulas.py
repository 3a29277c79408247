"""Formulas of MathML as text, such as (a+b)/2."""

BETWEEN = {"mfrac": "/", "msup": "^", "msub": "_", "msubsup": "_^", "munder": "_", "mover": "^", "munderover": "_^"}
BETWEEN |= {"mroot": ","}
ROWS = {"mtable": "; ", "mtr": " "}  # between the parts of which there may be any number
ROOTS = {"msqrt", "mroot"}


class Formula:
    """What the elements of a formula add to its text."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []  # elements, and what ends them
        self._num_inside = [0]  # parts of each of them; first those of the formula

    def start(self, tag: str) -> str:
        """Return what stands before the text of an element: what joins it to the one before it, and brackets."""
        parent = self._open[-1][0] if self._open else ""
        at = self._num_inside[-1]
        marks = BETWEEN.get(parent, "")
        before = marks[at - 1 : at] if at else ""
        if at and parent in ROWS:
            before = ROWS[parent]
        is_grouped = tag in ROOTS or (bool(marks) and tag == "mrow")
        self._num_inside[-1] += 1
        self._num_inside.append(0)
        self._open.append((tag, ")" if is_grouped else ""))
        return before + ("√" if tag in ROOTS else "") + ("(" if is_grouped else "")

    def end(self, tag: str) -> str:
        """Return what stands after the text of an element, and of those in it that were not ended."""
        if all(tag != one for one, _ in self._open):
            return ""
        after, name = "", ""
        while name != tag:
            name, closing = self._open.pop()
            self._num_inside.pop()
            after += closing
        return after
