"""`sala serve --engine vllm|sglang`: the command that is built, what is refused and why. No engine is needed."""

import importlib.util
import json
import os
import shlex
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sala.checkpoint.random import RELEASED, TINY
from sala.cli import run
from sala.config import SalaConfig
from sala.errors import install_command
from sala.plugins.versions import check

FOREIGN = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.fixture
def write(tmp_path: Path):
    """A directory that holds nothing but a configuration: launching looks at no more."""

    def make(config: SalaConfig, name: str = "model", **more: object) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config.to_dict() | more))
        return path

    return make


@pytest.fixture
def released(write) -> Path:
    return write(RELEASED, "MiniCPM-SALA")


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty packages by the names of the engines: whether they are there is all that is asked."""
    for name in ("vllm", "sglang"):
        (tmp_path / "engines" / name).mkdir(parents=True)
        (tmp_path / "engines" / name / "__init__.py").touch()
        monkeypatch.delenv(f"{name.upper()}_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "engines")
    monkeypatch.delenv("SGLANG_MINICPM_FORCE_DENSE", raising=False)
    for name in [name for name in os.environ if name.startswith("SALA_") and name != "SALA_MODELS_DIR"]:
        monkeypatch.delenv(name)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]):
    """What --print-command prints, as words."""

    def call(*arguments: str) -> list[str]:
        assert run(["serve", "--print-command", *arguments]) == 0, capsys.readouterr().err
        return shlex.split(capsys.readouterr().out)

    return call


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]):
    """What is said when the command is refused; nothing is printed then."""

    def call(*arguments: str) -> str:
        assert run(["serve", "--print-command", *arguments]) in (1, 2)
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        return said.err

    return call


def values(words: list[str]) -> dict[str, str]:
    """Flags and what follows them."""
    return {word: following for word, following in zip(words, [*words[1:], ""], strict=True) if word.startswith("-")}


def test_further_names(show, released: Path) -> None:
    words = show("--engine", "vllm", "-m", str(released), "--alias", "gpt-4o,gpt-5")
    at = words.index("--served-model-name")
    assert words[at + 1 : at + 4] == ["MiniCPM-SALA", "gpt-4o", "gpt-5"]


def test_vllm(show, released: Path) -> None:
    words = show("--engine", "vllm", "-m", str(released), "--tp", "4", "--pp", "2", "--ctx", "1M", "--max-batch", "16")
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = values(words)
    assert flags["--model"] == str(released)
    assert flags["--served-model-name"] == "MiniCPM-SALA"
    assert (flags["--host"], flags["--port"]) == ("127.0.0.1", "8080")
    assert (flags["--tensor-parallel-size"], flags["--pipeline-parallel-size"]) == ("4", "2")
    assert (flags["--max-model-len"], flags["--max-num-seqs"]) == ("1048576", "16")
    assert {"--enable-prefix-caching", "--enable-chunked-prefill"} <= flags.keys()
    assert "--nnodes" not in flags
    assert "--trust-remote-code" not in flags


def test_defaults_are_the_engines_own(show, released: Path) -> None:
    assert not {"--max-num-seqs", "--max-model-len"} & set(show("--engine", "vllm", "-m", str(released)))
    words = show("--engine", "sglang", "-m", str(released))
    assert not {"--max-running-requests", "--context-length", "--tp-size", "--device"} & set(words)


def test_sglang(show, released: Path) -> None:
    words = show("--engine", "sglang", "-m", str(released), "--tp", "2", "--ctx", "512k", "--max-queue", "9")
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"]
    flags = values(words)
    assert flags["--model-path"] == str(released)
    assert (flags["--tp-size"], flags["--context-length"]) == ("2", "512000")
    assert flags["--max-queued-requests"] == "9"
    assert "--attention-backend" not in flags


def test_sglang_without_a_gpu_is_dense(show, refuse, write) -> None:
    config = replace(TINY, mup_denominator=TINY.num_hidden_layers)
    path = write(config)
    flags = values(show("--engine", "sglang", "-m", str(path), "--device", "cpu", "--tp", "2"))
    assert (flags["--device"], flags["--attention-backend"]) == ("cpu", "torch_native")
    assert flags["--context-length"] == str(config.sparse_config.dense_len - 1)
    said = refuse("--engine", "sglang", "-m", str(path), "--device", "cpu", "--ctx", "2048")
    assert f"is exact only up to {config.sparse_config.dense_len - 1} tokens" in said


def test_several_machines(show, released: Path) -> None:
    common = ("-m", str(released), "--tp", "2", "--nodes", "2", "--master", "10.0.0.1:29500")
    first = show("--engine", "vllm", *common, "--node-rank", "0")
    flags = values(first)
    assert (flags["--nnodes"], flags["--node-rank"]) == ("2", "0")
    assert (flags["--master-addr"], flags["--master-port"]) == ("10.0.0.1", "29500")
    assert flags["--distributed-executor-backend"] == "mp"
    assert "--headless" not in first
    second = show("--engine", "vllm", *common, "--node-rank", "1")
    assert second[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(released)]
    assert "--headless" in second
    assert not {"--host", "--port"} & set(second)
    flags = values(show("--engine", "sglang", *common, "--node-rank", "1"))
    assert (flags["--nnodes"], flags["--node-rank"], flags["--dist-init-addr"]) == ("2", "1", "10.0.0.1:29500")


def test_further_flags_are_passed_on(show, refuse, released: Path) -> None:
    words = show("--engine", "vllm", "-m", str(released), "--", "--enforce-eager", "--seed", "3")
    assert words[-3:] == ["--enforce-eager", "--seed", "3"]
    for flag in ("--host=0.0.0.0", "--hos", "--api_key", "-tp", "--max-model-len", "--config"):
        assert "is set by sala serve" in refuse("--engine", "vllm", "-m", str(released), "--", flag, "1")
    assert "name a model with -m" in refuse("--engine", "vllm", str(released))
    assert "--model is missing" in refuse("--engine", "sglang")


def test_parsers_by_the_template(show, refuse, write) -> None:
    """The form of tool calls that the template teaches the model; the user's own choice beats ours."""
    path = write(RELEASED)
    flags = values(show("--engine", "vllm", "-m", str(path)))
    assert (flags["--tool-call-parser"], flags["--reasoning-parser"]) == ("sala", "sala")
    assert json.loads(flags["--structured-outputs-config"])["enable_in_reasoning"] is True
    assert flags["--middleware"] == "sala.plugins.vllm.middleware.ClientMiddleware"
    (path / "chat_template.jinja").write_text("{{ '<tool_call>' }}")
    assert values(show("--engine", "vllm", "-m", str(path)))["--tool-call-parser"] == "hermes"
    own = ["--tool-call-parser=qwen3", "--reasoning-parser", "qwen3", "--structured-outputs-config", "{}"]
    words = show("--engine", "vllm", "-m", str(path), "--", *own)
    assert words[-5:] == own
    assert [word for word in words if word.startswith(("--tool-call-parser", "--reasoning-parser"))] == own[:2]
    said = refuse("--engine", "vllm", "-m", str(path), "--", "--structured-outputs-config.backend", "guidance")
    assert 'add "enable_in_reasoning": true to it, or name a --reasoning-parser' in said
    more = ["--enable-auto-tool-choice", "--middleware", "mine.Layer"]
    assert show("--engine", "vllm", "-m", str(path), "--", *more)[-3:] == more


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.24.0"), ("sglang", "0.5.22")])
def test_old_engines_are_refused(refuse, released: Path, tmp_path: Path, engine: str, version: str) -> None:
    install_metadata(tmp_path / "engines", engine, version)
    assert f"{version} is older than" in (said := refuse("--engine", engine, "-m", str(released)))
    assert f"run: pip install '{engine}>=" in said


def test_newer_engines_are_tried(show, released: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    install_metadata(tmp_path / "engines", "vllm", "99.0")
    show("--engine", "vllm", "-m", str(released))
    assert "vLLM 99.0 is newer than" in caplog.text


def install_metadata(folder: Path, name: str, version: str) -> None:
    (folder / f"{name}-{version}.dist-info").mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    check.cache_clear()


def test_the_embedded_model(show, tmp_path: Path) -> None:
    words = show("--engine", "vllm", "--dtype", "float32")
    assert values(words)["--served-model-name"] == "smol-sala"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "vlm"], "did you mean vllm?"),
        (["--engine", "sglang", "--pp", "2"], "use --tp, or --engine vllm"),
        (["--engine", "sglang", "--tp", "4"], "8 query heads per KV head, and sglang's sparse attention needs 16"),
        (["--engine", "vllm", "--tp", "3"], "--tp is 3, which does not divide num_attention_heads = 32"),
        (["--engine", "vllm", "--tp", "64"], "does not divide num_attention_heads"),
        (["--engine", "vllm", "--pp", "33"], "the model has 32 layers"),
        (["--engine", "vllm", "--nodes", "2", "--tp", "2"], "--master is missing"),
        (["--engine", "vllm", "--nodes", "2", "--master", "a:1"], "1 GPUs cannot be spread evenly"),
        (["--engine", "vllm", "--nodes", "2", "--tp", "2", "--node-rank", "2", "--master", "a:1"], "from 0 to 1"),
        (["--engine", "vllm", "--node-rank", "1"], "set their number with --nodes"),
        (["--engine", "vllm", "--master", "a:1"], "set their number with --nodes"),
        (["--engine", "vllm", "--master", "a"], "write it as HOST:PORT"),
        (["--engine", "vllm", "--port", "0"], "port is 0"),
        (["--engine", "vllm", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["--engine", "sglang", "--ctx", "4096"], "needs at least 8192"),
        (["--engine", "vllm", "--max-queue", "64"], "--max-queue cannot be passed on to vllm"),  # the default, but said
        (["--engine", "vllm", "--temperature", "0"], "set it in the requests"),
        (["--engine", "vllm", "--speculate", "lookup"], "leave it out, or use --engine sala"),
        (["--engine", "vllm", "--adapter", "x"], "sala fuse"),
        (["--engine", "sglang", "--cache-memory", "8G"], "cannot be passed on to sglang"),
        (["--engine", "vllm", "--host", "::"], "there is no key"),
        (["--engine", "sglang", "--host", "192.0.2.1", "--admin-key", "k"], "there is no key"),
        (["--tp", "2"], "--tp is for other engines; add --engine vllm"),
        (["--nodes", "2"], "--nodes is for other engines"),
        (["--", "--enforce-eager"], "flags after -- are for --engine vllm"),
        ([], "--print-command is for other engines"),
    ],
)
def test_refusals(refuse, released: Path, arguments: list[str], words: str) -> None:
    assert words in refuse("-m", str(released), *arguments)


def test_settings_of_every_origin_are_looked_at(refuse, released: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SALA_CACHE_DIR", "/x")
    assert "--cache-dir cannot be passed on to vllm" in refuse("-m", str(released), "--engine", "vllm")
    monkeypatch.delenv("SALA_CACHE_DIR")
    (tmp_path / "sala.toml").write_text('engine = "vllm"\nmax_body = "1M"\n')
    assert "--max-body cannot be passed on" in refuse("-m", str(released), "--config", str(tmp_path / "sala.toml"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"attn_log_base": 8192.0}, "attn_log_base"),
        ({"attn_qk_norm": True}, "attn_qk_norm"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mup_denominator": 16}, "mup_denominator"),
    ],
)
def test_models_that_sglang_would_get_wrong(show, refuse, write, change: dict[str, object], word: str) -> None:
    path = write(replace(RELEASED, **change))
    assert f"computes models with {word}" in refuse("--engine", "sglang", "-m", str(path))
    show("--engine", "vllm", "-m", str(path))


def test_quantized_models(show, refuse, write) -> None:
    packed = write(RELEASED, "packed", quantization={"bits": 4, "group_size": 64})
    said = refuse("--engine", "sglang", "-m", str(packed))
    assert f"MLX's layout; run: sala fuse {packed} --whole --dtype bfloat16 -o packed-bf16" in said
    show("--engine", "vllm", "-m", str(packed))  # the plug-in expands them
    show("--engine", "vllm", "-m", str(write(RELEASED, "fp8", quantization_config=FOREIGN)))


def test_tp_of_a_dense_sglang(show, released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sparse kernels any number of ranks does, up to where the model turns sparse."""
    monkeypatch.setenv("SGLANG_MINICPM_FORCE_DENSE", "1")
    flags = values(show("--engine", "sglang", "-m", str(released), "--tp", "4"))
    assert (flags["--tp-size"], flags["--context-length"]) == ("4", "8191")


def test_missing_engine(refuse, released: Path, tmp_path: Path) -> None:
    (tmp_path / "engines" / "sglang" / "__init__.py").unlink()
    (tmp_path / "engines" / "sglang").rmdir()
    importlib.invalidate_caches()
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("sglang is installed here")
    said = refuse("--engine", "sglang", "-m", str(released))
    assert said == f"sala: sglang is not installed; run: {install_command('sglang')}\n"


def test_plugins_that_leave_ours_out(show, refuse, released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS is 'other'; add sala to it" in refuse("--engine", "vllm", "-m", str(released))
    monkeypatch.setenv("VLLM_PLUGINS", "other, sala")
    show("--engine", "vllm", "-m", str(released))


class Started(Exception):
    pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have taken this process's place."""
    found: list[list[str]] = []

    def execvp(file: str, words: list[str]) -> None:
        assert file == words[0]
        found.append(list(words))
        raise Started

    monkeypatch.setattr(os, "execvp", execvp)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return found


def test_a_key_goes_by_the_environment(show, started, released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--engine", "vllm", "-m", str(released), "--host", "0.0.0.0"]  # noqa: S104
    os.environ["SALA_API_KEY"] = "hush-hush-hush-hush"
    assert show(*command)[0] == "VLLM_API_KEY=***"
    with pytest.raises(Started):
        run(["serve", *command])
    assert "hush-hush-hush-hush" not in " ".join(started[0])
    assert os.environ["VLLM_API_KEY"] == "hush-hush-hush-hush"
    assert "SALA_API_KEY" not in os.environ
    assert "hush-hush-hush-hush" not in capsys.readouterr().err


def test_keys_of_sglang_go_by_a_file(show, started, released: Path) -> None:
    command = ["--engine", "sglang", "-m", str(released), "--api-key", 'a"b', "--admin-key", "boss"]
    assert show(*command)[-2:] == ["--config", "KEYS.yaml"]
    with pytest.raises(Started):
        run(["serve", *command])
    assert started[0][-2] == "--config"
    file = Path(started[0][-1])
    try:
        assert file.read_text() == 'api-key: "a\\"b"\nadmin-api-key: "boss"\n'
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    finally:
        file.unlink()
    assert "boss" not in " ".join(started[0])


def test_the_command_that_is_shown_is_the_one_that_runs(show, started, released: Path) -> None:
    for engine in ("vllm", "sglang"):
        command = ["--engine", engine, "-m", str(released), "--tp", "2", "--", "--seed", "3"]
        with pytest.raises(Started):
            run(["serve", *command])
        assert started.pop() == show(*command)
