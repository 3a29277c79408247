"""The C++ kernels of the CPU: compiled by the machine's own compiler at first use and kept in the user's cache.

They need no torch headers, so that compiling takes seconds; tensors are passed as plain pointers. If the cache cannot
be written, they are compiled into a temporary directory of the process. Where there is no compiler, libraries that came
with the package are used (`make wheel` builds them); where there are none either, `load` returns None.
"""

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HEADERS, SOURCES = (
    tuple(Path(__file__).with_name(name) for name in names)
    for names in (("vectors.h", "affine.h"), ("affine.cpp", "decode.cpp", "attend.cpp"))
)
_INSTRUCTIONS = {16: "AVX-512", 8: "AVX2", 4: "NEON" if platform.machine() in ("aarch64", "arm64") else "SSE"}
LANES = 16  # widths must be multiples of this: a vector of 16 floats
ELEMENT_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # as affine.h numbers them: scales, plain weights, pages
_PRODUCTS = {  # flags in /proc/cpuinfo of processors that multiply matrices in that precision
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-w")
_VARIANTS = {"": ("-fopenmp",), "-one-thread": ()}  # of prebuilt libraries
_SPECIAL = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())  # tried in this order until one works
PREBUILT = Path(__file__).with_name("prebuilt")
_TARGETS = {  # of libraries in the package, best first: flags in /proc/cpuinfo that they need, by machine and -march
    "x86_64": {"x86-64-v4": {"avx512f", "avx512bw", "avx512vl"}, "x86-64-v3": {"avx2", "fma", "bmi2"}},
    "aarch64": {"armv8-a": {"asimd"}},
}


class WeightStruct(ctypes.Structure):
    """The struct of affine.h; its owner must keep the tensors alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "biases", "addend")),
        *((name, ctypes.c_int64) for name in ("num_out", "num_in")),
        *((name, ctypes.c_int32) for name in ("bits", "group_size", "scale_type", "num_threads")),
    )


class LayerStruct(ctypes.Structure):
    """This and the following structs are those of decode.cpp."""

    _fields_ = (
        *((name, WeightStruct) for name in ("q", "k", "v", "o", "gate", "mlp_gate", "mlp_up", "mlp_down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "o_norm", "decay")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
    )


class ModelStruct(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        ("norm", ctypes.c_void_p),
        ("hidden", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("eps", "residual_scale")),
        *((name, ctypes.c_int64) for name in ("num_pages", "block_size", "kernel_size", "kernel_stride")),
        *((name, ctypes.c_int64) for name in ("init_blocks", "window_blocks", "tie_ulps", "page_type")),
    )


class CacheStruct(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("states", "k", "v", "k1", "k2"))


class SpanStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("start", "length", "slot", "sparse_from", "num_selected", "num_drafts")),
        ("pages", ctypes.c_void_p),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        ("spans", ctypes.POINTER(SpanStruct)),
        ("caches", ctypes.POINTER(CacheStruct)),
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("lightning_cos", "lightning_sin", "sparse_cos", "sparse_sin")),
        *((name, ctypes.c_void_p) for name in ("growth", "kept_k", "kept_v")),
        *((name, ctypes.c_void_p) for name in ("gathered_rows", "gathered_shares", "gathered_blocks")),
        *((name, ctypes.c_int64) for name in ("num_gathered", "num_sparse")),
        *((name, ctypes.c_void_p) for name in ("feature_layers", "features")),
        ("num_features", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("num_spans", "num_tokens", "num_layers", "num_threads")),
    )


class AttentionStruct(ctypes.Structure):
    """The struct of attend.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "table", "selected", "positions", "out")),
        *((name, ctypes.c_int64) for name in ("num_queries", "num_heads", "num_groups", "dim")),
        *((name, ctypes.c_int64) for name in ("num_pages", "block_size", "num_blocks", "num_selected")),
        *((name, ctypes.c_int64) for name in ("page_type", "num_threads")),
        ("scale", ctypes.c_float),
    )


class Kernel:
    """The functions of the library; tensors and structs are passed by address."""

    def __init__(self, file: Path) -> None:
        library, address, number = ctypes.CDLL(str(file)), ctypes.c_void_p, ctypes.c_int64
        self.linear = _function(library.affine_linear, address, address, address, number)  # weight, x, y, rows
        self.expand = _function(library.affine_expand, address, number, number, address)  # weight, begin, end, y
        self.step = _function(library.decode_step, address, address)  # model, step
        self.attend = _function(library.sparse_attend, address)  # attention
        self.num_lanes: int = library.num_lanes()
        # state, k, v, decay, tokens, heads, dim
        self.fold = _function(library.lightning_fold, *(address,) * 4, *(number,) * 3)


def element_type(dtype: Any) -> int:
    """Return the code that the C++ sources have for a torch dtype of scales, plain weights or pages."""
    return ELEMENT_TYPES[str(dtype).removeprefix("torch.")]


def _function(function: Any, *arguments: type) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


@functools.cache
def load() -> Kernel | None:
    """Return the kernels of this machine, compiled if necessary; None where that is impossible."""
    file = _find()[0]
    return None if file is None else Kernel(file)


def describe() -> str:
    """Return in words how the kernels were compiled, or why there are none."""
    return _find()[1]


def instructions() -> str | None:
    """Return the instruction set for which the kernels were compiled; None where there are none."""
    kernel = load()
    return None if kernel is None else _INSTRUCTIONS[kernel.num_lanes]


@functools.cache
def multiplies_in(dtype: str) -> bool:
    """Return whether the processor has instructions for products in this 16-bit precision."""
    return not _PRODUCTS[dtype].isdisjoint(_processor().split())


@functools.cache
def has_slow_mkl() -> bool:
    """Return whether MKL leaves the processor's AVX-512 unused: on AMD's it multiplies fp32 matrices with AVX2."""
    words = _processor().split()
    return "AMD" in words and "avx512f" in words


@functools.cache
def _find() -> tuple[Path | None, str]:
    """Return the library, if there is one, and where it comes from or why there is none."""
    compilers = [path for name in _COMPILERS if (path := shutil.which(name))]
    reason = "no C++ compiler" if not compilers else "the C++ compiler fails"
    for directory in _directories() if compilers else ():
        for compiler in compilers:
            for special in _SPECIAL:
                try:
                    file = _build(directory, compiler, [*_FLAGS, *special])
                except subprocess.CalledProcessError as error:
                    reason = f"the C++ compiler fails: {(error.stderr.splitlines() or [''])[-1][:200]}"
                except (OSError, subprocess.SubprocessError) as error:
                    reason = f"the C++ kernels cannot be compiled: {error}"
                else:
                    return file, " ".join([Path(compiler).name, *special])
    return _find_prebuilt() or (None, reason)


def _directories() -> Iterator[Path]:
    """Yield where libraries are kept: the user's cache, then a directory that is removed with the process."""
    import platformdirs

    yield Path(platformdirs.user_cache_dir("sala")) / "kernels"
    place = tempfile.TemporaryDirectory(prefix="sala-kernels-")
    atexit.register(place.cleanup)
    yield Path(place.name)


def _build(directory: Path, compiler: str, flags: list[str]) -> Path:
    """Return the library for this compiler, flags and processor, built if necessary."""
    texts = [file.read_text(encoding="utf-8") for file in (*HEADERS, *SOURCES)]
    key = "\n".join([*texts, compiler, *flags, _processor()])
    file = directory / f"sala-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if not file.is_file():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        compile_library(file, compiler, flags)
    return file


def compile_library(file: Path, compiler: str, flags: Sequence[str], can_load: bool = True) -> None:
    """Compile the sources. Raises OSError and subprocess.SubprocessError."""
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        draft = Path(place) / file.name
        command = [compiler, *flags, "-o", str(draft), *map(str, SOURCES)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        if can_load:
            ctypes.CDLL(str(draft))  # fails here rather than at first use
        os.replace(draft, file)  # noqa: PTH105 - two processes may build at once; the last one wins


def _find_prebuilt() -> tuple[Path, str] | None:
    """Return the best library of the package that this processor can run."""
    flags = set(_processor().split())
    for march, needed in _TARGETS.get(platform.machine(), {}).items():
        for file in sorted(PREBUILT.glob(f"{march}*.so"), key=lambda file: len(file.name)) if needed <= flags else ():
            try:
                ctypes.CDLL(str(file))
            except OSError:  # built for another system, or without the OpenMP that it needs
                continue
            return file, f"prebuilt for {file.stem}"
    return None


def build_all() -> list[Path]:
    """Build the libraries of the package, with and without OpenMP, for each machine that there is a compiler for."""
    PREBUILT.mkdir(exist_ok=True)
    built = []
    for machine, targets in _TARGETS.items():
        compiler = shutil.which("g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++")
        names = [(march, f"{march}{end}", more) for march in targets for end, more in _VARIANTS.items()]
        for march, name, more in names if compiler else ():
            flags = [*_FLAGS, f"-march={march}", "-static-libstdc++", "-static-libgcc", *more]
            built.append(PREBUILT / f"{name}.so")
            compile_library(built[-1], str(compiler), flags, can_load=False)
    return built


def _processor() -> str:
    """Return what `-march=native` depends on: several machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = [line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))]
        return "\n".join(sorted(set(wanted)))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
