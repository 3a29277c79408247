"""A check of the engine's bookkeeping: every page and slot of the cache has as many owners as it counts."""

from collections import Counter

from sala.engine.cache import Pool
from sala.engine.engine import Engine


def integrity(engine: Engine) -> list[str]:
    """Return what is wrong; an empty list if nothing is."""
    hybrid = engine.hybrid
    pages: Counter[int] = Counter()
    slots: Counter[int] = Counter()
    pinned = Counter(page for sequence in engine.scheduler for page in sequence.pages)
    for sequence in engine.scheduler:
        pages.update(sequence.pages)
        slots.update([] if sequence.slot is None else [sequence.slot])
    for snapshot in hybrid.prefix:
        pages.update(snapshot.pages)
        slots.update([snapshot.slot])
    found = _problems(hybrid.pages, "page", pages) + _problems(hybrid.slots, "slot", slots)
    if hybrid.pages._pins != [pinned[page] for page in range(hybrid.pages.size)]:
        found.append("pages are pinned that no sequence has, or the other way round")
    if hybrid.pages.num_pinned != len(pinned):
        found.append(f"{hybrid.pages.num_pinned} pages count as pinned, {len(pinned)} are")
    if hybrid._running != {sequence for sequence in engine.scheduler if sequence.slot is not None}:
        found.append("sequences count as running that have no slot, or the other way round")
    held: dict[str, Counter[int]] = {}
    for snapshot in hybrid.prefix:
        held.setdefault(snapshot.owner, Counter()).update(snapshot.pages)
    if hybrid._held != held:
        found.append("the shares of the owners are wrong")
    return found


def _problems(pool: Pool, name: str, owners: Counter[int]) -> list[str]:
    """Return the differences between the reference counts and what the owners hold."""
    found = [
        f"{name} {number} has count {count} and {owners[number]} owners"
        for number, count in enumerate(pool._counts)
        if count != owners[number]
    ]
    free = set(pool._free)
    is_right = all((number in free) == (count == 0) for number, count in enumerate(pool._counts))
    if len(free) != len(pool._free) or not is_right:
        found.append(f"the list of free {name}s is wrong")
    return found
