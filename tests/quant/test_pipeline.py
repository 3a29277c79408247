"""Whole checkpoints: what is written loads and computes what its weights say; runs go on; what cannot be is refused."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sala
from sala.checkpoint.names import check_tensors
from sala.checkpoint.packing import PACKED_PARTS, Packed, dequantize, encode
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_weights
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError, NoTokenizer
from sala.lab.quantize.draft import open_draft, remove
from sala.lab.quantize.pipeline import draft_of, quantize_model
from sala.lab.quantize.plan import QuantizeSettings, count_bits, plan_modules
from sala.lab.quantize.texts import FileText, SampledText
from sala.llm import LLM
from sala.quantization_config import Groups
from tests.quant.prose import prose

HALF = replace(TINY, dtype="bfloat16", tie_word_embeddings=True, attention_bias=True, num_hidden_layers=2)
HALF = replace(HALF, mixer_types=TINY.mixer_types[:2])
SHORT = {"num_tokens": 1024, "length": 128}
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "prose.txt"
    file.write_text(prose(600))
    return file


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "half"
    write_random(path, HALF)
    return path


def arrays(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    with Checkpoint(path) as checkpoint:
        return {
            name: (info.dtype, np.frombuffer(checkpoint.read(name).data, _NUMPY[info.dtype]).reshape(info.shape).copy())
            for name, info in checkpoint.tensors.items()
        }


def expand_checkpoint(path: Path, target: Path) -> None:
    """The same weights without a single code, in fp32."""
    config, held = SalaConfig.load(path), arrays(path)
    assert config.quantization is not None
    plain: dict[str, np.ndarray] = {}
    for name, (dtype, value) in held.items():
        module, _, leaf = name.rpartition(".")
        if f"{module}.scales" not in held:
            plain[name] = value if dtype == "F32" else (value.astype(np.uint32) << 16).view(np.float32)
        elif leaf == "bias":
            plain[name] = (value.astype(np.uint32) << 16).view(np.float32)
        elif leaf == "weight":
            groups = config.quantization.of(module)
            assert groups is not None
            parts = {field: held[f"{module}.{part}"][1] for part, field in PACKED_PARTS.items()}
            kind = held[f"{module}.scales"][0]
            plain[name] = dequantize(Packed(**parts, bits=groups.bits, group_size=groups.group_size, dtype=kind))
    with new_directory(target) as draft:
        specs = {name: ("F32", value.shape) for name, value in plain.items()}
        write_weights(draft, specs, lambda name: np.ascontiguousarray(plain[name]).data.cast("B"))
        own = replace(config, quantization=None, dtype="float32")
        (draft / "config.json").write_text(json.dumps(own.to_dict()))
        shutil.copy(path / "tokenizer.json", draft)


def logits(path: Path) -> torch.Tensor:
    model = sala.load_model(path, device="cpu", dtype="float32")
    return sala.forward(model, list(b"The river and the stone."), sala.create_layer_caches(model, max_tokens=64))


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("source", ["tiny", "half"])
def test_what_is_written(source: str, method: str, request: pytest.FixtureRequest, text: Path, tmp_path: Path) -> None:
    path: Path = request.getfixturevalue(source)
    keep = ("layers.0.*.k_proj", "layers.1.mlp.up_proj=whole")
    quantize_model(path, tmp_path / "out", QuantizeSettings(4, 32, method, keep, **SHORT), FileText(text, path))
    config = SalaConfig.load(tmp_path / "out")
    with Checkpoint(tmp_path / "out") as checkpoint:
        check_tensors(checkpoint, config)
        kinds = {name: info.dtype for name, info in checkpoint.tensors.items()}
    assert config.quantization is not None
    assert config.quantization.of("model.layers.0.mlp.up_proj") == Groups(4, 32)
    assert config.quantization.of("model.embed_tokens") == Groups(8, 32)
    assert config.quantization.of("model.layers.0.self_attn.k_proj") == Groups(8, 32)
    assert kinds["model.layers.1.mlp.up_proj.weight"] == ("F32" if source == "tiny" else "BF16")
    assert kinds["model.layers.0.mlp.up_proj.scales"] == ("F16" if source == "tiny" else "BF16")
    assert not draft_of(tmp_path / "out").exists()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (path / file).read_bytes()
    expand_checkpoint(tmp_path / "out", tmp_path / "plain")
    found, wanted = logits(tmp_path / "out"), logits(tmp_path / "plain")
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    original = logits(path)
    assert 0.5 < torch.corrcoef(torch.stack([found.flatten(), original.flatten()]))[0, 1] < 0.99999
    with LLM(tmp_path / "out", device="cpu", ctx=128) as llm:
        assert llm.generate("hello", temperature=0, max_tokens=4, ignore_eos=True).usage.completion_tokens == 4


def test_eight_bits_are_the_model(tiny: Path, tmp_path: Path) -> None:
    quantize_model(tiny, tmp_path / "out", QuantizeSettings(8))
    found, wanted = logits(tmp_path / "out"), logits(tiny)
    assert (found - wanted).abs().max() <= 0.03 * wanted.abs().max()


def test_calibrated_layers_are_nearer(tiny: Path, text: Path, tmp_path: Path) -> None:
    """On the text's own kind, 4 bits with a calibration lose less than without."""
    wanted, errors = logits(tiny), {}
    for method in ("rtn", "gptq"):
        quantize_model(tiny, tmp_path / method, QuantizeSettings(4, 64, method, **SHORT), FileText(text, tiny))
        errors[method] = float((logits(tmp_path / method) - wanted).square().mean())
    assert errors["gptq"] < 0.9 * errors["rtn"]


def test_the_model_writes_its_own_text(half: Path, tmp_path: Path) -> None:
    own = SampledText(half, "cpu")
    pieces, again, held = own.pieces(256, 64), own.pieces(256, 64), own.held_out(256, 64)
    assert pieces.shape == (4, 64)
    assert torch.equal(pieces, again)
    assert not torch.equal(pieces, held)
    assert (pieces[:, 0] == HALF.bos_token_id).all()
    quantize_model(half, tmp_path / "out", QuantizeSettings(4, num_tokens=256, length=64), own)
    assert SalaConfig.load(tmp_path / "out").quantization is not None


KILL = """
import os, signal, sys
from pathlib import Path
from sala.lab.quantize import draft, pipeline
from sala.lab.quantize.plan import QuantizeSettings
from sala.lab.quantize.texts import FileText
model, target, text, method, moment = sys.argv[1:]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if moment == "layer":
    note = lambda stage, done, total: die() if (stage, done) == ("quantizing", 2) else None
else:
    note = lambda *_: None
    saved = draft.WorkDirectory.save_tensor
    def save(self, name, x, dtype, about=None):
        die() if about == {"layer": "2"} else saved(self, name, x, dtype, about)
    draft.WorkDirectory.save_tensor = save
settings = QuantizeSettings(4, 64, method, num_tokens=1024, length=128)
pipeline.quantize_model(Path(model), Path(target), settings, FileText(Path(text), Path(model)), note=note)
"""


@pytest.mark.parametrize(("method", "moment"), [("rtn", "layer"), ("gptq", "layer"), ("awq", "activations")])
def test_a_killed_run_goes_on(tiny: Path, text: Path, tmp_path: Path, method: str, moment: str) -> None:
    settings = QuantizeSettings(4, 64, method, **SHORT)
    quantize_model(tiny, tmp_path / "whole", settings, FileText(text, tiny))
    arguments = [str(tiny), str(tmp_path / "out"), str(text), method, moment]
    killed = subprocess.run([sys.executable, "-c", KILL, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    stages = []
    quantize_model(tiny, tmp_path / "out", settings, FileText(text, tiny), note=lambda *news: stages.append(news))
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert "checking" not in {stage for stage, _, _ in stages}
    if method != "rtn":
        assert stages[0] == ("quantizing", 2 if moment == "layer" else 1, 4)


@pytest.mark.parametrize("num_removed", [0, 1, 2, 3, 4, 5])
def test_a_run_that_is_killed_when_its_model_is_there(
    num_removed: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its work directory is left, or a part of it, which the same command removes; that of another run stays."""
    from sala.lab.quantize import pipeline

    calls, unlink = itertools.count(), Path.unlink

    def die(path: Path) -> None:
        if next(calls) >= num_removed:
            raise KeyboardInterrupt
        unlink(path)

    settings, target, other = QuantizeSettings(4, method="rtn"), tmp_path / "out", tmp_path / "other"
    other.mkdir()
    draft_of(other).mkdir()
    (draft_of(other) / "job.json").write_text('{"fingerprint": "x"}')
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "remove", lambda _: None)
        quantize_model(tiny, target, settings)
        left = len([*draft_of(target).iterdir()])
        patch.setattr(Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt) if num_removed < left else nullcontext():
            remove(draft_of(target))
    assert left > 3
    assert draft_of(target).is_dir() is (num_removed < left)
    before = content(target)
    for path in (target, other):
        with pytest.raises(CheckpointError, match="exists already"):
            quantize_model(tiny, path, settings)
    assert content(target) == before
    assert not draft_of(target).exists()
    assert draft_of(other).exists()


def test_another_job_begins_anew(tiny: Path, text: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, _: int) -> None:
        if (stage, done) == ("quantizing", 1):
            raise KeyboardInterrupt

    four, eight = QuantizeSettings(4, method="rtn"), QuantizeSettings(8)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(tiny, tmp_path / "out", four, note=stop)
    assert draft_of(tmp_path / "out").is_dir()
    quantize_model(tiny, tmp_path / "out", eight)
    quantize_model(tiny, tmp_path / "fresh", eight)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_a_quantized_model_again(tiny: Path, tmp_path: Path) -> None:
    quantize_model(tiny, tmp_path / "eight", QuantizeSettings(8))
    with pytest.raises(CheckpointError, match="--requantize"):
        quantize_model(tmp_path / "eight", tmp_path / "four", QuantizeSettings(4, method="rtn"))
    settings = QuantizeSettings(4, method="rtn", keep=("lm_head=whole",))
    quantize_model(tmp_path / "eight", tmp_path / "four", settings, may_requantize=True)
    expand_checkpoint(tmp_path / "eight", tmp_path / "plain")
    quantize_model(tmp_path / "plain", tmp_path / "wanted", settings)
    found, wanted = arrays(tmp_path / "four"), arrays(tmp_path / "wanted")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name][1], wanted[name][1]) for name in found)


def test_refusals(tiny: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for wrong, message in (
        ({"bits": 3}, "bits is '3'; use 8, 4"),
        ({"group_size": 48}, "group_size is '48'; use 32, 64, 128"),
        ({"method": "magic"}, "use rtn, gptq, awq"),
        ({"num_tokens": 100}, "num_tokens is 100"),
    ):
        with pytest.raises(InputError, match=message):
            QuantizeSettings(**wrong)
    for keep, message in (("x_proj", "no module"), ("v_proj=5", "write it like"), ("=8", "write it like")):
        with pytest.raises(InputError, match=message):
            quantize_model(tiny, out, QuantizeSettings(8, keep=(keep,)))
    with pytest.raises(InputError, match="nothing to quantize"):
        quantize_model(tiny, out, QuantizeSettings(8, keep=("*=whole",)))
    with pytest.raises(InputError, match="gptq needs a text"):
        quantize_model(tiny, out, QuantizeSettings(4))
    assert not draft_of(out).exists()
    out.mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_model(tiny, out, QuantizeSettings(8))
    out.rmdir()
    out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_model(tiny, out, QuantizeSettings(8))


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    write_random(tmp_path / "odd", replace(TINY, intermediate_size=192))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj\.weight.*--group-size 64"):
        quantize_model(tmp_path / "odd", tmp_path / "out", QuantizeSettings(8, 128))
    write_random(tmp_path / "odder", replace(TINY, intermediate_size=200))
    with pytest.raises(CheckpointError, match=r"--keep model\.layers\.0\.mlp\.down_proj=whole"):
        quantize_model(tmp_path / "odder", tmp_path / "out", QuantizeSettings(8, 32))
    quantize_model(tmp_path / "odder", tmp_path / "out", QuantizeSettings(8, 32, keep=("down_proj=whole",)))
    assert torch.isfinite(logits(tmp_path / "out")).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_damaged_weight_is_named(value: float, dtype: str, tmp_path: Path) -> None:
    write_random(tmp_path / "bad", replace(TINY, dtype=dtype))
    name = "model.layers.3.mlp.up_proj.weight"
    with Checkpoint(tmp_path / "bad") as checkpoint:
        info = checkpoint.tensors[name]
    with info.file.open("r+b") as handle:
        handle.seek(info.start + 40)
        handle.write(encode(np.array([value], np.float32), "F32" if dtype == "float32" else "BF16").tobytes())
    with pytest.raises(CheckpointError, match=name):
        quantize_model(tmp_path / "bad", tmp_path / "out", QuantizeSettings(8))
    assert not (tmp_path / "out").exists()


def test_texts_that_cannot_be_used(tiny: Path, half: Path, tmp_path: Path) -> None:
    for name, data, message in (
        ("short.txt", b"too short", "at least 256"),
        ("binary.txt", b"\xff\xfe" * 300, "not UTF-8"),
        ("list.jsonl", b'{"text": "fine"}\n[1]\n', ":2 cannot be used: .*text"),
        ("field.jsonl", b'{"body": "fine"}\n', ":1 cannot be used: .*text"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=message):
            FileText(tmp_path / name, tiny).pieces(1024, 128)
    with pytest.raises(InputError, match="cannot be read"):
        quantize_model(tiny, tmp_path / "out", QuantizeSettings(4), FileText(tmp_path / "nothing.txt", tiny))
    (tmp_path / "good.txt").write_text(prose(300))
    shutil.copytree(half, tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    with pytest.raises(NoTokenizer):
        FileText(tmp_path / "good.txt", tmp_path / "mute").pieces(1024, 128)


def test_what_is_held_out_is_not_calibrated_with(tiny: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": prose(40, seed)}) for seed in range(30)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    whole = FileText(tmp_path / "text.jsonl", tiny)
    seen, held = whole.pieces(1 << 30, 64).flatten().tolist(), whole.held_out(1 << 30, 64).flatten().tolist()
    assert len(held) > 64
    assert seen == whole.tokens[: len(seen)]
    assert whole.num_seen >= len(seen)
    assert held == whole.tokens[whole.num_seen :][: len(held)]


def test_one_run_at_a_time(tiny: Path, tmp_path: Path) -> None:
    held = "import sys, time\nfrom pathlib import Path\nfrom sala.lab.quantize.draft import open_draft\n"
    held += "with open_draft(Path(sys.argv[1]), 'x'):\n    print('held', flush=True)\n    time.sleep(60)"
    command = [sys.executable, "-c", held, str(draft_of(tmp_path / "out"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="in use by another run"):
            quantize_model(tiny, tmp_path / "out", QuantizeSettings(8))
        other.kill()


def test_a_directory_of_somebody_else_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    place = draft_of(tmp_path / "out")
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="something else"), open_draft(place, "x"):
        pass
    assert (place / "thesis.txt").read_text() == "years of work"


def test_the_plan() -> None:
    plan = plan_modules(TINY, QuantizeSettings(4, keep=("k_proj", "layers.0.*=whole", "model.layers.0.mlp.up_proj=4")))
    assert plan["model.embed_tokens"] == plan["lm_head"] == Groups(8, 64)
    assert plan["model.layers.1.self_attn.v_proj"] == plan["model.layers.1.self_attn.k_proj"] == Groups(8, 64)
    assert plan["model.layers.1.self_attn.q_proj"] == Groups(4, 64)
    assert plan["model.layers.3.self_attn.q_proj"] == Groups(8, 64)  # the last layer
    assert plan["model.layers.0.self_attn.v_proj"] is None
    assert plan["model.layers.0.mlp.up_proj"] == Groups(4, 64)  # the last pattern counts
    shapes = {f"{name}.weight": (128, 128) for name in plan}
    everything = dict.fromkeys(plan, Groups(4, 64))
    assert count_bits(everything, shapes, 16) == 4.5


MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from sala.lab.quantize.pipeline import quantize_model
from sala.lab.quantize.plan import QuantizeSettings
from sala.lab.quantize.texts import FileText
torch.set_num_threads(1)
def used(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) / 1024
def watch():
    while True:
        seen.append(used())
        time.sleep(0.002)
model, target, text, method = sys.argv[1:]
source = FileText(Path(text), Path(model))
source.tokens
torch.linalg.cholesky(torch.eye(512)) @ torch.ones(512, 512)
seen = [used()]
threading.Thread(target=watch, daemon=True).start()
quantize_model(Path(model), Path(target), QuantizeSettings(4, 64, method, num_tokens=512, length=128), source)
print(max(seen) - seen[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with Linux's /proc")
def test_memory_is_that_of_a_layer(text: Path, tmp_path: Path) -> None:
    """Four layers more, 29 MiB in fp32, take no more memory; 8 MiB are left for chance."""
    shape = replace(
        TINY,
        hidden_size=384,
        intermediate_size=1024,
        head_dim=48,
        lightning_head_dim=48,
        dtype="bfloat16",
    )
    taken = []
    for count in (2, 6):
        mixers = ("lightning-attn", "minicpm4") * (count // 2)
        write_random(tmp_path / f"{count}", replace(shape, num_hidden_layers=count, mixer_types=mixers))
        command = [sys.executable, "-c", MEMORY, *map(str, (tmp_path / f"{count}", tmp_path / f"out-{count}", text))]
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back, and not counted
        out = subprocess.run([*command, "gptq"], capture_output=True, text=True, check=True, env=env)
        taken.append(float(out.stdout))
    assert taken[1] < taken[0] + 8
    assert taken[1] < 48
