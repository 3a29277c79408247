"""Adapters in peft's directories: merged when a checkpoint is opened, and on disk, to the same bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sala.backends.torch.loader import load_model
from sala.checkpoint.lora import MergedCheckpoint, base_of, fuse, is_adapter, open_checkpoint, read_adapter
from sala.checkpoint.names import check_tensors
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import write_file
from sala.cli import run
from sala.config import SalaConfig
from sala.errors import CheckpointError, ModelNotFound
from sala.lab.quantize.pipeline import quantize_model
from sala.lab.quantize.plan import QuantizeSettings
from sala.llm import LLM
from sala.models.embedded import find_base
from sala.server.runtime import open_model
from sala.server.settings import Settings as ServerSettings
from tests.foreign import awq_case, fp8_case, gptq_case, packed_case, write

TARGETS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
MODULES = (
    *(f"model.layers.{i}.{name}" for i in range(4) for name in TARGETS),
    "model.layers.1.self_attn.z_proj",
    "model.layers.0.self_attn.o_gate",
)

FOREIGN = {
    "gptq": gptq_case(order=True),
    "awq": awq_case(),
    "compressed": packed_case(8, 64, False),
    "fp8": fp8_case("row"),
    "blocks": fp8_case("block"),
}


def write_adapter(
    directory: Path, modules: tuple[str, ...] = MODULES, rank: int = 4, dtype: str = "F32", **changes: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """A random adapter; returns the change of every module without its scale."""
    rng = np.random.default_rng(3)
    shapes = dict(read_shapes())
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    products = {}
    for module in modules:
        num_out, num_in = shapes[f"{module}.weight"]
        down = rng.standard_normal((rank, num_in)).astype(np.float32) * 0.05
        up = rng.standard_normal((num_out, rank)).astype(np.float32) * 0.05
        arrays[f"base_model.model.{module}.lora_A.weight"] = down
        arrays[f"base_model.model.{module}.lora_B.weight"] = up
        products[module] = up @ down
    directory.mkdir(parents=True)
    specs = {name: (dtype, array.shape) for name, array in arrays.items()}
    kinds = {"F32": np.float32, "F16": np.float16}
    write_file(
        directory / "adapter_model.safetensors",
        specs,
        lambda name: memoryview(arrays[name].astype(kinds[dtype]).reshape(-1).view(np.uint8)),
        {},
    )
    table = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(table | changes))
    return products


def read_shapes() -> dict[str, tuple[int, ...]]:
    from sala.checkpoint.names import expected_tensors

    return expected_tensors(TINY)


def values(checkpoint: Checkpoint, config: SalaConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load_model(checkpoint, config, dtype, torch.device("cpu"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_change_is_added(tiny: Path, tmp_path: Path) -> None:
    products = write_adapter(tmp_path / "a", use_rslora=True)
    config = SalaConfig.load(tiny)
    merged, merged_config = open_checkpoint(tiny, config, tmp_path / "a")
    before, after = values(Checkpoint(tiny), config), values(merged, merged_config)
    for name, weight in before.items():
        change = products.get(name.removesuffix(".weight"))
        wanted = weight if change is None else weight + torch.from_numpy(change) * (8 / 4**0.5)
        torch.testing.assert_close(after[name], wanted, atol=1e-6, rtol=1e-6)


def test_it_is_what_peft_computes(tiny: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = SalaConfig.load(tiny)
    model = load_model(Checkpoint(tiny), config, torch.float32, torch.device("cpu"))
    targets = ["q_proj", "z_proj", "up_proj", "o_gate"]
    patterns = {"rank_pattern": {"up_proj": 2, "layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"z_proj": 5}}
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, **patterns))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)
    tuned.save_pretrained(tmp_path / "a")
    wanted = {
        name.removeprefix("base_model.model."): weight for name, weight in tuned.merge_and_unload().named_parameters()
    }
    merged, merged_config = open_checkpoint(tiny, config, tmp_path / "a")
    for name, weight in values(merged, merged_config).items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def bases(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model, stored in every way."""
    room = tmp_path_factory.mktemp("bases")
    write_random(room / "bfloat16", replace(TINY, dtype="bfloat16"))
    quantize_model(tiny, room / "packed", QuantizeSettings(4, 32, "rtn"))
    for name, case in FOREIGN.items():
        write(room / name, case)
    return {"plain": tiny} | {path.name: path for path in room.iterdir()}


@pytest.mark.parametrize("base", ["plain", "bfloat16", "packed", *FOREIGN])
def test_fused_and_merged_are_the_same(bases: dict[str, Path], base: str, tmp_path: Path) -> None:
    path = bases[base]
    write_adapter(tmp_path / "a", dtype="F16")
    config = SalaConfig.load(path)
    fuse(path, tmp_path / "a", tmp_path / "fused")
    merged, merged_config = open_checkpoint(path, config, tmp_path / "a")
    check_tensors(merged, merged_config)
    dtype = torch.bfloat16 if base == "bfloat16" else torch.float32
    with Checkpoint(tmp_path / "fused") as fused:
        got = values(fused, SalaConfig.load(tmp_path / "fused"), dtype)
    for name, weight in values(merged, merged_config, dtype).items():
        assert torch.equal(got[name], weight), name
    prompt = list(range(40, 90))
    with LLM(tmp_path / "fused", ctx=256) as one, LLM(path, adapter=tmp_path / "a", ctx=256) as two:
        first, second = (llm.generate(prompt, temperature=0, max_tokens=8) for llm in (one, two))
    assert first.text == second.text


@pytest.mark.parametrize("name", FOREIGN)
def test_the_change_is_added_to_other_layouts(tmp_path: Path, name: str) -> None:
    plain = write(tmp_path / "base", FOREIGN[name])
    products = write_adapter(tmp_path / "a")
    merged, config = open_checkpoint(tmp_path / "base", SalaConfig.load(tmp_path / "base"), tmp_path / "a")
    after = values(merged, config)
    for module, product in products.items():
        wanted = plain[f"{module}.weight"] + 2 * torch.from_numpy(product)
        torch.testing.assert_close(after[f"{module}.weight"], wanted, atol=1e-5, rtol=1e-5)


def test_a_merged_matrix_is_rounded_once(bases: dict[str, Path], tmp_path: Path) -> None:
    products = write_adapter(tmp_path / "a")
    path = bases["bfloat16"]
    config = SalaConfig.load(path)
    merged, merged_config = open_checkpoint(path, config, tmp_path / "a")
    before = values(Checkpoint(path), config, torch.bfloat16)
    after = values(merged, merged_config, torch.bfloat16)
    for module, product in products.items():
        exact = before[f"{module}.weight"].float() + 2 * torch.from_numpy(product)
        close = torch.isclose(after[f"{module}.weight"].float(), exact.bfloat16().float(), rtol=2**-7)
        assert close.all()
        assert (after[f"{module}.weight"] == exact.bfloat16()).float().mean() > 0.999


def test_untouched_matrices_stay_packed(bases: dict[str, Path], tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    fuse(bases["packed"], tmp_path / "a", tmp_path / "fused")
    with Checkpoint(tmp_path / "fused") as fused:
        assert "model.layers.0.mlp.up_proj.scales" in fused.tensors
        assert "model.layers.0.mlp.down_proj.scales" not in fused.tensors
    assert fuse(bases["packed"], tmp_path / "a", tmp_path / "whole", is_whole=True).quantization is None
    with Checkpoint(tmp_path / "whole") as whole:
        assert all(info.dtype == "F32" for info in whole.tensors.values())
        one = values(whole, SalaConfig.load(tmp_path / "whole"))
    with Checkpoint(tmp_path / "fused") as fused:
        two = values(fused, SalaConfig.load(tmp_path / "fused"))
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], atol=1e-6, rtol=1e-6)


def test_fusing_keeps_the_companions_and_overwrites_nothing(tiny: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    fuse(tiny, tmp_path / "a", tmp_path / "out", dtype="bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny / name).read_bytes()
    with Checkpoint(tmp_path / "out") as fused:
        assert {info.dtype for info in fused.tensors.values()} == {"BF16"}
    assert SalaConfig.load(tmp_path / "out").dtype == "bfloat16"
    with pytest.raises(CheckpointError, match="exists already"):
        fuse(tiny, tmp_path / "a", tmp_path / "out")


def test_the_fingerprint_knows_the_adapter(tiny: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b", lora_alpha=9)
    config = SalaConfig.load(tiny)
    prints = {Checkpoint(tiny).fingerprint()}
    prints |= {MergedCheckpoint(tiny, config, read_adapter(tmp_path / name, config)).fingerprint() for name in "ab"}
    assert len(prints) == 3


def test_an_adapter_finds_its_base(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path / "a", base_model_name_or_path=str(tiny))
    assert is_adapter(tmp_path / "a")
    assert not is_adapter(tiny)
    assert find_base(tmp_path / "a", None) == (tiny, tmp_path / "a")
    monkeypatch.setenv("SALA_MODELS_DIR", str(tiny.parent))
    write_adapter(tmp_path / "b", base_model_name_or_path="tiny")
    assert find_base(tmp_path / "b", None) == (tiny, tmp_path / "b")
    write_adapter(tmp_path / "c", base_model_name_or_path="elsewhere")
    assert base_of(tmp_path / "c") == "elsewhere"
    with pytest.raises(ModelNotFound, match=r"elsewhere.*--adapter"):
        find_base(tmp_path / "c", None)
    with pytest.raises(ModelNotFound, match="one adapter"):
        find_base(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base"),
        ({"r": 8}, "rank 4"),
        ({"lora_alpha": "much"}, "number"),
        ({"rank_pattern": {"(a+)+$": 3}}, "plain module names"),
    ],
)
def test_what_cannot_be_merged_is_refused(tiny: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_adapter(tmp_path / "a", **changes)
    with pytest.raises(CheckpointError, match=words):
        read_adapter(tmp_path / "a", SalaConfig.load(tiny))


def test_another_models_adapter_is_refused(tiny: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    with pytest.raises(CheckpointError, match="another model"):
        read_adapter(tmp_path / "a", replace(SalaConfig.load(tiny), hidden_size=64))
    with pytest.raises(CheckpointError, match="another model"):
        read_adapter(tmp_path / "a", replace(SalaConfig.load(tiny), use_output_gate=False))
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="incomplete"):
        read_adapter(tmp_path / "a", SalaConfig.load(tiny))
    (tmp_path / "a" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="can run code"):
        read_adapter(tmp_path / "a", SalaConfig.load(tiny))


def test_commands_take_an_adapter(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(tmp_path / "a", base_model_name_or_path=str(tiny))
    answers = []
    fused = ["fuse", str(tiny), "--adapter", str(tmp_path / "a"), "-o", str(tmp_path / "fused")]
    assert run(fused) == 0
    assert run(["fuse", str(tmp_path / "a"), "-o", str(tmp_path / "again")]) == 0
    ways = (["-m", str(tiny)], ["-m", str(tiny), "--adapter", str(tmp_path / "a")], ["-m", str(tmp_path / "a")])
    for way in (*ways, ["-m", str(tmp_path / "fused")], ["-m", str(tmp_path / "again")]):
        capsys.readouterr()
        assert run(["generate", "Hello", "-n", "12", "-t", "0", "--ctx", "256", *way]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1]
    assert answers[1:] == [answers[1]] * 4
    assert run(["fuse", str(tiny), "-o", str(tmp_path / "none")]) == 2
    assert run(fused) == 1


def test_the_server_puts_it_on_its_own_model_alone(tiny: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", base_model_name_or_path=str(tiny))
    write_random(tmp_path / "other", TINY, seed=1)
    settings = ServerSettings(model=str(tiny), adapter=tmp_path / "a", ctx=256, models_dir=tmp_path)
    with open_model(tiny, settings) as own, open_model(tmp_path / "other", settings) as other:
        assert (own.adapter, other.adapter) == (tmp_path / "a", None)
    with open_model(tiny, ServerSettings(model=str(tmp_path / "a"), ctx=256, models_dir=tmp_path)) as named:
        assert (named.path, named.adapter) == (tiny, tmp_path / "a")
