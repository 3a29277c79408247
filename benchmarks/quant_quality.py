"""What quantization costs, by method, groups and kind of matrix: how the defaults of `sala quantize` were found.

    python benchmarks/quant_quality.py MODEL TEXT -o benchmarks/quant_quality.json --calibration FILE

TEXT is measured on, and must have nothing in common with FILE. The entries of `DEFAULTS` are what the command does
with one flag or none; for them, facts found in texts of two lengths are counted too. Every entry quantizes the model as
the command does, a quantized one from its expanded weights, and compares it with the original on TEXT: perplexity, the
divergence (KL) from the original, and how often the first choices agree. What is in the output already is not measured
again.
`fp8 products` is what `--prefill fp8` does to a prompt, by its definition: it needs triton, but no GPU.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sala.backends.torch.batch import whole
from sala.backends.torch.loader import load_model
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.lab.quantize.check import check_cases, facts_found
from sala.lab.quantize.pipeline import quantize_model
from sala.lab.quantize.plan import QuantizeSettings
from sala.lab.quantize.report import Head, compare, read_hidden
from sala.lab.quantize.texts import CalibrationText, FileText, SampledText, cut
from sala.lab.train.recall import RecallCase
from sala.models.embedded import find_model

CPU = torch.device("cpu")
FP8 = "fp8 products"
DEFAULTS = {
    "8 bits": QuantizeSettings(8),
    "4 bits, --method rtn": QuantizeSettings(4, method="rtn"),
    "4 bits": QuantizeSettings(4, method="gptq"),
    "4 bits, --method awq": QuantizeSettings(4, method="awq"),
    "4 bits, --group-size 32": QuantizeSettings(4, 32, "gptq"),
}
Reading = tuple[Tensor, Head]  # hidden states, and what makes logits of them
Facts = list[dict]  # found in texts of each length
ALONE = ("*=whole",)  # then one kind of matrix in 4 bits
KINDS = (
    "v_proj", "down_proj", "o_proj", "up_proj", "gate_proj", "q_proj", "k_proj", "z_proj", "o_gate", "embed_tokens",
)  # fmt: skip


def entries(num_layers: int, tokens: int) -> dict[str, tuple[QuantizeSettings, bool]]:
    """Name → settings, and whether the calibration is the model's own text."""
    last = f"layers.{num_layers - 1}.*"
    narrow = ("v_proj=4", f"{last}=4")  # without what the defaults keep inside of the layers
    out = {name: (replace(settings, num_tokens=tokens), False) for name, settings in DEFAULTS.items()}
    out |= {
        "8 bits, rtn": (QuantizeSettings(8), False),
        "4 bits, rtn": (QuantizeSettings(4, method="rtn", keep=narrow), False),
        "4 bits, gptq": (QuantizeSettings(4, method="gptq", keep=narrow, num_tokens=tokens), False),
        "4 bits, awq": (QuantizeSettings(4, method="awq", keep=narrow, num_tokens=tokens), False),
        "4 bits, gptq, own text": (QuantizeSettings(4, method="gptq", keep=narrow, num_tokens=tokens), True),
        "4 bits, gptq, groups of 32": (QuantizeSettings(4, 32, "gptq", narrow, tokens), False),
        "4 bits, gptq, groups of 32, v_proj and last layer in 8": (QuantizeSettings(4, 32, "gptq", (), tokens), False),
        "4 bits, rtn, v_proj and last layer in 8": (QuantizeSettings(4, method="rtn"), False),
    }
    for kind in KINDS:
        out[f"only {kind} in 4 bits, rtn"] = (QuantizeSettings(4, method="rtn", keep=(*ALONE, f"{kind}=4")), False)
    for name, pattern in (("first layer", "layers.0.*"), ("last layer", last)):
        out[f"only the {name} in 4 bits, rtn"] = (
            QuantizeSettings(4, method="rtn", keep=(*ALONE, f"{pattern}=4")),
            False,
        )
    for name, keep in {
        "v_proj in 8": (*narrow, "v_proj"),
        "v_proj, down_proj in 8": (*narrow, "v_proj", "down_proj"),
        "v_proj and last layer in 8": (),
    }.items():
        out[f"4 bits, gptq, {name}"] = (QuantizeSettings(4, method="gptq", keep=keep, num_tokens=tokens), False)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768, help="to calibrate with")
    parser.add_argument("--measured", type=int, default=16384, help="tokens to measure on")
    parser.add_argument("--texts", type=int, default=2, help="of each length, with eight facts each")
    parser.add_argument("--only", default="", help="entries whose name this regular expression finds")
    options = parser.parse_args()
    path = find_model(options.model)
    tokens = cut(FileText(options.text, path).tokens[: options.measured], 1024)
    results: dict = json.loads(options.output.read_text()) if options.output.exists() else {}
    results["settings"] = {
        "model": path.name,
        "measured": tokens.numel(),
        "text": options.text.name,
        "calibrated": options.tokens,
        "calibration": options.calibration.name,
    }
    cases = check_cases(path, options.texts)
    if "recall" not in results:
        results["recall"] = [asdict(one) for one in facts_found(path, cases, CPU)]
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    original = read_hidden(path, tokens, CPU)
    num_layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    wanted: dict[str, Callable[[], tuple[Reading, float, Facts]]] = {FP8: lambda: (read_by_fp8(path, tokens), 0.0, [])}
    for name, (settings, is_own) in entries(num_layers, options.tokens).items():
        text = SampledText(path, "cpu") if is_own else FileText(options.calibration, path)
        own_cases = cases if name in DEFAULTS else []
        wanted[name] = partial(read_quantized, path, settings, text, tokens, own_cases)
    for name, read in wanted.items():
        if name in results or not re.search(options.only, name):
            continue
        (hidden, head), size, facts = read()
        pair = {"original": original[0], "quantized": hidden}, {"original": original[1], "quantized": head}
        found = compare(*pair, tokens)
        results["perplexity"] = found["original"]["perplexity"]
        results[name] = {
            "perplexity": found["quantized"]["perplexity"],
            "ratio": found["perplexity_ratio"],
            "kl": found["kl"],
            "agreement": found["agreement"],
        }
        if size:
            results[name]["mib"] = round(size / 2**20, 1)
        if facts:
            results[name]["recall"] = facts
        print(f"{name:45}", *(f"{key} {value}" for key, value in results[name].items()), flush=True)
        options.output.write_text(json.dumps(results, indent=2) + "\n")


def read_quantized(
    path: Path, settings: QuantizeSettings, text: CalibrationText, tokens: Tensor, cases: list[RecallCase]
) -> tuple[Reading, float, Facts]:
    """Hidden states and head of the model as `sala quantize` makes it, its bytes, and the facts that it finds."""
    with tempfile.TemporaryDirectory() as room:
        quantize_model(path, Path(room) / "out", settings, text, CPU, may_requantize=True)
        with Checkpoint(Path(room) / "out") as checkpoint:
            size = checkpoint.nbytes
        facts = [asdict(one) for one in facts_found(Path(room) / "out", cases, CPU)]
        return read_hidden(Path(room) / "out", tokens, CPU), size, facts


@torch.inference_mode()
def read_by_fp8(path: Path, tokens: Tensor) -> Reading:
    """As `read_hidden`, with the rows and matrices of all layers but the last in e4m3."""
    from sala.backends.torch.kernels.fp8 import from_weight

    def rounded(x: Tensor) -> Tensor:
        rows = from_weight(x.flatten(0, -2))
        return (rows.codes.float() * rows.scales).view_as(x)

    def round_input(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (rounded(given[0]),)

    with Checkpoint(path) as checkpoint:
        model = load_model(checkpoint, SalaConfig.load(path), torch.float32, CPU)
    for layer in list(model.model.layers)[:-1]:
        for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            linear.weight = nn.Parameter(rounded(linear.weight.detach()), requires_grad=False)
            linear.register_forward_pre_hook(round_input)
    return torch.stack([model(whole(row[None])) for row in tokens]), model.logits


if __name__ == "__main__":
    main()
