"""Compare a hybrid with its source model: perplexity, tasks, recall and speed by length, as JSON, tables and plots."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sala.backends.torch.model import SalaModel
from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.bench.measure import release
from sala.lab.eval.tasks.case import score_value as find
from sala.lab.eval.tasks.choice import read_tasks
from sala.lab.eval.tasks.needle import NeedleCase, NeedleMaker, NeedleSpec, ValueChoice
from sala.lab.report.kinds import comparison, pair, save, write_markdown
from sala.lab.report.record import ResultRow
from sala.lab.train.data import read_documents
from sala.lab.train.models import load_for_training
from sala.lab.train.recipe import Report, Source
from sala.lab.train.recipe_run import RecipeRun
from sala.lab.train.score import choice_accuracy, generate_greedy, perplexity, score_rows
from sala.llm import LLM
from sala.text.tokenizer import Tokenizer

Values = dict[str, Any]

MODELS = ("source", "hybrid")
PIECE = 1024  # context length for perplexity
MAX_PIECES = 200
MAX_QUESTIONS = 1000
NUM_ANSWERED = 32  # answer tokens in which the value of a needle must occur
NUM_DECODED = 32  # tokens generated to measure the decoding speed


def write_recipe_report(run: RecipeRun, start: Path, final: Path) -> None:
    """Measure source and hybrid, and write report.json, report.md and, with matplotlib, report.png.

    Do nothing if the recipe has no report, or if it is written already. Needles come from the test split: their
    wordings, keys and documents do not occur in training data. Lengths beyond a model's max_position_embeddings are
    left out.
    """
    wanted, out = run.recipe.report, run.work / "report"
    if wanted is None or (out / "report.md").is_file():
        return
    results: Values = {}
    for name, directory in zip(MODELS, (start, final), strict=True):
        run.note("report", f"measuring the {name}")
        results[name] = _measure(directory, wanted, run.base, run.device)
        results[name]["speed"] = measure_speed(directory, wanted.lengths, run.device)
        release()
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type
    settings = {"device": device, "lengths": list(wanted.lengths), "trials": wanted.trials}
    record = comparison(final.name, *MODELS, settings, to_rows(results))
    save(record, out, "report")
    write_markdown(record, out / "report.md", "The hybrid and its source")
    run.note("report", f"wrote {out / 'report.md'}")


@torch.inference_mode()
def _measure(directory: Path, wanted: Report, base: Path, device: torch.device) -> Values:
    texts, tasks = ([base / name for name in names] for names in (wanted.texts, wanted.tasks))
    model, tokenizer = load_for_training(directory, device), Tokenizer.load(directory)
    out: Values = {"parameters": sum(weight.numel() for weight in model.parameters())}
    out["perplexity"] = {path.name: _text_perplexity(model, tokenizer, path) for path in texts}
    plain = partial(tokenizer.encode, bos=False)
    found = {path.stem: choice_accuracy(model, read_tasks(path)[:MAX_QUESTIONS], plain) for path in tasks}
    out["tasks"] = {name: value._asdict() for name, value in found.items()}
    out["needle"] = {}
    if wanted.haystack:
        encode = partial(tokenizer.encode, bos=False, parse_special=True)
        maker = NeedleMaker(encode, list(read_documents(Source(path=wanted.haystack), base)), seed=11)
        for length in _known(model.config, wanted.lengths):
            out["needle"][str(length)] = recall(model, tokenizer, needle_cases(maker, length, 1, wanted.trials))
    return out


def _text_perplexity(model: SalaModel, tokenizer: Tokenizer, path: Path) -> float:
    documents = read_documents(Source(path=path.name), path.parent)
    tokens = to_tokens(documents, tokenizer, model.config.eos_token_id[0] if model.config.eos_token_id else 0)
    if len(tokens) < 2:
        raise InputError("texts", f"has {path}, which is empty", "give a text, or leave it out")
    return perplexity(model, tokens[: MAX_PIECES * PIECE], min(PIECE, len(tokens)))


def to_tokens(documents: Iterable[str], tokenizer: Tokenizer, eos: int) -> list[int]:
    """Return the tokens of all documents, with an end token after each."""
    return [token for ids in tokenizer.encode_many(list(documents)) for token in [*ids, eos]]


def needle_cases(
    maker: NeedleMaker, length: int, num_keys: int, trials: int, value: ValueChoice = "mixed"
) -> list[NeedleCase]:
    """Return needle prompts of the test split; prompt and answer fit into `length` tokens."""
    spec = NeedleSpec(length - NUM_ANSWERED, num_keys=num_keys, value=value, split="test")
    return [maker.make(spec, index) for index in range(trials)]


def recall(model: SalaModel, tokenizer: Tokenizer, cases: Sequence[NeedleCase]) -> float:
    """Return the share of needles whose value occurs in the model's greedy answer."""
    values = [tokenizer.encode(f" {case.value}", bos=False) for case in cases]
    scores = score_rows(model, [(case.token_ids, value) for case, value in zip(cases, values, strict=True)])
    others = [case for case, score in zip(cases, scores, strict=True) if not score.is_greedy]
    answers = generate_greedy(model, [case.token_ids for case in others], NUM_ANSWERED, model.config.eos_token_id)
    found = sum(find(case.value, tokenizer.decode(ids)) == 1 for case, ids in zip(others, answers, strict=True))
    return (len(cases) - len(others) + found) / len(cases)


def measure_speed(directory: Path, lengths: Sequence[int], device: torch.device) -> Values:
    """Return the prefill and decode speeds in tokens per second for each prompt length, at batch size 1."""
    config = SalaConfig.load(directory)
    known = _known(config, lengths, NUM_DECODED)
    if not known:
        return {}
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    rng = np.random.default_rng(0)
    out: Values = {}
    with LLM(directory, device=str(device), dtype=dtype, ctx=max(known) + NUM_DECODED, max_batch=1) as llm:
        for length in (min(known), *known):  # the first one warms up
            llm.reset()
            prompt = rng.integers(0, config.vocab_size, length).tolist()
            timings = llm.generate(prompt, temperature=0, max_tokens=NUM_DECODED, ignore_eos=True).timings
            out[str(length)] = {"prefill": timings.prompt_per_second, "decode": timings.predicted_per_second}
    return out


def _known(config: SalaConfig, lengths: Sequence[int], more: int = 0) -> list[int]:
    return sorted(length for length in set(lengths) if length + more <= config.max_position_embeddings)


def to_rows(results: Mapping[str, Any]) -> list[ResultRow]:
    """Return the measurements of both models side by side."""
    source, hybrid = (results[name] for name in MODELS)
    rows = [pair("parameters", source["parameters"], hybrid["parameters"])]
    rows += [
        pair("perplexity", value, hybrid["perplexity"][name], name) for name, value in source["perplexity"].items()
    ]
    for key, measure in (("acc", "accuracy"), ("acc_norm", "accuracy per character")):
        rows += [pair(measure, source["tasks"][n][key], hybrid["tasks"][n][key], n, "share") for n in source["tasks"]]
    for length, found in hybrid["needle"].items():
        rows.append(pair("needles found", source["needle"].get(length), found, int(length), "share"))
    for kind in ("prefill", "decode"):
        for length, speeds in hybrid["speed"].items():
            before = source["speed"].get(length, {}).get(kind)
            rows.append(pair(kind, before, speeds[kind], int(length), "tok/s"))
    return rows
