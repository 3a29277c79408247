"""lm-eval on the engine: its tasks run in this process, without a server, on `HarnessModel`."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sala.errors import InputError, MissingExtra, SalaError
from sala.llm import LLM

UNASKED = -1  # lm-eval's score of a RULER task at a length that was not asked for


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
    llm: LLM,
    tasks: Sequence[str],
    target: Mapping[str, Any],
    include_path: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[dict[str, Any], Any]:
    """Run tasks of lm-eval with its `settings`; return its results and the model under test, made as `target` says.

    `metadata` is for tasks that make their own texts: see `metadata_for`.
    """
    model = adapter()(llm, **target)
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    manager = TaskManager(include_path=folder, metadata=dict(metadata or {}))
    known = [name for name in tasks if Path(name).is_file() or manager.match_tasks([name])]
    unknown = [name for name in tasks if name not in known]
    if unknown or not tasks:
        what = f"hold {', '.join(unknown)}, which lm-eval does not know" if unknown else "are none"
        raise InputError("tasks", what, "see its list: lm-eval ls tasks; yours are found with --include-path")
    try:
        results = lm_eval.simple_evaluate(model, tasks=list(tasks), task_manager=manager, **settings)
    except (SalaError, OSError):
        raise
    except Exception as error:  # of a task, a metric or a data set
        raise SalaError(f"lm-eval failed: {error!r}"[:500], "check whether the task runs with another model") from error
    return results, model.target


def metadata_for(tasks: Sequence[str], tokenizer: Path, lengths: Sequence[int]) -> dict[str, Any]:
    """Return what tasks with texts of their own need: the directory of a tokenizer, and the lengths in tokens.

    BABILong's lengths are names of its data, one for each run; raise InputError if several are asked of it.
    """
    found: dict[str, Any] = {"tokenizer": str(tokenizer), "pretrained": str(tokenizer)}
    if not lengths:
        return found
    if not any(name.startswith("babilong") for name in tasks):
        return {**found, "max_seq_lengths": [*lengths]}
    if len(lengths) > 1 or not all(name.startswith("babilong") for name in tasks):
        message = "are for BABILong, of which lm-eval runs one length at a time, and no other task beside it"
        raise InputError("lengths", message, "give one length and BABILong alone, or: sala eval official babilong")
    return {**found, "max_seq_lengths": f"{lengths[0] // 1024}k"}


def to_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return lm-eval's results as rows, one for each metric of each task or group."""
    rows = []
    groups = results.get("groups") or {}
    for task, found in results["results"].items():
        better = (results.get("higher_is_better") or {}).get(task) or {}
        for name, value in found.items():
            metric, _, chain = name.partition(",")
            if not chain or metric.endswith("_stderr") or (metric.isdigit() and value == UNASKED):
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
