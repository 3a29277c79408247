"""What keys and values in FP8 and recurrent states in bf16 cost: perplexity of long texts, and facts found in them.

    python benchmarks/kv_quality.py TEXT ... -m MODEL -o benchmarks/kv_quality.json

Every text is read as one context of --tokens, through the engine's pages, and its first --decode-tokens once more token
by token, as decoding does, where a state in bf16 is rounded most often. Needles are those of `sala eval needle`.
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
KINDS = {"auto": {}, "kv fp8": {"kv": "fp8"}, "state bf16": {"state": "bf16"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("-m", "--model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--decode-tokens", type=int, default=2048)
    parser.add_argument("--needle-tokens", type=int, default=8192)
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
    texts = {file.stem: file.read_text(encoding="utf-8") for file in options.texts}
    passes = {"perplexity": (options.tokens, None), "decode_perplexity": (options.decode_tokens, 1)}
    results: dict[str, dict[str, dict[str, float]]] = {what: {name: {} for name in texts} for what in passes}
    found: dict[str, int] = {}
    for kind, extra in KINDS.items():
        ctx = max(options.tokens, options.decode_tokens, options.needle_tokens)
        llm = LLM(options.model, device=options.device, dtype=options.dtype, ctx=ctx, max_batch=2, **extra)
        for what, (num_tokens, chunk) in passes.items():
            for name, text in texts.items():
                ids = llm.tokenizer.encode(text)[:num_tokens]
                perplexity = results[what][name][kind] = llm.perplexity(ids, chunk=chunk)
                print(f"{what} of {name}, {len(ids)} tokens, {kind}: {perplexity:.4f}", flush=True)
        if options.trials:
            found[kind] = count_found(llm, options.needle_tokens, options.trials)
            print(f"{found[kind]} of {options.trials} needles at {options.needle_tokens} tokens, {kind}", flush=True)
        precision = llm.capacity.dtype
    report = {
        "model": llm.path.name,
        "dtype": precision.partition(",")[0],
        "tokens": options.tokens,
        "decode_tokens": options.decode_tokens,
        **results,
        "needles": {"tokens": options.needle_tokens, "trials": options.trials, "found": found},
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")


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
