"""Other members of the family against the naive model: head counts, geometry, regimes, optional parts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from sala.checkpoint.random import write_random
from sala.config import SalaConfig, SparseConfig
from sala.llm import LLM
from tests.golden import DEVICE
from tests.parity.naive import NaiveModel

BASE = SalaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=12,
    num_key_value_heads=3,
    head_dim=8,
    mixer_types=("minicpm4", "lightning-attn", "minicpm4"),
    lightning_nh=12,
    lightning_nkv=12,
    lightning_head_dim=4,
    sparse_config=SparseConfig(8, 4, 1, 16, 32, 4, False, 128),
    dim_model_base=16,
    eos_token_id=(2,),
    dtype="float32",
)
VARIANTS = {
    "12 heads, 3 kv heads": BASE,
    "init_blocks 2": replace(BASE, sparse_config=replace(BASE.sparse_config, init_blocks=2)),
    "init_blocks 0": replace(BASE, sparse_config=replace(BASE.sparse_config, init_blocks=0)),
    "sparse everywhere": replace(BASE, sparse_config=replace(BASE.sparse_config, dense_len=0)),
    "tied embeddings": replace(BASE, tie_word_embeddings=True),
    "rope in sparse layers": replace(BASE, attn_use_rope=True),
    "no rope in lightning": replace(BASE, lightning_use_rope=False),
    "no norms": replace(BASE, qk_norm=False, use_output_norm=False),
    "no gates": replace(BASE, attn_use_output_gate=False, use_output_gate=False),
    "norms in sparse layers": replace(BASE, attn_qk_norm=True),
    "biases": replace(BASE, attention_bias=True),
    "queries that grow": replace(BASE, attn_log_base=50.0),
    "a dense model": replace(BASE, mixer_types=("minicpm4",) * 3, attn_use_rope=True, attn_use_output_gate=False),
    "shared lightning keys": replace(BASE, lightning_nkv=4),
    "9 heads, 3 kv heads": replace(BASE, num_attention_heads=9, lightning_nh=9, lightning_nkv=9),
    "wide windows": replace(BASE, sparse_config=SparseConfig(16, 4, 1, 16, 32, 4, False, 96)),
    "two coarse windows per block": replace(BASE, sparse_config=SparseConfig(4, 2, 1, 16, 32, 4, False, 96)),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt_len", [100, 150])
def test_against_the_definition(name: str, prompt_len: int, tmp_path: Path) -> None:
    config = VARIANTS[name]
    write_random(tmp_path / "model", config, seed=3)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, prompt_len + 40).tolist()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    naive = NaiveModel(config.to_dict(), weights).logits(ids, prompt_len)
    logits = LLM(tmp_path / "model", device=DEVICE).logits(ids, chunk=37, prompt_len=prompt_len)
    np.testing.assert_allclose(logits, naive, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", ["block16", "block64"])
def test_the_naive_model_itself(model: str) -> None:
    """The yardstick is right: it gives the vendor's numbers too."""
    from tests.golden import DATA

    data = load_file(DATA / model / "dense_to_sparse_decode.safetensors")
    weights = load_file(DATA / model / "model.safetensors")
    prompt_len = len(data["prefill_logits"])
    naive = NaiveModel(SalaConfig.load(DATA / model).to_dict(), weights).logits(data["input_ids"].tolist(), prompt_len)
    expected = np.concatenate((data["prefill_logits"], data["decode_logits"]))
    np.testing.assert_allclose(naive, expected, atol=1e-5, rtol=0)
