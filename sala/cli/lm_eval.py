"""`sala eval lm`: tasks of lm-eval on the engine, in this process."""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any

from sala.cli import flags as s
from sala.errors import InputError
from sala.options import Options

MAX_NAME = 80  # characters of the task names in a file name


@s.derived
def lm(
    *,
    tasks: Annotated[str, s.flag("Tasks of lm-eval, by name or YAML file, with commas between.")],
    include_path: Annotated[Path | None, s.flag("Directory with your own tasks.")] = None,
    shots: Annotated[int | None, s.flag("Examples before a question; by default as the task says.", min=0)] = None,
    limit: Annotated[float | None, s.flag("Questions per task, or below 1 their share.")] = None,
    chat: Annotated[bool, s.flag("Ask through the chat template.", "--chat")] = False,
    system: s.System = None,
    max_length: Annotated[int | None, s.count_flag("Tokens of a question; by default the context.")] = None,
    max_tokens: Annotated[int, s.flag("Tokens of an answer, if the task does not say.", "--max-tokens", "-n")] = 256,
    gen_kwargs: Annotated[str | None, s.flag("Settings of answers, as JSON: '{\"temperature\": 0.6}'.")] = None,
    output: s.RecordFile = None,
    samples: Annotated[bool, s.flag("Write every question and answer to a file as well.", "--samples")] = False,
    force: s.Force = False,
    options: Annotated[Options, s.Use(spellings={"max_batch": "--batch"})],
) -> None:
    """Run tasks of lm-eval without a server; print a table and write a record. An interrupted run is continued."""
    from importlib.metadata import version

    from sala.cli.outputs import RunFiles, output_file, print_record
    from sala.lab.eval.harness import adapter, evaluate, to_rows
    from sala.lab.report.record import Log, Record, write_atomically

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
    file = output_file(output, default_name(names, path.name))
    sample_file = file.with_suffix(".samples.jsonl")
    files = RunFiles(file, None, force, *([sample_file] if samples else []))
    files.check("harness", path.name, wanted)
    with s.load(options) as llm, files.resumable():
        results, target = evaluate(
            llm, names, log=Log(file.with_suffix(".jsonl")), include_path=include_path, num_fewshot=shots,
            is_chat=chat, system=system, limit=limit if limit is None or limit < 1 else int(limit),
            max_length=max_length, max_new_tokens=max_tokens, gen_kwargs=settings, has_samples=samples,
        )  # fmt: skip
    if target.num_cut:
        s.note(f"{target.num_cut:,} requests were longer than {target.max_length:,} tokens: cut on the left")
    record = Record("harness", path.name, wanted, to_rows(results))
    record.versions["lm-eval"] = version("lm-eval")
    print_record(record, f"{path.name}, {', '.join(names)}")
    if samples:
        kept = [{"task": task, **one} for task, many in (results.get("samples") or {}).items() for one in many]
        lines = (json.dumps(one, ensure_ascii=False, default=str) + "\n" for one in kept)
        write_atomically(sample_file, "".join(lines).encode())
    files.save(record, "")


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
