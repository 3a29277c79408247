"""Decode speed of the embedded model against its teacher in transformers, in one run on the CPU.

    python benchmarks/smol_cpu.py TEACHER_DIR --transformers PYTHON

TEACHER_DIR is the dense SmolLM2 as a Hugging Face directory (`sala.checkpoint.gguf.write_dense`); PYTHON is
an interpreter that has transformers, if this one has not. Both decode greedily after prompts of the same lengths, in
turn, several times; the median of each counts. Results go to smol_cpu.json beside this file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LENGTHS = (64, 1024, 4096)
NUM_TOKENS = 48


def run_teacher(directory: str, lengths: list[int], threads: int) -> None:
    """In a process of its own: one line of JSON per length asked for on stdin."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for line in sys.stdin:
        length = int(line)
        ids = torch.arange(length)[None] * 7 % 20000 + 100
        with torch.inference_mode():
            out = model(ids, use_cache=True, logits_to_keep=1)
            token, past = out.logits[:, -1:].argmax(-1), out.past_key_values
            began = time.perf_counter()
            for _ in range(NUM_TOKENS):
                out = model(token, past_key_values=past, use_cache=True)
                token, past = out.logits[:, -1:].argmax(-1), out.past_key_values
            seconds = time.perf_counter() - began
        print(json.dumps(NUM_TOKENS / seconds), flush=True)


def ours(llm, length: int) -> float:
    from sala.protocol import Sampling

    ids = [i * 7 % 20000 + 100 for i in range(length)]
    sampling = Sampling(temperature=0, max_tokens=NUM_TOKENS + 1, ignore_eos=True)
    timings = llm.generate(ids, sampling).timings
    return timings.predicted_n / timings.predicted_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher")
    parser.add_argument("--transformers", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--as-teacher", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_teacher:
        run_teacher(options.teacher, list(LENGTHS), options.threads)
        return
    import torch

    from sala.backends.torch.fast.dispatch import describe_cpu_linears
    from sala.llm import LLM

    torch.set_num_threads(options.threads)
    llm = LLM(ctx=8192)
    command = [options.transformers, __file__, options.teacher, "--as-teacher", "--threads", str(options.threads)]
    results: dict[str, dict[str, float]] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        for length in LENGTHS:
            pairs = []
            for _ in range(options.rounds):
                peer.stdin.write(f"{length}\n")
                peer.stdin.flush()
                theirs = json.loads(peer.stdout.readline())
                pairs.append((ours(llm, length), theirs))
            mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            results[str(length)] = {"smol_sala": mine, "teacher_transformers": other, "ratio": mine / other}
            print(f"{length:6} tokens before: {mine:6.1f} against {other:6.1f} tok/s, {mine / other:.2f}x", flush=True)
        peer.stdin.close()
    report = {
        "unit": "tokens per second, greedy",
        "threads": options.threads,
        "torch": torch.__version__,
        "linear": describe_cpu_linears(),
        "lengths": results,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
