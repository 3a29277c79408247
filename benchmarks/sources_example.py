"""What one answer of smol-sala attended to, by block, for the figure in docs/concepts/sources.md.

    python benchmarks/sources_example.py     writes sources_example.json beside it

A fact stands in a text of 4,096 tokens. The sums of attention are told twice: with all heads alike, and weighed as
`sources.json` of the model says. The text is one of those from which these weights were learnt.
"""

import json
from pathlib import Path

import numpy as np

from sala.lab.eval import sources as work
from sala.lab.eval.documents import read_source
from sala.lab.eval.tasks.case import PromptWriter
from sala.lab.eval.tasks.haystack import Haystack
from sala.lab.eval.tasks.sources import SourceMaker
from sala.llm import LLM

LENGTH, NUMBER, ONES = 4096, 0, 9


def main() -> None:
    with LLM(device="cpu", ctx=LENGTH) as llm:
        writer = PromptWriter.for_model(llm.tokenizer)
        maker = SourceMaker(writer, Haystack(read_source(None).documents, writer.encode), split="train")
        text = maker.make(LENGTH, NUMBER, ONES)
        with work.keeping_heads(llm) as learnt:
            answers = work.ask_all(llm, text)
            one = next(answer for answer in answers if answer.is_right)
    sums = {"alike": np.ones_like(learnt), "learnt": learnt}
    shares = {}
    for name, weights in sums.items():
        by_block = (weights.reshape(-1, 1) * one.heads).sum(0)
        shares[name] = [round(float(share), 5) for share in by_block / by_block.sum()]
    found = {
        "model": llm.path.name,
        "question": one.question.text,
        "answer": one.answer,
        "block_size": one.block_size,
        "facts": sorted({token // one.block_size for fact in one.question.facts for token in fact}),
        "told": [bool(weight) for weight in one.weights(np.ones_like(learnt))],
        "passages": [[round(passage.weight, 3), *passage.tokens, passage.text] for passage in one.passages(learnt)],
        "shares": shares,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
