"""Numbered things with reference counts: pages, which sequences and snapshots share, and slots, which they do not."""

import heapq


class Pool:
    """Hands out numbers 0…size-1, lowest first, and takes them back when nobody refers to them any more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        self._counts = [0] * size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_owners(self, number: int) -> int:
        return self._counts[number]

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "ask num_free first"
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for number in taken:
            self._counts[number] = 1
        return taken

    def share(self, numbers: list[int] | tuple[int, ...]) -> None:
        for number in numbers:
            assert self._counts[number] > 0, f"{number} is free"
            self._counts[number] += 1

    def release(self, numbers: list[int] | tuple[int, ...]) -> None:
        for number in numbers:
            assert self._counts[number] > 0, f"{number} is free already"
            self._counts[number] -= 1
            if not self._counts[number]:
                heapq.heappush(self._free, number)

    def problems(self, name: str, owners: dict[int, int]) -> list[str]:
        """Differences between the counts and what the owners say they hold."""
        found = [
            f"{name} {number} has count {count} and {owners.get(number, 0)} owners"
            for number, count in enumerate(self._counts)
            if count != owners.get(number, 0)
        ]
        free = set(self._free)
        if len(free) != len(self._free) or any(
            (number in free) != (count == 0) for number, count in enumerate(self._counts)
        ):
            found.append(f"the list of free {name}s is wrong")
        return found
