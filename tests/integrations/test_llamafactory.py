"""LLaMA-Factory: the launcher and the files of examples/finetune, and, on demand, every kind of run."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sala import LLM
from sala.errors import InputError, SalaError
from sala.plugins import llamafactory
from tests.clients.conftest import Environment
from tests.integrations.conftest import EXAMPLES, ROOT, history

FILES = sorted((EXAMPLES / "llamafactory").glob("*.yaml"))
QUESTION = [{"role": "user", "content": "May I take my dog on board?"}]


def read(file: Path) -> dict[str, Any]:
    values = yaml.safe_load(file.read_text())
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_name_what_exists(file: Path) -> None:
    values = read(file)
    known = json.loads((EXAMPLES / "data" / "dataset_info.json").read_text())
    for name in filter(None, values.get("dataset", "").split(",")):
        assert (EXAMPLES / values["dataset_dir"] / known[name]["file_name"]).is_file()
    if "deepspeed" in values:
        json.loads((EXAMPLES / values["deepspeed"]).read_text())
    assert "trust_remote_code" not in values, "the launcher makes remote code needless"
    said = file.read_text().splitlines()[1]
    command = "train" if values.get("do_train") else file.stem
    assert said.endswith(f"sala llamafactory {command} llamafactory/{file.name}")


def test_an_adapter_is_exported_from_where_it_was_written() -> None:
    assert (
        read(EXAMPLES / "llamafactory" / "export.yaml")["adapter_name_or_path"]
        == (read(EXAMPLES / "llamafactory" / "sft_lora.yaml")["output_dir"])
    )


@pytest.mark.parametrize(
    ("environment", "num_devices", "wanted"),
    [
        ({}, 0, False),
        ({}, 1, False),
        ({}, 2, True),
        ({"FORCE_TORCHRUN": "1"}, 1, True),
        ({"FORCE_TORCHRUN": "0"}, 1, False),
        ({"FORCE_TORCHRUN": "1", "LOCAL_RANK": "0"}, 2, False),
    ],
)
def test_several_devices_get_a_process_each(environment: dict[str, str], num_devices: int, wanted: bool) -> None:
    assert llamafactory.needs_processes(environment, lambda: num_devices) is wanted


def test_processes_are_started_as_the_variables_say() -> None:
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    command = llamafactory.torchrun(variables, 8, ["a.yaml", "seed=1"])
    assert command[1:3] == ["-m", "torch.distributed.run"]
    flags = dict(zip(command[3:-6:2], command[4:-6:2], strict=True))
    assert flags["--nproc-per-node"] == "8"
    assert (flags["--nnodes"], flags["--node-rank"]) == ("2", "1")
    assert (flags["--master-addr"], flags["--master-port"]) == ("10.0.0.1", "29500")
    assert command[-6:] == ["-m", "sala", "llamafactory", "train", "a.yaml", "seed=1"]


def test_what_cannot_be_launched_is_refused() -> None:
    with pytest.raises(InputError, match="choose one of train"):
        llamafactory.launch("fly", [])
    with pytest.raises(SalaError, match="pip install llamafactory"):
        llamafactory.launch("train", ["a.yaml"])


def test_the_launcher_registers_before_the_trainer_runs(tiny: Path, tmp_path: Path) -> None:
    """A stand-in for LLaMA-Factory reads arguments, asks transformers for the model, and trains, as it does."""
    program = (
        "import sys, torch\n"
        "def run_exp(callbacks=()):\n"
        "    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "    print(type(model).__name__, sys.argv[2])\n"
        "    rows = [{'input_ids': torch.arange(8), 'labels': torch.arange(8)}] * 2\n"
        "    plain = {'use_cpu': True, 'report_to': 'none', 'save_strategy': 'no', 'disable_tqdm': True}\n"
        "    arguments = TrainingArguments(sys.argv[3], max_steps=1, **plain)\n"
        "    Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()\n"
    )
    package = tmp_path / "llamafactory" / "train"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "tuner.py").write_text(program)
    command = [sys.executable, "-m", "sala", "llamafactory", "train", str(tiny), "seed=1", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    environment.pop("LOCAL_RANK", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.startswith("SalaForCausalLM seed=1\n")
    assert "facts found in long texts before: " in ended.stderr
    assert "facts found in long texts, before → after: " in ended.stderr


# From here on with LLaMA-Factory itself, on demand.


@pytest.fixture(scope="module")
def factory(environment: Callable[[str], Environment]) -> Environment:
    return environment("llamafactory")


@pytest.fixture
def train(factory: Environment, pupil: Path, tmp_path: Path) -> Callable[..., Path]:
    """Run a file of the examples on the tiny model → where it wrote."""

    def run(name: str, *changes: str, program: tuple[str, ...] = ("sala", "llamafactory"), **variables: str) -> Path:
        output = tmp_path / name
        settings = {
            "model_name_or_path": pupil,
            "output_dir": output,
            "deepspeed": "null",
            "bf16": "false",
            "cutoff_len": 512,
            "gradient_accumulation_steps": 1,
            "num_train_epochs": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 0,
        }
        flags = [f"{key}={value}" for key, value in settings.items()]
        command = (*program, "train", f"llamafactory/{name}.yaml", *flags, *changes)
        both = ("sh", "-c", '"$@" 2>&1', "sh")  # what it writes to stderr, too
        said = factory.run(*both, *command, folder=EXAMPLES, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **variables)
        (output / "said.txt").write_text(said)
        return output

    return run


def answer(model: Path, **options: Any) -> str:
    with LLM(str(model), device="cpu", ctx=1024, **options) as llm:
        return llm.chat(QUESTION, max_tokens=8, temperature=0).text


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["sft_full", "pretrain"])
def test_all_weights_learn(train: Callable[..., Path], name: str) -> None:
    output = train(name)
    losses = history(output)
    assert losses[-1] < 0.9 * losses[0]
    assert answer(output)


@pytest.mark.timeout(1800)
def test_an_adapter_learns_and_is_exported(train: Callable[..., Path], factory: Environment, pupil: Path) -> None:
    output = train("sft_lora")
    losses = history(output)
    assert losses[-1] < 0.95 * losses[0]
    assert "facts found in long texts, before → after: " in (output / "said.txt").read_text()
    settings = json.loads((output / "adapter_config.json").read_text())
    assert {"q_proj", "z_proj", "o_gate", "o_proj", "down_proj"} <= set(settings["target_modules"])
    merged = output.parent / "merged"
    flags = {"model_name_or_path": pupil, "adapter_name_or_path": output, "export_dir": merged}
    command = ("sala", "llamafactory", "export", "llamafactory/export.yaml")
    factory.run(*command, *(f"{key}={value}" for key, value in flags.items()), folder=EXAMPLES, OMP_NUM_THREADS="1")
    assert answer(merged) != answer(pupil)


@pytest.mark.timeout(1800)
def test_the_checkpoints_own_template_serves(train: Callable[..., Path]) -> None:
    output = train("sft_lora", "template=null", "num_train_epochs=1")
    assert all(math.isfinite(loss) for loss in history(output))


@pytest.mark.timeout(1800)
def test_preferences_are_learnt(train: Callable[..., Path]) -> None:
    output = train("dpo")
    losses, margins = history(output), history(output, "rewards/margins")
    assert losses[-1] < math.log(2)
    assert margins[-1] > margins[0]


@pytest.mark.timeout(1800)
def test_marks_are_learnt(train: Callable[..., Path]) -> None:
    output = train("kto")
    losses = history(output)
    assert losses[-1] < 0.5  # where it begins: neither answer is preferred


@pytest.mark.timeout(1800)
def test_an_exported_directory_needs_no_launcher(train: Callable[..., Path], pupil: Path, tmp_path: Path) -> None:
    """`sala export` writes the model's code beside its weights."""
    from sala.plugins.transformers.export import export

    export(pupil, tmp_path / "exported")
    changes = (f"model_name_or_path={tmp_path / 'exported'}", "trust_remote_code=true", "num_train_epochs=1")
    losses = history(train("sft_lora", *changes, program=("llamafactory-cli",)))
    assert losses[-1] < losses[0]


@pytest.mark.timeout(1800)
def test_two_processes_share_the_work(train: Callable[..., Path]) -> None:
    output = train("sft_lora", "num_train_epochs=1", FORCE_TORCHRUN="1", NPROC_PER_NODE="2")
    losses = history(output)
    assert losses[-1] < losses[0]
