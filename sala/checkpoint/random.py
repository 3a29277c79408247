"""Checkpoints with random weights, for tests and timing."""

import shutil
import string
import tomllib
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sala.checkpoint.arrays import as_bytes, encode
from sala.checkpoint.dtypes import FILE_DTYPES
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.writer import new_directory, write_json, write_model, write_text
from sala.config import SalaConfig
from sala.errors import InputError

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")  # after the 256 bytes of the tiny vocabulary
_SHAPES_FILE = Path(__file__).with_name("shapes.toml")
SHAPES = {name: SalaConfig.from_dict(table) for name, table in tomllib.loads(_SHAPES_FILE.read_text()).items()}
TINY, RELEASED = SHAPES["tiny"], SHAPES["9b"]


def cut_layers(config: SalaConfig, num_layers: int) -> SalaConfig:
    """Return the configuration with only its first layers."""
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise InputError("layers", f"is {num_layers}", f"it must be from 1 to {config.num_hidden_layers}")
    return replace(config, num_hidden_layers=num_layers, mixer_types=config.mixer_types[:num_layers])


def write_random(target: Path, config: SalaConfig, seed: int = 0) -> None:
    """Write a checkpoint directory; one with a byte-sized vocabulary gets a byte tokenizer and a chat template."""
    shapes = expected_tensors(config)
    specs = {name: (FILE_DTYPES[config.dtype], shape) for name, shape in shapes.items()}
    with new_directory(target) as draft:
        write_model(draft, config, specs, lambda name: _weights(name, shapes[name], config, seed))
        if config.vocab_size == TINY.vocab_size:
            write_byte_tokenizer(draft)


def _weights(name: str, shape: tuple[int, ...], config: SalaConfig, seed: int) -> memoryview:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith(".bias"):
        values = 0.5 * rng.standard_normal(shape, np.float32)
    elif len(shape) == 1:
        values = np.ones(shape, np.float32)
    else:
        values = rng.standard_normal(shape, np.float32)
        values *= spread(name, shape, config)
    if name == "lm_head.weight" and config.vocab_size == TINY.vocab_size:
        letters = [ord(char) for char in string.ascii_letters + " .,"]
        values[np.isin(np.arange(len(values)), letters, invert=True)] = 0  # so that a random model generates letters
    return as_bytes(encode(values, FILE_DTYPES[config.dtype]))


def spread(name: str, shape: tuple[int, ...], config: SalaConfig) -> float:
    """Return the standard deviation that keeps activations near one."""
    if name == "model.embed_tokens.weight":
        return 1.0 / config.scale_emb
    spread: float = shape[1] ** -0.5
    return 3.0 * config.logit_divisor * spread if name == "lm_head.weight" else spread


def write_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer of the 256 bytes and a few special tokens, and a plain chat template."""
    unicode_of = _byte_alphabet()
    vocab = {unicode_of[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    write_text(directory / "tokenizer.json", tokenizer.to_str())
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": True}
    write_json(directory / "tokenizer_config.json", settings)
    shutil.copyfile(Path(__file__).with_name("chat_template.jinja"), directory / "chat_template.jinja")


def _byte_alphabet() -> list[str]:
    """Return the printable character of every byte in byte-level tokenizers: itself, or one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(spare)) for byte in range(256)]
