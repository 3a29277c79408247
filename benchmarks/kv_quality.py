"""What keys and values in FP8 cost: perplexity of long texts, and facts found in them, beside those kept as computed.

    python benchmarks/kv_quality.py TEXT ... -m MODEL -o benchmarks/kv_quality.json

Every text is read as one context of --tokens, through the engine's pages; needles are those of `sala eval needle`.
"""

import argparse
import json
from functools import partial
from pathlib import Path

from sala.lab.eval.tasks.case import score_value as score
from sala.lab.eval.tasks.needle import NeedleMaker, NeedleSpec
from sala.lab.eval.tasks.prose import write_documents
from sala.llm import LLM

ROOM = 48  # tokens for an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("-m", "--model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--needle-tokens", type=int, default=8192)
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
    perplexities: dict[str, dict[str, float]] = {file.stem: {} for file in options.texts}
    found: dict[str, int] = {}
    for kind in ("auto", "fp8"):
        ctx = max(options.tokens, options.needle_tokens)
        llm = LLM(options.model, device=options.device, dtype=options.dtype, kv=kind, ctx=ctx, max_batch=2)
        for file in options.texts:
            ids = llm.tokenizer.encode(file.read_text(encoding="utf-8"))[: options.tokens]
            perplexities[file.stem][kind] = llm.perplexity(ids)
            print(f"{file.stem}, {len(ids)} tokens, kv {kind}: {perplexities[file.stem][kind]:.4f}", flush=True)
        if options.trials:
            found[kind] = count_found(llm, options.needle_tokens, options.trials)
            print(f"{found[kind]} of {options.trials} needles at {options.needle_tokens} tokens, kv {kind}", flush=True)
        precision = llm.capacity.dtype
    results = {
        "model": llm.path.name,
        "dtype": precision.partition(",")[0],
        "tokens": options.tokens,
        "perplexity": {name: {**pair, "ratio": pair["fp8"] / pair["auto"]} for name, pair in perplexities.items()},
        "needles": {"tokens": options.needle_tokens, "trials": options.trials, "found": found},
    }
    options.output.write_text(json.dumps(results, indent=2) + "\n")


def count_found(llm: LLM, num_tokens: int, trials: int) -> int:
    """How many facts, at depths all over the text, are in the greedy answers."""
    encode = partial(llm.tokenizer.encode, bos=False, parse_special=True)
    maker = NeedleMaker(encode, {"train": [], "test": write_documents()}, seed=3)
    specs = [NeedleSpec(num_tokens - ROOM, depth=(index + 0.5) / trials) for index in range(trials)]
    cases = [maker.make(spec, index) for index, spec in enumerate(specs)]
    answers = llm.generate([list(case.token_ids) for case in cases], temperature=0, max_tokens=ROOM)
    return sum(score(case.value, answer.text) == 1 for case, answer in zip(cases, answers, strict=True))


if __name__ == "__main__":
    main()
