"""Compiles kernels for GPUs that are not here: python -m tests.kernels.aot 90 module:function … prints JSON.

Each function is a list maker: it returns `Build`s. A process of its own, as the interpreter replaces the compiler.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Build:
    """A kernel, the types of its arguments ("*bf16", "i32", "fp32"), its constants and its launch options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def compile_for(capability: int, build: Build) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory, from ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=build.kernel, signature=build.signature, constexprs=build.constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=build.options)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", str(file)], check=True, capture_output=True, text=True)
        sass = subprocess.run([tool, "--dump-sass", str(file)], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found is not None, text.stdout
    return {
        "kernel": build.kernel.__name__,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "shared": compiled.metadata.shared,
        "has_wgmma": "HGMMA" in sass,
        "unwaited": count_unwaited(sass),
    }


def count_unwaited(sass: str) -> int:
    """Loops in which products of tensor cores may still run when the next round begins."""
    steps = [(int(at, 16), step) for at, step in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", sass)]
    found = 0
    for end, step in steps:
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", step)
        if target is None or int(target[1], 16) >= end:
            continue
        inside = [one for at, one in steps if int(target[1], 16) <= at <= end]
        marks = [one.split(".")[0] for one in inside if "HGMMA" in one or "WARPGROUP.DEPBAR" in one]
        found += bool(marks) and marks[-1] != "WARPGROUP"
    return found


def main() -> None:
    capability, *names = sys.argv[1:]
    results = []
    for name in names:
        module, _, function = name.partition(":")
        builds = getattr(importlib.import_module(module), function)()
        results += [compile_for(int(capability), build) for build in builds]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
