"""lm-eval on the engine: likelihoods of given texts and answers to prompts, in this process, without a server.

`HarnessModel` does the work and does not depend on lm-eval; `adapter()` returns the class that lm-eval needs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sala.engine.cache import as_bytes
from sala.engine.requests import Call
from sala.engine.stream import AnswerState
from sala.errors import InputError, MissingExtra, SalaError
from sala.lab.eval.likelihood import Likelihood, Query, answer_all, score_pairs
from sala.lab.report.record import Log, key_of
from sala.protocol import Sampling

if TYPE_CHECKING:
    from sala.llm import LLM

SEED = 1234  # of answers that are sampled
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # synonyms
IGNORED = ("do_sample", "until", "use_cache", "num_beams", "num_return_sequences")  # read elsewhere, or of no effect
Pair = tuple[list[int], list[int]]
Note = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt to continue, and how to sample."""

    prompt: str
    sampling: Sampling


class HarnessModel:
    """The model under test: encodes, scores and generates. Results in `log` are not computed again.

    - max_length: tokens of context and continuation together; longer inputs are cut on the left
    - bos: whether texts begin with BOS; by default as the tokenizer is configured
    """

    def __init__(
        self, llm: "LLM", max_length: int | None = None, bos: bool | None = None, log: Log | None = None
    ) -> None:
        if max_length is not None and not 2 <= max_length <= llm.ctx:
            raise InputError("max_length", f"is {max_length}", f"it must be from 2 to {llm.ctx}, the context")
        self.llm = llm
        self.max_length = max_length or llm.ctx
        self.num_cut = 0  # requests that were cut
        self.is_chat = False  # texts are rendered conversations, whose special tokens are parsed
        self._bos = bos
        self._facts = {"fingerprint": llm.fingerprint()[:16]}
        self._log = log

    @property
    def prefix_id(self) -> int:
        """The token before a text without context: BOS, or else EOS."""
        bos, ends = self.llm.tokenizer.bos_id, self.llm.config.eos_token_id
        if bos is None and not ends:
            raise InputError("context", "is empty, and the model has neither BOS nor EOS", "give a context")
        return ends[0] if bos is None else bos

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """Return the tokens of a text; `bos` None means the setting of this model. Chats are encoded as rendered."""
        tokenizer, wanted = self.llm.tokenizer, self._bos if bos is None else bos
        if self.is_chat:
            return tokenizer.encode(text, bos=False, parse_special=True)
        ids = tokenizer.encode(text, bos=wanted is not False)
        is_lacking = bool(wanted) and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]
        return [self.prefix_id, *ids] if is_lacking else ids

    def split(self, context: str, continuation: str) -> Pair:
        """Return context and continuation as tokens. White space at the end of the context moves to the continuation.

        The continuation is the whole text without the tokens of the context. Where a token spans the border, so that
        the whole does not begin with the context's tokens, both are encoded separately: nothing of the continuation
        is lost, and nothing of the context is scored. An empty context is replaced by `prefix_id`.
        """
        kept = context.rstrip()
        moved = context[len(kept) :] + continuation
        if not kept:
            ids = self.encode(moved, bos=False)
            return [self.prefix_id], ids[1:] if ids[:1] == [self.prefix_id] else ids
        head, whole = self.encode(kept), self.encode(kept + moved)
        if len(whole) > len(head) and whole[: len(head)] == head:
            return head, whole[len(head) :]
        return head, self.encode(moved, bos=False)

    def score(self, pairs: Sequence[Pair], note: Note = lambda *_: None) -> list[Likelihood]:
        """Return the likelihood of each continuation after its context."""
        cut = [self._cut(*pair) for pair in pairs]
        keys = [self._key("score", pair) for pair in cut]
        known = self._known(keys)
        found = {index: Likelihood(**row) for index, row in known.items()}
        left = [index for index in range(len(pairs)) if index not in found]
        note(len(found), len(pairs))
        for at, likelihood in score_pairs(self.llm, [cut[index] for index in left]):
            found[left[at]] = likelihood
            self._keep(keys[left[at]], likelihood._asdict())
            note(len(found), len(pairs))
        return [found[index] for index in range(len(pairs))]

    def score_texts(self, texts: Sequence[str], note: Note = lambda *_: None) -> list[float]:
        """Return the log-probability of whole texts, beginning after `prefix_id`; long texts are cut into windows."""
        cut = [list(windows(self.encode(text, bos=False), self.prefix_id, self.max_length)) for text in texts]
        scores = iter(self.score([window for group in cut for window in group], note))
        return [sum(next(scores).logprob for _ in group) for group in cut]

    def generate(self, generations: Sequence[Generation], note: Note = lambda *_: None) -> list[str]:
        """Return the generated text of each prompt, up to a stop string; in a chat without its reasoning."""
        prompts = [self._cut_prompt(self.encode(one.prompt), one.sampling.max_tokens) for one in generations]
        keys = [self._key("write", ids, repr(one.sampling)) for ids, one in zip(prompts, generations, strict=True)]
        found = {index: row["text"] for index, row in self._known(keys).items()}
        note(len(found), len(generations))
        queries = (
            self._query(i, prompts[i], generations[i].sampling) for i in range(len(generations)) if i not in found
        )
        for index, done in answer_all(self.llm, queries):
            found[index] = done.text
            self._keep(keys[index], {"text": found[index]})
            note(len(found), len(generations))
        return [found[index] for index in range(len(generations))]

    def _query(self, index: int, ids: list[int], sampling: Sampling) -> Query:
        """Prepare a generation. In a chat, stop strings do not count inside the reasoning."""

        def make(ids: list[int], boundaries: tuple[int, ...]) -> AnswerState:
            is_chat = self.is_chat
            call = Call(index, sampling, ids, is_chat=is_chat, boundaries=boundaries, stops_when_shown=is_chat)
            return self.llm.inputs.prepare(call)[0]

        return Query(index, as_bytes(ids), make)

    def _key(self, kind: str, *asked: Any) -> str:
        return key_of(self._facts, {"kind": kind, "asked": asked, "chat": self.is_chat})

    def _known(self, keys: Sequence[str]) -> dict[int, dict[str, Any]]:
        rows = [None if self._log is None else self._log.find(key) for key in keys]
        return {index: row for index, row in enumerate(rows) if row is not None}

    def _keep(self, key: str, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.append(key, row)

    def _cut(self, context: list[int], continuation: list[int]) -> Pair:
        spare = self.max_length - len(continuation)
        if spare < 1:
            raise InputError(
                "continuation", f"has {len(continuation):,} tokens", f"with a context they must be {self.max_length:,}"
            )
        self.num_cut += len(context) > spare
        return context[-spare:], continuation

    def _cut_prompt(self, ids: list[int], num_new: int) -> list[int]:
        """Return the end of a prompt that leaves `num_new` tokens for the answer."""
        spare = self.max_length - num_new
        if spare < 1:
            raise InputError("max_gen_toks", f"is {num_new:,}", f"the context holds {self.max_length:,}")
        self.num_cut += len(ids) > spare
        return ids[-spare:]


def windows(ids: list[int], prefix_id: int, size: int) -> Iterator[Pair]:
    """Yield a text as (context, continuation) pairs of at most `size` tokens; every token is predicted once.

    The first window begins with `prefix_id`, the others with a token of the text; the last one is filled up with
    tokens before it.
    """
    if ids:
        yield [prefix_id], ids[: size - 1]
    for at in range(size - 1, len(ids), size - 1):
        end = min(at + size - 1, len(ids))
        yield ids[max(0, end - size) : at], ids[at:end]


def to_sampling(settings: Mapping[str, Any], max_new_tokens: int = 256) -> Sampling:
    """Return lm-eval's generation settings as Sampling; greedy unless `do_sample` or a temperature is given."""
    left = dict(settings)
    counts = [left.pop(name) for name in LENGTHS if name in left]
    until = left.get("until") or []
    is_sampled = left.get("do_sample")
    temperature = left.pop("temperature", None)
    if is_sampled is False or (not is_sampled and temperature is None):
        temperature = 0.0
    known = {one.name for one in fields(Sampling)}
    for name, value in left.items():
        is_single = name not in ("num_beams", "num_return_sequences") or value == 1
        if name not in known and not (name in IGNORED and is_single):
            raise InputError("gen_kwargs", f"hold {name}={value!r}", "it is not supported; leave it out")
    return Sampling(
        **{"seed": SEED, **{name: value for name, value in left.items() if name in known}},
        temperature=1.0 if temperature is None else float(temperature),
        stop=tuple(one for one in ([until] if isinstance(until, str) else until) if one),
        max_tokens=int(next((count for count in counts if count is not None), max_new_tokens)),
    )


@cache
def adapter() -> Any:
    """Return the class for lm-eval, registered there as `sala`; raise MissingExtra without the extra `eval`."""
    try:
        import lm_eval.api.model  # noqa: F401

        from sala.lab.eval.lm_eval_model import SalaLM
    except ImportError:
        raise MissingExtra("lm-eval", "eval") from None
    return SalaLM


def evaluate(
    llm: "LLM",
    tasks: Sequence[str],
    *,
    log: Log | None = None,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    is_chat: bool = False,
    system: str | None = None,
    max_length: int | None = None,
    max_new_tokens: int = 256,
    gen_kwargs: Mapping[str, Any] | None = None,
    has_samples: bool = False,
) -> tuple[dict[str, Any], Any]:
    """Run tasks of lm-eval; return its results and the model under test."""
    model = adapter()(llm, max_length=max_length, max_gen_toks=max_new_tokens, log=log)
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    known = [name for name in tasks if Path(name).is_file() or manager.match_tasks([name])]
    unknown = [name for name in tasks if name not in known]
    if unknown or not tasks:
        what = f"hold {', '.join(unknown)}, which lm-eval does not know" if unknown else "are none"
        raise InputError("tasks", what, "see its list: lm-eval ls tasks; yours are found with --include-path")
    try:
        results = lm_eval.simple_evaluate(
            model, tasks=list(tasks), task_manager=manager, num_fewshot=num_fewshot, limit=limit,
            apply_chat_template=is_chat, system_instruction=system, fewshot_as_multiturn=is_chat,
            gen_kwargs=dict(gen_kwargs) if gen_kwargs else None, log_samples=has_samples,
        )  # fmt: skip
    except (SalaError, OSError):
        raise
    except Exception as error:  # of a task, a metric or a data set
        raise SalaError(f"lm-eval failed: {error!r}"[:500], "check whether the task runs with another model") from error
    return results, model.target


def to_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return lm-eval's results as rows, one for each metric of each task or group."""
    rows = []
    groups = results.get("groups") or {}
    for task, found in results["results"].items():
        better = (results.get("higher_is_better") or {}).get(task) or {}
        for name, value in found.items():
            metric, _, chain = name.partition(",")
            if not chain or metric.endswith("_stderr"):
                continue
            error = found.get(f"{metric}_stderr,{chain}")
            rows.append(
                {
                    "task": task,
                    "is_group": task in groups,
                    "metric": metric,
                    "filter": chain,
                    "value": _plain(value),
                    "stderr": _plain(error),
                    "shots": (results.get("n-shot") or {}).get(task),
                    "count": ((results.get("n-samples") or {}).get(task) or {}).get("effective"),
                    "version": (results.get("versions") or {}).get(task),
                    "higher_is_better": better.get(metric),
                }
            )
    return rows


def _plain(value: Any) -> float | str | None:
    """Return a number that JSON can hold; None for NaN and for lm-eval's N/A."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None if value in (None, "N/A") else str(value)
    return number if number - number == 0 else None
