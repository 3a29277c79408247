"""A quantized model beside its original: perplexity, divergence, agreement and needles. As JSON, a table, a picture."""

import gc
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.batch import whole
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.loader import load_model
from sala.backends.torch.model import SalaModel
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import write_text
from sala.config import SalaConfig
from sala.errors import MissingExtra
from sala.lab.eval.tasks.needle import NeedleCase, NeedleMaker, NeedleSpec, score
from sala.llm import LLM
from sala.text.tokenizer import Tokenizer

WHO = ("original", "quantized")
FILE, PICTURE = "quantization.json", "quantization.png"
NEEDLE_LENGTHS = (1024, 4096)
NUM_ANSWERED = 32  # tokens in which a needle's value must come
_ROWS = 256  # logits at a time
Note = Callable[[str, int, int], None]
Values = dict[str, Any]
Head = Callable[[Tensor], Tensor]  # hidden states [n, hidden] → logits [n, vocab]


@torch.inference_mode()
def measure(
    original: Path,
    quantized: Path,
    tokens: Tensor,
    device: torch.device,
    num_needles: int = 20,
    lengths: Sequence[int] = NEEDLE_LENGTHS,
    note: Note = lambda *_: None,
) -> Values:
    """tokens [S, n] of text that was not calibrated with → what each model makes of it, and how much they differ."""
    paths = dict(zip(WHO, (original, quantized), strict=True))
    hidden, heads = {}, {}
    for at, (who, path) in enumerate(paths.items()):
        note("measuring", at, 4)
        hidden[who], heads[who] = read_hidden(path, tokens, device)
    out: Values = {"tokens": tokens.numel(), **compare(hidden, heads, tokens)}
    del hidden, heads
    out |= {who: out[who] | {"bytes": _size(path)} for who, path in paths.items()}
    for at, (who, path) in enumerate(paths.items()):
        note("measuring", 2 + at, 4)
        out[who]["needle"] = _recall(path, tokens, device, num_needles, lengths)
    note("measuring", 4, 4)
    return out


@torch.inference_mode()
def read_hidden(path: Path, tokens: Tensor, device: torch.device) -> tuple[Tensor, Head]:
    """Hidden states [S, n, hidden], kept on the CPU, and the head that makes logits of them."""
    config = SalaConfig.load(path)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with Checkpoint(path) as checkpoint:
        model = load_model(checkpoint, config, dtype, device)
    rows = [model(whole(row[None].to(device), ops=select_ops())).float().cpu() for row in tokens]
    model.model.layers = nn.ModuleList()  # the head is all that is needed now
    gc.collect()
    return torch.stack(rows), partial(_logits, model, dtype, device)


def _logits(model: SalaModel, dtype: torch.dtype, device: torch.device, hidden: Tensor) -> Tensor:
    return model.logits(hidden.to(device, dtype)).cpu()


@torch.inference_mode()
def compare(hidden: dict[str, Tensor], heads: dict[str, Head], tokens: Tensor) -> Values:
    """Losses of both models, the divergence of the second from the first, and how often their first choices agree."""
    losses = dict.fromkeys(WHO, 0.0)
    divergence, agreed, count = 0.0, 0, 0
    for row in range(len(tokens)):
        for begin in range(0, tokens.shape[1] - 1, _ROWS):
            labels = tokens[row, begin + 1 : begin + 1 + _ROWS]
            rows = slice(begin, begin + len(labels))
            scores = {who: heads[who](hidden[who][row, rows]).log_softmax(-1) for who in WHO}
            for who in WHO:
                losses[who] -= float(scores[who].gather(1, labels[:, None]).double().sum())
            divergence += float(F.kl_div(scores["quantized"], scores["original"], reduction="sum", log_target=True))
            agreed += int((scores["original"].argmax(-1) == scores["quantized"].argmax(-1)).sum())
            count += len(labels)
    out: Values = {who: {"perplexity": math.exp(losses[who] / count)} for who in WHO}
    ratio = out["quantized"]["perplexity"] / out["original"]["perplexity"]
    return {**out, "perplexity_ratio": ratio, "kl": divergence / count, "agreement": agreed / count}


def _recall(
    path: Path, tokens: Tensor, device: torch.device, trials: int, lengths: Sequence[int]
) -> dict[str, float] | None:
    """The share of needles found by length; none without a tokenizer. The haystack is the text measured on."""
    if not trials or not (path / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.load(path)
    encode = partial(tokenizer.encode, bos=False, parse_special=True)
    text = [tokenizer.decode(row) for row in tokens.tolist()]
    maker = NeedleMaker(encode, {"train": [], "test": text}, seed=7)
    out = {}
    with LLM(path, device=str(device), ctx=max(lengths) + 64, max_batch=4, snapshots=0) as llm:
        for length in lengths:
            spec = NeedleSpec(length - NUM_ANSWERED, split="test")
            cases = [maker.make(spec, index) for index in range(trials)]
            out[str(length)] = sum(_is_found(llm, case) for case in cases) / trials
    return out


def _is_found(llm: LLM, case: NeedleCase) -> bool:
    answer = llm.generate(list(case.token_ids), temperature=0, max_tokens=NUM_ANSWERED)
    return score(case.value, answer.text) == 1


def _size(path: Path) -> int:
    with Checkpoint(path) as checkpoint:
        return checkpoint.nbytes


def write_report(results: Values, directory: Path) -> bool:
    """The numbers, and a picture of them, beside the weights → whether there could be a picture."""
    write_text(directory / FILE, json.dumps(results, indent=2) + "\n")
    try:
        plot(results, directory / PICTURE)
    except MissingExtra:
        return False
    return True


def to_rows(results: Values) -> list[tuple[str, str, str, str]]:
    """What is measured, of the original, of the quantized model, and the difference."""
    first, second = (results[who] for who in WHO)
    rows = [
        ("weights", _mib(first["bytes"]), _mib(second["bytes"]), f"× {second['bytes'] / first['bytes']:.3f}"),
        (
            "perplexity",
            f"{first['perplexity']:.3f}",
            f"{second['perplexity']:.3f}",
            f"{100 * (results['perplexity_ratio'] - 1):+.2f} %",
        ),
        ("KL to the original, nats", "0", f"{results['kl']:.4f}", ""),
        ("same first choice", "100 %", f"{100 * results['agreement']:.1f} %", ""),
    ]
    for length, share in (first["needle"] or {}).items():
        found = second["needle"][length]
        rows.append(
            (f"needles found, {int(length):,} tokens", f"{share:.0%}", f"{found:.0%}", f"{100 * (found - share):+.0f}")
        )
    return rows


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def plot(results: Values, file: Path) -> None:
    """Size, perplexity and recall of both models, side by side."""
    from sala.lab.bench.plots import need_matplotlib

    pyplot = need_matplotlib()
    panels: dict[str, list[float]] = {
        "weights, MiB": [results[who]["bytes"] / 2**20 for who in WHO],
        "perplexity": [results[who]["perplexity"] for who in WHO],
    }
    for length in results[WHO[0]]["needle"] or {}:
        panels[f"needles at {int(length):,}, %"] = [100 * results[who]["needle"][length] for who in WHO]
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(2.6 * len(panels), 3.2), layout="constrained", squeeze=False
    )
    for axes, (title, values) in zip(grid[0], panels.items(), strict=True):
        bars = axes.bar(WHO, values, color=("#6e7781", "#4a90c2"), width=0.6)
        axes.bar_label(bars, [f"{value:,.4g}" for value in values], fontsize=9)
        axes.set_ylim(0, 1.15 * max(*values, 1e-9))
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"KL {results['kl']:.4f} nats, same first choice {results['agreement']:.1%}", fontsize=10)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
