"""GGUF as a source: names, values, codes without loss, and the tokenizer."""

import json
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from sala.checkpoint.gguf import GGUF
from sala.checkpoint.packing import dequantize
from sala.checkpoint.random import _byte_alphabet
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_text, write_weights
from sala.errors import CheckpointError, MissingExtra, ModelNotFound, SalaError
from sala.lab.train.halo.source import import_dense
from sala.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 64, 4, 2, 96, 264
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *_byte_alphabet(), "he", "hel", "Ġt", "12", "<tool>"]
MERGES = ["h e", "he l", "Ġ t", "1 2"]
TYPES = [3, 3, 3, *[1] * 260, 4]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SHAPES = {
    "token_embd": (VOCAB, HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (FFN, HIDDEN),
    "blk.0.ffn_up": (FFN, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FFN),
}
KINDS = {"token_embd": "Q8_0", "blk.0.ffn_up": "Q4_0", "blk.0.ffn_gate": "F16"}


def halves_to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(file: Path, architecture: str = "llama", skip: tuple[str, ...] = (), **extra: Any) -> dict[str, np.ndarray]:
    """A small file; returns what its tensors were before quantization, in Hugging Face order."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(extra.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(extra.get("pre", "smollm"))
    writer.add_token_list(extra.get("tokens", TOKENS))
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if "scaling" in extra:
        writer.add_rope_scaling_type(extra["scaling"])
    rng, weights = np.random.default_rng(0), {}
    for name, shape in {**SHAPES, **extra.get("shapes", {})}.items():
        if name in skip:
            continue
        weight = weights[name] = rng.standard_normal(shape).astype(np.float32)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-1])
        if heads and architecture == "llama":
            weight = halves_to_pairs(weight, heads)
        kind = gguf.GGMLQuantizationType[KINDS.get(name, "Q4_1" if len(shape) == 2 else "F32")]
        writer.add_tensor(f"{name}.weight", gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write(file)
    return file


def test_facts(file: Path) -> None:
    source = GGUF(file)
    assert len(list(source)) == len(SHAPES)
    assert sorted(source.shape(name) for name in source) == sorted(SHAPES.values())
    wanted = {
        "architecture": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {name: source.facts[name] for name in wanted} == wanted
    assert source.chat_template == TEMPLATE


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rows_are_in_the_order_of_hugging_face(tmp_path: Path, architecture: str) -> None:
    weights = write(tmp_path / "m.gguf", architecture)
    source = GGUF(tmp_path / "m.gguf")
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v"), ("o_proj", "attn_output")):
        found = source.read(f"model.layers.0.self_attn.{ours}.weight")
        assert np.abs(found - weights[f"blk.0.{theirs}"]).max() < 0.4  # as near as four bits come
    assert np.abs(source.read("model.embed_tokens.weight") - weights["token_embd"]).max() < 0.02
    np.testing.assert_array_equal(source.read("model.norm.weight"), weights["output_norm"])


def test_codes_lose_nothing(file: Path) -> None:
    source = GGUF(file)
    kinds = set()
    for name in source:
        packed = source.read_packed(name)
        kinds.add((source.kind(name), packed is not None))
        if packed is not None:
            assert (packed.group_size, packed.dtype) == (32, "F16")
            assert packed.bits == (8 if source.kind(name) == "Q8_0" else 4)
            np.testing.assert_array_equal(dequantize(packed), source.read(name))
    assert kinds == {("Q4_0", True), ("Q4_1", True), ("Q8_0", True), ("F16", False), ("F32", False)}


def test_large_scales_are_kept_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf")
    source = GGUF(tmp_path / "m.gguf")
    tensor = source._tensors["model.embed_tokens.weight"]
    data = np.array(tensor.data)
    data[:, :2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
    monkeypatch.setattr(source, "_tensors", {"model.embed_tokens.weight": tensor._replace(data=data)})
    packed = source.read_packed("model.embed_tokens.weight")
    assert packed is not None
    assert packed.dtype == "F32"
    np.testing.assert_array_equal(dequantize(packed), source.read("model.embed_tokens.weight"))


def test_the_tokenizer(file: Path) -> None:
    tokenizer = RustTokenizer.from_str(GGUF(file).tokenizer_json())

    def tokens(text: str) -> list[str]:
        return [TOKENS[index] for index in tokenizer.encode(text, add_special_tokens=False).ids]

    assert tokens("hello t") == ["hel", "l", "o", "Ġt"]
    assert tokens("12") == ["1", "2"]  # digits stand alone
    assert tokens("<|im_start|>he<tool>") == ["<|im_start|>", "he", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("Größe 日本 <tool>").ids) == "Größe 日本 <tool>"
    assert tokenizer.get_vocab_size() == len(TOKENS)


def test_other_ways_to_cut(tmp_path: Path) -> None:
    for pre in ("gpt-2", "qwen2", "llama-bpe"):
        write(tmp_path / f"{pre}.gguf", pre=pre)
        tokenizer = RustTokenizer.from_str(GGUF(tmp_path / f"{pre}.gguf").tokenizer_json())
        ids = tokenizer.encode("12 he", add_special_tokens=False).ids
        assert [TOKENS[index] for index in ids][:1] == (["1"] if pre == "qwen2" else ["12"])


def write_dense(source: GGUF, target: Path) -> None:
    """A plain Hugging Face directory in fp32: config.json, model.safetensors, the tokenizer and its chat template."""
    specs = {name: ("F32", source.shape(name)) for name in source}
    with new_directory(target) as draft:
        write_weights(draft, specs, lambda name: np.ascontiguousarray(source.read(name)).data.cast("B"))
        write_text(draft / "config.json", json.dumps(source.config(), indent=2) + "\n")
        source.write_tokenizer(draft)


def test_a_dense_directory(file: Path, tmp_path: Path) -> None:
    source = GGUF(file)
    write_dense(source, tmp_path / "dense")
    with Checkpoint(tmp_path / "dense") as checkpoint:
        assert set(checkpoint) == set(source)
        raw = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
        found = np.frombuffer(raw.data, np.float32).reshape(raw.shape)
        np.testing.assert_array_equal(found, source.read("model.layers.0.self_attn.q_proj.weight"))
    tokenizer = Tokenizer.load(tmp_path / "dense")
    ids = tokenizer.encode_chat([{"role": "user", "content": "<|im_end|>"}])
    assert ids.count(SPECIAL.index("<|im_end|>")) == 1
    tokenizer.close()


def field(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def gguf_bytes(fields: bytes = b"", num_fields: int = 0, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + fields + tensors + bytes(4096)


def tensor(name: str = "output_norm.weight", dims: tuple[int, ...] = (64,), kind: int = 0, offset: int = 0) -> bytes:
    name_bytes = struct.pack("<Q", len(name)) + name.encode()
    return name_bytes + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARRAY, STRING, U32, HUGE = 9, 8, 4, (1 << 64) - 1
HOSTILE = {
    "too many": gguf_bytes(num_fields=HUGE),
    "tensors and 0 fields": gguf_bytes(num_tensors=1 << 40),
    "cut off": gguf_bytes(field("x", STRING, struct.pack("<Q", HUGE)), 1),
    "too long": gguf_bytes(field("x", ARRAY, struct.pack("<IQ", U32, 1 << 40)), 1),
    "cut off, or too large": gguf_bytes(field("x", ARRAY, struct.pack("<IQ", STRING, 1 << 20)), 1),
    "not of numbers": gguf_bytes(field("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 300), 1),
    "unknown type": gguf_bytes(field("x", 99, b""), 1),
    "'x' occurs twice": gguf_bytes(2 * field("x", U32, bytes(4)), 2),
    "alignment is 0": gguf_bytes(field("general.alignment", U32, bytes(4)), 1),
    "alignment is 2147483648": gguf_bytes(field("general.alignment", U32, struct.pack("<I", 1 << 31)), 1),
    "alignment is a": gguf_bytes(field("general.alignment", STRING, struct.pack("<Q", 1) + b"a"), 1),
    "beyond the end": gguf_bytes(tensors=tensor(offset=1 << 50), num_tensors=1),
    "weight' ends beyond": gguf_bytes(tensors=tensor(dims=(1 << 62, 1 << 62)), num_tensors=1),
    "overlaps": gguf_bytes(tensors=tensor() + tensor("output.weight", offset=32), num_tensors=2),
    "weight' occurs twice": gguf_bytes(tensors=tensor() + tensor(offset=256), num_tensors=2),
    "4,294,967,295 dimensions": gguf_bytes(tensors=tensor()[:26] + b"\xff" * 4, num_tensors=1),
    "is empty": gguf_bytes(tensors=tensor(dims=(0, 64)), num_tensors=1),
    "not made of blocks": gguf_bytes(tensors=tensor(dims=(40,), kind=2), num_tensors=1),
    "999 is not": gguf_bytes(tensors=tensor(kind=999), num_tensors=1),
}


@pytest.mark.parametrize("problem", HOSTILE)
def test_hostile_headers_are_refused_in_a_line(problem: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(HOSTILE[problem])
    with pytest.raises(CheckpointError, match=problem) as caught:
        GGUF(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_mutations_are_read_or_refused(
    file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever bytes of the header say: a model, or an error of ours."""
    content = bytearray(file.read_bytes())
    extremes = [(1 << bits) + by for bits in (0, 5, 31, 32, 40, 62, 63) for by in (-1, 0)]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, 700) | st.integers(4, 8000))
        change = st.sampled_from(extremes).map(lambda value: struct.pack("<Q", value)) | st.binary(max_size=8)
        new = data.draw(change)[: data.draw(st.sampled_from([1, 4, 8]))]
        content[at : at + data.draw(st.sampled_from([0, len(new)]))] = new
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    place = tmp_path_factory.mktemp("mutated")
    (place / "m.gguf").write_bytes(content)
    with suppress(SalaError):
        import_dense(place / "m.gguf", place / "out")
        Tokenizer.load(place / "out").close()


BAD: dict[str, dict[str, Any]] = {
    "holds a model of kind": {"architecture": "mamba"},
    "rope scaling": {"scaling": gguf.RopeScalingType.YARN},
    "'rope_freqs.weight'": {"shapes": {"rope_freqs": (8,)}},
    "has no embedding": {"skip": ("token_embd",)},
}


@pytest.mark.parametrize("problem", BAD)
def test_refusals(tmp_path: Path, problem: str) -> None:
    write(tmp_path / "m.gguf", **BAD[problem])
    with pytest.raises(CheckpointError, match=problem) as caught:
        GGUF(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"tokenizer": "llama"}, {"pre": "tekken"}, {"tokens": ["a"] * len(TOKENS)}])
def test_tokenizers_that_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path / "m.gguf", **change)
    with pytest.raises(CheckpointError):
        GGUF(tmp_path / "m.gguf").tokenizer_json()


@pytest.mark.parametrize("length", [0, 3, 100, 5000])
def test_damaged_files(file: Path, tmp_path: Path, length: int) -> None:
    (tmp_path / "m.gguf").write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GGUF(tmp_path / "m.gguf")


def test_what_is_missing(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound):
        GGUF(tmp_path / "nothing.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"\[train\]"):
        GGUF(file)
