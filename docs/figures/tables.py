"""Write the tables of results in the documentation from committed results.

A table stands between `<!-- results: NAME -->` and `<!-- end of results -->`; the rest of a page is written by hand.
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from docs.figures import estimates, gpu_tables, make_sizing
from docs.figures.measured import remark, totals
from docs.figures.results import RESULTS, ROOT, lines, read, read_model
from sala.lab.report.official import MEAN
from sala.lab.report.record import Record
from sala.lab.report.statistics import interval
from sala.options.schema import length_label

TABLE = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that may hold results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").rglob("*.md"))]


def render(text: str) -> str:
    """Return a page with all its tables of results as the committed results give them."""
    return TABLE.sub(lambda found: f"{found[1]}" + "\n".join(TABLES[found[2]]()) + f"\n{found[3]}", text)


def kinds_of_cache() -> list[str]:
    """What keys and values in FP8 and states in bf16 cost."""
    found = read("kv_quality.json")
    (text,) = found["perplexity"]
    head = ["cache", f"perplexity, {found['tokens']:,} tokens", "ratio"]
    head += [f"token by token, {found['decode_tokens']:,} tokens", "ratio"]
    names = {"auto": "plain", "kv fp8": "keys and values in FP8", "state bf16": "states in bf16"}
    rows = []
    for key, name in names.items():
        cells = [name]
        for part in ("perplexity", "decode_perplexity"):
            value, plain = found[part][text][key], found[part][text]["auto"]
            cells += [f"{value:.2f}", "" if key == "auto" else f"{value / plain:.3f}"]
        rows.append(cells)
    return lines(head, rows)


def tiers() -> list[str]:
    """Seconds to the first token of a second turn, by where its prefix lies."""
    homes = {"device": "on the device", "host": "in host memory", "disk": "on disk", "read again": "read again"}
    rows = [
        [f"{int(length):,}", *(f"{times[home]['seconds']:.2g}" if times[home]["seconds"] >= 0.1 else
                               f"{times[home]['seconds']:.3f}" for home in homes)]
        for length, times in read("tiers_cpu.json")["lengths"].items()
    ]  # fmt: skip
    return lines(["tokens of the conversation", *homes.values()], rows)


def many_tiers() -> list[str]:
    """The time of second turns by that of first ones, where many conversations move down and up."""
    homes = {"host": "in host memory", "disk": "on disk"}
    rows = [
        [f"{int(length):,}", *(f"1/{1 / modes[home]['share']:.0f}" for home in homes)]
        for length, modes in read("tiers_64_cpu.json")["lengths"].items()
    ]
    return lines(["tokens of a conversation", *homes.values()], rows)


def kv_home() -> list[str]:
    """The processor time with keys and values in memory by that with the same on disk."""
    found = read("kv_home_cpu.json")["lengths"]
    names = {
        "prefill": "reading a prompt",
        "decode": "decoding",
        "decode, evicted": "decoding after the file has left memory",
    }
    rows = [[name, *(f"{one['ratios'][key]['cpu']:.2f}" for one in found.values())] for key, name in names.items()]
    return lines(["processor time in memory / on disk", *(f"{int(length):,} tokens" for length in found)], rows)


def conversations() -> list[str]:
    """The share of prompt tokens found in the cache, by the number of conversations in turn."""
    found = read("conversations.json")
    counts = [run["conversations"] for run in found["default"]["runs"]]
    rows = []
    for key, name in {"default": "prompt tokens from the cache", "snapshots 16": "the same with 16 snapshots"}.items():
        shares = {run["conversations"]: run["cached"] for run in found[key]["runs"]}
        rows.append([name, *(f"{100 * shares[count]:.1f}%" if count in shares else "" for count in counts)])
    return lines(["conversations", *map(str, counts)], rows)


def quantization() -> list[str]:
    """What the default recipes of `sala quantize` cost smol-sala."""
    found = read("quant_recall.json")
    lengths = [row["length"] for row in found["recall"]]
    head = ["", "perplexity", "KL, nats", "same first choice", "MiB"]
    head += [f"facts found at {length_label(length)} (loss of a token)" for length in lengths]
    rows = [["not quantized again", f"{found['perplexity']:.2f}", "", "", "", *_counts(found["recall"])]]
    for name, entry in found.items():
        if isinstance(entry, dict) and "recall" in entry:
            name = ", ".join(part if not part.startswith("--") else f"`{part}`" for part in name.split(", "))
            cells = [name, f"{entry['ratio']:.3f}x", f"{entry['kl']:.3f}", f"{100 * entry['agreement']:.0f}%"]
            rows.append([*cells, f"{entry['mib']:.0f}", *_counts(entry["recall"])])
    return [*lines(head, rows), *remark("quant_recall.json")]


def finetuning() -> list[str]:
    """Facts found by smol-sala before and after fine-tuning on short chats."""
    found = {name: totals(rows) for name, rows in read("finetune_recall.json")["recall"].items()}
    names = {
        "before": "before",
        "plain, as trained": "`--keep-long 0`: no measures",
        "plain, plain": "`--keep-long 0 --restore-qk`",
        "plain, orthogonal": "`--keep-long 0 --restore-qk --restore-by orthogonal`",
        "replay, as trained": "`--keep-long 10%`, the default",
        "replay, plain": "`--keep-long 10% --restore-qk`",
        "replay, orthogonal": "`--keep-long 10% --restore-qk --restore-by orthogonal`",
        "default rate, as trained": "the default, also of the learning rate",
    }
    shown = [(name, found[key]) for key, name in names.items() if key in found]
    lengths = list(shown[0][1])
    head = ["", *(part for length in lengths for part in (f"facts found at {length_label(length)}", "loss of a token"))]
    rows = [
        [name, *(cell for row in rows.values() for cell in (f"{row['found']} of {row['asked']}", f"{row['loss']:.2f}"))]
        for name, rows in shown
    ]
    return [*lines(head, rows), *remark("finetune_recall.json")]


def everyday() -> list[str]:
    """Everyday questions answered by smol-sala, the version before, and the teacher, by kind."""
    new = read_model("results.json")["everyday"]["student"]
    old = read_model("run/results-0.4-everyday.json")["everyday"]
    models = [old["teacher"], old["student"], new]
    head = ["kind", *(f"{part}{name}" for part in ("correct: ", "ended: ") for name in ("teacher", "0.4", "**0.5**"))]
    head = [cell if "teacher" in cell else cell.rpartition(": ")[2] for cell in head]

    def shares(entries: Sequence[dict[str, Any]]) -> list[str]:
        return [f"{100 * entry[part]:g}%" for part in ("correct", "ended") for entry in entries]

    rows = [[kind, *shares([model["by_kind"][kind] for model in models])] for kind in new["by_kind"]]
    return lines(head, [*rows, ["**all 200**", *shares([model["all"] for model in models])]])


def cpu_bits() -> list[str]:
    """Decoding on a CPU by bits per weight."""
    found, kinds = read("quant_cpu.json"), ["fp32", "bf16", "8 bits", "4 bits"]
    models = {
        "released shapes, 2 layers": ("released shapes, cut to two layers: times as fast as fp32",
                                      "share of the speed of a plain read of the file"),
        "smol-sala": ("smol-sala: times as fast as fp32", "share"),
    }  # fmt: skip
    rows = []
    for model, (speed, share) in models.items():
        first = found[model]["fp32"]["tokens_per_s"]
        ratios = [f"{found[model][kind]['tokens_per_s'] / first:.1f}" for kind in kinds[1:]]
        rows.append([speed, "1", *ratios])
        rows.append([share, *(f"{100 * found[model][kind]['share_of_stream']:.0f}%" for kind in kinds)])
    return lines(["decode", *kinds], rows)


def _counts(recall: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{row['found']} of {row['asked']} ({row['loss']:.2f})" for row in recall]


def ruler() -> list[str]:
    """smol-sala and its teacher on RULER, by task and length: right answers of cases, and means with intervals."""
    cells = Record.load(RESULTS / "ruler_smol.json").results
    lengths = sorted({row["length"] for row in cells})
    scores: dict[tuple[str, str], dict[int, str]] = {}
    for row in cells:
        low, high = interval(row["score"], row["trials"])
        text = f"{row['score'] * row['trials']:.3g}/{row['trials']}"
        if row["metric"] == MEAN:
            text = f"**{100 * row['score']:.0f}%** ({100 * low:.0f}–{100 * high:.0f}), n={row['trials']}"
        scores.setdefault((row["model"], row["task"]), {})[row["length"]] = text
    rows = [[*key, *(found.get(length, "–") for length in lengths)] for key, found in scores.items()]
    return [*lines(["model", "task", *map(length_label, lengths)], rows), *remark("ruler_smol.json")]


def ruler_tokens() -> list[str]:
    """Tokens of RULER's prompts that were asked for, and that were read, by model and length."""
    sums: dict[tuple[str, int], Counter[str]] = {}
    for row in Record.load(RESULTS / "ruler_smol.json").results:
        if row["metric"] != MEAN:
            counts = {name: row[name] for name in ("trials", "asked", "read")}
            sums.setdefault((row["model"], row["length"]), Counter()).update(counts)
    rows = [
        [
            model, length_label(length), str(one["trials"]), f"{one['asked']:,}", f"{one['read']:,}",
            f"{100 * (1 - one['read'] / one['asked']):.1f}%",
        ]
        for (model, length), one in sums.items()
    ]  # fmt: skip
    return lines(["model", "tokens", "cases", "asked for", "read", "saved"], rows)


def benchmarks() -> list[str]:
    """Every published benchmark on smol-sala, a case of each task, with stand-in data."""
    rows = []
    for name, cells in read("official_smol.json")["runs"].items():
        for row in cells:
            if not row["task"].startswith("mean of") and row["task"] != "all":
                counts = [str(row["trials"]), f"{row['asked']:,}", f"{row['read']:,}"]
                rows.append([name, row["task"], row["metric"], f"{row['score']:.2g}", *counts])
    return lines(["benchmark", "task", "score is", "score", "cases", "asked for", "read"], rows)


def shared() -> list[str]:
    """Tokens asked for and to be read where ten questions are about one text."""
    rows = [
        [
            length_label(row["length"]), str(row["cases"]), f"{row['asked']:,}", f"{row['read']:,}",
            f"{row['asked'] / row['read']:.1f}x",
        ]
        for row in read("official_smol.json")["shared"]
    ]  # fmt: skip
    return lines(["tokens of a text", "questions", "asked for", "to be read", "fewer"], rows)


def sources() -> list[str]:
    """How often the fact is among the passages that smol-sala's answers come from, for right and wrong answers."""

    def share(some: Sequence[dict[str, Any]], most: int) -> str:
        count = sum(row["rank"] is not None and row["rank"] <= most for row in some)
        if not some:
            return "–"
        low, high = interval(count / len(some), len(some))
        return f"{count} of {len(some)} ({100 * low:.0f}–{100 * high:.0f}%)"

    known = [*read("sources_smol.json")["rows"]]
    known += [row for row in read("sources_passages.json")["rows"] if row["kind"] == "passage"]
    groups = {
        (length, is_passage): [
            row for row in known if (row["length"], row["kind"] == "passage") == (length, is_passage)
        ]
        for is_passage in (False, True)
        for length in sorted({row["length"] for row in known if (row["kind"] == "passage") == is_passage})
    }
    rows = []
    for (length, is_passage), some in groups.items():
        right, wrong = ([row for row in some if row["is_right"] is is_right] for is_right in (True, False))
        what = "passages of real text" if is_passage else "needles"
        covered = statistics.mean(row["covered"] for row in some)
        rows.append(
            [what, length_label(length), *(share(right, most) for most in (1, 3)), share(wrong, 3), f"{covered:.1%}"]
        )
    head = ["facts", "tokens", "right answers: fact in the first passage", "in the first three"]
    return lines([*head, "wrong answers: in the first three", "of the prompt in three passages"], rows)


def sources_cost() -> list[str]:
    """What decoding takes with sources, without them, and at a commit before them."""
    found = read("sources_cost.json")

    def ratio(row: dict[str, Any], name: str) -> str:
        low, middle, high = row[name]["cpu_ms"]
        return f"{middle:.3f} ({low:.3f}–{high:.3f})"

    rows = [
        [
            f"{int(length):,}",
            *(f"{row[kind]['cpu_ms']:.2f}" for kind in ("before", "off", "on") if kind in row),
            *(ratio(row, name) for name in ("off_to_before", "on_to_off") if name in row),
        ]
        for length, row in found["lengths"].items()
    ]
    has_before = all("before" in row for row in found["lengths"].values())
    head = ["tokens of the prompt", *["before, ms per token"] * has_before, "off, ms per token", "on, ms per token"]
    return lines([*head, *["off to before (quartiles)"] * has_before, "on to off (quartiles)"], rows)


def topk() -> list[str]:
    """Right answers of smol-sala by the blocks that a query selects."""
    rows = []
    for run in read("topk_smol.json")["runs"]:
        right = sum(row["is_right"] for row in run["rows"])
        low, high = interval(right / len(run["rows"]), len(run["rows"]))
        rows.append([run["attention"], f"{right} of {len(run['rows'])} ({100 * low:.0f}–{100 * high:.0f}%)"])
    return lines(["attention", "right answers (95% interval)"], rows)


def sampling() -> list[str]:
    """Everyday questions by temperature and repetition penalty."""
    plain = {"questions": "everyday", "asked": 200, "temperature": 0, "repetition_penalty": 1.0}
    plain["all"] = read_model("results.json")["everyday"]["student"]["all"]  # of an earlier run
    found = [*read_model("run/sampling.json"), plain]
    rows = []
    for row in sorted(found, key=lambda row: (row["questions"], row["temperature"], row["repetition_penalty"])):
        shares = [f"{100 * row['all'][name]:.1f}".removesuffix(".0") + "%" for name in ("correct", "ended", "loops")]
        asked = f"{row['asked']} of `{row['questions']}.jsonl`"
        rows.append([asked, f"{row['temperature']:g}", f"{row['repetition_penalty']:g}", *shares])
    return lines(["questions", "temperature", "repetition penalty", "correct", "ended", "loops"], rows)


def quantization_methods() -> list[str]:
    """What each way of rounding cost an earlier version of smol-sala."""
    names = {
        "fp8 products": "whole weights, FP8 products (`--prefill fp8`)",
        "8 bits, rtn": "8 bits, `rtn`",
        "4 bits, rtn": "4 bits, `rtn`",
        "4 bits, gptq": "4 bits, `gptq`",
        "4 bits, awq": "4 bits, `awq`",
        "4 bits, rtn, v_proj and last layer in 8": "4 bits, `rtn`, `v_proj` and last layer in 8",
        "4 bits, gptq, own text": "4 bits, `gptq`, calibrated with the model's own text",
        "4 bits, gptq, v_proj and last layer in 8": "4 bits, `gptq`, `v_proj` and last layer in 8",
        "4 bits, gptq, v_proj in 8": "4 bits, `gptq`, `v_proj` in 8",
        "4 bits, gptq, v_proj, down_proj in 8": "4 bits, `gptq`, `v_proj` and `down_proj` in 8",
        "4 bits, gptq, groups of 32": "4 bits, `gptq`, groups of 32",
        "4 bits, gptq, groups of 32, v_proj and last layer in 8":
            "4 bits, `gptq`, groups of 32, `v_proj` and last layer in 8",
    }  # fmt: skip
    found, rows = read("quant_quality.json"), []
    for key, name in names.items():
        entry = found[key]
        size = f"{entry['mib']:.0f}" if "mib" in entry else ""
        rows.append([name, f"{entry['ratio']:.3f}x", f"{entry['kl']:.3f}", f"{100 * entry['agreement']:.0f}%", size])
    return lines(["", "perplexity", "KL, nats", "same first choice", "MiB"], rows)


def typed_needles() -> list[str]:
    """Needles found by two versions of smol-sala, as a user types the question."""
    found = read_model("results.json")["typed"]
    kinds = {"number": "number", "word": "word", "uuid": "code of hex digits"}
    lengths = sorted({int(length) for kinds in found.values() for rows in kinds.values() for length in rows})
    head = ["tokens", *(f"{version}: {name}" for version in found for name in kinds.values())]

    def count(row: dict[str, int] | None) -> str:
        return "–" if row is None else f"{row['found']} of {row['trials']}"

    rows = [
        [f"{length:,}", *(count(of[kind].get(str(length))) for of in found.values() for kind in kinds)]
        for length in lengths
    ]
    return lines(head, rows)


def typed_perplexity() -> list[str]:
    """Perplexity of two versions of smol-sala beside the teacher's."""
    names = {
        "heldout": "held out, of the sources trained on",
        "moby-dick": "Moby Dick (source not trained on)",
    }
    found, rows = read_model("results.json")["perplexity"], []
    for key, name in names.items():
        teacher = found[key]["teacher"]
        cells = [name, f"{teacher:.2f}"]
        for version in ("0.4", "0.5"):
            cells += [f"{found[key][version]:.2f}", f"{found[key][version] / teacher:.2f}"]
        rows.append(cells)
    return lines(["text", "teacher", "0.4", "ratio", "0.5", "ratio"], rows)


def accepted() -> list[str]:
    """Requests that fit the server's schema and were accepted."""
    rows = [[f"`{path}`", f"{good} of {all_}"] for path, (good, all_) in read("schemathesis.json")["accepted"].items()]
    return lines(["", "accepted"], rows)


def random_requests() -> list[str]:
    """What schemathesis sent, and the statuses that came back."""
    found = read("schemathesis.json")
    counts = {
        f"operations, each with {found['examples']} random examples": found["operations"],
        "requests": found["requests"],
        **{f"answered with {status}": count for status, count in found["statuses"].items()},
        "answered with 5xx": found["statuses"].get("5xx", 0),
    }
    return lines([f"schemathesis {found['version']}", ""], [[name, f"{count:,}"] for name, count in counts.items()])


def clients() -> list[str]:
    """Versions of the clients that were tried, and whether their programs passed."""
    rows = [
        [f"`{name}`", ", ".join(f"{package} {version}" for package, version in sorted(found["versions"].items())),
         found["outcome"], found["date"]]
        for name, found in sorted(read("foreign_suites.json")["clients"].items())
    ]  # fmt: skip
    return lines(["program", "packages", "outcome", "run on"], rows)


def foreign_suites() -> list[str]:
    """How many tests of other projects carry over, and pass."""
    rows = [
        [name, found["commit"][:7], *(f"{found[count]}" for count in ("collected", "run", "passed")), found["date"]]
        for name, found in sorted(read("foreign_suites.json")["suites"].items())
    ]
    return lines(["suite", "commit", "cases", "carry over", "pass", "run on"], rows)


def left_out() -> list[str]:
    """Why the other tests of other projects are left out."""
    rows = [
        [name.partition(":")[0], reason, str(count)]
        for name, found in sorted(read("foreign_suites.json")["suites"].items())
        for reason, count in sorted(found["left_out"].items(), key=lambda item: -item[1])
    ]
    return lines(["suite", "left out", "cases"], rows)


def engine() -> list[str]:
    """What batches, prefixes, files and drafts gain on a CPU."""
    found = read("engine_cpu.json")
    prefix, tokens = found["prefix"], found["prefix_tokens"]
    ratios = {
        "8 requests together, against the same one after another": f"{found['batch']['times_faster']:.1f}x faster",
        f"second turn over a prefix of {tokens:,} tokens, against the first": f"{prefix['times_sooner']:.0f}x sooner",
        "the same after a restart, from disk": f"{prefix['times_sooner_from_disk']:.0f}x sooner",
        "drafts by prompt lookup on a copy task, against plain decoding":
            f"{found['lookup']['times_faster']:.1f}x faster",
    }  # fmt: skip
    return lines(["", "ratio"], [*ratios.items()])


TABLES: dict[str, Callable[[], list[str]]] = {
    **estimates.TABLES,
    **gpu_tables.TABLES,
    "accepted": accepted,
    "random_requests": random_requests,
    "benchmarks": benchmarks,
    "cache-kinds": kinds_of_cache,
    "clients": clients,
    "conversations": conversations,
    "cpu-bits": cpu_bits,
    "engine-cpu": engine,
    "everyday": everyday,
    "finetuning": finetuning,
    "foreign-suites": foreign_suites,
    "kv-home": kv_home,
    "left-out": left_out,
    "perplexity": typed_perplexity,
    "quantization": quantization,
    "quantization-methods": quantization_methods,
    "ruler": ruler,
    "ruler-tokens": ruler_tokens,
    "sampling": sampling,
    "shared-texts": shared,
    "sources": sources,
    "sources-cost": sources_cost,
    "sizing-bytes": make_sizing.table_of_bytes,
    "sizing-sequences": make_sizing.table_of_sequences,
    "tiers": tiers,
    "tiers-64": many_tiers,
    "topk": topk,
    "typed-needles": typed_needles,
}


def write_all() -> list[Path]:
    """Write all pages that differ from their results, and return them."""
    changed = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := render(text)) != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed
