"""`sala estimate` for models with fewer bits: the sizes are those of the files that `sala quantize` writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sala.backends.memory import (
    STATE_ELEMENT_BYTES,
    USABLE,
    estimate,
    longest,
    pooled_bytes,
    share_memory,
    state_bytes,
    token_bytes,
    weight_bytes,
)
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.packing import packed_specs, quantize
from sala.checkpoint.random import RELEASED, TINY
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_weights
from sala.cli import run
from sala.cli.estimate import CONTEXTS, MEMORIES
from sala.cli.models import describe
from sala.config import SalaConfig
from sala.errors import InputError
from sala.llm import LLM
from sala.protocol import Capacity, Options
from sala.quantization_config import Groups, QuantConfig
from tests.foreign import fp8_case, write

GIB = 1 << 30


def test_the_released_model_is_estimated_before_it_is_downloaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    wanted = show(capsys, "--shape", "9b", "--ctx", "1M", "--memory", "16G")
    assert "does NOT fit" in wanted
    for name in ("MiniCPM-SALA", "openbmb/MiniCPM-SALA", "minicpm-sala"):
        assert run(["estimate", name, "--ctx", "1M", "--memory", "16G"]) == 0
        out, err = capsys.readouterr()
        assert out == wanted
        assert "sala pull openbmb/MiniCPM-SALA" in err
    assert run(["estimate", "MiniCPM-SALB"]) != 0


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["estimate", *words]) == 0
    return capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(show(capsys, *words, "--json"))
    return found


def write_quantized(target: Path, bits: int, group_size: int) -> int:
    """A checkpoint with 8-bit edges → bytes of its tensors."""
    wide = Groups(8, group_size)
    quantization = QuantConfig(bits, group_size, (("model.embed_tokens", wide), ("lm_head", wide)))
    config = replace(TINY, dtype="bfloat16", quantization=quantization)
    specs: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, shape in expected_tensors(config).items():
        specs[name], tensors[name] = ("BF16", shape), np.zeros(shape, np.uint16)
        if len(shape) == 2:
            module = name.removesuffix(".weight")
            groups = quantization.of(module)
            assert groups is not None
            packed = quantize(np.ones(shape, np.float32), groups.bits, group_size, "BF16")
            specs |= packed_specs(module, packed)
            parts = {"weight": packed.codes, "scales": packed.scales, "biases": packed.biases}
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
    with new_directory(target) as draft:
        write_weights(draft, specs, lambda name: np.ascontiguousarray(tensors[name]).data.cast("B"))
        (draft / "config.json").write_text(json.dumps(config.to_dict()))
    with Checkpoint(target) as checkpoint:
        return checkpoint.nbytes


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_quantized_file_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: int, group_size: int
) -> None:
    stored = write_quantized(tmp_path / "m", bits, group_size)
    parameters = count_parameters(expected_tensors(TINY))
    assert weight_bytes(TINY, parameters, bits, 2, group_size) == pytest.approx(stored, rel=0.01)
    assert facts(capsys, str(tmp_path / "m"))["weights"] == stored
    (row,) = facts(capsys, str(tmp_path / "m"), "--table")["rows"]
    assert (row["weights"], row["weight_bytes"]) == ("as stored", stored)


def test_the_released_shapes_need_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    weights = [
        facts(capsys, "--shape", "9b", *words)["weights"] / GIB for words in ([], ["--bits", "8"], ["--bits", "4"])
    ]
    assert weights == pytest.approx([17.65, 9.38, 5.24], abs=0.01)
    coarse = facts(capsys, "--shape", "9b", "--bits", "4", "--group-size", "128")["weights"] / GIB
    assert weights[2] - coarse == pytest.approx(9_477_203_968 / 128 * 4 / GIB, rel=1e-3)
    small, large = (facts(capsys, "--shape", "9b", "--chunk", chunk)["activations"] for chunk in ("256", "8K"))
    assert large > 4 * small


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = facts(capsys, "--shape", "9b", "--table")["rows"]
    assert [row["weights"] for row in rows] == ["bfloat16", "8 bits", "4 bits"]
    parameters = count_parameters(expected_tensors(RELEASED))
    for row, bits in zip(rows, (None, 8, 4), strict=True):
        assert list(row["total"]) == [str(ctx) for ctx in CONTEXTS]
        for memory in MEMORIES:
            most, free = row["longest"][str(memory)], USABLE * memory * GIB
            assert estimate(RELEASED, parameters, most + 64, bits=bits).total > free
            assert not most or estimate(RELEASED, parameters, most, bits=bits).total <= free
    text = show(capsys, "--shape", "9b", "--table").splitlines()
    assert text[1].split() == ["weights", "alone", "32K", "128K", "512K", "1M"]
    assert text[-1].split()[:2] == ["4", "bits"]
    assert text[-3].split()[1:3] == ["-", "-"]  # bf16 in 8 and 16 GB
    (row,) = facts(capsys, "--shape", "9b", "--table", "--bits", "8")["rows"]
    assert row == rows[1]


@pytest.mark.parametrize("words", [["--bits", "5"], ["--group-size", "48"], ["--shape", "70b"]])
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(["estimate", "--shape", "9b", *words]) == 2
    assert "use " in capsys.readouterr().err


def test_what_vllm_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "9b", "--engine", "vllm", "--ctx", "128K", "--chunk", "8192", "--memory", "80G"]
    one = facts(capsys, *words)
    assert (one["block_tokens"], one["block_bytes"]) == (2048, 8 * 2048 * 1088)
    assert one["sequence"] == (64 + 6) * one["block_bytes"]
    assert one["total"] == one["weights"] + one["activations"] + one["sequence"]
    budget = 0.92 * 80 * GIB - one["weights"] - one["activations"]
    assert one["sequences"] * one["sequence"] <= budget < (one["sequences"] + 1) * one["sequence"]
    assert one["longest"] // 2048 * one["block_bytes"] <= budget
    for split in (["--tp", "2"], ["--pp", "2"]):
        half = facts(capsys, *words, *split, "--nodes", "2")
        assert (half["weights"], half["sequence"]) == (one["weights"] // 2, one["sequence"] // 2)
        assert half["sequences"] > 2 * one["sequences"]
    text = show(capsys, *words, "--tp", "2", "--pp", "2", "--nodes", "2")
    assert text.startswith("vllm on 2 machine(s) with 2 GPU(s) each; each GPU holds\n")
    assert f"room for {facts(capsys, *words, '--tp', '2', '--pp', '2', '--nodes', '2')['sequences']:,} seq" in text


def test_vllm_expands_what_sala_packs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = write_quantized(tmp_path / "m", 4, 64)
    whole = facts(capsys, str(tmp_path / "m"), "--engine", "vllm")["weights"]
    assert whole == 2 * count_parameters(expected_tensors(TINY)) > stored


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "2"], None),
        (["--nodes", "2"], "nodes is for other engines; add --engine vllm"),
        (["--pp", "2"], "pp is for other engines; add --engine vllm"),
        (["--engine", "vllm", "--nodes", "2"], "1 GPUs cannot be spread evenly: change --tp or --pp"),
        (["--engine", "vllm", "--pp", "64"], "the model has 32 layers"),
        (["--engine", "sglang"], "use vllm"),
    ],
)
def test_gpus(capsys: pytest.CaptureFixture[str], words: list[str], said: str | None) -> None:
    assert run(["estimate", "--shape", "9b", *words]) == (0 if said is None else 2)
    assert said is None or said in capsys.readouterr().err


def test_fp8_weights_count_as_what_they_become(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path / "fp8", fp8_case("tensor"))
    assert facts(capsys, str(tmp_path / "fp8"))["weights"] == count_parameters(expected_tensors(TINY)) * 4


def test_a_list_says_how_groups_lie() -> None:
    assert describe({"bits": 4, "group_size": 128}) == "4 bits, groups of 128"
    assert describe({"bits": 4, "group_size": -1}) == "4 bits, one group per row"


def test_tensor_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU holds its share; the two kv heads of the released model can be halved, and no further."""
    one, two, four = (facts(capsys, "--shape", "9b", "--ctx", "1M", "--batch", "3", "--tp", n) for n in "124")
    assert (two["weights"], two["pages"], two["states"]) == tuple(
        one[name] // 2 for name in ("weights", "pages", "states")
    )
    assert four["weights"] == one["weights"] // 4
    assert four["states"] == one["states"] // 4
    assert four["pages"] == two["pages"]
    assert "each of 2 GPUs" in show(capsys, "--shape", "9b", "--tp", "2")
    assert run(["estimate", "--shape", "9b", "--tp", "3"]) == 2
    assert "it must divide 32 heads" in capsys.readouterr().err


def test_conversations_by_tier(capsys: pytest.CaptureFixture[str]) -> None:
    """What rests beside one that runs: by the arithmetic of the engine, for the 9B model on a GPU of 48 GB."""
    words = ["--shape", "9b", "--ctx", "32K", "--memory", "48G", "--cache-ram", "64G", "--cache-disk", "1G"]
    found = facts(capsys, *words)
    copy = 512 * 64 * token_bytes(RELEASED, 2) + state_bytes(RELEASED)  # 512 pages
    budget = (48 * GIB - found["weights"]) // 2
    slots = budget // 4 // state_bytes(RELEASED)
    pages = (budget - slots * state_bytes(RELEASED)) // (64 * token_bytes(RELEASED, 2))
    assert found["conversations"] == {"device": pages // 512 - 1, "host": 64 * GIB // (copy + (16 << 10)), "disk": 3}
    assert f"{pages // 512 - 1} on the device, {found['conversations']['host']} in host memory, 3 on disk" in show(
        capsys, *words
    )
    assert facts(capsys, *words, "--snapshots", "3", "--batch", "2")["conversations"]["device"] == 11 - 2 * 3
    assert facts(capsys, "--shape", "9b", "--ctx", "1M", "--memory", "20G")["conversations"] == {}


@pytest.mark.parametrize("chunk", [2048, 8448])
@pytest.mark.parametrize("given", [{}, {"snapshots": 4}, {"kv": "auto", "state": "bf16"}, {"snapshots": 0}])
def test_the_engine_admits_the_longest_context_of_the_estimate(chunk: int, given: dict[str, Any]) -> None:
    """And no longer one; what a step needs stays free. A card of 12 GB with the 9B model in 4 bits."""
    options = Options(**{"kv": "fp8", **given})
    parameters, memory = count_parameters(expected_tensors(RELEASED)), int(10.8 * GIB)
    sizes: dict[str, Any] = {
        "num_snapshots": options.snapshots or 1,
        "kv_bytes": 1 if options.kv == "fp8" else 2,
        "state_element_bytes": STATE_ELEMENT_BYTES[options.state],
    }
    most = longest(RELEASED, parameters, memory, bits=4, chunk=chunk, **sizes)
    needed = estimate(RELEASED, parameters, most, bits=4, chunk=chunk, **sizes)
    free, overheads = memory - needed.weights, (9 * RELEASED.vocab_size, 0)

    def share(ctx: int) -> Capacity:
        wanted = replace(options, ctx=ctx)
        return share_memory(RELEASED, wanted, "bf16", 2, chunk, free, sizes["kv_bytes"], 128, overheads)

    capacity = share(most)
    taken = capacity.num_pages * capacity.page_bytes + capacity.num_slots * capacity.slot_bytes
    assert capacity.max_tokens == most
    assert taken + needed.activations + needed.runtime <= free + capacity.num_slots * overheads[0]
    with pytest.raises(InputError, match=f"{most:,} tokens fit"):
        share(most + 64)
    assert share(32 << 10).num_slots >= capacity.num_slots


def test_a_cache_holds_as_many_conversations_as_estimated(tiny: Path) -> None:
    greedy = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
    config = SalaConfig.load(tiny)
    page = 64 * token_bytes(config, 4)
    with LLM(tiny, device="cpu", ctx=256, cache_memory=12 * state_bytes(config) * 4 + 40 * page, max_batch=1) as llm:
        count = llm.capacity.num_resting(200, 1)
        assert 5 < count < 40
        prompts = [[1 + number, *range(1, 190)] for number in range(count)]
        talks = [[*prompt, *llm.generate(prompt, **greedy).token_ids, 5] for prompt in prompts]
        assert all(llm.generate(talk, **greedy).usage.cached_tokens == 191 for talk in talks)


def test_what_a_step_and_moving_a_conversation_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes by bandwidths: weights, states twice, and the keys and values that a token reads."""
    words = ["--shape", "9b", "--ctx", "1M", "--bits", "4", "--batch", "2", "--bandwidth"]
    found = facts(capsys, *words, "device=1000,host=50")
    num_bytes = found["weights"] + 2 * found["states"] + 2 * found["step_bytes"]
    assert found["step_s"] == [pytest.approx(num_bytes / 1e12)] * 2
    moved = (found["pages"] + found["states"]) / 2
    assert found["moving_s"] == {"host": pytest.approx(moved / 50e9)}
    text = show(capsys, *words, "device=1000,host=50,disk=4")
    assert "estimated from bandwidths alone (device 1,000 GB/s, host 50 GB/s, disk 4 GB/s), so at least" in text
    assert "to disk, or back" in text
    assert "to disk" not in show(capsys, *words, "device=1000,host=50")


def test_what_a_step_costs_with_keys_and_values_on_disk(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "9b", "--ctx", "4M", "--bits", "4", "--bandwidth", "device=100,disk=1"]
    (best, same), (_, worst) = (
        facts(capsys, *words, *more)["step_s"] for more in ([], ["--kv-home", "disk", "--kv-home-size", "40G"])
    )
    assert best == same
    selected = 96 * 64 * (token_bytes(RELEASED, 2) - pooled_bytes(RELEASED, 2))
    assert worst - best == pytest.approx(selected * (1 / 1e9 - 1 / 100e9))
    text = show(capsys, *words, "--kv-home", "disk", "--kv-home-size", "40G")
    assert "if all of the selected blocks are read from disk" in text
    assert "0 on the device with keys and values on disk" in text


def test_bandwidths_of_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sala.cli.costs._FILE_BYTES", 1 << 20)
    monkeypatch.setattr("sala.cli.costs._COPY_BYTES", 1 << 20)
    found = facts(
        capsys, "--shape", "9b", "--ctx", "4K", "--cache-dir", str(tmp_path / "new"), "--bandwidth", "measured"
    )
    assert set(found["bandwidths"]) == {"device", "host", "disk"}
    assert all(speed > 0 for speed in found["bandwidths"].values())
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    "given", ["device", "device=", "device=0", "device=-1", "device=inf", "gpu=1", "device=1,x", ""]
)
def test_bandwidths_that_are_none(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "--shape", "9b", "--bandwidth", given]) != 0
    assert "write GB/s as device=3350,host=50,disk=5, or measured" in capsys.readouterr().err


@pytest.mark.parametrize("other", [["--table"], ["--macs"], ["--finetune", "lora"], ["--engine", "vllm"]])
def test_bandwidths_are_for_one_context(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "--shape", "9b", "--bandwidth", "device=1", *other]) != 0
    assert "bandwidth is for one context; leave out" in capsys.readouterr().err
