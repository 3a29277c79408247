"""`sala serve` with hooks for faults that cannot be made from outside; commands come on stdin, replies go to stdout.

`lose`: every further step fails as on a lost device. `clock SECONDS`: the wall clock jumps. `check`: what is wrong in
the bookkeeping of the engines, the threads by name, and how many blocks of memory Python has allocated.
"""

import contextlib
import ctypes
import gc
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from sala.backends.torch.executor import TorchExecutor
from sala.cli import run
from sala.engine.engine import Engine
from tests.integrity import integrity

_real_time = time.time


def lose() -> None:
    def fail(*_: Any) -> NoReturn:
        raise RuntimeError("CUDA error: unspecified launch failure")

    TorchExecutor.run = TorchExecutor.probe = fail  # type: ignore[method-assign]


def jump(seconds: float) -> None:
    time.time = lambda: _real_time() + seconds


def check() -> dict[str, Any]:
    engines = [one for one in gc.get_objects() if type(one) is Engine and hasattr(one, "hybrid")]
    names = Counter(re.sub(r"[-_ (].*|\d+", "", one.name.removeprefix("sala-")) for one in threading.enumerate())
    problems = [text for engine in engines for text in integrity(engine)]
    files = Counter(re.sub(r"\d+", "", path.rpartition("/")[2]) for path in open_files())
    blocks = sys.getallocatedblocks()
    return {"problems": problems, "threads": dict(names), "files": dict(files), "python_blocks": blocks} | heap()


class Mallinfo(ctypes.Structure):
    """What `mallinfo2` of glibc returns, of all arenas together."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def heap() -> dict[str, float]:
    """Return the megabytes that are allocated by malloc, and those that it keeps free; nothing without glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return {}
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return {"in_use_mb": round((info.uordblks + info.hblkhd) / 1e6, 1), "kept_free_mb": round(info.fordblks / 1e6, 1)}


def open_files() -> Iterator[str]:
    """Yield what is open, where the system tells."""
    directory = Path("/proc/self/fd")
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(OSError):
            yield str(path.readlink())


def obey() -> None:
    for line in sys.stdin:
        word, *rest = line.split()
        reply = {"lose": lose, "clock": lambda: jump(float(rest[0])), "check": check}[word]()  # noqa: B023
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    threading.Thread(target=obey, daemon=True).start()
    sys.exit(run(["serve", *sys.argv[1:]]))
