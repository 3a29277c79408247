"""Seconds to the first token of a second turn, by where the first turn is: device, host memory, disk, or gone.

    python benchmarks/tiers_cpu.py [--lengths 512,2048] [--conversations 4] [--shape tiny] [--modes host,disk]

On one CPU core, with the embedded model or with random weights of a shape of `sala estimate`. Conversations take turns;
where the device has two snapshots only, each turn pushes one conversation down and brings another one up. `share` is
the time of all second turns by that of all first ones, which read the conversations. Results go to tiers_cpu.json
beside this file, or to the file that `--output` names, with the load of the machine.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from sala import LLM
from sala.checkpoint.random import SHAPES, write_random

MODES = {
    "device": {},
    "host": {"snapshots": 2},  # and memory for all
    "disk": {"snapshots": 2},  # and a directory
    "read again": {"snapshots": 0},
}
GREEDY = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}


def turns(llm: LLM, talks: list[list[int]]) -> tuple[list[float], int]:
    """Take a turn of every conversation; return the seconds of each, and the tokens that were cached."""
    seconds, cached = [], 0
    for talk in talks:
        began = time.perf_counter()
        answer = llm.generate(talk, **GREEDY)
        seconds.append(time.perf_counter() - began)
        cached += answer.usage.cached_tokens
        talk += [*answer.token_ids, 5]
    return seconds, cached


def measure(model: Path | None, mode: str, length: int, count: int, directory: str) -> dict[str, float]:
    rng = random.Random(length)
    common = {"device": "cpu", "threads": 1, "max_batch": 1, "ctx": length + 64}
    with LLM(model, snapshots=0, **common) as llm:
        vocab, nbytes = llm.config.vocab_size, llm.capacity.copy_bytes(length)
    below = {"host": {"cache_ram": 2 * count * nbytes}, "disk": {"cache_dir": directory}}.get(mode, {})
    with LLM(model, **common, **MODES[mode], **below) as llm:
        talks = [[rng.randrange(vocab // 50, vocab // 2) for _ in range(length)] for _ in range(count)]
        first, _ = turns(llm, talks)
        if llm.tiers is not None and llm.tiers.disk is not None:
            llm.tiers.disk.flush()
        second, cached = turns(llm, talks)
        hit = llm.service.status().prefix.hit
    return {
        "seconds": round(statistics.median(second), 4),
        "first_turn_s": round(statistics.median(first), 4),
        "share": round(sum(second) / sum(first), 4),
        "cached_tokens": cached,
        "from_host": hit["host"],
        "from_disk": hit["disk"],
        "copy_bytes": nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, not the embedded model")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as place:
        model = None if given.shape is None else Path(place) / "model"
        if model is not None:
            write_random(model, SHAPES[given.shape])
        for length in map(int, given.lengths.split(",")):
            found[str(length)] = {}
            for mode in given.modes.split(","):
                with tempfile.TemporaryDirectory() as directory:
                    found[str(length)][mode] = measure(model, mode, length, given.conversations, directory)
                loads.append(os.getloadavg()[0])
                print(length, mode, found[str(length)][mode], flush=True)
    name = "smol-sala" if given.shape is None else f"random, {given.shape}"
    facts = {"model": name, "device": "cpu", "conversations": given.conversations}
    facts |= {"load": [round(load, 1) for load in loads], "lengths": found}
    given.output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
