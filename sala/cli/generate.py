"""`sala generate`: one prompt, one answer, which goes to stdout and everything else to stderr; `sala batch`: many."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sala.cli import flags as s
from sala.cli.outputs import check_new, print_json
from sala.cli.sources import show_sources
from sala.errors import InputError, SalaError
from sala.options import Sampling

if TYPE_CHECKING:
    from sala.config import SalaConfig
    from sala.engine.stream import Completion, Event

ASKED = "[MODEL] PROMPT"


@s.derived
def generate(
    *,
    words: Annotated[
        list[str] | None,
        s.argument(
            "Model, as with -m, and what to ask. Without a prompt, and without -f, stdin is read.", metavar=ASKED
        ),
    ] = None,
    file: Annotated[list[str] | None, s.flag("Text before the prompt; - is stdin. Repeatable.", "--file", "-f")] = None,
    system: s.System = None,
    raw: Annotated[bool, s.flag("Continue the text as it is, without the chat format.", "--raw")] = False,
    no_think: s.NoThink = False,
    as_json: s.AsJson = False,
    sampling: s.Answering,
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    from sala.cli.progress import prefill_bar
    from sala.engine.stream import last_completion

    if raw and system:
        raise InputError("system", "cannot be used with --raw", "write it into the text")
    sampling = read_schema(sampling)
    text = _gather(words[0] if words else None, file or [])
    llm = s.load(options, verbose)
    began = time.perf_counter()
    with prefill_bar() as on_progress:
        if raw:
            events = llm.stream(text, sampling, on_progress=on_progress)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": text})
            events = llm.stream_chat(messages, sampling, on_progress=on_progress)
        completion = last_completion(events) if as_json else show_answer(events, no_think)
    if completion is None:
        raise SalaError("the answer was cut off")
    if as_json:
        print_json(completion_as_json(completion, no_think))
    else:
        print()
        show_sources(completion.sources)
    s.note(statistics(completion, time.perf_counter() - began))
    warn_if_untrained(llm.config, completion.usage.prompt_tokens)
    if options.speculate != "off":
        s.note(f"[{llm.engine.speculation.summary()}]")


@s.derived
def batch(
    *,
    source: Annotated[Path, s.argument("JSONL file of requests.", metavar="IN.jsonl")],
    output: Annotated[Path, s.flag("File of the answers; must not exist.", "--output", "-o")],
    options: s.Loading,
    verbose: s.Verbose = False,
) -> None:
    from sala.cli.progress import ProgressBar
    from sala.server.batch import run_batch

    if source.resolve() == output.resolve():
        raise InputError("output", "is the input", "choose another file")
    try:
        source.open("rb").close()
    except OSError as error:
        raise InputError("file", f"{source} cannot be read: {error.strerror}", "check the path") from None
    check_new(output)
    llm = s.load(options, verbose)
    with ProgressBar(is_kept=False, is_quiet=True) as bar:
        tally = run_batch(llm, source, output, partial(bar, "answering"))
    resumed = f", {tally.skipped} from an earlier run" if tally.skipped else ""
    s.note(f"{output}: {tally.done} answered, {tally.failed} refused{resumed}")


def read_schema(sampling: Sampling) -> Sampling:
    """Read the JSON schema from its file if one is named, and check that it is JSON."""
    text = sampling.json_schema
    if text is None:
        return sampling
    text = text if text.lstrip().startswith(("{", "true", "false")) else s.read_text(text)
    try:
        json.loads(text)
    except ValueError as error:
        remedy = "give a JSON schema or the name of a file"
        raise InputError("--schema", f"is not valid JSON: {error}", remedy) from None
    return replace(sampling, json_schema=text)


def _gather(prompt: str | None, files: list[str]) -> str:
    parts = [s.read_text(name) for name in files]
    if prompt is not None:
        parts.append(prompt)
    elif not files:
        if sys.stdin.isatty():
            raise InputError("prompt", "is missing", "write it after the command, or use -f FILE")
        parts.append(s.read_text("-"))
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise InputError("prompt", "is empty", "write something to answer")
    return text


def show_answer(events: "Iterator[Event]", no_think: bool) -> "Completion | None":
    """Write the answer as it arrives; return its completion, or None if the stream ended early.

    Reasoning is written between its tags, dimmed where the terminal has colours. A terminal gets no control sequences
    from a model; a file gets the text as it is.
    """
    completion: Completion | None = None
    escape_controls = s.escape_controls if sys.stdout.isatty() else str
    dim, plain = ("\033[2m", "\033[0m") if s.uses_colour(sys.stdout) else ("", "")
    is_thinking = False
    for event in events:
        delta = event.delta
        if delta.reasoning and not no_think:
            sys.stdout.write(("" if is_thinking else f"{dim}<think>\n") + escape_controls(delta.reasoning))
            is_thinking = True
        if (delta.text or delta.tool_call or event.completion) and is_thinking:
            sys.stdout.write(f"\n</think>{plain}\n\n")
            is_thinking = False
        sys.stdout.write(escape_controls(delta.text))
        if delta.tool_call is not None:
            arguments = json.dumps(delta.tool_call.arguments, ensure_ascii=False)
            sys.stdout.write(escape_controls(f"[{delta.tool_call.name} {arguments}]"))
        sys.stdout.flush()
        completion = event.completion or completion
    return completion


def statistics(completion: "Completion", seconds: float) -> str:
    usage, timings = completion.usage, completion.timings
    reason = "length: -n allows more" if completion.finish_reason == "length" else completion.finish_reason
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    return (
        f"[prompt {usage.prompt_tokens:,} tokens{cached}, {timings.prompt_per_second:,.1f} tok/s"
        f" | answer {usage.completion_tokens:,} tokens, {timings.predicted_per_second:,.1f} tok/s"
        f" | total {seconds:.2f} s | {reason}]"
    )


def warn_if_untrained(config: "SalaConfig", num_tokens: int) -> None:
    """Say so if a sequence is longer than all that the model was trained on."""
    if config.trained_length is not None and num_tokens > config.trained_length:
        s.note(f"(this model was trained on up to {config.trained_length:,} tokens; beyond that it may miss facts)")


def completion_as_json(completion: "Completion", no_think: bool) -> dict[str, Any]:
    out, timings = asdict(replace(completion, sources=None)), completion.timings
    out["sources"] = None if completion.sources is None else completion.sources.as_json()
    out["usage"]["total_tokens"] = completion.usage.total_tokens
    speeds = {name: getattr(timings, name) for name in ("prompt_per_second", "predicted_per_second")}
    out["timings"] |= speeds
    hidden = {"logprobs", "is_whole", "stop_token", "cut_call"} | ({"reasoning"} if no_think else set())
    hidden |= {"sources"} if completion.sources is None else set()
    return {name: value for name, value in out.items() if name not in hidden}
