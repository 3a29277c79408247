"""How blocks come into the hot pool: the rule by which a step takes frames, one block after another.

Blocks that a step attends to and that have a frame keep it; it is marked as used by this step. Each of the others, in
the order of the rows and of their blocks, takes the frame of its set that has been unused for longest, the lowest of
several, and its keys and values are copied there. Frames that this step uses are never taken: a block that finds none
stays in host memory, where kernels read it.
"""

import torch
from torch import Tensor

from sala.backends.torch.hot_pages import HotPages

_NEVER = 1 << 32  # the age of a frame without a page, above that of any other


def attended_pages(
    tables: Tensor, lengths: Tensor, is_sparse: Tensor, selected: Tensor, max_dense: int, block: int,
    row_of: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The pages that the rows of a decode step attend to, [G, S * max(C, max_dense)], -1 for none.

    Arguments as of `decode_attention`: tables [S, N], lengths and is_sparse [S], selected [S, G, C].
    """
    (num_rows, groups, num_selected), rows = selected.shape, tables if row_of is None else tables[row_of]
    width = max(num_selected, max_dense)
    blocks = torch.full((num_rows, groups, width), -1, dtype=torch.long, device=tables.device)
    blocks[..., :num_selected] = selected
    dense = torch.arange(width, device=tables.device)
    dense = torch.where(dense < max_dense, dense, -1).expand(num_rows, groups, -1)
    blocks = torch.where((is_sparse != 0)[:, None, None], blocks, dense)
    is_wanted = (blocks >= 0) & (blocks * block < lengths[:, None, None])
    pages = rows[torch.arange(num_rows, device=rows.device)[:, None, None], blocks.where(is_wanted, 0)]
    return pages.long().where(is_wanted, -1).transpose(0, 1).flatten(1)


def fetch(
    hot: HotPages, k: Tensor, v: Tensor, exponents: Tensor | None, tables: Tensor, lengths: Tensor, is_sparse: Tensor,
    selected: Tensor, max_dense: int, row_of: Tensor | None = None,
) -> None:  # fmt: skip
    """Bring the blocks that the rows of a decode step attend to into the pool; k, v [G, P, B, D] are in host memory."""
    wanted = attended_pages(tables, lengths, is_sparse, selected, max_dense, k.shape[2], row_of)
    now = int(hot.clock)
    for group, pages in enumerate(wanted.tolist()):
        frames = hot.frames[group]
        here = [page for page in dict.fromkeys(pages) if page >= 0]
        for page in here:
            if frames[page] >= 0:
                hot.stamps[group, frames[page]] = now
        for page in here:
            if frames[page] < 0 and (frame := _oldest(hot, group, page % hot.num_sets, now)) is not None:
                _put(hot, group, page, frame, now)
                for pool, source in ((hot.k, k), (hot.v, v), (hot.exponents, exponents)):
                    if pool is not None and source is not None:
                        pool[group, frame] = source[group, page]


def _oldest(hot: HotPages, group: int, number: int, now: int) -> int | None:
    """Return the frame of this set that may be taken, if there is one."""
    first = number * hot.ways
    here = range(first, first + hot.ways)
    pages, stamps = hot.pages[group].tolist(), hot.stamps[group].tolist()
    ages = {frame: _NEVER if pages[frame] < 0 else _int32(now - stamps[frame]) for frame in here}
    found = max(here, key=lambda frame: ages[frame])
    return found if ages[found] else None


def _int32(number: int) -> int:
    """Return the number as 32 bits hold it: the clock begins anew after two billion steps."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _put(hot: HotPages, group: int, page: int, frame: int, now: int) -> None:
    before = int(hot.pages[group, frame])
    if before >= 0:
        hot.frames[group, before] = -1
    hot.frames[group, page], hot.pages[group, frame], hot.stamps[group, frame] = frame, page, now
