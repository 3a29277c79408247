"""`sala batch_generate` and `sala speculative_generate`: the examples of the MLX port, as its documents call them."""

import time
from typing import Annotated

from sala.cli import flags as s
from sala.cli.generate import show_answer, statistics
from sala.errors import SalaError
from sala.options import Options

PROMPT = "Explain quantum entanglement in simple terms."
PROMPTS = (PROMPT, "What is the capital of France?", "Name three rivers.", "Write a sentence about the sea.")


@s.derived
def batch_generate(
    *,
    place: s.ModelFirst = None,
    prompts: Annotated[list[str] | None, s.argument("Prompts; by default four examples.")] = None,
    system: s.System = None,
    sampling: s.Answering,
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    """Answer several prompts together."""
    from sala.engine.requests import Call

    llm = s.load(options, verbose)
    before = [{"role": "system", "content": system}] if system else []
    asked = prompts or PROMPTS
    began = time.perf_counter()
    chats = [[*before, {"role": "user", "content": text}] for text in asked]
    found = dict(llm.many(Call(number, sampling, messages=chat) for number, chat in enumerate(chats)))
    num_tokens = 0
    for number, text in enumerate(asked):
        answer = found[number]
        if isinstance(answer, Exception):
            raise answer
        num_tokens += answer.usage.completion_tokens
        s.write_out(f"> {text}\n{answer.text.strip()}\n")
    seconds = time.perf_counter() - began
    s.note(f"[{len(asked)} answers, {num_tokens:,} tokens, {num_tokens / seconds:,.1f} tok/s | total {seconds:.2f} s]")


@s.derived
def speculative_generate(
    *,
    place: s.ModelFirst = None,
    prompt: Annotated[str, s.argument("What to ask.")] = PROMPT,
    system: s.System = None,
    no_think: s.NoThink = False,
    sampling: s.Answering,
    options: Annotated[Options, s.Use(defaults={"speculate": "layers"})],
    verbose: s.Verbose = False,
) -> None:
    """Answer a prompt with drafts of the first layers."""
    llm = s.load(options, verbose)
    messages = [{"role": "system", "content": system}] if system else []
    began = time.perf_counter()
    completion = show_answer(llm.stream_chat([*messages, {"role": "user", "content": prompt}], sampling), no_think)
    if completion is None:
        raise SalaError("the answer was cut off")
    print()
    s.note(statistics(completion, time.perf_counter() - began))
    s.note(f"[{llm.engine.speculation.summary()}]")
