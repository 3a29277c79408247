"""A model as lm-eval examines it: likelihoods of given texts and answers to prompts, in this process, without a server.

`Examinee` does the work and knows nothing of lm-eval; `adapter()` is the class that lm-eval wants, under the name sala.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sala.engine.cache.prefix import as_bytes
from sala.engine.requests import Call
from sala.engine.stream import AnswerState
from sala.errors import InputError, MissingExtra, SalaError
from sala.lab.eval.likelihood import Likelihood, Query, answer_all, score_pairs
from sala.lab.report.record import Log, key_of
from sala.protocol import Sampling

if TYPE_CHECKING:
    from sala.llm import LLM

SEED = 1234  # of answers that are sampled
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one thing
MOOT = ("do_sample", "until", "use_cache", "num_beams", "num_return_sequences")  # read elsewhere, or of no effect
Pair = tuple[list[int], list[int]]
Note = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """A prompt to be continued, and how."""

    prompt: str
    sampling: Sampling


class Examinee:
    """Encodes what it is asked, scores and writes. What is in `log` already is not computed again.

    - max_length: tokens of context and continuation together; more are cut off on the left
    - bos: whether texts begin with BOS; by default as the model wants it
    """

    def __init__(
        self, llm: "LLM", max_length: int | None = None, bos: bool | None = None, log: Log | None = None
    ) -> None:
        if max_length is not None and not 2 <= max_length <= llm.ctx:
            raise InputError("max_length", f"is {max_length}", f"it must be from 2 to {llm.ctx}, the context")
        self.llm = llm
        self.max_length = max_length or llm.ctx
        self.num_cut = 0  # requests that had to be cut
        self.is_chat = False  # texts are rendered conversations: special tokens in them are meant
        self._bos = bos
        self._facts = {"fingerprint": llm.fingerprint()[:16]}
        self._log = log

    @property
    def prefix_id(self) -> int:
        """What stands before a text that has nothing before it: BOS, or else an end mark."""
        bos, ends = self.llm.tokenizer.bos_id, self.llm.config.eos_token_id
        if bos is None and not ends:
            raise InputError("context", "is empty, and the model has neither BOS nor EOS", "give a context")
        return ends[0] if bos is None else bos

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """`bos` None: as this examinee was told; a rendered conversation has what the template wrote."""
        tokenizer, wanted = self.llm.tokenizer, self._bos if bos is None else bos
        if self.is_chat:
            return tokenizer.encode(text, bos=False, parse_special=True)
        ids = tokenizer.encode(text, bos=wanted is not False)
        is_lacking = bool(wanted) and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]
        return [self.prefix_id, *ids] if is_lacking else ids

    def split(self, context: str, continuation: str) -> Pair:
        """Both as tokens. White space at the end of the context goes to the continuation, as in running text.

        The continuation is what the whole has more than the context. Where a token reaches over the border, so that
        the whole does not begin with the context's tokens, both are encoded alone: then nothing of the continuation
        is lost, and nothing of the context is scored. A continuation after nothing follows `prefix_id`.
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
        """How likely every continuation is after its context."""
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
        """The log-probability of whole texts, the first token given `prefix_id`; long ones in windows."""
        cut = [list(windows(self.encode(text, bos=False), self.prefix_id, self.max_length)) for text in texts]
        scores = iter(self.score([window for group in cut for window in group], note))
        return [sum(next(scores).logprob for _ in group) for group in cut]

    def write(self, wishes: Sequence[Wish], note: Note = lambda *_: None) -> list[str]:
        """What the model writes after each prompt, up to a stop; in a chat without its reasoning."""
        prompts = [self._room(self.encode(wish.prompt), wish.sampling.max_tokens) for wish in wishes]
        keys = [self._key("write", ids, repr(wish.sampling)) for ids, wish in zip(prompts, wishes, strict=True)]
        found = {index: row["text"] for index, row in self._known(keys).items()}
        note(len(found), len(wishes))
        queries = (self._query(i, prompts[i], wishes[i].sampling) for i in range(len(wishes)) if i not in found)
        for index, done in answer_all(self.llm, queries):
            found[index] = done.text
            self._keep(keys[index], {"text": found[index]})
            note(len(found), len(wishes))
        return [found[index] for index in range(len(wishes))]

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

    def _room(self, ids: list[int], num_new: int) -> list[int]:
        """The end of a prompt that leaves room for its answer."""
        spare = self.max_length - num_new
        if spare < 1:
            raise InputError("max_gen_toks", f"is {num_new:,}", f"the context holds {self.max_length:,}")
        self.num_cut += len(ids) > spare
        return ids[-spare:]


def windows(ids: list[int], prefix_id: int, size: int) -> Iterator[Pair]:
    """A text as (context, continuation) pairs of `size` tokens at most, every token predicted once.

    The first window begins with `prefix_id`, the others with a token of the text; the last reaches back to be full.
    """
    if ids:
        yield [prefix_id], ids[: size - 1]
    for at in range(size - 1, len(ids), size - 1):
        end = min(at + size - 1, len(ids))
        yield ids[max(0, end - size) : at], ids[at:end]


def to_sampling(settings: Mapping[str, Any], max_new_tokens: int = 256) -> Sampling:
    """lm-eval's settings of a generation; greedy unless `do_sample` or a temperature asks for more."""
    left = dict(settings)
    counts = [left.pop(name) for name in LENGTHS if name in left]
    until = left.get("until") or []
    is_drawn = left.get("do_sample")
    temperature = left.pop("temperature", None)
    if is_drawn is False or (not is_drawn and temperature is None):
        temperature = 0.0
    known = {one.name for one in fields(Sampling)}
    for name, value in left.items():
        is_single = name not in ("num_beams", "num_return_sequences") or value == 1
        if name not in known and not (name in MOOT and is_single):
            raise InputError("gen_kwargs", f"hold {name}={value!r}", "it has no counterpart here; leave it out")
    return Sampling(
        **{"seed": SEED, **{name: value for name, value in left.items() if name in known}},
        temperature=1.0 if temperature is None else float(temperature),
        stop=tuple(one for one in ([until] if isinstance(until, str) else until) if one),
        max_tokens=int(next((count for count in counts if count is not None), max_new_tokens)),
    )


@cache
def adapter() -> Any:
    """The class for lm-eval, registered there as `sala`. Needs the extra `eval`."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
        from tqdm import tqdm
    except ImportError:
        raise MissingExtra("lm-eval", "eval") from None

    class SalaLM(TemplateLM):  # type: ignore[misc]
        """`lm_eval.simple_evaluate("sala", {"model": "path/to/MiniCPM-SALA"}, …)`; other arguments go to LLM."""

        def __init__(
            self,
            model: "str | Path | LLM | None" = None,
            max_length: int | None = None,
            max_gen_toks: int = 256,
            add_bos_token: bool | None = None,
            log: Log | None = None,
            batch_size: int | str | None = None,
            max_batch_size: int | None = None,
            **options: Any,
        ) -> None:
            from sala.llm import LLM

            super().__init__()
            if isinstance(batch_size, int) or (isinstance(batch_size, str) and batch_size.isdigit()):
                options.setdefault("max_batch", int(batch_size))
            llm = model if isinstance(model, LLM) else LLM(model, **options)
            self.examinee = Examinee(llm, max_length, add_bos_token, log)
            self.max_gen_toks = max_gen_toks

        @property
        def max_length(self) -> int:
            return self.examinee.max_length

        @property
        def eot_token_id(self) -> int:
            return min(self.examinee.llm.stop_ids, default=self.examinee.prefix_id)

        @property
        def prefix_token_id(self) -> int:
            return self.examinee.prefix_id

        @property
        def tokenizer_name(self) -> str:
            return self.examinee.llm.tokenizer.fingerprint

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            """Only to tell caches of requests apart: the tokenizer renders."""
            return self.tokenizer_name if chat_template else None

        def apply_chat_template(
            self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **_: Any
        ) -> str:
            self.examinee.is_chat = True
            tokenizer = self.examinee.llm.tokenizer
            if add_generation_prompt:
                return tokenizer.render_chat(chat_history, add_generation_prompt=True)
            *before, last = chat_history  # the answer's beginning is given: nothing may close it
            return tokenizer.render_chat(before, add_generation_prompt=True) + str(last["content"])

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return self.examinee.encode(string, add_special_tokens)

        def _encode_pair(self, context: str, continuation: str) -> Pair:
            return self.examinee.split(context, continuation)

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> Any:
            with _bar("scoring", disable_tqdm) as note:
                return list(map(tuple, self.examinee.score([request[1:] for request in requests], note)))

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            pairs = [request.args for request in requests]
            return self._loglikelihood_tokens([(pair, *self.examinee.split(*pair)) for pair in pairs], disable_tqdm)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            with _bar("reading", disable_tqdm) as note:
                return self.examinee.score_texts([request.args[0] for request in requests], note)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            asked = [request.args for request in requests]
            wishes = [Wish(prompt, to_sampling(settings, self.max_gen_toks)) for prompt, settings in asked]
            with _bar("writing", disable_tqdm) as note:
                return self.examinee.write(wishes, note)

    class _bar:  # noqa: N801 - used like a function
        """A bar on a terminal, nothing elsewhere."""

        def __init__(self, name: str, is_off: bool) -> None:
            self._bar = tqdm(desc=name, disable=True if is_off else None)

        def __enter__(self) -> Note:
            return self

        def __call__(self, done: int, total: int) -> None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)

        def __exit__(self, *_: object) -> None:
            self._bar.close()

    register_model("sala")(SalaLM)
    return SalaLM


def examine(
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
    """Run tasks of lm-eval; returns its results as they are, and the examinee."""
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
        raise SalaError(f"lm-eval failed: {error!r}"[:500], "see whether the task runs with another model") from error
    return results, model.examinee


def to_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """lm-eval's results as rows: one for each metric of each task or group."""
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
    """A number that JSON can hold; lm-eval says N/A where there is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None if value in (None, "N/A") else str(value)
    return number if number - number == 0 else None


def to_table(results: Mapping[str, Any]) -> str:
    """lm-eval's own table, and that of its groups."""
    from lm_eval.utils import make_table

    table = str(make_table(results))
    return table + ("\n" + str(make_table(results, "groups")) if results.get("groups") else "")
