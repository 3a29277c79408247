"""How many blocks do neighbouring tokens choose together? In the embedded model, reading a long text on the CPU.

    python benchmarks/smol_neighbours.py TEXT_FILE

A kernel that serves several neighbours at once reads the blocks that any of them chose. Results go to
smol_neighbours.json beside this file: for groups of neighbours, the blocks of all as a multiple of the blocks of one.
"""

import json
import sys
from pathlib import Path

import numpy as np

from sala.backends.torch.model import SparseMixer
from sala.llm import LLM
from sala.models.embedded import find_model

NUM_TOKENS, FROM = 10_240, 6_144  # the choices of tokens from here on count
GROUPS = (2, 4, 8)


def main() -> None:
    model = find_model("smol-sala")
    llm = LLM(model, device="cpu")
    ids = llm.tokenizer.encode(Path(sys.argv[1]).read_text())[:NUM_TOKENS]
    selected: list[np.ndarray] = []
    choose = SparseMixer.select

    def heard(self, span, q, positions, pages):
        blocks = choose(self, span, q, positions, pages)
        if int(positions[0]) >= FROM:
            selected.append(blocks.numpy())
        return blocks

    SparseMixer.select = heard
    llm.generate(ids, max_tokens=1, temperature=0)
    shares = {group: [share for rows in selected for share in together(rows, group)] for group in GROUPS}
    found = {group: round(float(np.mean(values)), 3) for group, values in shares.items()}
    text = Path(sys.argv[1]).name
    out = {"model": model.name, "text": text, "tokens": len(ids), "from": FROM, "together_over_alone": found}
    Path(__file__).with_suffix(".json").write_text(json.dumps(out, indent=2) + "\n")
    print(out)


def together(rows: np.ndarray, group: int) -> list[float]:
    """rows [n, kv heads, blocks], -1 where there is none."""
    out = []
    for first in range(0, len(rows) - group + 1, group):
        for head in range(rows.shape[1]):
            sets = [{block for block in row[head].tolist() if block >= 0} for row in rows[first : first + group]]
            out.append(len(set().union(*sets)) / np.mean([len(one) for one in sets]))
    return out


if __name__ == "__main__":
    main()
