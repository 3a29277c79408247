"""The hot pool: copies on the device of blocks whose keys and values lie in host memory.

Kernels read a block from its frame in the pool if it has one, else from host memory, so results do not depend on what
the pool holds. Whatever writes a page writes its frame too, or takes the frame away (`HotPages.forget`).
"""

import torch
from torch import Tensor

WAYS = 64  # frames of a set; a power of two
UNCLAIMED = torch.iinfo(torch.int32).max


class HotPages:
    """The frames of one sparse layer: k, v [G, F, B, D] and, of FP8 pages, exponents [G, F, B, 2].

    `frames` [G, P] is the frame of a page, `pages` [G, F] the page of a frame, -1 for none; `stamps` [G, F] is the step
    that used a frame last. Frames fall into sets of `ways`; page p of a pool with S sets has its frame in set p % S.
    Layers share the `clock` [1], the number of the step, and `claims` [G, P], which are UNCLAIMED between kernels.
    """

    def __init__(
        self, k: Tensor, exponents: Tensor | None, num_frames: int, device: torch.device,
        shared: tuple[Tensor, Tensor] | None = None, most_ways: int = WAYS,
    ) -> None:  # fmt: skip
        """Make an empty pool for pages like k [G, P, B, D]; `shared` are clock and claims of another layer."""
        groups, num_pages, block, dim = k.shape
        self.ways = min(most_ways, 1 << num_frames.bit_length() - 1)
        self.num_sets = num_frames // self.ways
        num_frames = self.ways * self.num_sets

        def numbers(*shape: int, value: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self.k, self.v = (torch.empty(groups, num_frames, block, dim, dtype=k.dtype, device=device) for _ in range(2))
        self.exponents = None
        if exponents is not None:
            self.exponents = torch.empty(groups, num_frames, block, 2, dtype=torch.uint8, device=device)
        self.frames = numbers(groups, num_pages, value=-1)
        self.pages, self.stamps = numbers(groups, num_frames, value=-1), numbers(groups, num_frames, value=0)
        self.clock, self.claims = shared or (numbers(1, value=0), numbers(groups, num_pages, value=UNCLAIMED))
        self.order = numbers(groups, num_frames, value=0)  # scratch: the frames of each set, the oldest first

    @property
    def num_frames(self) -> int:
        return self.pages.shape[1]

    def forget(self, pages: Tensor) -> None:
        """Take the frames of these pages [n] away: they were written in host memory alone."""
        self.pages.masked_fill_(torch.isin(self.pages, pages.to(self.pages.dtype)), -1)
        self.frames[:, pages] = -1
