"""Requests that choose how the sparse layers attend, in every API, where the server allows it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sala.llm import LLM
from tests.server.conftest import Server

TEXT = " ".join(f"{number} is a number." for number in range(80))
HELLO = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
}


def test_a_server_allows_it_or_not(make_server: Callable[..., Server], tiny: Path) -> None:
    server = make_server()
    for url, body in BODIES.items():
        refused = server.post(url, {**body, "topk": 3})
        assert refused.status_code == 400
        assert "--attention-per-request" in refused.json()["error"]["message"]
    server = make_server(attention_per_request=True)
    for url, body in BODIES.items():
        answered = server.post(url, {**body, "attention": "sparse", "topk": 3})
        assert answered.status_code == 200, answered.text
        for wrong in ({"attention": "dense", "dense_below": 5}, {"topk": 0}, {"topk": 1}, {"attention": "some"}):
            assert server.post(url, {**body, **wrong}).status_code == 400, (url, wrong)
    with LLM(tiny, device="cpu", ctx=2048) as llm:
        for choice in ({}, {"attention": "sparse", "topk": 2}, {"attention": "dense"}):
            body = {**BODIES["/v1/completions"], "temperature": 0, "logprobs": 1, **choice}
            got = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["token_logprobs"]
            want = llm.generate(TEXT, temperature=0, max_tokens=4, logprobs=1, **choice).logprobs
            assert got == pytest.approx([one.logprob for one in want], abs=1e-4)
