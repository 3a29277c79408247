"""Many conversations in turn, with the server's defaults: each continues from the cache as if it were alone."""

import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sala.checkpoint.random import TINY, cut_layers, write_random
from sala.cli import run
from tests.server.conftest import Server

WORDS = ["a", "on", "we", "so", "far", "old", "new", "and", "the", "map", "key", "ink", "oak", "sea"]
NUM_TURNS = 4


def converse(server: Server, count: int, seed: int) -> float:
    """Hold `count` conversations, one turn of each at a time; return the share of prompt tokens that were cached."""
    rng = random.Random(seed)
    talks = [[{"role": "user", "content": " ".join(rng.choices(WORDS, k=300))}] for _ in range(count)]
    cached = total = 0
    with server.client() as client:
        for _ in range(NUM_TURNS):
            for messages in talks:
                body = {"messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
                answer = client.post("/v1/chat/completions", json=body).json()
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                total += answer["usage"]["prompt_tokens"]
                question = {"role": "user", "content": " ".join(rng.choices(WORDS, k=6))}
                messages += [answer["choices"][0]["message"], question]
    return cached / total


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, one of each kind: there is much to read."""
    path = tmp_path_factory.mktemp("models") / "small"
    write_random(path, cut_layers(TINY, 2))
    return path


@pytest.mark.parametrize("count", [8, 32, 128])
def test_conversations_do_not_push_each_other_out(count: int, small: Path, make_server: Callable[..., Server]) -> None:
    server = make_server(small, ctx=None)
    alone = converse(server, 1, seed=1)
    assert alone > 0.6
    assert converse(server, count, seed=2) >= 0.95 * alone
    with server.client() as client:
        text = client.get("/metrics").text
        (card,) = [card for card in client.get("/v1/models").json()["data"] if card["loaded"]]
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    tokens = dict.fromkeys(("sala_prefix_hit_tokens_total", "sala_prefix_missed_tokens_total"), 0.0)
    for sample in samples:
        if sample.name in tokens:
            tokens[sample.name] += sample.value
            assert sample.value == 0 or sample.labels.get("tier") == "device" or sample.labels.get("cause") == "new"
    hit, missed = tokens.values()
    found = {sample.name: sample.value for sample in samples if not sample.labels}
    assert (hit, hit + missed) == (found["sala_cached_tokens_total"], found["sala_prompt_tokens_total"])
    assert card["cache"]["hit_rate"] == hit / (hit + missed)
    assert 0 < card["cache"]["tiers"]["device"]["used_bytes"] < card["cache"]["tiers"]["device"]["size_bytes"]


def test_tiers_of_a_server(
    make_server: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversations that leave the device come back from host memory, and after a restart from disk."""
    tiers = {"snapshots": 2, "max_batch": 1, "cache_ram": 32 << 20, "cache_dir": tmp_path / "cache"}
    server = make_server(**tiers)
    alone = converse(make_server(), 1, seed=3)
    assert converse(server, 6, seed=4) >= 0.9 * alone
    server.stop()
    again = make_server(**tiers)
    converse(again, 6, seed=4)
    with again.client() as client:
        text = client.get("/metrics").text
    assert run(["ps", "--url", again.url]) == 0
    hit = {
        sample.labels["tier"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sala_prefix_hit_tokens_total"
    }
    assert hit["host"] > 0 < hit["disk"]
    assert "of 32.0 MiB" in capsys.readouterr().out
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in (tmp_path / "cache").iterdir())
