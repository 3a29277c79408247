"""Metal is not C++: what one compiler takes and the other does not, looked for in the text of the kernels."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from sala.backends.mlx.kernels import KERNELS, metal
from tests.mlx.shim import signature
from tests.mlx.shim.generated import generated_source
from tests.mlx.test_metal_kernels import SOURCES, launches

SHIM = Path(__file__).parent / "shim"
FORBIDDEN = {
    "a type that GPUs of Apple do not have": r"\b(double|long double|__int128)\b",
    "a number that is a double": r"(?<![\w.])\d+\.\d*(e[+-]?\d+)?(?![\w.])",
    "the standard library": r"\bstd::|#include",
    "memory from a heap": r"\b(new|delete|malloc)\b",
    "an exception": r"\b(throw|try|catch|noexcept)\b",
    "a jump": r"\b(goto|setjmp)\b",
    "something that lives on": r"\b(static|thread_local|extern|volatile)\b",
    "a function of its own, which could call itself": r"\)\s*->|\[[&=]?\]\s*\(|\b(void|template)\b",
    "a pointer or a reference, which would need an address space": r"\b(float|int|T|bool|size_t)\s*[*&]\s*\w+\s*[=;]"
    r"|\bauto\b|->|(?<!&)&(?![&=\s])",
    "a word of Metal as a name": r"\b(int|float|bool|T|size_t)\s+(thread|device|constant|kernel|half|vertex)\b",
    "an unqualified function, which could be another one": r"(?<![\w:])(exp|log|min|max|sqrt)\(",
}


def code_of(kernel: str) -> str:
    return re.sub(r"//.*", "", metal.source(kernel))


@pytest.mark.parametrize("kernel", SOURCES)
def test_source_has_nothing_that_metal_lacks(kernel: str) -> None:
    found = {what: match[0] for what, pattern in FORBIDDEN.items() if (match := re.search(pattern, code_of(kernel)))}
    assert not found


WRONG = {
    "double x = 0.0f;": "a type that GPUs of Apple do not have",
    "float x = 1.5;": "a number that is a double",
    "float x = 1.5e3;": "a number that is a double",
    "std::max(a, b);": "the standard library",
    "float x = exp(1.0f);": "an unqualified function, which could be another one",
    "auto f = [&](int x) { return x; };": "a function of its own, which could call itself",
    "auto p = q + 3;": "a pointer or a reference, which would need an address space",
    "float* p = 0;": "a pointer or a reference, which would need an address space",
    "f(&x);": "a pointer or a reference, which would need an address space",
    "int thread = 0;": "a word of Metal as a name",
    "static int x = 0;": "something that lives on",
}


@pytest.mark.parametrize("code", WRONG)
def test_rules_find_what_they_are_for(code: str) -> None:
    assert re.search(FORBIDDEN[WRONG[code]], code)


@pytest.mark.parametrize("kernel", SOURCES)
def test_threadgroup_memory_is_declared_at_the_top(kernel: str) -> None:
    """Metal wants it in the scope of the kernel itself, in arrays of a size that the compiler knows."""
    depth = 0
    for line in code_of(kernel).splitlines():
        if line.strip().startswith("threadgroup "):
            assert depth == 0, line
            size = re.fullmatch(r"threadgroup (float|int|T) \w+\[([A-Z0-9 *]+)\];", line.strip())
            assert size, line
        depth += line.count("{") - line.count("}")
    assert depth == 0


@pytest.mark.parametrize("kernel", SOURCES)
def test_only_known_attributes(kernel: str) -> None:
    """A word that MLX does not know would be an undeclared name."""
    used = set(re.findall(r"\b\w+_(?:in|per)_(?:grid|threadgroup|simdgroup)\b", code_of(kernel)))
    assert used <= set(signature.ATTRIBUTES)


def test_every_source_has_an_owner() -> None:
    files = {path.stem for path in Path(metal.__file__).parent.glob("*.metal")}
    assert files == set(SOURCES)


@pytest.mark.skipif("SALA_TEST_CLANG" not in os.environ, reason="SALA_TEST_CLANG: the command of a clang++")
def test_address_spaces(tmp_path: Path) -> None:
    """Metal's compiler is clang: with address spaces of its own it refuses what Metal refuses to mix."""
    texts = {generated_source(launch) for name in KERNELS for launch in launches(name)}
    plain = [re.sub(r"\[\[host_name.*?\]\] \[\[kernel\]\] ", "", text) for text in sorted(texts)]
    (tmp_path / "all.cpp").write_text('#include "metal.h"\n' + "\n".join(plain))
    flags = [
        "-std=c++14",
        "-DSHIM_ADDRESS_SPACES",
        "-Wall",
        "-Wvla",
        "-Wno-unknown-attributes",
        "-Wno-unused",
        "-Werror",
    ]
    command = [*shlex.split(os.environ["SALA_TEST_CLANG"]), *flags, f"-I{SHIM}", "-c", "all.cpp", "-o", "all.o"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]
