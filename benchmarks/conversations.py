"""Share of prompt tokens taken from the cache when many conversations take turns, through `sala serve`.

    python benchmarks/conversations.py [--counts 8,32,128]

A server of the embedded model on a CPU, in a process of its own, for each number of conversations: with the default
options, and for comparison with 16 snapshots. Each conversation opens with 300 words of its own and has four turns; all
have their first turn, then all their second one, and so on, which is the worst order for a cache. Results go to
conversations.json beside this file.
"""

import argparse
import asyncio
import json
import random
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from sala.lab.bench.client import Endpoint
from sala.lab.bench.server import own_server

NUM_TURNS, NUM_WORDS, NUM_TOKENS = 4, 300, 2
WORDS = ["the", "river", "house", "green", "light", "under", "seven", "small", "stones", "garden", "paper", "window"]
MODES = {"default": [], "snapshots 16": ["--snapshots", "16"]}
Message = dict[str, str]


async def answer(server: Endpoint, messages: list[Message]) -> tuple[Message, int, int]:
    """Return the answer to a conversation, the tokens of its prompt, and how many of them were cached."""
    body = {"messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    response = await server.send("/chat/completions", json.dumps(body).encode())
    if response.status != 200:
        raise response.problem(server.url)
    found = json.loads(response.body)
    usage = found["usage"]
    message = found["choices"][0]["message"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"role": "assistant", "content": message["content"]}, usage["prompt_tokens"], cached


async def converse(server: Endpoint, count: int) -> float:
    """Hold `count` conversations in turn; return the share of prompt tokens that were cached."""
    rng = random.Random(count)
    talks = [[{"role": "user", "content": " ".join(rng.choices(WORDS, k=NUM_WORDS))}] for _ in range(count)]
    cached = total = 0
    for _ in range(NUM_TURNS):
        for messages in talks:
            message, prompt, found = await answer(server, messages)
            total, cached = total + prompt, cached + found
            messages += [message, {"role": "user", "content": " ".join(rng.choices(WORDS, k=6))}]
    return cached / total


async def counters(server: Endpoint) -> dict[str, float]:
    """Return how many snapshots the server keeps and has evicted, their bytes, and the bytes that they may take."""
    response = await Endpoint(server.url.removesuffix("/v1") + "/metrics").send("")
    families = text_string_to_metric_families(response.body.decode())
    found = {one.name: one.value for family in families for one in family.samples}  # there is one model and one tier
    names = {"snapshots": "cached", "evicted": "evicted_total", "bytes": "bytes", "limit_bytes": "limit_bytes"}
    return {key: int(found[f"sala_prefix_{name}"]) for key, name in names.items()}


async def measure(server: Endpoint, count: int) -> dict[str, float]:
    share = await converse(server, count)
    return {"conversations": count, "cached": round(share, 4), **await counters(server)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="8,32,128")
    counts = [int(count) for count in parser.parse_args().counts.split(",")]
    rows = {}
    for name, flags in MODES.items():
        rows[name] = {"flags": flags, "runs": []}
        for count in (1, *(counts if not flags else counts[:1])):
            with own_server(["--device", "cpu", *flags]) as (server, _, _):
                rows[name]["runs"].append(asyncio.run(measure(server, count)))
            print(name, json.dumps(rows[name]["runs"][-1]), flush=True)
    facts = {"turns": NUM_TURNS, "words": NUM_WORDS, "model": "smol-sala", "device": "cpu"}
    Path(__file__).with_suffix(".json").write_text(json.dumps(facts | rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
