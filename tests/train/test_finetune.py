"""`sala finetune` from its options to its result, on a checkpoint so small that a run takes seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sala.backends.torch.linears import AffineWeight
from sala.backends.torch.loader import load_model, read_parameter
from sala.checkpoint.lora import fuse, open_checkpoint, read_adapter
from sala.checkpoint.random import write_random
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError
from sala.lab.finetune.dialogues import BadData
from sala.lab.finetune.frozen import FrozenLinear
from sala.lab.finetune.optimizers import Bf16AdamW, round_stochastically
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.run import finetune
from sala.lab.finetune.target import load_target
from sala.lab.finetune.training import FinetuneCallbacks, Stopped, last_checkpoint
from sala.lab.quantize.pipeline import quantize_model
from sala.lab.quantize.plan import QuantizeSettings
from sala.lab.train.loop import Diverged
from sala.options.sources import build, from_file, from_flags
from tests.foreign import awq_case, gptq_case, packed_case, write
from tests.train.small import SMALL

ROOT = Path(__file__).parents[2]
CONFIG = replace(
    SMALL,
    intermediate_size=64,
    bos_token_id=256,
    eos_token_id=(257, 259),
    num_hidden_layers=2,
    mixer_types=SMALL.mixer_types[:2],
)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the same in 4 bits, and examples for both."""
    room = tmp_path_factory.mktemp("finetune")
    write_random(room / "model", CONFIG)
    quantize_model(room / "model", room / "packed", QuantizeSettings(4, 32, "rtn"))
    for name, count in (("train", 12), ("eval", 2)):
        lines = []
        for number in range(count):
            messages = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"It is {number}."}]
            lines.append(json.dumps({"messages": messages}) + "\n")
        (room / f"{name}.jsonl").write_text("".join(lines))
    return room


def options_of(room: Path, output: Path, **changes: Any) -> FinetuneOptions:
    values: dict[str, Any] = {
        "model": str(room / "model"),
        "train": room / "train.jsonl",
        "output": output,
        "max_length": 96,
        "epochs": 3.0,
        "accumulate": 2,
        "lr": 2e-2,
        "rank": 4,
        "alpha": 8.0,
        "save_every": 2,
        "device": "cpu",
        "keep_long": 0.0,
        "recall": False,
    }
    return FinetuneOptions(**values | changes)


def losses(output: Path, name: str = "loss") -> list[float]:
    return [entry[name] for entry in json.loads((output / "losses.json").read_text())["losses"] if name in entry]


def weights(path: Path, adapter: Path | None = None) -> dict[str, torch.Tensor]:
    checkpoint, config = open_checkpoint(path, SalaConfig.load(path), adapter)
    model = load_model(checkpoint, config, torch.float32, torch.device("cpu"))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_it_learns(room: Path, tmp_path: Path, method: str) -> None:
    said: list[str] = []
    steps: list[int] = []
    model = room / ("packed" if method == "qlora" else "model")
    changes = {"method": method, "model": str(model), "eval": room / "eval.jsonl", "eval_every": 5}
    callbacks = FinetuneCallbacks(said.append, lambda news: steps.append(news.step))
    finetune(options_of(room, tmp_path / "out", **changes), callbacks)
    assert losses(tmp_path / "out")[-1] < 0.7 * losses(tmp_path / "out")[0]
    assert losses(tmp_path / "out", "eval")[-1] < 0.7 * losses(tmp_path / "out", "eval")[0]
    assert steps[-1] == max(steps)
    assert any("12 examples" in line for line in said)
    assert any(line.startswith("memory") for line in said)
    assert not (tmp_path / "out.run").exists()
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names >= {"losses.json", "losses.png"}
    if method == "full":
        before, after = weights(model), weights(tmp_path / "out")
        assert all(not torch.equal(after[name], before[name]) for name in before if name.endswith("proj.weight"))
        assert "tokenizer.json" in names
        return
    adapter = read_adapter(tmp_path / "out", SalaConfig.load(model))
    touched = {name.rpartition(".")[2] for name in adapter.changes}
    assert touched == {
        "q_proj", "k_proj", "v_proj", "o_proj", "z_proj", "o_gate", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    fuse(model, tmp_path / "out", tmp_path / "fused")
    merged = weights(model, tmp_path / "out")
    assert all(torch.equal(weight, merged[name]) for name, weight in weights(tmp_path / "fused").items())


def test_packing_changes_rows_and_not_what_is_learnt(room: Path, tmp_path: Path) -> None:
    """The same twelve examples in one update, packed or not, with and without checkpointing."""
    found = []
    for name, packing, rows, checkpointing in (("a", True, 6, False), ("b", False, 12, True)):
        changes = {"packing": packing, "accumulate": rows, "steps": 2, "checkpointing": checkpointing, "dropout": 0.0}
        finetune(options_of(room, tmp_path / name, **changes))
        found.append(losses(tmp_path / name))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_queries_and_keys_are_put_back(room: Path, tmp_path: Path, method: str) -> None:
    finetune(options_of(room, tmp_path / "out", method=method, restore_qk=True, steps=2))
    before = weights(room / "model")
    is_full = method == "full"
    after = weights(tmp_path / "out" if is_full else room / "model", None if is_full else tmp_path / "out")
    for name, weight in before.items():
        is_qk = any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
        is_old = torch.equal(after[name], weight)
        assert is_old if is_qk else not is_old or (not is_full and "proj" not in name and "gate" not in name), name
    if not is_full:
        table = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert not {"q_proj", "k_proj"} & set(table["target_modules"])


def test_peft_reads_the_adapter(room: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    from sala.plugins.transformers import load

    finetune(options_of(room, tmp_path / "out", steps=2))
    tuned = PeftModel.from_pretrained(load(room / "model", dtype="float32"), tmp_path / "out").merge_and_unload()
    want = weights(room / "model", tmp_path / "out")
    for name, parameter in tuned.named_parameters():
        torch.testing.assert_close(parameter, want[name], atol=1e-6, rtol=1e-5)


def test_bad_data_is_told_before_anything_is_loaded(room: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"text": "fine"}\n')
    with pytest.raises(BadData, match="line 1"):
        finetune(options_of(room, tmp_path / "out", train=tmp_path / "bad.jsonl"))
    assert not (tmp_path / "out.run").exists()
    said: list[str] = []
    changes = {"train": tmp_path / "bad.jsonl", "skip_bad": True, "steps": 1}
    finetune(options_of(room, tmp_path / "out", **changes), FinetuneCallbacks(said.append))
    assert any("1 bad records left out (lines 1)" in line for line in said)


def test_what_is_there_stays(room: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        finetune(options_of(room, tmp_path / "out"))
    with pytest.raises(InputError, match="finds no run"):
        finetune(options_of(room, tmp_path / "other", resume=True))
    (tmp_path / "begun.run").mkdir()
    (tmp_path / "begun.run" / "options.json").write_text('{"model": ')
    with pytest.raises(InputError, match="finds no run"):
        finetune(options_of(room, tmp_path / "begun", resume=True))
    (tmp_path / "mine.run").mkdir()
    (tmp_path / "mine.run" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds other files"):
        finetune(options_of(room, tmp_path / "mine"))
    assert (tmp_path / "mine.run" / "notes.txt").read_text() == "mine"


def test_a_loss_that_is_no_number_stops_the_run(room: Path, tmp_path: Path) -> None:
    """Weights explode at this rate; what was saved before stays."""
    with pytest.raises(Diverged, match=r"not finite in update \d+; the last good checkpoint is in .*out\.run"):
        finetune(options_of(room, tmp_path / "out", method="full", lr=1e12, clip=1e12, save_every=1, warmup=0.0))
    assert last_checkpoint(tmp_path / "out.run") is not None
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="unfinished run"):
        finetune(options_of(room, tmp_path / "out"))


def launch(*arguments: str, **settings: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sala", "finetune", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | settings
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


def flags(room: Path, output: Path) -> list[str]:
    return [
        str(room / "model"), "--train", str(room / "train.jsonl"), "-o", str(output), "--max-length", "96",
        "--keep-long", "0", "--no-recall", "--epochs", "3", "--accumulate", "2", "--lr", "2e-2", "--rank", "4",
        "--alpha", "8", "--save-every", "2", "--device", "cpu",
    ]  # fmt: skip


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(room: Path, tmp_path: Path) -> None:
    finetune(options_of(room, tmp_path / "whole"))
    process = launch(*flags(room, tmp_path / "cut"))
    deadline = time.monotonic() + 300
    while last_checkpoint(tmp_path / "cut.run") is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    told = process.communicate(timeout=120)[1].decode()
    assert process.returncode == -signal.SIGKILL, told
    assert not (tmp_path / "cut").exists()
    said: list[str] = []
    finetune(options_of(room, tmp_path / "cut", resume=True), FinetuneCallbacks(said.append))
    assert any("resuming from checkpoint-" in line for line in said)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, two = (read_adapter(tmp_path / name, CONFIG).fingerprint for name in ("cut", "whole"))
    assert one == two


def test_an_interrupt_saves(room: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt(news: Any) -> None:
        if news.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped, match="after update 4; repeat the command with --resume"):
        finetune(
            options_of(room, tmp_path / "out", save_every=100, method="full"), FinetuneCallbacks(progress=interrupt)
        )
    assert signal.getsignal(signal.SIGINT) is before
    assert str(last_checkpoint(tmp_path / "out.run")).endswith("checkpoint-4")
    finetune(options_of(room, tmp_path / "out", save_every=100, method="full", resume=True))
    assert len(losses(tmp_path / "out")) == 9
    finetune(options_of(room, tmp_path / "whole", save_every=100, method="full"))
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_run_goes_on_only_as_it_began(room: Path, tmp_path: Path) -> None:
    callbacks = FinetuneCallbacks()

    class Impatient(Exception):
        """Stands in for a kill."""

    def give_up(news: Any) -> None:
        if news.step == 3:
            raise Impatient

    with pytest.raises(Impatient):
        finetune(options_of(room, tmp_path / "out"), FinetuneCallbacks(progress=give_up))
    (tmp_path / "out.run" / "checkpoint-9").mkdir()  # as a kill while it was written leaves it
    with pytest.raises(InputError, match=r"lr was 0\.02"):
        finetune(options_of(room, tmp_path / "out", resume=True, lr=1.0), callbacks)
    finetune(options_of(room, tmp_path / "out", resume=True), callbacks)
    assert len(losses(tmp_path / "out")) == 9


def read_options(file: Path, flags: dict[str, Any]) -> FinetuneOptions:
    return build(FinetuneOptions, [from_file(file, FinetuneOptions), from_flags(FinetuneOptions, flags)])


def test_options_come_from_a_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('model = "m"\ntrain = "d.jsonl"\noutput = "o"\nmax-length = 64\nlr = 1\n')
    options = read_options(file, {"lr": 0.5, "rank": None})
    assert (options.train, options.max_length, options.lr, options.rank) == (tmp_path / "d.jsonl", 64, 0.5, 16)
    for text, words in (
        ("ranks = 3", "ranks is not an option; did you mean rank"),
        ('rank = "3"', "rank is '3'"),
        ("x", "not valid TOML"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            read_options(file, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "lore"}, "use full, lora or qlora"),
        ({"rank": 0}, "from 1 to 1024"),
        ({"dropout": 1.0}, "from 0 to 0.9"),
        ({"eval": "x", "eval_share": 0.1}, "keep one"),
        ({"train": ""}, "train is ''; give a path"),
        ({"bits": 7}, "bits is 7"),
        ({"optimizer": "sgd"}, "adamw-bf16"),
    ],
)
def test_options_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        FinetuneOptions(**{"model": "m", "train": Path("t"), "output": Path("o"), **changes})


def test_targets_must_exist(room: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'lm_head'"):
        load_target(room / "model", options_of(room, tmp_path, targets="lm_head"), torch.device("cpu"))
    tuned = load_target(room / "model", options_of(room, tmp_path, targets="z_proj,o_gate"), torch.device("cpu"))
    learning = [name for name, parameter in tuned.named_parameters() if parameter.requires_grad]
    assert learning
    assert all("z_proj.lora" in name or "o_gate.lora" in name for name in learning)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_gradients_flow_through_frozen_linears(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(-(1 << 31), 1 << 31, (24, 64 * bits // 32), generator=generator).int()
    scales, offsets = (torch.randn(24, 2, generator=generator) for _ in range(2))
    linear = FrozenLinear(AffineWeight(codes, scales, offsets, bits, 32), order=torch.randperm(64, generator=generator))
    dense = torch.empty(24, 64, dtype=torch.float64).index_copy_(1, linear.order, linear.expand(torch.float64))
    x = torch.randn(5, 3, 64, generator=generator, requires_grad=True, dtype=torch.float64)
    y = linear(x)
    torch.testing.assert_close(y, x @ dense.T)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(grad, 2 * (x @ dense.T) @ dense)
    assert not linear.state_dict()
    with pytest.raises(TypeError, match="dtype"):
        linear.half()


def test_a_quantized_base_keeps_its_codes(room: Path, tmp_path: Path) -> None:
    options = options_of(room, tmp_path, method="qlora", model=str(room / "packed"))
    model = load_target(room / "packed", options, torch.device("cpu"))
    name = "model.layers.1.self_attn.z_proj"
    base = model.get_submodule(f"base_model.model.{name}.base_layer")
    with Checkpoint(room / "packed") as checkpoint:
        config = SalaConfig.load(room / "packed")
        want = read_parameter(checkpoint, config, f"{name}.weight", torch.float32, torch.device("cpu"))
    assert torch.equal(base.expand(torch.float32), want)


def test_narrow_memory_follows_adamw() -> None:
    """In fp32 it is AdamW; in bf16 it stays near it where rounding to nearest would stand still."""
    start = torch.linspace(-1, 1, 64)
    models = {"wide": torch.optim.AdamW, "own": Bf16AdamW, "narrow": Bf16AdamW}
    ends = {}
    for name, kind in models.items():
        weight = torch.nn.Parameter(start.clone().to(torch.bfloat16 if name == "narrow" else torch.float32))
        optimizer = kind([weight], lr=1e-4, weight_decay=0.1)
        torch.manual_seed(0)
        for _ in range(50):
            weight.grad = (weight.detach().float() - 3).to(weight.dtype)
            optimizer.step()
        ends[name] = weight.detach().float()
    torch.testing.assert_close(ends["own"], ends["wide"], atol=1e-6, rtol=1e-5)
    moved, wanted = (ends["narrow"] - start.bfloat16().float()).mean(), (ends["wide"] - start).mean()
    assert float(moved) == pytest.approx(float(wanted), rel=0.15)


def test_random_rounding_keeps_the_mean() -> None:
    torch.manual_seed(0)
    values = torch.full((20000,), 1.0 + 2**-10)  # an eighth of the way to the next bf16
    rounded = round_stochastically(values, torch.bfloat16).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean() == pytest.approx(1.0 + 2**-10, abs=2e-4)
    assert torch.equal(
        round_stochastically(torch.tensor([torch.inf, 0.0]), torch.bfloat16).float(), torch.tensor([torch.inf, 0.0])
    )


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed"])
def test_bases_of_other_programs_keep_their_codes(tmp_path: Path, name: str) -> None:
    """An adapter that has learnt nothing gives what the base gives, inputs in any order."""
    cases = {"gptq": gptq_case(order=True), "awq": awq_case(), "compressed": packed_case(8, 64, False)}
    plain = write(tmp_path / "base", cases[name])
    options = options_of(tmp_path, tmp_path / "o", method="qlora", model=str(tmp_path / "base"))
    model = load_target(tmp_path / "base", options, torch.device("cpu"))
    linears = {
        place.removeprefix("base_model.model.").removesuffix(".base_layer"): module
        for place, module in model.named_modules()
        if isinstance(module, FrozenLinear)
    }
    assert len(linears) == 4 * 8
    for place, linear in linears.items():
        x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(linear(x), x @ plain[f"{place}.weight"].T, atol=1e-4, rtol=1e-4)
