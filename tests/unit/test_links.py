"""Links in a model's directory: they may lead to its other files and to the blobs of a hub's cache, to nothing else."""

import json
import os
import shutil
from pathlib import Path

import pytest

from sala import LLM
from sala.checkpoint.gguf import GGUF
from sala.checkpoint.lora import read_adapter
from sala.checkpoint.reader import INDEX_FILE, Checkpoint
from sala.checkpoint.writer import copy_companions
from sala.config import SalaConfig
from sala.errors import CheckpointError
from tests.unit.test_adapter import write_adapter

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LINK = "is a link that leads out of its directory; if you made it, put a copy or a hard link in its place"


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    model = Path(shutil.copytree(tiny, tmp_path / "models" / "model"))
    (model / "generation_config.json").write_text('{"eos_token_id": 5}')
    return model


def link_out(file: Path) -> None:
    """Move a file out of its directory and leave a link to it."""
    outside = file.parent.parent / f"outside-{file.name}"
    file.rename(outside)
    file.symlink_to(os.path.relpath(outside, file.parent))


@pytest.mark.parametrize("name", [*FILES, "generation_config.json"])
def test_a_link_that_leads_out_is_refused(model: Path, name: str) -> None:
    link_out(model / name)
    with pytest.raises(CheckpointError, match=f"{name} {LINK}"):
        LLM(model, device="cpu")


def test_an_index_is_no_exception(model: Path) -> None:
    names = dict.fromkeys(Checkpoint(model), "model.safetensors")
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    assert set(Checkpoint(model)) == set(names)
    link_out(model / INDEX_FILE)
    with pytest.raises(CheckpointError, match=LINK):
        Checkpoint(model)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters(model: Path, tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path / "adapters" / "one")
    link_out(tmp_path / "adapters" / "one" / name)
    with pytest.raises(CheckpointError, match=f"{name} {LINK}"):
        read_adapter(tmp_path / "adapters" / "one", SalaConfig.load(model))


def test_gguf(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_bytes(b"GGUF")
    link_out(tmp_path / "models" / "m.gguf")
    with pytest.raises(CheckpointError, match="leads out of its directory; give the file that it leads to"):
        GGUF(tmp_path / "models" / "m.gguf")


def test_nothing_from_outside_is_copied_along(model: Path, tmp_path: Path) -> None:
    (model / "LICENSE").write_text("secret")
    link_out(model / "LICENSE")
    (tmp_path / "target").mkdir()
    with pytest.raises(CheckpointError, match=LINK):
        copy_companions(model, tmp_path / "target")
    assert not (tmp_path / "target" / "LICENSE").exists()


def test_links_that_stay_inside_are_followed(model: Path, tmp_path: Path) -> None:
    """As a snapshot in the Hugging Face cache, or as Kubernetes mounts files: all of them links."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "alias").symlink_to(snapshot)
    with LLM(tmp_path / "alias", device="cpu") as llm:
        assert 5 in llm.stop_ids
        assert llm.chat([{"role": "user", "content": "hello"}], max_tokens=1).text
    mounted = model / "..data"
    mounted.mkdir()
    for file in snapshot.iterdir():
        shutil.copyfile(file, mounted / file.name)
        (model / file.name).symlink_to(f"..data/{file.name}")
    LLM(model, device="cpu").close()
