"""Counts as rates, with confidence intervals."""

import math

MANY = 20  # trials; for fewer, a count says more than a share


def ratio_text(share: float, trials: int) -> str:
    """Return 3/4, or 75% if there are many trials."""
    return f"{round(share * trials)}/{trials}" if trials < MANY else f"{share:.0%}"


def interval(share: float, trials: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a share of so many trials that are independent of each other.

    Scores between 0 and 1 vary at most as much as right and wrong, so for their mean it is rather too wide. It is too
    narrow where trials depend on each other, such as several questions about one text.
    """
    z = 1.96
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)
