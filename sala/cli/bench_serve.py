"""`sala bench serve`: a server under load, ours or another with OpenAI's API."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sala.cli import flags as s
from sala.cli.outputs import Run
from sala.cli.progress import ProgressBar, each_in_turn
from sala.errors import InputError
from sala.options import Options, Sampling
from sala.options.schema import SWITCH, length_label, table
from sala.server.settings import Settings

if TYPE_CHECKING:
    from sala.lab.bench.client import Endpoint
    from sala.lab.bench.load import Load, Target

ARRIVALS_S = 30  # of an open loop, by default
MIN_REQUESTS = 16
NUM_WARM = 8
MAX_CACHED = 0.02  # random prompts may begin alike
Wanted = Annotated[Sampling, s.Use(only=("temperature", "top_p", "top_k", "min_p"), defaults={"temperature": 0.0})]


Url = Annotated[
    str | None, s.flag("Server to measure, e.g. http://localhost:8000/v1; without it one is started.", metavar="URL")
]
Concurrency = Annotated[str | None, s.flag("Requests at a time: closed loop.  [default: 1,8,32]", metavar="LIST")]
Rate = Annotated[str | None, s.flag("Requests per second, at random intervals: open loop.", metavar="LIST")]
FirstTokens = Annotated[
    str | None, s.flag("Measure first tokens instead, one prompt at a time, of these lengths.", metavar="LIST")
]
Inputs = Annotated[str, s.flag("Tokens of a prompt: 2048, 512,2048 or 100-4000.", "--input", metavar="COUNTS")]
Outputs = Annotated[str, s.flag("Tokens of an answer, likewise.", "--output", metavar="COUNTS")]
Total = Annotated[
    int | None, s.flag(f"Requests of each load.  [default: 4 times those at a time, or {ARRIVALS_S} s of them]", min=1)
]
Warmup = Annotated[int | None, s.flag("Warm-up requests, not measured.  [default: the concurrency]", min=0)]
Repeats = Annotated[int, s.flag("Warm prompts of each length, with --lengths.", min=1)]
LoadSeed = Annotated[int, s.flag("The same seed makes the same lengths and arrivals.")]
Timeout = Annotated[float, s.flag("Seconds after which a request has failed.", min=0.1)]
SaveFile = Annotated[Path | None, s.flag("Record of the results.", "--save", "--json", metavar="FILE")]


def serve(
    *,
    url: Url = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    lengths: FirstTokens = None,
    inputs: Inputs = "1024",
    outputs: Outputs = "128",
    requests: Total = None,
    warmup: Warmup = None,
    repeats: Repeats = 5,
    seed: LoadSeed = 0,
    timeout: Timeout = 600.0,
    save: SaveFile = None,
    plot: s.PlotFile = None,
    force: s.Force = False,
    sampling: Wanted,
    options: s.Loading,
    keys: Annotated[Settings, s.Use(only=("api_key", "api_key_file"))],
    given: s.GivenNames,
) -> None:
    """Measure a server with OpenAI's API under load.

    Reports answers and tokens per second, time to first token, time between tokens, errors.
    """
    from sala.lab.bench.load import Lengths, open_target

    kinds = [
        name for name, value in (("--concurrency", concurrency), ("--rate", rate), ("--lengths", lengths)) if value
    ]
    if len(kinds) > 1:
        raise InputError(kinds[0], f"and {kinds[1]} are given", "keep one of them")
    wanted = {"input": Lengths.parse(inputs, "input"), "output": Lengths.parse(outputs, "output")}
    counts = s.counts(lengths, "lengths") if lengths else []
    loads = [] if lengths else _loads(concurrency, rate, wanted, requests, warmup, seed)
    settings = {"input": inputs, "output": outputs, "seed": seed, "timeout_s": timeout, **_fields(sampling)}
    run = Run("first_token" if lengths else "serve", "", {}, save, plot, force, is_new=True)
    with _server(url, options, keys.api_key, given) as (endpoint, facts):
        target = open_target(endpoint, options.model if url else None, _fields(sampling), timeout)
        results = _first_tokens(target, counts, repeats) if lengths else _run_loads(target, loads)
    prompts = "chats" if target.vocabulary is None else "token ids"
    run.model = target.model
    run.settings = {**settings, "url": endpoint.url if url else None, "prompts": prompts, **facts}
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    shape = "" if lengths else f", {inputs} tokens in, {outputs} out"
    run.finish(run.to_record(results), f"{target.model}{shape}, {how}")
    _warn(results, target)


def _fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request; what has its usual value is left out, since some servers do not know it."""
    rows = table(Sampling)
    found = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}
    return {"temperature": sampling.temperature, **{k: v for k, v in found.items() if v != rows[k].default}}


def _loads(
    concurrency: str | None,
    rate: str | None,
    wanted: dict[str, Any],
    requests: int | None,
    warmup: int | None,
    seed: int,
) -> "list[Load]":
    from sala.lab.bench.load import Load

    lengths = wanted["input"], wanted["output"]
    if rate is None:
        counts = s.counts(concurrency or "1,8,32", "concurrency")
        totals = [max(MIN_REQUESTS, 4 * count) if requests is None else requests for count in counts]
        warm = [count if warmup is None else warmup for count in counts]
        each = zip(counts, totals, warm, strict=True)
        return [Load(*lengths, total, num_warm, concurrency=count, seed=seed) for count, total, num_warm in each]
    try:
        rates = sorted({float(part) for part in rate.split(",")})
        if not all(0 < one < 1e6 for one in rates):
            raise ValueError
    except ValueError:
        raise InputError("rate", f"is {rate!r}", "write it as 2.5 or 1,2,4") from None
    totals = [max(MIN_REQUESTS, round(ARRIVALS_S * one)) if requests is None else requests for one in rates]
    num_warm = NUM_WARM if warmup is None else warmup
    return [Load(*lengths, total, num_warm, rate=one, seed=seed) for one, total in zip(rates, totals, strict=True)]


@contextmanager
def _server(
    url: str | None, options: Options, key: str | None, given: s.GivenNames
) -> "Iterator[tuple[Endpoint, dict[str, Any]]]":
    """Yield the server to measure and what is known of it; without an address, one of our own."""
    from sala.lab.bench.client import Endpoint
    from sala.lab.bench.server import own_server

    rows = table(Options)
    loading = [rows[name] for name in rows if name in given]
    if url is not None:
        unused = [row.flag for row in loading if row.name != "model"]
        if unused:
            s.note(f"{', '.join(unused)} has no effect on a server that already runs")
        yield Endpoint(url, key), {}
        return
    flags = ["--model", str(s.find_model(options.model))]
    for row in loading:
        value = getattr(options, row.name)
        if row.kind is SWITCH:
            flags += [row.flag if value else row.off]
        elif row.name != "model" and value is not None:
            flags += [row.flag, row.spell(value)]
    s.note(f"starting a server for {flags[1]}")
    with own_server(flags, key) as (endpoint, _, seconds):
        s.note(f"it is ready after {seconds:.1f} s")
        yield endpoint, {"ready_s": seconds, "flags": flags[2:]}


def _run_loads(target: "Target", loads: "list[Load]") -> list[dict[str, Any]]:
    from sala.lab.bench.load import run_load

    results = []
    with ProgressBar(is_kept=False, is_quiet=True) as bar:
        for load in loads:
            name = f"{load.concurrency} at a time" if load.rate is None else f"{load.rate:g} per second"
            num_done = 0

            def on_done(_: object, name: str = name, total: int = load.num_requests) -> None:
                nonlocal num_done
                num_done += 1
                bar(name, num_done, total, "requests")

            bar(name, 0, load.num_requests, "warming up")
            results.append(run_load(target, load, on_done))
            found = results[-1]
            bar.print(
                f"{name}: {found['answers_per_second']:.4g} answers/s, {found['output_per_second']:,.0f} tok/s out"
            )
    return results


def _first_tokens(target: "Target", lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    from sala.lab.bench.load import measure_first_tokens

    results = []
    for count, turn, tell in each_in_turn(lengths, length_label):
        found = measure_first_tokens(target, count, repeats)
        results.append(found)
        cold, warm = (f"{1000 * found[key]:,.1f} ms" for key in ("cold_s", "warm_s"))
        tell(f"{length_label(count)}: cold {cold}, warm {warm} {turn}")
    return results


def _warn(results: list[dict[str, Any]], target: "Target") -> None:
    """Say what a reader of the figures must know."""
    errors = [row["error"] for row in results if row.get("error")]
    if errors:
        s.note(f"some requests failed, e.g. {errors[0]}")
    if (share := max(row["cached_share"] for row in results)) > MAX_CACHED:
        s.note(f"the server had {share:.0%} of the prompts in its cache: the times to first token are too good")
    if target.vocabulary is None:
        s.note("the server does not take token ids: the prompts were chats, and lengths are those it reports")


def add_to(bench: typer.Typer) -> None:
    """Add the command to the group `sala bench`."""
    bench.command()(s.derived(serve))
