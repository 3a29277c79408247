"""Settings: one schema for file, environment and flags; what is wrong is said with its place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sala.cli import serve as command
from sala.errors import InputError, SalaError
from sala.options.schema import table
from sala.options.sources import build, check_variables, from_environment, from_file, from_flags, show
from sala.server.settings import Settings, one_key

ROOT = Path(__file__).parents[2]


def load(file: Path | None, environment: dict[str, str], flags: dict[str, object]) -> Settings:
    """Settings from all sources, as commands build them."""
    layers = from_file(file, Settings), from_environment(Settings, environment), from_flags(Settings, flags)
    return build(Settings, one_key(layers))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sala.toml"


def test_flags_beat_the_environment_which_beats_the_file(file: Path) -> None:
    file.write_text('port = 1\nhost = "::1"\nmax_queue = 3\nlog_level = "debug"\n')
    settings = load(file, {"SALA_PORT": "2", "SALA_MAX_QUEUE": "4", "PATH": "x"}, {"port": "5", "host": None})
    assert (settings.port, settings.max_queue, settings.host, settings.log_level) == (5, 4, "::1", "debug")
    assert load(None, {"SALA_PORT": ""}, {}).port == 8080


def test_forms_of_values(file: Path, tmp_path: Path) -> None:
    file.write_text(
        'max_body = "1M"\nctx = 4096\ncors_origins = ["http://A.org:3000"]\nno_think = true\ndrain_s = 5\n'
        'served_names = ["gpt-4o", "a/b"]\n'
    )
    environment = {"SALA_ALLOWED_HOSTS": "a.org, b.org", "SALA_ALLOW_REMOTE_WITHOUT_KEY": "yes", "SALA_TOP_P": "0.5"}
    settings = load(file, environment, {"cache_memory": "8G", "cache_dir": str(tmp_path)})
    assert (settings.max_body, settings.ctx, settings.cache_memory) == (1 << 20, 4096, 8 << 30)
    assert settings.cors_origins == ("http://a.org:3000",)
    assert settings.allowed_hosts == ("a.org", "b.org")
    assert settings.alias == ("gpt-4o", "a/b")
    assert settings.no_think
    assert settings.allow_remote_without_key
    assert (settings.drain_s, settings.top_p, settings.cache_dir) == (5.0, 0.5, tmp_path)
    assert isinstance(settings.drain_s, float)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\nprot = 1", "sala.toml, line 2: prot is not an option; did you mean port?"),
        ("port = 1\n[serve]\nport = 2", "sala.toml, line 2: serve is not an option"),
        ("port = 70000", "sala.toml, line 1: port is 70000; it must be a whole number from 0 to 65535"),
        ("port = true", "port is True; it must be a whole number"),
        ("port = 80.5", "port is 80.5; it must be a whole number"),
        ("port = 1\nport = 2", "sala.toml is not valid TOML"),
        ("port = x\n", "line 1"),
        ('max_body = "lots"', "such as 4096, 128K or 1M"),
        ("max_body = -5", "max_body is -5"),
        ("drain_s = nan", "it must be a number"),
        ("top_p = 0", "above 0 and at most 1"),
        ('speculate = "lokup"', "did you mean lookup?"),
        ("no_think = 2", "use true or false"),
        ('alias = "a"\nserved_names = "b"', "sala.toml, line 2: served_names means alias, which is given already"),
        ('host = "http://x"', "without port"),
        ('host = "a b"', "without port"),
        ('cors_origins = ["*"]', "cors_origins"),
        ('cors_origins = ["https://a.org/path"]', "cors_origins"),
        ("cors_origins = 5", "give a list"),
        ('hub_url = "ftp://x"', "https://example.org"),
        ('hub_url = "https://user@x"', "https://example.org"),
        ('api_key = ""', "api_key is not valid"),
        ('api_key = "a b"', "api_key is not valid; use letters, digits and signs of ASCII, no spaces"),
        ("loop_guard = 5", "it must be 0, or from 32 to 1M"),
        ('model = ""', "model is ''"),
    ],
)
def test_mistakes_in_the_file_name_it(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(SalaError) as problem:
        load(file, {}, {})
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)


def test_mistakes_elsewhere_name_their_place(tmp_path: Path) -> None:
    def fail(environment: dict[str, str], flags: dict[str, str], file: Path | None = None) -> str:
        with pytest.raises(SalaError) as problem:
            load(file, environment, flags)
        return str(problem.value)

    assert fail({"SALA_PORT": "tcp://10.0.0.1:80"}, {}).startswith("SALA_PORT is 'tcp://10.0.0.1:80'")
    assert fail({}, {"max_queue": "-1"}).startswith("--max-queue is -1")
    assert "cannot be read" in fail({}, {}, tmp_path / "none.toml")
    assert "cannot be read" in fail({}, {}, tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in fail({}, {}, tmp_path / "binary")
    with pytest.raises(InputError, match="port"):
        Settings(port=-1)
    with pytest.raises(TypeError):
        Settings(prot=1)  # type: ignore[call-arg]


def test_misspelt_variables_are_refused_and_strange_ones_noted() -> None:
    told: list[str] = []
    known = ["port", "url", "hub_hosts"]
    with pytest.raises(SalaError, match=r"SALA_PROT is not an option; did you mean SALA_PORT\?"):
        check_variables(known, told.append, {"SALA_PROT": "1"})
    check_variables(known, told.append, {"SALA_URL": "x", "SALA_TEST_DEVICE": "y", "SALA_XYZZY": "1", "PATH": "z"})
    assert told == ["SALA_XYZZY is not an option and has no effect"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SALA_METAL", "0"),
        ("SALA_HUB_HOSTS", "a.org"),
        ("SALA_URL", "http://a:1"),
        ("SALA_SESSIONS_DIR", "/x"),
        ("SALA_KERNELS", "0"),
        ("SALA_PACKED", "1"),
        ("SALA_PREFILL", "exact"),
    ],
)
def test_documented_variables_do_not_stop_the_server(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert run_command(["--show-config"]) == 0
    assert capsys.readouterr().err == ""


def test_key_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    place = str(tmp_path / "key")
    assert load(None, {"SALA_API_KEY_FILE": place}, {}).api_key == "from-file"
    assert load(None, {"SALA_API_KEY": "other"}, {"api_key_file": place}).api_key == "from-file"
    assert load(None, {"SALA_API_KEY_FILE": place}, {"api_key": "flag"}).api_key == "flag"
    with pytest.raises(SalaError, match="keep one of them"):
        load(None, {"SALA_API_KEY": "x", "SALA_API_KEY_FILE": place}, {})
    (tmp_path / "key").write_text("  \n")
    with pytest.raises(SalaError, match="does not hold a valid key"):
        Settings(api_key_file=tmp_path / "key")
    with pytest.raises(SalaError, match="cannot be read"):
        Settings(api_key_file=tmp_path / "none")


def test_keys_never_show(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(api_key="hush-1", admin_key="hush-2")
    assert "hush" not in repr(settings)
    assert "hush" not in str(show(settings, table(Settings)))
    with pytest.raises(SalaError) as problem:
        load(None, {}, {"api_key": "hush hush"})
    assert "hush" not in str(problem.value)
    assert run_command(["--show-config", "--api-key", "hush-3", "--port", "9"]) == 0
    out = capsys.readouterr()
    assert "hush" not in out.out + out.err
    assert 'api_key = "***"' in out.out
    assert "port = 9" in out.out


def test_what_is_shown_can_be_loaded(file: Path) -> None:
    settings = Settings(port=9, cors_origins=("https://a.org",), ctx=128, no_think=True)
    file.write_text("\n".join(show(settings, table(Settings))))
    assert load(file, {}, {}) == settings


def test_every_setting_is_described() -> None:
    for row in table(Settings).values():
        assert row.help.endswith(".")
        assert row.scope


def run_command(arguments: list[str]) -> int:
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command.serve)
    try:
        return int(typer.main.get_command(app).main(arguments, standalone_mode=False) or 0)
    except SystemExit as end:
        return int(end.code or 0)


def test_every_setting_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out
    for row in table(Settings).values():
        assert row.flag in shown


def test_the_example_file_is_valid() -> None:
    file = ROOT / "examples" / "deploy" / "sala.toml"
    load(file, {}, {})
    commented = re.sub(r"^# (\w+ = )", r"\1", file.read_text(), flags=re.MULTILINE)
    named = set(re.findall(r"^(\w+) = ", commented, re.MULTILINE))
    assert named <= set(table(Settings))


def test_help_and_settings_load_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "fastapi", "starlette", "uvicorn", "prometheus_client", "huggingface_hub")
    code = "from sala.cli import run; run(['serve', '--help']); run(['serve', '--port', 'x'])"
    check = f"{code}\nimport sys\nprint('LOADED', [name for name in {heavy!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "LOADED []" in out.stdout
