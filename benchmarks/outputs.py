"""What the GPU scripts share: where their results go, and what each result says about the run that measured it."""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import TextIOBase
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
VARIABLE = "BENCH_COMMIT"


def make_parser(doc: str | None, file: Path, parts: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser that all scripts have: parts, where results go, and the commit that is measured."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; by default all")
    parser.add_argument("--output", type=Path, default=file, metavar=f"FILE{file.suffix}", help="default: %(default)s")
    parser.add_argument("--commit", help=f"what is measured, where there is no git; or set {VARIABLE}")
    return parser


def parse(parser: argparse.ArgumentParser, parts: Sequence[str]) -> argparse.Namespace:
    given = parser.parse_args()
    if unknown := sorted(set(given.parts) - set(parts)):
        parser.error(f"{unknown[0]} is not a part; use {', '.join(parts)}")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    return given


def stamp(commit: str | None = None) -> dict[str, str]:
    """Return the commit that is measured, "unknown" where neither the caller nor git says, and the date."""
    return {"commit": commit or os.environ.get(VARIABLE) or _commit() or "unknown", "date": time.strftime("%Y-%m-%d")}


def _commit() -> str | None:
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def load(file: Path) -> dict[str, Any]:
    """Return the results of earlier runs, which are kept part by part."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def save(file: Path, results: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(results, indent=2) + "\n")


def run_parts(
    parts: Mapping[str, Callable[[], Any]], names: Sequence[str], after: Callable[[str, bool], None] | None = None
) -> int:
    """Run parts, or all; one that fails does not keep the others from being measured. Return the exit status.

    `after` is called with the name of each and whether it has ended well.
    """
    failed = []
    for name in names or parts:
        print(f"\n== {name}", flush=True)
        began = time.perf_counter()
        try:
            parts[name]()
            _settle()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        if after is not None:
            after(name, name not in failed)
        print(f"  ({name}: {time.perf_counter() - began:.1f} s)", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _settle() -> None:
    """Wait for the GPU, whose errors come late, and free what the part held."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


class _Both(TextIOBase):
    """Writes to two streams; at once, so that a run that is ended leaves what it has printed."""

    def __init__(self, *streams: Any) -> None:
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            stream.write(text)
            stream.flush()
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            stream.flush()


@contextmanager
def printed_to(given: argparse.Namespace, default: Path) -> Iterator[None]:
    """Also write what is printed to the output: of some parts alone only if they are sent elsewhere."""
    if given.parts and given.output == default:
        yield
        return
    with given.output.open("w") as file, redirect_stdout(_Both(sys.stdout, file)):
        print(" ".join(f"{name} {value}" for name, value in stamp(given.commit).items()), flush=True)
        yield


def measure_text(
    doc: str | None, script: str, parts: Sequence[Callable[[], Any]], conclude: Callable[[], Any] = lambda: None
) -> int:
    """Do the work of a script that prints its results: its arguments, its parts, its output. Return the exit status."""
    file, by_name = Path(script).with_suffix(".txt"), {part.__name__: part for part in parts}
    given = parse(make_parser(doc, file, list(by_name)), list(by_name))
    torch.manual_seed(0)
    with printed_to(given, file):
        print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
        status = run_parts(by_name, given.parts)
        conclude()
    return status
