"""Tables of what was measured on an H200."""

from collections.abc import Iterable
from typing import Any

from docs.figures.results import RESULTS, lines, read
from sala.lab.report.record import Record
from sala.options.schema import length_label


def against() -> list[str]:
    """Ours and a dense model on an H200, by length."""
    head = ["tokens", "first token", "dense", "ratio", "decode", "dense", "ratio"]
    rows = []
    for row in Record.load(RESULTS / "gpu_against.json").results:
        ratio = row["decode_ratio"]
        rows.append([
            length_label(row["num_tokens"]),
            f"{row['first_token_s']:#.3g} s",
            f"{row['dense_first_token_s']:#.3g} s",
            f"{row['first_token_ratio']:.2f}x",
            f"{row['decode_per_second']:.0f} tok/s",
            f"{row['dense_decode_per_second']:.2g} tok/s",
            f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x",
        ])  # fmt: skip
    return lines(head, rows)


def gpu_prefill() -> list[str]:
    """Seconds to read a prompt on an H200, ours and the dense peer's."""
    found = read("gpu_model.json")
    rows = []
    for length, entry in {**found["prefill"], **found["long"]}.items():
        peer = (
            [f"{entry['peer_seconds']:#.3g} s", f"{entry['ratio']:.2f}x"] if "ratio" in entry else ["does not fit", ""]
        )
        seconds = f"{entry['seconds']:#.3g} s" if entry["seconds"] >= 1 else f"{entry['seconds']:.2f} s"
        rows.append([_length(length), seconds, *peer, f"{entry['peak_gb']:.0f} GB"])
    return lines(["tokens", "this project", "Qwen3-8B (transformers, SDPA)", "ratio", "peak memory"], rows)


def gpu_decode() -> list[str]:
    """Decode steps of one sequence on an H200, by context."""
    found = {name.partition(" x ")[2]: entry for name, entry in _decode().items() if name.startswith("1 x ")}
    first = next(iter(found.values()))["tokens_per_second"]
    rows = [
        [_length(length), f"{entry['ms']:.2f} ms", f"{entry['tokens_per_second']:.0f}",
         f"{entry['tokens_per_second'] / first:.2f}"]
        for length, entry in found.items()
    ]  # fmt: skip
    return lines(["context", "step", "tok/s", "against 4K"], rows)


def gpu_batches() -> list[str]:
    """Decode steps of several sequences on an H200."""
    rows = []
    for name, entry in _decode().items():
        batch, _, length = name.partition(" x ")
        if batch != "1":
            rows.append([f"{batch} x {_length(length)}", f"{entry['ms']:.2f} ms", f"{entry['tokens_per_second']:,.0f}"])
    return lines(["sequences x context", "step", "tok/s"], rows)


def _decode() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = read("gpu_model.json")["decode"]
    return found


def gpu_bits() -> list[str]:
    """Decoding on an H200 by bits per weight."""
    kinds = {"16": "bf16", "8": "8 bits", "4": "4 bits, head in 8"}
    kinds["4, as sala quantize keeps them"] = "4 bits as `sala quantize` keeps them"
    rows = []
    for name, times in read("gpu_quant.json")["decode"].items():
        batch, _, length = name.partition(" x ")
        cells = [f"{'one sequence' if batch == '1' else batch} at {_length(length)}"]
        for kind in kinds:
            speed = f"{1000 * int(batch) / times[kind]:,.0f}"
            cells.append(speed if kind == "16" else f"{speed} ({times['16'] / times[kind]:.2f}x)")
        rows.append(cells)
    return lines(["tokens per second", *kinds.values()], rows)


def gemlite() -> list[str]:
    """Microseconds of packed products on an H200, ours and gemlite's."""
    shapes = {"o": "4096 x 4096", "down": "4096 x 16384", "qkvz": "16384 x 4096", "gate_up": "32768 x 4096"}
    found, rows = read("gpu_quant.json")["gemlite"], []

    def show(us: float) -> str:
        return f"{us:.1f}" if us < 9.95 else f"{us:.0f}"

    for bits in (4, 8):
        for name, shape in shapes.items():
            pairs = [found[f"{name} {bits} bits x {batch}"] for batch in (1, 8, 32)]
            rows.append([f"{bits} bits, {shape}", *(f"{show(one['us'])} / {show(one['peer_us'])}" for one in pairs)])
    return lines(["ours / gemlite", "batch 1", "8", "32"], rows)


def cold(found: Iterable[dict[str, Any]]) -> str:
    """Return what the first requests were: of lengths that nothing had computed before, or not."""
    if lengths := [one["cold_length"] for one in found if "cold_length" in one]:
        return f"{' / '.join(f'{length:,}' for length in lengths)} tokens, which nothing in the process had computed"
    return "the first request of each length after the warm-up, which computes 40, 2,048 and 4,096 tokens itself"


def serving() -> list[str]:
    """Many requests through the engine, and through vLLM with a dense model in another run."""
    ours, peer = read("gpu_serving.json"), read("gpu_vllm.json")

    def row(name: str, mine: list[tuple[str, float]], theirs: list[float], is_time: bool = False) -> list[str]:
        """Return a row of values with their format; ratios above 1 are in our favour."""
        shown = [(form.format(value), form.rpartition("}")[2]) for form, value in mine]
        ratios = [b / a if is_time else a / b for (_, a), b in zip(mine, theirs, strict=False)]
        unit = shown[0][1]
        cells = " / ".join(text.removesuffix(unit) for text, _ in shown) + unit
        other = " / ".join(f"{one:,g}" for one in theirs) + unit if theirs else ""
        return [name, cells, other, " / ".join(f"{ratio:.2f}x" for ratio in ratios)]

    def first(of: Any, part: str) -> list[float]:
        return [1000 * entry[part] for entry in of["first_token"].values()]

    load, other, speed, long = ours["load"], peer["load"], ours["decode"], ours["long"]

    def decoded(*names: str) -> list[tuple[str, float]]:
        return [("{:,.0f} tok/s", speed[name]["per_second"]) for name in names]

    def ms(values: list[float]) -> list[tuple[str, float]]:
        return [("{:.0f} ms", value) for value in values]

    lengths = " / ".join(f"{int(length):,}" for length in ours["first_token"])
    prompts = {name: f"{name} auto" for name in ("128K", "256K")}
    many, at_once, widths = "64 of 2048/128", "16 of 32768/256", ("4 bits, default file", "4 bits", "8 bits")
    rows = [
        row(f"first token, {lengths} tokens", ms(first(ours, "warm_s")), first(peer, "warm_s"), True),
        row(cold(ours["first_token"].values()), ms(first(ours, "first_s")), []),
        row("decode, 1 x 4K, greedy / temperature 0.7, top_p 0.95, top_k 50",
            decoded("1 x 4K greedy", "1 x 4K sampled"), [one["per_second"] for one in peer["decode"].values()]),
        row("decode, 32 x 1K, greedy / sampled", decoded("32 x 1K greedy", "32 x 1K sampled"), []),
        row("decode, 128 x 256", decoded("128 x 256 greedy"), []),
        row("64 at a time of 2,048 in, 128 out: answers per second",
            [("{:.1f}", load[many]["answers_per_second"])], [other[many]["answers_per_second"]]),
        row("the same: time between tokens, p99", ms([1000 * load[many]["between_tokens_s_p99"]]), []),
        *(row(f"{count} at a time of 300 in, 128 out: tokens out per second",
              [("{:,.0f}", load[f"{count} of 300/128"]["output_per_second"])],
              [other[f"{count} of 300/128"]["output_per_second"]]) for count in (128, 256)),
        *(row(f"16 at once of 32,768 in, 256 out: {name}",
              [("{:.1f} s", load[at_once][part])], [other[at_once][part]], True)
          for name, part in (("until all are done", "seconds"), ("median first token", "first_token_s_p50"))),
        row(f"{' / '.join(prompts)} tokens in bf16",
            [("{:.2f} s", ours["prefill"][key]["seconds"]) for key in prompts.values()],
            [peer["prefill"][name]["seconds"] for name in prompts], True),
        row("128K / 256K / 1M tokens, FP8 products (`--prefill fp8`)",
            [("{:.3g} s", one["seconds"]) for one in
             (ours["prefill"]["128K fp8"], ours["prefill"]["256K fp8"], long["1M fp8"])], []),
        row("decode with the default 4-bit file / all 4 bits / 8 bits, 1 x 4K",
            [("{:.0f} tok/s", ours["quantized"][name]["per_second"]) for name in widths], []),
        ["1M tokens in bf16", f"{long['1M auto']['seconds']:.1f} s", "does not fit", ""],
        ["decode behind them, against 4K",
         f"{long['1M auto']['decode']['per_second'] / long['decode at 4K']['per_second']:.2f}x", "", ""],
    ]  # fmt: skip
    return lines(["", "this project", "vLLM, dense 8B", "ratio"], rows)


def kernels() -> list[str]:
    """Times of kernels at long lengths, the share of what the card can do, and the peer's time."""
    rows = []
    for row in read("gpu_kernels.json")["results"]:
        if row["error"] or row["size"].startswith("1 row"):
            continue
        time = f"{row['ms']:#.3g} ms" if row["ms"] >= 1 else f"{1000 * row['ms']:.3g} us"
        speed = f"{row['tflops']:.0f} TFLOP/s" if row["tflops"] else ""
        against = f"{row['ratio']:.3g}x {row['peer']}"
        rows.append([f"{row['name']}, {row['size']}", time, f"{row['share']:.0%}", speed, against])
    return lines(["kernel", "time", "of what the card can do at best", "reached", "against"], rows)


def tuning_speed() -> list[str]:
    """Memory and speed of fine-tuning."""
    found = read("gpu_finetune.json")
    lengths = ["4K", "16K", "64K"]
    rows = []
    for method, name in {"full": "full, `--optimizer adamw-bf16`", "qlora": "qlora"}.items():
        cells = [found[f"{method}-{length}"] for length in lengths]
        rows.append([
            name,
            *(f"{one['peak_bytes'] / (1 << 30):.0f} GiB, {one['tokens_per_second']:,.0f} tok/s" for one in cells),
        ])  # fmt: skip
    return lines(["", *lengths], rows)


def _length(text: str) -> str:
    return length_label(int(text))


TABLES = {
    "against": against,
    "gemlite": gemlite,
    "gpu-batches": gpu_batches,
    "gpu-bits": gpu_bits,
    "gpu-decode": gpu_decode,
    "gpu-prefill": gpu_prefill,
    "kernels": kernels,
    "serving": serving,
    "tuning-speed": tuning_speed,
}
