"""Prompt tokens per second of CPU time with the products of MKL and of oneDNN, in one run, in turn.

    OMP_NUM_THREADS=1 python benchmarks/prefill_cpu.py -o benchmarks/prefill_cpu.json

CPU time, not wall time, so that other processes matter little. The median of several turns counts. On processors where
MKL is as fast, the engine does not choose oneDNN; here both are measured anyway.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from sala.backends.torch.kernels import native
from sala.lab.eval.tasks.prose import write_documents
from sala.llm import LLM
from sala.models.embedded import find_model
from sala.protocol import Sampling

LENGTHS = (2048, 8192)
TURNS = 3
GREEDY = Sampling(temperature=0, max_tokens=1)


def measure(llm: LLM, ids: list[int], has_onednn: bool) -> float:
    native.slows_mkl = lambda: has_onednn
    began = time.process_time()
    llm.generate(ids, GREEDY)
    return len(ids) / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    chosen = native.slows_mkl()
    with LLM("smol-sala", device="cpu", snapshots=0) as llm:
        text = llm.tokenizer.encode(" ".join(write_documents(100)))
        rows = []
        for length in LENGTHS:
            speeds: dict[str, list[float]] = {"mkl": [], "onednn": []}
            for _ in range(TURNS):
                for name, found in speeds.items():
                    found.append(measure(llm, text[:length], name == "onednn"))
            medians = {name: round(statistics.median(found), 1) for name, found in speeds.items()}
            rows.append({"length": length, **medians, "ratio": round(medians["onednn"] / medians["mkl"], 2)})
            print(rows[-1], flush=True)
    about = {"model": find_model("smol-sala").name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    facts = {"unit": "prompt tokens per second of CPU time", **about, "engine chooses onednn": chosen, "lengths": rows}
    asked.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
