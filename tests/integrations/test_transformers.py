"""SALA behind transformers' door computes what our own model and engine compute, padded, packed, cached or not."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

import sala
from sala.backends.torch.batch import whole
from sala.backends.torch.loader import load_model
from sala.checkpoint.reader import Checkpoint
from sala.cli import run
from sala.config import SalaConfig
from sala.errors import ConfigError, InputError
from sala.llm import LLM
from sala.plugins.transformers import SalaCache, SalaForCausalLM, SalaHfConfig, load
from tests.golden import CASES, DATA, Case

sala.register()
COUNT = 12
LENGTHS = {"block16": (9, 60, 125, 140, 320), "block64": (30, 505, 620)}  # dense_len is 128, and 512


@pytest.fixture(scope="module")
def models() -> dict[str, SalaForCausalLM]:
    return {name: load(DATA / name, "float32") for name in LENGTHS}


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed + length).integers(1, 256, length).tolist()


def pad(rows: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), 7), torch.zeros(len(rows), width, dtype=torch.long)
    for at, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[at, place], mask[at, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: SalaForCausalLM, rows: list[list[int]], **options: Any) -> list[list[int]]:
    """Tokens of every row behind its prompt."""
    model.generation_config.eos_token_id = None
    batch = pad(rows, "left")
    options = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_golden(case: Case, models: dict[str, SalaForCausalLM]) -> None:
    model, data = models[case.model.name], case.data
    ids, num_first = torch.from_numpy(data["input_ids"]).long()[None], len(data["prefill_logits"])
    out = model(ids[:, :num_first])
    torch.testing.assert_close(out.logits[0], torch.from_numpy(data["prefill_logits"]), atol=1e-4, rtol=0)
    for at, wanted in enumerate(data["decode_logits"], num_first):
        out = model(ids[:, at : at + 1], past_key_values=out.past_key_values)
        torch.testing.assert_close(out.logits[0, 0], torch.from_numpy(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_padding_changes_nothing(side: str, use_cache: bool, models: dict[str, SalaForCausalLM]) -> None:
    rows = [prompt(length) for length in (140, 9, 77)]
    batch = pad(rows, side)
    logits = models["block16"](**batch, use_cache=use_cache).logits
    for row, mask, found in zip(rows, batch["attention_mask"].bool(), logits, strict=True):
        alone = models["block16"](torch.tensor([row]), use_cache=use_cache).logits[0]
        torch.testing.assert_close(found[mask], alone, atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_positions_that_restart_separate_sequences(models: dict[str, SalaForCausalLM]) -> None:
    rows = [prompt(length) for length in (30, 150, 1, 44)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = models["block16"](torch.tensor([[*chain(*rows)]]), position_ids=positions, use_cache=False).logits[0]
    for row, found in zip(rows, packed.split([len(row) for row in rows]), strict=True):
        alone = models["block16"](torch.tensor([row]), use_cache=False).logits[0]
        torch.testing.assert_close(found, alone, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", LENGTHS)
def test_generates_what_the_engine_does(name: str, models: dict[str, SalaForCausalLM]) -> None:
    rows = [prompt(length) for length in LENGTHS[name]]
    llm = LLM(DATA / name, device="cpu", dtype="float32", ctx=1024)
    wanted = [llm.generate(row, temperature=0, max_tokens=COUNT, ignore_eos=True).token_ids for row in rows]
    assert generate(models[name], rows) == wanted
    assert [generate(models[name], [row])[0] for row in rows] == wanted


def test_without_a_cache(models: dict[str, SalaForCausalLM]) -> None:
    rows = [prompt(60), prompt(9)]
    assert generate(models["block16"], rows, use_cache=False) == generate(models["block16"], rows)


def test_prompt_in_pieces(models: dict[str, SalaForCausalLM]) -> None:
    """`generate` says how long the prompt will be, so that pieces do not change between dense and sparse."""
    rows = [prompt(320), prompt(60)]
    assert generate(models["block16"], rows, prefill_chunk_size=50) == generate(models["block16"], rows)


@torch.no_grad()
def test_goes_on_from_a_past(models: dict[str, SalaForCausalLM]) -> None:
    model, ids = models["block16"], torch.tensor([prompt(300), prompt(300, 1)])
    out = model(ids[:, :70])
    again = model(ids[:, 70:], past_key_values=out.past_key_values)
    torch.testing.assert_close(again.logits, model(ids).logits[:, 70:], atol=2e-6, rtol=1e-5)
    assert again.past_key_values.get_seq_length() == 300


def test_beams(models: dict[str, SalaForCausalLM]) -> None:
    """A beam's past goes where the beam goes: with and without a cache the same are found."""
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
    rows = [prompt(100), prompt(30)]
    cached = generate(models["block16"], rows, **options)
    assert cached == generate(models["block16"], rows, use_cache=False, **options)
    assert len({tuple(row) for row in cached}) == 4


def test_samples_repeat_the_prompt(models: dict[str, SalaForCausalLM]) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "top_k": 0}
    first = generate(models["block16"], [prompt(40), prompt(9)], **options)
    torch.manual_seed(0)
    assert first == generate(models["block16"], [prompt(40), prompt(9)], use_cache=False, **options)
    assert len({tuple(row) for row in first}) == 6


@torch.no_grad()
def test_cache_selects_rows(models: dict[str, SalaForCausalLM]) -> None:
    model, rows = models["block16"], [prompt(140), prompt(33), prompt(7)]
    past = model(**pad(rows, "left")).past_key_values
    past.batch_select_indices(torch.tensor([2, 0]))
    past.batch_repeat_interleave(2)
    assert past.lengths == [7, 7, 140, 140]
    found = model(torch.full((4, 1), 5), past_key_values=past).logits[:, 0]
    for at, row in enumerate([rows[2], rows[2], rows[0], rows[0]]):
        alone = model(torch.tensor([[*row, 5]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(found[at], alone, atol=2e-6, rtol=1e-5)


def test_what_cannot_be_is_refused(models: dict[str, SalaForCausalLM]) -> None:
    model = models["block16"]
    two = model(torch.ones(2, 4, dtype=torch.long), use_cache=True).past_key_values
    with pytest.raises(InputError, match="cannot be rolled back"):
        SalaCache(model.model.sala_config).crop(-1)
    with pytest.raises(InputError, match="same batch"):
        model(torch.ones(3, 1, dtype=torch.long), past_key_values=two)
    full = DynamicCache()
    full.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    with pytest.raises(InputError, match="DynamicCache"):
        model(torch.tensor([[1, 2]]), past_key_values=full)
    with pytest.raises(InputError, match="attention_mask"):
        model(torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 1, 2, 2))
    with pytest.raises(ConfigError, match="rope_scaling"):
        SalaHfConfig(rope_scaling={"rope_type": "linear", "factor": 2.0})


def gradients(model: SalaForCausalLM, **batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.train()
    model(**batch).loss.backward()
    model.eval()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_loss_and_gradients() -> None:
    """Of a padded batch: those of our own model on the same sequences; checkpointing and tiles change nothing."""
    model = load(DATA / "block16", "float32")
    rows = [prompt(140), prompt(33)]
    batch = pad(rows, "right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    plain = gradients(model, **batch, labels=labels)
    with Checkpoint(DATA / "block16") as checkpoint:
        own = load_model(checkpoint, SalaConfig.load(DATA / "block16"), torch.float32, torch.device("cpu"))
    own.requires_grad_(True)
    logits = own.logits(own(whole(torch.tensor([*chain(*rows)]), [len(row) for row in rows])))
    losses = [
        torch.nn.functional.cross_entropy(part[:-1], torch.tensor(row[1:]), reduction="sum")
        for part, row in zip(logits.split([len(row) for row in rows]), rows, strict=True)
    ]
    (sum(losses) / sum(len(row) - 1 for row in rows)).backward()  # type: ignore[union-attr]
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(plain[name], parameter.grad, atol=1e-6, rtol=1e-4)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    again = gradients(model, **batch, labels=labels)
    model.gradient_checkpointing_disable()
    model.loss_rows = 50
    tiled = gradients(model, **batch, labels=labels)
    for name, wanted in plain.items():
        torch.testing.assert_close(again[name], wanted, atol=0, rtol=0)
        torch.testing.assert_close(tiled[name], wanted, atol=1e-6, rtol=1e-4)


def test_tiles_divide_by_the_number_of_items() -> None:
    model, ids = load(DATA / "block16", "float32"), torch.tensor([prompt(40)])
    wanted = model(ids, labels=ids, num_items_in_batch=100).loss
    model.loss_rows = 16
    out = model(ids, labels=ids, num_items_in_batch=100)
    torch.testing.assert_close(out.loss, wanted)
    assert out.logits is None


@pytest.mark.parametrize("is_tied", [False, True])
@torch.no_grad()
def test_saved_models_come_back(is_tied: bool, tmp_path: Path) -> None:
    shape = SalaHfConfig.from_sala(SalaConfig.load(DATA / "block16"), tie_word_embeddings=is_tied)
    model, ids = SalaForCausalLM(shape).eval(), torch.tensor([prompt(50)])
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert isinstance(again, SalaForCausalLM)
    wanted = model(ids).logits
    assert torch.equal(again(ids).logits, wanted)
    decoder = AutoModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(decoder(ids).last_hidden_state, model(ids, output_hidden_states=True).hidden_states[-1])
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["architectures"] == ["MiniCPMSALAForCausalLM"]
    assert written["layer_types"].count("full_attention") == len(SalaConfig.load(DATA / "block16").sparse_layers)
    llm = LLM(tmp_path / "saved", device="cpu")
    tokens = llm.generate(ids[0].tolist(), temperature=0, max_tokens=COUNT, ignore_eos=True).token_ids
    assert tokens == generate(again, ids.tolist())[0]
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == is_tied


@torch.no_grad()
def test_vocabulary_grows() -> None:
    model, ids = load(DATA / "block16", "float32"), torch.tensor([prompt(20)])
    before = model(ids).logits
    model.resize_token_embeddings(300)
    assert model.config.to_sala().vocab_size == 300
    assert torch.equal(model(ids).logits[..., : before.shape[-1]], before)


def write_quantized(kind: str, tmp_path: Path) -> Path:
    from sala.checkpoint.random import TINY
    from tests import foreign
    from tests.parity.test_quantized import MIXED, write_pair

    if kind == "affine":
        return write_pair(tmp_path, TINY, MIXED)[0]
    case = foreign.gptq_case() if kind == "gptq" else foreign.fp8_case("block", "weight_scale_inv")
    foreign.write(tmp_path / "packed", case)
    return tmp_path / "packed"


@pytest.mark.parametrize("kind", ["affine", "gptq", "fp8"])
@torch.no_grad()
def test_quantized_checkpoints_load_dequantized(kind: str, tmp_path: Path) -> None:
    packed = write_quantized(kind, tmp_path)
    ids = torch.tensor([prompt(40)])
    model = AutoModelForCausalLM.from_pretrained(packed, dtype="float32")
    own = sala.load_model(packed, device="cpu", dtype="float32")
    wanted = sala.forward(own, ids[0].tolist(), sala.create_layer_caches(own, 64))
    torch.testing.assert_close(model(ids).logits[0], wanted, atol=1e-4, rtol=0)
    assert model.config.quantization is None
    assert {type(model.model.layers[0].mlp.up_proj), type(model.lm_head)} == {torch.nn.Linear}
    if kind != "fp8":
        kept = load(packed, "float32", packed=True)
        torch.testing.assert_close(kept(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
        assert sum(p.numel() for p in kept.parameters()) < sum(p.numel() for p in model.parameters()) / 2
    model.save_pretrained(tmp_path / "plain")
    assert SalaConfig.load(tmp_path / "plain").quantization is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_through_packed_matrices_on_a_gpu(tmp_path: Path) -> None:
    packed = write_quantized("affine", tmp_path)
    ids = torch.tensor([prompt(40)], device="cuda")
    gradients = []
    for is_packed in (True, False):
        model = load(packed, "bfloat16", "cuda", packed=is_packed)
        embeds = model.model.embed_tokens(ids).detach().requires_grad_(True)
        model(inputs_embeds=embeds, labels=ids).loss.backward()
        assert embeds.grad is not None
        gradients.append(embeds.grad.float().flatten())
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("kind", ["affine", "gptq"])
def test_lora_beside_packed_matrices(tmp_path: Path, kind: str) -> None:
    """PEFT's adapters get the gradients that they get beside the same matrices dequantized, and learn."""
    peft = pytest.importorskip("peft")
    packed = write_quantized(kind, tmp_path)
    ids = torch.tensor([prompt(40)])
    gradients, losses = [], []
    for is_packed in (True, False):
        model = load(packed, "float32", packed=is_packed)
        settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        torch.manual_seed(0)
        tuned = peft.get_peft_model(model, settings)
        learning = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
        assert len(learning) == 2 * sum(isinstance(m, peft.tuners.lora.LoraLayer) for m in tuned.modules()) > 0
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append({name: p.grad for name, p in learning.items()})
        losses.append(loss.item())
        torch.optim.SGD(learning.values(), 0.1).step()
        assert tuned(input_ids=ids, labels=ids).loss < loss
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-3)
    tuned.save_pretrained(tmp_path / "adapter")
    with LLM(packed, adapter=tmp_path / "adapter", device="cpu", ctx=256) as llm:
        assert llm.generate([prompt(9)[0]], max_tokens=2).token_ids


ORDERS = [
    "from transformers import AutoModelForCausalLM; import sala; sala.register()",
    "import sala; sala.register(); sala.register(); from transformers import LlamaForCausalLM",
]


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_know_the_model(order: str) -> None:
    code = f"""
{order}
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained({str(DATA / "block16")!r})).__module__)
"""
    out = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "sala.plugins.transformers.model", out.stderr[-2000:]


def test_export_for_remote_code(tmp_path: Path) -> None:
    target = tmp_path / "exported"
    assert run(["export", str(DATA / "block16"), "-o", str(target)]) == 0
    assert run(["export", str(DATA / "block16"), "-o", str(target)]) == 1
    code = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(target)!r}, trust_remote_code=True)
print(type(model).__module__.split(".")[0], model(torch.tensor([{prompt(20)}])).logits.argmax(-1)[0].tolist())
"""
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    model = load(target)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt(20)])).logits.argmax(-1)[0].tolist()
    assert out.stdout.strip() == f"transformers_modules {wanted}", out.stderr[-2000:]
    assert LLM(target, device="cpu").generate(prompt(20), max_tokens=2).token_ids
