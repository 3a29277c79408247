"""Read a dense model from a GGUF file of llama.cpp, under its Hugging Face names.

Quantized blocks become fp32 or, where the format allows it, affine codes without loss: Q4_0, Q4_1 and Q8_0 are
groups of 32 with a scale in fp16. llama.cpp reorders the rows of q and k for its kind of rotary embedding (architecture
`llama`); that is undone here. The tokenizer, byte-level BPE as in GPT-2, is rebuilt for the `tokenizers` library.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sala.checkpoint.arrays import Array, Floats
from sala.checkpoint.packing import Packed, pack
from sala.checkpoint.writer import write_json, write_text
from sala.config import own_file
from sala.errors import CheckpointError, MissingExtra, ModelNotFound

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_UNSUPPORTED = "only dense llama, qwen2 and qwen3 models without rope scaling are read"
_GROUP = 32
_LOSSLESS = ("Q4_0", "Q4_1", "Q8_0")
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}| ", r"\p{N}{1,3}| ")


class GGUF:
    """A GGUF file, mapped: `facts` of the model, and tensors by Hugging Face name.

    `facts` has architecture, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
    num_key_value_heads, head_dim, vocab_size, rope_theta, rms_norm_eps, max_position_embeddings, tie_word_embeddings,
    attention_bias, bos_token_id, eos_token_id, pad_token_id and name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelNotFound(f"{self.path} is not a file", "give a .gguf file")
        own_file(self.path, "give the file that it leads to")
        try:
            from gguf import dequantize

            from sala.checkpoint.gguf_header import read_gguf
        except ImportError:
            raise MissingExtra("gguf", "train") from None
        self._dequantize = dequantize
        self.metadata, tensors = read_gguf(self.path)
        self._tensors = {_hugging_face_name(name): tensor for name, tensor in tensors.items()}
        self.facts = self._find_facts()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def kind(self, name: str) -> str:
        """Return the format of a tensor, such as F32 or Q4_1."""
        return str(self._tensors[name].tensor_type.name)

    @property
    def chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def read(self, name: str) -> Floats:
        """Return a tensor in fp32."""
        tensor = self._tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError:
            raise CheckpointError(f"{self.path}: {name} is in {self.kind(name)}", "get another format") from None
        return np.asarray(self._reorder(name, values.reshape(self.shape(name))), np.float32)

    def read_packed(self, name: str) -> Packed | None:
        """Return a matrix as affine codes in groups of 32 with exactly the values of `read`, or None.

        Scales are fp16 as in the file, or fp32 where the bias does not fit in fp16.
        """
        kind = self.kind(name)
        if kind not in _LOSSLESS or len(self.shape(name)) != 2:
            return None
        num_out, num_in = self.shape(name)
        blocks = self._tensors[name].data.reshape(num_out, num_in // _GROUP, -1)
        with np.errstate(over="ignore", invalid="ignore"):
            codes, scales, biases = _take_apart(blocks, kind)
            bits = 8 if codes.max(initial=0) > 15 or kind == "Q8_0" else 4
            halves = biases.astype(np.float16)
        if not np.array_equal(halves.astype(np.float32), biases):
            scales, halves = scales.astype(np.float32), biases
        codes, scales, halves = (self._reorder(name, part) for part in (codes.reshape(num_out, num_in), scales, halves))
        return Packed(pack(codes, bits), scales, halves, bits, _GROUP, "F16" if scales.dtype == np.float16 else "F32")

    def config(self) -> dict[str, Any]:
        """Return the model's `config.json` as Hugging Face writes it."""
        own = {key: value for key, value in self.facts.items() if value is not None and key != "name"}
        kind = own.pop("architecture")
        head = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
        return head | own | {"hidden_act": "silu", "dtype": "float32"}

    def tokenizer_json(self) -> str:
        """Return the content of `tokenizer.json`."""
        kind = self.metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            message = f"the GGUF file has a tokenizer of kind {str(kind)[:40]!r}"
            raise CheckpointError(message, "only byte-level BPE (gpt2) is read")
        tokens, types = self._strings("tokens"), self.metadata.get("tokenizer.ggml.token_type") or []
        count = len(tokens)
        has_types = isinstance(types, list) and len(types) in (0, count)
        if len(set(tokens)) != count or count > self.facts["vocab_size"] or not has_types:
            raise CheckpointError("the token list of the GGUF file is inconsistent", "download it again")
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in self._strings("merges"))]
        try:
            model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
        except Exception as error:  # the library raises bare Exception
            problem = f"the merges of the GGUF file are damaged: {error}"[:300]
            raise CheckpointError(problem, "download it again") from None
        tokenizer = Tokenizer(model)
        _set_splitting(tokenizer, str(self.metadata.get("tokenizer.ggml.pre", "default")))
        tokenizer.decoder = decoders.ByteLevel()
        kinds = list(zip(tokens, types, strict=False))
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == _CONTROL])
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in kinds if k == _USER_DEFINED])
        return str(tokenizer.to_str())

    def write_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer and its configuration: names of the special tokens, and the chat template."""
        tokens = self._strings("tokens")
        names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        settings: dict[str, Any] = {"add_bos_token": bool(self.metadata.get("tokenizer.ggml.add_bos_token", False))}
        for name, key in names.items():
            index = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(index, int) and 0 <= index < len(tokens):
                settings[name] = tokens[index]
        settings |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.chat_template:
            settings["chat_template"] = self.chat_template
        write_text(directory / "tokenizer.json", self.tokenizer_json())
        write_json(directory / "tokenizer_config.json", settings)

    def _reorder(self, name: str, rows: Array) -> Array:
        """Reorder rows from neighbouring pairs to two halves per head."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or self.facts["architecture"] != "llama":
            return rows
        pairs = rows.reshape(self.facts[heads], rows.shape[0] // self.facts[heads] // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _find_facts(self) -> dict[str, Any]:
        architecture = self.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise CheckpointError(f"{self.path} holds a model of kind {str(architecture)[:40]!r}", _UNSUPPORTED)
        if self._fact("rope.scaling.type", "none") != "none" or self._fact("expert_count", 0):
            raise CheckpointError(f"{self.path} has rope scaling or experts", _UNSUPPORTED)
        hidden, heads = self._count("embedding_length"), self._count("attention.head_count")
        facts: dict[str, Any] = {
            "architecture": architecture,
            "name": self.metadata.get("general.name"),
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": self._count("attention.key_length", hidden // heads),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", 1e-6),
            "max_position_embeddings": self._count("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            facts[f"{name}_token_id"] = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if "model.embed_tokens.weight" not in self._tensors:
            raise CheckpointError(f"{self.path} has no embedding", _UNSUPPORTED)
        return facts | {"vocab_size": self.shape("model.embed_tokens.weight")[0]}

    def _fact(self, name: str, default: Any) -> Any:
        return self.metadata.get(f"{self.metadata['general.architecture']}.{name}", default)

    def _count(self, name: str, default: int | None = None) -> int:
        value = self._fact(name, default)
        if not isinstance(value, int) or not 0 < value < 1 << 24:
            raise CheckpointError(f"{self.path}: {name} is {str(value)[:80]}", _UNSUPPORTED)
        return value

    def _number(self, name: str, default: float) -> float:
        """Return the shortest decimal that rounds to this fp32 number: 1e-05, not 9.999999747378752e-06."""
        value = self._fact(name, default)
        if not isinstance(value, int | float):
            raise CheckpointError(f"{self.path}: {name} is {str(value)[:80]}", _UNSUPPORTED)
        return float(str(np.float32(value)))

    def _strings(self, name: str) -> list[str]:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"the GGUF file has no tokenizer {name}", "use a file that has one")
        return value


def _hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight"""
    top = re.fullmatch(r"(\w+)\.weight", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.weight"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name, re.ASCII)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{int(layer[1])}.{_LAYER[layer[2]]}.{layer[3]}"
    raise CheckpointError(f"the GGUF file holds {name[:80]!r}", _UNSUPPORTED)


def _nibbles(bytes_: Array) -> Array:
    """[..., 16] → [..., 32]: the low nibbles come first."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], -1)


def _fp16_at(blocks: Array, at: int) -> Array:
    """Return the fp16 number at an offset of every block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _take_apart(blocks: Array, kind: str) -> tuple[Array, Array, Array]:
    """Return the codes of blocks, their scales in fp16 and their biases in fp32."""
    scales = _fp16_at(blocks, 0)
    if kind == "Q4_1":
        return _nibbles(blocks[..., 4:]), scales, _fp16_at(blocks, 2).astype(np.float32)
    if kind == "Q4_0":
        return _nibbles(blocks[..., 2:]), scales, scales.astype(np.float32) * np.float32(-8)
    return blocks[..., 2:] ^ 0x80, scales, scales.astype(np.float32) * np.float32(-128)


def _set_splitting(tokenizer: Tokenizer, name: str) -> None:
    """Set how text is split before merging; llama.cpp names each way after the first model that used it."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    if name in ("smollm", "starcoder", "refact", "command-r"):
        parts = [digits, whole]
    elif name in ("gpt-2", "default"):
        parts = [whole]
    elif name in ("qwen2", "llama-bpe"):
        pattern = Regex(_QWEN2 if name == "qwen2" else _LLAMA3)
        parts = [pre_tokenizers.Split(pattern, "isolated"), bytes_only]
    else:
        raise CheckpointError(f"the GGUF file splits text as {name[:40]!r} does", "this tokenizer is not supported")
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
