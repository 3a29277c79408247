"""Find weights that are not numbers, by samples: a damaged file would otherwise answer with nonsense."""

from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sala.checkpoint.reader import Checkpoint, TensorInfo
from sala.errors import CheckpointError

SAMPLES = 32  # pieces of a tensor that are read, spread evenly
PIECE = 512  # elements of each
EXPONENTS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}


def check_finite(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a tensor, or a sample of a large one, has values that are infinite or not numbers."""
    for file, tensors in groupby(sorted(checkpoint.tensors.items(), key=_place), key=lambda item: item[1].file):
        if not file.is_file():  # tensors that are computed when they are read
            continue
        with file.open("rb") as handle:  # not the mapped file, whose pages would count as memory in use
            for name, info in tensors:
                if info.dtype in EXPONENTS and not _is_finite(handle, info):
                    raise CheckpointError(f"{name} in {file} holds values that are not finite", "get the file again")


def _place(item: tuple[str, TensorInfo]) -> tuple[Path, int]:
    return item[1].file, item[1].start


def _is_finite(handle: BinaryIO, info: TensorInfo) -> bool:
    word, exponent = EXPONENTS[info.dtype]
    width = np.dtype(word).itemsize
    step = width * max(PIECE, -(-info.nbytes // width // SAMPLES))
    for at in range(info.start, info.end, step):
        handle.seek(at)
        bits = np.frombuffer(handle.read(min(PIECE * width, info.end - at)), word)
        if ((bits & exponent) == exponent).any():
            return False
    return True
