"""Stored responses, driven by OpenAI's own client: followed, listed, counted, deleted, cancelled, kept on disk."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from sala.errors import InputError, SalaError
from sala.server.api import records
from sala.server.api.items import keep_items
from sala.server.api.records import ItemList, NotStored
from sala.server.api.responses import ResponseRequest, check_self_contained
from sala.server.api.store import ResponseStore
from sala.server.http.keys import owner_of
from tests.server.conftest import Puppet, Server, wait_for

BASE: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
NONE = ItemList.of([])
ONE, TWO = "1" * 24, "2" * 24


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def texts(items: Any) -> list[str]:
    return [part.text for item in items if item.type == "message" for part in item.content]


def test_a_response_can_be_followed(server: Server, client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("I am Bob.")
    first = client.responses.create(**BASE, input="who are you?", instructions="be brief", top_p=0.5)
    say("I said Bob.")
    second = client.responses.create(**BASE, input="again?", previous_response_id=first.id)
    assert (second.previous_response_id, second.output_text, second.store) == (first.id, "I said Bob.", True)
    whole = [
        {"role": "user", "content": "who are you?"},
        *first.to_dict()["output"],
        {"role": "user", "content": "again?"},
    ]
    plain = client.responses.create(**BASE, input=whole, store=False)  # instructions are not carried over
    assert second.usage.input_tokens == plain.usage.input_tokens
    counted = client.responses.input_tokens.count(model="tiny", input="again?", previous_response_id=first.id)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", plain.usage.input_tokens)
    assert client.responses.retrieve(second.id) == second
    items = client.responses.input_items.list(second.id, order="asc").data
    assert texts(items) == ["who are you?", "I am Bob.", "again?"]
    page = client.responses.input_items.list(second.id, limit=2)
    assert (texts(page.data), page.has_more) == (["again?", "I am Bob."], True)
    assert texts(page.get_next_page().data) == ["who are you?"]
    reference: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "x"}]
    assert client.responses.create(**BASE, input=reference).status == "completed"
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(**BASE, input="and now?", previous_response_id=second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.retrieve(plain.id)
    assert (error.value.code, error.value.param) == ("response_not_found", "response_id")


def test_a_stream_is_stored_too(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("yes")
    with client.responses.stream(**BASE, input="hello") as stream:
        final = stream.get_final_response()
    stored = client.responses.retrieve(final.id)
    assert (stored.output_text, stored.status) == ("yes", "completed")


def test_logprobs(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("<think>hm</think>yes")
    wanted: Any = {**BASE, "max_output_tokens": 50, "input": "hello", "top_logprobs": 2, "store": False}
    wanted["include"] = ["message.output_text.logprobs"]
    part: Any = client.responses.create(**wanted).output[-1].content[0]
    assert "".join(one.token for one in part.logprobs) == part.text == "yes"
    assert [len(one.top_logprobs) for one in part.logprobs][-3:] == [2, 2, 2]
    assert part.logprobs[-1].bytes == [ord("s")]
    events = [event for event in client.responses.create(**wanted, stream=True) if hasattr(event, "logprobs")]
    told = "".join(one.token for event in events[:-1] for one in event.logprobs)
    assert told == "".join(one.token for one in events[-1].logprobs) == "".join(one.token for one in part.logprobs)
    del wanted["top_logprobs"], wanted["include"]
    assert client.responses.create(**wanted).output[-1].content[0].logprobs == []


def test_sampling_fields(client: openai.OpenAI) -> None:
    more = {
        "seed": 7,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    hot = {**BASE, "temperature": 2, "input": "hello", "store": False, "extra_body": more}
    assert client.responses.create(**hot).output_text == client.responses.create(**hot).output_text
    only = {"logit_bias": {str(ord("a")): 100}, "stop": "aaa", "ignore_eos": True}
    assert client.responses.create(**{**hot, "extra_body": only}).output_text == ""
    reasoning: Any = {"effort": "low", "summary": "detailed"}
    answer = client.responses.create(**BASE, input="hello", reasoning=reasoning)
    assert answer.reasoning is not None
    assert answer.reasoning.summary == "detailed"


def test_the_oldest_turns_are_left_out(client: openai.OpenAI) -> None:
    items: Any = [{"role": "system", "content": "be brief"}]
    for number in range(8):
        items.append({"role": "user", "content": f"{number}" * 500})
        items.append({"role": "assistant", "content": "ok"})
    items[-1] = {"role": "user", "content": "the last"}
    answer = client.responses.create(**BASE, input=items, truncation="auto")
    kept = [items[0], *items[-4:]]
    assert answer.truncation == "auto"
    counted = client.responses.input_tokens.count(input=items, truncation="auto", extra_body={"max_output_tokens": 12})
    assert answer.usage is not None
    assert 1500 < answer.usage.input_tokens == counted.input_tokens <= 2048 - 12
    assert answer.usage.input_tokens > client.responses.input_tokens.count(input=kept).input_tokens
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(**BASE, input=items)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(**BASE, input="x" * 3000, truncation="auto")


def test_in_the_background(server: Server, client: openai.OpenAI, puppet: Puppet) -> None:
    puppet.delay_s = 0.05
    job = client.responses.create(**BASE, input="hello", background=True)
    assert (job.status, job.background, job.output) == ("queued", True, [])
    wait_for(lambda: client.responses.retrieve(job.id).status == "in_progress")
    puppet.delay_s = 0
    wait_for(lambda: client.responses.retrieve(job.id).status == "incomplete")  # max_output_tokens
    done = client.responses.retrieve(job.id)
    assert len(done.output_text) == 12
    assert client.responses.cancel(job.id) == done
    puppet.delay_s = 0.05
    long = client.responses.create(**{**BASE, "max_output_tokens": 1500}, input="hello", background=True)
    wait_for(lambda: client.responses.retrieve(long.id).output)
    assert [item.type for item in client.responses.input_items.list(long.id).data] == ["message"]
    cancelled = client.responses.cancel(long.id)
    assert cancelled.status == client.responses.retrieve(long.id).status == "cancelled"
    assert cancelled.output[-1].status == "incomplete"
    server.wait_idle()
    gone = client.responses.create(**{**BASE, "max_output_tokens": 1500}, input="hello", background=True)
    client.responses.delete(gone.id)
    server.wait_idle()
    puppet.delay_s, puppet.error = 0, RuntimeError("secret")
    failed = client.responses.create(**BASE, input="hello", background=True)
    wait_for(lambda: client.responses.retrieve(failed.id).status == "failed")
    error = client.responses.retrieve(failed.id).error
    assert error is not None
    assert "secret" not in error.message
    puppet.error = None
    plain = client.responses.create(**BASE, input="hello")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(plain.id)


def test_a_stream_in_the_background(server: Server, client: openai.OpenAI, puppet: Puppet) -> None:
    """The connection is lost after four events; the others are followed, then all of them are replayed."""
    puppet.delay_s = 0.02
    job = {**BASE, "input": "hello", "background": True, "stream": True}
    with client.responses.create(**job) as stream:
        first = [event for event, _ in zip(stream, range(4), strict=False)]
    kinds = [event.type for event in first]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in first[:3]] == ["queued", "queued", "in_progress"]
    number = first[0].response.id
    rest = [*client.responses.retrieve(number, stream=True, starting_after=3)]
    assert [event.sequence_number for event in rest] == [*range(4, 4 + len(rest))]
    final: Any = rest[-1]
    assert final.type == "response.incomplete"
    assert client.responses.retrieve(number) == final.response
    again = [*client.responses.retrieve(number, stream=True)]
    assert again == [*first, *rest]
    text = "".join(event.delta for event in again if event.type == "response.output_text.delta")
    assert text == final.response.output_text != ""
    assert [*client.responses.retrieve(number, stream=True, starting_after=9999)] == []
    plain = client.responses.create(**BASE, input="hello")
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(plain.id, stream=True)
    running = client.responses.create(**{**job, "stream": False})
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(running.id, stream=True)
    client.responses.delete(number)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(number, stream=True)


def test_a_stream_in_the_background_that_ends_early(server: Server, client: openai.OpenAI, puppet: Puppet) -> None:
    puppet.delay_s = 0.02
    job: Any = {**BASE, "max_output_tokens": 1500, "input": "hello", "background": True, "stream": True}
    kinds, number = [], ""
    for event in client.responses.create(**job):
        kinds.append(event.type)
        if event.type == "response.output_text.delta" and kinds.count(event.type) == 2:
            client.responses.cancel(number)
        number = event.response.id if event.type == "response.created" else number
    assert kinds[-1] == "response.output_text.delta"
    assert client.responses.retrieve(number).status == "cancelled"
    server.wait_idle()
    puppet.delay_s, puppet.error = 0, RuntimeError("secret")
    *_, last = client.responses.create(**job)
    assert last.type == "response.failed"
    assert "secret" not in str(last)
    puppet.error = None


def test_events_are_bounded(make_server: Callable[..., Server]) -> None:
    """The events of the oldest response make room; its follower is told so."""
    server = make_server(max_response_bytes=20_000)
    mine = client_of(server)
    job: Any = {**BASE, "input": "hello", "background": True, "stream": True}
    numbers = [next(iter([*mine.responses.create(**job)])).response.id for _ in range(3)]
    with pytest.raises(openai.BadRequestError, match="as long as its events are kept"):
        mine.responses.retrieve(numbers[0], stream=True)
    assert [*mine.responses.retrieve(numbers[2], stream=True)][-1].type == "response.incomplete"
    assert 0 < server.app.state.responses.num_event_bytes <= 20_000
    *_, last = mine.responses.create(**{**job, "max_output_tokens": 300})
    assert (last.type, last.code) == ("error", "events_dropped")
    wait_for(lambda: not server.app.state.responses.jobs)
    assert server.app.state.responses.num_event_bytes == 0


def test_keys_and_files(make_server: Callable[..., Server], tmp_path: Path) -> None:
    room = tmp_path / "responses"
    settings: Any = {"api_key": ONE, "admin_key": TWO, "response_store": room}
    server = make_server(**settings)
    mine, other = client_of(server, ONE), client_of(server, TWO)
    first = mine.responses.create(**BASE, input="hello")
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError):
        other.responses.create(**BASE, input="hello", previous_response_id=first.id)
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "wrong").responses.retrieve(first.id)
    server.stop()
    (file,) = room.iterdir()
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(room.stat().st_mode)) == (0o600, 0o700)
    assert ONE not in file.name
    (room / f".{file.name}.draft").write_text("{")  # of a server that was killed
    later = client_of(make_server(**settings), ONE)
    assert later.responses.retrieve(first.id) == first
    second = later.responses.create(**BASE, input="more", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    wait_for(lambda: len([*room.iterdir()]) == 2 and not [*room.glob(".*")])


def response(number: int, previous: str | None = None, text: str = "") -> dict[str, Any]:
    output = [{"id": f"msg_{number}", "text": text}]
    return {"id": f"resp_{number:032x}", "previous_response_id": previous, "output": output}


def test_the_store_is_bounded(tmp_path: Path) -> None:
    for directory in (None, tmp_path / "room"):
        store = ResponseStore(directory, 3000, 3)
        ids = [response(number)["id"] for number in range(6)]
        store.add("me", response(0), NONE)
        store.add("me", response(1, ids[0]), NONE)
        store.add("me", response(2), NONE)
        chain, num_bytes = store.find_chain("me", ids[1], 2000)
        assert (chain, 400 < num_bytes < 2000) == (ids[:2], True)
        items = [item for each in store.find_lists("me", chain) for some in each.parse() for item in some]
        assert [item["id"] for item in items] == ["msg_0", "msg_1"]
        store.add("me", response(3), NONE)  # the one that was used longest ago makes room: not the conversation
        with pytest.raises(NotStored):
            store.read_response("me", ids[2])
        with pytest.raises(InputError, match="more than 400 bytes"):
            store.find_chain("me", ids[1], 400)
        assert [*store.find_items("me", {"msg_0", "msg_3", "msg_9"}, 3000)] == ["msg_0", "msg_3"]
        assert store.find_items("you", {"msg_0"}, 3000) == {}
        assert store.add("me", response(4, text="x" * 2600), NONE)
        with pytest.raises(NotStored):
            store.read_response("me", ids[3])
        assert not store.add("me", response(5, text="x" * 3000), NONE)
        store.close()
        if directory is not None:
            assert [file.name for file in directory.iterdir()] == [f"{ids[4]}.me.json"]
            again = ResponseStore(directory, 3000, 3)
            assert [*again.find_items("me", ["msg_4"], 3000)] == ["msg_4"]
            (directory / f"{ids[4]}.me.json").write_text(json.dumps([1]))
            with pytest.raises(NotStored):
                again.read_response("me", ids[4])
            assert not [*directory.iterdir()]
            again.close()
    (tmp_path / "file").write_text("x")
    with pytest.raises(SalaError, match="--response-store"):
        ResponseStore(tmp_path / "file", 2000, 3)


def test_what_is_large_is_not_parsed_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a response, or single ones of its items, parses none of the others."""
    large = {**response(0, text="x" * 100_000), "background": True, "tools": ["y" * 100_000]}
    items = [{"id": f'in "{number}"\n', "numbers": [*range(20_000)]} for number in range(20)]
    for directory in (None, tmp_path / "room"):
        store = ResponseStore(directory, 1 << 24, 3)
        store.add("me", large, ItemList.of(items))
        if directory is not None:
            store.close()
            store = ResponseStore(directory, 1 << 24, 3)
        parsed: list[int] = []
        spy = SimpleNamespace(loads=lambda data, sizes=parsed: (sizes.append(len(data)), json.loads(data))[1])
        monkeypatch.setattr(records, "json", spy)
        assert json.loads(b"".join(store.read_response("me", large["id"]))) == large
        assert store.is_background("me", large["id"])
        _, source = store.find_input("me", large["id"])
        assert [json.loads(item) for item in source.read(7, 9)] == items[7:9]
        found = store.find_items("me", {"msg_0", items[3]["id"], "msg_1"}, 1 << 24)
        with pytest.raises(InputError, match="more than 9 bytes"):
            store.find_items("me", {"msg_0"}, 9)
        assert {number: json.loads(item) for number, item in found.items()} == {
            "msg_0": large["output"][0],
            items[3]["id"]: items[3],
        }
        assert sum(parsed) < 5000
        assert [item for some in source.parse() for item in some] == items
        assert sum(parsed) > 2_000_000
        store.close()


OLD = f"resp_{7:032x}"


@pytest.mark.parametrize("is_known", [True, False])
def test_responses_of_older_versions_can_be_read(
    make_server: Callable[..., Server], tmp_path: Path, is_known: bool
) -> None:
    """And are written as those of this version; what cannot be read of them is an error of the request."""
    fields = ResponseRequest.model_validate({"input": "old"})
    (item,) = keep_items(fields.items)
    items = [{"type": "web_search_call", "id": "ws_1", "status": "completed", "results": ["y"] * 100}, item]
    if not is_known:
        items += [{"type": "function_call", "id": "fc_1", "call_id": "c" * 5000, "name": "f", "arguments": "{}"}]
    kept = {"id": OLD, "previous_response_id": None, "background": False, "status": "completed", "output": []}
    file = tmp_path / f"{OLD}.{owner_of('')}.json"
    file.write_text(json.dumps({"response": kept, "input": items}, separators=(",", ":")))
    server = make_server(response_store=tmp_path, files_dir=tmp_path / "files")
    with server.client() as client:
        assert client.get(f"/v1/responses/{OLD}").json() == kept
        assert client.get(f"/v1/responses/{OLD}/input_items?order=asc").json()["data"] == items
        answer = client.post("/v1/responses", json={**BASE, "input": "new", "previous_response_id": OLD})
        assert answer.status_code == (200 if is_known else 400), answer.text
        reference = [{"type": "item_reference", "id": item["id"]}]
        assert client.post("/v1/responses", json={**BASE, "input": reference}).status_code == 200
    wait_for(lambda: file.read_bytes().startswith(b'{"sizes":['))
    written = json.loads(file.read_bytes())
    assert (written["response"], written["input"]) == (kept, items)


def test_what_openai_s_servers_ran_is_kept_without_results() -> None:
    """Such items and tools may be megabytes of what the model does not see."""
    large: Any = ["y" * 10_000] * 10
    items = [
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q", "sources": large}},
        {"type": "web_search_call", "id": large, "status": large, "action": {"type": "search", "query": "q" * 5000}},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": large[0]},
        {"type": "tool_search_call", "execution": "server", "call_id": "c", "arguments": {"a": large}},
        {"type": "tool_search_output", "execution": "server", "call_id": large, "tools": large},
        {"type": "message", "role": "user", "content": "x", "id": large, "other": large},
    ]
    tools = [{"type": "web_search", "filters": {"a": large}}, {"type": "function", "name": "f"}]
    body = ResponseRequest.model_validate({"input": items, "tools": tools, "client_metadata": {"a": large}})
    assert sum(len(one.model_dump_json()) for one in [*body.items, *(body.tools or ())]) < 3000
    kept = [*keep_items(body.items)]
    TypeAdapter(list[ResponseItem]).validate_python(kept)
    assert kept[0] == {**items[0], "status": "completed", "action": {"type": "search", "query": "q"}}
    assert [one["type"] for one in kept] == [one["type"] for one in items]
    assert (kept[2]["id"], kept[3]["call_id"], "call_id" in kept[4]) == ("ig_1", "c", False)


@pytest.mark.parametrize("is_followed", [False, True])
def test_bodies_of_responses_in_the_background_count_until_they_end(
    make_server: Callable[..., Server], is_followed: bool
) -> None:
    """So does what they follow. There is room left for requests whose clients wait."""
    server = make_server(max_body="64K")
    text = "x" * (48 << 10)
    large = {**BASE, "input": [{"role": "assistant", "content": text}, {"role": "user", "content": "x"}]}
    large["truncation"] = "auto"
    job: dict[str, Any] = {**large, "background": True, "max_output_tokens": 1500, "ignore_eos": True}
    with server.client() as client:
        if is_followed:
            stored = client.post("/v1/responses", json=large).json()["id"]
            job |= {"input": "x", "previous_response_id": stored}
        engine = server.llm.engine
        engine._executor = puppet = Puppet(engine._executor)
        puppet.delay_s = 0.05

        def start() -> httpx2.Response:
            return client.post("/v1/responses", json=job)

        jobs = [start() for _ in range(2)]
        assert [one.status_code for one in jobs] == [200, 200]
        late = start()
        assert (late.status_code, late.json()["error"]["code"]) == (503, "bodies_too_large")
        assert int(late.headers["retry-after"]) > 0
        assert client.post("/v1/responses", json=large).status_code == 200
        client.post(f"/v1/responses/{jobs[0].json()['id']}/cancel")
        jobs.append(start())
        assert jobs[-1].status_code == 200
        assert start().status_code == 503
        for one in jobs:
            client.delete(f"/v1/responses/{one.json()['id']}")
        assert start().status_code == 200


def test_what_references_stand_for_has_a_limit(make_server: Callable[..., Server]) -> None:
    server = make_server(max_body="64K")
    item = {"role": "assistant", "content": "x" * (40 << 10), "id": "msg_large"}
    large = {**BASE, "input": [item, {"role": "user", "content": "x"}], "truncation": "auto"}
    assert server.post("/v1/responses", large).status_code == 200
    reference = {"type": "item_reference", "id": "msg_large"}
    once = server.post("/v1/responses", {**large, "input": [reference, {"role": "user", "content": "x"}]})
    assert once.status_code == 200
    twice = server.post("/v1/responses", {**large, "input": [reference, reference, {"role": "user", "content": "x"}]})
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "input[1]")


def test_nothing_is_stored_if_the_server_must_not(make_server: Callable[..., Server]) -> None:
    client = client_of(make_server(max_responses=0))
    answer = client.responses.create(**BASE, input="hello")
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        client.responses.create(**BASE, input="hello", background=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
    ],
)
def test_a_batch_refuses_what_it_would_have_to_look_up(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="batch"):
        check_self_contained(ResponseRequest.model_validate({"input": "hello", **fields}))
