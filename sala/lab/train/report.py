"""Compare a hybrid with its source model: perplexity, tasks, recall and speed by length, as JSON, tables and plots."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from sala.backends.torch.model import SalaModel
from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.bench.measure import measure_latency, open_checkpoint, release
from sala.lab.eval.runner import find_needles
from sala.lab.eval.tasks.choice import read_tasks
from sala.lab.eval.tasks.needle import NeedleMaker
from sala.lab.report.kinds import comparison, pair, save, write_markdown
from sala.lab.train.data import read_documents
from sala.lab.train.recipe import Report, Source
from sala.lab.train.recipe_run import RecipeRun
from sala.lab.train.score import choice_accuracy, perplexity
from sala.llm import LLM
from sala.options import Dtype, Options
from sala.text.tokenizer import Tokenizer

Values = dict[tuple[str, str | int | None, str], float]  # by measure, what it was measured on, and its unit

MODELS = ("source", "hybrid")
PIECE = 1024  # context length for perplexity
MAX_PIECES = 200
MAX_QUESTIONS = 1000
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
    results: list[Values] = []
    for name, directory in zip(MODELS, (start, final), strict=True):
        run.note("report", f"measuring the {name}")
        results.append(_measure(directory, wanted, run))
        release()
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type
    settings = {"device": device, "lengths": list(wanted.lengths), "trials": wanted.trials}
    source, hybrid = results
    rows = [pair(key[0], source.get(key), value, *key[1:]) for key, value in hybrid.items()]
    record = comparison(final.name, *MODELS, settings, rows)
    save(record, out, "report")
    write_markdown(record, out / "report.md", "The hybrid and its source")
    run.note("report", f"wrote {out / 'report.md'}")


@torch.inference_mode()
def _measure(directory: Path, wanted: Report, run: RecipeRun) -> Values:
    """Return quality, and speeds at batch size 1, in the order of the report."""
    texts, tasks = ([run.base / name for name in names] for names in (wanted.texts, wanted.tasks))
    model, tokenizer = run.load(directory), Tokenizer.load(directory)
    out: Values = {("parameters", None, ""): sum(weight.numel() for weight in model.parameters())}
    out |= {("perplexity", path.name, ""): _text_perplexity(model, tokenizer, path) for path in texts}
    plain = partial(tokenizer.encode, bos=False)
    found = {path.stem: choice_accuracy(model, read_tasks(path)[:MAX_QUESTIONS], plain) for path in tasks}
    out |= {("accuracy", name, "share"): one.acc for name, one in found.items()}
    out |= {("accuracy per character", name, "share"): one.acc_norm for name, one in found.items()}
    config = model.config
    del model
    release()
    lengths = _known(config, wanted.lengths)
    if lengths and wanted.haystack:
        encode = partial(tokenizer.encode, bos=False, parse_special=True)
        maker = NeedleMaker(encode, list(read_documents(Source(path=wanted.haystack), run.base)), seed=11)
        loading = Options(device=str(run.device), kernels=run.kernels, dtype="float32", max_batch=1, snapshots=0)
        with LLM(directory, options=loading, ctx=max(lengths)) as llm:
            out |= {("needles found", n, "share"): find_needles(llm, maker, n, wanted.trials) for n in lengths}
    dtype: Dtype = "bfloat16" if run.device.type == "cuda" else "float32"
    target = open_checkpoint(directory, Options(device=str(run.device), dtype=dtype, kernels=run.kernels))
    speeds = {n: measure_latency(target, n, NUM_DECODED) for n in _known(config, wanted.lengths, NUM_DECODED)}
    out |= {("prefill", n, "tok/s"): one.prefill_per_second for n, one in speeds.items()}
    return out | {("decode", n, "tok/s"): one.decode_per_second for n, one in speeds.items()}


def _text_perplexity(model: SalaModel, tokenizer: Tokenizer, path: Path) -> float:
    documents = read_documents(Source(path=path.name), path.parent)
    tokens = to_tokens(documents, tokenizer, model.config.eos_token_id[0] if model.config.eos_token_id else 0)
    if len(tokens) < 2:
        raise InputError("texts", f"has {path}, which is empty", "give a text, or leave it out")
    return perplexity(model, tokens[: MAX_PIECES * PIECE], min(PIECE, len(tokens)))


def to_tokens(documents: Iterable[str], tokenizer: Tokenizer, eos: int) -> list[int]:
    """Return the tokens of all documents, with an end token after each."""
    return [token for ids in tokenizer.encode_many(list(documents)) for token in [*ids, eos]]


def _known(config: SalaConfig, lengths: Sequence[int], more: int = 0) -> list[int]:
    return sorted(length for length in set(lengths) if length + more <= config.max_position_embeddings)
