"""Launch configurations of examples/finetune: they parse and, on demand, two processes on a CPU learn with them."""

import json
import math
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sala import LLM
from sala.lab.finetune.dialogues import ReaderOptions, load_examples
from sala.text.tokenizer import Tokenizer
from tests.clients.conftest import Environment
from tests.integrations.conftest import EXAMPLES, PROGRAMS, history

CONFIGS = EXAMPLES / "configs"
ACCELERATE = sorted((CONFIGS / "accelerate").glob("*.yaml"))
DEEPSPEED = sorted((CONFIGS / "deepspeed").glob("*.json"))
ASKED = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("file", ACCELERATE, ids=lambda file: file.stem)
def test_accelerate_reads_its_files(file: Path) -> None:
    """Its own classes refuse a field that they do not know."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(file))
    values = yaml.safe_load(file.read_text())
    assert config.num_processes == 8 * values["num_machines"]
    assert config.distributed_type.value == values["distributed_type"]


@pytest.mark.parametrize("file", [file for file in ACCELERATE if "fsdp" in file.stem], ids=lambda file: file.stem)
def test_fsdp_shards_everything_by_layers(file: Path) -> None:
    from sala.plugins.transformers import SalaForCausalLM

    settings = yaml.safe_load(file.read_text())["fsdp_config"]
    assert settings["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert settings["fsdp_reshard_after_forward"] is True
    assert "fsdp_transformer_layer_cls_to_wrap" not in settings, "the model knows its layers"
    assert list(SalaForCausalLM._no_split_modules) == ["SalaLayer"]


@pytest.mark.parametrize("file", DEEPSPEED, ids=lambda file: file.stem)
def test_deepspeed_files_are_what_their_names_say(file: Path) -> None:
    config = json.loads(file.read_text())
    zero = config["zero_optimization"]
    assert f"zero{zero['stage']}" == file.stem.partition("_")[0]
    offloaded = {name for name in ("offload_optimizer", "offload_param") if name in zero}
    wanted = {"zero2_offload": {"offload_optimizer"}, "zero3_offload": {"offload_optimizer", "offload_param"}}
    assert offloaded == wanted.get(file.stem, set())
    assert {config[name] for name in ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping")} == {
        "auto"
    }


def test_the_examples_data_can_be_learnt_from(tiny: Path) -> None:
    reading = ReaderOptions(Tokenizer.load(tiny), 1024, frozenset({257, 259}), 259)
    examples, problems = load_examples(EXAMPLES / "data" / "dialogues.jsonl", reading)
    assert 20 <= len(examples) <= 50
    assert not problems
    assert load_examples(EXAMPLES / "data" / "prose.txt", reading)[0]


# From here on with several processes, on demand.


def find_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def check(output: Path) -> None:
    losses = history(output)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.9 * losses[0]
    with LLM(output, device="cpu", ctx=512) as llm:
        assert llm.chat(ASKED, max_tokens=4, temperature=0).token_ids


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["multi_gpu", "fsdp"])
def test_two_processes(environment: Callable[[str], Environment], pupil: Path, tmp_path: Path, name: str) -> None:
    command = ["accelerate", "launch", "--config_file", str(CONFIGS / "accelerate" / f"{name}.yaml")]
    command += ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", find_port()]
    program = [str(PROGRAMS / "trainer.py"), str(pupil), str(EXAMPLES / "data"), str(tmp_path / "out")]
    environment("trl").run(*command, *program, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    check(tmp_path / "out")


@pytest.mark.timeout(1800)
def test_two_nodes(environment: Callable[[str], Environment], pupil: Path, tmp_path: Path) -> None:
    """One process on each of two machines, which are both this one."""
    place = environment("trl")
    launch = [str(Path(place.path) / "accelerate"), "launch"]
    launch += ["--config_file", str(CONFIGS / "accelerate" / "fsdp_two_nodes.yaml")]
    launch += ["--num_processes", "2", "--mixed_precision", "no"]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", find_port()]
    program = [str(PROGRAMS / "trainer.py"), str(pupil), str(EXAMPLES / "data"), str(tmp_path / "out")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    nodes = [
        subprocess.Popen([*launch, "--machine_rank", str(rank), *program], env=variables, cwd=tmp_path)
        for rank in (0, 1)
    ]
    try:
        assert [node.wait(900) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    check(tmp_path / "out")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_deepspeed(environment: Callable[[str], Environment], pupil: Path, tmp_path: Path, name: str) -> None:
    """Offloading is only read: on a CPU there is nowhere to move things to. The first run compiles a module."""
    command = ["torchrun", "--nproc-per-node", "2", "--master-port", find_port(), str(PROGRAMS / "trainer.py")]
    data = [str(pupil), str(EXAMPLES / "data"), str(tmp_path / "out")]
    config = f"deepspeed={CONFIGS / 'deepspeed' / name}.json"
    place = environment("deepspeed")
    place.run(*command, *data, config, OMP_NUM_THREADS="1", TORCH_EXTENSIONS_DIR=str(place.folder / "extensions"))
    check(tmp_path / "out")


READ_CONFIGS = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig

known = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
for file in sys.argv[1:]:
    values = json.load(open(file)) | known | {"gradient_clipping": 1.0}
    for table in (values["bf16"], values["fp16"]):
        table["enabled"] = False
    zero = {name: 1000 if value == "auto" else value for name, value in values["zero_optimization"].items()}
    print(DeepSpeedConfig(values | {"zero_optimization": zero}).zero_optimization_stage)
"""


@pytest.mark.timeout(1800)
def test_deepspeed_reads_its_files(environment: Callable[[str], Environment]) -> None:
    said = environment("deepspeed").run("python", "-c", READ_CONFIGS, *map(str, DEEPSPEED))
    assert said.split()[-4:] == ["2", "2", "3", "3"]
