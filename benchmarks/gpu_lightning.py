"""Lightning attention and the fused passes on a GPU: checked against the references, then timed against their floors.

    PYTHONPATH=. python benchmarks/gpu_lightning.py [PART …]

writes benchmarks/gpu_lightning.txt, or --output FILE; parts alone are only printed. Those of prefill, lightning and
dense attention, take 30 seconds: check_snapshots time_prefill time_dense tune_prefill.

Needs torch and triton; with flash-linear-attention in build/fla its kernels are timed in the same run. Shapes are those
of the released 9B model: 32 heads of 128, hidden size 4096, MLP 16384.
"""

import itertools
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.outputs import measure_text
from sala.backends.torch.kernels import attention, fused, lightning
from sala.backends.torch.kernels.launch import Config
from sala.backends.torch.kernels.spans import PackedSpan, table_of
from sala.backends.torch.ops import lightning as reference
from sala.backends.torch.ops.dense import apply_rope, grow_queries, query_growth, rms_norm, rope_angles

BANDWIDTH = 4.3e12
HEADS, DIM, HIDDEN, MLP, EPS = 32, 128, 4096, 16384, 1e-6
SCALE = DIM**-0.5
PEERS = {4096: 0.44, 32768: 0.98, 131072: 3.29}  # ms, chunk_lightning_attn of fla 0.6.0, measured before


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def equal(a: Tensor, b: Tensor) -> bool:
    """In all bits that matter: where one is NaN, so is the other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def say(name: str, *values: Any) -> None:
    print(f"{name:44s}", *(f"{v:.2e}" if isinstance(v, float) else v for v in values), flush=True)


def milliseconds(call: Callable[[], Any], rep: int = 40) -> float:
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=rep, return_mode="median")


def in_graph(calls: list[Callable[[], Any]]) -> float:
    """Milliseconds per call when they follow each other in a CUDA graph, so that launches do not count."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return milliseconds(graph.replay) / len(calls)


def projected(n: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one projection, sized like a model's: unit keys and queries times sqrt(D); the rows behind are NaN."""
    both = torch.empty(n + 65, 4 * heads * dim, device="cuda", dtype=dtype).fill_(float("nan"))
    both[:n].normal_()
    q, k, v, _ = (x.view(n, heads, dim) for x in both[:n].chunk(4, 1))
    return q, k, v


def exact_prefill(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    torch.backends.cuda.matmul.allow_tf32 = False
    return reference.lightning_prefill(q.float(), k.float(), v.float(), state, slopes, scale)


def prefill(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor, scale: float, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """One span from position 0."""
    states = state[None].clone()
    table = table_of([PackedSpan(0, len(q))], q.device)
    return lightning.lightning_prefill(q, k, v, states, table, slopes, scale, config), states[0]


def check_prefill() -> None:
    cases = [(n, HEADS, DIM, torch.bfloat16) for n in (1, 63, 64, 65, 1000, 8191, 8192, 20003)]
    cases += [(n, 9, 64, torch.bfloat16) for n in (65, 1000)] + [(1000, 4, DIM, torch.float16)]
    cases += [(n, 4, DIM, torch.float32) for n in (1, 65, 1000, 8191)] + [(1000, 9, 64, torch.float32)]
    for n, heads, dim, dtype in cases:
        q, k, v = projected(n, heads, dim, dtype)
        state = torch.randn(heads, dim, dim, device="cuda")
        slopes = reference.decay_slopes(heads, torch.device("cuda"))
        output, after = prefill(q, k, v, state, slopes, dim**-0.5)
        again = prefill(q, k, v, state, slopes, dim**-0.5)
        expected, state = exact_prefill(q, k, v, state, slopes, dim**-0.5)
        is_same = torch.equal(output, again[0]) and torch.equal(after, again[1])
        say(
            f"prefill {n} x {heads} x {dim} {dtype}",
            distance(output, expected),
            distance(after, state),
            "" if is_same else "NOT REPEATABLE",
        )


def check_long_prefill() -> None:
    """100,003 tokens, and a million: the last rows against a prefill of the end alone, after what the decay leaves."""
    slopes = reference.decay_slopes(HEADS, torch.device("cuda"))
    for n in (100_003, 1_000_003):
        q, k, v = projected(n, HEADS, DIM, torch.bfloat16)
        state = torch.zeros(HEADS, DIM, DIM, device="cuda")
        output, after = prefill(q, k, v, state, slopes, SCALE)
        expected, state = exact_prefill(q[-7000:], k[-7000:], v[-7000:], state, slopes, SCALE)
        worst = max(distance(output[-500:, h], expected[-500:, h]) for h in range(HEADS))
        say(f"prefill {n}, last rows", worst, distance(after, state), bool(output.isfinite().all()))
        del q, k, v, output


def check_steps() -> None:
    large = (torch.bfloat16, HEADS, DIM)
    cases = [(*large, rows, n) for rows, n in itertools.product((1, 3, 33), (1, 5, 16))]
    cases += [(torch.bfloat16, 9, 64, 3, 5), (torch.float32, HEADS, DIM, 3, 5), (torch.float32, 9, 64, 1, 5)]
    for dtype, heads, dim, rows, n in cases:
        q, k, v = (x.unflatten(0, (rows, n)) for x in projected(rows * n, heads, dim, dtype))
        slopes = reference.decay_slopes(heads, torch.device("cuda"))
        states = torch.randn(rows + 2, heads, dim, dim, device="cuda")
        places = torch.randperm(rows + 2, device="cuda")
        slots = places[:rows].clone()
        states[places[rows:]] = float("nan")  # nobody's
        if rows > 1:
            slots[1] = -1
        before = states.clone()
        guessed = lightning.lightning_decode(q, k, v, states, slots, slopes, dim**-0.5, keeps_states=True)
        kept = equal(states, before)
        after = states.clone()
        decoded = [
            lightning.lightning_decode(q[:, i], k[:, i], v[:, i], after, slots, slopes, dim**-0.5) for i in range(n)
        ]
        lightning.lightning_fold(k, v, states, slots, torch.full((rows,), n, device="cuda"), slopes)
        alone = before.clone()
        one = [
            lightning.lightning_decode(q[:1, i], k[:1, i], v[:1, i], alone, slots[:1], slopes, dim**-0.5)
            for i in range(n)
        ]
        expected, state = exact_prefill(q[0], k[0], v[0], before[slots[0]], slopes, dim**-0.5)
        same = torch.equal(torch.stack(decoded, 1), guessed), equal(states, after), kept
        same += (torch.equal(torch.stack(one, 1)[0], guessed[0]), rows == 1 or not bool(guessed[1].any()))
        say(
            f"steps {rows} x {n} x {heads} x {dim} {dtype}",
            distance(guessed[0], expected),
            distance(after[slots[0]], state),
            "bits agree" if all(same) else f"BITS DIFFER {same}",
        )


def check_fused() -> None:
    for dtype, rows, width in itertools.product((torch.bfloat16, torch.float32), (1, 1000), (HIDDEN, 576, 8191)):
        x, delta = (torch.randn(rows, width, device="cuda").to(dtype) for _ in range(2))
        weight = torch.randn(width, device="cuda").to(dtype)
        total, normed = fused.add_rms_norm(x, delta, 0.2475, weight, EPS)
        both = torch.cat((x, delta), 1)
        say(
            f"fused {rows} x {width} {dtype}",
            distance(fused.rms_norm(x, weight, EPS), rms_norm(x, weight, EPS)),
            distance(total, x + delta * 0.2475),
            distance(normed, rms_norm(x + delta * 0.2475, weight, EPS)),
            distance(fused.norm_gate(x, weight, delta, EPS), rms_norm(x, weight, EPS) * torch.sigmoid(delta)),
            distance(fused.silu_mul(both), F.silu(x) * delta),
        )
    for dtype, rows, (heads, groups, dim) in itertools.product(
        (torch.bfloat16, torch.float32), (1, 1000), ((32, 32, 128), (32, 2, 128), (9, 3, 64))
    ):
        row = torch.randn(rows, (heads + groups) * dim, device="cuda").to(dtype)
        q, k = row[:, : heads * dim].unflatten(1, (heads, dim)), row[:, heads * dim :].unflatten(1, (groups, dim))
        q_weight, k_weight = (torch.randn(dim, device="cuda").to(dtype) for _ in range(2))
        positions = torch.randint(0, 1 << 20, (rows,), device="cuda")
        cos, sin = rope_angles(positions, dim, 10000.0)
        found = fused.qk_norm_rope(q, k, fused.Heads(q_weight, k_weight, EPS, cos, sin), query_growth(positions, 512.0))
        expected = grow_queries(apply_rope(rms_norm(q, q_weight, EPS), cos, sin), positions, 512.0)
        say(
            f"qk {rows} x {heads}, {groups} x {dim} {dtype}",
            distance(found[0], expected),
            distance(found[1], apply_rope(rms_norm(k, k_weight, EPS), cos, sin)),
        )


def line(name: str, ms: float, num_bytes: float, note: str = "") -> str:
    floor = num_bytes / BANDWIDTH * 1e3
    return f"{name:52s} {ms * 1e3:9.1f} us  floor {floor * 1e3:8.1f}  {floor / ms:6.1%} {note}"


def prefill_bytes(n: int) -> float:
    return 4.0 * n * HEADS * DIM * 2


def check_snapshots() -> None:
    """8,448 tokens with snapshots against the same in pieces, alone and beside others: bit for bit."""
    slopes = reference.decay_slopes(HEADS, torch.device("cuda"))
    q, k, v = projected(9000, HEADS, DIM, torch.bfloat16)
    states = torch.randn(6, HEADS, DIM, DIM, device="cuda")
    pieces, outputs, cuts = states.clone(), [], [0, 1000, 4224, 7777, 8448]
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        table = table_of([PackedSpan(begin, end - begin, begin, 0)], "cuda")
        outputs.append(lightning.lightning_prefill(q, k, v, pieces, table, slopes, SCALE)[begin:end])
        pieces[2 + i] = pieces[0]
    snapshots = [(length, 2 + i) for i, length in enumerate(cuts[1:])]
    spans = [PackedSpan(8448, 500, 77, 1), PackedSpan(0, 8448, 0, 0, snapshots=snapshots)]
    output = lightning.lightning_prefill(q, k, v, states, table_of(spans, "cuda"), slopes, SCALE, num_parallel=1)
    same = torch.equal(output[:8448], torch.cat(outputs)), torch.equal(states[2:], pieces[2:])
    say("snapshots", "bits agree" if all(same) else f"BITS DIFFER {same}")


def time_prefill() -> None:
    """Per layer, for several numbers of tokens and spans."""
    slopes = reference.decay_slopes(HEADS, torch.device("cuda"))
    states = torch.randn(64, HEADS, DIM, DIM, device="cuda")
    for count, n in ((1, 512), (1, 1024), (1, 4096), (1, 8448), (27, 300), (16, 64), (1, 131072)):
        q, k, v = projected(count * n, HEADS, DIM, torch.bfloat16)
        spans = [PackedSpan(i * n, n, 0, i) for i in range(count)]
        for num_parallel in (None, 4) if count > 1 else (None,):
            table = table_of(spans, "cuda")
            rows = (q, k, v, states, table, slopes, SCALE)
            call = partial(lightning.lightning_prefill, *rows, num_parallel=num_parallel)
            note = f"{PEERS[n] / milliseconds(call):.2f}x fla as measured before" if n in PEERS else ""
            name = f"prefill {count} x {n}" + (f", {num_parallel} at a time" if num_parallel else "")
            print(line(name, in_graph([call] * 5), prefill_bytes(count * n), note), flush=True)


def time_dense() -> None:
    """Dense attention from position 0: ours over pages against torch's own."""
    for count, n in ((1, 512), (1, 1024), (1, 4096), (8, 512), (1, 8192)):
        groups, block = 2, 64
        q = projected(count * n, HEADS, DIM, torch.bfloat16)[0]
        k, v = (torch.randn(groups, count * n // block, block, DIM, device="cuda").bfloat16() for _ in range(2))
        tables = torch.randperm(count * n // block, device="cuda").int().view(count, -1)
        table = table_of([PackedSpan(i * n, n, 0, i, n) for i in range(count)], "cuda")
        output = torch.empty_like(q)
        ours = in_graph([partial(attention.dense_prefill, q, k, v, tables, table, SCALE, output)] * 5)
        order = tables.long().flatten()
        fresh = [x[:, order].flatten(1, 2).unflatten(1, (count, n)).transpose(0, 1).contiguous() for x in (k, v)]
        wide = q.unflatten(0, (count, n)).transpose(1, 2)
        call = partial(F.scaled_dot_product_attention, wide, *fresh, is_causal=True, scale=SCALE, enable_gqa=True)
        error, theirs = distance(output.unflatten(0, (count, n)).transpose(1, 2), call()), in_graph([call] * 5)
        print(f"dense attention {count} x {n}: {ours:.3f} ms, SDPA {theirs:.3f} ms, error {error:.1e}", flush=True)


def time_peers() -> None:
    sys.path.insert(0, "build/fla")
    from fla.ops.lightning_attn import chunk_lightning_attn
    from fla.ops.simple_gla import chunk_simple_gla

    slopes = reference.decay_slopes(HEADS, torch.device("cuda"))
    for n in (8192, 131072):
        q, k, v = (torch.randn(1, n, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        calls: dict[str, Callable[[], Any]] = {
            "chunk_lightning_attn": lambda q=q, k=k, v=v: chunk_lightning_attn(
                q, k, v, layer_idx=0, num_layers=32, output_final_state=True
            ),
            "chunk_simple_gla": lambda q=q, k=k, v=v: chunk_simple_gla(
                q, k, v, g_gamma=-slopes, scale=SCALE, output_final_state=True
            ),
        }
        for name, call in calls.items():
            try:
                print(line(f"peer {name} {n}", milliseconds(call), prefill_bytes(n)), flush=True)
            except Exception:
                traceback.print_exc()


def tune_prefill() -> None:
    slopes = reference.decay_slopes(HEADS, torch.device("cuda"))
    state = torch.randn(HEADS, DIM, DIM, device="cuda")
    plain = ((32, 4, 3), (32, 4, 2), (32, 4, 4), (32, 8, 3), (16, 4, 3), (64, 4, 3), (64, 8, 3), (64, 8, 2))
    tiles = [*((*tile, False) for tile in plain), (64, 8, 2, True), (32, 8, 2, True)]
    configs = [
        Config({"CHUNK": 64, "COLUMNS": columns, "STAGES": stages, "SWAPPED": is_swapped}, num_warps)
        for columns, num_warps, stages, is_swapped in tiles
    ]
    q, k, v = projected(8448, HEADS, DIM, torch.bfloat16)
    expected, _ = exact_prefill(q[:4096], k[:4096], v[:4096], state, slopes, SCALE)
    for n, count in ((8448, 1), (300, 27), (512, 1)):
        results = []
        table = table_of([PackedSpan(i * n, n, 0, i) for i in range(count)], "cuda")
        states = state.repeat(count, 1, 1, 1)
        for config in configs:
            try:
                error = distance(prefill(q, k, v, state, slopes, SCALE, config)[0][:4096], expected)
                call = partial(lightning.lightning_prefill, q, k, v, states, table, slopes, SCALE, config)
                results.append((in_graph([call] * 5), error, config))
            except Exception as problem:
                print(f"{config}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
        for ms, error, config in sorted(results, key=lambda result: result[0]):
            print(line(f"tune {count} x {n} {tuple(config)[:2]}", ms, prefill_bytes(count * n), f"error {error:.1e}"))


def time_steps() -> None:
    slopes = reference.decay_slopes(HEADS, torch.device("cuda"))
    state_bytes = HEADS * DIM * DIM * 4
    before = lightning.STEP_COLUMNS, lightning.STEP_WARPS
    for rows in (1, 8, 32, 128):
        results = []
        count = max(2, 256 // rows)  # layers, together larger than the L2
        states = [torch.randn(rows, HEADS, DIM, DIM, device="cuda") for _ in range(count)]
        slots = torch.arange(rows, device="cuda")
        q, k, v = projected(rows, HEADS, DIM, torch.bfloat16)
        for shape in ((32, 4), (32, 2), (64, 4), (64, 8), (16, 4), (128, 8)):
            lightning.STEP_COLUMNS, lightning.STEP_WARPS = shape
            calls = [
                lambda s=s, q=q, k=k, v=v, slots=slots: lightning.lightning_decode(q, k, v, s, slots, slopes, SCALE)
                for s in states
            ]
            try:
                results.append((in_graph(calls), shape))
            except Exception as error:
                print(f"decode {shape}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        for ms, shape in sorted(results):
            print(line(f"decode {rows} columns, warps {shape}", ms, 2.0 * rows * state_bytes), flush=True)
        lightning.STEP_COLUMNS, lightning.STEP_WARPS = before
        for n in (4, 16):
            q, k, v = (x.unflatten(0, (rows, n)) for x in projected(rows * n, HEADS, DIM, torch.bfloat16))
            counts = torch.full((rows,), n, device="cuda")
            verify = [
                lambda s=s, q=q, k=k, v=v, slots=slots: lightning.lightning_decode(
                    q, k, v, s, slots, slopes, SCALE, keeps_states=True
                )
                for s in states
            ]
            fold = [
                lambda s=s, k=k, v=v, slots=slots, counts=counts: lightning.lightning_fold(
                    k, v, s, slots, counts, slopes
                )
                for s in states
            ]
            print(line(f"verify {rows} x {n}", in_graph(verify), rows * state_bytes), flush=True)
            print(line(f"fold {rows} x {n}", in_graph(fold), 2.0 * rows * state_bytes), flush=True)


def time_fused() -> None:
    weight = torch.randn(HIDDEN, device="cuda", dtype=torch.bfloat16)
    head_weight = weight[:DIM].clone()
    for rows in (1, 32, 8192, 65536):
        x, delta = (torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        both = torch.randn(rows, 2 * MLP, device="cuda", dtype=torch.bfloat16)
        q, k, _ = projected(rows, HEADS, DIM, torch.bfloat16)
        cos, sin = rope_angles(torch.arange(rows, device="cuda"), DIM, 10000.0)
        unit = rows * HIDDEN * 2.0
        passes: list[tuple[str, Callable[[], Any], float]] = [
            ("rms_norm", lambda x=x: fused.rms_norm(x, weight, EPS), 2),
            ("add_rms_norm", lambda x=x, delta=delta: fused.add_rms_norm(x, delta, 0.2475, weight, EPS), 4),
            ("norm_gate", lambda x=x, delta=delta: fused.norm_gate(x, weight, delta, EPS), 3),
            (
                "qk_norm_rope",
                lambda q=q, k=k, cos=cos, sin=sin: fused.qk_norm_rope(
                    q, k, fused.Heads(head_weight, head_weight, EPS, cos, sin)
                ),
                4 + 4 * DIM / HIDDEN,
            ),
            ("silu_mul", lambda both=both: fused.silu_mul(both), 3 * MLP / HIDDEN),
        ]
        for name, call, units in passes:
            try:
                ms = in_graph([call] * 20) if rows <= 32 else milliseconds(call)
                source = torch.empty(int(units * unit) // 4, device="cuda", dtype=torch.bfloat16).normal_()
                target = torch.empty_like(source)
                copy = lambda source=source, target=target: target.copy_(source)  # noqa: E731
                peer = in_graph([copy] * 20) if rows <= 32 else milliseconds(copy)
                print(line(f"{name} {rows}", ms, units * unit, f"copy {peer * 1e3:.1f} us"), flush=True)
            except Exception:
                traceback.print_exc()


def main() -> int:
    parts = (
        check_prefill, check_long_prefill, check_steps, check_fused, time_steps, time_fused,
        check_snapshots, time_prefill, time_dense, tune_prefill,
        time_peers,  # last: its own tuning may take long
    )  # fmt: skip
    return measure_text(__doc__, __file__, parts)


if __name__ == "__main__":
    sys.exit(main())
