"""Adapters named in requests, through the server: who answers, what is listed, and what is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sala.errors import InputError
from sala.llm import LLM
from sala.server.settings import Settings
from tests.server.conftest import Server, wait_for
from tests.server.test_batches import begin, connect, line, read, wait_over
from tests.unit.test_adapter import write_adapter

ASK = {"prompt": "Where does the river end?", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "facts"
    write_adapter(path, lora_alpha=40)
    return path


def test_requests_name_adapters(make_server: Callable[..., Server], tiny: Path, facts: Path) -> None:
    server = make_server(adapter=(f"facts={facts}",), alias=("me",))
    base = server.app.state.runtime.default_id

    def ask(model: str | None, **more: Any) -> Any:
        return server.post("/v1/completions", {**ASK, **more, **({} if model is None else {"model": model})}).json()

    with LLM(tiny, device="cpu", ctx=2048, adapter=facts) as own:
        wanted = own.generate(ASK["prompt"], temperature=0, max_tokens=16, ignore_eos=True).text
        scores = [one.logprob for one in own.score(ASK["prompt"])]
    plain = ask(None)["choices"][0]["text"]
    assert plain != wanted
    for name in ("facts", f"{base}:facts", "me:facts"):
        answer = ask(name)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, wanted)
    for name in (base, "me"):
        assert ask(name)["choices"][0]["text"] == plain
    scored = ask("facts", echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"]
    assert scored[1:] == pytest.approx(scores, abs=1e-3)
    answers = []
    for more in ({"model": "facts"}, {"model": "facts", "background": True}, {}):
        body = {"input": "Who?", "max_output_tokens": 8, "temperature": 0, **more}
        path = f"/v1/responses/{server.post('/v1/responses', body).json()['id']}"
        with server.client() as client:
            wait_for(lambda: client.get(path).json().get("usage"))  # noqa: B023
            answers.append(client.get(path).json()["output"][0]["content"])
    assert answers[0] == answers[1] != answers[2]
    for name in ("other", f"{base}:other", "nothing:facts", ":other"):
        assert ask(name)["error"]["code"] == "model_not_found"
    with server.client() as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert cards[f"{base}:facts"]["parent"] == cards[f"{base}:facts"]["root"] == base
        for name in ("facts", f"{base}:facts"):
            assert client.get(f"/v1/models/{name}").json() == cards[f"{base}:facts"]
        assert client.get(f"/v1/models/{base}:other").status_code == 404


def test_a_batch_names_adapters(make_server: Callable[..., Server], facts: Path) -> None:
    server = make_server(adapter=(f"facts={facts}",))
    client = connect(server)
    prompt = "The same long beginning of both. " * 12
    lines = [
        line(name, prompt, model=model, max_tokens=8) for name, model in (("a", "facts"), ("b", None), ("c", "facts"))
    ]
    answers = read(client, wait_over(client, begin(client, lines)).output_file_id)
    assert answers["a"]["choices"] == answers["c"]["choices"] != answers["b"]["choices"]
    assert {name: body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for name, body in answers.items()} == {
        "a": False, "b": False, "c": True,
    }  # fmt: skip


def test_other_models_do_not_get_them(make_server: Callable[..., Server], tiny: Path, facts: Path) -> None:
    server = make_server(adapter=(str(facts), f"facts={facts}"))
    assert (server.llm.adapter, list(server.llm.adapters)) == (facts, ["facts"])
    shutil.copytree(tiny, server.app.state.library.directory / "another")
    answer = server.post("/v1/completions", {**ASK, "model": "another"})
    assert answer.json()["model"] == "another"
    (model,) = server.app.state.runtime.loaded.values()
    assert (model.llm.adapter, model.llm.adapters) == (None, {})
    with pytest.raises(InputError, match="alias"):
        Settings(adapter=(f"me={facts}",), alias=("me",))
