"""A small dense model with random weights, as other tools write them, with a byte tokenizer."""

import json
from pathlib import Path

import numpy as np

from sala.checkpoint.random import TINY, write_byte_tokenizer
from sala.checkpoint.writer import new_directory, write_text, write_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "vocab_size": TINY.vocab_size,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 259,
    "dtype": "float32",
}
EXTRAS = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
}


def write_dense_model(target: Path, kind: str = "llama", seed: int = 0) -> None:
    config = CONFIG | EXTRAS[kind]
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    width, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (width, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, width),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if kind == "qwen2":
            layer |= {f"self_attn.{n}_proj.bias": (width if n == "q" else kv,) for n in "qkv"}
        if kind == "qwen3":
            layer |= {f"self_attn.{n}_norm.weight": (dim,) for n in "qk"}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        spread = 1.0 if len(shape) == 1 else shape[1] ** -0.5
        offset = 1.0 if "norm" in name else 0.0
        scale = 0.1 if len(shape) == 1 else spread
        weights[name] = (offset + scale * rng.standard_normal(shape)).astype(np.float32)
    with new_directory(target) as draft:
        specs = {name: ("F32", shape) for name, shape in shapes.items()}
        write_weights(draft, specs, lambda name: weights[name].reshape(-1).view(np.uint8).data)
        write_text(draft / "config.json", json.dumps(config))
        write_byte_tokenizer(draft)
