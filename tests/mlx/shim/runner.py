"""`Shim.run` takes a launch as MLX does, and gives arrays back: what the kernel's source computes, on any machine."""

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from sala.backends.mlx.kernels import metal
from sala.backends.mlx.kernels.metal import Launch
from tests.mlx.shim import signature

HERE = Path(__file__).parent
FLAGS = ("-std=c++14", "-O1", "-g0", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
STRICT = ("-Wall", "-Wextra", "-Wvla", "-Wdouble-promotion", "-Wfloat-conversion", "-pedantic", "-Werror")
THREADGROUP_BYTES = 32 << 10  # of every Apple GPU
GUARD = 64  # numbers around every buffer
POISON = 0x7FC1  # NaN in every precision, and no index that anything lies at


_runtimes: list[ctypes.CDLL] = []


class KernelError(Exception):
    pass


class Shim:
    def __init__(self, folder: Path, schedules: Sequence[int] = (0,)) -> None:
        """`schedules`: the orders in which threads run; what comes out must not depend on them."""
        self.folder = folder
        self.schedules = schedules
        self.num_runs = 0
        self._entries: dict[str, ctypes._NamedFuncPointer] = {}
        self._runtime = self._load_runtime()

    def run(self, launch: Launch) -> list[mx.array]:
        self.num_runs += 1
        found = [self._run_once(launch, schedule) for schedule in self.schedules]
        for other in found[1:]:
            for first, second in zip(found[0], other, strict=True):
                if first.tobytes() != second.tobytes():
                    raise KernelError(f"{launch.kernel}: the result depends on the order of the threads")
        outputs = zip(found[0], launch.outputs.values(), strict=True)
        return [_as_mlx(raw, shape, dtype) for raw, (shape, dtype) in outputs]

    def _run_once(self, launch: Launch, schedule: int) -> list[np.ndarray]:
        inputs = {name: _guarded(array) for name, array in launch.inputs.items()}
        outputs = {}
        for name, (shape, dtype) in launch.outputs.items():
            size = int(np.prod(shape)) * dtype.size // 2
            outputs[name] = np.full(size + 2 * GUARD * dtype.size // 2, POISON, np.uint16)
        buffers = self._buffers(launch, inputs, outputs)
        pointers = (ctypes.c_void_p * len(buffers))(*buffers.values())
        grid, group = ((ctypes.c_uint32 * 3)(*sizes) for sizes in (launch.grid, launch.threadgroup))
        if self._entry(launch)(pointers, grid, group, schedule):
            raise KernelError(f"{launch.kernel}: {self._runtime.shim_message().decode()}")
        results = []
        for name, (_, dtype) in launch.outputs.items():
            guard = GUARD * dtype.size // 2
            whole = outputs[name]
            if (whole[:guard] != POISON).any() or (whole[-guard:] != POISON).any():
                raise KernelError(f"{launch.kernel}: wrote outside of {name}")
            results.append(whole[guard:-guard].copy())
        return results

    def _buffers(self, launch: Launch, inputs: dict, outputs: dict) -> dict[str, int]:
        self._kept = []  # while the kernel runs
        addresses = {}
        for name, array in launch.inputs.items():
            addresses[name] = inputs[name].ctypes.data + GUARD * array.dtype.size
            strides = np.cumprod([1, *array.shape[:0:-1]])[::-1]
            for suffix, values, kind in (("_shape", array.shape, np.int32), ("_strides", strides, np.int64)):
                self._kept.append(np.array(values, kind))
                addresses[name + suffix] = self._kept[-1].ctypes.data
        for name, (_, dtype) in launch.outputs.items():
            addresses[name] = outputs[name].ctypes.data + GUARD * dtype.size
        wanted = [name for _, name in signature.parameters(launch) if name not in signature.ATTRIBUTES]
        return {name: addresses[name] for name in wanted}

    def _entry(self, launch: Launch) -> "ctypes._NamedFuncPointer":
        text = translation_unit(launch)
        key = hashlib.sha256(text.replace("constant ", "device ").encode()).hexdigest()[:16]  # the same to C++
        if key not in self._entries:
            library = self._compile(f"{launch.kernel}-{key}", text, (*STRICT,))
            used = ctypes.c_size_t.in_dll(library, "shim_memory_size").value
            if used > THREADGROUP_BYTES:
                raise KernelError(f"{launch.kernel}: {used} bytes of threadgroup memory")
            self._entries[key] = library.shim_entry
        return self._entries[key]

    def _load_runtime(self) -> ctypes.CDLL:
        if _runtimes:  # one for all: its names are global
            return _runtimes[0]
        runtime = self._compile("libruntime", (HERE / "runtime.cpp").read_text(), (), ctypes.RTLD_GLOBAL)
        runtime.shim_message.restype = ctypes.c_char_p
        _runtimes.append(runtime)
        return runtime

    def _compile(self, name: str, text: str, flags: tuple[str, ...], mode: int = ctypes.RTLD_LOCAL) -> ctypes.CDLL:
        source, target = self.folder / f"{name}.cpp", self.folder / f"{name}.so"
        if not target.exists():
            source.write_text(text)
            command = ["g++", *FLAGS, *flags, f"-I{HERE}", "-shared", "-o", str(target), str(source)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise KernelError(f"{name}: {result.stderr[:4000]}")
        return ctypes.CDLL(str(target), mode)


def translation_unit(launch: Launch) -> str:
    """The kernel between MLX's signature and a door for ctypes."""
    found = signature.parameters(launch)
    arguments, index = [], 0
    for declaration, name in found:
        if name in signature.ATTRIBUTES:
            arguments.append(f"place->{name}")
            continue
        kind = declaration.rpartition(" ")[0]
        if kind.endswith("&"):
            arguments.append(f"*static_cast<{kind[:-1]}*>(buffers[{index}])")
        else:
            arguments.append(f"static_cast<{kind}>(buffers[{index}])")
        index += 1
    declarations = ",\n    ".join(declaration for declaration, _ in found)
    lines = [
        '#include "metal.h"',
        "namespace {",
        'int32_t memory_mark __attribute__((section("threadgroup_memory"), used));',
        *signature.template_lines(launch),
        f"static void body(\n    {declarations}) {{",
        f'#line 1 "{launch.kernel}.metal"',
        metal.source(launch.kernel),
        "}",
        "void enter(void* arguments, const shim_place* place) {",
        "  void** buffers = static_cast<void**>(arguments);",
        "  (void)place;",
        f"  body({', '.join(arguments)});",
        "}",
        "}",
        'extern "C" {',
        "extern char __start_threadgroup_memory[], __stop_threadgroup_memory[];",
        "typedef void (*Body)(void*, const shim_place*);",
        "int shim_run(Body, void*, const uint32_t*, const uint32_t*, uint32_t, char*, size_t);",
        "size_t shim_memory_size = size_t(__stop_threadgroup_memory - __start_threadgroup_memory) - 4;",
        "int shim_entry(void** buffers, const uint32_t* grid, const uint32_t* group, uint32_t schedule) {",
        "  return shim_run(enter, buffers, grid, group, schedule, __start_threadgroup_memory, shim_memory_size + 4);",
        "}",
        "}",
    ]
    return "\n".join(lines)


def _guarded(array: mx.array) -> np.ndarray:
    """As 16-bit words, with poison on both sides."""
    words = np.array(array.reshape(-1).view(mx.uint16))
    guard = np.full(GUARD * array.dtype.size // 2, POISON, np.uint16)
    return np.concatenate((guard, words, guard))


def _as_mlx(raw: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(raw).view(dtype).reshape(shape)
