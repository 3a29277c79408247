"""Write requirements.txt and requirements-cuda.txt beside this file: all that the server needs, with hashes.

    python examples/deploy/make_requirements.py        after a change of constraints.txt; takes minutes

For CPython 3.11 to 3.14 on Linux (glibc; x86-64, ARM64) and macOS (ARM64), with the versions of constraints.txt. pip
resolves and names the hashes, as the index it is configured for states them; only metadata is downloaded. What torch
needs on NVIDIA GPUs is in a file of its own, because its builds for CPUs come without it.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXTRAS = ("server", "documents")
BUILD = ("hatchling",)  # builds the package itself
PYTHONS = ("3.12", "3.11", "3.13", "3.14")  # the first one decides which packages there are
GLIBC = 40
PLATFORMS = {
    f"linux {machine}": [
        *(f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)),
        *(f"manylinux{year}_{machine}" for year in (2014, 2010, 1)),
    ]
    for machine in ("x86_64", "aarch64")
} | {"macos arm64": ["macosx_15_0_arm64"]}
CUDA = re.compile(r"(nvidia|cuda)-.*|triton")
HEAD = """# Written by make_requirements.py. {purpose}
#   pip install --require-hashes --only-binary=:all: -r {file}
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def report(wanted: list[str], python: str, platforms: list[str], *flags: str) -> list[dict[str, Any]]:
    """Return what pip would install; raise CalledProcessError if it cannot be resolved."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--disable-pip-version-check", "--use-feature=fast-deps", "--only-binary=:all:", *flags]
        command += ["--target", directory, "--python-version", python, "--report", str(file), *wanted]
        subprocess.run([*command, *(f"--platform={name}" for name in platforms)], check=True)
        return list(json.loads(file.read_text())["install"])


def collect() -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the versions and the hashes of every package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [item for extra in EXTRAS for item in project["optional-dependencies"][extra]]
    wanted = [*project["dependencies"], *extras, *BUILD]
    first = report(wanted, PYTHONS[0], PLATFORMS["linux x86_64"], f"--constraint={ROOT / 'constraints.txt'}")
    versions = {normal(item["metadata"]["name"]): item["metadata"]["version"] for item in first}
    hashes: dict[str, set[str]] = defaultdict(set)
    for system, platforms in PLATFORMS.items():
        names = [name for name in versions if system.startswith("linux") or not CUDA.fullmatch(name)]
        for python in PYTHONS:
            print(f"{system}, Python {python}", file=sys.stderr)
            pins = [f"{name}=={versions[name]}" for name in names]
            for item in report(pins, python, platforms, "--no-deps"):
                digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
                hashes[normal(item["metadata"]["name"])].add(digest)
    return versions, hashes


def lines(versions: dict[str, str], hashes: dict[str, set[str]], is_cuda: bool) -> Iterator[str]:
    for name in sorted(versions):
        if bool(CUDA.fullmatch(name)) == is_cuda:
            yield " \\\n    ".join(
                [f"{name}=={versions[name]}", *(f"--hash=sha256:{one}" for one in sorted(hashes[name]))]
            )


def main() -> None:
    versions, hashes = collect()
    for file, purpose, is_cuda in (
        ("requirements.txt", "The server and what reads documents; CPython 3.11 to 3.14, Linux and macOS.", False),
        ("requirements-cuda.txt", "What torch needs on NVIDIA GPUs, beside requirements.txt; Linux only.", True),
    ):
        text = "\n".join(lines(versions, hashes, is_cuda))
        (HERE / file).write_text(HEAD.format(purpose=purpose, file=file) + text + "\n")


if __name__ == "__main__":
    main()
