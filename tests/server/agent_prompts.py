"""Prompts and tools of the size that coding agents send, and a tiny model whose tokens are words, to read them quickly.

What the programs say is not ours to store, so sentences are generated; sizes, the number of tools and the shape of
their schemas are those of the first requests of Claude Code 2.1, Codex 0.169 and OpenCode 1.18.
"""

import random
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sala.checkpoint.random import SPECIAL, TINY, write_random

WORDS = """
a about after all already also always an and another any are as ask at before begin branch build by call change check
class code command commit create current default delete describe directory do each edit error every exact example fail
file find first follow for format from function give has if in input instead into is it keep large last leave line list
long make match may message method module more must name need never new next no not note of old on once only open option
or other output over path pattern plan prefer project prompt question read reason remove repeat replace report request
result return rule run same search see send short should show small so step stop string such system task tell test text
than that the them then there they this time to tool type unless until use user value variable was what when where which
while with word work write you
"""
VOCABULARY = 1024


def prose(num_chars: int, seed: int) -> str:
    """Return sentences in paragraphs, about so long."""
    rng, out, size = random.Random(seed), [], 0
    known = WORDS.split()
    while size < num_chars:
        words = " ".join(rng.choices(known, k=rng.randint(6, 18)))
        out.append(words.capitalize() + rng.choice((". ", ". ", ".\n", ".\n\n- ")))
        size += len(out[-1])
    return "".join(out)


@dataclass(frozen=True)
class Prompt:
    """What an agent says before the first question: `size` characters, a part of them in tools."""

    size: int
    num_tools: int

    @cached_property
    def system(self) -> str:
        return "You help with programs in a terminal.\n" + prose(self.size * 4 // 10, seed=self.size)

    @cached_property
    def functions(self) -> dict[str, Any]:
        """Descriptions and schemas, by name."""
        names = ["Read", "Edit", "Bash", *(f"Task{number}" for number in range(self.num_tools - 3))]
        share = self.size * 6 // 10 // self.num_tools - 500  # what schemas have beside their descriptions
        return {
            name: (prose(share * 7 // 10, seed), self._schema(name, share // 10)) for seed, name in enumerate(names)
        }

    def _schema(self, name: str, num_chars: int) -> dict[str, Any]:
        keys = {"Edit": ("path", "old", "new"), "Bash": ("command", "reason")}.get(name, ("path", "reason"))
        texts = {key: {"type": "string", "description": prose(num_chars, seed)} for seed, key in enumerate(keys)}
        number = {"type": "number", "default": 120_000, "description": prose(num_chars, 9)}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {**texts, "timeout": number},
            "required": [keys[0]],
            "additionalProperties": False,
        }


SMALL = Prompt(6_000, 9)
CLAUDE_CODE, CODEX, OPENCODE = Prompt(76_000, 24), Prompt(39_000, 12), Prompt(31_000, 11)


def write_model(target: Path, template: str) -> None:
    """Write a tiny model that has a token for each of the words, and this chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([prose(100_000, 0), template], trainer)
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    config = replace(TINY, bos_token_id=ids["<s>"], eos_token_id=(ids["<|im_end|>"],), vocab_size=VOCABULARY)
    write_random(target, config)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = '{"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": true}'
    (target / "tokenizer_config.json").write_text(settings)
    (target / "chat_template.jinja").write_text(template)
