"""Rebuild the tokenizer of a GGUF file for the `tokenizers` library: byte-level BPE as in GPT-2."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sala.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}| ", r"\p{N}{1,3}| ")


def tokenizer_definition(metadata: Mapping[str, Any], vocab_size: int) -> str:
    """Return the content of a `tokenizer.json`."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        kind = str(metadata.get("tokenizer.ggml.model"))[:40]
        raise CheckpointError(f"the GGUF file has a tokenizer of kind {kind!r}", "only byte-level BPE (gpt2) is read")
    tokens, types = _strings(metadata, "tokens"), metadata.get("tokenizer.ggml.token_type") or []
    if len(set(tokens)) != len(tokens) or len(tokens) > vocab_size or len(types) not in (0, len(tokens)):
        raise CheckpointError("the token list of the GGUF file is inconsistent", "download it again")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _strings(metadata, "merges"))]
    try:
        model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the merges of the GGUF file are damaged: {error}"[:300], "download it again") from None
    tokenizer = Tokenizer(model)
    _set_splitting(tokenizer, str(metadata.get("tokenizer.ggml.pre", "default")))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in kinds if k == _USER_DEFINED])
    definition: str = tokenizer.to_str()
    return definition


def tokenizer_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`, without the chat template."""
    tokens = _strings(metadata, "tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    settings: dict[str, Any] = {"add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False))}
    for name, key in names.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            settings[name] = tokens[index]
    return settings | {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}


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


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"the GGUF file has no tokenizer {name}", "use a file that has one")
    return value
