"""Prompts as templates: those of lm-eval's tasks, read from its YAML files, or those of prompts.json."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from jinja2.sandbox import SandboxedEnvironment

from sala.errors import InputError, MissingExtra, SalaError
from sala.lab.eval.official.prompts import FILE, LM_EVAL, lm_eval_tasks, read_object

Render = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class TaskPrompt:
    """How a row becomes a prompt: `before` comes first, then `shots` with their answers, then the row itself."""

    render: Render
    before: str = ""
    shots: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int = 64
    stops: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def text(self, row: Mapping[str, Any]) -> str:
        shots = [f"{self.render(shot)} {shot['target']}\n\n" for shot in self.shots]
        return "".join([self.before, *shots, self.render(row)])


def template(text: str) -> Render:
    """Return a function that fills a Jinja template."""
    ready = _environment().from_string(text)
    return lambda row: ready.render(**row)


def find_prompt(
    directory: Path | None, name: str, lm_eval_file: str | None, default: TaskPrompt | None = None
) -> TaskPrompt:
    """Return the prompt of a task: from prompts.json of the data directory, from lm-eval, or the default.

    In prompts.json it is an object: `text`, a template, and as far as they differ `before`, `shots`, `max_tokens` and
    `stops`. Raise InputError or MissingExtra if there is none.
    """
    file = None if directory is None else directory / FILE
    if file is not None and file.is_file() and name in (found := read_object(file)):
        return _from_object(found[name], f"{file}: {name}")
    if lm_eval_file is not None:
        try:
            return _from_lm_eval(lm_eval_file)
        except MissingExtra:
            if default is None:
                raise
        except (KeyError, OSError, TypeError, AttributeError) as error:
            message = f"this version of lm-eval writes {lm_eval_file} in a way that is not understood: {error!r}"[:200]
            raise SalaError(message, f"pip install lm-eval=={LM_EVAL}, or give a {FILE} with --data") from None
    if default is None:
        raise InputError("data", f"has no prompt for {name}", f"add it to {FILE} in the directory")
    return default


def _from_object(found: Any, where: str) -> TaskPrompt:
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise InputError("data", f"{where} is not an object with a text", 'give {"text": "{{context}} {{question}}"}')
    return TaskPrompt(
        template(found["text"]), str(found.get("before", "")), tuple(found.get("shots", ())),
        int(found.get("max_tokens", 64)), tuple(found.get("stops", ())),
    )  # fmt: skip


@cache
def _from_lm_eval(name: str) -> TaskPrompt:
    """Return the prompt of a task file such as babilong/babilong_qa1.yaml."""
    file = lm_eval_tasks() / name
    config = _read_yaml(file)
    text, answers = config["doc_to_text"], config.get("generation_kwargs") or {}
    render = _function(file.parent, text.name) if isinstance(text, _Function) else template(text)
    shots = (config.get("fewshot_config") or {}).get("samples") or []
    return TaskPrompt(
        render, str(config.get("description") or ""), tuple(shots[: config.get("num_fewshot") or 0]),
        int(answers.get("max_gen_toks", 64)), tuple(answers.get("until") or ()),
    )  # fmt: skip


@dataclass(frozen=True)
class _Function:
    name: str


def _read_yaml(file: Path) -> dict[str, Any]:
    """Return a task file with the files that it includes; functions are kept as names."""
    try:
        import yaml
    except ImportError:
        raise MissingExtra("lm-eval", "eval") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_constructor("!function", lambda loader, node: _Function(loader.construct_scalar(node)))
    config = yaml.load(file.read_text("utf-8"), Loader)  # noqa: S506 - a safe loader
    outer = _read_yaml(file.parent / config["include"]) if "include" in config else {}
    return {**outer, **config}


def _function(directory: Path, name: str) -> Render:
    """Return a function of lm-eval that writes a prompt."""
    module_name, _, function = name.rpartition(".")
    spec = importlib.util.spec_from_file_location(
        f"lm_eval_{directory.name}_{module_name}", directory / f"{module_name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Render = getattr(module, function)
    return found


@cache
def _environment() -> Environment:
    return SandboxedEnvironment(keep_trailing_newline=True)


def first(values: Any) -> Sequence[str]:
    """Return answers as a list of texts: of a text, a number, or a list of them."""
    return [str(one) for one in values] if isinstance(values, list | tuple) else [str(values)]
