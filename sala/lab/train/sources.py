"""The rows of a stage from its sources: tokenized texts, the teacher's samples, facts and passages in texts."""

from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.eval.tasks.needle import CHATML, NeedleMaker, Wrap
from sala.lab.train.data import Mixture, RowMaker, StreamRows, load_stream, read_documents
from sala.lab.train.documents import DialogueRows, Documents, to_stream
from sala.lab.train.halo.sample import TEXT_END
from sala.lab.train.needles import NeedleRows, ReadingRows, ReadingTable, chat_wrap
from sala.lab.train.processes import main_process_first
from sala.lab.train.recipe import Learning, MixStage, SampleStage, Source
from sala.lab.train.recipe_run import RecipeRun
from sala.lab.train.steps import StepPart, weigh_needle, weigh_text
from sala.text.tokenizer import Tokenizer

READING_EVERY = 3  # every third row of a needle source with a table is a reading row


def step_parts(run: RecipeRun, stage: Learning, start: Path) -> list[StepPart]:
    """Return what every step holds: rows of one length in the shares of the sources, or `rows` rows of each source."""
    tokenizer = Tokenizer.load(start)
    with main_process_first():
        if isinstance(stage, MixStage):
            return [
                StepPart(
                    _maker(run, stage, source, tokenizer, start), source.rows, _length(stage, source), source.is_sparse
                )
                for source in stage.data
            ]
        makers = [_rows_of(run, stage, source, tokenizer, start) for source in stage.data]
    shares = Mixture(makers, [source.weight for source in stage.data], run.recipe.seed)
    return [StepPart(shares, stage.batch_rows, stage.seq_len, is_sparse=False)]


def _length(stage: Learning, source: Source) -> int:
    return source.seq_len or stage.seq_len


def _maker(run: RecipeRun, stage: Learning, source: Source, tokenizer: Tokenizer, start: Path) -> RowMaker:
    length = _length(stage, source)
    seed = _seed(run, stage) * 31 + stage.data.index(source)
    if source.kind == "dialogues":
        documents = _documents(run, source)
        return DialogueRows(documents, length, _eos(start), seed, source.shortest)
    rows = _rows_of(run, stage, source, tokenizer, start)
    if source.kind in ("needle", "reading"):
        return lambda index: weigh_needle(rows(index), source.answer_share)
    return lambda index: weigh_text(rows(index))


def _seed(run: RecipeRun, stage: Learning) -> int:
    return run.recipe.seed * 1009 + run.recipe.stages.index(stage)


def _eos(start: Path) -> int:
    config = SalaConfig.load(start)
    return config.eos_token_id[0] if config.eos_token_id else 0


def _rows_of(run: RecipeRun, stage: Learning, source: Source, tokenizer: Tokenizer, start: Path) -> RowMaker:
    eos, seed, length = _eos(start), _seed(run, stage), _length(stage, source)
    if source.kind == "reading":
        return _reading(run, source, tokenizer, length, eos, seed)
    if source.kind == "needle":
        wraps = [CHATML, chat_wrap(tokenizer)] if source.has_system else [CHATML]
        makers = needle_makers(run, tokenizer, source.path, source.max_documents, wraps)
        needles = NeedleRows(makers, length, source.num_keys, source.num_topics, eos, seed)
        if not source.table:
            return needles
        passages = _reading(run, source, tokenizer, length, eos, seed)
        return lambda index: passages(index) if index % READING_EVERY == 2 else needles(index)
    text_end = tokenizer.token_id(TEXT_END)
    end = eos if text_end is None or not source.rows else text_end
    if source.kind in ("samples", "dialogues"):
        documents = _documents(run, source)
        if source.rows:
            documents = documents.select(np.flatnonzero(documents.is_text()).tolist())
        return StreamRows(to_stream(documents, end), length, seed, source.truth)
    cache = run.work / "tokens"
    line = load_stream(
        source, tokenizer, end, run.base, cache, lambda name, n: run.note(stage.name, f"reading {name}: {n:,}")
    )
    return StreamRows(line, length, seed, source.truth)


def _reading(run: RecipeRun, source: Source, tokenizer: Tokenizer, length: int, end: int, seed: int) -> ReadingRows:
    table = ReadingTable.load(run.base / source.table, run.base / source.lists)
    documents = list(islice(read_documents(Source(path=source.path), run.base), source.max_documents))
    encode = partial(tokenizer.encode, bos=False, parse_special=True)
    return ReadingRows(
        table, documents, encode, chat_wrap(tokenizer), end, length, source.num_keys, source.num_topics, seed
    )


def _documents(run: RecipeRun, source: Source) -> Documents:
    sampling = next((s for s in run.recipe.stages if isinstance(s, SampleStage) and s.name == source.path), None)
    if sampling is None:
        raise InputError("path", f"is {source.path!r}", "give the name of an earlier stage of kind 'sample'")
    return Documents.load(run.directory(sampling) / "samples.npz")


def needle_makers(
    run: RecipeRun, tokenizer: Tokenizer, path: str, limit: int | None = None, wraps: list[Wrap] | None = None
) -> list[NeedleMaker]:
    """Return a needle maker over the texts of `path` for each wrap."""
    source = Source(path=path, max_documents=limit)
    documents = list(islice(read_documents(source, run.base), source.max_documents))
    end = tokenizer.token_id("<|im_end|>")
    encode = partial(tokenizer.encode, bos=False, parse_special=True)
    return [NeedleMaker(encode, documents, seed=run.recipe.seed, wrap=wrap, end_id=end) for wrap in wraps or [CHATML]]
