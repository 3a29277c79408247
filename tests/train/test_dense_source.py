"""Dense models of others as ours: against a small forward pass of its own, and what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from sala.backends.torch.batch import whole
from sala.backends.torch.model import SparseMixer
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig, SparseConfig
from sala.errors import ConfigError, ModelNotFound
from sala.lab.train.halo.sample import Marks, Opening, Writer
from sala.lab.train.halo.source import dense_config, import_dense
from sala.lab.train.halo.transfer import hybrid_config, to_hybrid, to_lightning, to_sparse
from sala.lab.train.models import load_for_training
from tests.train.dense import CONFIG, write_dense_model

KINDS = ["llama", "qwen2", "qwen3"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense") / request.param
    write_dense_model(path, request.param)
    return path


@pytest.fixture(scope="module")
def teacher(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teachers") / source.name
    import_dense(source, path)
    return path


class Reference:
    """The textbook's decoder in NumPy float64: half-rotated RoPE, grouped heads, biases and QK norms if there are."""

    def __init__(self, directory: Path) -> None:
        self.c = json.loads((directory / "config.json").read_text())
        with Checkpoint(directory) as checkpoint:
            self.w = {
                name: np.frombuffer(checkpoint.read(name).data, np.float32).reshape(info.shape).astype(np.float64)
                for name, info in checkpoint.tensors.items()
            }

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * self.c["rope_theta"] ** (-np.arange(half) / half)
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate((pairs.real, pairs.imag), -1)

    def attention(self, x: np.ndarray, at: str) -> np.ndarray:
        heads, groups, dim = (self.c[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q = self.linear(x, f"{at}.q_proj").reshape(len(x), heads, dim)
        k, v = (self.linear(x, f"{at}.{name}_proj").reshape(len(x), groups, dim) for name in "kv")
        if f"{at}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        q, k = self.rotate(q), self.rotate(k)
        out = np.empty_like(q)
        for head in range(heads):
            group = head // (heads // groups)
            scores = q[:, head] @ k[:, group].T / math.sqrt(dim)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, group]
        return self.linear(out.reshape(len(x), -1), f"{at}.o_proj")

    def logits(self, tokens: list[int]) -> np.ndarray:
        x = self.w["model.embed_tokens.weight"][tokens]
        for index in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{index}"
            x = x + self.attention(self.norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
            inner = self.norm(x, f"{at}.post_attention_layernorm")
            gate = self.linear(inner, f"{at}.mlp.gate_proj")
            up = self.linear(inner, f"{at}.mlp.up_proj")
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
        head = "model.embed_tokens" if self.c["tie_word_embeddings"] else "lm_head"
        return self.linear(self.norm(x, "model.norm"), head)


def write_rows(model, openings, length, ends):
    """Every opening continued up to `length` tokens, or up to and including the first end token."""
    return Writer(model, len(openings), length, ends, Marks(), 0).write(openings).rows()


def test_same_logits(source: Path, teacher: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 260, 97).tolist()
    model = load_for_training(teacher, CPU)
    with torch.no_grad():
        got = model.logits(model(whole(torch.tensor([tokens]))))
    np.testing.assert_allclose(got, Reference(source).logits(tokens), atol=1e-4, rtol=0)


def test_the_teacher_writes_what_it_thinks(teacher: Path) -> None:
    """Rows in step on the sampler's own cache: with next to no temperature, the likeliest token each time."""
    model = load_for_training(teacher, CPU)
    openings = [Opening(tuple(range(40, 40 + n)), 1e-6) for n in (1, 3, 9, 30)]
    rows = write_rows(model, openings, 24, ())
    for opening, row in zip(openings, rows, strict=True):
        assert len(row) == 24
        assert tuple(row[: len(opening.tokens)]) == opening.tokens[:24]
        with torch.no_grad():
            best = model.logits(model(whole(torch.tensor([row])))).argmax(-1).tolist()
        begin = len(opening.tokens)
        assert row[begin:] == best[begin - 1 : -1]


def test_rows_end_at_the_first_end_mark(teacher: Path) -> None:
    model = load_for_training(teacher, CPU)
    openings = [Opening((40 + n, 50), 1.0) for n in range(6)]
    ends = tuple(range(0, 260, 9))
    for row in write_rows(model, openings, 64, ends):
        assert not any(token in ends for token in row[2:-1])
        assert row[-1] in ends or len(row) == 64


def test_rows_that_must_end(teacher: Path) -> None:
    model = load_for_training(teacher, CPU)
    ends = tuple(range(0, 260, 29))
    free = [Opening((40 + n, 50), 1.0) for n in range(12)]
    bound = [Opening(opening.tokens, 1.0, must_end=True) for opening in free]
    rows = write_rows(model, free, 12, ends)
    ended = [row for row in rows if row[-1] in ends]
    assert 0 < len(ended) < len(rows) == 12
    assert write_rows(model, bound, 12, ends) == ended


def test_derived_values_are_left_out(tmp_path: Path) -> None:
    """Some writers store the frequencies of RoPE."""
    write_dense_model(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}, file)
    import_dense(tmp_path / "dense", tmp_path / "teacher")
    with Checkpoint(tmp_path / "teacher") as checkpoint:
        assert not any("rotary" in name for name in checkpoint)


def test_imported_twice_is_imported_once(source: Path, teacher: Path) -> None:
    before = (teacher / "model.safetensors").stat()
    import_dense(source, teacher)
    assert (teacher / "model.safetensors").stat() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE is scaled .'llama3'."),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE is scaled .'linear'."),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "RoPE is scaled .'yarn'."),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding_window is 4096"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
    ],
)
def test_refused(change: dict, said: str, tmp_path: Path) -> None:
    source = tmp_path / "dense"
    write_dense_model(source)
    (source / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ConfigError, match=said) as caught:
        import_dense(source, tmp_path / "teacher")
    assert caught.value.remedy
    assert not (tmp_path / "teacher").exists()


def test_a_window_that_is_not_used_is_no_reason() -> None:
    config = dense_config(CONFIG | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False})
    assert config.attention_bias
    assert dense_config(CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        import_dense(tmp_path, tmp_path / "teacher")


def test_a_hybrid_is_no_source(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hybrid already"):
        import_dense(tiny, tmp_path / "teacher")


def test_lightning_heads_repeat_the_groups_they_shared(teacher: Path) -> None:
    model = load_for_training(teacher, CPU)
    old = model.model.layers[1].self_attn
    config = hybrid_config(model.config, (0,), SparseConfig())
    new = to_lightning(old, config, torch.Generator().manual_seed(0))
    heads, groups, dim = 6, 2, 16
    for name in ("k_proj", "v_proj"):
        before, after = getattr(old, name), getattr(new, name)
        for head in range(heads):
            group = head * groups // heads
            here, there = slice(head * dim, (head + 1) * dim), slice(group * dim, (group + 1) * dim)
            assert torch.equal(after.weight[here], before.weight[there])
            if before.bias is not None:
                assert torch.equal(after.bias[here], before.bias[there])
    assert torch.equal(new.q_proj.weight, old.q_proj.weight)
    assert torch.equal(new.o_proj.weight, old.o_proj.weight)
    if old.q_proj.bias is not None:
        assert torch.equal(new.q_proj.bias, old.q_proj.bias)
    for name in ("q_norm", "k_norm"):
        before, after = getattr(old, name), getattr(new, name)
        assert torch.equal(after.weight, torch.ones(dim) if before is None else before.weight)
    assert torch.equal(new.o_norm.weight, torch.ones(heads * dim))


def test_a_sparse_mixer_begins_near_attention_without_positions(teacher: Path) -> None:
    model = load_for_training(teacher, CPU)
    old = model.model.layers[1].self_attn
    config = hybrid_config(model.config, (1,), SparseConfig())
    new = to_sparse(old, config, torch.Generator().manual_seed(0))
    x = torch.randn(1, 40, 64)[0]
    batch = whole(torch.zeros(1, 40, dtype=torch.long))
    old.rope_theta = None
    with torch.no_grad():
        wanted = old(x, batch, None)
        new.o_gate.weight.zero_()
        torch.testing.assert_close(new(x, batch, None), wanted, atol=1e-5, rtol=1e-4)  # half open, output doubled
    assert new.rope_theta is None


def test_the_hybrid_keeps_all_but_the_mixers(teacher: Path) -> None:
    model = load_for_training(teacher, CPU)
    config = hybrid_config(model.config, (0, 3), SparseConfig())
    hybrid = to_hybrid(model, config, 0)
    assert config.sparse_layers == (0, 3)
    assert [isinstance(layer.self_attn, SparseMixer) for layer in hybrid.model.layers] == [True, False, False, True]
    for name, parameter in hybrid.named_parameters():
        assert not parameter.is_meta
        if ".self_attn." not in name:
            assert torch.equal(parameter, model.get_parameter(name))
    again = to_hybrid(model, config, 0)
    assert torch.equal(again.model.layers[1].self_attn.z_proj.weight, hybrid.model.layers[1].self_attn.z_proj.weight)
    assert SalaConfig.from_dict(config.to_dict()) == config
