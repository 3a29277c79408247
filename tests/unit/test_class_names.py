"""A class name has one meaning: where two modules have it, it is the same thing twice, for a reason."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sala"
TORCH, MLX, VLLM = "backends/torch/", "backends/mlx/", "plugins/vllm/"
TWINS: dict[str, tuple[str, ...]] = {
    # the same part of the model, of the cache or of a plan, in another framework
    "AffineEmbedding": (f"{MLX}quantized_linear", f"{TORCH}linears"),
    "AffineLinear": (f"{MLX}quantized_linear", f"{TORCH}linears"),
    "AffineModule": (f"{MLX}quantized_linear", f"{TORCH}linears"),
    "Batch": (f"{MLX}batch", f"{TORCH}batch"),
    "Decoder": (f"{MLX}model", f"{TORCH}model", f"{VLLM}model"),
    "Gather": (f"{MLX}gather", f"{TORCH}gather"),
    "HybridCache": (f"{MLX}cache", f"{TORCH}cache"),
    "KVPages": (f"{MLX}cache", f"{TORCH}cache"),
    "Layer": (f"{MLX}model", f"{TORCH}model", f"{VLLM}model"),
    "LightningMixer": (f"{MLX}model", f"{TORCH}model", f"{VLLM}lightning"),
    "MLP": (f"{MLX}model", f"{TORCH}model", f"{VLLM}model"),
    "Mixer": (f"{MLX}model", f"{TORCH}model", f"{VLLM}lightning"),
    "Ops": (f"{MLX}ops", f"{TORCH}ops"),
    "SalaCache": ("plugins/mlx_lm", "plugins/transformers/cache"),
    "SalaForCausalLM": ("plugins/transformers/model", f"{VLLM}model"),
    "SalaModel": (f"{MLX}model", f"{TORCH}model"),
    "Span": (f"{MLX}cache", f"{TORCH}cache"),
    "SparseMixer": (f"{MLX}model", f"{TORCH}model", f"{VLLM}sparse"),
    # the same choice in two interfaces of OpenAI, which write it in different shapes
    "AllowedTools": ("server/api/chat", "server/api/responses"),
}


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        module = file.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    assert len(found) > 500
    assert {name: tuple(modules) for name, modules in found.items() if len(modules) > 1} == TWINS
