"""Speed with keys and values in a mapped file (`--kv-home disk`) against the same in memory, with the embedded model.

    python benchmarks/kv_home_cpu.py [--lengths 1024] [--rounds 12]

On one CPU core. Both models are open at a time and take turns; each figure is the median of the ratios of the rounds:
of the time (`wall`), and of the processor time (`cpu`), which other programs on a busy machine change less, but which
does not count waiting for the disk. "evicted" is decoding after the system was told to move the file's pages out of
memory, so that what steps select is read from the disk again. Results go to kv_home_cpu.json beside this file, with the
load of the machine.
"""

import argparse
import ctypes
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path

from sala import LLM, __version__
from sala.models.embedded import find_model

MADV_PAGEOUT = 21  # of Linux
NUM_TOKENS = 8
GREEDY = {"temperature": 0, "ignore_eos": True}


Clocks = tuple[float, float]


def clocks() -> Clocks:
    return time.perf_counter(), time.process_time()


def read(llm: LLM, prompt: list[int]) -> Clocks:
    """Return the seconds, on both clocks, of a prompt that is not cached."""
    llm.reset()
    began = clocks()
    llm.generate(prompt, max_tokens=1, **GREEDY)
    return since(began, clocks())


def decode(llm: LLM, prompt: list[int]) -> tuple[Clocks, list[int]]:
    """Return the seconds, on both clocks, of an answer to a cached prompt after its first token, and the answer."""
    times, tokens = [], []
    for event in llm.stream(prompt, max_tokens=NUM_TOKENS + 1, **GREEDY):
        tokens += [one.token for one in event.sampled]
        times.append(clocks())
    return since(times[0], times[-1]), tokens


def since(began: Clocks, ended: Clocks) -> Clocks:
    return ended[0] - began[0], ended[1] - began[1]


def evict(llm: LLM) -> int:
    """Move the pages of the file out of memory; return the bytes that were told to."""
    libc, told = ctypes.CDLL(None, use_errno=True), 0
    for layer in llm.engine._executor.cache.pages.values():
        for pool in (layer.k, layer.v):
            size = pool.numel() * pool.element_size()
            if libc.madvise(ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(size), MADV_PAGEOUT):
                raise OSError(ctypes.get_errno(), "madvise")
            told += size
    return told


def mapped_bytes() -> int:
    """Return how many bytes of files without a name are in memory."""
    resident, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_ours = line.endswith("(deleted)")
        elif is_ours and line.startswith("Rss:"):
            resident += int(line.split()[1]) << 10
    return resident


def measure(length: int, rounds: int) -> dict[str, object]:
    rng = random.Random(length)
    prompts = [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(2)]
    common = {"device": "cpu", "threads": 1, "ctx": 2 * length, "max_batch": 1}
    found: dict[str, list[Clocks]] = {}
    with LLM(kv_home="device", **common) as memory, LLM(kv_home="disk", **common) as disk:
        homes = {"device": memory, "disk": disk}
        for llm in homes.values():
            llm.generate(prompts[0][:64], max_tokens=4, **GREEDY)  # whatever the first request has to load
        for prompt in prompts:
            for home, llm in homes.items():
                found.setdefault(f"prefill {home}", []).append(read(llm, prompt))
        for _ in range(rounds):
            answers = []
            for home, llm in homes.items():
                seconds, tokens = decode(llm, prompts[-1])
                found.setdefault(f"decode {home}", []).append(seconds)
                answers.append(tokens)
            before = mapped_bytes()
            evict(disk)
            after = mapped_bytes()
            seconds, tokens = decode(disk, prompts[-1])
            found.setdefault("decode evicted", []).append(seconds)
            assert answers == [tokens, tokens]
    pairs = {"prefill": "prefill disk", "decode": "decode disk", "decode, evicted": "decode evicted"}
    ratios = {}
    for name, key in pairs.items():
        resident = found[f"{name.split(',')[0]} device"]
        each = [(a[0] / b[0], a[1] / b[1]) for a, b in zip(resident, found[key], strict=True)]
        ratios[name] = {
            clock: round(statistics.median(one[at] for one in each), 3) for at, clock in enumerate(("wall", "cpu"))
        }
    return {"ratios": ratios, "file_mib_in_memory": [before >> 20, after >> 20]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="1024")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    found = {}
    loads = [os.getloadavg()[0]]
    for length in map(int, given.lengths.split(",")):
        found[str(length)] = measure(length, given.rounds)
        loads.append(os.getloadavg()[0])
        print(length, json.dumps(found[str(length)]), flush=True)
    facts = {
        "model": find_model("smol-sala").name, "sala": __version__,
        "machine": platform.machine(), "cpus": os.cpu_count(),
        "load": [round(load, 1) for load in loads], "rounds": given.rounds, "tokens": NUM_TOKENS, "lengths": found,
    }  # fmt: skip
    Path(__file__).with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
