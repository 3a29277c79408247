"""Where the library of C++ kernels comes from: the cache, a temporary directory, or the package."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sala.backends.torch.kernels import native

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Find the library anew, compiled without optimization, which is quick."""
    native._find.cache_clear()
    native.load.cache_clear()
    monkeypatch.setattr(native, "_FLAGS", ("-std=c++17", "-O0", "-shared", "-fPIC", "-w"))
    yield
    native._find.cache_clear()
    native.load.cache_clear()


def set_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda _: str(path))


def hide_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    set_cache(tmp_path / "file" / "cache", monkeypatch)
    assert native.load() is not None
    assert native.describe().startswith(Path(str(shutil.which("g++") or shutil.which("c++"))).name)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_compilers(monkeypatch)
    assert native.load() is None
    assert native.describe() == "no C++ compiler"


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.cpp").write_text("this is not C++")
    set_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(native, "SOURCES", (tmp_path / "bad.cpp",))
    assert native.load() is None
    assert native.describe().startswith("the C++ compiler fails")


def test_prebuilt_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PREBUILT", tmp_path)
    monkeypatch.setattr(native, "_VARIANTS", {"": ("-fopenmp",)})
    built = native.build_all()
    assert built
    assert all(file.is_file() for file in built)
    hide_compilers(monkeypatch)
    kernel = native.load()
    assert kernel is not None
    assert native.describe().startswith("prebuilt for ")
    assert kernel.num_lanes in native._INSTRUCTIONS


MULTIPLY = """
#include "affine.h"
#include <cstdio>
#include <vector>
extern "C" void affine_linear(const Weight* w, const float* x, float* y, int64_t rows);
extern "C" int num_lanes();
int main() {
    const int64_t out = 32, in = 128, group = 64, rows = 3;
    uint32_t state = 1;
    auto next = [&] { return state = state * 1664525u + 1013904223u, state >> 16; };
    printf("%d\\n", num_lanes());
    for (int bits : {4, 8}) {
        std::vector<uint8_t> codes(out * in * bits / 8);
        std::vector<float> scales(out * in / group), biases(out * in / group), x(rows * in), y(rows * out);
        for (auto& one : codes) one = next();
        for (auto* values : {&scales, &biases, &x}) for (auto& one : *values) one = int(next() % 2001 - 1000) / 1000.0f;
        Weight weight{codes.data(), scales.data(), biases.data(), nullptr, out, in, bits, int(group), FP32, 1};
        affine_linear(&weight, x.data(), y.data(), rows);
        for (float one : y) printf("%.9g\\n", one);
    }
}
"""


def test_the_library_for_arm64(tmp_path: Path) -> None:
    """Cross-compiled and emulated, it multiplies as that of this machine does."""
    cross = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if cross is None or emulator is None:
        pytest.skip("needs a cross compiler (g++-aarch64-linux-gnu) and an emulator (qemu-user)")
    (tmp_path / "main.cpp").write_text(MULTIPLY)
    source = next(file for file in native.SOURCES if file.name == "affine.cpp")
    found = {}
    for name, compiler, runner in (("own", str(shutil.which("g++")), []), ("arm64", cross, [emulator])):
        command = [compiler, "-std=c++17", "-O1", "-static", "-w", "-I", str(source.parent), "-o", str(tmp_path / name)]
        subprocess.run([*command, str(tmp_path / "main.cpp"), str(source)], check=True)
        out = subprocess.run([*runner, str(tmp_path / name)], check=True, capture_output=True, text=True).stdout.split()
        found[name] = [float(word) for word in out]
    assert found["arm64"][0] == 4  # NEON
    assert len(found["arm64"]) == 1 + 2 * 3 * 32
    assert found["arm64"][1:] == pytest.approx(found["own"][1:], rel=1e-5, abs=1e-4)
