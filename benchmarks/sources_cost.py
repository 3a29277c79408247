"""What gathering sources costs: decoding with sources against decoding without, in turn, in one run.

    python benchmarks/sources_cost.py                    writes sources_cost.json beside it
    python benchmarks/sources_cost.py --before DIRECTORY

DIRECTORY is a checkout of a commit that has no sources (`git worktree add DIRECTORY ecbbb58`): decoding without sources
is then compared with it as well. Prompts are cached, so that only decoding is timed. `ms` is wall time per token by the
engine's own clock, `cpu_ms` what the process computed per token, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__)
LENGTHS = (1024, 4608)  # below and above the dense length of smol-sala
NUM_TOKENS = 48
KINDS = ("before", "off", "on")


def work(model: str, threads: int, device: str) -> None:
    """In a process of its own: decode for each line on stdin, and write what it took."""
    from sala.llm import LLM
    from sala.protocol import Sampling

    llm = LLM(model, device=device, ctx=max(LENGTHS) + 512, threads=threads)

    def decode(length: int, count: int, has_sources: bool) -> tuple[float, float]:
        more = {"return_sources": True} if has_sources else {}
        sampling = Sampling(temperature=0, max_tokens=count, ignore_eos=True, **more)
        began = time.process_time()
        timings = llm.generate([at * 7 % 20000 + 100 for at in range(length)], sampling).timings
        return timings.predicted_s / max(1, timings.predicted_n), time.process_time() - began

    for line in sys.stdin:
        asked = json.loads(line)
        length, has_sources = asked["length"], asked["kind"] == "on"
        _, least = decode(length, 1, has_sources)  # what a request costs besides its tokens
        seconds, cpu = decode(length, NUM_TOKENS + 1, has_sources)
        print(json.dumps({"ms": 1000 * seconds, "cpu_ms": 1000 * (cpu - least) / NUM_TOKENS}), flush=True)


def start(root: Path, options: argparse.Namespace, model: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, str(HERE), "--worker", str(model)]
    command += ["--threads", str(options.threads), "--device", options.device]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(options.threads)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def ask(worker: "subprocess.Popen[str]", length: int, kind: str) -> dict[str, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps({"length": length, "kind": kind}) + "\n")
    worker.stdin.flush()
    found: dict[str, float] = json.loads(worker.stdout.readline())
    return found


def summary(times: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians, and the medians of the ratios of neighbours in time."""
    found: dict[str, Any] = {}
    for kind, known in times.items():
        found[kind] = {name: round(statistics.median(one[name] for one in known), 3) for name in ("ms", "cpu_ms")}
    for name, above, below in (("on_to_off", "on", "off"), ("off_to_before", "off", "before")):
        if below in times:
            found[name] = {}
            for clock in ("ms", "cpu_ms"):
                ratios = [a[clock] / b[clock] for a, b in zip(times[above], times[below], strict=True)]
                found[name][clock] = [round(one, 4) for one in statistics.quantiles(ratios, n=4)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of a commit without sources")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=HERE.with_suffix(".json"))
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.threads, options.device)
        return
    sys.path.insert(0, str(HERE.parents[1]))
    from sala.models.embedded import embedded_model

    model = embedded_model()
    now = start(HERE.parents[1], options, model)
    workers = {"off": now, "on": now}
    if options.before is not None:
        workers["before"] = start(options.before, options, model)
    kinds = [kind for kind in KINDS if kind in workers]
    found = {"model": model.name, "threads": options.threads, "device": options.device, "tokens": NUM_TOKENS}
    record: dict[str, Any] = {**found, "rounds": options.rounds, "lengths": {}}
    for length in LENGTHS:
        for kind in kinds:
            ask(workers[kind], length, kind)  # reads the prompt
        times: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for number in range(options.rounds):
            for kind in kinds if number % 2 else kinds[::-1]:
                times[kind].append(ask(workers[kind], length, kind))
        record["lengths"][str(length)] = summary(times)
        print(length, record["lengths"][str(length)], flush=True)
    record["load"] = round(os.getloadavg()[0], 1)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    for worker in {id(one): one for one in workers.values()}.values():
        worker.communicate()


if __name__ == "__main__":
    main()
