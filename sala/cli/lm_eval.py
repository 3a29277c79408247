"""`sala eval lm`: tasks of lm-eval on the engine, in this process."""

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sala.cli import flags as s
from sala.errors import InputError
from sala.options import Options

if TYPE_CHECKING:
    from sala.lab.report.record import Record

MAX_NAME = 80  # characters of the task names in a file name


@s.derived
def lm(
    *,
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval, by name or YAML file, with commas between.")],
    include_path: Annotated[Path | None, typer.Option(help="Directory with your own tasks.")] = None,
    shots: Annotated[
        int | None, typer.Option(help="Examples before a question; by default as the task says.", min=0)
    ] = None,
    limit: Annotated[float | None, typer.Option(help="Questions per task, or below 1 their share.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the chat template.")] = False,
    system: s.System = None,
    max_length: Annotated[
        int | None,
        typer.Option(parser=s.count, metavar="COUNT", help="Tokens of a question; by default the context."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Tokens of an answer, if the task does not say.")
    ] = 256,
    gen_kwargs: Annotated[
        str | None, typer.Option(help="Settings of answers, as JSON: '{\"temperature\": 0.6}'.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", help="Record of the results; a log is kept beside it."),
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples", help="Write every question and answer to a file as well.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the results of another run.")] = False,
    options: Annotated[Options, s.Use(spellings={"max_batch": "--batch"})],
) -> None:
    """Run tasks of lm-eval without a server; print a table and write a record. An interrupted run is continued."""
    from sala.cli.outputs import output_file, resumable
    from sala.cli.tables import print_record
    from sala.lab.eval.harness import adapter, evaluate, to_rows
    from sala.lab.report.record import Log, Record

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if limit is not None and limit <= 0:
        raise InputError("limit", f"is {limit:g}", "it must be above 0")
    settings = _parse(gen_kwargs)
    wanted = {
        "tasks": names, "shots": shots, "limit": limit, "chat": chat, "system": system, "max_length": max_length,
        "max_tokens": max_tokens, "gen_kwargs": settings, "device": options.device, "dtype": options.dtype,
        "ctx": options.ctx,
    }  # fmt: skip
    adapter()  # raises, before the model is loaded, if lm-eval is not installed
    path = s.find_model(options.model)
    file = output_file(output, default_name(names, path.name), ".json")
    record = Record("harness", path.name, wanted)
    if not force:
        record.check(file)
    log = file.with_suffix(".jsonl")
    with s.load(options) as llm, resumable(log):
        results, target = evaluate(
            llm, names, log=Log(log), include_path=include_path, num_fewshot=shots,
            is_chat=chat, system=system, limit=limit if limit is None or limit < 1 else int(limit),
            max_length=max_length, max_new_tokens=max_tokens, gen_kwargs=settings, has_samples=samples,
        )  # fmt: skip
    if target.num_cut:
        s.note(f"{target.num_cut:,} requests were longer than {target.max_length:,} tokens: cut on the left")
    record.results = to_rows(results)
    print_record(record, f"{path.name}, {', '.join(names)}")
    _save(record, file, results if samples else None, force)


def _save(record: "Record", file: Path, results: dict[str, Any] | None, force: bool) -> None:
    """Write the record, and the samples of the results if there are any."""
    from importlib.metadata import version

    from sala.lab.report.record import write_atomically

    record.versions["lm-eval"] = version("lm-eval")
    if results is not None:
        lines = "".join(json.dumps(one, ensure_ascii=False, default=str) + "\n" for one in _samples(results))
        write_atomically(file.with_suffix(".samples.jsonl"), lines.encode())
    record.save(file, force)
    s.note(f"wrote {file}")


def default_name(tasks: list[str], model: str) -> str:
    """Return the file name of a run; many tasks are shortened to a hash, so that other tasks get another name."""
    joined = "+".join(re.sub(r"[^\w.-]", "-", Path(task).stem if "/" in task else task) for task in tasks)
    if len(joined) > MAX_NAME:
        joined = f"{joined[:MAX_NAME]}-{hashlib.sha256(joined.encode()).hexdigest()[:8]}"
    return f"lm-{joined}-{model}.json"


def _parse(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError("gen_kwargs", f"are {text[:80]!r}", 'give a JSON object, such as {"temperature": 0.6}')
    return found


def _samples(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"task": task, **one} for task, many in (results.get("samples") or {}).items() for one in many]
