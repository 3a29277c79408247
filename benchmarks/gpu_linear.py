"""Products of 32 rows with a big weight on a GPU: right in bf16, and how fast against cuBLAS and the memory's floor.

    PYTHONPATH=. python benchmarks/gpu_linear.py [PART …]

writes benchmarks/gpu_linear.txt, or --output FILE; parts alone are only printed.

Shapes are those of the released 9B model. Weights are rotated past the L2 cache, calls follow each other in a CUDA
graph, as they do in a decode step. Chains are a product and the passes around it, up to the next product's input.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from benchmarks.outputs import measure_text
from sala.backends.torch.kernels import fused, linear
from sala.backends.torch.kernels.launch import Config, shared_memory

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
ROWS, HIDDEN, MLP = 32, 4096, 16384
SHAPES = {
    "o": (HIDDEN, HIDDEN),
    "down": (HIDDEN, MLP),
    "qkvz": (4 * HIDDEN, HIDDEN),
    "gate_up": (2 * MLP, HIDDEN),
    "lm_head": (73448, HIDDEN),
}
READ_RATE = 4.3  # TB/s of an H200
ROTATED = 400 << 20  # bytes of weights, many times the L2 cache
SCALE, EPS = 0.2475, 1e-6
THREADS = 16
Call = Callable[[], Any]


def tile(columns: int, depth: int, splits: int, num_warps: int, num_stages: int, is_swapped: bool = True) -> Config:
    sizes = {"COLUMNS": columns, "DEPTH": depth, "SPLITS": splits, "IS_SWAPPED": is_swapped}
    return Config(sizes, num_warps, num_stages)


SPLIT = [
    tile(64, 64, 4, 4, 6),
    tile(64, 64, 8, 4, 6),
    tile(64, 128, 2, 4, 4),
    tile(64, 128, 2, 4, 6),
    tile(64, 128, 4, 4, 4),
    tile(64, 128, 8, 4, 4),
    tile(64, 256, 2, 4, 4),
    tile(64, 256, 2, 8, 4),
    tile(128, 64, 4, 4, 5),
    tile(128, 64, 4, 8, 6),
    tile(128, 64, 8, 4, 5),
    tile(128, 64, 8, 8, 5),
    tile(128, 128, 4, 4, 5),
    tile(128, 128, 4, 8, 4),
    tile(128, 128, 4, 8, 5),
    tile(256, 64, 8, 8, 5),
    tile(256, 64, 8, 8, 6),
    tile(16, 256, 1, 4, 6, is_swapped=False),
    tile(32, 128, 2, 4, 6, is_swapped=False),
    tile(32, 256, 1, 4, 6, is_swapped=False),
    tile(64, 128, 2, 4, 6, is_swapped=False),
    tile(64, 128, 4, 4, 5, is_swapped=False),
    tile(128, 64, 4, 4, 6, is_swapped=False),
    tile(128, 64, 8, 8, 6, is_swapped=False),
]
WHOLE = [
    tile(64, 64, 1, 4, 6),
    tile(64, 128, 1, 4, 3),
    tile(64, 128, 1, 4, 4),
    tile(64, 128, 1, 4, 6),
    tile(64, 256, 1, 4, 4),
    tile(128, 64, 1, 4, 5),
    tile(128, 64, 1, 8, 3),
    tile(128, 64, 1, 8, 5),
    tile(128, 128, 1, 4, 5),
    tile(128, 128, 1, 8, 5),
    tile(256, 64, 1, 8, 5),
    tile(64, 128, 1, 4, 5, is_swapped=False),
    tile(128, 64, 1, 4, 6, is_swapped=False),
    tile(128, 64, 1, 8, 6, is_swapped=False),
]
PAIR = [
    tile(64, 64, 1, 4, 5),
    tile(64, 64, 1, 8, 5),
    tile(64, 128, 1, 4, 5),
    tile(64, 128, 1, 8, 5),
    tile(128, 64, 1, 8, 5),
    tile(128, 64, 1, 8, 6),
    tile(32, 128, 1, 4, 6, is_swapped=False),
    tile(64, 64, 1, 4, 6, is_swapped=False),
]

BEST: dict[str, list[tuple[float, Config]]] = {}  # by shape, what was timed, the fastest first
LINES: list[str] = []  # said at the end


def limit() -> int:
    return shared_memory(DEVICE)


def default(shape: str) -> Config:
    n, k = SHAPES[shape]
    return linear._config(n, k, DTYPE.itemsize, limit(), max_splits=8 if shape in ("o", "down") else 1)


def pair_config() -> Config:
    return linear._config(*SHAPES["gate_up"], DTYPE.itemsize, limit(), 32, max_splits=1, is_pair=True)


def best(name: str, count: int, instead: Config) -> list[Config]:
    """The fastest that were timed, or this one where none was."""
    return [config for us, config in BEST.get(name, []) if us < math.inf][:count] or [instead]


def with_pdl(config: Config) -> Config:
    return config._replace(uses_pdl=True)


def named(config: Config) -> str:
    side = "swapped" if config.tile["IS_SWAPPED"] else "plain  "
    when = " pdl" if config.uses_pdl else ""
    sizes = "{COLUMNS:3} x {DEPTH:3}, {SPLITS} splits".format(**config.tile)
    return f"{sizes}, {config.num_warps} warps, {config.num_stages} stages, {side}{when}"


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def weights(n: int, k: int) -> Tensor:
    return numbers(n, k, scale=k**-0.5)


def copies(n: int, k: int) -> list[Tensor]:
    count = max(3, math.ceil(ROTATED / (n * k * DTYPE.itemsize)))
    return [weights(n, k) for _ in range(count)]


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is filled with NaN: whatever is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def report(name: str, found: Tensor, expected: Tensor, most: float) -> None:
    error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
    print(f"{name:84} relative error {error:.2e} {'ok' if error < most else 'WRONG'}", flush=True)


def attempt(name: str, call: Call) -> Any:
    """The result, or None: one configuration that fails must not stop the rest."""
    try:
        return call()
    except Exception as error:
        print(f"{name}: {type(error).__name__} {str(error)[:160]}", flush=True)
        return None


def compile_all(calls: list[Call]) -> None:
    """First calls in threads, as compiling takes far longer than running; what fails will fail again when timed."""
    began = time.perf_counter()

    def first(call: Call) -> bool:
        try:
            call()
        except Exception:
            return False
        return True

    first(calls[0])
    with ThreadPoolExecutor(THREADS) as pool:
        count = sum(pool.map(first, calls))
    torch.cuda.synchronize()
    print(f"  {count} of {len(calls)} compiled in {time.perf_counter() - began:.1f} s", flush=True)


def microseconds_in_graph(calls: list[Call], rep: int = 40) -> float:
    """One call in a captured graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return do_bench(graph.replay, warmup=10, rep=rep, return_mode="median") * 1000 / len(calls)


def rotated(call: Callable[..., Any], *choices: list[Tensor]) -> list[Call]:
    """At least 12 calls, the i-th with the i-th tensor of each list, beginning again where a list ends."""
    count = max(12, *(len(each) for each in choices))
    turns = [itertools.islice(itertools.cycle(each), count) for each in choices]
    return [partial(call, *tensors) for tensors in zip(*turns, strict=True)]


def time_configs(
    name: str, call: Callable[..., Any], configs: list[Config], choices: tuple[list[Tensor], ...], usual: Config
) -> str:
    """Prints a sorted table; the fastest go to BEST. Returns a line about the fastest."""
    compile_all([partial(call, *(each[0] for each in choices), config) for config in configs])
    results = []
    num_bytes = choices[-1][0].nbytes
    for config in configs:
        run = partial(_with_config, call, config)
        try:
            us = microseconds_in_graph(rotated(run, *choices))
            note = f"{us:7.2f} us {num_bytes / us / 1e6:5.2f} TB/s"
        except Exception as error:
            us, note = math.inf, f"{type(error).__name__} {str(error)[:80]}"
        results.append((us, config, f"{note}  {named(config)}{' (default)' if config == usual else ''}"))
    results.sort(key=lambda result: result[0])
    for _, _, line in results:
        print("  " + line, flush=True)
    BEST[name] = [(us, config) for us, config, _ in results]
    return results[0][2]


def _with_config(call: Callable[..., Any], config: Config, *tensors: Tensor) -> Any:
    return call(*tensors, config)


def time_shape(name: str) -> None:
    n, k = SHAPES[name]
    is_split = name in ("o", "down")
    x, held = [numbers(ROWS, k)], copies(n, k)
    floor = n * k * DTYPE.itemsize / READ_RATE / 1e6
    peer = microseconds_in_graph(rotated(F.linear, x, held))
    print(f"{name} [{n}, {k}]: floor {floor:.1f} us, F.linear {peer:.2f} us")
    usual = default(name)
    configs = list(dict.fromkeys([*(SPLIT if is_split else WHOLE), usual]))
    call = linear.split_linear if is_split else linear.linear
    fastest = time_configs(name, call, configs, (x, held), usual)
    LINES.append(f"{name:8} floor {floor:6.1f} us, F.linear {peer:6.2f} us, ours {fastest}")


def time_o() -> None:
    time_shape("o")


def time_down() -> None:
    time_shape("down")


def time_qkvz() -> None:
    time_shape("qkvz")


def time_gate_up() -> None:
    time_shape("gate_up")


def time_lm_head() -> None:
    time_shape("lm_head")


def time_silu() -> None:
    """SiLU inside the product whose result it takes."""
    twice, hidden = SHAPES["gate_up"]
    x, both = [numbers(ROWS, hidden)], copies(twice, hidden)
    peer = microseconds_in_graph(rotated(lambda x, w: fused.silu_mul(F.linear(x, w)), x, both))
    print(f"gate_up and silu_mul: {peer:.2f} us with F.linear; in linear_silu_mul:")
    usual = pair_config()
    configs = list(dict.fromkeys([*PAIR, usual]))
    fastest = time_configs("gate_up silu", linear.linear_silu_mul, configs, (x, both), usual)
    LINES.append(f"gate_up, silu: F.linear and silu_mul {peer:6.2f} us, ours {fastest}")


def time_norm() -> None:
    """The pass behind a split product, by the number of splits, against the one behind a whole product."""
    x, delta, weight = numbers(ROWS, HIDDEN), numbers(ROWS, HIDDEN), numbers(HIDDEN)
    peer = microseconds_in_graph([lambda: fused.add_rms_norm(x, delta, SCALE, weight, EPS)] * 50)
    print(f"add_rms_norm {peer:.2f} us")
    for splits, uses_pdl in itertools.product((1, 2, 4, 8), (False, True)):
        partials = torch.randn(splits, ROWS, HIDDEN, device=DEVICE)
        call = partial(linear.add_partials_rms_norm, x, partials, SCALE, weight, EPS, uses_pdl)
        us = attempt(f"{splits} splits", partial(microseconds_in_graph, [call] * 50))
        if us is not None:
            print(f"add_partials_rms_norm, {splits} splits{', pdl' if uses_pdl else '':8} {us:.2f} us", flush=True)


class Chain:
    """Ways to go from an input to the next norm's output, the last of them with the split products."""

    def __init__(self) -> None:
        self.norm = [numbers(HIDDEN) for _ in range(12)]
        self.x = numbers(ROWS, HIDDEN)

    def whole(self, delta: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return fused.add_rms_norm(self.x, delta, SCALE, norm, EPS)

    def split(self, partials: Tensor, norm: Tensor, uses_pdl: bool) -> tuple[Tensor, Tensor]:
        return linear.add_partials_rms_norm(self.x, partials, SCALE, norm, EPS, uses_pdl)

    def time(self, title: str, ways: dict[str, Callable[..., Any]], *choices: list[Tensor]) -> None:
        """The first of the ways is what the others are held against, in time and in what they return."""
        compile_all([partial(way, *(each[0] for each in choices), self.norm[0]) for way in ways.values()])
        results: list[tuple[float, str]] = []
        expected = None
        for name, way in ways.items():
            try:
                us = microseconds_in_graph(rotated(way, *choices, self.norm))
                found = torch.cat(way(*(each[0] for each in choices), self.norm[0])).double()
                expected = found if expected is None else expected
                error = ((found - expected).norm() / expected.norm()).item()
                results.append((us, f"{us:7.2f} us, differs by {error:.1e}: {name}"))
            except Exception as error:
                results.append((math.inf, f"{name}: {type(error).__name__} {str(error)[:120]}"))
        base = results[0]
        print(title)
        for _, line in sorted(results):
            print("  " + line, flush=True)
        LINES.append(f"{title}: cuBLAS {base[0]:.2f} us, best {min(results)[1]}")


def chain_o() -> None:
    chain = Chain()

    def way(config: Config, o: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return chain.split(linear.split_linear(o, weight, config), norm, config.uses_pdl)

    ways: dict[str, Callable[..., Any]] = {
        "F.linear, add_rms_norm": lambda o, weight, norm: chain.whole(F.linear(o, weight), norm)
    }
    for config in best("o", 3, default("o")):
        for each in (config, with_pdl(config)):
            ways[f"split_linear, add_partials_rms_norm, {named(each)}"] = partial(way, each)
    chain.time("o, norm", ways, [numbers(ROWS, HIDDEN)], copies(*SHAPES["o"]))


def chain_down() -> None:
    chain = Chain()

    def apart(config: Config, gate_up: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        partials = linear.split_linear(fused.silu_mul(gate_up), weight, config)
        return chain.split(partials, norm, config.uses_pdl)

    ways: dict[str, Callable[..., Any]] = {
        "silu_mul, F.linear, add_rms_norm": lambda x, weight, norm: chain.whole(
            F.linear(fused.silu_mul(x), weight), norm
        )
    }
    for config in best("down", 2, default("down")):
        for each in (config, with_pdl(config)):
            ways[f"silu_mul, split_linear, add_partials_rms_norm, {named(each)}"] = partial(apart, each)
    n, k = SHAPES["down"]
    chain.time("silu, down, norm", ways, [numbers(ROWS, 2 * k)], copies(n, k))


def chain_mlp() -> None:
    """A whole MLP, from one norm's output to the next one's."""
    chain = Chain()

    def usual(x: Tensor, both: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return chain.whole(F.linear(fused.silu_mul(F.linear(x, both)), weight), norm)

    def apart(down: Config, x: Tensor, both: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        partials = linear.split_linear(fused.silu_mul(F.linear(x, both)), weight, down)
        return chain.split(partials, norm, down.uses_pdl)

    def behind(
        pair: Config, down: Config, x: Tensor, both: Tensor, weight: Tensor, norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        partials = linear.split_linear(linear.linear_silu_mul(x, both, pair), weight, down)
        return chain.split(partials, norm, down.uses_pdl)

    n, k = SHAPES["down"]
    down = best("down", 1, default("down"))[0]
    pair = best("gate_up silu", 1, pair_config())[0]
    ways: dict[str, Callable[..., Any]] = {
        "F.linear, silu_mul, F.linear, add_rms_norm": usual,
        "F.linear, silu_mul, split_linear, add_partials": partial(apart, down),
        "F.linear, silu_mul, split_linear and add_partials with pdl": partial(apart, with_pdl(down)),
        "linear_silu_mul, split_linear, add_partials": partial(behind, pair, down),
        "linear_silu_mul, split_linear, add_partials, all with pdl": partial(behind, with_pdl(pair), with_pdl(down)),
    }
    chain.time("mlp", ways, [numbers(ROWS, HIDDEN)], copies(*SHAPES["gate_up"]), copies(n, k))


def compare(calls: dict[str, Call]) -> Iterator[tuple[str, Any]]:
    """Name and result of each, on memory that begins as NaN; compiled side by side first."""
    compile_all(list(calls.values()))
    for name, call in calls.items():
        with poisoned():
            found = attempt(name, call)
        if found is not None:
            yield name, found


def titled(name: str, config: Config | None) -> str:
    return f"{name}, {'default' if config is None else named(config)}"


def check_products() -> None:
    selected = [None, *SPLIT[4:24:6], with_pdl(SPLIT[4])]
    for name, (n, k) in [*SHAPES.items(), ("small", (576, 1536)), ("odd", (200, 320))]:
        x, weight = numbers(ROWS, k), weights(n, k)
        exact = F.linear(x.double(), weight.double())
        calls: dict[str, Call] = {f"linear {name}": partial(linear.linear, x, weight)}
        if name not in ("qkvz", "gate_up", "lm_head"):
            calls |= {
                titled(f"split_linear {name}", config): partial(linear.split_linear, x, weight, config)
                for config in selected
            }
        for title, found in compare(calls):
            is_split = found.dim() == 3
            report(title, found.double().sum(0) if is_split else found, exact, 1e-5 if is_split else 4e-3)
        report(f"F.linear {name}", F.linear(x, weight), exact, 4e-3)


def check_silu() -> None:
    """SiLU within a product against the pass and the product apart, both ours."""
    for n, k in (SHAPES["down"], (576, 1536)):
        x, both = numbers(ROWS, n), weights(2 * k, n)
        calls: dict[str, Call] = {}
        for config in PAIR[2::3]:
            title = titled(f"linear_silu_mul [{2 * k}, {n}]", config)
            calls[title] = partial(linear.linear_silu_mul, x, both, config)
            calls[title + " apart"] = partial(_silu_apart, x, both, config)
        results = dict(compare(calls))
        for title in (title for title in results if title + " apart" in results):
            found, apart = results[title], results[title + " apart"]
            report(f"{title}, same bits {torch.equal(found, apart)}", found, apart, 4e-3)


def _silu_apart(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    return fused.silu_mul(linear.linear(x, weight, config))


def check_rows() -> None:
    """A row's bits must not depend on the other rows, nor on how many there are."""
    for name in ("o", "down"):
        n, k = SHAPES[name]
        x, weight = numbers(ROWS, k), weights(n, k)
        others = numbers(ROWS, k, scale=50.0)
        others[0], others[7] = x[0], float("nan")
        calls: dict[str, Call] = {}
        for config, (kind, rows) in itertools.product(
            (None, *SPLIT[4:24:6]), (("", x), (" others", others), (" three", x[:3]))
        ):
            calls[titled(name, config) + kind] = partial(linear.split_linear, rows, weight, config)
        results = dict(compare(calls))
        for title in (title for title in results if title + " others" in results and title + " three" in results):
            together, changed, three = (results[title + kind] for kind in ("", " others", " three"))
            is_own, is_same = torch.equal(changed[:, 0], together[:, 0]), torch.equal(three, together[:, :3])
            print(f"{title}: a row's bits are its own: {is_own}, alone or not: {is_same}", flush=True)


def check_tall() -> None:
    """Taller tiles, for more rows: a row keeps its bits; and what they cost against cuBLAS."""
    for name in ("o", "down", "qkvz"):
        n, k = SHAPES[name]
        x, weight = numbers(128, k), weights(n, k)
        found = {rows: linear.split_linear(x[:rows], weight).sum(0) for rows in (1, 32, 64, 100, 128)}
        is_same = [torch.equal(found[rows][0], found[1][0]) for rows in found]
        print(f"{name}: the first row's bits among 1, 32, 64, 100, 128 rows: {is_same}", flush=True)
        for rows in (1, 8, 32, 64, 128):
            some, many = x[:rows], copies(n, k)
            ours = microseconds_in_graph([partial(linear.split_linear, some, one) for one in many])
            peer = microseconds_in_graph([partial(F.linear, some, one) for one in many])
            print(f"   {rows:3} rows: {ours:.2f} us, F.linear {peer:.2f} us", flush=True)


def check_norm() -> None:
    x, weight = numbers(ROWS, HIDDEN), numbers(HIDDEN)
    for splits in (1, 3, 4, 8):
        partials = torch.randn(splits, ROWS, HIDDEN, device=DEVICE)
        delta = partials[0]
        for part in partials[1:]:
            delta = delta + part
        with poisoned():
            total, normed = linear.add_partials_rms_norm(x, partials, SCALE, weight, EPS)
        expected = fused.add_rms_norm(x, delta.to(DTYPE), SCALE, weight, EPS)
        same = (normed == expected[1]).float().mean().item()
        bits = f"sums equal {torch.equal(total, expected[0])}, norms equal in {same:.4%}"
        report(f"add_partials_rms_norm, {splits} splits: {bits}", normed, expected[1], 2e-3)


def check_pdl() -> None:
    """Kernels that start before the one ahead has ended must see all that it wrote: a chain of layers in a graph."""
    layers = [(weights(2 * MLP, HIDDEN), weights(HIDDEN, MLP), weights(HIDDEN, HIDDEN)) for _ in range(6)]
    norm, first = torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE), numbers(ROWS, HIDDEN)
    o, down, pair = default("o"), default("down"), pair_config()

    def forward(uses_pdl: bool) -> Tensor:
        configs = [config._replace(uses_pdl=uses_pdl) for config in (o, pair, down)]
        x, normed = first, first
        for both, weight, out in layers:
            partials = linear.split_linear(normed, out, configs[0])
            x, normed = linear.add_partials_rms_norm(x, partials, SCALE, norm, EPS, uses_pdl)
            partials = linear.split_linear(linear.linear_silu_mul(normed, both, configs[1]), weight, configs[2])
            x, normed = linear.add_partials_rms_norm(x, partials, SCALE, norm, EPS, uses_pdl)
        return x

    forward(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(True)
    same = []
    for _ in range(20):
        first.copy_(numbers(ROWS, HIDDEN))
        graph.replay()
        same.append(torch.equal(found, forward(False)))
    print(f"kernels with pdl in a graph give the same bits: {all(same)} ({sum(same)} of {len(same)})")


def print_fastest() -> None:
    print("\n== the fastest")
    for line in LINES:
        print(line)


def main() -> int:
    parts = (
        check_products, check_silu, check_rows, check_norm, check_tall, check_pdl,
        time_o, time_down, time_qkvz, time_gate_up, time_lm_head, time_silu, time_norm,
        chain_o, chain_down, chain_mlp,
    )  # fmt: skip
    return measure_text(__doc__, __file__, parts, print_fastest)


if __name__ == "__main__":
    sys.exit(main())
