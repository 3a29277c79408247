"""The process that finds and reads files: they are hostile, and it may be killed at any time.

It holds no secrets, writes no files and starts no processes. Memory is limited for the process, time for each task.
What else it could do is refused by the system where that can: see `confinement`.
"""

import contextlib
import logging
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2 << 30


def find(directory: str, name: str) -> dict[str, Any]:
    """Return the files below a directory, or why there are none."""
    from sala.documents.find import find_files

    try:
        return asdict(find_files(directory, name))
    except ModuleNotFoundError:
        return {"missing": "pathspec"}
    except ValueError as error:
        return {"problem": str(error)}


def read(path: str, name: str) -> dict[str, Any]:
    """Return the documents in a file, and what of it was left out."""
    from sala.documents.model import LeftOut, Limits
    from sala.documents.readers.dispatch import Reading

    limits = Limits()
    reading = Reading(limits)
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(limits.file_bytes + 1)
    except OSError as error:
        reading.left_out.append(LeftOut(name, f"it cannot be read: {error.strerror}"))
    else:
        if len(data) > limits.file_bytes:
            reading.left_out.append(LeftOut(name, f"it is larger than {limits.file_bytes >> 20} MiB; split it"))
        else:
            reading.read(name, data)
    return {
        "documents": [asdict(one) for one in reading.documents],
        "left_out": [asdict(one) for one in reading.left_out],
    }


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))  # the package need not be installed
    sys.dont_write_bytecode = True
    from sala.text import sandbox

    sys.modules["numpy"] = None  # type: ignore[assignment] # openpyxl does without; its import starts threads
    warnings.simplefilter("ignore")
    logging.disable()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is not a reply
    os.dup2(1, 2)
    sandbox.limit_resources(MEMORY_BYTES, RLIMIT_FSIZE=0, RLIMIT_CORE=0, RLIMIT_NPROC=0)
    with contextlib.suppress(ImportError, AttributeError, OSError):  # where Python or its C library lacks what it needs
        from sala.documents.confinement import confine

        confine()
    sandbox.serve(requests, replies, {"find": find, "read": read})


if __name__ == "__main__":
    main()
