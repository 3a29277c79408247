"""`sala quantize`: fewer bits per weight, in one layout for every backend."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sala.cli import flags as s
from sala.cli.progress import ProgressBar
from sala.errors import MissingExtra
from sala.options import Options

if TYPE_CHECKING:
    from sala.lab.quantize.texts import CalibrationText


@s.derived
def quantize(
    *,
    model: s.Model,
    output: Annotated[Path, s.flag("Directory of the quantized model; must not exist.", "--output", "-o")],
    bits: Annotated[int, s.flag("Bits per weight: 8 or 4.")] = 4,
    group_size: Annotated[int, s.flag("Weights that share a scale: 32, 64 or 128.")] = 64,
    method: Annotated[str | None, s.flag("rtn, gptq or awq; by default rtn for 8 bits and gptq for 4.")] = None,
    calibration: Annotated[
        Path | None, s.flag('Text to calibrate with, or .jsonl with a "text" per line; by default the model writes it.')
    ] = None,
    tokens: Annotated[int, s.count_flag("Tokens to calibrate with.")] = 32768,
    keep: Annotated[
        list[str] | None,
        s.flag("Modules with more bits: v_proj (8 bits), 'model.layers.0.*=whole', lm_head=4. Repeatable."),
    ] = None,
    requantize: Annotated[bool, s.flag("Accept a model that is quantized already.", "--requantize")] = False,
    report: Annotated[
        bool,
        s.flag("Compare both models and write the results into OUTPUT; resumes if OUTPUT is complete.", "--report"),
    ] = False,
    check: Annotated[
        bool,
        s.flag("Print perplexity and facts found in long texts, before and after; resumes as --report.", "--check"),
    ] = False,
    report_text: Annotated[Path | None, s.flag("Text to measure on; by default held-out calibration text.")] = None,
    report_tokens: Annotated[int, s.count_flag("Tokens to measure on.")] = 16384,
    needles: Annotated[int, s.flag("Needles to look for at each length.", min=0)] = 20,
    options: Annotated[Options, s.Use(without=("model", "adapter", "ctx", "max_batch"), defaults={"snapshots": 0})],
) -> None:
    from dataclasses import replace

    from sala.backends.memory import ELEMENT_BYTES
    from sala.backends.torch.loader import pick_device
    from sala.checkpoint.names import expected_tensors
    from sala.config import SalaConfig
    from sala.lab.quantize.pipeline import is_result, quantize_model
    from sala.lab.quantize.plan import QuantizeSettings, count_bits, describe, plan_modules

    output = output.expanduser()
    wanted = QuantizeSettings(bits, group_size, method, tuple(keep or ()), tokens)
    where = pick_device(options.device)
    path = s.find_model(model)
    config = replace(SalaConfig.load(path), quantization=None)
    plan = plan_modules(config, wanted)
    with ProgressBar() as bar:
        text = _text(path, calibration, options, bar)
        if (report or check) and is_result(output, config, plan):
            s.note(f"{output} is complete; measuring it")
        else:
            with _resumable(output):
                quantize_model(path, output, wanted, text, where, requantize, bar, options.kernels)
        if check:
            file = report_text or calibration
            held_out = None if file is None else _text(path, file, options, bar).held_out(report_tokens, 1024)
            _check(path, output, held_out, options, wanted, bar)
        if report:
            measured = _text(path, report_text, options, bar) if report_text else text
            _report(path, output, measured.held_out(report_tokens, 1024), options, needles, bar)
    width = count_bits(plan, expected_tensors(config), 8 * ELEMENT_BYTES[config.dtype])
    s.note(f"ready: {output}, {width:.2f} bits per weight ({describe(plan)})")


@contextmanager
def _resumable(output: Path) -> Iterator[None]:
    """Say, if the user stops here, that the same command continues."""
    from sala.lab.quantize.pipeline import draft_of

    try:
        yield
    except KeyboardInterrupt:
        if draft_of(output).is_dir():
            s.note("stopped; the same command continues where it stopped")
        raise


def _text(model: Path, file: Path | None, options: Options, bar: ProgressBar) -> "CalibrationText":
    from sala.lab.quantize.texts import FileText, SampledText

    if file is not None:
        return FileText(file.expanduser(), model)
    return SampledText(model, options.device, lambda done, total: bar("writing", done, total), options)


def _check(original: Path, quantized: Path, tokens: Any, options: Options, wanted: Any, bar: ProgressBar) -> None:
    from sala.backends.torch.loader import pick_device
    from sala.cli.outputs import print_table
    from sala.lab.quantize.check import check, remedy, table_of

    try:
        found = check(original, quantized, tokens, pick_device(options.device), options.kernels, bar)
    except KeyboardInterrupt:
        s.note(f"stopped; {quantized} is complete, and the same command checks it again")
        raise
    bar.close()
    print_table(f"{quantized.name} beside {original.name}", *table_of(found))
    if hint := remedy(found, wanted):
        s.note(f"this quantization loses much: {hint}")


def _report(original: Path, quantized: Path, tokens: Any, options: Options, num_needles: int, bar: ProgressBar) -> None:
    from sala.backends.torch.loader import pick_device
    from sala.cli.outputs import print_table
    from sala.lab.quantize.report import NAME, measure, to_record
    from sala.lab.report.kinds import save, table_of

    device = pick_device(options.device)
    try:
        results = measure(original, quantized, tokens, device, num_needles, note=bar, options=options)
    except KeyboardInterrupt:
        s.note(f"stopped; {quantized} is complete, and the same command measures it again")
        raise
    record = to_record(results, quantized.name, {"original": original.name, "device": str(device)})
    has_picture = save(record, quantized, NAME)
    bar.close()
    print_table(f"{quantized.name} beside {original.name}", *table_of(record))
    if not has_picture:
        s.note(f"no picture: {MissingExtra('matplotlib', 'eval')}")
