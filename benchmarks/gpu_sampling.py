"""Sampling on a GPU: microseconds of a captured graph by rows and settings, and how many tokens differ from sampler.py.

    PYTHONPATH=. python benchmarks/gpu_sampling.py     writes benchmarks/gpu_sampling.txt, or --output FILE

The budget is 40 us: a decode step of the 9B model takes 4.8 ms for one sequence and 6.1 for 32.
"""

import sys
from dataclasses import replace
from functools import partial

import torch
import triton

from benchmarks.outputs import measure_text
from sala.backends.torch import sampler
from sala.backends.torch.kernels import sampling
from sala.protocol import Row, Sampling

VOCAB, DEVICE = 73448, torch.device("cuda")
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature 0.7": Sampling(temperature=0.7),
    "top_p 0.95, top_k 50": Sampling(temperature=0.7, top_p=0.95, top_k=50),
    "min_p 0.05": Sampling(temperature=1.0, min_p=0.05),
    "penalties": Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2),
}
SHARPNESS = {"peaked": 4.0, "flat": 1.0}  # standard deviation of the logits


def measure(num_rows: int, settings: Sampling, scale: float) -> tuple[float, int]:
    """Return the median time of a replay in microseconds and the number of tokens that differ."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = (torch.randn(num_rows, VOCAB, generator=generator) * scale).bfloat16().to(DEVICE)
    rows = [
        Row((1,), 7, (), slot, 0, replace(settings, seed=slot), history=tuple(range(9)), prompt_len=5)
        for slot in range(num_rows)
    ]
    buffers = sampling.SamplingBuffers(num_rows, VOCAB, DEVICE)
    for row in rows:
        buffers.load(row)
    masks = torch.zeros(num_rows, -(-VOCAB // 8), dtype=torch.uint8, device=DEVICE)
    out = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    parameters = torch.tensor([sampling.parameters_of(row) for row in rows], device=DEVICE)
    call = partial(sampling.sample_rows, logits, parameters, buffers, masks, out)
    call()
    expected = [found.token for found in sampler.sample_all(logits.float(), [(row, 0) for row in rows])]
    num_different = sum(got != token for got, token in zip(out.tolist(), expected, strict=True))
    return 1000 * float(triton.testing.do_bench_cudagraph(call, rep=50, return_mode="median")), num_different


def settings() -> None:
    """All settings, over peaked and flat logits."""
    for sharpness, scale in SHARPNESS.items():
        for name, settings in SETTINGS.items():
            found = [(rows, *measure(rows, settings, scale)) for rows in (1, 8, 32, 128)]
            times = ", ".join(f"{rows} rows {time:.1f} us ({different} differ)" for rows, time, different in found)
            print(f"{sharpness}, {name}: {times}", flush=True)


def main() -> int:
    return measure_text(__doc__, __file__, [settings])


if __name__ == "__main__":
    sys.exit(main())
