"""Everyday questions under several settings of sampling: how the defaults in generation_config.json were chosen.

    python models/smol-sala/sampling.py MODEL -o run/sampling.json [--questions everyday] [--every 2] [--settings JSON]

Settings are compared by development.jsonl and confirmed by everyday.jsonl, which nothing was steered by. An answer that
does not end within 250 tokens, or loops, is not correct. Results are appended to those in the file.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from measure import GREEDY, everyday
from rules import read_questions

from sala.llm import LLM

HERE = Path(__file__).parent
SETTINGS = [{"temperature": 0, "repetition_penalty": penalty} for penalty in (1.0, 1.1, 1.2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--questions", default="development", choices=["development", "everyday"])
    parser.add_argument("--every", type=int, default=1, help="ask only every so many-th question")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help="JSON list of sampling parameters")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    questions = read_questions(HERE / f"{options.questions}.jsonl")[:: options.every]
    rows = json.loads(options.output.read_text()) if options.output.is_file() else []
    with LLM(options.model, ctx=2048, dtype="float32") as llm:
        for setting in options.settings:
            found = everyday({"student": llm}, questions, sampling=replace(GREEDY, **setting))
            rows.append({"questions": options.questions, "asked": len(questions), **setting, **found["student"]})
            options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
