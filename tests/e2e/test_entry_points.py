"""The same requests through every entry point give the same text, finish reason and usage.

The model is a tiny random one whose answers are scripted where the request does not constrain them: an executor that
says the scripted tokens stands in front of the real one, wherever a model is loaded in this process.
"""

import asyncio
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sala.llm.base
from sala.cli import run as run_cli
from sala.engine.requests import Call
from sala.engine.stream import Completion, Event
from sala.lab.bench import measure
from sala.lab.eval.likelihood import Generation, HarnessModel
from sala.lab.eval.runner import answer as run_case
from sala.lab.eval.tasks.case import Case, Solution
from sala.llm import LLM, AsyncLLM
from sala.llm.documents import Documents
from sala.protocol import Sampling
from sala.server.batch import run_batch
from tests.server.conftest import END, Puppet, Server, join_calls, read_events, start
from tests.server.test_batches import begin, connect, read, wait_over

HELLO = [{"role": "user", "content": "hello"}]
TURNS = [*HELLO, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "What now?"}]
CALL = '<function name="f"><param name="x">1</param></function>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Query:
    """A request, what the model says, and what must come out of it; without a script the request decides."""

    script: str | None = None
    wanted: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=lambda: HELLO)
    tools: list[dict[str, Any]] | None = None
    n: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{"temperature": 0, "max_tokens": 300, **self.settings})

    @property
    def call(self) -> Call:
        return Call("key", self.sampling, messages=self.messages, tools=self.tools, n=self.n)

    def body(self, **more: Any) -> dict[str, Any]:
        """The request as OpenAI's interface has it."""
        body: dict[str, Any] = {"messages": self.messages, "temperature": 0, "max_tokens": 300, **self.settings, **more}
        if self.tools:
            body["tools"] = self.tools
        if self.n > 1:
            body["n"] = self.n
        if schema := body.pop("json_schema", None):
            named = {"name": "a", "schema": json.loads(schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body


LOOKS_LIKE_A_CALL = f"Use {CALL} here."
QUERIES = {
    "plain": Query("Hello there.", {"text": "Hello there.", "finish_reason": "stop"}),
    "two turns": Query("Well.", {"text": "Well.", "finish_reason": "stop"}, messages=TURNS),
    "tool-like text": Query(LOOKS_LIKE_A_CALL, {"text": LOOKS_LIKE_A_CALL, "finish_reason": "stop", "calls": ()}),
    "a call": Query(
        f"So.\n{CALL}",
        {"text": "So.", "finish_reason": "tool_calls", "calls": (("f", '{"x": 1}'),)},
        tools=TOOLS,
    ),
    "tools and no call": Query("Nothing to do.", {"text": "Nothing to do.", "finish_reason": "stop"}, tools=TOOLS),
    "stop string": Query("one STOP two", {"text": "one ", "finish_reason": "stop"}, settings={"stop": ["STOP"]}),
    "cut": Query("far too long", {"text": "far t", "finish_reason": "length"}, settings={"max_tokens": 5}),
    "reasoning": Query("<think>\nhmm\n</think>\n\nYes.", {"text": "Yes.", "reasoning": "hmm", "finish_reason": "stop"}),
    "reasoning about a call": Query(
        f"<think>\n{CALL}\n</think>\n\n{CALL}", {"text": CALL, "reasoning": CALL, "finish_reason": "stop"}
    ),
    "schema": Query(None, {"finish_reason": "stop"}, settings={"json_schema": json.dumps(SCHEMA)}),
    "several": Query(None, {"finish_reason": "length"}, n=3, settings={"temperature": 1, "seed": 5, "max_tokens": 6}),
}


class Speaker(Puppet):
    """Says the same script wherever a model is loaded."""

    tokens: list[int] | None = None

    def run(self, plan: Any) -> Any:
        self.script = Speaker.tokens
        return super().run(plan)


@pytest.fixture(scope="module", autouse=True)
def speakers() -> Iterator[None]:
    real = sala.llm.base.open_executor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sala.llm.base, "open_executor", lambda *arguments: Speaker(real(*arguments)))
        yield


@pytest.fixture(scope="module")
def llm(tiny: Path, speakers: None) -> LLM:
    return LLM(tiny, device="cpu", ctx=2048)


@pytest.fixture(scope="module")
def server(tiny: Path, speakers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    out = start(tiny, tmp_path_factory.mktemp("models"))
    yield out
    out.stop()


def say(text: str | None) -> None:
    Speaker.tokens = None if text is None else [*text.encode(), END]


def from_completion(done: Completion) -> Answer:
    calls = tuple((call.name, json.dumps(call.arguments)) for call in done.tool_calls)
    usage = done.usage
    return Answer(done.text, done.finish_reason, usage.prompt_tokens, usage.completion_tokens, done.reasoning, calls)


def from_events(events: list[Event]) -> Answer:
    """What a reader of a stream has seen, which must be what the completion says."""
    done = events[-1].completion
    assert done is not None
    calls = [event.delta.tool_call for event in events if event.delta.tool_call is not None]
    text = "".join(event.text for event in events)
    assert "".join(event.delta.reasoning for event in events) == done.reasoning
    assert calls == done.tool_calls
    assert (text.rstrip("\n") if calls else text) == done.text
    assert [token for event in events for token in event.token_ids] == done.token_ids
    return from_completion(done)


def from_body(body: dict[str, Any], num_answers: int) -> list[Answer]:
    """Usage is that of all answers together, so it is compared as a whole."""
    answers = []
    for choice in body["choices"]:
        message = choice["message"]
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        answers.append(
            Answer(
                message["content"] or "",
                choice["finish_reason"],
                body["usage"]["prompt_tokens"],
                body["usage"]["completion_tokens"],
                message.get("reasoning_content") or "",
                tuple((call["name"], call["arguments"]) for call in calls),
            )
        )
    assert len(answers) == num_answers
    return answers


def from_chunks(chunks: list[dict[str, Any]], num_answers: int) -> list[Answer]:
    assert chunks[-1] == "[DONE]"
    usage = next(chunk["usage"] for chunk in chunks[:-1] if chunk.get("usage"))
    out = [Answer("", "", usage["prompt_tokens"], usage["completion_tokens"]) for _ in range(num_answers)]
    for choice in (choice for chunk in chunks[:-1] for choice in chunk["choices"]):
        at, delta = choice["index"], choice["delta"]
        out[at] = replace(
            out[at],
            text=out[at].text + (delta.get("content") or ""),
            reasoning=out[at].reasoning + (delta.get("reasoning_content") or ""),
            finish_reason=choice["finish_reason"] or out[at].finish_reason,
        )
    for at, one in enumerate(out):
        own = [[choice for choice in chunk["choices"] if choice["index"] == at] for chunk in chunks[:-1]]
        calls = [call["function"] for call in join_calls([{"choices": choices} for choices in own])]
        out[at] = replace(one, calls=tuple((call["name"], call["arguments"]) for call in calls))
    return out


def from_json(found: dict[str, Any]) -> Answer:
    """What a command writes with --json."""
    usage, calls = found["usage"], tuple(found["tool_calls"])
    return Answer(
        found["text"], found["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"], found["reasoning"],
        calls,
    )  # fmt: skip


def summed(answers: list[Answer]) -> list[Answer]:
    """With the usage of all of them in each, as the server counts."""
    total = sum(one.completion_tokens for one in answers)
    return [replace(one, completion_tokens=total) for one in answers]


def ask_async(path: Path, work: Callable[[AsyncLLM], Any]) -> Any:
    async def whole() -> Any:
        async with AsyncLLM(path, device="cpu", ctx=2048) as model:
            return await work(model)

    return asyncio.run(whole())


@pytest.fixture(params=QUERIES, ids=[name.replace(" ", "_") for name in QUERIES])
def query(request: pytest.FixtureRequest) -> Iterator[Query]:
    query = QUERIES[request.param]
    say(query.script)
    yield query
    say(None)


@pytest.fixture
def wanted(llm: LLM, query: Query) -> list[Answer]:
    """The answers, straight from the service; and they are the right ones."""
    with llm.service.submit(llm.inputs.submit(query.call)) as stream:
        events = [item for item in stream if isinstance(item, Event)]
    answers = [from_events([event for event in events if event.index == index]) for index in range(query.n)]
    for answer in answers:
        for name, value in query.wanted.items():
            assert getattr(answer, name) == value
    if "json_schema" in query.settings:
        assert isinstance(json.loads(answers[0].text)["a"], bool)
    return answers


def test_llm(llm: LLM, query: Query, wanted: list[Answer]) -> None:
    assert {from_completion(one) for _, one in llm.many([query.call])} == set(wanted)  # type: ignore[arg-type]
    if query.n == 1:
        settings = {"tools": query.tools, "sampling": query.sampling}
        assert from_completion(llm.chat(query.messages, **settings)) == wanted[0]
        assert from_events(list(llm.stream_chat(query.messages, **settings))) == wanted[0]
        assert from_completion(llm.answer(query.call)) == wanted[0]


def test_async_llm(tiny: Path, query: Query, wanted: list[Answer]) -> None:
    settings = {"tools": query.tools, "sampling": query.sampling}

    async def work(model: AsyncLLM) -> None:
        found = [one async for _, one in model.many([query.call])]
        assert {from_completion(one) for one in found} == set(wanted)  # type: ignore[arg-type]
        if query.n == 1:
            assert from_completion(await model.chat(query.messages, **settings)) == wanted[0]
            events = [event async for event in model.stream_chat(query.messages, **settings)]
            assert from_events(events) == wanted[0]

    ask_async(tiny, work)


def test_http(server: Server, query: Query, wanted: list[Answer]) -> None:
    whole = server.post("/v1/chat/completions", query.body()).json()
    assert from_body(whole, query.n) == summed(wanted)
    body = query.body(stream=True, stream_options={"include_usage": True})
    chunks = read_events(server.post("/v1/chat/completions", body).text)
    assert from_chunks(chunks, query.n) == summed(wanted)


def test_responses_interface(server: Server, query: Query, wanted: list[Answer]) -> None:
    if query.n > 1:
        pytest.skip("this interface has one answer per request")
    sampling, tools = query.sampling, [one["function"] for one in query.tools or ()]
    body: dict[str, Any] = {"input": query.messages, "max_output_tokens": sampling.max_tokens, "temperature": 0}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.json_schema:
        body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": json.loads(sampling.json_schema)}}
    reply = server.post("/v1/responses", {**body, "tools": [{"type": "function", **one} for one in tools]}).json()
    parts = {kind: [item for item in reply["output"] if item["type"] == kind] for kind in ("message", "reasoning")}
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    is_cut = reply["status"] == "incomplete"
    assert is_cut == ((reply["incomplete_details"] or {}).get("reason") == "max_output_tokens")
    found = Answer(
        "".join(part["text"] for item in parts["message"] for part in item["content"]),
        "length" if is_cut else "tool_calls" if calls else "stop",  # the interface has no other word for an end
        reply["usage"]["input_tokens"],
        reply["usage"]["output_tokens"],
        "".join(part["text"] for item in parts["reasoning"] for part in item["content"]),
        tuple((call["name"], call["arguments"]) for call in calls),
    )
    assert found == wanted[0]


def test_messages_interface(server: Server, query: Query, wanted: list[Answer]) -> None:
    if query.n > 1:
        pytest.skip("this interface has one answer per request")
    sampling, tools = query.sampling, [one["function"] for one in query.tools or ()]
    body: dict[str, Any] = {"messages": query.messages, "max_tokens": sampling.max_tokens, "temperature": 0}
    if sampling.stop:
        body["stop_sequences"] = list(sampling.stop)
    if sampling.json_schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": json.loads(sampling.json_schema)}}
    if tools:
        body["tools"] = [
            {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in tools
        ]
    reply = server.post("/v1/messages", {**body, "model": "tiny"}).json()
    parts = {kind: [part for part in reply["content"] if part["type"] == kind] for kind in ("text", "thinking")}
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    assert (reply["stop_reason"] == "stop_sequence") == bool(sampling.stop)
    usage = reply["usage"]
    found = Answer(
        "".join(part["text"] for part in parts["text"]),
        reasons[reply["stop_reason"]],
        usage["input_tokens"] + usage["cache_read_input_tokens"],
        usage["output_tokens"],
        "".join(part["thinking"] for part in parts["thinking"]),
        tuple((part["name"], json.dumps(part["input"])) for part in reply["content"] if part["type"] == "tool_use"),
    )
    assert found == wanted[0]


def test_batches_over_http(server: Server, query: Query, wanted: list[Answer]) -> None:
    client, url = connect(server), "/v1/chat/completions"
    done = wait_over(
        client, begin(client, [{"custom_id": "1", "method": "POST", "url": url, "body": query.body()}], url)
    )
    assert (done.status, done.request_counts.completed, done.error_file_id) == ("completed", 1, None)
    assert from_body(read(client, done.output_file_id)["1"], query.n) == summed(wanted)


def test_batch(llm: LLM, query: Query, wanted: list[Answer], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"custom_id": "1", "url": "/v1/chat/completions", "body": query.body()}))
    tally = run_batch(llm, source, target)
    line = json.loads(target.read_text())
    assert (tally.done, line["error"]) == (1, None)
    assert line["response"]["body"]["model"] == llm.path.name
    assert from_body(line["response"]["body"], query.n) == summed(wanted)


def test_command_line(
    tiny: Path,
    query: Query,
    wanted: list[Answer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if query.n > 1 or query.tools or len(query.messages) > 1:
        pytest.skip("the command line cannot ask for it")
    flags = ["-m", str(tiny), "--device", "cpu", "--ctx", "2048", "-t", "0"]
    flags += ["-n", str(query.sampling.max_tokens)]
    for stop in query.sampling.stop:
        flags += ["--stop", stop]
    schema = ["--schema", query.sampling.json_schema] if query.sampling.json_schema else []
    prompt = query.messages[0]["content"]
    capsys.readouterr()
    assert run_cli(["generate", prompt, "--json", *flags, *schema]) == 0
    assert [from_json(json.loads(capsys.readouterr().out))] == wanted
    if not schema:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{prompt}\n"))
        assert run_cli(["chat", *flags]) == 0
        out = capsys.readouterr()
        assert out.out.strip().endswith(wanted[0].text.strip())
        assert f"answer {wanted[0].completion_tokens} tokens" in out.err


def test_questions_about_files(
    llm: LLM, tiny: Path, query: Query, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sala ask` and `ask` in Python give the answer of the request that has the file attached."""
    if query.n > 1 or query.tools or len(query.messages) > 1:
        pytest.skip("questions about files cannot ask for it")
    file, question = tmp_path / "notes.txt", query.messages[0]["content"]
    file.write_text("The meeting is on Tuesday.\n")
    prepared = Documents.read(llm, file).prepare(question, query.sampling)
    with llm.service.submit(llm.inputs.submit(prepared.call)) as stream:
        wanted = from_events([item for item in stream if isinstance(item, Event)])
    for name, value in query.wanted.items():
        assert getattr(wanted, name) == value
    assert wanted.prompt_tokens > len(file.read_text())  # a token of this tokenizer is a byte
    assert from_completion(llm.ask(file, question, query.sampling).completion) == wanted
    again = ask_async(tiny, lambda model: model.ask(file, question, query.sampling))
    assert from_completion(again.completion) == wanted
    flags = ["-m", str(tiny), "--device", "cpu", "--ctx", "2048", "-t", "0", "-n", str(query.sampling.max_tokens)]
    flags += [flag for stop in query.sampling.stop for flag in ("--stop", stop)]
    flags += ["--schema", query.sampling.json_schema] if query.sampling.json_schema else []
    capsys.readouterr()
    assert run_cli(["ask", str(file), question, "--json", "--no-keep", *flags]) == 0
    assert from_json(json.loads(capsys.readouterr().out)) == wanted


def test_evaluation(llm: LLM, query: Query, wanted: list[Answer]) -> None:
    """The lm-eval adapter's object and the runner take a rendered conversation."""
    if query.n > 1 or query.tools:
        pytest.skip("evaluations ask for one answer, and offer no tools")
    harness = HarnessModel(llm)
    harness.is_chat = True
    text = llm.tokenizer.render_chat(query.messages, add_generation_prompt=True)
    assert harness.generate([Generation(text, query.sampling)]) == [wanted[0].text]
    if not query.sampling.stop and not query.sampling.is_constrained:  # a case says how long its answer may be
        ids = np.array(llm.encode_chat(query.messages))
        done = run_case(llm, Case(ids, "", query.sampling.max_tokens, Solution(("",))))
        whole = query.script if wanted[0].reasoning else wanted[0].text  # a case is scored with its reasoning
        assert from_completion(done) == replace(wanted[0], text=whole, reasoning="")


# Prompts that are not conversations: text goes through as it is.

RAW = {
    "plain": Query("Hello there.", {"text": "Hello there.", "finish_reason": "stop"}),
    "tool-like text": Query(LOOKS_LIKE_A_CALL, {"text": LOOKS_LIKE_A_CALL, "finish_reason": "stop"}),
    "reasoning": Query("<think>hm</think>Yes.", {"text": "<think>hm</think>Yes.", "finish_reason": "stop"}),
    "stop string": Query("one STOP two", {"text": "one ", "finish_reason": "stop"}, settings={"stop": ["STOP"]}),
    "several": Query(None, {"finish_reason": "length"}, n=3, settings={"temperature": 1, "seed": 5, "max_tokens": 6}),
}


@pytest.mark.parametrize("name", RAW)
def test_raw_prompts(
    name: str, llm: LLM, server: Server, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query = RAW[name]
    say(query.script)
    try:
        done = llm.generate("once", query.sampling, n=query.n)
        wanted = [from_completion(one) for one in (done if query.n > 1 else [done])]
        for answer in wanted:
            for key, value in query.wanted.items():
                assert getattr(answer, key) == value
        again = ask_async(tiny, lambda model: model.generate("once", query.sampling, n=query.n))
        assert [from_completion(one) for one in (again if query.n > 1 else [again])] == wanted
        _check_completions(server, query, wanted)
        if query.n == 1:
            assert from_events(list(llm.stream("once", query.sampling))) == wanted[0]
            assert HarnessModel(llm).generate([Generation("once", query.sampling)]) == [wanted[0].text]
            source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
            body = {**query.body(), "prompt": "once"}
            del body["messages"]
            source.write_text(json.dumps({"custom_id": "1", "url": "/v1/completions", "body": body}))
            run_batch(llm, source, target)
            reply = json.loads(target.read_text())["response"]["body"]
            assert reply["choices"][0]["text"] == wanted[0].text
            flags = ["-m", str(tiny), "--device", "cpu", "-t", "0", "-n", "300"]
            flags += [flag for stop in query.sampling.stop for flag in ("--stop", stop)]
            capsys.readouterr()
            assert run_cli(["generate", "once", "--raw", "--json", *flags]) == 0
            assert json.loads(capsys.readouterr().out)["text"] == wanted[0].text
    finally:
        say(None)


def _check_completions(server: Server, query: Query, wanted: list[Answer]) -> None:
    body = query.body(prompt="once")
    del body["messages"]
    whole = server.post("/v1/completions", body).json()
    found = [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]]
    assert found == [(one.text, one.finish_reason) for one in wanted]
    total = sum(one.completion_tokens for one in wanted)
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (wanted[0].prompt_tokens, total)
    chunks = read_events(server.post("/v1/completions", {**body, "stream": True}).text)
    texts = [""] * query.n
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [one.text for one in wanted]


def test_bench_counts_what_the_model_samples(llm: LLM) -> None:
    import torch

    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    done = llm.generate(prompts, temperature=0, max_tokens=6, ignore_eos=True)
    figures = measure.run(llm.service, prompts, 6, torch.device("cpu"))
    llm.service.observe()
    total = sum(one.usage.completion_tokens for one in done)
    assert figures.num_decoded in range(total - 2 * len(prompts), total - len(prompts) + 1)
