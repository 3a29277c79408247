"""Compiles kernels for GPUs that are not here: python -m tests.kernels.aot 90 module:function … prints JSON.

Each function is a list maker: it returns `Build`s. A process of its own, as the interpreter replaces the compiler. It
fails if a kernel writes to registers that products of tensor cores still use (`sass.py`).
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kernels.sass import hazards


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
        "hazards": hazards(sass),
    }


def run(capability: int, *names: str) -> subprocess.CompletedProcess[str]:
    """Compile in a process without the interpreter; a test then looks at its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__, str(capability), *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def main() -> None:
    capability, *names = sys.argv[1:]
    results = []
    for name in names:
        module, _, function = name.partition(":")
        builds = getattr(importlib.import_module(module), function)()
        results += [compile_for(int(capability), build) for build in builds]
    racy = [(result["kernel"], result["hazards"]) for result in results if result["hazards"]]
    assert not racy, f"registers are written under products in flight: {racy}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
