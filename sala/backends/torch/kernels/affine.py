"""The C++ kernel of quantized linears: compiled by the machine's own compiler at first use, kept in the user's cache.

No torch headers, so that compiling takes three seconds; tensors cross the border as plain pointers. Where there is no
compiler, `load` gives None.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("affine.cpp")
SCALE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-w")
_SPECIAL = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())  # the best that the compiler knows


class Weight(ctypes.Structure):
    """A matrix as affine.cpp reads it; whoever makes one keeps its tensors alive."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("num_out", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class Kernel:
    """`linear(weight, x, y, rows)` and `expand(weight, begin, end, y)`, all but the numbers being addresses."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        self.linear = library.affine_linear
        self.linear.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self.linear.restype = None
        self.expand = library.affine_expand
        self.expand.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self.expand.restype = None


@functools.cache
def load() -> Kernel | None:
    """The kernel of this machine, compiled if need be; None where that is impossible."""
    found = _attempt()
    return None if found is None else Kernel(found[0])


@functools.cache
def describe() -> str:
    """The compiler and its flags, or that there is none."""
    found = _attempt()
    return "no C++ compiler that works" if found is None else found[1]


@functools.cache
def _attempt() -> tuple[Path, str] | None:
    compilers = [path for name in _COMPILERS if (path := shutil.which(name))]
    for compiler in compilers:
        for special in _SPECIAL:
            flags = [*_FLAGS, *special]
            file = _build(compiler, flags)
            if file is not None:
                return file, " ".join([Path(compiler).name, *special])
    return None


def _build(compiler: str, flags: list[str]) -> Path | None:
    """The library of this source, compiler, flags and processor; None if it cannot be made."""
    key = "\n".join([SOURCE.read_text(encoding="utf-8"), compiler, *flags, _processor()])
    file = _cache_directory() / f"affine-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if file.is_file():
        return file
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as place:
            draft = Path(place) / file.name
            command = [compiler, *flags, "-o", str(draft), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            ctypes.CDLL(str(draft))  # a library that does not load is none
            os.replace(draft, file)  # noqa: PTH105 - two processes may build at once; the last one wins
    except (OSError, subprocess.SubprocessError):
        return None
    return file


def _cache_directory() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("sala")) / "kernels"


def _processor() -> str:
    """What `-march=native` depends on: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = [line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))]
        return "\n".join(sorted(set(wanted)))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
