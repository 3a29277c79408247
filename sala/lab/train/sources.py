"""The rows of a stage from its sources: tokenized texts, the teacher's samples, facts and passages in texts."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.eval.tasks.needle import CHATML, NeedleMaker, Wrap
from sala.lab.train.data import Mixture, RowMaker, StreamRows, load_stream, read_documents
from sala.lab.train.documents import DialogueRows, TokenizedDocuments, to_stream
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
    maker = _RowMakers(run, stage, Tokenizer.load(start), SalaConfig.load(start).eos_token_id)
    with main_process_first():
        if isinstance(stage, MixStage):
            return [
                StepPart(make, source.rows, source.seq_len or stage.seq_len, source.is_sparse, source.every)
                for source, make in ((source, maker.weighted_rows(source)) for source in stage.data)
            ]
        makers = [maker.rows(source) for source in stage.data]
    shares = Mixture(makers, [source.weight for source in stage.data], run.recipe.seed)
    return [StepPart(shares, stage.batch_rows, stage.seq_len)]


class _RowMakers:
    """Makes the rows of a stage's sources."""

    def __init__(self, run: RecipeRun, stage: Learning, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        self.run, self.stage, self.tokenizer = run, stage, tokenizer
        self.eos = ends[0] if ends else 0
        self.seed = run.recipe.seed * 1009 + run.recipe.stages.index(stage)

    def weighted_rows(self, source: Source) -> RowMaker:
        """Return rows with weights per token, for a mixture."""
        if source.kind == "dialogues":
            seed = self.seed * 31 + self.stage.data.index(source)
            length = source.seq_len or self.stage.seq_len
            return DialogueRows(written_documents(self.run, source.path), length, self.eos, seed, source.shortest)
        rows = self.rows(source)
        if source.kind in ("needle", "reading"):
            return lambda index: weigh_needle(rows(index), source.answer_share)
        return lambda index: weigh_text(rows(index))

    def rows(self, source: Source) -> RowMaker:
        run, tokenizer, length = self.run, self.tokenizer, source.seq_len or self.stage.seq_len
        if source.kind == "reading":
            return self._reading(source, length)
        if source.kind == "needle":
            wraps = [CHATML, chat_wrap(tokenizer)] if source.has_system else [CHATML]
            makers = needle_makers(run, tokenizer, source.path, source.max_documents, wraps)
            needles = NeedleRows(makers, length, source.num_keys, source.num_topics, self.eos, self.seed)
            if not source.table:
                return needles
            passages = self._reading(source, length)
            return lambda index: passages(index) if index % READING_EVERY == 2 else needles(index)
        text_end = tokenizer.token_id(TEXT_END)
        end = self.eos if text_end is None or not source.rows else text_end
        if source.kind in ("samples", "dialogues"):
            documents = written_documents(run, source.path)
            if source.rows:
                documents = documents.select(np.flatnonzero(documents.is_text()).tolist())
            return StreamRows(to_stream(documents, end), length, self.seed, source.truth)

        def note(name: str, count: int) -> None:
            run.note(self.stage.name, f"reading {name}: {count:,}")

        stream = load_stream(source, tokenizer, end, run.base, run.work / "tokens", note)
        return StreamRows(stream, length, self.seed, source.truth)

    def _reading(self, source: Source, length: int) -> ReadingRows:
        table = ReadingTable.load(self.run.base / source.table, self.run.base / source.lists)
        documents, encode = _texts(self.run, self.tokenizer, source.path, source.max_documents)
        wrap, shape = chat_wrap(self.tokenizer), (length, source.num_keys, source.num_topics)
        return ReadingRows(table, documents, encode, wrap, self.eos, *shape, self.seed)


def _texts(
    run: RecipeRun, tokenizer: Tokenizer, path: str, limit: int | None
) -> tuple[list[str], Callable[[str], list[int]]]:
    """Return texts in which something is hidden, and what encodes them."""
    documents = list(islice(read_documents(Source(path=path), run.base), limit))
    return documents, partial(tokenizer.encode, bos=False, parse_special=True)


def written_documents(run: RecipeRun, name: str) -> TokenizedDocuments:
    """Return the documents of the `sample` stage with this name."""
    sampling = next((s for s in run.recipe.stages if isinstance(s, SampleStage) and s.name == name), None)
    if sampling is None:
        raise InputError("path", f"is {name!r}", "give the name of an earlier stage of kind 'sample'")
    return TokenizedDocuments.load(run.directory(sampling) / "samples.npz")


def needle_makers(
    run: RecipeRun, tokenizer: Tokenizer, path: str, limit: int | None = None, wraps: Sequence[Wrap] = (CHATML,)
) -> list[NeedleMaker]:
    """Return a needle maker over the texts of `path` for each wrap."""
    documents, encode = _texts(run, tokenizer, path, limit)
    end = tokenizer.token_id("<|im_end|>")
    return [NeedleMaker(encode, documents, seed=run.recipe.seed, wrap=wrap, end_id=end) for wrap in wraps]
