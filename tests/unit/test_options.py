"""The options table: every option, and every mistake, means the same by flag, variable, TOML key and argument."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from sala import cli
from sala.cli.flags import derived
from sala.errors import InputError, UnknownOption
from sala.lab.finetune.options import FinetuneOptions
from sala.options import Attention, CommandOptions, Options, Sampling
from sala.options.schema import Option, table
from sala.options.sources import build, from_environment, from_file, resolve
from sala.server.settings import Settings

ROOT = Path(__file__).parents[2]
CLASSES = (Options, Sampling, Settings, CommandOptions)
ROWS = [(cls, row) for cls in CLASSES for row in table(cls).values() if row.is_flag]
IDS = [f"{cls.__name__}-{row.name}" for cls, row in ROWS]
# by what the values of a kind are called: a good one as text and as TOML, and one that is refused
EXAMPLES: dict[str, tuple[str, Any, str | None]] = {
    "N": ("3", 3, "many"),
    "X": ("0.25", 0.25, "much"),
    "COUNT": ("4K", "4K", "lots"),
    "PATH": ("/a/b", "/a/b", "~nobody-of-that-name/x"),
    "[NAME=]PATH": ("a=/b", "a=/b", "a="),
    "KEY": ("secret-1", "secret-1", "two words"),
    "NAME": ("a/b", "a/b", "two words"),
    "HOST": ("example.org", "example.org", "http://x"),
    "HOST:PORT": ("10.0.0.1:29500", "10.0.0.1:29500", "10.0.0.1"),
    "URL": ("https://example.org:81", "https://example.org:81", "ftp://x"),
    "": ("true", True, "perhaps"),
}


def examples(row: Option) -> tuple[str, Any, str | None]:
    if row.choices:
        other = next(name for name in row.choices if name != row.default)
        return other, other, "bogus"
    if row.kind.metavar == "TEXT":
        is_checked = row.kind.rule == "give printable text"
        return "some-text", "some-text", "bell\x07" if is_checked else None
    if row.default is True:
        return "false", False, "perhaps"
    if row.name == "min_tokens":
        return "0.125K", "0.125K", "lots"
    return EXAMPLES[row.kind.metavar]


def run_flags(cls: type, *arguments: str) -> Any:
    """What a command sees that takes the options of a class."""
    seen: list[Any] = []

    def take(*, options: Any) -> None:
        seen.append(options)

    take.__annotations__ = {"options": cls}
    app = typer.Typer(add_completion=False)
    app.command()(derived(take))
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return seen[0]


def to_toml(row: Option, value: Any) -> str:
    return f"{row.name} = {json.dumps([value] if row.is_list else value)}\n"


def arguments_of(row: Option, text: str) -> list[str]:
    if row.kind.metavar:
        return [row.flag, text]
    return [row.flag] if text == "true" else [row.off]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in {row.name: row for _, row in ROWS}.values():
        monkeypatch.delenv(row.variable, raising=False)


@pytest.mark.parametrize(("cls", "row"), ROWS, ids=IDS)
def test_every_source_has_the_same_effect(
    cls: Any, row: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, value, _ = examples(row)
    if row.name == "api_key_file":
        (tmp_path / "key").write_text("secret-1\n")
        text = value = str(tmp_path / "key")
    file = tmp_path / "sala.toml"
    file.write_text(to_toml(row, value))
    by_argument = getattr(cls(**{row.name: (value,) if row.is_list else value}), row.name)
    assert by_argument != row.default
    assert getattr(run_flags(cls, *arguments_of(row, text)), row.name) == by_argument
    assert getattr(run_flags(cls, "--config", str(file)), row.name) == by_argument
    monkeypatch.setenv("SALA_CONFIG", str(file))
    assert getattr(run_flags(cls), row.name) == by_argument
    monkeypatch.delenv("SALA_CONFIG")
    monkeypatch.setenv(row.variable, text)
    assert getattr(run_flags(cls), row.name) == by_argument
    if cls is Options:
        assert getattr(resolve(None, {}), row.name) == by_argument


@pytest.mark.parametrize(("cls", "row"), ROWS, ids=IDS)
def test_a_bad_value_gives_the_same_message(
    cls: Any, row: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = examples(row)[2]
    if bad is None:
        pytest.skip("every text is valid")
    file = tmp_path / "sala.toml"
    file.write_text(to_toml(row, bad))
    messages = {}
    with pytest.raises(InputError) as problem:
        cls(**{row.name: (bad,) if row.is_list else bad})
    messages[row.name] = str(problem.value)
    if row.kind.metavar:  # a switch takes no value
        with pytest.raises(InputError) as problem:
            run_flags(cls, row.flag, bad)
        messages[row.flag] = str(problem.value)
    with pytest.raises(InputError) as problem:
        run_flags(cls, "--config", str(file))
    messages[f"{file}, line 1: {row.name}"] = str(problem.value)
    monkeypatch.setenv(row.variable, bad)
    with pytest.raises(InputError) as problem:
        run_flags(cls)
    messages[row.variable] = str(problem.value)
    assert {message.removeprefix(source) for source, message in messages.items()} == {
        messages[row.name].removeprefix(row.name)
    }
    assert "; " in messages[row.name]  # a remedy
    assert "\n" not in messages[row.name]
    if row.kind.is_secret:
        assert bad not in messages[row.name]


@pytest.mark.parametrize("cls", [*CLASSES, FinetuneOptions])
def test_options_are_described_frozen_and_strict(cls: Any) -> None:
    for row in table(cls).values():
        assert row.help.endswith("."), row.name
        assert row.scope
    required = {"model": "m", "train": "t", "output": "o"} if cls is FinetuneOptions else {}
    with pytest.raises(FrozenInstanceError):
        cls(**required).device = "x"
    first = next(iter(table(cls)))
    with pytest.raises(UnknownOption, match=f"did you mean {first}"):
        cls(**required, **{first + "x": 1})
    with pytest.raises(TypeError):  # as any call with an unknown argument
        cls(**required, **{first + "x": 1})


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sala.toml"
    file.write_text('ctx = "1K"\nmax_batch = 2\nsnapshots = 3\nport = 9\n')  # port: of serve, no mistake here
    monkeypatch.setenv("SALA_MAX_BATCH", "4")
    monkeypatch.setenv("SALA_SNAPSHOTS", "5")
    found = run_flags(Options, "--config", str(file), "--snapshots", "6")
    assert (found.ctx, found.max_batch, found.snapshots) == (1024, 4, 6)
    assert resolve(None, {"max_batch": 7}) == Options(max_batch=7, snapshots=5)
    assert resolve(Options(max_batch=7), {"ctx": 1}) == Options(max_batch=7, ctx=1)  # no variables


@pytest.mark.parametrize(
    ("variable", "value", "meant"),
    [
        ("SALA_KERNELS", "0", "off"), ("SALA_KERNELS", "1", "auto"), ("SALA_PACKED", "0", False),
        ("SALA_PACKED", "1", True), ("SALA_METAL", "0", "off"), ("SALA_METAL", "1", "on"),
        ("SALA_METAL", "auto", "auto"),
        ("SALA_PREFILL", "exact", "auto"), ("SALA_PREFILL", "fp8", "fp8"), ("SALA_KV", "", "auto"),
        ("SALA_STATE", "fp32", "auto"), ("SALA_STATE", "BF16", "bf16"),
    ],
)  # fmt: skip
def test_documented_values_of_variables(variable: str, value: str, meant: object) -> None:
    name = variable.removeprefix("SALA_").lower()
    assert getattr(build(Options, [from_environment(Options, {variable: value})]), name) == meant


@pytest.mark.parametrize("name", ["device", "dtype", "kernels"])
def test_variables_that_every_command_reads_set_those_of_fine_tuning(name: str) -> None:
    required = {"model": "m", "train": "t", "output": "o"}
    good = {"device": "cuda:1", "dtype": "float32", "kernels": "off"}[name]
    found = build(FinetuneOptions, [from_environment(FinetuneOptions, {f"SALA_{name.upper()}": good})], **required)
    assert getattr(found, name) == good
    if name != "device":  # whose devices are looked up later
        with pytest.raises(InputError, match=f"SALA_{name.upper()}"):
            build(FinetuneOptions, [from_environment(FinetuneOptions, {f"SALA_{name.upper()}": "bogus"})], **required)
    assert from_environment(FinetuneOptions, {"SALA_SEED": "5", "SALA_MODEL": "x"}) == []


def test_arguments_may_be_old_names_and_spellings() -> None:
    assert Options(num_snapshots=3).snapshots == 3  # type: ignore[call-arg]
    assert Options(kernels=False).kernels == "off"  # type: ignore[arg-type]
    assert Options(ctx="128K", model=Path("/a")) == Options(ctx=131072, model="/a")  # type: ignore[arg-type]
    assert replace(Options(), kv="FP8 ").kv == "fp8"  # type: ignore[arg-type]


HOSTILE = [True, float("nan"), float("inf"), 1.5, 10**5000, "9" * 400, "\0", [], {}, None, -1]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("name", ["max_batch", "num_draft", "draft_layers", "snapshots"])
def test_hostile_values(name: str, value: object) -> None:
    if value is None and name in ("max_batch", "snapshots"):  # their default
        return
    with pytest.raises(InputError, match=name) as problem:
        Options(**{name: value})
    assert str(problem.value).isprintable()
    assert len(str(problem.value)) < 200


def test_a_hostile_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    for text in (b"\xff", b"a" * (2 << 20), b"ctx = " + b"9" * 5000, b'"ct\\u001bx" = 1'):
        file.write_bytes(text)
        with pytest.raises(InputError) as problem:
            build(Options, [from_file(file, Options)])
        assert str(problem.value).isprintable()


def parameters() -> Iterator[tuple[str, Any]]:
    """The name of every command with each of its parameters."""
    root: Any = typer.main.get_command(cli.app)
    for name in cli.COMMANDS:
        found = root.get_command(None, name)
        for part, one in getattr(found, "commands", {"": found}).items():
            for each in one.params:
                yield f"{name} {part}".strip(), each


def commands() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, each in parameters():
        found.setdefault(name, set()).update(each.opts)
    return found


TAKERS = {  # commands that take every option of a class; further ones take some
    Options: {
        "generate", "chat", "ask", "batch", "serve", "session save", "session load", "needle", "eval needle",
        "eval ruler", "eval official", "eval reasoning", "eval lm", "eval sources", "bench serve", "draft eval",
    },
    Sampling: {"generate", "chat", "ask"},
    Settings: {"serve"},
    CommandOptions: set[str](),
}  # fmt: skip
ALSO = {  # options of some commands only
    "hub_url": {"pull"}, "hub_hosts": {"pull"}, "models_dir": {"pull", "list", "rm"}, "url": {"ps"},
    "sessions_dir": {"session save", "session load", "session ls", "session rm"}, "api_key": {"ps"},
}  # fmt: skip


def test_commands_take_every_row_of_the_table() -> None:
    derived_flags: dict[tuple[str, str], set[str]] = {}  # commands by scope and flag
    for name, each in parameters():
        for flag in each.opts:
            derived_flags.setdefault((each.rich_help_panel, flag), set()).add(name)
    for cls, row in ROWS:
        wanted = TAKERS[cls] | ALSO.get(row.name, set())
        assert wanted, f"no command is named that takes {row.name}"
        assert wanted <= derived_flags.get((row.scope, row.flag), set()), row.name
    for row in table(FinetuneOptions).values():
        assert row.name == "model" or "finetune" in derived_flags.get((row.scope, row.flag), set()), row.name


def test_an_option_of_several_classes_is_declared_once() -> None:
    """All but one take it from that one, by `option_of`: they share type, range, rule and spellings."""
    rows: dict[str, list[Option]] = {}
    for cls in (Attention, *CLASSES, FinetuneOptions):
        for name in cls.__annotations__.keys() & table(cls).keys():
            rows.setdefault(name, []).append(table(cls)[name])
    assert {len(found) for found in rows.values()} == {1, 2}
    repeated = {name for name, found in rows.items() if len(found) == 2}
    sources = [
        ROOT / "sala" / name for name in ("options/__init__.py", "server/settings.py", "lab/finetune/options.py")
    ]
    text = "".join(file.read_text(encoding="utf-8") for file in sources)
    names = "|".join((r"option_of\(Attention, ", r"_default\(", r"_loaded\("))
    assert set(re.findall(rf'(?:{names})"(\w+)"', text)) == repeated - {"seed"}  # that of a run is another one
    for name in repeated - {"seed"}:
        one, other = rows[name]
        assert (one.kind, one.choices, one.rule, one.is_list) == (other.kind, other.choices, other.rule, other.is_list)


def test_options_are_read_from_the_environment_in_one_place() -> None:
    found = {}
    for file in (ROOT / "sala").rglob("*.py"):
        names = re.findall(r"""environ(?:\.get\(|\[)\s*["'](SALA_\w+)["']""", file.read_text(encoding="utf-8"))
        if names:
            found[file.relative_to(ROOT / "sala").as_posix()] = set(names)
    assert found == {
        "options/sources.py": {"SALA_MODELS_DIR"},  # where LLM looks for the names of models
        "cli/flags.py": {"SALA_CONFIG"},  # which file the options are in
    }


def test_what_is_only_an_argument_is_refused_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(cls, row) for cls in CLASSES for row in table(cls).values() if not row.is_flag]
    assert [row.name for _, row in rows] == ["logit_bias", "config"]
    for cls, row in rows:
        file = tmp_path / "sala.toml"
        file.write_text(f'{row.name} = "x"\n')
        with pytest.raises(InputError, match=f"line 1: {row.name} is not an option"):
            run_flags(cls, "--config", str(file))
    monkeypatch.setenv("SALA_LOGIT_BIAS", "x")
    assert run_flags(Sampling).logit_bias == {}


def test_every_command_that_loads_a_model_has_the_options_of_loading() -> None:
    found = commands()
    names = ("generate", "chat", "batch", "serve", "needle", "perplexity", "session save", "session load")
    for name in (*names, *(f"eval {part}" for part in ("needle", "ruler", "reasoning", "lm"))):
        left_out = {"--ctx"} if name == "perplexity" else set()  # the lengths say it
        assert {row.flag for row in table(Options).values()} - left_out <= found[name], name
    running = {"--kv", "--state", "--prefill", "--kernels", "--threads", "--packed", "--metal", "--snapshots"}
    for name in ("bench latency", "bench throughput", "bench against", "quantize", "draft train"):
        assert running <= found[name], name
    for name in ("train", "convert", "finetune"):
        assert {"--device", "--kernels"} <= found[name], name


def test_the_reference_pages_are_the_generated_ones() -> None:
    file = ROOT / "docs" / "reference" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in module.PAGES:
        text = (file.parent / page).read_text(encoding="utf-8")
        assert module.render(text) == text, f"run python {file.relative_to(ROOT)}"
    shown = (file.parent / "server.md").read_text(encoding="utf-8")
    for row in table(Settings).values():
        assert f"| `{row.name}` |" in shown


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["genrate"]) == 2
    assert "there is no command 'genrate'; did you mean generate?" in capsys.readouterr().err


def test_help_is_not_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in cli.COMMANDS.values():
        assert words in shown


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["serve", "--show-config"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = ("torch", "mlx", "triton", "transformers", "fastapi", "numpy")
    code = f"from sala.cli import run; run({arguments!r}); import sys"
    check = f"{code}\nprint('LOADED', [name for name in {heavy!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "LOADED []" in out.stdout


def test_idle_threads_wait_passively(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    run_flags(Options, "--threads", "3")
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("PASSIVE", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    run_flags(Options)
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"  # the user's own choice


def test_a_command_leaves_the_environment_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where models are kept is told to the code that loads them for the time of the command only."""
    file = tmp_path / "sala.toml"
    file.write_text(f'models_dir = "{tmp_path}"\n')
    for before in (None, "/elsewhere"):
        monkeypatch.delenv("SALA_MODELS_DIR", raising=False)
        if before is not None:
            monkeypatch.setenv("SALA_MODELS_DIR", before)
        assert cli.run(["generate", "x", "-m", "no-such-model", "--config", str(file)]) != 0
        assert os.environ.get("SALA_MODELS_DIR") == before
