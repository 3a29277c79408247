"""A quantized model beside its original: perplexity, KL divergence, agreement and needles found."""

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.batch import whole
from sala.backends.torch.fast.dispatch import linear_kernels, select_ops
from sala.backends.torch.loader import load_model
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.lab.eval.runner import find_needles
from sala.lab.eval.tasks.needle import NeedleMaker
from sala.lab.report.kinds import comparison, pair
from sala.lab.report.record import Record
from sala.llm import LLM
from sala.options import Options
from sala.text.tokenizer import Tokenizer

WHO = ("original", "quantized")
NAME = "quantization"  # of the files in the directory of the quantized model
NEEDLE_LENGTHS = (1024, 4096)
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
    options: Options | None = None,
) -> Values:
    """Return what each model makes of held-out tokens [S, n], and how much the two differ."""
    loading = options or Options(device=str(device))
    paths = dict(zip(WHO, (original, quantized), strict=True))
    total = 2 * (len(tokens) + num_needles * len(lengths))
    steps = count(1)

    def step() -> None:
        note("measuring", next(steps), total)

    hidden, heads = {}, {}
    for who, path in paths.items():
        hidden[who], heads[who] = read_hidden(path, tokens, device, step, loading.kernels)
    out: Values = {"tokens": tokens.numel(), **compare(hidden, heads, tokens)}
    del hidden, heads
    for who, path in paths.items():
        with Checkpoint(path) as checkpoint:
            out[who]["bytes"] = checkpoint.nbytes
        out[who]["needle"] = _recall(path, tokens, loading, num_needles, lengths, step)
    note("measuring", total, total)
    return out


@torch.inference_mode()
def read_hidden(
    path: Path,
    tokens: Tensor,
    device: torch.device,
    step: Callable[[], None] = lambda: None,
    kernels: str = "auto",
) -> tuple[Tensor, Head]:
    """Return hidden states [S, n, hidden] on the CPU, and the head that turns them into logits."""
    config = SalaConfig.load(path)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with Checkpoint(path) as checkpoint:
        model = load_model(checkpoint, config, dtype, device, linear_kernels(device, dtype, kernels))
    rows = []
    for row in tokens:
        rows.append(model(whole(row[None].to(device), ops=select_ops(kernels))).float().cpu())
        step()
    model.model.layers = nn.ModuleList()  # only the head is still needed
    gc.collect()
    return torch.stack(rows), lambda hidden: model.logits(hidden.to(device, dtype)).cpu()


@torch.inference_mode()
def compare(hidden: dict[str, Tensor], heads: dict[str, Head], tokens: Tensor) -> Values:
    """Return the perplexity of both models, the KL divergence of the second, and how often their argmax agrees."""
    losses = dict.fromkeys(WHO, 0.0)
    divergence, agreed, num_tokens = 0.0, 0, 0
    for row in range(len(tokens)):
        for begin in range(0, tokens.shape[1] - 1, _ROWS):
            labels = tokens[row, begin + 1 : begin + 1 + _ROWS]
            rows = slice(begin, begin + len(labels))
            scores = {who: heads[who](hidden[who][row, rows]).log_softmax(-1) for who in WHO}
            for who in WHO:
                losses[who] -= float(scores[who].gather(1, labels[:, None]).double().sum())
            divergence += float(F.kl_div(scores["quantized"], scores["original"], reduction="sum", log_target=True))
            agreed += int((scores["original"].argmax(-1) == scores["quantized"].argmax(-1)).sum())
            num_tokens += len(labels)
    out: Values = {who: {"perplexity": math.exp(losses[who] / num_tokens)} for who in WHO}
    ratio = out["quantized"]["perplexity"] / out["original"]["perplexity"]
    return {**out, "perplexity_ratio": ratio, "kl": divergence / num_tokens, "agreement": agreed / num_tokens}


def _recall(
    path: Path, tokens: Tensor, options: Options, trials: int, lengths: Sequence[int], step: Callable[[], None]
) -> dict[str, float] | None:
    """Return the share of needles found by length, None without a tokenizer. The haystack is the measured text."""
    if not trials or not (path / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.load(path)
    encode = partial(tokenizer.encode, bos=False, parse_special=True)
    text = [tokenizer.decode(row) for row in tokens.tolist()]
    maker = NeedleMaker(encode, {"train": [], "test": text}, seed=7)
    with LLM(path, options=options, ctx=max(lengths) + 64, max_batch=4, snapshots=options.snapshots or 0) as llm:
        return {str(length): find_needles(llm, maker, length, trials, step) for length in lengths}


def to_record(results: Values, model: str, settings: Values) -> Record:
    """Return the results of `measure` as a comparison."""
    first, second = (results[who] for who in WHO)
    rows = [
        pair("weights", first["bytes"] / 2**20, second["bytes"] / 2**20, unit="MiB"),
        pair("perplexity", first["perplexity"], second["perplexity"]),
        pair("KL to the original, nats", 0.0, results["kl"]),
        pair("same first choice", 1.0, results["agreement"], unit="share"),
    ]
    for length, share in (first["needle"] or {}).items():
        rows.append(pair("needles found", share, second["needle"][length], int(length), "share"))
    return comparison(model, *WHO, settings | {"tokens": results.get("tokens")}, rows)
