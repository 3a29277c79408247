"""fp32 products of a prompt's rows on the CPU: oneDNN against MKL, torch's default, and prefill with each, in one run.

    python benchmarks/products_cpu.py     writes products_cpu.json beside it

Chunks of 256 rows and the matrices of smol-sala and of the released model; then 2,048 tokens of prompt through
smol-sala. One thread; its CPU time counts, which other processes hardly change. The least of a few times counts.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from sala import LLM
from sala.backends.torch.kernels import native

MATRICES = {"smol-sala, up": (1536, 576), "smol-sala, down": (576, 1536), "released, q": (4096, 4096)}
ROWS, ROUNDS, TOKENS = 256, 5, 2048


def least(work: Callable[[], object], clock: Callable[[], float]) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        began = clock()
        work()
        times.append(clock() - began)
    return min(times)


@torch.inference_mode()
def products() -> dict[str, dict[str, float]]:
    found = {}
    for name, (num_out, num_in) in MATRICES.items():
        x, weight = torch.randn(ROWS, num_in), torch.randn(num_out, num_in)
        onednn = least(
            lambda x=x, w=weight: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), time.thread_time
        )
        mkl = least(lambda x=x, w=weight: F.linear(x, w), time.thread_time)
        found[name] = {"onednn_ms": onednn * 1e3, "mkl_ms": mkl * 1e3, "ratio": onednn / mkl}
    return found


def prefill(llm: LLM) -> dict[str, float]:
    chosen, seconds = native.has_slow_mkl, {}
    for name, is_slow in (("onednn", True), ("mkl", False)):
        native.has_slow_mkl = lambda is_slow=is_slow: is_slow  # type: ignore[assignment]
        prompts = torch.randint(5, 40_000, (ROUNDS + 1, TOKENS)).tolist()  # no two share a prefix
        seconds[name] = least(lambda p=prompts: llm.generate(p.pop(), max_tokens=1), time.process_time)
    native.has_slow_mkl = chosen
    return {f"{name}_s": value for name, value in seconds.items()} | {"ratio": seconds["onednn"] / seconds["mkl"]}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    llm = LLM("smol-sala", ctx=4096, threads=1)
    results = {
        "model": llm.path.name,
        "processor": processor.partition(":")[2].strip(),
        "is_used": native.has_slow_mkl(),
        "torch": torch.__version__,
        "rows": ROWS,
        "products": products(),
        "prefill of 2,048 tokens": prefill(llm),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
