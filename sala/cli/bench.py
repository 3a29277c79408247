"""`sala bench`: speed and memory by context length or number of requests, against a dense model, and by kernel.

The command `sala bench serve` is in `bench_serve`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from sala.cli import flags as s
from sala.cli.bench_serve import add_to
from sala.cli.outputs import Run
from sala.cli.progress import each_in_turn
from sala.errors import InputError, SalaError
from sala.options import Options

if TYPE_CHECKING:
    import torch

    from sala.backends.torch.cases import KernelCase
    from sala.lab.bench.measure import BenchTarget, Latency, Throughput
    from sala.lab.bench.roofline import KernelResult, Roofline

    Measure = Callable[[int], Latency]
    Sides = tuple[Sequence[Latency], Sequence[Latency]]

T = TypeVar("T", "Latency", "Throughput")


class Benches(TyperGroup):
    """`sala bench --against MODEL` is `sala bench against MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flag, has_value, value = (args[0] if args else "").partition("=")
        if flag == "--against":
            args = ["against", *([value] if has_value else []), *args[1:]]
        return super().parse_args(ctx, args)


bench = typer.Typer(cls=Benches, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
Random = Annotated[str | None, s.flag("Random weights instead of a model: tiny or released.", metavar="SHAPE")]
NewTokens = Annotated[int, s.flag("Tokens of an answer.", "--new-tokens", "-n", min=2)]
JsonFile = Annotated[Path | None, s.flag("Record of the results.", "--json", metavar="FILE")]
# the measurements set these themselves
OneModel = Annotated[Options, s.Use(without=("ctx", "max_batch", "cache_dir", "cache_disk"), defaults={"snapshots": 0})]


@bench.command()
@s.derived
def latency(
    *,
    random: Random = None,
    lengths: Annotated[str, s.flag("Tokens of the prompts, e.g. 4K,32K,128K,1M.")] = "1K,4K,16K",
    new_tokens: NewTokens = 64,
    json_file: JsonFile = None,
    plot: s.PlotFile = None,
    force: s.Force = False,
    options: OneModel,
) -> None:
    """Measure first token, speed and memory by context length.

    One request runs at a time.
    """
    from sala.lab.bench.measure import measure_latency
    from sala.options.schema import length_label

    counts = s.counts(lengths, "lengths")
    run = Run("latency", "", {}, json_file, plot, force, is_new=True)
    target = _open(options, random, counts[0] + new_tokens)
    results = _measure_all(counts, lambda count: measure_latency(target, count, new_tokens), length_label)
    _finish(run, _facts(target, new_tokens), _with_ratios(results))


@bench.command()
@s.derived
def throughput(
    *,
    random: Random = None,
    batches: Annotated[str, s.flag("Requests at a time, e.g. 1,2,4,8,16.")] = "1,2,4,8",
    length: Annotated[int, s.count_flag("Tokens of every prompt.")] = 512,
    new_tokens: NewTokens = 64,
    json_file: JsonFile = None,
    plot: s.PlotFile = None,
    force: s.Force = False,
    options: OneModel,
) -> None:
    """Measure the tokens per second of several requests together."""
    from sala.lab.bench.measure import measure_throughput

    counts = s.counts(batches, "batches")
    if length < 1:
        raise InputError("length", f"is {length}", "it must be at least 1")
    run = Run("throughput", "", {}, json_file, plot, force, is_new=True)
    target = _open(options, random, length + new_tokens, counts[0])
    results = _measure_all(
        counts, lambda count: measure_throughput(target, count, length, new_tokens), lambda count: f"{count} at a time"
    )
    facts = {**_facts(target, new_tokens), "length": length}
    _finish(run, facts, _with_ratios(results), f", prompts of {length:,} tokens")


@bench.command()
@s.derived
def kernels(
    *,
    lengths: Annotated[str, s.flag("Tokens of the prompts, e.g. 8K,128K.")] = "8K,128K",
    json_file: JsonFile = None,
    plot: s.PlotFile = None,
    force: s.Force = False,
    options: Annotated[Options, s.Use(only=("device",))],
) -> None:
    """Measure every Triton kernel alone, at the released shapes.

    Reports its time, its share of the roofline, and its speed against a peer.
    """
    counts = s.counts(lengths, "lengths")
    where = _gpu(options.device)
    run = Run("kernels", "", {}, json_file, plot, force, is_new=True)
    name, roofline, results = _measure_kernels(where, counts)
    products, moved = roofline.flops_per_s / 1e12, roofline.bytes_per_s / 1e12
    facts = {
        "subject": f"kernels, bfloat16, {name}: {products:,.0f} TFLOP/s and {moved:.2f} TB/s at best",
        "device": str(where), "dtype": "bfloat16", "lengths": counts, "tflops": products, "tb_per_s": moved,
    }  # fmt: skip
    _finish(run, facts, [asdict(one) for one in results])
    if all(one.ms is None for one in results):
        raise SalaError(f"no kernel ran: {results[0].error}", "see what is wrong: sala doctor")


@bench.command()
@s.derived
def against(
    *,
    dense: Annotated[str, s.argument("A dense model: its directory, qwen3-8b-random or tiny-random.")],
    random: Random = None,
    bits: Annotated[
        int | None, s.flag("Bits of the dense model's weights: 16, 8 or 4; default: those of ours.")
    ] = None,
    lengths: Annotated[str, s.flag("Tokens of the prompts, e.g. 4K,32K,128K.")] = "1K,4K,16K",
    new_tokens: NewTokens = 64,
    json_file: JsonFile = None,
    plot: s.PlotFile = None,
    options: OneModel,
    force: s.Force = False,
) -> None:
    """Compare with a dense model in the same run and precision.

    Reports from which length on ours is faster.

    The dense model runs in transformers; with --backend mlx both run on MLX, the dense one in mlx-lm.
    """
    from sala.backends import pick_backend
    from sala.lab.bench.dense import BITS, MEASURES, bits_of, compare
    from sala.lab.bench.dense import verdict as judge

    counts = s.counts(lengths, "lengths")
    path = None if random else s.find_model(options.model)
    if bits not in (None, *BITS):
        raise InputError("bits", f"is {bits}", "use 16, 8 or 4")
    wanted = bits or (16 if path is None else bits_of(path))
    asked = {"dense": dense, "lengths": counts, "new_tokens": new_tokens} | ({"bits": wanted} if wanted < 16 else {})
    run = Run("against", f"random {random}" if path is None else path.name, asked, json_file, plot, force)
    if pick_backend(options.backend, options.device) == "mlx":
        if path is None:
            raise InputError("random", "is for --backend torch", "give a checkpoint: -m MODEL")
        ours, theirs = _against_mlx(run, path, dense, wanted, counts, new_tokens, options)
    else:
        ours, theirs = _against_torch(run, random, dense, wanted, counts, new_tokens, options)
    results = compare(ours, theirs)
    run.finish(run.to_record(results), f"{run.settings['subject']}, against {dense}")
    for measure_name in MEASURES:
        s.note(f"{measure_name.replace('_', ' ')}: {judge(results, measure_name)}")


def _against_torch(
    run: Run, random: str | None, dense: str, bits: int, counts: list[int], new_tokens: int, options: Options
) -> "Sides":
    from sala.lab.bench.dense import check_dense, measure_dense, open_dense
    from sala.lab.bench.measure import check_checkpoint, measure_latency, release
    from sala.lab.dense import need_transformers
    from sala.options.schema import length_label

    need_transformers()
    check_dense(dense, options, counts[0] + new_tokens, bits)
    if random is None:
        check_checkpoint(s.find_model(options.model), options, counts[0] + new_tokens)
    target = _open(options, random, counts[0] + new_tokens)
    run.learn(**_facts(target, new_tokens))
    where, precision = target.device, target.dtype
    with run.resumable():
        s.note(f"ours: {run.settings['subject']}")
        measure = _logged(run, "ours", partial(measure_latency, target, new_tokens=new_tokens))
        ours = _measure_all(counts, measure, length_label)
        del target, measure  # one model in memory at a time
        release()
        s.note(f"theirs: {dense}, {bits} bits")
        loaded = cache(lambda: open_dense(dense, where, precision, bits))  # only if some length is not in the log
        measure = _logged(run, "dense", lambda count: measure_dense(loaded(), count, new_tokens))
        return ours, _measure_all(counts, measure, length_label)


def _against_mlx(
    run: Run, path: Path, dense: str, bits: int, counts: list[int], new_tokens: int, options: Options
) -> "Sides":
    from sala.lab.bench.dense_mlx import DenseOnMlx, SalaOnMlx, check_fit, need_mlx_lm
    from sala.options.schema import length_label

    need_mlx_lm()
    other = Path(dense).expanduser()
    if not (other / "config.json").is_file():
        raise InputError("dense model", f"{dense} is not a model directory", "give one that mlx-lm can load")
    check_fit(path, other, options, counts[0] + new_tokens)
    run.learn(subject=f"{path.name}, {bits} bits, MLX", device=options.device, new_tokens=new_tokens)
    with run.resumable():
        s.note(f"ours: {run.settings['subject']}")
        opened = cache(lambda: SalaOnMlx(path, options, [count + new_tokens for count in counts]))
        measure = _logged(run, "ours", lambda count: opened().measure(count, new_tokens))
        ours = _measure_all(counts, measure, length_label)
        if opened.cache_info().currsize:  # one model in memory at a time
            opened().close()
            opened.cache_clear()
        s.note(f"theirs: {dense}, {bits} bits, mlx-lm")
        loaded = cache(lambda: DenseOnMlx(other, options, bits))
        measure = _logged(run, "dense", lambda count: loaded().measure(count, new_tokens))
        return ours, _measure_all(counts, measure, length_label)


def _logged(run: Run, who: str, measure: "Measure") -> "Measure":
    """Return a function that finds the figures of an interrupted run in its log, and logs new ones at once."""
    from sala.lab.bench.measure import Latency
    from sala.lab.report.record import key_of

    log = run.open_log()
    settings = {name: value for name, value in run.settings.items() if name != "lengths"}

    def find_or_measure(count: int) -> Latency:
        key = key_of(settings, {"who": who, "num_tokens": count})
        row = log.find(key)
        if row is None:
            row = asdict(measure(count))
            log.append(key, row)
        return Latency(**row)

    return find_or_measure


def _open(options: Options, random: str | None, num_tokens: int, batch: int = 1) -> "BenchTarget":
    """Load the model, if memory suffices for sequences of `num_tokens`, the shortest that will be measured."""
    from sala.lab.bench.measure import open_checkpoint, open_random

    if random is not None:
        return open_random(random, options, num_tokens, batch)
    return open_checkpoint(s.find_model(options.model), options)


def _gpu(device: str) -> "torch.device":
    """Return the GPU; raise SalaError if the kernels do not run on it."""
    from sala.backends.torch.kernels.triton_kernels import why_not
    from sala.backends.torch.loader import pick_device

    where = pick_device(device)
    reason = why_not(where)
    if reason is not None:
        remedy = "`sala doctor` says what this machine has; `sala bench latency` measures a model on any device"
        raise SalaError(f"the Triton kernels do not run on {where}: {reason}", remedy)
    return where


def _measure_kernels(where: "torch.device", lengths: Sequence[int]) -> tuple[str, "Roofline", list["KernelResult"]]:
    """Return the name of the GPU, its roofline, and the results of the kernels."""
    import torch

    from sala.backends.torch.cases import Shapes
    from sala.lab.bench.roofline import measure_roofline, timed_cases

    with torch.cuda.device(where):
        roofline = measure_roofline(where)
        results = _time_all(timed_cases(Shapes(where, tuple(lengths))), roofline)
    return torch.cuda.get_device_name(where), roofline, results


def _time_all(cases: Sequence["KernelCase"], roofline: "Roofline") -> list["KernelResult"]:
    """Measure one kernel after another; a failure is a result, and the rest goes on."""
    from sala.lab.bench.roofline import measure

    results = []
    for case, turn, tell in each_in_turn(cases, lambda case: f"{case.name}, {case.size}"):
        name, found = f"{case.name}, {case.size}", measure(case, roofline)
        results.append(found)
        if found.ms is None:
            tell(f"{name}: failed: {found.error} {turn}")
        else:
            ms = f"{found.ms:,.0f}" if found.ms >= 100 else f"{found.ms:.3g}"
            tell(f"{name}: {ms} ms, {found.share:.0%} of the roofline {turn}")
    return results


def _measure_all(counts: Sequence[int], measure: Callable[[int], T], label: Callable[[int], str]) -> list[T]:
    """Measure the smallest first; where one does not fit into memory, larger ones are left out."""
    results: list[T] = []
    for count, turn, tell in each_in_turn(counts, label):
        try:
            found = measure(count)
        except (SalaError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                raise
            reason = str(error) if isinstance(error, SalaError) else "out of memory"
            if not results:
                raise SalaError(f"{label(count)}: {reason}") from None
            tell(f"{label(count)} and above left out: {reason}")
            break
        results.append(found)
        speeds = f"prefill {found.prefill_per_second:,.0f} tok/s, decode {found.decode_per_second:,.1f} tok/s"
        tell(f"{label(count)}: {speeds} {turn}")
    return results


def _facts(target: "BenchTarget", new_tokens: int) -> dict[str, Any]:
    import torch

    kind = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    where = kind or f"{target.device.type}, {torch.get_num_threads()} thread(s)"
    dtype = str(target.dtype).removeprefix("torch.")
    return {
        "subject": f"{target.name}, {dtype}, {where}",
        "device": str(target.device), "dtype": dtype, "new_tokens": new_tokens,
    }  # fmt: skip


def _with_ratios(results: Sequence[Any]) -> list[dict[str, Any]]:
    base = results[0].decode_per_second
    return [{**asdict(one), "decode_ratio": one.decode_per_second / base} for one in results]


def _finish(run: Run, facts: dict[str, Any], results: list[dict[str, Any]], more_title: str = "") -> None:
    """Print and plot the results, and write them with the facts of the run once more at the top."""
    from sala import __version__

    run.model, run.settings = facts["subject"], facts
    run.finish(run.to_record(results), run.model + more_title, sala=__version__, **facts)


add_to(bench)
