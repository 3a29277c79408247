"""The model class of lm-eval, registered there as `sala`. Importing it needs the extra `eval`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from sala.lab.eval.likelihood import Generation, HarnessModel, Note, Pair, to_sampling
from sala.lab.report.record import Log
from sala.llm import LLM


@contextmanager
def _bar(name: str, is_off: bool) -> Iterator[Note]:
    """Yield a function that shows the progress on a terminal, and nowhere else."""
    with tqdm(desc=name, disable=True if is_off else None) as bar:

        def note(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield note


@register_model("sala")
class SalaLM(TemplateLM):  # type: ignore[misc]
    """`lm_eval.simple_evaluate("sala", {"model": "path/to/MiniCPM-SALA"}, …)`; other arguments go to LLM."""

    def __init__(
        self,
        model: str | Path | LLM | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        log: Log | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(batch_size, int) or (isinstance(batch_size, str) and batch_size.isdigit()):
            options.setdefault("max_batch", int(batch_size))
        llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.target = HarnessModel(llm, max_length, add_bos_token, log)
        self.max_gen_toks = max_gen_toks

    @property
    def max_length(self) -> int:
        return self.target.max_length

    @property
    def eot_token_id(self) -> int:
        return min(self.target.llm.stop_ids, default=self.target.prefix_id)

    @property
    def prefix_token_id(self) -> int:
        return self.target.prefix_id

    @property
    def tokenizer_name(self) -> str:
        return self.target.llm.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return an identifier for lm-eval's request cache; the tokenizer renders."""
        return self.tokenizer_name if chat_template else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **_: Any
    ) -> str:
        self.target.is_chat = True
        tokenizer = self.target.llm.tokenizer
        if add_generation_prompt:
            return tokenizer.render_chat(chat_history, add_generation_prompt=True)
        *before, last = chat_history  # the beginning of the answer is given and must stay open
        return tokenizer.render_chat(before, add_generation_prompt=True) + str(last["content"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.target.encode(string, add_special_tokens)

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        return self.target.split(context, continuation)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> Any:
        with _bar("scoring", disable_tqdm) as note:
            return list(map(tuple, self.target.score([request[1:] for request in requests], note)))

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        pairs = [request.args for request in requests]
        return self._loglikelihood_tokens([(pair, *self.target.split(*pair)) for pair in pairs], disable_tqdm)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        with _bar("reading", disable_tqdm) as note:
            return self.target.score_texts([request.args[0] for request in requests], note)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        asked = [request.args for request in requests]
        generations = [Generation(prompt, to_sampling(settings, self.max_gen_toks)) for prompt, settings in asked]
        with _bar("writing", disable_tqdm) as note:
            return self.target.generate(generations, note)
