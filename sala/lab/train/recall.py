"""How many facts hidden in long texts a model still finds: measured on a model in memory, before and after training.

A case is a conversation about one text in which several facts of different wordings are hidden; each turn asks for one.
One forward pass over the conversation with its right answers tells for every turn whether the model would write the
value: a fact counts as found if each token of its value is the model's first choice. That is what greedy decoding
would write after the same beginning, at the cost of one prefill for all facts of a text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.eval.tasks.needle import NeedleMaker, NeedleSpec, Wrap
from sala.lab.eval.tasks.prose import write_documents
from sala.lab.train.needles import PARAGRAPH, chat_wrap
from sala.options.schema import length_label
from sala.text.tokenizer import Tokenizer

FACTS = 8  # in each text, of different wordings
SHORTEST = 2048  # tokens; facts and questions leave little text in fewer
NUM_DOCUMENTS = 512  # of the built-in prose
SEED = 29
FALL = 0.1  # a larger relative loss of facts is worth a warning,
FEW = 3  # unless fewer facts than this are lost
LOSS_RISE = 0.1  # and the mean loss of their tokens has risen by no more
_RESERVED = 1 << 20  # indices of cases that no training uses
Logits = Callable[[Tensor, Tensor], Tensor]  # tokens [n], places [k] → logits [k, vocab] at these places


@dataclass(frozen=True, slots=True, eq=False)
class RecallCase:
    """A conversation: its tokens [n], and the places of the tokens of each value in it."""

    length: int  # asked for; the tokens may be a few less
    tokens: Tensor
    values: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """The facts found in texts of one length, and the mean negative log-probability of a token of their values."""

    length: int
    found: int
    asked: int
    loss: float

    @property
    def share(self) -> float:
        return self.found / self.asked


def recall_cases(
    tokenizer: Tokenizer, end: int | None, lengths: Sequence[int], texts: Mapping[int, int] | int = 1, seed: int = SEED
) -> list[RecallCase]:
    """Return cases of each length, `texts` of each; wordings, keys and documents are those that no training sees.

    Raise InputError for a length in which not even one fact fits.
    """
    maker = needle_maker(tokenizer, end, seed=seed)
    cases = []
    for length in sorted(lengths):
        for index in range(texts if isinstance(texts, int) else texts[length]):
            cases.append(_make(maker, tokenizer, length, _RESERVED + index))
    return cases


def needle_maker(
    tokenizer: Tokenizer, end: int | None, documents: Sequence[str] | None = None, seed: int = SEED
) -> NeedleMaker:
    """Return a maker of conversations in the model's chat format; `documents` are for training, not for tests."""
    try:
        wrap = chat_wrap(tokenizer)
    except Exception as error:
        if not isinstance(error, ValueError | InputError) and type(error).__name__ != "TemplateError":
            raise
        wrap = Wrap("", PARAGRAPH, PARAGRAPH)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=False, parse_special=True)

    prose = write_documents(NUM_DOCUMENTS)
    train = list(documents) if documents else prose[1::2]
    return NeedleMaker(encode, {"train": train, "test": prose[::2]}, seed, wrap, end)


def _make(maker: NeedleMaker, tokenizer: Tokenizer, length: int, index: int) -> RecallCase:
    """Return a case with as many facts as fit, at most `FACTS`."""
    num_facts = FACTS
    while True:
        try:
            ids, is_answer = maker.dialogue(NeedleSpec(length), index, 1, num_facts)
            break
        except InputError:
            if num_facts == 1:
                raise
            num_facts //= 2
    starts = [at for at in range(len(ids)) if is_answer[at] and not is_answer[at - 1]]
    return RecallCase(length, torch.tensor(ids), tuple(_value(tokenizer, ids, is_answer, at) for at in starts))


def _value(tokenizer: Tokenizer, ids: Sequence[int], is_answer: Sequence[bool], start: int) -> range:
    """Return the places of the tokens of an answer, without its full stop and the end of the turn."""
    end = next((at for at in range(start, len(ids)) if not is_answer[at]), len(ids))
    whole = tokenizer.decode(list(ids[start:end])).strip().rstrip(".")
    stop = next(at for at in count(start + 1) if at >= end or whole in tokenizer.decode(list(ids[start:at])))
    return range(start, stop)


@torch.no_grad()
def measure_recall(
    logits: Logits, cases: Sequence[RecallCase], on_case: Callable[[int, int], None] = lambda done, total: None
) -> list[Recall]:
    """Return the recall by length."""
    found: dict[int, list[tuple[bool, float, int]]] = {}
    for done, case in enumerate(cases):
        places = torch.tensor([at for value in case.values for at in value])
        scores = logits(case.tokens, places - 1).float().cpu()
        wanted = case.tokens[places]
        is_first = (scores.argmax(-1) == wanted).tolist()
        losses = F.cross_entropy(scores, wanted, reduction="none").tolist()
        begin = 0
        for value in case.values:
            own = slice(begin, begin := begin + len(value))
            found.setdefault(case.length, []).append((all(is_first[own]), sum(losses[own]), len(value)))
        on_case(done + 1, len(cases))
    return [
        Recall(
            length,
            sum(one for one, _, _ in rows),
            len(rows),
            sum(loss for _, loss, _ in rows) / sum(n for _, _, n in rows),
        )
        for length, rows in found.items()
    ]


def logits_of(model: Any) -> Logits:
    """Return the logits function of a causal language model of transformers, on its own device and in its precision.

    With a cache our models read a long text in chunks.
    """

    def logits(tokens: Tensor, places: Tensor) -> Tensor:
        device = next(parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
        out = model(input_ids=tokens[None].to(device), logits_to_keep=places.to(device), use_cache=True)
        found: Tensor = out.logits[0]
        return found

    return logits


def sparse_length(config: SalaConfig) -> int:
    """Return the tokens of a text in which attention is sparse: twice the length from which it is, if the model was
    trained on texts that long; the shortest length for a model that is dense in all texts that it knows.
    """
    longest, dense = config.trained_length or config.max_position_embeddings, config.sparse_config.dense_len
    return min(max(2 * dense, SHORTEST) if dense < longest else SHORTEST, longest)


def affordable(num_tokens: float, longest: int, share: float, most: int = 8, first: int = SHORTEST) -> dict[int, int]:
    """Return how many texts of which lengths take at most `share` of a run over `num_tokens`.

    A run costs two to three times as much for a token as a measurement, which is made twice. One text of the length
    `first`, in which attention is sparse, is measured however short the run is: that is where facts get lost. The
    shortest length, and longer ones by steps of four up to `longest`, are added while they fit.
    """
    room, lengths = share * num_tokens, [first]
    while lengths[-1] * 4 <= longest:
        lengths.append(lengths[-1] * 4)
    wanted = [first, *([SHORTEST] if first > SHORTEST else []), *lengths[1:]]
    fitting = [length for at, length in enumerate(wanted) if not at or sum(wanted[: at + 1]) <= room]
    number = min(most, max(1, math.floor(room / sum(fitting))))
    return dict.fromkeys(sorted(fitting), number)


def has_fallen(before: Sequence[Recall], after: Sequence[Recall]) -> list[int]:
    """Return the lengths at which more than a tenth of the facts that were found are lost, and not by chance.

    One fact of eight comes and goes by chance. The loss of the tokens moves before the counts do, so few lost facts
    count only if it has risen as well.
    """

    def is_worse(was: Recall, now: Recall) -> bool:
        lost = was.found - now.found
        return lost > FALL * was.found and (lost >= FEW or now.loss > was.loss + LOSS_RISE)

    old = {one.length: one for one in before}
    return [one.length for one in after if is_worse(old[one.length], one)]


def describe(before: Sequence[Recall], after: Sequence[Recall] = ()) -> str:
    """Return the recall in words, by length."""
    now = {one.length: one for one in after}

    def one(was: Recall) -> str:
        then = f" → {now[was.length].found}" if was.length in now else ""
        return f"{was.found}{then} of {was.asked} at {length_label(was.length)}"

    return ", ".join(map(one, before))


def as_rows(found: Sequence[Recall]) -> list[dict[str, Any]]:
    """Return plain values for a record."""
    return [asdict(one) for one in found]
