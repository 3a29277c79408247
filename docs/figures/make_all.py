"""Write every figure and every table of results in the documentation from committed results.

    make figures                                  what is out of date, and what was measured with an older smol-sala,
                                                  or in part
    python -m docs.figures.make_all               figures and tables alone
    python -m docs.figures.make_all --measure     first measure what was measured with older weights, or in part
    python -m docs.figures.make_all --measure ruler_smol.json --minutes 60
                                                  measure this again; repeated, it goes on where it was stopped
    python -m docs.figures.make_all --all         draw all figures anew

`FIGURES` names the files that a figure is drawn from, `MEASURED` in `measured.py` the command behind results that a CPU
measures in reasonable time. Results of GPUs are committed as they were measured.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure as Drawing

from docs.figures import (
    make_figures,
    make_gpu_figures,
    make_halo_figures,
    make_record_figures,
    make_sizing,
    make_sources,
    make_terminal,
    tables,
)
from docs.figures.measured import MEASURED, differences
from docs.figures.provenance import ROOT, digest, mark_svg, read_digest, save_png
from docs.figures.weights import is_of_older_weights

HERE = ROOT / "docs" / "figures"
SCRIPTS = "docs/figures/"
RUN = "models/smol-sala/run/"
WORK = ROOT / "build" / "measuring"  # runs that have not ended


@dataclass(frozen=True)
class Figure:
    """How a picture is made: `make` returns a drawing, the bytes of a PNG or the text of an SVG."""

    make: Callable[[], Drawing | bytes | str]
    files: tuple[str, ...]  # the script, and the results it reads
    values: Callable[[], str] = str  # what it computes itself

    @property
    def source(self) -> str:
        return digest(self.files, self.values())

    def is_current(self, file: Path) -> bool:
        return file.is_file() and read_digest(file) == self.source

    def write(self, file: Path) -> None:
        made = self.make()
        if isinstance(made, str):
            file.write_text(mark_svg(made, self.source), encoding="utf-8")
        else:
            save_png(made, file, self.source)


def svg(draw: Callable[[Path], None]) -> str:
    with tempfile.TemporaryDirectory() as room:
        draw(Path(room) / "picture.svg")
        return (Path(room) / "picture.svg").read_text(encoding="utf-8")


def recorded(name: str, title: str) -> Figure:
    files = (SCRIPTS + "make_record_figures.py", f"benchmarks/{name}")
    return Figure(partial(make_record_figures.draw, name, title), files)


FIGURES: dict[str, Figure] = {
    **{
        name: Figure(partial(svg, draw), (SCRIPTS + "make_figures.py",), partial(svg, draw))
        for name, draw in make_figures.DRAWN.items()
    },
    "gpu.png": Figure(make_gpu_figures.draw, (SCRIPTS + "make_gpu_figures.py", "benchmarks/gpu_model.json")),
    "gpu-against.png": recorded("gpu_against.json", "9B and a dense model on an H200, random weights"),
    "gpu-kernels.png": recorded("gpu_kernels.json", "Kernels on an H200"),
    "halo-layers.png": Figure(
        partial(make_halo_figures.draw, make_halo_figures.layers),
        (SCRIPTS + "make_halo_figures.py", RUN + "layers.json"),
    ),
    "halo-losses.png": Figure(
        partial(make_halo_figures.draw, make_halo_figures.losses),
        (SCRIPTS + "make_halo_figures.py", RUN + "losses.json"),
    ),
    "needle-gpu.png": recorded("needle_gpu.json", "Needles in smol-sala 0.3, on an H200"),
    "needle-smol-sala.png": recorded("needle_smol.json", "Needles in smol-sala 0.4"),
    "ruler-smol-sala.png": recorded("ruler_smol.json", "RULER: smol-sala 0.5.1"),
    "sizing.png": Figure(
        make_sizing.draw_all, (SCRIPTS + "make_sizing.py",), lambda: "\n".join(make_sizing.table_of_sequences())
    ),
    "sources.png": Figure(
        make_sources.draw,
        (SCRIPTS + "make_sources.py", "benchmarks/sources_example.json", "models/smol-sala/sources.json"),
    ),
    "terminal.svg": Figure(make_terminal.record, (SCRIPTS + "make_terminal.py",)),
}
# Pictures of the web page, which make_web.py takes in a browser.
SCREENSHOTS = (
    "web-dark.png", "web-library.png", "web-light.png", "web-narrow.png", "web-settings.png", "web-sources.png",
    "web-sources-narrow.png",
)  # fmt: skip


def measure(names: Sequence[str], minutes: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
    """Measure again; the results of a run that did not end within so many minutes are not taken over yet."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    began = clock()
    for name in names:
        room = WORK / name.removesuffix(".json")
        room.mkdir(parents=True, exist_ok=True)
        for command in MEASURED[name]:
            words = shlex.split(command.format(root=ROOT, name=name))
            print("$", *words, flush=True)
            process = subprocess.Popen(words, cwd=room, env=environment)
            left = None if minutes is None else max(0.0, began + 60 * minutes - clock())
            if not has_ended(process, left):
                print(f"{name} is not complete after {minutes:g} minutes: the same command goes on, in {room}")
                return
        (ROOT / "benchmarks" / name).write_bytes((room / name).read_bytes())
        shutil.rmtree(room)


def has_ended(process: subprocess.Popen[bytes], seconds: float | None) -> bool:
    """Wait for a process, and stop it after so many seconds as by Ctrl-C. Raise CalledProcessError if it fails."""
    try:
        code = process.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        process.send_signal(signal.SIGINT)
        process.wait()
        if isinstance(error, KeyboardInterrupt):
            raise
        return False
    if code:
        raise subprocess.CalledProcessError(code, process.args)
    return True


def to_measure() -> list[str]:
    """Return the names of what was measured with older weights of the embedded model, or with other settings."""
    return [name for name in MEASURED if is_of_older_weights(ROOT / "benchmarks" / name) or differences(name)]


def outdated() -> Iterator[str]:
    """Yield the names of the figures whose script or results have changed since they were drawn."""
    return (name for name, figure in FIGURES.items() if not figure.is_current(HERE / name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", choices=MEASURED, metavar="NAME", help="first measure these results")
    parser.add_argument("--minutes", type=float, help="stop measuring after so many, to go on another time")
    parser.add_argument("--all", action="store_true", help="draw all figures anew")
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure or to_measure(), options.minutes)
    for name in list(FIGURES if options.all else outdated()):
        print(f"drawing {name}", flush=True)
        FIGURES[name].write(HERE / name)
    for page in tables.write_all():
        print(f"wrote the tables of {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
